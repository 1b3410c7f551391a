"""Calls that take one position along a dimension, as ``x[:, 0]``, ``x.select(1, 0)`` and ``x.unbind(1)[0]`` do."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, tensor_of

#: The tensor, the dimension, the position, whether the dimension stays, all nodes, and dimensions that are inserted.
Piece: TypeAlias = tuple[Any, int, int, bool, frozenset[fx.Node], tuple[int, ...]]


def piece(effects: Effects, call: Call) -> Piece | None:
    """What a call takes, if that is one position along a dimension."""
    source, own = tensor_of(call.input), frozenset({call.node})
    if call.name == "select" and source is not None:
        dim, index = call.get("dim"), call.get("index")
        return (call.input, dim % source.dim(), index, False, own, ()) if isinstance(index, int) else None
    if call.name == "narrow" and source is not None and call.get("length") == 1:
        start = call.get("start")
        return (call.input, call.get("dim") % source.dim(), start, True, own, ()) if isinstance(start, int) else None
    if call.name != "getitem":
        return None
    if source is not None:
        return _indexed(call, source)
    outer = effects.calls.get(call.input) if isinstance(call.input, fx.Node) else None
    index = call.arguments.get("#1")
    whole = None if outer is None else tensor_of(outer.input)
    if outer is None or whole is None or not isinstance(index, int) or not whole.dim():
        return None
    own |= {outer.node}
    dim = outer.get("dim", outer.arguments.get("#1" if outer.name == "unbind" else "#2", 0))
    if not isinstance(dim, int):  # a maximum over everything, for one
        return None
    dim %= whole.dim()
    if outer.name == "unbind":
        return outer.input, dim, index, False, own, ()
    parts = outer.arguments.get("#1", outer.get("chunks", outer.get("split_size_or_sections", outer.get("split_size"))))
    count = shape_of(whole)[dim]
    ones = [1] * count if isinstance(count, int) else []
    is_single = parts == count if outer.name in ("chunk", "tensor_split") else parts in (1, ones, tuple(ones))
    if outer.name in ("chunk", "split", "split_with_sizes", "tensor_split") and is_single:
        return outer.input, dim, index, True, own, ()
    return None


def _indexed(call: Call, source: torch.Tensor) -> Piece | None:
    """What an index takes, if that is one position."""
    index = call.arguments.get("#1")
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or isinstance(item, (int, slice))) for item in items):
        return None
    named = [item for item in items if item is not None]
    if Ellipsis in named:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (source.dim() - len(named) + 1)
    own, inserted, place, found = 0, [], 0, []
    for item in items:
        if item is None:
            inserted.append(place)
        elif item != slice(None):
            found.append((own, item))
        own += item is not None
        place += not isinstance(item, int)
    taken = _taken(found[0][1], shape_of(source)[found[0][0]]) if len(found) == 1 else None
    if taken is None:
        return None
    start, keeps_dim = taken
    return call.input, found[0][0], start, keeps_dim, frozenset({call.node}), tuple(inserted)


def _taken(item: int | slice, size: Any) -> tuple[int, bool] | None:
    """The one position that an index takes, and whether the dimension stays."""
    if isinstance(item, int):
        return item, False
    start, stop = item.start or 0, item.stop
    if item.step not in (None, 1) or not isinstance(start, int):
        return None
    is_last = stop is None and (start == -1 or size == start + 1)
    return (start, True) if is_last or (isinstance(stop, int) and stop == start + 1) else None
