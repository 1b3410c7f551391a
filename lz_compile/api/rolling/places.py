"""Places of a tensor that a step reads or writes: along which dimension, and where, as a function of what counts."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass

from lz_compile.api.rolling.syntax import (
    PREFIX,
    NotRolledError,
    is_ellipsis,
    is_named_call,
    is_none,
    is_simple,
    is_store,
    is_whole,
    loads,
    placed,
    support,
)


@dataclass(frozen=True)
class Counter:
    """A name that counts, by a ``range``; ``place`` is that among the loop's ranges."""

    name: str
    place: int


@dataclass
class Read:
    """What a step reads of a tensor: along one dimension, at a place or a slice of one that a counter gives, if it does."""

    base: ast.expr
    dim: int
    counter: Counter | None  # all of it in turn, where there is none
    place: ast.expr | None = None
    end: ast.expr | None = None
    under: ast.expr | None = None
    asked: tuple[tuple[int, bool], ...] = ()  # tests, and how they are answered where it is read


def is_place(node: ast.AST, counters: dict[str, Counter]) -> bool:
    """Whether it is a place of a name's, by something that counts."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return False
    return any(isinstance(each, ast.Name) and each.id in counters for each in ast.walk(node.slice))


def plain(body: list[ast.stmt], counters: dict[str, Counter], after: set[str]) -> list[ast.stmt]:
    """Statements that assign to one place at a time, and count by nothing but counters.

    ``a[t], b = f(x)`` is ``new, b = f(x); a[t] = new``; what reads ``k`` after ``k = t - 1`` reads ``t - 1``. Names that
    are read ``after`` the loop stay.
    """
    return _with_counters(_one_by_one(body, counters), counters, after)


def _one_by_one(body: list[ast.stmt], counters: dict[str, Counter]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            statement.body, statement.orelse = (
                _one_by_one(each, counters) for each in (statement.body, statement.orelse)
            )
        found.append(statement)
        if not isinstance(statement, ast.Assign):
            continue
        places: list[tuple[ast.expr, str]] = []
        is_one = len(statement.targets) == 1 and not isinstance(statement.targets[0], ast.Tuple)
        for owner in () if is_one else (statement.targets, *(_elements(each) for each in statement.targets)):
            for i, each in enumerate(owner):
                if is_place(each, counters):
                    name = f"{PREFIX}t{each.lineno}_{each.col_offset}"
                    owner[i] = ast.copy_location(ast.Name(name, ast.Store()), each)
                    places.append((each, name))
        found += [placed(ast.Assign([each], ast.Name(name, ast.Load())), each) for each, name in places]
    return found


def _elements(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, (ast.Tuple, ast.List)) else []


def _with_counters(body: list[ast.stmt], counters: dict[str, Counter], after: set[str]) -> list[ast.stmt]:
    every = [each for part in body for each in ast.walk(part) if isinstance(each, ast.Name)]
    changed = [each.id for each in every if is_store(each)]

    def meant(block: list[ast.stmt]) -> list[ast.stmt]:
        for i, statement in enumerate(block):
            if isinstance(statement, ast.If):
                statement.body, statement.orelse = meant(statement.body), meant(statement.orelse)
            if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
                continue
            (target,) = statement.targets
            if not isinstance(target, ast.Name) or changed.count(target.id) > 1:
                continue
            value, names = statement.value, loads(statement.value)
            (*counted,) = names & counters.keys()
            if len(counted) != 1 or names & {*changed} or isinstance(value, ast.Name) or not is_affine(value, *counted):
                continue
            later = Meant(target.id, value)
            rest = [later.visit(copy.deepcopy(each)) for each in block[i + 1 :]]
            if later.count == sum(each.id == target.id for each in every) - 1:
                block[i + 1 :] = rest
                block[i] = statement if target.id in after else ast.copy_location(ast.Pass(), statement)
        return block

    return meant(body)


class Meant(ast.NodeTransformer):
    """What a name stands for in its place."""

    def __init__(self, name: str, meant: ast.expr) -> None:
        self._name, self._meant, self.count = name, meant, 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """``k``."""
        is_it = node.id == self._name and not is_store(node)
        self.count += is_it
        return placed(copy.deepcopy(self._meant), node) if is_it else node


def place_of(node: ast.Subscript, counters: dict[str, Counter]) -> tuple[Read, list[ast.expr]]:
    """Along which dimension an index counts, and where, and what else it does.

    Raises:
        NotRolledError: it counts along several, or indexes by something else.
    """
    items = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    at = [i for i, each in enumerate(items) if loads(each) & counters.keys()]
    if len(at) != 1 or any(not is_simple(each) for i, each in enumerate(items) if i not in at):
        raise NotRolledError(f"what {ast.unparse(node)} reads is no slice along one dimension", node.lineno)
    (place,), item = at, items[at[0]]
    (name,) = loads(item) & counters.keys() if len(loads(item) & counters.keys()) == 1 else (None,)
    if name is None:
        raise NotRolledError(f"{ast.unparse(item)} counts by several names", node.lineno)
    in_front, behind = ([each for each in part if not is_none(each)] for part in (items[:place], items[place + 1 :]))
    if any(is_ellipsis(each) for each in in_front):
        dim = -len(behind) - 1
    else:
        dim = len(in_front)
    rest = [*items[:place], *items[place + 1 :]]
    ends = [each for each in ((item.lower, item.upper) if isinstance(item, ast.Slice) else (item,)) if each is not None]
    if not all(is_affine(each, name) for each in ends):
        raise NotRolledError(f"{ast.unparse(node)} reads places that are not evenly apart", node.lineno)
    if not isinstance(item, ast.Slice):
        return Read(node.value, dim, counters[name], item), rest
    if item.lower is None or item.upper is None or item.step is not None:
        raise NotRolledError(f"{ast.unparse(node)} reads more with every step", node.lineno)
    whole = ast.copy_location(ast.Slice(), item)
    return Read(node.value, dim, counters[name], item.lower, item.upper), [*items[:place], whole, *items[place + 1 :]]


def indexed(name: ast.expr, rest: list[ast.expr]) -> ast.expr:
    """A name for what was at a place, with what else an index does."""
    if all(map(is_whole, rest)):
        return name
    index = rest[0] if len(rest) == 1 else ast.Tuple(rest, ast.Load())
    return ast.copy_location(ast.Subscript(name, index, ast.Load()), name)


def is_affine(node: ast.expr, name: str) -> bool:
    """Whether an expression grows evenly with a name, as its syntax tells."""
    if name not in loads(node):
        return all(is_size(each) for each in ast.walk(node) if isinstance(each, ast.Call))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and is_affine(node.operand, name)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return is_affine(node.left, name) and is_affine(node.right, name)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        parts = (node.left, node.right)
        return any(name not in loads(each) for each in parts) and all(is_affine(each, name) for each in parts)
    return isinstance(node, ast.Name)


def is_size(call: ast.Call) -> bool:
    """Whether it gives the same whenever it is called: a size."""
    return is_named_call(call, "len", "int") or (
        isinstance(call.func, ast.Attribute) and call.func.attr in ("size", "dim")
    )


def if_counted(place: ast.expr, counter: str) -> ast.expr:
    """What a counter gives; None where that is no number, which a condition around it may rule out."""
    parts = [each for each in _without(place, counter) if not isinstance(each, ast.Constant)]
    return ast.IfExp(support("counts", *parts), place, ast.Constant(None)) if parts else place


def _without(place: ast.expr, counter: str) -> list[ast.expr]:
    """The largest parts of an expression that have no counter."""
    if counter not in loads(place):
        return [place]
    inner = (each for each in ast.iter_child_nodes(place) if isinstance(each, ast.expr))
    return [part for each in inner for part in _without(each, counter)]
