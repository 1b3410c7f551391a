"""Loops taken apart: what does not depend on the state is computed for all steps at once, and states one after the other.

A loop that carries several tensors becomes a scan for each of those that depend on themselves, or on each other; what
they read of one another, and everything that is made of reads, is computed in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.lowering.checkpointed_scan import CHUNK_NOTE
from lz_compile.passes.editing.edit import Rewrite, Unproven, apply
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import Failure, NearMiss, RefusedError, where_of
from lz_compile.passes.graph.view import known_tensor, tensor_of, value_of
from lz_compile.passes.loops.recurrence.batched import Around, Batched
from lz_compile.passes.loops.recurrence.plan import Part, Plan, Readings
from lz_compile.passes.loops.recurrence.rebuilt_scan import CONTIGUOUS, erase_scan, insert_scan, replace_results
from lz_compile.passes.loops.recurrence.states import is_indicator, restated
from lz_compile.passes.loops.recurrence.step_rules import moves_only
from lz_compile.passes.loops.recurrence.step_trace import SCAN, ScanCall, results_of, scan_call
from lz_compile.passes.loops.roll.scan_outputs import scans_of_ours
from lz_compile.passes.loops.roll.worthwhile import takes_long
from lz_compile.passes.rewriting.core import wants_grad

aten = torch.ops.aten

#: On more, what is computed for all steps at once makes up for memory.
_FEW_THREADS = 4
#: Whether so many calls, one by one, take no minutes to compile.
IsShort: TypeAlias = Callable[[int], bool]


@dataclass(frozen=True)
class Distributed:
    """A loop that was taken apart, ``where`` in the source.

    Into so many ``scans``, ``delays`` (states that are one step late), and parts that run one step after the other again.
    """

    where: str
    scans: int
    delays: int
    unrolled: int = 0


def distribute(
    module: fx.GraphModule, unproven: Unproven | None = None, policy: str = "roll"
) -> Iterator[Distributed | NearMiss | Failure]:
    """Take apart every scan of a graph of which a part has a structure that kernels know; others stay as they are.

    Either a whole loop is rewritten, and proven, or it is as it was.

    Args:
        module: whose graph is rewritten.
        unproven: gets the loops that could not be proven, with the reason.
        policy: ``"roll"`` keeps parts that no kernel takes as loops. Otherwise they become what Dynamo made of them, where
            that is short and has no gradients: one by one, steps run faster, and compile slower.
    """
    ours = {node.name for node in scans_of_ours(module)} if policy != "roll" else set()
    size = len(module.graph.nodes)

    def is_short(calls: int) -> bool:
        return not takes_long(calls, size + calls * len(ours))  # the others are likely equal layers

    scans = [node for node in module.graph.nodes if node.target is SCAN and node.users]
    effects = Effects(module.graph) if scans else None
    ambients = {node.name: effects.ambient(node) for node in scans if effects is not None}
    readings = Readings(is_indicator)
    for name, ambient in ambients.items():
        # by name: an edit that is taken back leaves equal nodes, not the same ones
        node = next(each for each in module.graph.nodes if each.name == name)
        where = where_of(node)
        try:
            what = f"taking the loop at {where} apart"
            tried = partial(_taken_apart, ambient=ambient, readings=Readings(is_indicator), is_short=None)
            shown = shown_on_few_steps(node, ambient, what, tried)
            whole = is_short if name in ours and not shown else None
            take_apart = partial(_taken_apart, node, ambient, readings, whole)
            found = apply(module, Rewrite(what, take_apart, shown), unproven)
        except RefusedError as refusal:
            yield NearMiss("scan", node, refusal.reason, refusal.edit, where)
        except Exception as error:  # noqa: BLE001 one loop must not cost the others; the caller makes an event of it
            yield Failure("scan", where, error)
        else:
            yield from [] if found is None else [found]


def _taken_apart(node: fx.Node, ambient: Ambient, readings: Readings, is_short: IsShort | None) -> Distributed | None:
    """What a scan was taken apart into, None where it stays as it is (the recogniser says why)."""
    call = scan_call(node)
    if call is None:
        return None
    found = restated(call, ambient, readings)
    plan = found.plan
    is_worth_it = plan is not None and (plan.has_known or (plan.pays and not _wants_products_inside(node, ambient)))
    if plan is None or not is_worth_it or (is_short is None and _is_one_loop(found.call, plan, ambient)):
        found.undo()
        return None
    found.keep()
    if plan.is_apart:
        return _distributed(found.call, plan, ambient, is_short)
    return Distributed(where_of(node), 1, 0) if found.tried else None


def _is_one_loop(call: ScanCall, plan: Plan, ambient: Ambient) -> bool:
    """Whether a loop that stays one for some of its states is faster whole: in C++, on few threads.

    Where all of a step is functions of elements, kernels for the other states write and read what a step has in registers:
    RWKV's, with a running maximum, takes five times as long then (1,024 steps of 512 elements).
    """
    if plan.is_known or wants_grad(ambient, (*call.init, *call.xs, *call.given)):
        return False
    if torch.get_num_threads() > _FEW_THREADS or known_tensor(call.xs[0]).device.type != "cpu":
        return False
    known = [part.transition for part in plan.parts if part.transition is not None]
    if any(each.keys or each.updates for each in known):
        return False
    calls = [node for node in plan.form.step.graph.nodes if node.op == "call_function"]
    return all(torch.Tag.pointwise in getattr(node.target, "tags", ()) or moves_only(node) for node in calls)


def _wants_products_inside(node: fx.Node, ambient: Ambient) -> bool:
    """Whether products stay in a loop although they cost less outside: that takes memory, and rounds otherwise."""
    return CHUNK_NOTE in (node.meta.get("custom") or {}) or bool(ambient.autocast)


def why_unknown(node: fx.Node, ambient: Ambient) -> NearMiss | None:
    """Why a part of a scan has no structure that kernels know; None where all have one."""
    call = scan_call(node)
    try:
        if call is None:
            raise RefusedError("STEP_OPAQUE", "a loop reads or carries something that is no tensor", "carry tensors")
        readings = Readings(is_indicator)
        found = restated(call, ambient, readings)
        found.undo()
        if found.plan is not None and found.plan.is_known:
            return None
        raise readings.plan(call, ambient).refusal
    except RefusedError as refusal:
        return NearMiss.of("scan", node, refusal)


def _distributed(call: ScanCall, plan: Plan, ambient: Ambient, is_short: IsShort | None) -> Distributed:
    if not all(known_tensor(node).is_contiguous() for node in call.init):
        raise RefusedError("LOOP_KEPT_WHOLE", "a first state is not contiguous", "make it contiguous")
    around = Around(call, ambient)
    with around.inserting():
        loop = _Loop(call, plan, around, is_short)
        replace_results(call, loop.values(), around)
    erase_scan(call)
    delays = sum(part.is_delay for part in plan.parts)
    return Distributed(where_of(call.node), len(plan.parts) - delays - loop.unrolled, delays, loop.unrolled)


class _Loop:
    """Emits the parts of one loop."""

    def __init__(self, call: ScanCall, plan: Plan, around: Around, is_short: IsShort | None) -> None:
        self.call = call
        self.plan = plan
        self.around = around
        is_graded = wants_grad(around.ambient, (*call.init, *call.xs, *call.given))
        self.is_short = None if is_graded else is_short
        self.unrolled = 0
        step = plan.form.step
        self.step = step
        effects = Effects(call.node.graph) if wants_grad(around.ambient, call.xs) else None
        slices = [node if effects is None else self._kept(node, effects) for node in call.xs]
        self.batched = Batched(around, plan.traces, dict(zip(step.slices, slices, strict=True)))
        self.batched.always.update(zip(step.given, call.given, strict=True))
        self.final: dict[int, fx.Node] = {}
        self.masks = {node: around.call(aten.ne.Scalar, self._given(node), 0) for node in plan.form.indicators}
        changing = {state for part in plan.parts for state in part.states}
        read = results_of(call.node)
        for index, state in enumerate(step.states):
            if index not in changing:
                self.batched.always[state] = call.init[index]
                if index in read:  # a scan gives tensors of its own
                    self.final[index] = around.call(aten.clone.default, call.init[index], **CONTIGUOUS)

    def _kept(self, node: fx.Node, effects: Effects) -> fx.Node:
        """A copy of what is overwritten behind the loop: what computes all steps at once may keep more for gradients."""
        is_written = wants_grad(self.around.ambient, [node]) and effects.why_not_kept([node], self.call.node)
        return self.around.call(aten.clone.default, node, **CONTIGUOUS) if is_written else node

    def _given(self, node: fx.Node) -> fx.Node:
        return self.batched.over_time.get(node) or self.batched.always[node]

    def values(self) -> list[fx.Node]:
        """What takes the place of every result of the loop."""
        for part in self.plan.parts:
            self.batched.compute(part.outside)
            if part.is_delay:
                self._delay(part)
            elif part.transition is None and self._runs_one_by_one(part):
                self._one_by_one(part)
            else:
                self._scan(part)
        self.batched.compute(self.step.results)
        given = [self._over_time(node) for node in self.step.results]
        return [*(self.final.get(index, state) for index, state in enumerate(self.call.init)), *given]

    def _over_time(self, node: fx.Node) -> fx.Node:
        """A value for all steps, repeated where it is the same in each."""
        if node in self.batched.over_time:
            return self.batched.over_time[node]
        always = self.batched.always[node]
        length = self.call.length
        if not isinstance(length, int):
            length = self.around.call(torch.Tensor.size, self.call.xs[0], 0)
        shape = [length, *(-1 for _ in known_tensor(always).shape)]
        whole = self.around.call(aten.expand.default, always, shape)
        return self.around.call(aten.clone.default, whole, **CONTIGUOUS)

    def _delay(self, part: Part) -> None:
        for state in part.states:
            source = self._over_time(self.step.carried[state])
            last = self.around.call(aten.select.int, source, 0, -1)
            self.final[state] = self.around.call(aten.clone.default, last, **CONTIGUOUS)  # a tensor of its own
            if self.step.states[state] in part.wanted:
                first = self.around.call(aten.unsqueeze.default, self.call.init[state], 0)
                earlier = self.around.call(aten.slice.Tensor, source, 0, 0, -1)
                shifted = self.around.call(aten.cat.default, [first, earlier], 0)
                self.batched.over_time[self.step.states[state]] = shifted

    def _runs_one_by_one(self, part: Part) -> bool:
        """Whether a part that no kernel takes is better off one step after the other."""
        length = self.call.length
        if self.is_short is None or not isinstance(length, int):
            return False
        return self.is_short(length * (len(part.nodes) + sum(node in self.batched.over_time for node in part.outside)))

    def _one_by_one(self, part: Part) -> None:
        self.unrolled += 1
        values = {self.step.states[state]: self.call.init[state] for state in part.states}
        values |= {node: self.batched.always[node] for node in part.outside if node in self.batched.always}
        moving = [node for node in part.outside if node in self.batched.over_time]
        steps = {node: self.around.call(aten.unbind.int, self.batched.over_time[node], 0) for node in moving}
        given: dict[fx.Node, list[fx.Node]] = {node: [] for node in part.wanted}
        for time in range(self.call.length):
            for node in moving:
                values[node] = self.around.call(operator.getitem, steps[node], time)
            for node in part.nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self.around.call(node.target, *args, **kwargs)
            for node, found in given.items():
                found.append(values[node])
            carried = {self.step.states[state]: values[self.step.carried[state]] for state in part.states}
            values.update(carried)
        for state in part.states:
            last = values[self.step.states[state]]
            self.final[state] = self.around.call(aten.clone.default, last, **CONTIGUOUS)  # a tensor of its own
        for node, found in given.items():
            self.batched.over_time[node] = self.around.call(aten.stack.default, found)

    def _scan(self, part: Part) -> None:
        slices = [node for node in part.outside if node in self.batched.over_time] or [self.step.slices[0]]
        given = [node for node in part.outside if node in self.batched.always]
        _, picked = insert_scan(
            self.around,
            self._body(part, slices, given),
            [self.call.init[state] for state in part.states],
            [self.masks.get(node) or self.batched.over_time[node] for node in slices],
            [self.masks.get(node) or self.batched.always[node] for node in given],
            self.call.length,
        )
        self.final.update(zip(part.states, picked, strict=False))
        self.batched.over_time.update(zip(part.wanted, picked[len(part.states) :], strict=True))

    def _body(self, part: Part, slices: Sequence[fx.Node], given: Sequence[fx.Node]) -> fx.Graph:
        """The step of one part."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*(self.step.states[state] for state in part.states), *slices, *given):
            copies[node] = graph.placeholder(node.name)
        for node in self.masks.keys() & copies.keys():
            kind = {"dtype": node.meta["val"].dtype}
            mask = copies[node]
            with self.around.mode:
                mask.meta = _example(node.meta["val"].bool())
            copies[node] = graph.call_function(aten._to_copy.default, (mask,), kind)
        for node in part.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for node, copy in copies.items():
            copy.meta = _example(node.meta["val"])
        results = (*(self.step.carried[state] for state in part.states), *part.wanted)
        graph.output([copies[node] for node in results])
        return graph


