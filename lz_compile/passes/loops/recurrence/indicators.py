"""Inputs of a step that hold nothing but zeros and ones, as masks do that were cast before a loop."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.calls import is_cast
from lz_compile.passes.graph.view import read, tensor_of
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, Step

_JOINS = frozenset({"stack", "cat", "getitem", "select", "unbind", "split", "chunk", "flip", "narrow"})
_CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "type", "type_as", "_to_copy"})


def indicators_of(call: ScanCall, step: Step) -> frozenset[fx.Node]:
    """The inputs of the step that are casts of truth values, however they were moved about since."""
    pairs = zip((*step.slices, *step.given), (*call.xs, *call.given), strict=True)
    return frozenset(inner for inner, outer in pairs if is_indicator(outer))


def is_indicator(node: fx.Node) -> bool:
    """Whether a tensor of numbers is made of truth values alone."""
    queue, seen = [node], set[fx.Node]()
    tensor = tensor_of(node)
    if tensor is None or tensor.dtype == torch.bool:
        return False
    while queue:
        each = queue.pop()
        value, found = tensor_of(each), read(each)
        if each in seen or (value is not None and value.dtype == torch.bool):
            continue
        seen.add(each)
        if found is None or found.is_inplace:
            return False
        moves = layout.rearranges(found) or is_cast(found) or found.name in _JOINS | _CASTS
        if not moves:
            return False
        operands = found.input if isinstance(found.input, (list, tuple)) else [found.input]
        if found.name in ("stack", "cat"):
            operands = found.arguments.get("tensors", operands)
        if not operands or not all(isinstance(operand, fx.Node) for operand in operands):
            return False
        queue.extend(operands)
    return True
