"""What is made of a list that a loop fills: whether it is no more than stacked, and that without taking it apart first."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from lz_compile.api.rolling.syntax import SUPPORT, called, is_name, is_named_call, placed, support, uses


def is_stacked_only(name: str, statements: Sequence[ast.stmt]) -> bool:
    """Whether a list is no more than stacked or concatenated."""
    every = [each for statement in statements for each in ast.walk(statement)]
    return len(uses(name, *statements)) == sum(
        _stacks(each, name) or _is_turning(each, name) or _is_asked(each, name) for each in every
    )


def _stacks(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    return is_name(node.func.value, "torch") and node.func.attr in ("stack", "cat") and _is_of(node.args[0], name)


def _is_of(held: ast.expr, name: str) -> bool:
    """Whether it is a list, a slice of it, or either the other way round."""
    turned = _turned(held)
    if turned is not None:
        return _is_of(turned, name)
    held = held.value if isinstance(held, ast.Subscript) and isinstance(held.slice, ast.Slice) else held
    return is_name(held, name)


def _turned(held: ast.expr) -> ast.expr | None:
    """``xs`` of ``reversed(xs)`` or ``list(reversed(xs))``."""
    if is_named_call(held, "list", "tuple") and len(held.args) == 1:  # type: ignore[attr-defined]
        return _turned(held.args[0])  # type: ignore[attr-defined]
    is_turned = is_named_call(held, "reversed") and len(held.args) == 1  # type: ignore[attr-defined]
    return held.args[0] if is_turned else None  # type: ignore[attr-defined]


def _is_asked(node: ast.AST, name: str) -> bool:
    """Whether it asks whether a list has anything in it."""
    is_ours = isinstance(node, ast.Call) and ast.unparse(node.func) == f"{SUPPORT}.holds"
    return is_ours and is_name(node.args[0], name)  # type: ignore[attr-defined]


def _is_turning(node: ast.AST, name: str) -> bool:
    """Whether it is ``xs.reverse()``."""
    return called(node, "reverse") == (name, [])


class Stacked(ast.NodeTransformer):
    """``torch.stack(outs, 1)`` of what a loop appended, without taking it apart first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Stacking or concatenating."""
        self.generic_visit(node)
        if _stacks(node, self._name) and isinstance(node.func, ast.Attribute):
            node.func.value = ast.copy_location(ast.Name(SUPPORT, ast.Load()), node.func)
            turned = _turned(node.args[0])
            node.args[0] = node.args[0] if turned is None else placed(support("turned", turned), node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """``outs.reverse()``."""
        if not _is_turning(node, self._name):
            return self.generic_visit(node)
        made = ast.Assign([ast.Name(self._name, ast.Store())], support("turned", ast.Name(self._name, ast.Load())))
        return placed(made, node)
