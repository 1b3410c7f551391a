"""Other spellings of loops over time, as the one that is read: counted by a ``range``, or over an unbound tensor."""

from __future__ import annotations

import ast
import copy

from lz_compile.api.rolling.containers import with_one_list_for_each_part
from lz_compile.api.rolling.syntax import (
    PREFIX,
    NotRolledError,
    attribute,
    is_named_call,
    is_path,
    loads,
    number,
    placed,
    stores,
)

_STOPS: dict[type[ast.cmpop], tuple[int, int]] = {ast.Lt: (1, 0), ast.LtE: (1, 1), ast.Gt: (-1, 0), ast.GtE: (-1, -1)}
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def counted_while(node: ast.While) -> ast.For:
    """``for t in range(t, n, c)`` of ``while t < n``, whose body adds ``c`` to ``t`` once.

    Raises:
        NotRolledError: it does something else.
    """
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        raise NotRolledError("it is a while that compares no counter", node.lineno)
    name, stop, order = test.left, test.comparators[0], type(test.ops[0])
    if not isinstance(name, ast.Name) or name.id not in stores(*node.body):
        name, stop, order = stop, name, _MIRRORED.get(order, order)
    if not isinstance(name, ast.Name) or order not in _STOPS:
        raise NotRolledError("it is a while that compares no counter", node.lineno)
    added = [(i, by) for i, each in enumerate(node.body) if (by := _added(each, name.id)) is not None]
    others = [each for i, each in enumerate(node.body) if [i] != [place for place, _ in added]]
    if len(added) != 1 or name.id in stores(*others) or loads(stop) & stores(*node.body):
        raise NotRolledError(f"it is a while whose body does not count {name.id} once", node.lineno)
    ((place, by),), (sign, more) = added, _STOPS[order]
    if by * sign <= 0:
        raise NotRolledError(f"it is a while that does not come to its end: {name.id} goes by {by}", node.lineno)
    behind = [_Moved(name.id, by).visit(copy.deepcopy(each)) for each in node.body[place + 1 :]]
    end = ast.BinOp(stop, ast.Add(), ast.Constant(more)) if more else stop
    ends = [ast.Name(name.id, ast.Load()), end, ast.Constant(by)]
    steps = ast.Call(ast.Name("range", ast.Load()), ends, [])
    made = ast.For(ast.Name(name.id, ast.Store()), steps, [*node.body[:place], *behind], node.orelse)
    return placed(made, node)


def _added(statement: ast.stmt, name: str) -> int | None:
    """``c`` of ``t += c`` or ``t = t + c``."""
    target: ast.expr
    if isinstance(statement, ast.AugAssign):
        target, op, by = statement.target, statement.op, statement.value
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        target, op, by = statement.targets[0], statement.value.op, statement.value.right
        if len(statement.targets) > 1 or loads(statement.value.left) != {name} or loads(by):
            return None
    else:
        return None
    found = number(by)
    if not isinstance(target, ast.Name) or target.id != name or found is None:
        return None
    return found if isinstance(op, ast.Add) else -found if isinstance(op, ast.Sub) else None


class _Moved(ast.NodeTransformer):
    """A counter behind the statement that adds to it."""

    def __init__(self, name: str, by: int) -> None:
        self._name, self._by = name, by

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """``t + c``."""
        if node.id != self._name or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.BinOp(node, ast.Add(), ast.Constant(self._by)), node)


def unbound(parts: ast.expr) -> tuple[ast.expr, int, bool] | None:
    """The tensor and the dimension of ``x.unbind(1)``, or of ``x.split(1, 1)``, whose parts keep the dimension."""
    if is_named_call(parts, "list", "tuple") and isinstance(parts, ast.Call) and len(parts.args) == 1:
        return unbound(parts.args[0])
    turned = _turned(parts)
    if turned is not None:
        found = unbound(turned)
        if found is None:
            return None
        flipped = ast.Call(attribute(found[0], "flip"), [ast.Constant(found[1])], [])
        return placed(flipped, parts), found[1], found[2]
    if not isinstance(parts, ast.Call) or not isinstance(parts.func, ast.Attribute):
        return None
    name, owner, given = parts.func.attr, parts.func.value, list(parts.args)
    if isinstance(owner, ast.Name) and owner.id == "torch" and given:
        owner = given.pop(0)
    named = {each.arg: each.value for each in parts.keywords}
    if name == "split":
        size = given.pop(0) if given else named.pop("split_size_or_sections", named.pop("split_size", None))
        if size is None or number(size) != 1:
            return None
    elif name != "unbind":
        return None
    dim = number(given[0] if given else named.pop("dim", ast.Constant(0)))
    return None if dim is None or len(given) > 1 or named else (owner, dim, name == "split")


def _turned(parts: ast.expr) -> ast.expr | None:
    """What ``reversed(xs)`` or ``xs[::-1]`` turns around."""
    if is_named_call(parts, "reversed") and isinstance(parts, ast.Call) and len(parts.args) == 1:
        return parts.args[0]
    is_slice = isinstance(parts, ast.Subscript) and isinstance(parts.slice, ast.Slice)
    return parts.value if is_slice and ast.unparse(parts.slice) == "::-1" else None  # type: ignore[attr-defined]


