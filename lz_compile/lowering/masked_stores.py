"""Numbers that are stored where a mask holds, so that Inductor reads what was stored there before."""

from __future__ import annotations

import torch
from torch import fx

_ATEN = torch.ops.aten


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
