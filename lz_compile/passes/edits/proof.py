"""Whether an edit changed what a graph computes: the calls that differ are run before and after, at their real sizes.

Values, memory that was written, gradients, dtypes, strides and flags have to be the same. What is computed in another
order may differ by rounding; where it differs by more, both are run in float64, where it may not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.passes import layout
from lz_compile.passes.dead import is_torchs
from lz_compile.passes.edits.snapshot import Snapshot, Was
from lz_compile.passes.edits.stretch import Stretch, edited_stretch, operands_of
from lz_compile.passes.edits.trial_run import SCAN, NotRunnableError, Ran, random_inputs, run, sizes_of
from lz_compile.passes.effects import ambient_behind, overwritten
from lz_compile.passes.rewrite import strides_matter
from lz_compile.passes.view import Call, memory_of, read, value_of
from lz_compile.runtime import machine
from lz_compile.runtime.isolation import Outside, isolated
from lz_compile.runtime.store import Store

#: Of all inputs and results of a stretch together; what is larger is not run.
_MOST_BYTES = 1 << 32
#: Rounding of that many operations in a row is no difference, of the largest value of a tensor.
_ROUNDINGS = 256
_COARSEST = 0.05
_SMALL = 1 << 22
#: Verdicts on graphs with so many nodes are kept on disk.
_REMEMBERED = 4000
_FLOAT64 = 1e-8


@dataclass(frozen=True)
class Verdict:
    """``differs`` says what is another one after the edit (empty: nothing), ``unproven`` why it could not be run."""

    differs: str = ""
    unproven: str = ""


def difference(before: Snapshot, module: fx.GraphModule) -> Verdict:
    """Hold a graph against what it was, on random inputs; remembered on disk by all that decides about it."""
    if not before.differs():
        return Verdict()
    after = Snapshot(module)
    has_others = any(not is_torchs(was.target) for was in (*before.nodes, *after.nodes))
    if len(before.nodes) < _REMEMBERED or has_others:  # running takes as long as describing; others' code may change
        return _difference(before, after)
    store, key = Store("edits"), _key(before, after)
    verdict = store.load(key, Verdict)
    if verdict is None:
        verdict = _difference(before, after)
        store.save(key, asdict(verdict))
    return verdict


def _key(before: Snapshot, after: Snapshot) -> str:
    devices = {value.device for value in _tensors([was.meta.get("example_value") for was in before.nodes])}
    lines = [*sorted(map(machine.proven_on, devices)), repr(Outside.now())]
    lines += [str(torch.is_grad_enabled()), *before.lines(), "becomes", *after.lines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _difference(before: Snapshot, after: Snapshot) -> Verdict:
    ahead = behind = len(before.nodes)
    refuted, first = "", sum(was.op == "placeholder" for was in before.nodes)
    while (stretch := edited_stretch(before.nodes, after.nodes, ahead, behind)) is not None:
        try:
            trial = _Trial(stretch, before, after)
            differs = trial.difference(positive=False)
            if (
                not differs and trial.is_special
            ):  # roots and logarithms of negative numbers hide what is computed of them
                differs = trial.difference(positive=True)
        except NotRunnableError as error:
            return Verdict(refuted, "" if refuted else str(error))
        except _WrittenBehind as error:
            behind = error.behind
            continue
        except (RuntimeError, TypeError) as error:  # dtypes without arithmetic, out of memory
            return Verdict(refuted, "" if refuted else f"its results cannot be compared ({error})")
        if not differs or len(stretch.ahead) <= first:
            return Verdict(differs)
        # What was made up may be related: memory holds what others know by name, a call gives what another one gave.
        refuted, start = differs, len(stretch.ahead)
        written = _first_write(stretch.ahead, trial.edge)
        ahead = max(start - max(len(stretch.before), 1), first) if written is None else min(written, start - 1)
    return Verdict()


class _WrittenBehind(Exception):
    """Values lie elsewhere after an edit, and that memory is written behind: a longer stretch tells whether it matters.

    ``behind`` is how many calls come after the last that touches that memory.
    """

    def __init__(self, behind: int) -> None:
        super().__init__(f"memory is touched until {behind} calls before the end")
        self.behind = behind


class _Trial:
    """One edit, run before and after."""

    def __init__(self, stretch: Stretch, before: Snapshot, after: Snapshot) -> None:
        self._stretch = stretch
        self._sides = (
            (stretch.before, [old for old, _ in stretch.read], before.attribute),
            (stretch.after, [new for _, new in stretch.read], after.attribute),
        )
        self._ambient = ambient_behind([was.node for was in stretch.ahead])
        inside = next((name for name in self._ambient.other if "_nesting" in name), None)
        if inside is not None:
            raise NotRunnableError(f"it lies inside of a transform ({inside})")
        self.edge = _edge(stretch)
        #: Whether anything was NaN or infinite before the edit.
        self.is_special = False
        examples = [was.meta.get("example_value") for was in stretch.before]
        _refuse_large([*examples, *(node.meta.get("example_value") for node in self.edge)])

    def difference(self, *, positive: bool) -> str:
        """What is another one after the edit, empty if nothing is."""
        sides = self._both(positive, doubled=False)
        found = list(_differences(self._stretch, *sides, _of_sums))
        text = next((each.text for each in found if not each.may_be_rounding), "")
        if text or not found:
            return text
        try:
            sides = self._both(positive, doubled=True)
        except NotRunnableError:  # dtypes are spelled out in between
            kinds = sides[0].kinds | sides[1].kinds
        else:
            kinds = (sides[0].kinds | sides[1].kinds) - {torch.float64}
        coarsest = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        rounding = partial(_of_sums, least=coarsest) if coarsest else _exact
        exact = (each for each in _differences(self._stretch, *sides, rounding) if each.may_be_rounding)
        return next((each.text for each in exact), "")

    def _both(self, positive: bool, *, doubled: bool) -> tuple[Ran, Ran]:
        original = self._run(0, positive, doubled)
        if isinstance(original, Exception):
            text = f"it does not run on random inputs ({type(original).__name__}: {original})"
            raise NotRunnableError(text) from original
        numbers = [*_tensors(original.values), *(original.gradients or ())]
        self.is_special |= any(each is not None and not bool(_comparable(each).isfinite().all()) for each in numbers)
        edited = self._run(1, positive, doubled)
        if isinstance(edited, NotRunnableError):
            raise edited
        if isinstance(edited, Exception):
            edited = Ran([], {}, None, error=f"{type(edited).__name__}: {edited}")
        return original, edited

    def _run(self, side: int, positive: bool, doubled: bool) -> Ran | Exception:
        calls, read, attribute = self._sides[side]
        records = torch.is_grad_enabled()
        inputs = random_inputs(self.edge, 0, positive=positive, doubled=doubled, with_grad=records)
        named = {operand for was in calls for operand in operands_of(was)}
        given = [was for was in self._stretch.ahead if was.op == "get_attr" and was.node in named]
        try:
            with isolated() as outside, outside.entered(), torch.set_grad_enabled(records):
                return run([*given, *calls], read, inputs, self._ambient, attribute, as_operators=side == 1)
        except Exception as error:  # noqa: BLE001 what a run raises is its result; the caller tells
            return error


def _edge(stretch: Stretch) -> list[fx.Node]:
    """What both sides read of the calls ahead, and what shares memory with that."""
    inside = {was.node for was in (*stretch.before, *stretch.after)}
    calls = (*stretch.before, *stretch.after)
    found = dict.fromkeys(node for was in calls for node in operands_of(was) if node not in inside)
    found.update(dict.fromkeys(node for pair in stretch.read for node in pair if node not in inside))
    return [node for node in found if node.op != "get_attr"]


def _first_write(calls: Sequence[Was], nodes: Sequence[fx.Node]) -> int | None:
    """The place of the first call that writes to memory of one of ``nodes``."""
    memory = {each for node in nodes for each in _memories(node)}
    for index, was in enumerate(calls):
        call = read(was.node)
        if call is not None and any(not memory.isdisjoint(_memories(node)) for node in overwritten(call)):
            return index
    return None


def _refuse_large(examples: Sequence[Any]) -> None:
    total = sum(math.prod(sizes_of(each.shape)) * each.element_size() for each in _tensors(examples))
    if total > _MOST_BYTES:
        raise NotRunnableError(f"a run would take {total >> 20} MiB")


#: How far results of a dtype may be apart, of the largest of them.
Rounding: TypeAlias = Callable[[torch.dtype], float]


def _exact(_kind: torch.dtype) -> float:
    return _FLOAT64


def _of_sums(kind: torch.dtype, *, least: float = 0.0) -> float:
    return min(_ROUNDINGS * max(torch.finfo(kind).eps, least), _COARSEST)


@dataclass(frozen=True)
class _Difference:
    text: str
    may_be_rounding: bool = False


def _differences(stretch: Stretch, original: Ran, edited: Ran, rounding: Rounding) -> Iterator[_Difference]:
    if edited.error:
        yield _Difference(f"the calls in their place raise {edited.error}")
        return
    written = _written([*stretch.before, *stretch.after])
    inputs = {
        node: each
        for node, each in original.inputs.items()
        if _is_small(each) or not written.isdisjoint(_memories(node))
    }
    scale = cache(lambda: _scale(_tensors([original.values, list(inputs.values())])))
    for (old, new), one, other in zip(stretch.read, original.values, edited.values, strict=True):
        yield from _unlike(old.name, one, other, _strides_seen_of(new), scale, rounding)
    for node, value in inputs.items():
        yield from _unlike(f"{node.name} afterwards", value, edited.inputs[node], torch.Tensor.stride, scale, rounding)
    yield from _shared_otherwise(stretch, original, edited)
    if original.gradients is None:
        return
    if edited.gradients is None:
        yield _Difference("its backward pass raises")
        return
    largest = cache(lambda: _scale(_tensors(original.gradients)))
    for index, (one, other) in enumerate(zip(original.gradients, edited.gradients, strict=True)):
        name = f"the gradient of input {index}"
        if (one is None) != (other is None):
            yield _Difference(
                f"{name} is {'none' if other is None else 'there'}, and was {'none' if one is None else 'there'}"
            )
        elif one is not None and other is not None:
            yield from _apart(name, one, other, largest, rounding)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _scale(values: Sequence[torch.Tensor]) -> float:
    return max((_largest(each) for each in values), default=0.0)


def _largest(value: torch.Tensor) -> float:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(_comparable(value).abs().double().nan_to_num(0.0, 0.0, 0.0).max())


def _comparable(value: torch.Tensor) -> torch.Tensor:
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
) -> Iterator[_Difference]:
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False))
    if pytree.tree_structure(one) != pytree.tree_structure(other):
        yield _Difference(f"{name} has another structure")
    for first, second in pairs:
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            if first is not second and first != second:
                yield _Difference(f"{name} is {second!r}, and was {first!r}")
            continue
        was, now = ({**_kind(each), "strides": _that_count(strides(each), each)} for each in (first, second))
        other_kinds = [f"{name} has {what} {now[what]}, and had {was[what]}" for what in was if was[what] != now[what]]
        yield from map(_Difference, other_kinds[:1])
        if not other_kinds:
            yield from _apart(name, first, second, scale, rounding)


def _kind(value: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": value.dtype,
        "device": value.device,
        "shape": tuple(value.shape),
        "requires_grad": value.requires_grad,
    }


#: Calls to which strides matter exactly; to pointwise ones, only their order does.
_STRIDED = frozenset({"view", "view_as", "as_strided", "stride", "data_ptr", "is_contiguous", "storage_offset"})


def _that_count(strides: Sequence[int], value: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for stride, extent in zip(strides, value.shape, strict=False) if extent > 1)


def _strides_seen_of(node: fx.Node) -> Callable[[torch.Tensor], Sequence[int]]:
    """What can be seen behind of the strides of a value: all, their order, or nothing."""
    queue, seen = list(node.users), set()
    while queue:
        user = queue.pop()
        call = read(user)
        if call is None or call.is_inplace or call.name in _STRIDED:
            return torch.Tensor.stride
        if user not in seen and (_may_be_view(call) or isinstance(value_of(user), tuple)):
            queue.extend(user.users)
        seen.add(user)
    if strides_matter(node):
        return lambda value: torch.empty_like(value).stride()
    return lambda _: ()


def _apart(
    name: str, one: torch.Tensor, other: torch.Tensor, scale: Callable[[], float], rounding: Rounding
) -> Iterator[_Difference]:
    if not (one.is_floating_point() or one.is_complex()):
        if not torch.equal(one, other):
            yield _Difference(f"{name} has other values")
        return
    kind, one, other = one.dtype, _comparable(one), _comparable(other)
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
        yield _Difference(text, may_be_rounding=True)


def _shared_otherwise(stretch: Stretch, original: Ran, edited: Ran) -> Iterator[_Difference]:
    """Values that have memory in common on one side only, and both leave the graph.

    Raises:
        _WrittenBehind: there are such, one of which is written behind.
    """
    nodes = [*(old for old, _ in stretch.read), *original.inputs]
    sides = [[*ran.values, *(ran.inputs[node] for node in original.inputs)] for ran in (original, edited)]
    written, leaving = _written(stretch.behind), _leaving(stretch)
    pairs = (_in_one_storage(side, len(stretch.read)) for side in sides)
    for first, second in sorted(set().union(*pairs)):
        pair = (nodes[first], nodes[second])
        own = written.intersection((*_memories(pair[0]), *_memories(pair[1])))
        if not (own or leaving.issuperset(pair)):
            continue
        was, now = (_have_common_memory(side[first], side[second]) for side in sides)
        if was != now and own:
            raise _WrittenBehind(_behind_last_touch(stretch, own))
        if leaving.issuperset(pair):  # what lies in one storage also counts its writes together, for autograd
            was, now = (_are_in_one_storage(side[first], side[second]) for side in sides)
        if was != now:
            verb = "shares memory" if now else "shares no memory"
            yield _Difference(f"{nodes[first].name} {verb} with {nodes[second].name}")


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


def _is_small(value: Any) -> bool:
    """Whether a tensor is compared even if nothing is known to write to it."""
    return sum(each.numel() for each in _tensors(value)) <= _SMALL


def _are_in_one_storage(one: Any, other: Any) -> bool:
    return (0, 1) in _in_one_storage((one, other), 1)


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


def _written(calls: Sequence[Was]) -> set[int]:
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
        found.update(memory for node in nodes for memory in _memories(node))
    return found


def _behind_last_touch(stretch: Stretch, memory: set[int]) -> int:
    """How many calls come after the last one that reads or writes memory, but for the graph's output."""
    calls = [was for was in stretch.behind if was.op != "output"]
    touching = (any(not memory.isdisjoint(_memories(node)) for node in operands_of(was)) for was in calls)
    last = max(index for index, touches in enumerate(touching) if touches)
    return len(stretch.behind) - last - 1


def _leaving(stretch: Stretch) -> set[fx.Node]:
    """Nodes that the graph returns, by themselves or as a view, or that its caller has."""
    found = {was.node for was in (*stretch.ahead, *stretch.before) if was.op in ("placeholder", "get_attr")}
    given = {memory for node in found for memory in _memories(node)}
    for was in reversed(stretch.behind):
        call = read(was.node)
        if was.op == "output" or (was.node in found and call is not None and _may_be_view(call)):
            found.update(operands_of(was))
    return found | {was.node for was in stretch.ahead if not given.isdisjoint(_memories(was.node))}


def _may_be_view(call: Call) -> bool:
    return layout.is_view(call) or call.is_inplace or call.name == "getitem"


def _memories(node: fx.Node) -> list[int]:
    return [memory for each in _tensors(node.meta.get("example_value")) if (memory := memory_of(each)) is not None]
