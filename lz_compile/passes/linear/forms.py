"""In which form kernels get a weight: as it is stored, as the graph makes it in every call, or made once for all calls.

What is made once is in the order of its groups, its rows lie in one piece, and numbers of four bits are two in a byte.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from lz_compile.passes.formula.axes import atoms
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor
from lz_compile.passes.linear.kept import why_not_kept
from lz_compile.passes.linear.reading import Weight

_SIXTEEN = 16


def brought(effects: Effects, weight: Weight) -> Weight:
    """A weight in the form that kernels get.

    Raises:
        RefusedError: its columns would be put in another order in every call.
    """
    is_apart = weight.unpacked is None and is_transposed(weight)
    if weight.packing != "none" or not (weight.unpacked or weight.order or is_apart):
        return weight
    node, low = weight.leaf.node, _lowest(weight)
    numbers = known_tensor(node).numel()
    if not isinstance(numbers, int):
        why = "its size is symbolic"
    else:
        why = why_not_kept(effects, node, numbers if low is None else numbers // 2)
    if why and weight.order is not None:
        text = f"columns of a group are no neighbours, and would be put in order in every call: {why}"
        raise RefusedError("NOT_DEQUANTISED", text, "store the columns of each group side by side")
    if why:
        return replace(weight, unkept=why if weight.unpacked else "")
    if low is None:
        return replace(weight, is_kept=True)
    summand = sympy.expand(weight.summand + weight.scale * low)
    return replace(weight, is_kept=True, low=low, summand=summand, packing="low_half")


def _lowest(weight: Weight) -> int | None:
    """The least of sixteen numbers that a weight may have; None where it has others, or no even number in a row."""
    columns = [axis.size for axis in atoms(weight.columns)]
    is_even = all(isinstance(size, int) for size in columns) and any(size % 2 == 0 for size in columns)
    if weight.unpacked is None or not is_even:
        return None
    low, high = weight.unpacked.bounds
    return low if high - low < _SIXTEEN else None


def is_transposed(weight: Weight) -> bool:
    """Whether neighbours in a row of a weight are none in memory, as it is stored."""
    stored = known_tensor(weight.leaf.node)
    last = max((place for place, dim in enumerate(weight.leaf.dims) if dim), default=0)  # others have one element
    return atoms(weight.leaf.dims[last])[-1:] != atoms(weight.stored_columns)[-1:] or stored.stride(last) != 1
