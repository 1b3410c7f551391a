"""Sums of products at an index: contractions in all spellings, and sums and means over dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.axes import Dims
from lz_compile.passes.formula.operands import numeric
from lz_compile.passes.formula.piecewise import Value, everywhere
from lz_compile.passes.formula.polynomial import ONE, number
from lz_compile.passes.graph.view import Call, tensor_of

if TYPE_CHECKING:
    from lz_compile.passes.formula.reader import Reader

Rule: TypeAlias = "Callable[[Reader, Call, Dims], Value | None]"


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
    one, two = call.input, call.get("vec2", call.get("other", call.arguments.get("#1")))
    if tensor_of(one) is None or tensor_of(two) is None:
        return None
    factors = [numeric(reader.read(each, (dim,), call.node)) for each, dim in zip((one, two), dims, strict=True)]
    first, second = factors
    return None if first is None or second is None else first * second


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(contraction.PRODUCTS, _product),
    "outer": _outer,
    "sum": _reduced(is_mean=False),
    "mean": _reduced(is_mean=True),
}
