"""What is read in a graph, before anything is chosen: calls spelled out, loops rolled and taken apart, ops recognised."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import fx

from lz_compile.compile.options import Options
from lz_compile.errors import USER_ERRORS, RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.reasons import Reason
from lz_compile.lowering import inductor
from lz_compile.passes.editing.dead import drop_dead, drop_dead_joins
from lz_compile.passes.editing.edit import RefutedError, Stage, all_or_nothing, edit_places
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient, ambient_behind, grad_enabled
from lz_compile.passes.graph.refusal import Failure, NearMiss
from lz_compile.passes.graph.snapshot import Snapshot
from lz_compile.passes.inlining.inline import Inlined, inline
from lz_compile.passes.loops.recurrence.distribute import Distributed, distribute, why_unknown
from lz_compile.passes.loops.recurrence.prefix_stores import prefix_stores
from lz_compile.passes.loops.roll.forward_stores import forward_stores
from lz_compile.passes.loops.roll.reroll import RolledLoop, never, reroll
from lz_compile.passes.loops.roll.unbatch import unbatch
from lz_compile.passes.proof.resize import input_left_out
from lz_compile.passes.recognisers import Recogniser, recognisers
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.sampling.stores import with_values
from lz_compile.report.report import GraphReport, LoopReport, MissReport

#: Which loops of a graph may become scans: as the policy says, those for kernels that take the place of the scan, none.
Scans: TypeAlias = Literal["any", "replaced", "none"]

_IN_CHECKPOINT = Reason(
    "IN_CHECKPOINT",
    "PyTorch compiles no scan inside of torch.utils.checkpoint with gradients, and no kernel takes the place of this loop",
)
#: Of Python calls, while a graph is read.
_RECURSION = 50_000


def graphs(
    module: fx.GraphModule, path: str = "", *, is_checkpointed: bool = False
) -> Iterator[tuple[str, fx.GraphModule, bool]]:
    """The module and the graph modules that it uses then, at any depth, each once.

    With each goes whether it runs inside of ``torch.utils.checkpoint`` with gradients.
    """
    yield path, module, is_checkpointed
    seen: set[str] = set()
    nodes = list(module.graph.nodes)
    for place, node in enumerate(nodes):
        name = str(node.target)
        if node.op not in ("get_attr", "call_module") or name in seen:
            continue
        seen.add(name)
        child = operator.attrgetter(name)(module)
        if isinstance(child, fx.GraphModule):
            is_inside = is_checkpointed or _checkpoints(node, nodes[:place])
            yield from graphs(child, f"{path}.{name}" if path else name, is_checkpointed=is_inside)


def _checkpoints(callee: fx.Node, ahead: Sequence[fx.Node]) -> bool:
    """Whether a graph is run by a checkpoint that records gradients."""
    is_run = any(user.target is torch.ops.higher_order.tag_activation_checkpoint for user in callee.users)
    return is_run and grad_enabled(ambient_behind(ahead))


@dataclass
class Reading:
    """One graph: what was recognised in it, in graph order. ``effects`` is None where it could not be read."""

    is_changed: bool = False
    effects: Effects | None = None
    matches: list[Match] = field(default_factory=list)
    _misses: list[NearMiss] = field(default_factory=list)
    #: The graph as it is, as long as it is.
    _before: Snapshot | None = None
    #: By kind of match, the input that it leaves out.
    _left_out: dict[int, fx.Node | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        path: str,
        options: Options,
        report: GraphReport,
        scans: Scans = "any",
    ) -> Reading:
        """Read a graph, which may change for that; whatever fails is an event, and leaves it as it was.

        Args:
            module: whose graph is read.
            path: of the module.
            options: of the compile.
            report: gets what was found and what failed.
            scans: which loops may be rolled.

        Raises:
            RewriteFailedError: something failed and ``options.strict`` is set.
        """
        found = cls()
        found._spell_out(module, options, report)
        found._drop(module, options, drop_dead_joins)
        found._roll(module, path, options, report, scans)
        found._take_apart(module, options, report)
        found._drop(module, options, drop_dead)
        found._recognise(module.graph, options, report)
        report.near_misses.extend(_with_break(MissReport.of(miss), module) for miss in found._unknown())
        return found

    def _unknown(self) -> Iterator[NearMiss]:
        """The near misses, but for pieces of what was recognised, or missed as a whole: those look like loops, too."""
        known = {node for match in self.matches for node in match.core}
        scans = [set(match.core) for match in self.matches if match.op == "scan"]
        wholes = [miss for miss in self._misses if miss.is_whole]
        for miss in self._misses:
            most = max((len(core & miss.pieces) for core in scans), default=0)
            own = miss.pieces | {miss.node}
            is_part = any(miss is not whole and whole.pieces & own for whole in wholes)
            if miss.node not in known and not is_part and 2 * most <= len(miss.pieces):
                yield miss

    def _drop(self, module: fx.GraphModule, options: Options, drop: Callable[[fx.Graph], int]) -> None:
        """What nobody reads is no use of what it reads. Loops come first, for their steps are equal whoever reads them."""
        try:
            with all_or_nothing(module):
                is_changed = drop(module.graph) > 0
            self.is_changed |= is_changed
            self._before = None if is_changed else self._before
        except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
            fail("REWRITE_FAILED", "dropping what nobody reads", error, options)

    def _spell_out(self, module: fx.GraphModule, options: Options, report: GraphReport) -> None:
        """Calls that hide an attention, and arithmetic that is mapped over a dimension."""
        with timed(report, "inline"):
            try:
                with all_or_nothing(module, self._before) as before:  # each call was proven by itself
                    found = inline(module.graph, strict=options.strict)
                is_changed = any(isinstance(each, Inlined) for each in found)
                self.is_changed |= is_changed
                self._before = None if is_changed else before
                self._misses += [miss for miss in found if isinstance(miss, NearMiss)]
            except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
                self._before = None
                fail("INLINE_FAILED", "spelling out calls", error, options)
            for what, edit in _SPELLINGS.items():
                self._edit("INLINE_FAILED", what, edit, module, options, report)

    def _edit(
        self, code: str, what: str, stage: Stage, module: fx.GraphModule, options: Options, report: GraphReport
    ) -> None:
        """Make the edits of a stage all over a graph, proven."""
        before = Snapshot(module) if self._before is None else self._before
        count, faults = edit_places(module, what, stage, report.unproven, before)
        self.is_changed |= count > 0
        self._before = None if count or faults else before  # what was put back has other nodes
        for places, error in faults:
            at = f"{what} at {places}" if places else what
            fail("EDIT_REFUTED" if isinstance(error, RefutedError) else code, at, error, options)

    def _roll(
        self,
        module: fx.GraphModule,
        path: str,
        options: Options,
        report: GraphReport,
        scans: Scans,
    ) -> None:
        """Roll the loops that Dynamo unrolled. Steps are graphs of their own, and looked at next."""
        kept: list[NearMiss] = []

        def is_known(scan: fx.Node, ambient: Ambient) -> bool:
            try:
                miss = why_unknown(scan, ambient)
            except Exception as error:  # noqa: BLE001 one loop must not cost the others
                fail("LOOPS_FAILED", "looking at the step of a loop", error, options)
                return False
            kept.extend([] if miss is None else [miss])
            return miss is None

        with timed(report, "loops"):
            what = "taking what is read back of a tensor for what was stored"
            self._edit("LOOPS_FAILED", what, forward_stores, module, options, report)
            try:
                policy, confined = (options.loops, None) if scans == "any" else ("keep", _IN_CHECKPOINT)
                special = never if scans == "none" else is_known
                found = reroll(module, policy, special, report.unproven, confined)
            except Exception as error:  # noqa: BLE001 as above
                fail("LOOPS_FAILED", "reading the loops of a graph", error, options)
                return
        _fail_each("rolling the loop", found, options)
        loops = [each for each in found if isinstance(each, RolledLoop)]
        report.loops.extend(LoopReport.of(loop, path) for loop in loops)
        places = {loop.where for loop in loops if loop.scan is None}
        self._misses += [miss for miss in found if isinstance(miss, NearMiss)]
        self._misses += [miss for miss in kept if miss.where in places]
        self.is_changed |= any(loop.scan is not None for loop in loops)

    def _take_apart(self, module: fx.GraphModule, options: Options, report: GraphReport) -> None:
        """Compute for all steps at once what needs no state, and states one after the other."""
        found: list[Distributed | NearMiss | Failure] = []
        with timed(report, "loops"):
            try:
                found.extend(distribute(module, report.unproven))
            except Exception as error:  # noqa: BLE001 as above
                fail("LOOPS_FAILED", "taking the loops of a graph apart", error, options)
        _fail_each("taking the loop apart", found, options)
        self._misses += [miss for miss in found if isinstance(miss, NearMiss)]
        self.is_changed |= any(isinstance(each, Distributed) for each in found)

    def _recognise(self, graph: fx.Graph, options: Options, report: GraphReport) -> None:
        with timed(report, "recognise"), _deep_recursion():
            try:
                effects = Effects(graph)
            except Exception as error:  # noqa: BLE001 as above
                fail("RECOGNISER_FAILED", "reading a graph", error, options)
                return
            for op, recognise in recognisers().items():
                for found in _all_of(op, recognise, graph, effects):
                    if isinstance(found, Failure):
                        at = f" at {found.where}" if found.where else ""
                        fail("RECOGNISER_FAILED", f"recognising {op}{at}", found.error, options)
                    elif isinstance(found, NearMiss):
                        self._misses.append(found)
                    else:
                        self._take(found)
        self.effects = effects
        self.matches.sort(key=lambda match: effects.position[match.output])

    def _take(self, match: Match) -> None:
        """Note a match, unless nothing can be proven of it: what is left out has a gradient, and may be NaN."""
        kind = id(match.kind)
        if kind not in self._left_out:
            self._left_out[kind] = input_left_out(match.kind)
        left_out = self._left_out[kind]
        if left_out is None:
            self.matches.append(match)
            return
        node = match.renamed.get(left_out, left_out)
        reason = Reason("CANCELS_OUT", f"{node.name} cancels out of the result, but NaN in it and its gradient do not")
        self._misses.append(NearMiss(match.op, match.output, reason, f"leave {node.name} out of it", match.where))


#: Other spellings of the same, in this order.
_SPELLINGS: Mapping[str, Stage] = {
    "giving values to what is written in place": with_values,
    "spelling out torch.vmap": unbatch,
    "taking recurrences that are computed in place for values": prefix_stores,
}


def _fail_each(what: str, found: Iterable[object], options: Options) -> None:
    """Make an event of every fault among what a stage found."""
    for each in found:
        if isinstance(each, Failure):
            code = "EDIT_REFUTED" if isinstance(each.error, RefutedError) else "LOOPS_FAILED"
            fail(code, f"{what} at {each.where}", each.error, options)


def _with_break(miss: MissReport, module: fx.GraphModule) -> MissReport:
    """A near miss; where the rest of an attention is in the next graph, with the break before that."""
    cause = inductor.break_reason(module) if miss.reason.code == "NO_VALUES" else None
    if cause is None:
        return miss
    return replace(
        miss, reason=Reason(miss.reason.code, f"{miss.reason.message}, which ends at the graph break {cause}")
    )


def _all_of(op: str, recognise: Recogniser, graph: fx.Graph, effects: Effects) -> Iterator[Match | NearMiss | Failure]:
    """What a recogniser yields; what it raises between two anchors is its last word."""
    try:
        yield from recognise(graph, effects)
    except Exception as error:  # noqa: BLE001 as above
        yield Failure(op, "", error)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Readers follow a graph recursively, which may be longer than Python's stack usually gets."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def fail(code: str, text: str, error: Exception, options: Options) -> None:
    """Make an event of a fault; errors of the user's own pass, and under ``options.strict`` all do.

    Raises:
        RewriteFailedError: ``options.strict`` is set.
    """
    if isinstance(error, USER_ERRORS):
        raise error
    events.record(code, text, error)
    if options.strict:
        raise RewriteFailedError(f"{text}: {type(error).__name__}: {error}") from error


@contextmanager
def timed(report: GraphReport, stage: str) -> Iterator[None]:
    """Add the seconds that pass inside to those of a stage."""
    start = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
