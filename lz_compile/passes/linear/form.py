"""In which form kernels get a weight, and which values are functions of tensors that a module holds.

``lowering/kept.py`` notices when one of those tensors changes, so that they can be computed once for all calls; here is asked
whether that pays, and where it cannot be done.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch import fx

from lz_compile.lowering import frames
from lz_compile.passes.formula.axes import atoms
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import known_tensor, read, tensors_in, value_of
from lz_compile.passes.graph.writes import writes
from lz_compile.passes.linear.recogniser import Weight
from lz_compile.passes.masks.constants import DETERMINISTIC

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


def sources(effects: Effects, node: fx.Node) -> list[fx.Node] | str:
    """The tensors of modules that a value is computed from and from nothing else; else what is in the way."""
    found, seen, queue = list[fx.Node](), {node}, [node]
    while queue:
        each = queue.pop()
        if each.op == "placeholder":
            if not frames.is_held(each):
                return f"{told(each)} is no tensor of a module that tells of writes"
            found.append(each)
        else:
            why = _why_not(effects, each)
            if why:
                return why
            fresh = [operand for operand in each.all_input_nodes if operand not in seen]
            queue += fresh
            seen.update(fresh)
    return sorted(found, key=lambda each: -bytes_of(each)) or f"{told(node)} is made of no tensor of a module"


def _why_not(effects: Effects, node: fx.Node) -> str:
    """Why a call cannot be made once for all calls of the graph; empty where it can."""
    is_new = node not in effects.position  # put there with the kernel
    call = read(node) if is_new else effects.calls.get(node)
    if call is None or call.name not in DETERMINISTIC or not tensors_in(value_of(node)):
        return f"{told(node)} is {node.op if call is None else call.name}"
    if is_new:
        return ""
    if writes(call) or effects.is_overwritten(node):
        return f"{told(node)} is written in place"
    ambient = effects.ambient(node)
    return f"{told(node)} runs under autocast or a transform" if ambient.autocast or ambient.is_transformed else ""


def why_not_kept(effects: Effects, node: fx.Node, kept_bytes: int) -> str:
    """Why a form of a weight is not kept beside what a model stores; empty where it is.

    Args:
        effects: of the graph.
        node: the weight, in its numbers.
        kept_bytes: that its form takes.
    """
    device = known_tensor(node).device.type
    if not effects.may_keep:
        return "layerzero.keep_weights is off"
    if device != "cpu":
        return f"to look whether it changed would wait for {device}"
    found = sources(effects, node)
    if isinstance(found, str):
        return found
    overwritten = next((each for each in found if effects.is_overwritten(each)), None)
    if overwritten is not None:
        return f"{told(overwritten)} is written in place"
    own = sum(map(bytes_of, found))
    return f"{kept_bytes} bytes beside {own} are more than twice as many" if kept_bytes > own else ""


def bytes_of(node: fx.Node) -> int:
    """How many a tensor takes; none where its size is symbolic."""
    tensor = known_tensor(node)
    size = tensor.numel()
    return size * tensor.itemsize if isinstance(size, int) else 0
