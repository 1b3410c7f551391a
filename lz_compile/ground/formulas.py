"""Integer formulas over named sizes, as descriptors hold them: ``batch_size * max(128, -(-seq_len_q // 16)) * 4``.

Nothing but integers, names, ``+ - * //``, ``min`` and ``max`` exists in them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import CodeType

from lz_compile.errors import FormulaError, no_such

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"min": lambda *given: min(given), "max": lambda *given: max(given)}


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a formula, which must not be negative.

    Raises:
        FormulaError: it is no formula, a name in it has no size, or it divides by zero or gives a negative number.
    """
    check(formula, sizes)
    try:
        value: int = eval(_code(formula), {**sizes, **_FUNCTIONS, "__builtins__": {}})  # every part was checked
    except ZeroDivisionError:
        raise FormulaError(formula, f"it divides by zero where {dict(sizes)}") from None
    if value < 0:
        raise FormulaError(formula, f"it gives {value} where {dict(sizes)}")
    return value


def check(formula: str, names: Collection[str]) -> None:
    """Refuse what is no formula over ``names``.

    Raises:
        FormulaError: with what is wrong.
    """
    for name in sorted(_names(formula) - set(names)):
        raise FormulaError(formula, no_such("size", name, sorted(names)))


@cache
def _parse(formula: str) -> ast.Expression:
    try:
        return ast.parse(formula, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError(formula, f"it does not parse: {error}") from None


@cache
def _code(formula: str) -> CodeType:
    return compile(_parse(formula), "<formula>", "eval")


@cache
def _names(formula: str) -> frozenset[str]:
    """The names of sizes in a formula, every part of which is checked on the way."""

    def visit(node: ast.expr) -> frozenset[str]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return frozenset()
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            return frozenset({node.id})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return visit(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            return visit(node.left) | visit(node.right)
        if isinstance(node, ast.Call) and _is_function(node):
            return frozenset[str]().union(*map(visit, node.args))
        text = ast.unparse(node)
        raise FormulaError(formula, f"'{text}' is none of: integer, name, + - * //, min(a, b), max(a, b)")

    try:
        return visit(_parse(formula).body)
    except RecursionError:
        raise FormulaError(formula, "it is nested too deeply") from None


def _is_function(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and bool(node.args) and not node.keywords
