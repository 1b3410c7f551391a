"""Whose memory is whose, before and after an edit, as far as somebody can see it behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from lz_compile.passes.editing.stretch import Stretch, operands_of
from lz_compile.passes.formula import layout
from lz_compile.passes.graph.snapshot import Was
from lz_compile.passes.graph.view import Call, memories_of, read
from lz_compile.passes.graph.writes import overwritten
from lz_compile.passes.proof.running import SCAN
from lz_compile.passes.proof.trial_run import Ran


class WrittenBehind(Exception):
    """Values lie elsewhere after an edit, and that memory is written behind: a longer stretch tells whether it matters.

    ``behind`` is how many calls come after the last that touches that memory.
    """

    def __init__(self, behind: int) -> None:
        super().__init__(f"memory is touched until {behind} calls before the end")
        self.behind = behind


def shared_otherwise(stretch: Stretch, original: Ran, edited: Ran) -> Iterator[str]:
    """Values that have memory in common on one side only, and both leave the graph.

    Raises:
        WrittenBehind: there are such, one of which is written behind.
    """
    nodes = [*(old for old, _ in stretch.read), *original.inputs]
    sides = [[*ran.values, *(ran.inputs[node] for node in original.inputs)] for ran in (original, edited)]
    overwritten_behind, leaving = written(stretch.behind), _leaving(stretch)
    pairs = (_in_one_storage(side, len(stretch.read)) for side in sides)
    for first, second in sorted(set().union(*pairs)):
        pair = (nodes[first], nodes[second])
        own = overwritten_behind.intersection((*memories_of(pair[0]), *memories_of(pair[1])))
        if not (own or leaving.issuperset(pair)):
            continue
        was, now = (_have_common_memory(side[first], side[second]) for side in sides)
        if was != now and own:
            raise WrittenBehind(_behind_last_touch(stretch, own))
        if leaving.issuperset(pair):  # what lies in one storage also counts its writes together, for autograd
            was, now = ((0, 1) in _in_one_storage((side[first], side[second]), 1) for side in sides)
        if was != now:
            verb = "shares memory" if now else "shares no memory"
            yield f"{nodes[first].name} {verb} with {nodes[second].name}"


def _in_one_storage(values: Sequence[Any], results: int) -> set[tuple[int, int]]:
    """The places of tensors that lie in one storage, each of the first ``results`` with all behind it.

    The others were handed in, and lie where they lay.
    """
    storages: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel():
            storages.setdefault(value.untyped_storage()._cdata, []).append(place)
    return {
        (first, second)
        for places in storages.values()
        for index, first in enumerate(places)
        if first < results
        for second in places[index + 1 :]
    }


def _have_common_memory(one: Any, other: Any) -> bool:
    """Whether two tensors have an element in common."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not one.numel() or not other.numel():
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    if one.dtype != other.dtype:
        return True
    start = min(one.storage_offset(), other.storage_offset())
    spans = [(each.storage_offset() - start, _span(each)) for each in (one, other)]
    if spans[0][0] >= sum(spans[1]) or spans[1][0] >= sum(spans[0]):
        return False
    taken = torch.zeros(max(map(sum, spans)), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), spans[0][0]).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), spans[1][0]).any())


def _span(value: torch.Tensor) -> int:
    return 1 + sum((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True))


def written(calls: Sequence[Was]) -> set[int]:
    """The memory that calls write to."""
    found: set[int] = set()
    for was in calls:
        if was.target is SCAN:  # a step writes to nothing that it is handed
            continue
        if isinstance(was.target, torch._ops.HigherOrderOperator):  # who knows what it does inside
            nodes = operands_of(was)
        else:
            call = read(cast("fx.Node", was))  # of an erased node, the arguments are gone
            nodes = [] if call is None else overwritten(call)
        found.update(memory for node in nodes for memory in memories_of(node))
    return found


def _behind_last_touch(stretch: Stretch, memory: set[int]) -> int:
    """How many calls come after the last one that reads or writes memory, but for the graph's output."""
    calls = [was for was in stretch.behind if was.op != "output"]
    touching = (any(not memory.isdisjoint(memories_of(node)) for node in operands_of(was)) for was in calls)
    last = max(index for index, touches in enumerate(touching) if touches)
    return len(stretch.behind) - last - 1


def _leaving(stretch: Stretch) -> set[fx.Node]:
    """Nodes that the graph returns, by themselves or as a view, or that its caller has."""
    found = {was.node for was in (*stretch.ahead, *stretch.before) if was.op in ("placeholder", "get_attr")}
    given = {memory for node in found for memory in memories_of(node)}
    for was in reversed(stretch.behind):
        call = read(was.node)
        if was.op == "output" or (was.node in found and call is not None and may_be_view(call, operands_of(was))):
            found.update(operands_of(was))
    return found | {was.node for was in stretch.ahead if not given.isdisjoint(memories_of(was.node))}


def may_be_view(call: Call, operands: Iterable[fx.Node]) -> bool:
    """Whether a result may share memory with what a call reads: as a view, or since there is nothing to be done."""
    if layout.is_view(call) or call.is_inplace or call.name == "getitem":
        return True
    return not set(memories_of(call.node)).isdisjoint(memory for node in operands for memory in memories_of(node))
