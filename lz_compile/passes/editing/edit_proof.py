"""Whether an edit changed what a graph computes: the calls that differ are run before and after, at their real sizes.

Values, memory that was written, gradients, dtypes, strides and flags have to be the same. What is computed in another
order may differ by rounding; where it differs by more, both are run in float64, where it may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx

from lz_compile.ground import machine
from lz_compile.ground.events import trace
from lz_compile.ground.isolation import Outside, isolated
from lz_compile.ground.store import Store
from lz_compile.lowering import frames
from lz_compile.passes.editing.comparison import (
    Difference,
    Rounding,
    WrittenBehind,
    comparable,
    differences,
    exact,
    of_sums,
    seen_of,
    touched_behind,
    written,
)
from lz_compile.passes.editing.places import Chain, between
from lz_compile.passes.editing.stretch import Stretch, edited_stretch, operands_of
from lz_compile.passes.formula.equal_values import is_torchs
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.gradients import differentiated
from lz_compile.passes.graph.modes import ambient_behind
from lz_compile.passes.graph.snapshot import Snapshot, Was, kind_of
from lz_compile.passes.graph.view import memories_of, read, tensors_in
from lz_compile.passes.graph.writes import overwritten
from lz_compile.passes.proof.running import SCAN, NotRunnableError
from lz_compile.passes.proof.trial_run import Ran, Scans, random_inputs, run, sizes_of

#: Of all inputs and results of a stretch together; what is larger is not run, and from some size on in parts if it can be.
_MOST_BYTES, _MANY_BYTES = 1 << 32, 1 << 26
#: Looking for a part takes as long as running that many bytes in every call of a graph; there are so many at the most.
_LOOKED_FOR, _MOST_STEPS = 1 << 14, 64
#: Verdicts on graphs with so many nodes are kept on disk.
_REMEMBERED = 4000


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
        return _difference(before, after, module.graph)
    return Store("edits").recall(_facts(before, after), Verdict, lambda: _difference(before, after, module.graph))


def unlike_loop(module: Snapshot, scan: fx.Node) -> Verdict:
    """Hold PyTorch's own operator against the loop that edits are proven with in its place, gradients included."""
    place = next(place for place, was in enumerate(module.nodes) if was.node is scan)
    ahead, call, behind = module.nodes[:place], (module.nodes[place],), module.nodes[place + 1 :]
    kept = frozenset(operand for was in behind for operand in operands_of(was))
    stretch = Stretch(tuple(ahead), call, call, tuple(behind), ((scan, scan),), kept)
    try:
        edit = _Edit(module.nodes, module.nodes, module.attribute, module.attribute, scan.graph)
        trial = _Trial(stretch, edit, ("like", "operator"))
        with frames.apart():
            return Verdict(trial.difference(positive=False))
    except (NotRunnableError, WrittenBehind, RuntimeError, TypeError) as error:
        trace("a loop is not held against what it is proven with", error)
        return Verdict(unproven=str(error))


def _facts(before: Snapshot, after: Snapshot) -> str:
    """All that a verdict depends on."""
    devices = {value.device for value in tensors_in([was.meta.get("example_value") for was in before.nodes])}
    lines = [*sorted(map(machine.proven_on, devices)), repr(Outside.now())]
    lines += [str(torch.is_grad_enabled()), *before.lines(), "becomes", *after.lines()]
    return "\n".join(lines)


def _difference(before: Snapshot, after: Snapshot, graph: fx.Graph) -> Verdict:
    whole = _Edit(before.nodes, after.nodes, before.attribute, after.attribute, graph)
    size = whole.bytes()
    most = size // (_LOOKED_FOR * len(before.nodes)) if size > _MANY_BYTES else 0
    steps = _steps(before, after, most) if most > 1 else []
    if len(steps) > 1 and all(_verdict(step) == Verdict() for step in steps):
        return Verdict()
    return _verdict(whole)