def _example(value: torch.Tensor) -> dict[str, Any]:
    return {"val": value, "example_value": value}


# ---- long loops ------------------------------------------------------------------------------------------------------


#: Loops of more steps are long, and what is tried instead.
_LONG, _FEW = 256, 7


def shown_on_few_steps(node: fx.Node, ambient: Ambient, what: str, make: Callable[[fx.Node], Any]) -> str:
    """How a change of a long loop is shown; empty where it is to be proven at full length.

    Raises:
        RefutedError: the loop would be another one.
        Exception: what ``make`` raises.
    """
    call = scan_call(node)
    if call is None or not _is_long(call.length) or ambient != Ambient():
        return ""
    if any(map(is_indicator, (*call.xs, *call.given))):  # which is told by what they are made of
        return ""
    module, scan = _shortened(call)
    unproven: Unproven = []
    apply(module, Rewrite(what, lambda: make(scan)), unproven)
    return "" if unproven else f"held against the loop on {_FEW} steps"


def _is_long(length: Any) -> bool:
    if isinstance(length, torch.SymInt):
        return bool(length.node.has_hint() and length.node.hint > _LONG)  # one that data decide is not cut
    return bool(length > _LONG)


def _shortened(call: ScanCall) -> tuple[fx.GraphModule, fx.Node]:
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    graph, given = module.graph, dict[fx.Node, fx.Node]()
    for node in dict.fromkeys(call.operands):
        given[node] = graph.placeholder(node.name)
        given[node].meta = {**node.meta, "example_value": _cut(node) if node in call.xs else value_of(node)}
    module.body = call.body
    init, xs, more = ([given[node] for node in part] for part in (call.init, call.xs, call.given))
    scan = graph.call_function(SCAN, (graph.get_attr("body"), init, xs, more))
    whole = value_of(call.node)
    with torch.enable_grad():
        scan.meta = {
            **call.node.meta,
            "example_value": (*whole[: len(init)], *(each[:_FEW] for each in whole[len(init) :])),
        }
    results = []
    for users in results_of(call.node).values():
        for user in users:
            results.append(graph.call_function(operator.getitem, (scan, user.args[1])))
            results[-1].meta = {**user.meta, "example_value": value_of(scan)[user.args[1]]}
    graph.output(tuple(results))
    module.recompile()
    return module, scan


def _cut(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, "what is gone over is a tensor"
    with torch.enable_grad():
        return value[:_FEW]
