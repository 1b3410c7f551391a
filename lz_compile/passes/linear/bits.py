"""Which of the two numbers in a byte an operation takes: the lower four bits, or the upper ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import sympy
import torch

from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.formula.calls import CASTS
from lz_compile.passes.formula.expressions import plain_number
from lz_compile.passes.formula.pointwise import POINTWISE, Rule
from lz_compile.passes.graph.view import Call, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.algebra import Region


class LOW(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """The lower four bits."""


class HIGH(sympy.Function):  # type: ignore[misc]
    """The upper four bits of eight."""


class _UPPER(sympy.Function):  # type: ignore[misc]
    """The upper four bits in their place: sixteen times as much."""


def _of_number(take: Callable[[sympy.Expr, float], sympy.Expr | None], name: str) -> Rule:
    """What an operation by a constant takes; others, and those of floating-point numbers, are read as elsewhere."""

    def rule(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
        number = plain_number(call.get("other", call.arguments.get("#1")))
        source = tensor_of(call.input)
        if number is not None and source is not None and _is_whole(source):
            found = take(region.operand(call, "input", dims), number)
            if found is not None:
                return found
        known = POINTWISE.get(name)
        return None if known is None else known(region, call, dims)

    return rule


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _and(x: sympy.Expr, number: float) -> sympy.Expr | None:
    if number == 15:
        return x if isinstance(x, (LOW, HIGH)) else LOW(x)
    if number == 240:
        return _UPPER(x)
    return x if number == 255 else None


def _shifted(x: sympy.Expr, number: float) -> sympy.Expr | None:
    if number == 0:
        return x
    return HIGH(x.args[0] if isinstance(x, _UPPER) else x) if number == 4 else None


def _divided(x: sympy.Expr, number: float) -> sympy.Expr | None:
    return HIGH(x) if number == 16 else None


def _rest(x: sympy.Expr, number: float) -> sympy.Expr | None:
    return LOW(x) if number == 16 else None


def _division(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    floors = call.get("rounding_mode") in ("floor", "trunc")
    return _of_number(_divided, "")(region, call, dims) if floors else POINTWISE["div"](region, call, dims)


def _widened(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    """A cast between integers that holds all that there was."""
    source, result = tensor_of(call.input), tensor_of(call.node)
    if source is None or result is None or not (_is_whole(source) and _is_whole(result)):
        return None
    old, new = torch.iinfo(source.dtype), torch.iinfo(result.dtype)
    found = region.operand(call, "input", dims)
    return found if isinstance(found, (LOW, HIGH)) or (new.min <= old.min and old.max <= new.max) else None


BITS: Mapping[str, Rule] = {
    **dict.fromkeys((*CASTS, "int", "long", "short"), _widened),
    "and": _of_number(_and, "and"),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _of_number(_shifted, "")),
    **dict.fromkeys(("floordiv", "floor_divide"), _of_number(_divided, "")),
    **dict.fromkeys(("mod", "remainder", "fmod"), _of_number(_rest, "")),
    "div": _division,
}
