"""The loops of one graph, taken apart, and in other states where no kernel can run them as they are.

Parts of a state that are updated apart become states of their own, states that depend on each other become one. What is
tried is kept only where a kernel can run more of the loop then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from lz_compile.passes.formula import layout, moves
from lz_compile.passes.formula.expressions import CASTS
from lz_compile.passes.formula.layout import SPLITS
from lz_compile.passes.graph.modes import Ambient, faking
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import is_boolean, known_tensor, needed, reached, read, tensor_of
from lz_compile.passes.loops.recurrence.batched import Around
from lz_compile.passes.loops.recurrence.plan import Plan, Readings
from lz_compile.passes.loops.recurrence.rebuilt_scan import CONTIGUOUS, Rebuilt, Rewritten, rebuild
from lz_compile.passes.loops.recurrence.state_parts import split_states
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, is_filled, trace_step, traced
from lz_compile.passes.proof.running import Subgraph

# ---- masks -----------------------------------------------------------------------------------------------------------


_MOVES = (moves.RULES.keys() - {"pad", "embedding", "as_strided", *moves.STORES}) | SPLITS | CASTS


def is_indicator(node: fx.Node) -> bool:
    """Whether a tensor of numbers is made of truth values alone."""
    if tensor_of(node) is None or is_boolean(node):
        return False
    made = reached([node], lambda each: [] if is_boolean(each) else _moved(each))
    return all(is_boolean(each) or _moved(each) for each in made)


def _moved(node: fx.Node) -> Sequence[fx.Node]:
    """What a call moves about or casts, and does nothing else with; nothing for others."""
    call = read(node)
    if call is None or call.is_inplace:
        return []
    operands = call.get("tensors", call.input)
    operands = operands if isinstance(operands, (list, tuple)) else [operands]
    is_moved = layout.rearranges(call) or call.name in _MOVES
    return operands if is_moved and all(isinstance(each, fx.Node) for each in operands) else []


#: Changes of states that are tried one after the other.
_MOST_CHANGES = 4


@dataclass
class Restated:
    """A loop, how it comes apart (None: not at all), and what was tried out in the graph for that."""

    call: ScanCall
    plan: Plan | None
    tried: list[Rebuilt] = field(default_factory=list)

    @property
    def left(self) -> int:
        """How many parts have no known structure; more than there can be where none was read."""
        if self.plan is None:
            return 1 << 30
        return sum(part.reason is not None for part in self.plan.parts) + (0 if self.plan.pays else 1 << 20)

    def keep(self) -> None:
        """The loop in its new states takes the place of the old one."""
        for rebuilt in self.tried:
            rebuilt.keep()

    def undo(self) -> None:
        """As if nothing had been tried."""
        for rebuilt in reversed(self.tried):
            rebuilt.undo()


def restated(call: ScanCall, ambient: Ambient, readings: Readings) -> Restated:
    """A loop in the states in which the most of it has a known structure; of equals, as it is."""
    first = _planned(call, ambient, readings)
    if first.left == 0 or not _is_plain(call):
        return first
    best, current = first, first
    for _ in range(_MOST_CHANGES):
        rebuilt = _changed(current, ambient)
        if rebuilt is None:
            break
        current = _planned(rebuilt.call, ambient, readings, [*current.tried, rebuilt])
        best = current if current.left < best.left else best
    for rebuilt in reversed(current.tried[len(best.tried) :]):
        rebuilt.undo()
    return best


def _planned(call: ScanCall, ambient: Ambient, readings: Readings, tried: list[Rebuilt] | None = None) -> Restated:
    try:
        return Restated(call, readings.plan(call, ambient), tried or [])
    except RefusedError:  # the recogniser says why
        return Restated(call, None, tried or [])


def _is_plain(call: ScanCall) -> bool:
    """Whether every size is a number, as it has to be where states are cut."""
    values = [known_tensor(node) for node in (*call.init, *call.xs)]
    return all(isinstance(size, int) for value in values for size in value.shape)


def _changed(current: Restated, ambient: Ambient) -> Rebuilt | None:
    """The next change that can be made: states are cut before they are joined."""
    around = Around(current.call, ambient)
    for change in (_joined,) if current.tried else (_split, _joined):
        try:
            rebuilt = rebuild(current.call, around, partial(change, current, around))
        except RefusedError:
            continue  # a step that cannot be traced is refused for that already
        if rebuilt is not None:
            return rebuilt
    return None


def _split(current: Restated, around: Around) -> Rewritten | None:
    step = trace_step(current.call, around.ambient)
    return None if step.sizes else split_states(current.call, step, around)


def _joined(current: Restated, around: Around) -> Rewritten | None:
    plan = current.plan
    states = None if plan is None or plan.form.step.sizes else coupled(plan.form)
    return None if plan is None or states is None else stack_states(current.call, plan.form, states, around)


# ---- states that depend on each other --------------------------------------------------------------------------------
# States that depend on each other, and are affine together, as one state with one more index.
# ``h, p = a h + b p + x, h`` is a recurrence of the pair: its transition is a small matrix. Stacked, every state keeps its
# own factor, and reads each of the others by a rank-one term: what kernels run. Rotations (complex states as pairs of real
# numbers), recurrences of second order, momentum with a spring and states that change places are of this kind.


aten = torch.ops.aten
#: More states than this have more rank-one terms than kernels take.
_MOST_STATES = 3


def coupled(form: StepForm) -> tuple[int, ...] | None:
    """The first component of several states that are affine and of one kind; None where there is none."""
    for states in form.components:
        if not 1 < len(states) <= _MOST_STATES:
            continue
        values = [form.step.states[state].meta["val"] for state in states]
        kinds = {(value.dtype, value.device, tuple(value.shape)) for value in values}
        is_affine = all(form.step.carried[state] in form.values for state in states)
        if len(kinds) == 1 and values[0].is_floating_point() and is_affine:
            return states
    return None


def stack_states(call: ScanCall, form: StepForm, states: tuple[int, ...], around: Around) -> Rewritten:
    """The step with these states as one, ``[number of states, ...]``, which comes first."""
    others = [i for i in range(len(call.init)) if i not in states]
    init = _stacked(call, states, around)
    units = [_unit(around, place, len(states), known_tensor(call.init[states[0]])) for place in range(len(states))]

    def final(picked: Sequence[fx.Node]) -> list[fx.Node]:
        parts = [around.call(aten.select.int, picked[0], 0, place) for place in range(len(states))]
        copies = [around.call(aten.clone.default, part, **CONTIGUOUS) for part in parts]  # each in memory of its own
        found = dict(zip(states, copies, strict=True))
        found.update(zip(others, picked[1:], strict=True))
        return [found[state] for state in range(len(call.init))]

    graph = _stacked_step(form, states, others, around)
    return Rewritten(graph, (init, *(call.init[i] for i in others)), tuple(units), final)


def _stacked(call: ScanCall, states: Sequence[int], around: Around) -> fx.Node:
    nodes = [call.init[state] for state in states]
    like = known_tensor(nodes[0])
    if all(is_filled(node, 0) for node in nodes):
        kind = {"dtype": like.dtype, "device": like.device}
        return around.call(aten.full.default, [len(states), *like.shape], 0, **kind)
    return around.call(aten.stack.default, nodes)


def _unit(around: Around, place: int, count: int, like: torch.Tensor) -> fx.Node:
    """One at a state's place, and zero at the others: ``[number of states, 1, ...]``."""
    kind = {"dtype": like.dtype, "device": like.device}
    unit = around.call(aten.select.int, around.call(aten.eye.default, count, **kind), 0, place)
    unit._rename(f"unit_{place}")  # reports name operands so
    return around.call(aten.reshape.default, unit, [count, *(1,) * like.dim()])


