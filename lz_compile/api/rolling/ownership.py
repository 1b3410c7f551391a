"""Names that hold what a function has made itself, so that nobody else sees it change."""

from __future__ import annotations

import ast
from collections import Counter

from lz_compile.api.rolling.spelling import pairs_of
from lz_compile.api.rolling.syntax import is_named_call, is_single, number

#: What gives memory of its own.
_MAKERS = frozenset(
    "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty clone".split()
)


def made(statement: ast.stmt) -> set[str]:
    """Names that a statement gives something new to."""
    return {each.id for each, new in pairs_of(statement) if isinstance(each, ast.Name) and _is_made(new)}


def made_tensors(statement: ast.stmt) -> set[str]:
    """Names that a statement gives a new tensor to."""
    pairs = [
        (each, new) for each, new in pairs_of(statement) if isinstance(each, ast.Name) and isinstance(new, ast.Call)
    ]
    return {each.id for each, new in pairs if _is_made(new) and not is_named_call(new, "list", "dict")}


def rebound(statement: ast.stmt) -> set[str]:
    """Names that a statement gives another value to, as against another content."""
    every = list(ast.walk(statement))
    changed = {id(each.target) for each in every if isinstance(each, ast.AugAssign)}
    names = (each for each in every if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return {each.id for each in names if id(each) not in changed}


def _is_made(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        is_of_new = isinstance(value.func, ast.Attribute) and _is_made(value.func.value)  # ``torch.zeros(2).to(x)``
        return name in _MAKERS or is_of_new or (name in ("list", "dict") and not value.args)
    if isinstance(value, (ast.List, ast.Tuple)):
        return all(_is_made(each) for each in value.elts)
    if isinstance(value, ast.Dict):
        return all(_is_made(each) for each in value.values)
    if isinstance(value, ast.ListComp):
        return _is_made(value.elt)
    if isinstance(value, ast.IfExp):
        return _is_made(value.body) and _is_made(value.orelse)
    return isinstance(value, (ast.Constant, ast.BinOp))


def listed(statement: ast.stmt, *, is_empty: bool) -> set[str]:
    """Names that become lists, empty or not."""
    pairs = pairs_of(statement)
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        pairs = [(statement.target, statement.value)]
    return {target.id for target, value in pairs if isinstance(target, ast.Name) and _is_list(value, is_empty=is_empty)}


def repeated(statement: ast.stmt) -> dict[str, tuple[ast.stmt, ast.BinOp]]:
    """Names that become ``[first] * steps``, with that and the statement that does it."""
    return {
        target.id: (statement, value)
        for target, value in pairs_of(statement)
        if isinstance(target, ast.Name)
        and isinstance(value, ast.BinOp)
        and isinstance(value.op, ast.Mult)
        and any(isinstance(each, ast.List) and is_single(each) for each in (value.left, value.right))
    }


def numbered(statement: ast.stmt) -> set[str]:
    """Names of lists of which a statement reads or sets items, at places that are numbers, and no more."""
    every = list(ast.walk(statement))
    count = Counter(each.id for each in every if isinstance(each, ast.Name))
    items = (each for each in every if isinstance(each, ast.Subscript) and number(each.slice) is not None)
    items = (each for each in items if not isinstance(each.ctx, ast.Del))
    bases = Counter(each.value.id for each in items if isinstance(each.value, ast.Name))
    return {name for name, times in bases.items() if count[name] == times}


def _is_list(value: ast.expr, *, is_empty: bool) -> bool:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and not is_empty:  # ``[first] * steps``
        return _is_list(value.left, is_empty=False) or _is_list(value.right, is_empty=False)
    if isinstance(value, (ast.ListComp, ast.List)):
        return is_empty == (isinstance(value, ast.List) and not value.elts)
    return is_named_call(value, "list") and is_empty and not value.args  # type: ignore[attr-defined]