def with_plain_names(tree: ast.FunctionDef) -> None:
    """A name for ``x.unbind(1)`` as one for ``x``, where it is no more than gone over, indexed or measured.

    Of a name for a ``range`` that a loop goes over, the range.
    """
    with_one_list_for_each_part(tree)
    _with_ranges(tree)
    _with_names(tree)
    every = list(ast.walk(tree))
    inner = [each for each in every if isinstance(each, (ast.FunctionDef, ast.Lambda)) and each is not tree]
    for statement in every:
        for target, value in pairs_of(statement):
            found = unbound(value)
            if found is None or not isinstance(target, ast.Name) or target.id in loads(*inner):
                continue
            names = [each for each in every if isinstance(each, ast.Name) and each.id == target.id]
            uses = _Uses(target.id, found[1], keeps=found[2])
            uses.visit(copy.deepcopy(tree))
            is_given = target.id in {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
            is_made_once = not is_given and sum(isinstance(each.ctx, ast.Store) for each in names) == 1
            if is_made_once and uses.count == len(names) - 1:
                uses.visit(tree)
                replace_value(statement, value, found[0])


def _with_ranges(tree: ast.FunctionDef) -> None:
    every = list(ast.walk(tree))
    stored = [each.id for each in every if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    arguments = [each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)]
    known = {}
    for target, value in (pair for each in tree.body for pair in pairs_of(each)):
        inner = value.args[0] if is_named_call(value, "reversed") and value.args else value  # type: ignore[attr-defined]
        is_fixed = all(name not in stored for name in loads(inner))
        is_one = isinstance(target, ast.Name) and [*stored, *arguments].count(target.id) == 1
        if isinstance(target, ast.Name) and is_one and is_named_call(inner, "range") and is_fixed:
            known[target.id] = value
    for each in every:
        if isinstance(each, ast.For) and isinstance(each.iter, ast.Name) and each.iter.id in known:
            each.iter = copy.deepcopy(known[each.iter.id])


def _with_names(tree: ast.FunctionDef) -> None:
    """Names for tensors that a loop goes over and that a call makes: they are made once."""
    for owner in list(ast.walk(tree)):
        for block in (getattr(owner, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list) or not any(isinstance(each, ast.For) for each in block):
                continue
            for loop in [each for each in block if isinstance(each, ast.For)]:
                for call in ast.walk(loop.iter):
                    found = unbound(call) if isinstance(call, ast.Call) else None
                    if found is None or is_path(found[0]) or not isinstance(call, ast.Call):
                        continue
                    name = f"{PREFIX}e{loop.lineno}_{call.col_offset}_{call.end_col_offset}"
                    made = ast.Assign([ast.Name(name, ast.Store())], found[0])
                    block.insert(block.index(loop), placed(made, loop))
                    read = placed(ast.Name(name, ast.Load()), loop)
                    parts: list[ast.expr] = [ast.Constant(1)] if found[2] else []
                    call.func = attribute(read, "split" if found[2] else "unbind")
                    call.args, call.keywords = [*parts, ast.Constant(found[1])], []
                    placed(call, loop)


def pairs_of(statement: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """What is assigned, and to what, by an assignment to one target or to a tuple of them."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def replace_value(statement: ast.AST, old: ast.expr, new: ast.expr) -> None:
    """Let a statement assign something else."""
    assert isinstance(statement, ast.Assign), "pairs are of assignments"
    if statement.value is old:
        statement.value = new
    elif isinstance(statement.value, ast.Tuple):
        statement.value.elts = [new if each is old else each for each in statement.value.elts]


class _Uses(ast.NodeTransformer):
    """Uses of a name for parts as uses of a name for the whole; ``count`` says how many there are."""

    def __init__(self, name: str, dim: int, *, keeps: bool) -> None:
        self._name, self._dim, self._keeps, self.count = name, dim, keeps, 0

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._name and isinstance(node.ctx, ast.Load)

    def _parts(self, node: ast.expr) -> ast.expr:
        self.count += 1
        given: list[ast.expr] = [ast.Constant(1), ast.Constant(self._dim)] if self._keeps else [ast.Constant(self._dim)]
        call = ast.Call(attribute(node, "split" if self._keeps else "unbind"), given, [])
        return placed(call, node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``inputs[t]``."""
        self.generic_visit(node)
        is_read = isinstance(node.ctx, ast.Load) and self._is_it(node.value)
        if not is_read or isinstance(node.slice, (ast.Slice, ast.Tuple)):
            return node
        self.count += 1
        at = [node.slice, ast.Constant(None)] if self._keeps else [node.slice]
        whole = ast.Slice()
        if self._dim >= 0:
            items: list[ast.expr] = [*(whole for _ in range(self._dim)), *at]
        else:
            items = [ast.Constant(Ellipsis), *at, *(whole for _ in range(-self._dim - 1))]
        node.slice = placed(ast.Tuple(items, ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``len(inputs)``, ``zip(inputs)``."""
        self.generic_visit(node)
        if is_named_call(node, "len") and len(node.args) == 1 and self._is_it(node.args[0]):
            self.count += 1
            return placed(ast.Call(attribute(node.args[0], "size"), [ast.Constant(self._dim)], []), node)
        if is_named_call(node, "zip", "enumerate", "reversed"):
            node.args = [self._parts(each) if self._is_it(each) else each for each in node.args]
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        """``for x_t in inputs``."""
        self.generic_visit(node)
        if self._is_it(node.iter):
            node.iter = self._parts(node.iter)
        return node
