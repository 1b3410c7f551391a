"""How a loop comes apart: a scan for every component, and what is computed for all steps at once before, between and after.

A component that reads nothing of itself is a *delay*: its states are what others were a step ago. Of one that has a known
structure, values are read as early as they can be: what follows is computed for all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of, strides_of
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError, held_by
from lz_compile.passes.graph.snapshot import described
from lz_compile.passes.graph.view import needed, reached, value_of
from lz_compile.passes.loops.recurrence.step_form import StepForm, read_step
from lz_compile.passes.loops.recurrence.step_rules import moves_only
from lz_compile.passes.loops.recurrence.step_sizes import elements
from lz_compile.passes.loops.recurrence.step_trace import FREE, ScanCall, trace_step
from lz_compile.passes.loops.recurrence.transition import Transition, transition_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """One component: the values that others need of it, the nodes of its step, and those that it takes from outside.

    ``transition`` is None where it has no known structure, ``reason`` says why. A delay has no nodes.
    """

    states: tuple[int, ...]
    wanted: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outside: tuple[fx.Node, ...]
    transition: Transition | None
    reason: RefusedError | None = None
    is_delay: bool = False


_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default})

#: How many numbers may be kept of a step, for each one that it is given or gives.
_MOST_KEPT = 8

#: Operations for all steps at once, by the operations of a step and what is known of their operands.
Traces: TypeAlias = "dict[Any, fx.GraphModule]"


@dataclass
class Plan:
    """The parts of a loop, in the order in which they run; ``traces`` are those of what is computed around them."""

    form: StepForm
    parts: list[Part] = field(default_factory=list)
    traces: Traces = field(default_factory=dict)

    @property
    def is_apart(self) -> bool:
        """Whether the loop is more than one part, or does more than that part."""
        step = self.form.step
        if len(self.parts) != 1 or self.parts[0].is_delay or len(self.parts[0].states) != len(step.states):
            return True
        (part,) = self.parts
        given = {*step.slices, *step.given} - self.form.indicators
        return not set(part.outside) <= given or set(part.wanted) != set(step.results)

    @property
    def refusal(self) -> RefusedError:
        """Why there is nothing but parts without a known structure."""
        found = [part.reason for part in self.parts if part.reason is not None]
        nothing = RefusedError("NO_RECURRENCE", "no state of the loop depends on the step before", "no loop is needed")
        return found[0] if found else nothing

    @property
    def has_known(self) -> bool:
        """Whether a part has a structure that kernels know."""
        return any(part.transition is not None for part in self.parts)

    @property
    def pays(self) -> bool:
        """Whether a part has one, or else products leave the loop: for all steps at once they cost a fraction.

        Not where that takes far more memory than what the loop goes over and gives, as states that are matrices.
        """
        inside = {node for part in self.parts for node in part.nodes}
        step = self.form.step
        leaves = any(node.target in _PRODUCTS and node not in inside for node in step.graph.nodes)
        if self.has_known or not (inside and leaves):
            return self.has_known
        kept = {node for part in self.parts for node in (*part.outside, *part.wanted)} - {*step.given}
        usual = {*step.slices, *step.results}
        return sum(map(elements, kept)) <= _MOST_KEPT * sum(map(elements, usual))

    @property
    def is_known(self) -> bool:
        """Whether all parts have one: no step is left to run by itself."""
        return self.has_known and all(part.transition is not None or part.is_delay for part in self.parts)


@dataclass
class Readings:
    """Plans by what they depend on: equal loops (those of equal layers) are read once.

    Inputs of which ``is_mask`` holds are numbers that were truth values, and are taken for such.
    """

    is_mask: Callable[[fx.Node], bool] = lambda _: False
    _known: dict[str, Plan | RefusedError] = field(default_factory=dict)

    def plan(self, call: ScanCall, ambient: Ambient) -> Plan:
        """How a loop comes apart.

        Raises:
            RefusedError: its step cannot be read.
        """
        moving = (*call.xs, *call.given)
        masks = [self.is_mask(node) for node in moving]
        values = (_described(value_of(node)) for node in call.operands)
        body = described(call.body.graph.nodes, held_by(call.body.graph.nodes))
        key = "\n".join([f"{len(call.init)} {len(call.xs)} {ambient} {masks}", *values, *body])
        if key not in self._known:
            try:
                step = trace_step(call, ambient)
                inputs = zip((*step.slices, *step.given), masks, strict=True)
                form = read_step(step, frozenset(node for node, is_mask in inputs if is_mask))
                self._known[key] = _Planner(form).plan()
            except RefusedError as refusal:
                self._known[key] = refusal
        found = self._known[key]
        if isinstance(found, RefusedError):
            raise found
        return found


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(as_size(value))
    return f"{value.dtype} {value.device} {shape_of(value)} {strides_of(value)}"


class _Planner:
    def __init__(self, form: StepForm) -> None:
        self.form = form
        self.step = form.step
        self.requested: dict[int, dict[fx.Node, None]] = {i: {} for i in range(len(form.components))}
        self._seen: set[fx.Node] = set()

    def plan(self) -> Plan:
        for node in self.step.results:
            self._need(node)
        parts = [self._part(component) for component in reversed(range(len(self.form.components)))]
        return Plan(self.form, parts[::-1])

    def _need(self, node: fx.Node) -> None:
        """Note that a value is needed outside of any scan."""
        if node in self._seen:
            return
        self._seen.add(node)
        home = self.form.home[node]
        if home != FREE:
            self.requested[home][node] = None
            return
        for operand in node.all_input_nodes:
            self._need(operand)

    def _part(self, component: int) -> Part:
        states = self.form.components[component]
        carried = [self.step.carried[state] for state in states]
        before = {self.step.states[state] for state in states}
        if component in self.form.delays:
            late = self._follow(component, self.requested[component], before)
            for node in carried:
                self._need(node)
            wanted = tuple(sorted(late))
            return Part(states, wanted, (), tuple(carried), None, is_delay=True)
        transition, reason = None, None
        try:
            wanted, transition = self._reads(component)
        except RefusedError as refusal:
            reason = refusal
            wanted = self._looked_at(component)
        self._follow(component, self.requested[component], set(wanted))
        nodes, outside = self._inside(component, [*carried, *wanted])
        for node in outside:
            self._need(node)
        return Part(states, wanted, nodes, outside, transition, reason)

    # ---- what is read of a part -----------------------------------------------------------------------------------

    def _reads(self, component: int) -> tuple[tuple[fx.Node, ...], Transition]:
        """Where the values that others need of a component are best read, and the component's structure.

        Raises:
            RefusedError: it has none that is known.
        """
        transition_of(self.form, component, ())
        wanted = self._edge(component, self.form.values)
        best = tuple(dict.fromkeys(self._best(component, node) for node in wanted))
        options = [best, tuple(wanted), *self._whole(component, wanted)]
        refused: RefusedError | None = None
        for option in dict.fromkeys(options):
            if not self._is_enough(component, option):
                continue
            try:
                found = transition_of(self.form, component, option)
            except RefusedError as refusal:
                refused = refused or refusal
                continue
            return self._as_vector(component, found) or (option, found)
        if refused is None:
            text = "what follows from the state needs it in several forms"
            refused = RefusedError("READ_UNKNOWN", text, "read the state in one form")
        raise refused

    def _is_enough(self, component: int, edge: tuple[fx.Node, ...]) -> bool:
        """Whether everything that others need follows from the values at the edge."""
        home = self.form.home
        own = needed(
            self.requested[component], edge, lambda node: (x for x in node.all_input_nodes if home[x] == component)
        )
        return all(node.op == "call_function" for node in own)

    def _as_vector(self, component: int, found: Transition) -> tuple[tuple[fx.Node, ...], Transition] | None:
        """A state without values, each element of which goes its own way, as a vector that is read whole."""
        (state,) = self.form.components[component]
        option = (self.step.carried[state],)
        is_whole = all(read.query is None for read in found.reads)
        if found.values or is_whole or not self._is_enough(component, option):
            return None
        if found.mode == "before" or any(update.erase is not None for update in found.updates):
            return None
        try:
            vector = transition_of(self.form, component, option)
        except RefusedError:
            return None
        return (option, vector) if vector.reads[0].query is None else None

    def _edge(self, component: int, known: Container[fx.Node]) -> list[fx.Node]:
        """The values that are ``known`` from which those follow that others need, the nearest first."""

        def own(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
            return (node for node in nodes if self.form.home[node] == component)

        found = reached(own(self.requested[component]), lambda node: () if node in known else own(node.all_input_nodes))
        return [node for node in found if node in known]

    def _best(self, component: int, node: fx.Node) -> fx.Node:
        """The earliest value from which ``node`` follows without the state, and which is a read without a summand."""
        new = {self.step.carried[state] for state in self.form.components[component]}
        best, score, current, computes = node, self._score(component, node), node, False
        while current not in new and current.op == "call_function":
            operands = [each for each in current.all_input_nodes if self.form.home[each] == component]
            computes = computes or not moves_only(current)
            if len(operands) != 1:
                break
            current = operands[0]
            if elements(current) > elements(node):
                break
            found = self._score(component, current)
            if found > score or (found == score and computes):
                best, score, computes = current, found, False
        return best

    def _score(self, component: int, node: fx.Node) -> int:
        try:
            found = transition_of(self.form, component, (node,))
        except RefusedError:
            return 0
        return 1 if found.reads[0].rest.terms else 2

    def _whole(self, component: int, wanted: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
        """The state itself for every read, where it is not larger than what is read."""
        (state,) = self.form.components[component]
        old, new = self.step.states[state], self.step.carried[state]
        largest = max((elements(node) for node in wanted), default=0)
        return [(new,)] if largest >= elements(new) and old not in wanted else []

    def _looked_at(self, component: int) -> tuple[fx.Node, ...]:
        """What others need of a step without a known structure: of what it computes anyway, the last."""
        states = self.form.components[component]
        inside = set(needed([self.step.carried[state] for state in states], ()))
        inside |= {self.step.states[state] for state in states}
        return tuple(self._edge(component, inside))

    def _follow(self, component: int, nodes: Iterable[fx.Node], edge: set[fx.Node]) -> set[fx.Node]:
        """Note what else is needed to compute these from the values at the edge; those of them that are."""

        def is_inner(node: fx.Node) -> bool:
            return node not in edge and self.form.home[node] == component

        seen = [*reached(nodes, lambda node: node.all_input_nodes if is_inner(node) else ())]
        for node in seen:
            if node not in edge and not is_inner(node):
                self._need(node)
        return edge.intersection(seen)

    # ---- what is in a part ----------------------------------------------------------------------------------------

    def _inside(self, component: int, outputs: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        """The nodes of a component's step, and what it takes from outside."""
        states = {self.step.states[state] for state in self.form.components[component]}
        is_outside = partial(self._is_outside, component)
        found = needed(outputs, states, lambda node: () if is_outside(node) else node.all_input_nodes)
        return tuple(node for node in found if not is_outside(node)), tuple(filter(is_outside, found))

    def _is_outside(self, component: int, node: fx.Node) -> bool:
        if node.op != "call_function":
            return True
        return self.form.home[node] != component and self.form.is_atom(node)
