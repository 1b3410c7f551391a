"""What two runs of the same calls gave, held against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.passes.editing.stretch import Stretch, operands_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.moves import STRIDED, order_of, strides_matter, that_count
from lz_compile.passes.graph.snapshot import Was
from lz_compile.passes.graph.view import Call, is_subclass, memories_of, reached, read, tensors_in, value_of
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
    inputs = [node for node in original.inputs if not _is_done_with(node, stretch)]
    nodes = [*(old for old, _ in stretch.read), *inputs]
    sides = [[*ran.values, *(ran.inputs[node] for node in inputs)] for ran in (original, edited)]
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


def touched_behind(stretch: Stretch) -> int | None:
    """How many calls come after the last that touches memory which is written both in a stretch and behind it, if any is.

    What lies there in between is nobody's matter, if nobody reads it: a longer stretch tells.
    """
    both = written([*stretch.before, *stretch.after]) & written(stretch.behind)
    return _behind_last_touch(stretch, both) if both else None


def seen_of(stretch: Stretch, nodes: Sequence[fx.Node]) -> list[tuple[bool, bool, bool]]:
    """Whether each value leaves the graph, is written behind by any name, and may be anything by then."""
    leaving, behind = _leaving(stretch), written(stretch.behind)
    return [(node in leaving, not behind.isdisjoint(memories_of(node)), _is_done_with(node, stretch)) for node in nodes]


def _leaving(stretch: Stretch) -> set[fx.Node]:
    """Nodes that the graph returns, by themselves or as a view, or that its caller has."""
    found = {was.node for was in (*stretch.ahead, *stretch.before) if was.op in ("placeholder", "get_attr")}
    given = {memory for node in found for memory in memories_of(node)}
    for was in reversed(stretch.behind):
        call = read(cast("fx.Node", was))
        if was.op == "output" or (was.node in found and call is not None and may_be_view(call, operands_of(was))):
            found.update(operands_of(was))
    return found | {was.node for was in stretch.ahead if not given.isdisjoint(memories_of(was.node))}


def may_be_view(call: Call, operands: Iterable[fx.Node]) -> bool:
    """Whether a result may share memory with what a call reads: as a view, or since there is nothing to be done."""
    if layout.is_view(call) or call.is_inplace or call.name == "getitem":
        return True
    return not set(memories_of(call.node)).isdisjoint(memory for node in operands for memory in memories_of(node))


#: Rounding of that many operations in a row is no difference, of the largest value of a tensor.
_ROUNDINGS = 256
_COARSEST = 0.05
_SMALL = 1 << 22
_FLOAT64 = 1e-8

#: How far results of a dtype may be apart, of the largest of them.
Rounding: TypeAlias = Callable[[torch.dtype], float]


def exact(_kind: torch.dtype) -> float:
    """In float64."""
    return _FLOAT64


def of_sums(kind: torch.dtype, *, least: float = 0.0) -> float:
    """Of long sums in a dtype; ``least`` is the unit of what is coarser among what was computed."""
    return min(_ROUNDINGS * max(torch.finfo(kind).eps, least), _COARSEST)


@dataclass(frozen=True)
class Difference:
    """What is another one; rounding may explain that of values."""

    text: str
    may_be_rounding: bool = False


def differences(
    stretch: Stretch, original: Ran, edited: Ran, rounding: Rounding, *, all_strides: bool = False
) -> Iterator[Difference]:
    """Everything that differs after an edit; strides where its graph shows them, or all."""
    if edited.error:
        yield Difference(f"the calls in their place raise {edited.error}")
        return
    overwritten = written([*stretch.before, *stretch.after])
    inputs = {
        node: each
        for node, each in original.inputs.items()
        if (_is_small(each) or not overwritten.isdisjoint(memories_of(node))) and not _is_done_with(node, stretch)
    }
    scale = cache(lambda: _scale(tensors_in([original.values, list(inputs.values())])))
    for (old, new), one, other in zip(stretch.read, original.values, edited.values, strict=True):
        strides = torch.Tensor.stride if all_strides else _strides_seen_of(new)
        yield from _unlike(old.name, one, other, strides, scale, rounding)
    for node, value in inputs.items():
        yield from _unlike(f"{node.name} afterwards", value, edited.inputs[node], torch.Tensor.stride, scale, rounding)
    yield from map(Difference, shared_otherwise(stretch, original, edited))
    if original.gradients is None:
        return
    if edited.gradients is None or edited.raising:
        yield Difference("its backward pass raises")
        return
    largest = cache(lambda: _scale(tensors_in(original.gradients)))
    for index, (one, other) in enumerate(zip(original.gradients, edited.gradients, strict=True)):
        name = f"the gradient of input {index}"
        if (one is None) != (other is None):
            yield Difference(
                f"{name} is {'none' if other is None else 'there'}, and was {'none' if one is None else 'there'}"
            )
        elif one is not None and other is not None:
            yield from _apart(name, one, other, largest, rounding)


def _is_done_with(node: fx.Node, stretch: Stretch) -> bool:
    """Whether nobody reads the memory of what was made ahead after the edit, by whichever name: it may hold anything."""
    memory = memories_of(node)
    return bool(memory) and stretch.held.isdisjoint(memory)


def _scale(values: Sequence[torch.Tensor]) -> float:
    return max((_largest(each) for each in values), default=0.0)


def _largest(value: torch.Tensor) -> float:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(comparable(value).abs().double().nan_to_num(0.0, 0.0, 0.0).max())


def comparable(value: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that has arithmetic."""
    value = value.detach()
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _unlike(
    name: str,
    one: Any,
    other: Any,
    strides: Callable[[torch.Tensor], Any],
    scale: Callable[[], float],
    rounding: Rounding,
) -> Iterator[Difference]:
    if is_subclass(one) and is_subclass(other):
        one, other = tensors_in(one), tensors_in(other)
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False))
    if pytree.tree_structure(one) != pytree.tree_structure(other):
        yield Difference(f"{name} has another structure")
    for first, second in pairs:
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            if first is not second and first != second:
                yield Difference(f"{name} is {second!r}, and was {first!r}")
            continue
        was, now = ({**_kind(each), "strides": that_count(strides(each), each)} for each in (first, second))
        other_kinds = [f"{name} has {what} {now[what]}, and had {was[what]}" for what in was if was[what] != now[what]]
        yield from map(Difference, other_kinds[:1])
        if not other_kinds:
            yield from _apart(name, first, second, scale, rounding)