def _stacked_step(form: StepForm, states: Sequence[int], others: Sequence[int], around: Around) -> fx.Graph:
    """``(stacked, *others, *slices, *given, *units) -> [stacked, *others, *results]``.

    Every state is a sum over all of them in which the others count nothing. As it advances, it sees itself in its place among
    the stacked ones, so that it has a factor of its own.
    """
    step = form.step
    own, carried = ([nodes[state] for state in states] for nodes in (step.states, step.carried))
    inputs = (*(step.states[i] for i in others), *step.slices, *step.given)
    made = [node for node in dict.fromkeys(carried) if node.op == "call_function"]
    advances = [_function((*own, *inputs), [node]) for node in carried]
    rest = _function((*own, *inputs, *made), [*(step.carried[i] for i in others), *step.results])

    def stacked(whole: torch.Tensor, *values: Any) -> list[Any]:
        given, units = values[: len(inputs)], values[len(inputs) :]
        entries, new = [(unit * whole).sum(0) for unit in units], None
        for place, (unit, advance) in enumerate(zip(units, advances, strict=True)):
            seen = [whole if at == place else each for at, each in enumerate((*entries, *given))]
            mapped: Callable[..., Any] = torch.vmap(advance, tuple(0 if each is whole else None for each in seen))
            product = unit * mapped(*seen)[0]
            new = product if new is None else new + product
        after = dict(zip(carried, ((unit * new).sum(0) for unit in units), strict=True))
        return [new, *rest(*entries, *given, *map(after.__getitem__, made))]

    like = own[0].meta["val"]
    with faking(around.mode), torch.no_grad():
        whole = like.new_empty((len(states), *like.shape))
        units = [like.new_empty((len(states), *(1,) * like.dim())) for _ in states]
    return traced(stacked, [whole, *(node.meta["val"] for node in inputs), *units], around.ambient, around.mode).graph


def _function(inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Values of a step as a function of others."""
    calls = tuple(needed(outputs, inputs))
    return Subgraph(inputs=dict.fromkeys(inputs, ()), nodes=calls, outputs=tuple(outputs)).module()[0]
