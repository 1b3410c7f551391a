"""Arguments of calls at an index: as numbers or as conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import piecewise
from lz_compile.passes.formula.axes import Dims, broadcast_from
from lz_compile.passes.formula.piecewise import Piecewise, Value, compared, everywhere, indicator, selection
from lz_compile.passes.formula.polynomial import ZERO
from lz_compile.passes.formula.predicates import Predicate, choice, negation
from lz_compile.passes.graph.view import Call, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.reader import Reader


def operand(reader: Reader, call: Call, value: Any, dims: Dims) -> Value | None:
    """A (broadcast) argument of a pointwise call."""
    tensor = tensor_of(value)
    return reader.value(value, dims if tensor is None else broadcast_from(dims, shape_of(tensor)), call.node)


def boolean(value: Value | None) -> Predicate | None:
    """Whether a value is not zero."""
    if not isinstance(value, Piecewise):
        return value
    opposite = compared(piecewise.equal, value, everywhere(ZERO))
    return None if opposite is None else negation(opposite)


def numeric(value: Value | None) -> Piecewise | None:
    """A number, conditions as 0 and 1."""
    return value if value is None or isinstance(value, Piecewise) else indicator(value)


def merged(where: Predicate, chosen: Value | None, otherwise: Value | None) -> Value | None:
    """One value where a condition holds, another one elsewhere."""
    if chosen is None or otherwise is None:
        return None
    if not isinstance(chosen, Piecewise) and not isinstance(otherwise, Piecewise):
        return choice(where, chosen, otherwise)
    first, second = numeric(chosen), numeric(otherwise)
    if first is None or second is None:
        return None
    return selection(where, first, second)
