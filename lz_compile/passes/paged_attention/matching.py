"""Every call of ``lz.paged_attention`` as a match of the op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.ops.paged_attention import Operands
from lz_compile.passes.formula.axes import Axis
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.paged_attention.recogniser import PagedCall, recognise
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, op_calls

_OP = "paged_attention"
#: Of proofs: as many blocks as tables name, and as many slots as lengths say at most.
_BLOCKS, _SLOTS, _COLUMNS = 4, 2, 2
_RANGES: Mapping[str, tuple[float, float]] = {
    "block_table": (0.0, float(_BLOCKS)),
    "lengths": (0.0, float(_SLOTS * _COLUMNS + 1)),
    "first_keys": (0.0, float(_SLOTS * _COLUMNS + 1)),
    "key_scale": (0.01, 0.1),
    "value_scale": (0.01, 0.1),
}


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every such call."""
    return op_calls(_OP, graph, effects, _match)


@dataclass(frozen=True)
class _Emitter(CallEmitter):
    """Where the queries of requests begin is made up for proofs: they share them evenly."""

    tokens: Axis | None = None
    requests: Axis | None = None

    def implied_value(self, node: fx.Node, _builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """Starts that rise from 0 to all queries."""
        if node is not self.given.get("query_starts"):
            raise LookupError(f"{node.name} is implied by no attribute")
        tokens, requests = (1 if axis is None else sizes[axis] for axis in (self.tokens, self.requests))
        return (torch.arange(requests + 1, device=given.device) * tokens // requests).to(given.dtype)


def _match(node: fx.Node, effects: Effects) -> Match:
    """The match of one call; RefusedError where it is none."""
    call = recognise(node, effects)
    given, attrs, axes = call.given, call.attrs, call.axes
    inputs = {each: _input(name, call) for name, each in given.items()}
    emitter = _Emitter(given, attrs, Operands, None, _only(axes["T"]), _only(axes["R"]))
    least = {"N": _BLOCKS, "P": _SLOTS, "M": _COLUMNS}
    trial = Trial(
        masked_rows_count=False,
        limited=frozenset((*axes["D"], *axes["E"], *axes["P"])),
        least={axis: least[letter] for letter in least for axis in axes[letter]},
    )
    formula = f"softmax(query key_cache[block_table]^T) value_cache[block_table], {attrs.variant}"
    return Match(
        _OP,
        Site.of(Core((node,), effects.ambient(node)), (axes["T"], axes["Hq"], axes["E"]), {}),
        Found(attrs, call.facts, inputs, {"query": given["query"]}, emitter, formula),
        trial,
    )


def _only(axes: tuple[Axis, ...]) -> Axis | None:
    return axes[0] if axes else None


def _input(name: str, call: PagedCall) -> Input:
    kind = call.tensors[name].dtype
    is_stored = name in ("key_cache", "value_cache") and kind.itemsize == 1
    made_up = (-100.0, 100.0) if is_stored and kind == torch.int8 else (-8.0, 8.0) if is_stored else None
    implied = "starts" if name == "query_starts" else None
    return Input(call.dims(name), implied=implied, range=_RANGES.get(name, made_up))
