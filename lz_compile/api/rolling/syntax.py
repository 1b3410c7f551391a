"""Python's syntax: which names statements read and assign, and small pieces of trees."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Sequence
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)
#: Names of ours in the new source: functions, what is known of loops, and others.
SUPPORT, KNOWN, PREFIX = "__lz", "__lzknown", "__lz_"
#: The twin of ``self`` in a step, what it is made of, and the attributes that are carried, by number.
TWIN, PARTS, STATE = "__lztwin", "__lzparts", "__lzstate"
#: Functions that are told what is known.
_TOLD = frozenset({"rolls", "scan", "called", "inherited", "parts", "twin"})


class NotRolledError(Exception):
    """Raised where a loop stays as it is: why, and in which line of its file."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


def loads(*nodes: ast.AST) -> set[str]:
    """Names that are read, or deleted, anywhere inside."""
    found = (each for node in nodes for each in ast.walk(node))
    return {each.id for each in found if isinstance(each, ast.Name) and not is_store(each)}


def stores(*nodes: ast.AST) -> set[str]:
    """Names that are assigned anywhere inside, or whose items are."""
    found, every = set(), [each for node in nodes for each in ast.walk(node)]
    inner = {id(name) for each in every if isinstance(each, ast.comprehension) for name in ast.walk(each.target)}
    for each in every:
        if isinstance(each, ast.Name) and is_store(each):
            found |= set() if id(each) in inner else {each.id}
        elif isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            base = each.value
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                found.add(base.id)
    return found


_FACTS = frozenset({"dtype", "shape", "device", "ndim", "size", "dim", "append", "insert"})


def values_read(*nodes: ast.AST) -> set[str]:
    """Names that are read for more than the shape, dtype or device of a tensor, or to write or append to it."""
    found = [each for node in nodes for each in ast.walk(node)]
    facts = {id(each.value) for each in found if isinstance(each, ast.Attribute) and each.attr in _FACTS}
    facts |= {id(each.value) for each in found if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store)}
    names = (each for each in found if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    return {each.id for each in names if id(each) not in facts}


def changed_in_place(*nodes: ast.AST) -> set[str]:
    """Names of what is changed as it is: by ``h += x``, an assignment to its items, or ``h.add_(x)``."""
    found = set()
    for each in (each for node in nodes for each in ast.walk(node)):
        match each:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                found |= {owner} if name.endswith("_") and not name.endswith("__") else set()
        target = each.target if isinstance(each, ast.AugAssign) else each
        if target is each and not (isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store)):
            continue
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        if isinstance(target, ast.Name):
            found.add(target.id)
    return found


def number(node: ast.expr) -> int | None:
    """The whole number that is written; None where it is something else."""
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return None
    return found if type(found) is int else None


def first_read(body: Sequence[ast.stmt], known: set[str]) -> set[str]:
    """Names that may be read before they are assigned in a step."""
    found: set[str] = set()
    assigned = set(known)
    for statement in body:
        found |= _reads_first(statement, assigned)
        assigned |= surely_assigned(statement)
    return found


def live(rest: Sequence[ast.stmt], around: set[str]) -> set[str]:
    """Names whose value may be read by statements, or by what is behind them, which reads ``around``."""
    return first_read(rest, set()) | (around - set[str]().union(*map(surely_assigned, rest)))


def _reads_first(statement: ast.stmt, assigned: set[str]) -> set[str]:
    if isinstance(statement, ast.If):
        inner = first_read(statement.body, assigned) | first_read(statement.orelse, assigned)
        return (loads(statement.test) - assigned) | inner
    if isinstance(statement, (ast.For, ast.With)):
        heads = [statement.iter] if isinstance(statement, ast.For) else [each.context_expr for each in statement.items]
        own = stores(statement.target) if isinstance(statement, ast.For) else set()
        return (loads(*heads) - assigned) | first_read(statement.body, assigned | own)
    partial = {
        each.value.id
        for each in ast.walk(statement)
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name)
    }
    own = stores(statement.target) - partial if isinstance(statement, ast.AugAssign) else set()
    return (loads(statement) | own | partial) - assigned


