"""Operations on positions and sums of products, read at an index: ranges, triangles, running sums, contractions, means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.formula import contraction, piecewise
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from
from lz_compile.passes.formula.piecewise import Piecewise, Value, compared, everywhere, indicator, selection
from lz_compile.passes.formula.polynomial import ONE, ZERO, Polynomial, number
from lz_compile.passes.formula.predicates import Predicate, at_least, both, choice, negation, zero
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.reader import Reader


#: What an operation computes at an index, or None where it is not said.
Rule: TypeAlias = "Callable[[Reader, Call, Dims], Value | None]"


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


def _triangle(*, is_upper: bool) -> Rule:
    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        diagonal = reader.integer(call.get("diagonal", 0))
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


def _cumsum(reader: Reader, call: Call, dims: Dims) -> Value | None:
    """The running sum of what is the same at every index along the dimension."""
    dim, source = call.get("dim"), tensor_of(call.input)
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
    dim, prepend, source = call.get("dim", -1), call.get("prepend"), tensor_of(call.input)
    is_plain = call.get("n", 1) == 1 and isinstance(dim, int) and call.get("append") is None
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


POSITIONS: Mapping[str, Rule] = {
    "tril": _triangle(is_upper=False),
    "triu": _triangle(is_upper=True),
    "arange": _arange,
    "eye": lambda reader, _call, dims: zero(reader.place(dims[0]) - reader.place(dims[1])),
    "cumsum": _cumsum,
    "diff": _diff,
}


def _product(reader: Reader, call: Call, dims: Dims) -> Value | None:
    """A product of tensors, summed over the axes that the result lacks, and what is added to it."""
    found = contraction.factors(call, dims)
    if found is None or any(reader.scalar(call.get(name, 1)) != everywhere(ONE) for name in ("alpha", "beta")):
        return None
    reader.give((found.summed,))
    value = everywhere(ONE)
    for node, own in found.factors:
        factor = numeric(reader.read(node, own, call.node))
        if factor is None:
            return None
        value = value * factor
    total = reader.total(value, found.summed)
    added = None if found.addend is None else numeric(reader.read(*found.addend, call.node))
    return total if total is None or added is None else total + added


def _reduced(*, is_mean: bool) -> Rule:
    def rule(reader: Reader, call: Call, dims: Dims) -> Value | None:
        found = contraction.reduction_dims(call, dims)
        if found is None or (call.get("dtype") is not None and not is_mean):
            return None
        source, new = found
        reader.give((new,))
        summand = numeric(reader.read(call.input, source, call.node))
        total = None if summand is None else reader.total(summand, new)
        count = reader.count(new).constant if is_mean else 1
        return None if total is None or not count else total * everywhere(number(1 / Fraction(count)))

    return rule


def _outer(reader: Reader, call: Call, dims: Dims) -> Value | None:
    one, two = call.input, call.get("other")
    if tensor_of(one) is None or tensor_of(two) is None:
        return None
    factors = [numeric(reader.read(each, (dim,), call.node)) for each, dim in zip((one, two), dims, strict=True)]
    first, second = factors
    return None if first is None or second is None else first * second


SUMS: Mapping[str, Rule] = {
    **dict.fromkeys(contraction.PRODUCTS, _product),
    "outer": _outer,
    "sum": _reduced(is_mean=False),
    "mean": _reduced(is_mean=True),
}