def _kind(value: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": value.dtype,
        "device": value.device,
        "shape": tuple(value.shape),
        "requires_grad": value.requires_grad,
    }


def _strides_seen_of(node: fx.Node) -> Callable[[torch.Tensor], Sequence[int]]:
    """What can be seen behind of the strides of a value: all, their order, or nothing."""

    def readers(user: fx.Node) -> Iterable[fx.Node]:
        call = read(user)
        shows = call is not None and (may_be_view(call, user.all_input_nodes) or isinstance(value_of(user), tuple))
        return user.users if shows else ()

    calls = map(read, reached(node.users, readers))
    if any(call is None or call.is_inplace or call.name in STRIDED for call in calls):
        return torch.Tensor.stride
    return order_of if strides_matter(node) else lambda _: ()


def _apart(
    name: str, one: torch.Tensor, other: torch.Tensor, scale: Callable[[], float], rounding: Rounding
) -> Iterator[Difference]:
    if not (one.is_floating_point() or one.is_complex()):
        if not torch.equal(one, other):
            yield Difference(f"{name} has other values")
        return
    kind, one, other = one.dtype, comparable(one), comparable(other)
    if torch.equal(one, other):
        return
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, 0.0, (one - other).abs().double().nan_to_num(math.inf))
    worst = float(off.max()) if off.numel() else 0.0
    if worst > rounding(kind) * (_largest(one) + 1e-6 * scale()):
        text = (
            f"{name} is off by {worst:.2g}"
            if math.isfinite(worst)
            else f"{name} is NaN or infinite where it was not, or was"
        )
        yield Difference(text, may_be_rounding=True)


def _is_small(value: Any) -> bool:
    """Whether a tensor is compared even if nothing is known to write to it."""
    return sum(each.numel() for each in tensors_in(value)) <= _SMALL
