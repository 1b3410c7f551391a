"""Inputs of a step that hold nothing but zeros and ones, as masks do that were cast before a loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.calls import is_cast
from lz_compile.passes.graph.view import is_boolean, read, tensor_of
from lz_compile.passes.graph.walks import reached
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, Step

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
