"""The two largest in the spellings that sort: ``topk``, ``sort``, ``msort`` and ``kthvalue``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lz_compile.passes.axes import shape_of
from lz_compile.passes.blends.blend_pieces import argument, call_of, piece
from lz_compile.passes.blends.blend_statistics import Rank
from lz_compile.passes.effects import Effects
from lz_compile.passes.view import Call, tensor_of


def _sorted(effects: Effects, values: Any) -> tuple[Rank, Mapping[int, int], int] | None:
    """What a tensor of ordered values is: its source, rank by position, and how many there are (0: unknown)."""
    call = call_of(effects, values)
    if call is None:
        return None
    nodes = {call.node}
    if call.name == "getitem" and call.get("#1") == 0:
        inner = call_of(effects, call.input)
        if inner is None:
            return None
        call, nodes = inner, {call.node, inner.node}
    source = tensor_of(call.input)
    if source is None or call.name not in ("topk", "sort", "msort"):
        return None
    dim = argument(call, "dim", "#2" if call.name == "topk" else "#1", 0 if call.name == "msort" else -1)
    if not isinstance(dim, int) or not source.dim():
        return None
    dim %= source.dim()
    extent = shape_of(source)[dim]
    size = extent if isinstance(extent, int) else 0
    if call.name == "topk":
        count = argument(call, "k", "#1", 0)
        is_plain = argument(call, "largest", "#3", True) is True and argument(call, "sorted", "#4", True) is True
        if not is_plain or not isinstance(count, int) or count < 2:
            return None
        places, size = {0: 0, 1: 1, -count: 0, 1 - count: 1}, count
    elif call.name == "sort" and argument(call, "descending", "#2", False) is True:
        places = {0: 0, 1: 1} | ({-size: 0, 1 - size: 1} if size else {})
    else:
        places = {-1: 0, -2: 1} | ({size - 1: 0, size - 2: 1} if size else {})
    if size == 1:
        return None
    rank = Rank(call.input, dim, 0, 0, False, frozenset(nodes), is_sorted=True)
    return rank, places, size


def picked(effects: Effects, call: Call) -> Rank | None:
    """One of the ordered values, with its dimension or without."""
    found = piece(effects, call)
    if found is None:
        return None
    values, dim, start, keeps_dim, nodes, inserted = found
    ordered = _sorted(effects, values)
    if ordered is None or ordered[0].dim != dim or start not in ordered[1]:
        return None
    rank, places, _ = ordered
    is_first = places[start] == 0
    return replace(
        rank,
        first=int(is_first),
        second=int(not is_first),
        keeps_dim=keeps_dim,
        nodes=rank.nodes | nodes,
        inserted=inserted,
        is_spelled=start not in (0, 1, -1, -2),
    )


def difference(effects: Effects, call: Call) -> Rank | None:
    """``diff`` of the two largest: the second minus the first."""
    ordered = _sorted(effects, call.input)
    dim = argument(call, "dim", "#2", -1)
    given = tensor_of(call.input)
    if ordered is None or given is None or dim % given.dim() != ordered[0].dim or shape_of(given)[dim] != 2:
        return None
    if argument(call, "n", "#1", 1) != 1 or {"prepend", "append"} & call.arguments.keys():
        return None
    sign = -1 if ordered[1].get(0) == 0 else 1
    rank = ordered[0]
    return replace(rank, first=sign, second=-sign, keeps_dim=True, nodes=rank.nodes | {call.node})


def kth(call: Call, values: Call) -> Rank | None:
    """``kthvalue``, which counts from the smallest."""
    source, count = tensor_of(call.input), argument(call, "k", "#1", 0)
    dim = argument(call, "dim", "#2", -1)
    if source is None or not source.dim() or not isinstance(dim, int) or not isinstance(count, int):
        return None
    dim %= source.dim()
    size = shape_of(source)[dim]
    if not isinstance(size, int) or size < 2 or size - count not in (0, 1):
        return None
    keeps_dim = argument(call, "keepdim", "#3", False) is True
    is_first = size == count
    nodes = frozenset({call.node, values.node})
    return Rank(call.input, dim, int(is_first), int(not is_first), keeps_dim, nodes, is_sorted=True, is_spelled=True)