def _steps(before: Snapshot, after: Snapshot, most: int) -> list[_Edit]:
    """An edit as several, at the most so many, each of a few calls."""
    names, new_names = ({str(was.target) for was in each.nodes if was.op == "get_attr"} for each in (before, after))
    if any(before.attribute(name) is not after.attribute(name) for name in names & new_names):
        return []

    def held(name: str) -> Any:
        return (after if name in new_names else before).attribute(name)

    chain, graphs = Chain(2 * len(before.nodes)), between(before.nodes, after.nodes, min(most, _MOST_STEPS))
    return [_Edit(one, other, held, held, None, chain) for one, other in pairwise(graphs)]


@dataclass(frozen=True)
class _Edit:
    """The calls of two graphs, and what those hold.

    The graph after it tells which gradients and strides are seen; without one all are. What was proven in its ``chain`` is
    not run again where it is the same, as in every layer.
    """

    before: Sequence[Was]
    after: Sequence[Was]
    held_before: Callable[[str], Any]
    held_after: Callable[[str], Any]
    graph: fx.Graph | None = None
    chain: Chain | None = None

    def bytes(self) -> int:
        """Of all that is handed in, and of all results; none if nobody knows a size."""
        stretch = edited_stretch(self.before, self.after, len(self.before), len(self.before))
        try:
            return 0 if stretch is None else _bytes_of(stretch, _edge(stretch))
        except NotRunnableError:
            return 0


def _verdict(edit: _Edit) -> Verdict:
    before, after = edit.before, edit.after
    ahead = behind = len(before)
    refuted, first = "", sum(was.op == "placeholder" for was in before)
    touched, is_whole = written(before), True
    while (stretch := edited_stretch(before, after, ahead, behind)) is not None:
        made = _made_ahead(stretch, touched) if is_whole else None
        if made is not None:
            ahead = made
            continue
        try:
            trial = _Trial(stretch, edit)
            differs = trial.outcome()
        except NotRunnableError as error:
            if is_whole and not refuted and ahead < len(before):
                ahead, is_whole = len(before), False
                continue
            return Verdict(refuted, "" if refuted else str(error))
        except WrittenBehind as error:
            behind = error.behind
            continue
        except (RuntimeError, TypeError) as error:  # dtypes without arithmetic, out of memory
            trace("an edit cannot be compared", error)
            return Verdict(refuted, "" if refuted else f"its results cannot be compared ({error})")
        longer = touched_behind(stretch) if differs else None
        if longer is not None:
            refuted, behind = differs, longer  # what cannot be run that far stays refuted
            continue
        if not differs or len(stretch.ahead) <= first:
            return Verdict(differs)
        # What was made up may be related: memory holds what others know by name, a call gives what another one gave.
        refuted, start = differs, len(stretch.ahead)
        write = _first_write(stretch.ahead, trial.edge)
        ahead = max(start - max(len(stretch.before), 1), first) if write is None else min(write, start - 1)
    return Verdict()


