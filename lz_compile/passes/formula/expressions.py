"""Numbers, infinities and truth values as sympy expressions.

Booleans are indicator symbols with values 0 and 1 (``m**2 == m``), infinity is a symbol, and what a dtype cannot hold is one.

What a call is whatever it is given, a cast or a tensor that is filled with one number, is told here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import sympy.tensor.tensor  # sympy's first addition imports it: that is no part of a compile
import torch
from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from lz_compile.ground.records import Reason
from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.graph.view import Call, tensor_of, value_of

INFINITY = sympy.Symbol("INFINITY", positive=True)
#: Stay unevaluated functions in expressions: ``dropout(x, p)`` and ``nan_to_num(x)``.
DROPOUT = sympy.Function("dropout")
NAN_TO_NUM = sympy.Function("nan_to_num")
#: ``floored(x, floor)`` is ``max(x, floor)`` with a floor that no finite score reaches; it turns ``-inf`` into the floor.
FLOORED = sympy.Function("floored")
_EXACT = 2**200  # whole numbers below are integers, so that sums of float32's lowest number lose no term


@dataclass(frozen=True)
class Known:
    """The value of a constant (on the CPU), and the buffers whose values are in it."""

    value: torch.Tensor
    buffers: tuple[fx.Node, ...]


#: The value of a tensor when it is made, or as a reader (the second node) finds it; else why it is not known.
Values: TypeAlias = Callable[..., Known | Reason]


def unknown(node: fx.Node, _reader: fx.Node | None = None) -> Known | Reason:
    """Nothing is known of any value."""
    return Reason("NOT_CONSTANT", f"nobody asks for the value of {node.name}")


def number(value: Any) -> sympy.Expr:
    """A Python number as a sympy one, infinities as :data:`INFINITY`.

    Raises:
        LayoutError: it is no number.
    """
    plain = plain_number(value)
    if plain is None:
        raise LayoutError(f"no reading for the constant {value!r}")
    if isinstance(plain, float) and math.isinf(plain):
        return INFINITY if plain > 0 else -INFINITY
    return tidy(sympy.sympify(plain))


def overflowed(constant: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
    """A number, chosen by indicators, as ``dtype`` holds it."""
    flags = indicators(constant)
    if flags:
        on, off = (overflowed(constant.xreplace({flags[0]: value}), dtype) for value in (sympy.S.One, sympy.S.Zero))
        return reduce_indicators(flags[0] * on + (1 - flags[0]) * off)
    if constant.has(INFINITY) or not constant.is_number:
        return constant
    return number(rounded(float(constant), dtype))


def specialised(value: Any) -> Any:
    """A Python float of the model (symbolic under ``dynamic=True``) as a number, under a guard of Dynamo's.

    Numbers computed from symbolic sizes stay symbolic.
    """
    known = value_of(value)
    if not isinstance(known, torch.SymFloat):
        return value
    is_plain = all(symbol_is_type(symbol, SymT.FLOAT) for symbol in known.node.expr.free_symbols)
    return float(known) if is_plain else value


def tidy(expression: sympy.Expr) -> sympy.Expr:
    """The expression with every float that is a whole number as an integer (sympy holds ``1.0 != 1``)."""
    whole = {
        x: sympy.Integer(int(x)) for x in expression.atoms(sympy.Float) if abs(x) < _EXACT and float(x).is_integer()
    }
    return expression.xreplace(whole) if whole else expression


def plain_number(value: Any) -> int | float | None:
    """A Python number, truth values as 0 and 1; None for everything else and for NaN."""
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (int, float)) and not (isinstance(value, float) and math.isnan(value)) else None


def is_indicator(expression: sympy.Expr) -> bool:
    """Whether an expression takes only the values 0 and 1."""
    if expression in (sympy.S.Zero, sympy.S.One):
        return True
    if isinstance(expression, sympy.Symbol):
        return bool(expression.is_integer)
    symbols = expression.free_symbols
    if not symbols or not all(symbol.is_integer for symbol in symbols) or len(symbols) > 6:
        return False
    return all(value in (0, 1) for value in _truth_values(expression, sorted(symbols, key=str)))


def _truth_values(expression: sympy.Expr, symbols: list[sympy.Symbol]) -> list[sympy.Expr]:
    if not symbols:
        return [expression]
    head, *tail = symbols
    return _truth_values(expression.subs(head, 0), tail) + _truth_values(expression.subs(head, 1), tail)


def indicators(expression: sympy.Expr) -> list[sympy.Symbol]:
    """The boolean leaves of an expression, in the order in which they were found."""
    return sorted((s for s in expression.free_symbols if s.is_integer and s.is_Symbol), key=lambda s: int(s.name[1:]))


def reduce_indicators(expression: sympy.Expr) -> sympy.Expr:
    """Expand, with ``m**n`` as ``m`` for every boolean leaf."""
    expanded = tidy(sympy.expand(expression))
    powers = {
        power: power.base for power in expanded.atoms(sympy.Pow) if power.base.is_Symbol and power.base.is_integer
    }
    powers = {power: base for power, base in powers.items() if power.exp.is_positive}
    return tidy(sympy.expand(expanded.xreplace(powers))) if powers else expanded


def rounded(value: float, dtype: torch.dtype) -> int | float:
    """The number as ``dtype`` holds it, where that is another value and not just fewer digits."""
    if dtype.is_floating_point and abs(value) <= torch.finfo(dtype).max:
        return value
    held: int | float = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    return held


CASTS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type_as", "type", "bool", "_to_copy", "convert_element_type"}
)
_CONSTANTS: Mapping[str, float | None] = {
    "tensor": None,
    "scalar_tensor": None,
    "full": None,
    "full_like": None,
    "new_full": None,
    "new_tensor": None,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}


def is_cast(call: Call) -> bool:
    """Whether the call changes the dtype only (or nothing). What rounds to 8 bits is meant to, as quantisation is tried."""
    if call.name not in CASTS:
        return False
    source, result = tensor_of(call.input), tensor_of(call.node)
    if source is None or result is None or source.device != result.device:
        return False
    return result.dtype == torch.bool or (result.is_floating_point() and result.dtype.itemsize > 1)


def made_of(node: fx.Node, call: Call | None) -> list[fx.Node]:
    """What a node is computed from, by the call that it is; ``x.to(other)`` asks another tensor for its dtype only."""
    return [call.input] if call is not None and is_cast(call) else node.all_input_nodes


def narrows(call: Call) -> bool:
    """Whether a cast goes to a dtype of smaller range."""
    kinds = [tensor_of(node).dtype for node in (call.input, call.node)]  # type: ignore[union-attr]
    return all(kind.is_floating_point for kind in kinds) and torch.finfo(kinds[1]).max < torch.finfo(kinds[0]).max


_WIDER: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    **dict.fromkeys((torch.float16, torch.bfloat16), (torch.float32, torch.float64)),
    torch.float32: (torch.float64,),
}


def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or target in _WIDER.get(source, ())


def is_constant(call: Call) -> bool:
    """Whether the call makes a tensor that is filled with one number (or with nothing in particular)."""
    return call.name in ("empty", "empty_like", "new_empty") or constant_value(call) is not None


def constant_value(call: Call) -> int | float | None:
    """The value of a tensor that is filled with one number, None for others."""
    if call.name not in _CONSTANTS or tensor_of(call.node) is None:
        return None
    filled = _CONSTANTS[call.name]
    value = filled if filled is not None else _fill_value(call)
    return None if value is None else rounded(value, tensor_of(call.node).dtype)  # type: ignore[union-attr]


def _fill_value(call: Call) -> int | float | None:
    if "fill_value" in call.arguments:
        return plain_number(call.get("fill_value"))
    position = {"full": "#1", "full_like": "#1", "new_full": "#2", "new_tensor": "#1"}.get(call.name, "input")
    value = call.arguments.get(position, call.get("data") if call.name == "tensor" else None)
    return plain_number(value)
