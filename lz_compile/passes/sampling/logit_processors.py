"""What happens to scores before they are filtered: masks, a temperature, and what is added.

Read upwards from the filter for as long as it is one of these, in an order that the op has: ``(logits + bias) /
temperature``, minus infinity where a mask forbids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of, broadcast_from, resolve
from lz_compile.passes.formula.expressions import constant_value, is_cast, is_lossless
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.sampling.excerpt import Affected, Scores


@dataclass(frozen=True)
class Part:
    """A tensor that takes part, with its axes; of a mask, whether True keeps, of what is added, whether it is subtracted."""

    node: fx.Node
    dims: Dims
    is_inverted: bool = False


@dataclass
class LogitProcessors:
    """What was read: ``logits`` is what it starts from. ``temperature`` is a number times the tensors ``divisors``."""

    logits: Scores
    masks: list[Part] = field(default_factory=list)
    temperature: float = 1.0
    divisors: list[Part] = field(default_factory=list)
    bias: list[Part] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """All tensors."""
        return [*self.masks, *self.divisors, *self.bias]


def logit_processors_of(effects: Effects, entry: Scores, inside: set[fx.Node]) -> LogitProcessors:
    """What was done to the scores at ``entry``, as far as only what is ``inside`` reads them: that need not be computed.

    What is found joins it.
    """
    reader = _Reader(effects, LogitProcessors(entry))
    while inside.issuperset((scores := reader.found.logits.node).users):
        inside.add(scores)
        if not reader.step():
            break
    return reader.found


@dataclass
class _Reader:
    effects: Effects
    found: LogitProcessors

    def step(self) -> bool:
        """Read one call; whether it is one of these."""
        scores = self.found.logits
        call = self.effects.calls.get(scores.node)
        if call is None or call.is_inplace or self.effects.is_overwritten(scores.node):
            return False
        before = LogitProcessors(
            scores, [*self.found.masks], self.found.temperature, [*self.found.divisors], [*self.found.bias]
        )
        node = self._read(call, scores)
        if node is None:
            return False
        source = self._scores(call, node)
        if source is None or self._depends(source):
            self.found = before
            return False
        self.found.logits = source
        return True

    def _depends(self, source: Scores) -> bool:
        """Whether a part is computed from the scores themselves."""
        affected = Affected(self.effects, source.node).nodes
        return any(part.node in affected or part.node is source.node for part in self.found.parts)

    def _scores(self, call: Call, node: fx.Node) -> Scores | None:
        """The operand that holds the scores, with its axes."""
        tensor, scores = tensor_of(node), self.found.logits
        if tensor is None or not tensor.is_floating_point() or self.effects.current(node, call.node) is not node:
            return None
        if self.effects.is_opaque(node, call.node):
            return None
        if shape_of(tensor) == shape_of(known_tensor(scores.node)):
            return scores.at(node)
        try:
            dims = layout.read_input_dims(call, scores.dims)
        except LayoutError:
            return None
        is_whole = dims is not None and set(axes_of(dims)) == set(axes_of(scores.dims))
        is_apart = dims is not None and any(tuple(dim) == (scores.vocab,) for dim in resolve(dims))
        return Scores(node, dims, scores.vocab) if dims is not None and is_whole and is_apart else None

    def _read(self, call: Call, scores: Scores) -> fx.Node | None:
        """The operand that holds the scores, after what is done to it was noted."""
        source = call.input if isinstance(call.input, fx.Node) else None
        tensor = tensor_of(call.node)
        if source is None or tensor is None:
            return None
        if call.name in ("clone", "contiguous"):
            return source
        if is_cast(call) and is_lossless(known_tensor(source).dtype, tensor.dtype):
            return source
        if layout.rearranges(call) and not is_cast(call):
            return source
        if call.name in ("masked_fill", "where"):
            return self._mask(call, scores)
        if tensor.dtype.itemsize < 4 or (kind := tensor_of(source)) is None or kind.dtype != tensor.dtype:
            return None  # what is rounded on the way is not what is rounded once
        if call.name in ("div", "mul") and call.get("rounding_mode") is None:
            return self._scaled(call, scores)
        if call.name in ("add", "sub") and call.get("alpha") is None:
            return self._added(call, scores)
        return None

    def _mask(self, call: Call, scores: Scores) -> fx.Node | None:
        if call.name == "masked_fill":
            mask, kept, fill, is_inverted = call.get("mask"), call.input, call.get("value"), True
        else:
            mask, kept, fill, is_inverted = call.get("condition"), call.input, call.get("other"), False
            if self._number(fill) is None:
                kept, fill, is_inverted = fill, kept, True
        if self._number(fill) != -math.inf or not isinstance(kept, fx.Node):
            return None
        part = self._part(call, mask, scores, torch.bool)
        while part is not None and (inner := self.effects.calls.get(part.node)) is not None and inner.name == "not":
            is_inverted = not is_inverted
            part = self._part(inner, inner.input, Scores(part.node, part.dims, scores.vocab), torch.bool)
        if part is None or not set(axes_of(part.dims)) <= set(axes_of(scores.dims)):
            return None
        self.found.masks.append(Part(part.node, part.dims, is_inverted))
        return kept

    def _scaled(self, call: Call, scores: Scores) -> fx.Node | None:
        if self.found.bias:
            return None
        other = call.get("other")
        number = self._number(other)
        if number is not None:
            if not (math.isfinite(number) and number > 0):
                return None
            self.found.temperature *= number if call.name == "div" else 1 / number
            return call.input  # type: ignore[no-any-return]
        part = self._part(call, other, scores, None) if call.name == "div" else None
        if part is None or scores.vocab in axes_of(part.dims):
            return None
        self.found.divisors.append(part)
        return call.input  # type: ignore[no-any-return]

    def _added(self, call: Call, scores: Scores) -> fx.Node | None:
        """Scores plus something else that differs from token to token: the one that has the rows is the scores."""
        other = call.get("other")
        part = self._part(call, other, scores, None)
        if part is None or scores.vocab not in axes_of(part.dims):
            return None
        first = tensor_of(call.input)
        if first is None or shape_of(first) != shape_of(known_tensor(call.node)):
            if call.name == "sub":
                return None
            part = self._part(call, call.input, scores, None)
            if part is None or scores.vocab not in axes_of(part.dims):
                return None
            self.found.bias.append(part)
            return other if isinstance(other, fx.Node) else None
        self.found.bias.append(Part(part.node, part.dims, call.name == "sub"))
        return call.input  # type: ignore[no-any-return]

    def _number(self, value: object) -> float | None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        call = self.effects.calls.get(value) if isinstance(value, fx.Node) else None
        found = None if call is None else constant_value(call)
        return None if found is None or (tensor_of(value) is not None and known_tensor(value).dim()) else float(found)

    def _part(self, call: Call, value: object, scores: Scores, kind: torch.dtype | None) -> Part | None:
        """A tensor that is broadcast to the scores."""
        tensor = tensor_of(value)
        if tensor is None or not isinstance(value, fx.Node) or self.effects.current(value, call.node) is not value:
            return None
        is_fit = tensor.dtype == kind if kind is not None else tensor.is_floating_point() and tensor.dtype.itemsize >= 4
        if not is_fit or tensor.dim() > len(scores.dims) or self.effects.is_opaque(value, call.node):
            return None
        return Part(value, broadcast_from(scores.dims, shape_of(tensor)))