class _Trial:
    """One edit, run before and after."""

    def __init__(self, stretch: Stretch, edit: _Edit, scans: tuple[Scans, Scans] = ("loop", "like")) -> None:
        self._stretch = stretch
        self._edit = edit
        self._scans = scans
        self._sides = (
            (stretch.before, [old for old, _ in stretch.read], edit.held_before),
            (stretch.after, [new for _, new in stretch.read], edit.held_after),
        )
        self._ambient = ambient_behind([was.node for was in stretch.ahead])
        if self._ambient.is_transformed:
            raise NotRunnableError(f"it lies inside of a transform ({', '.join(self._ambient.other)})")
        self.edge = _edge(stretch)
        self._seen = _seen_behind(stretch, self.edge)
        #: Whether anything was NaN or infinite before the edit.
        self._is_special = False
        #: What integers are less than: where one is no index, zero is.
        self._below = 2
        self._scale: Callable[[int], float] = lambda _count: 1.0
        #: The places of values, what is seen behind them, that nobody differentiates.
        self._without: frozenset[int] = frozenset()
        size = _bytes_of(stretch, self.edge)
        if size > _MOST_BYTES:
            raise NotRunnableError(f"a run would take {size >> 20} MiB")

    def outcome(self) -> str:
        """What is another one after the edit, empty if nothing is, on several kinds of inputs."""
        chain = self._edit.chain
        told = "" if chain is None else self._told()
        if chain is not None:
            if told in chain.proven:
                return ""
            chain.runs(len(self._stretch.before))
        differs = self.difference(positive=False)
        if not differs and self._is_special:  # roots and logarithms of negative numbers hide what is computed of them
            differs = self.difference(positive=True)
        if differs and self._leaves_out():
            differs = self.difference(positive=False)
        if differs and self._calms():
            differs = self.difference(positive=False)
        if chain is not None and not differs:
            chain.proven.add(told)
        return differs

    def _told(self) -> str:
        """All that decides about what the edit changes, by no names but those of what graphs hold."""
        stretch, memories, names = self._stretch, dict[int | None, int](), dict[fx.Node, str]()
        for node in (*self.edge, *(was.node for side in (stretch.before, stretch.after) for was in side)):
            names.setdefault(node, f"n{len(names)}")

        def name(node: fx.Node) -> str:
            return names[node] if node in names else str(node.target)

        lines = [kind_of(_noted(node), memories) for node in self.edge]
        for calls in (stretch.before, stretch.after):
            for was in calls:
                arguments, target = fx.map_arg((was.args, was.kwargs), name), was.target
                kind = kind_of(was.meta.get("example_value"), memories)
                lines.append(f"{was.op} {target if isinstance(target, str) else id(target)} {arguments} {kind}")
            lines.append(f"{len(calls)} calls")
        read = [node for pair in stretch.read for node in pair]
        lines += [str([*map(name, (*read, *self._seen))]), str(self._ambient)]
        return "\n".join([*lines, str(seen_of(stretch, [*self.edge, *read]))])

    def _leaves_out(self) -> bool:
        """From now on, take no gradients from what nobody in the graph differentiates; whether there is any."""
        graph = self._edit.graph
        if graph is None:
            return False
        found = differentiated(graph, Effects(graph))
        ends = [*(new for _, new in self._stretch.read), *self._seen]
        is_left_out = (found.isdisjoint((end, *end.users)) for end in ends)
        self._without = frozenset(place for place, is_out in enumerate(is_left_out) if is_out)
        return bool(self._without)

    def _calms(self) -> bool:
        """From now on, hand in small numbers, if loops make any rounding of others grow beyond bounds; whether they do."""
        if not any(was.target is SCAN for was in self._stretch.before):
            return False
        one = self._run(0, positive=False, doubled=True, without=self._without)
        self._scale = lambda _count: 1.0 + 2.0**-50
        other = self._run(0, positive=False, doubled=True, without=self._without)
        # of so many numbers that a square matrix of them lengthens no vector
        self._scale = lambda count: 0.5 / math.sqrt(math.sqrt(count))
        if isinstance(one, Exception) or isinstance(other, Exception):
            return False
        return any(self._differences((one, other), exact))

    def difference(self, *, positive: bool) -> str:
        """What is another one after the edit, empty if nothing is."""
        sides = self._both(positive, doubled=False)
        found = list(self._differences(sides, of_sums))
        text = next((each.text for each in found if not each.may_be_rounding), "")
        if text or not found:
            return text
        try:
            sides = self._both(positive, doubled=True)
        except NotRunnableError:  # dtypes are spelled out in between
            kinds = sides[0].kinds | sides[1].kinds
        else:
            kinds = (sides[0].kinds | sides[1].kinds) - {torch.float64}
            if sides[1].error:  # nobody knows whether it was rounding
                return found[0].text
        coarsest = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        rounding = partial(of_sums, least=coarsest) if coarsest else exact
        left = (each for each in self._differences(sides, rounding) if each.may_be_rounding)
        return next((each.text for each in left), "")

    def _differences(self, sides: tuple[Ran, Ran], rounding: Rounding) -> Iterator[Difference]:
        return differences(self._stretch, *sides, rounding, all_strides=self._edit.graph is None)

    def _both(self, positive: bool, *, doubled: bool) -> tuple[Ran, Ran]:
        original = self._run(0, positive, doubled, self._without)
        if isinstance(original, (IndexError, RuntimeError)) and self._below > 1:  # scatter raises the latter
            self._below = 1
            original = self._run(0, positive, doubled, self._without)
        if isinstance(original, Exception):
            text = f"it does not run on random inputs ({type(original).__name__}: {original})"
            raise NotRunnableError(text) from original
        numbers = [*tensors_in(original.values), *(original.gradients or ())]
        self._is_special |= any(each is not None and not bool(comparable(each).isfinite().all()) for each in numbers)
        edited = self._run(1, positive, doubled, original.raising | self._without)
        if isinstance(edited, NotRunnableError):
            raise edited
        if isinstance(edited, Exception):
            trace("an edited graph raises", edited)
            edited = Ran([], {}, None, error=f"{type(edited).__name__}: {edited}")
        return original, edited

    def _run(self, side: int, positive: bool, doubled: bool, without: frozenset[int]) -> Ran | Exception:
        calls, read, attribute = self._sides[side]
        records = torch.is_grad_enabled()
        draw = partial(random_inputs, self.edge, 0, below=self._below, scale=self._scale)
        inputs = draw(positive=positive, doubled=doubled, with_grad=records)
        named = {operand for was in calls for operand in operands_of(was)}
        given = [was for was in self._stretch.ahead if was.op == "get_attr" and was.node in named]
        try:
            with isolated() as outside, outside.entered(), torch.set_grad_enabled(records):
                return run(
                    [*given, *calls],
                    read,
                    inputs,
                    self._ambient,
                    attribute,
                    seen=self._seen,
                    without=without,
                    scans=self._scans[side],
                )
        except Exception as error:  # noqa: BLE001 what a run raises is its result; the caller tells
            return error