def surely_assigned(statement: ast.stmt) -> set[str]:
    """Names that have a value behind a statement, whatever way it takes."""
    if isinstance(statement, ast.If):
        parts = [set[str]().union(*map(surely_assigned, part)) for part in (statement.body, statement.orelse)]
        return parts[0] & parts[1]
    if isinstance(statement, ast.With):
        given = [each.optional_vars for each in statement.items if each.optional_vars is not None]
        return stores(*given).union(*map(surely_assigned, statement.body))
    if isinstance(statement, ast.Assign):
        return stores(*statement.targets)
    is_one = isinstance(statement, ast.AugAssign) or (
        isinstance(statement, ast.AnnAssign) and statement.value is not None
    )
    return stores(statement.target) if is_one else set()  # type: ignore[attr-defined]


def is_name(node: ast.AST, name: str) -> bool:
    """Whether it is a name, this one."""
    return isinstance(node, ast.Name) and node.id == name


def uses(name: str, *nodes: ast.AST) -> list[ast.Name]:
    """A name, wherever it is inside of nodes."""
    found = (each for node in nodes for each in ast.walk(node))
    return [each for each in found if isinstance(each, ast.Name) and each.id == name]


def called(node: ast.AST, method: str) -> tuple[str | None, list[ast.expr]]:
    """The owner's name and the arguments of a statement ``name.method(...)``; None and none of another."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), attr), given)) if attr == method:
            return name, given
    return None, []


def is_single(node: ast.expr) -> bool:
    """Whether it is a list or a tuple of one thing that is written."""
    return isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred)


def is_store(name: ast.Name) -> bool:
    """Whether it is assigned."""
    return isinstance(name.ctx, ast.Store)


def is_path(node: ast.expr) -> bool:
    """Whether it is a name, or attributes of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def is_none(node: ast.expr) -> bool:
    """Whether it is ``None``."""
    return isinstance(node, ast.Constant) and node.value is None


def is_ellipsis(node: ast.expr) -> bool:
    """Whether it is ``...``."""
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def is_whole(node: ast.expr) -> bool:
    """Whether an index leaves a dimension as it is."""
    return is_ellipsis(node) or (isinstance(node, ast.Slice) and not (node.lower or node.upper or node.step))


def is_simple(node: ast.expr) -> bool:
    """Whether an index is a slice, a number or an ellipsis as far as its syntax tells."""
    return isinstance(node, ast.Slice) or is_none(node) or is_ellipsis(node) or number(node) is not None


def is_named_call(node: ast.AST, *names: str) -> bool:
    """Whether it calls a function by one of some plain names, without keywords."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords
    return is_call and node.func.id in names  # type: ignore[attr-defined]


def support(name: str, *given: ast.expr) -> ast.Call:
    """A call of something of ours."""
    told = [ast.Name(KNOWN, ast.Load())] if name in _TOLD else []
    return ast.Call(attribute(SUPPORT, name), [*told, *given], [])


def placed(made: Node, like: ast.AST) -> Node:
    """New pieces of a tree with the place of an old one."""
    for each in ast.walk(made):
        if "lineno" in each._attributes and not hasattr(each, "lineno"):
            each.lineno, each.col_offset = like.lineno, like.col_offset  # type: ignore[attr-defined]
            each.end_lineno, each.end_col_offset = like.lineno, like.col_offset  # type: ignore[attr-defined]
    return made


def attribute(owner: str | ast.expr, name: str) -> ast.expr:
    """``owner.name``."""
    return ast.Attribute(ast.Name(owner, ast.Load()) if isinstance(owner, str) else owner, name, ast.Load())


def parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The syntax of a plain function, with the lines of its file; None where it is no ``def``."""
    if function.__name__ == "<lambda>":
        return None
    lines, first = inspect.getsourcelines(function.__code__)  # of a decorated one, the function around it
    text, is_inside = "".join(lines), lines[0][:1].isspace()
    tree: Any = ast.parse(f"if True:\n{text}" if is_inside else text)
    ast.increment_lineno(tree, first - 1 - is_inside)
    body = tree.body[0].body if is_inside else tree.body
    found = body[0] if body else None
    is_plain = isinstance(found, ast.FunctionDef) and not inspect.isgeneratorfunction(function)
    return found if is_plain else None
