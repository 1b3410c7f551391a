"""The loops of one graph, taken apart; equal loops (those of equal layers) are read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.refusal import RefusedError, held_by
from lz_compile.passes.graph.view import is_boolean, reached, read, tensor_of, value_of
from lz_compile.passes.loops.recurrence.plan import Plan, plan_of
from lz_compile.passes.loops.recurrence.step_form import read_step
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, Step, trace_step
from lz_compile.passes.proof.validate import described


@dataclass
class Readings:
    """Plans by what they depend on. ``follows_masks``: inputs that are casts of truth values are taken for such."""

    follows_masks: bool
    _known: dict[str, Plan | RefusedError] = field(default_factory=dict)

    def plan(self, call: ScanCall, ambient: Ambient) -> Plan:
        """How a loop comes apart.

        Raises:
            RefusedError: its step cannot be read.
        """
        key = self._key(call, ambient)
        if key not in self._known:
            try:
                step = trace_step(call, ambient)
                masks = indicators_of(call, step) if self.follows_masks else frozenset[fx.Node]()
                self._known[key] = plan_of(read_step(step, masks))
            except RefusedError as refusal:
                self._known[key] = refusal
        found = self._known[key]
        if isinstance(found, RefusedError):
            raise found
        return found

    def _key(self, call: ScanCall, ambient: Ambient) -> str:
        masks = [is_indicator(node) for node in (*call.xs, *call.given)] if self.follows_masks else []
        values = [_described(value_of(node)) for node in call.operands]
        sizes = len(call.init), len(call.xs)
        return "\n".join(
            [f"{sizes} {ambient} {masks}", *values, *described(call.body.graph.nodes, held_by(call.body.graph.nodes))]
        )


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(as_size(value))
    shape, strides = ([as_size(each) for each in sizes] for sizes in (value.shape, value.stride()))
    return f"{value.dtype} {value.device} {shape} {strides}"


# ---- masks -----------------------------------------------------------------------------------------------------------


_JOINS = frozenset({"stack", "cat", "getitem", "select", "unbind", "split", "chunk", "flip", "narrow"})
_CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "type", "type_as", "_to_copy"})


def indicators_of(call: ScanCall, step: Step) -> frozenset[fx.Node]:
    """The inputs of the step that are casts of truth values, however they were moved about since."""
    pairs = zip((*step.slices, *step.given), (*call.xs, *call.given), strict=True)
    return frozenset(inner for inner, outer in pairs if is_indicator(outer))


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
    operands = call.arguments.get("tensors", call.input) if call.name in ("stack", "cat") else call.input
    operands = operands if isinstance(operands, (list, tuple)) else [operands]
    moves = layout.rearranges(call) or is_cast(call) or call.name in _JOINS | _CASTS
    return operands if moves and all(isinstance(each, fx.Node) for each in operands) else []