def _edge(stretch: Stretch) -> list[fx.Node]:
    """What both sides read of the calls ahead, and what shares memory with that."""
    inside = {was.node for was in (*stretch.before, *stretch.after)}
    calls = (*stretch.before, *stretch.after)
    found = dict.fromkeys(node for was in calls for node in operands_of(was) if node not in inside)
    found.update(dict.fromkeys(node for pair in stretch.read for node in pair if node not in inside))
    return [node for node in found if node.op != "get_attr"]


def _made_ahead(stretch: Stretch, touched: set[int]) -> int | None:
    """Where memory was made that is written to and requires a gradient by then: its making tells whether it did before."""
    attached = [node for node in _edge(stretch) if any(each.requires_grad for each in tensors_in(_noted(node)))]
    memory = {each for node in attached for each in memories_of(node)} & touched
    return next(
        (
            place
            for place, was in enumerate(stretch.ahead)
            if was.op not in ("placeholder", "get_attr") and not memory.isdisjoint(memories_of(was.node))
        ),
        None,
    )


def _noted(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _seen_behind(stretch: Stretch, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Which of ``nodes`` are read behind by a name that was made ahead, or are the caller's and written to."""
    ahead = {was.node for was in stretch.ahead}
    behind = {operand for was in stretch.behind for operand in operands_of(was)} & ahead
    memory = {each for node in behind for each in memories_of(node)}
    given = {each for was in stretch.ahead if was.op == "placeholder" for each in memories_of(was.node)}
    memory |= given & written([*stretch.before, *stretch.after])
    return [node for node in nodes if node in behind or not memory.isdisjoint(memories_of(node))]


def _first_write(calls: Sequence[Was], nodes: Sequence[fx.Node]) -> int | None:
    """The place of the first call that writes to memory of one of ``nodes``."""
    memory = {each for node in nodes for each in memories_of(node)}
    for index, was in enumerate(calls):
        call = read(cast("fx.Node", was))
        if call is not None and any(not memory.isdisjoint(memories_of(node)) for node in overwritten(call)):
            return index
    return None


def _bytes_of(stretch: Stretch, edge: Sequence[fx.Node]) -> int:
    """Those of all that is handed in, and of all results."""
    values = tensors_in([*(was.meta.get("example_value") for was in stretch.before), *map(_noted, edge)])
    return sum(math.prod(sizes_of(each.shape)) * each.element_size() for each in values)
