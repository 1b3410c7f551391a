"""Operations on positions, read at an index: ranges, triangles, running sums and differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.formula.operands import merged, numeric, operand
from lz_compile.passes.formula.piecewise import Piecewise, Value, everywhere, selection
from lz_compile.passes.formula.polynomial import ONE, ZERO, Polynomial
from lz_compile.passes.formula.predicates import at_least, both, zero
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.reader import Reader

Rule: TypeAlias = "Callable[[Reader, Call, Dims], Value | None]"


def _triangle(*, is_upper: bool) -> Rule:
    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        diagonal = reader.integer(call.get("diagonal", call.arguments.get("#1", 0)))
        value = operand(reader, call, call.input, dims)
        if diagonal is None or value is None:
            return None
        distance = reader.place(dims[-1]) - reader.place(dims[-2]) - diagonal
        inside = at_least(distance if is_upper else -distance)
        if not isinstance(value, Piecewise):
            return both(inside, value)
        return selection(inside, value, everywhere(ZERO))

    return rule


def _arange(reader: Reader, call: Call, dims: Dims) -> Value | None:
    given = [value for name, value in call.arguments.items() if name in ("input", "#1", "#2")]
    named = {name: call.get(name) for name in ("start", "end", "step") if name in call.arguments}
    order = ("end",) if len(given) == 1 and "end" not in named else ("start", "end", "step")
    named |= dict(zip(order, given, strict=False))
    start, step = (reader.scalar(named.get(name, default)) for name, default in (("start", 0), ("step", 1)))
    if start is None or step is None or start.single is None or step.single is None:
        return None
    return everywhere(start.single + step.single * reader.place(dims[0]))


def _eye(reader: Reader, _call: Call, dims: Dims) -> Value | None:
    return zero(reader.place(dims[0]) - reader.place(dims[1]))


def _cumsum(reader: Reader, call: Call, dims: Dims) -> Value | None:
    """The running sum of what is the same at every index along the dimension."""
    dim, source = call.get("dim", call.arguments.get("#1")), tensor_of(call.input)
    if not isinstance(dim, int) or source is None or not dims:
        return None
    dim %= len(dims)
    anywhere = (Axis(as_size(source.shape[dim])),)
    reader.give((anywhere,))
    summand = numeric(reader.read(call.input, (*dims[:dim], anywhere, *dims[dim + 1 :]), call.node))
    if summand is None or not summand.axes.isdisjoint(anywhere):
        return None
    return summand * everywhere(reader.place(dims[dim]) + ONE)


def _diff(reader: Reader, call: Call, dims: Dims) -> Value | None:
    order = call.get("n", call.arguments.get("#1", 1))
    dim = call.get("dim", call.arguments.get("#2", -1))
    prepend, source = call.get("prepend", call.arguments.get("#3")), tensor_of(call.input)
    is_plain = order == 1 and isinstance(dim, int) and call.get("append", call.arguments.get("#4")) is None
    if source is None or not is_plain or source.dtype == torch.bool:
        return None
    dim %= source.dim()
    here = reader.place(dims[dim])

    def at(node: Any, place: Polynomial) -> Piecewise | None:
        size = as_size(known_tensor(node).shape[dim])
        dims_at = (*dims[:dim], reader.dim_at(place, size), *dims[dim + 1 :])
        return numeric(reader.read(node, dims_at, call.node))

    def step(one: Piecewise | None, two: Piecewise | None) -> Piecewise | None:
        return None if one is None or two is None else one - two

    if prepend is None:
        return step(at(call.input, here + ONE), at(call.input, here))
    before = tensor_of(prepend)
    if before is None or as_size(before.shape[dim]) != 1:
        return None
    return merged(
        zero(here),
        step(at(call.input, ZERO), at(prepend, ZERO)),
        step(at(call.input, here), at(call.input, here - ONE)),
    )


RULES: Mapping[str, Rule] = {
    "tril": _triangle(is_upper=False),
    "triu": _triangle(is_upper=True),
    "arange": _arange,
    "eye": _eye,
    "cumsum": _cumsum,
    "diff": _diff,
}
