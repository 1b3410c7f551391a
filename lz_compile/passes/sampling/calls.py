"""Calls of ``lz.sample`` and its kin, which graphs hold as the operator ``layerzero::sampling``: the op itself.

Which kernel such a call selects by itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, SamplingFacts
from lz_compile.lowering.token_bits import WORD, word_count
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.purity import refuse_transformed
from lz_compile.passes.rewriting.core import Core, wants_grad
from lz_compile.passes.rewriting.driver import Outcome
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, arguments_of, op_calls

_OP = "sampling"
#: Between what numbers operands are.
_RANGES: Mapping[str, tuple[float, float]] = {
    "bitmask": (-(2.0**31), 2.0**31 - 1),
    "temperature": (0.3, 2.0),
    "top_k": (0.0, 8.0),
    "top_p": (0.05, 1.0),
    "min_p": (0.0, 0.5),
    "seeds": (0.0, 2.0**62),
}


def sampling_calls(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every such call."""
    return op_calls(_OP, graph, effects, _match)


def _match(node: fx.Node, effects: Effects) -> Match:
    """The match of one call; RefusedError where it is mapped over a dimension."""
    ambient = effects.ambient(node)
    refuse_transformed(ambient)
    given, tensors, named = arguments_of(node, Operands, "result", "out_dtype")
    attrs = SamplingAttrs.of(given, **named)
    logits = tensors["logits"]
    rows, vocab = (as_size(size) for size in logits.shape)
    axes = _Axes(rows, vocab)
    needs_grad = wants_grad(ambient, given.values())
    facts = SamplingFacts(rows, vocab, logits.dtype, logits.device.type, needs_grad)
    inputs = {each: Input(axes.dims(name, tensors[name]), range=_RANGES.get(name)) for name, each in given.items()}
    emitter, formula = CallEmitter(given, attrs, Operands), f"{attrs.result} of {', '.join(given)}"
    return Match(
        _OP,
        Site.of(Core((node,), ambient), (axes.rows,) if attrs.result == "ids" else (axes.rows, axes.vocab), {}),
        Found(attrs, facts, inputs, {"logits": given["logits"]}, emitter, formula),
        Trial(pinned=axes.pinned),
    )


class _Axes:
    """Rows and tokens; tokens are words times bits, where they fill the last word."""

    def __init__(self, rows: Any, vocab: Any) -> None:
        self.rows = () if rows == 1 else (Axis(rows),)
        is_whole = isinstance(vocab, int) and vocab % WORD == 0 and vocab > WORD
        self.words = (Axis(vocab // WORD if is_whole else word_count(vocab)),)
        bits = Axis(WORD)
        self.vocab = (*self.words, bits) if is_whole else (Axis(vocab),)
        self.pinned = frozenset({bits} if is_whole else {*self.vocab, *self.words})

    def dims(self, name: str, tensor: torch.Tensor) -> Dims:
        """The dimensions of an operand; of a single row it has none."""
        last = {"logits": self.vocab, "bias": self.vocab, "bitmask": self.words}.get(name)
        rows = () if as_size(tensor.shape[0]) == 1 else self.rows
        return (rows,) if last is None else (rows, last)
