"""Where the reading of a row stops: what is computed from it, and what is a weight."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.expressions import is_cast, is_constant, made_of
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of

#: How many operations may lie between a weight as it is given and its use.
_DEPTH = 4
#: How many operations may lie between a row and what is computed from it.
_CHAIN = 40


def behind_casts(effects: Effects, node: fx.Node) -> fx.Node:
    """The tensor of which ``node`` is a wider copy."""
    while True:
        call, tensor = effects.calls.get(node), tensor_of(node)
        source = tensor_of(call.input) if call is not None else None
        if call is None or source is None or tensor is None or not is_cast(call) or not source.is_floating_point():
            return node
        if source.dtype.itemsize >= tensor.dtype.itemsize:  # it rounds the row, or is the last step of another op
            return node
        node = call.input


@dataclass
class Edge:
    """Where reading stops: at the source, and at what is neither computed from it nor from weights alone."""

    effects: Effects
    source: fx.Node
    _depends: dict[fx.Node, bool] = field(default_factory=dict)
    _encloses: dict[fx.Node, bool] = field(default_factory=dict)

    def __contains__(self, node: object) -> bool:
        return node is self.source or (
            isinstance(node, fx.Node) and not self.depends(node) and not self.is_weight(node)
        )

    def depends(self, node: fx.Node) -> bool:
        """Whether a value is computed from the source."""
        known, first = self._depends, self.effects.position[self.source]
        stack = [node]  # what lies between may be a whole model: too deep for calls of calls
        while stack:
            top = stack[-1]
            operands = made_of(top, self.effects.calls.get(top)) if self.effects.position[top] > first else []
            if top is self.source or any(known.get(operand) for operand in operands):
                known[top] = True
            elif top not in known and (unknown := [operand for operand in operands if operand not in known]):
                stack.extend(unknown)
                continue
            known.setdefault(top, False)
            stack.pop()
        return known[node]

    def encloses(self, node: fx.Node, depth: int = _CHAIN) -> bool:
        """Whether a value is computed from the source and from weights alone."""
        if node is self.source:
            return True
        known = self._encloses.get(node)
        if known is None:
            operands = [operand for operand in self._data(node) if tensor_of(operand) is not None]
            known = self._encloses[node] = (depth > 0 and self.depends(node)) and all(
                self.encloses(operand, depth - 1) or (not self.depends(operand) and self.is_weight(operand))
                for operand in operands
            )
        return known

    def _data(self, node: fx.Node) -> list[fx.Node]:
        """The operands of which values are read, not just a shape or a dtype."""
        call = self.effects.calls.get(node)
        is_laid_out = call is not None and layout.rearranges(call)
        return [call.input] if call is not None and is_laid_out else made_of(node, self.effects.calls.get(node))

    def is_weight(self, node: fx.Node, depth: int = _DEPTH) -> bool:
        """Whether a value is given, or a pointwise function of what is."""
        call = self.effects.calls.get(node)
        if call is None:
            return True
        is_read = depth > 0 and (is_pointwise(call) or is_constant(call) or layout.rearranges(call))
        return is_read and all(self.is_weight(operand, depth - 1) for operand in self._data(node))
