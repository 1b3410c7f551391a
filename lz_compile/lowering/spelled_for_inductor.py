"""What Inductor's own passes would lose, spelled so that they keep it: the factor of a sum, and what was stored before."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lz_compile.lowering.regions import behind_views

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default)


def choose_by_masks(graph: fx.Graph) -> None:
    """Make ``where(mask, value, x)`` of ``index_put(x, [mask], value)``, as Inductor itself reads it.

    Inductor (2.13) makes the store in place first, and then lets the name of that memory stand for the choice: an earlier
    store in place, ``x.index_add_(...)``, goes to the choice, which was computed without it. To be called ahead of its own
    passes.
    """
    for call in graph.find_nodes(op="call_function", target=_ATEN.index_put.default):
        x, indices, value, *rest = call.args
        mask = indices[0] if len(indices) == 1 else None
        held = None if mask is None else mask.meta["val"]
        if held is None or held.dtype != torch.bool or not held.dim() or not _is_number(value.meta["val"]):
            continue
        with graph.inserting_before(call):
            for _ in range(call.meta["val"].dim() - held.dim()):
                held = held.unsqueeze(-1)
                mask = graph.call_function(_ATEN.unsqueeze.default, (mask, -1))
                mask.meta = {**call.meta, "val": held}
            if rest == [True] or call.kwargs.get("accumulate", False):
                value = graph.call_function(_ATEN.add.Tensor, (x, value))
                value.meta = {**call.meta}
        call.target, call.args, call.kwargs = _ATEN.where.self, (mask, value, x), {}


def _is_number(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def spell_out_factors(graph: fx.Graph) -> None:
    """Make ``x + factor * (a @ b)`` of ``add(x, a @ b, alpha=factor)``, as Inductor does it with other sums.

    Inductor (2.13) joins product and sum by a pattern that takes a sum with a factor for one without: what
    ``mean.mul_(0.9).add_(a @ b, alpha=0.1)`` adds is ten times too much. To be called ahead of its own passes.
    """
    for call in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
        if call.kwargs.get("alpha", 1) == 1 or not any(map(_is_product, call.all_input_nodes)):
            continue
        (value, other), factor, held = call.args, call.kwargs["alpha"], call.meta["val"]
        if not isinstance(other, fx.Node):
            call.args, call.kwargs = (value, other * factor), {}
            continue
        with graph.inserting_before(call):
            if other.meta["val"].dtype != held.dtype:  # eager PyTorch scales in the dtype of the sum
                widened = graph.call_function(torch.ops.prims.convert_element_type.default, (other, held.dtype))
                widened.meta = {**call.meta, "val": other.meta["val"].to(held.dtype)}
                other = widened
            scaled = graph.call_function(_ATEN.mul.Tensor, (other, factor))
        scaled.meta = {**call.meta, "val": other.meta["val"] * fx.node.map_arg(factor, lambda node: node.meta["val"])}
        call.args, call.kwargs = (value, scaled), {}


def _is_product(node: Any) -> bool:
    """Whether nothing but views is between a node and a product: clones that lie alike are gone by then."""
    return behind_views(node)[0].target in _PRODUCTS
