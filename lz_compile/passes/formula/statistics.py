"""Which calls sum up rows, however they are spelled, and of which tensor these are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.formula.contraction import PRODUCTS, behind_layout, factors
from lz_compile.passes.formula.expressions import constant_value
from lz_compile.passes.graph.view import Call, known_tensor, read, tensor_of, tensor_operands

#: Pools over the last dimensions, by how many these are.
_POOLS = {f"{kind}avg_pool{rank}d": rank for kind in ("", "adaptive_") for rank in (1, 2, 3)}


def is_of_rows(call: Call) -> bool:
    """Whether a product sums one tensor, or its squares, along some of its axes: rows with themselves, or with a number."""
    if call.name not in PRODUCTS or len({*_varying(tensor_operands(call.node))}) != 1:
        return False
    found = factors(call, fresh(shape_of(known_tensor(call.node))))
    if found is None or found.addend is not None:
        return False
    own = [{axis for dim in dims for axis in dim} for node, dims in found.factors if _varying([node])]
    if len(own) == 1:
        return bool(found.summed) and own[0].issuperset(found.summed)
    return len(own) == 2 and own[0] == own[1]


def row_of(statistic: Call) -> fx.Node:
    """The tensor that a statistic is of; an ``einsum`` is given its equation first, a product may have a number beside it."""
    operands = tensor_operands(statistic.node)
    if statistic.name not in PRODUCTS:
        return statistic.input if isinstance(statistic.input, fx.Node) else operands[0]
    return next((each for each in operands if _varying([each])), operands[0])


def _varying(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The tensors behind layouts that are more than one number, or a number that is no plain factor: zero, or not finite."""
    calls = {node: read(node) for node in map(behind_layout, nodes)}
    values = {node: None if call is None else constant_value(call) for node, call in calls.items()}
    return [node for node, value in values.items() if value is None or value == 0 or not math.isfinite(value)]


def as_mean(call: Call) -> Call | None:
    """A pool over all that the last dimensions hold, as the mean that it is; None for any other call."""
    rank, source, result = _POOLS.get(call.name), tensor_of(call.input), tensor_of(call.node)
    if rank is None or source is None or result is None:
        return None
    pooled = shape_of(source)[-rank:]
    if call.name.startswith("adaptive"):
        is_whole = all(size == 1 for size in shape_of(result)[-rank:])
    else:
        kernel, padding = (call.get(name, default) for name, default in (("kernel_size", None), ("padding", 0)))
        kernel = tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel,) * rank
        is_plain = padding in (0, (0,) * rank, [0] * rank) and call.get("divisor_override") is None
        is_whole = is_plain and (kernel * rank)[:rank] == tuple(pooled)
    return (
        Call("mean", call.node, {"input": call.input, "dim": tuple(range(-rank, 0)), "keepdim": True})
        if is_whole
        else None
    )
