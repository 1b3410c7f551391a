"""Calls of ``lz.paged_attention``, which graphs hold as the operator ``layerzero::paged_attention``: the op itself.

Which kernel such a call selects by itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, arguments_of, op_calls

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


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
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
    """The match of one call; RefusedError where it is mapped over a dimension, or has nothing to do."""
    ambient = effects.ambient(node)
    refuse_transformed(ambient)
    given, tensors, named = arguments_of(node, Operands, "scale", "softcap", "window", "out_dtype")
    if any(as_size(size) == 0 for each in tensors.values() for size in each.shape):
        raise RefusedError("EMPTY", "there are no queries, or no blocks", "leave the call out")
    sizes = _sizes(tensors)
    if not (isinstance(sizes["Hq"], int) and isinstance(sizes["Hk"], int)):
        raise RefusedError("SYMBOLIC_HEADS", "how many heads share keys is a symbol", "compile with static heads")
    attrs, facts = op.from_operands(Operands(**tensors), sizes, **named)
    axes = _axes(sizes, is_ragged=attrs.is_ragged)
    inputs = {each: _input(name, tensors[name], axes) for name, each in given.items()}
    emitter = _Emitter(given, attrs, Operands, None, _only(axes["T"]), _only(axes["R"]))
    least = {"N": _BLOCKS, "P": _SLOTS, "M": _COLUMNS}
    trial = Trial(
        masked_rows_count=False,
        limited=frozenset((*axes["D"], *axes["E"], *axes["P"])),
        least={axis: least[letter] for letter in least for axis in axes[letter]},
    )
    dims = (axes["T"], axes["Hq"], axes["E"])
    operands = {"query": given["query"]}
    formula = f"softmax(query key_cache[block_table]^T) value_cache[block_table], {attrs.variant}"
    return Match(
        _OP, Site.of(Core((node,), ambient), dims, {}), Found(attrs, facts, inputs, operands, emitter, formula), trial
    )


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Extents by the letters of the op's table."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        letters = [each.removesuffix("|1") for each in op.SHAPES[name].split()]
        for letter, size in zip(letters, tensor.shape, strict=True):
            found.setdefault(letter, as_size(size))
    return found


def _axes(sizes: Mapping[str, Any], *, is_ragged: bool) -> dict[str, tuple[Axis, ...]]:
    """Axes by letter: those of query heads are the cache's times a group, and requests of one query are the queries."""
    axes: dict[str, tuple[Axis, ...]] = {letter: () if size == 1 else (Axis(size),) for letter, size in sizes.items()}
    group = sizes["Hq"] // sizes["Hk"]
    axes["Hq"] = (*axes["Hk"], *(() if group == 1 else (Axis(group),)))
    if not is_ragged:
        axes["T"] = axes["R"]
    return axes


def _only(axes: tuple[Axis, ...]) -> Axis | None:
    return axes[0] if axes else None


def _input(name: str, tensor: torch.Tensor, axes: Mapping[str, tuple[Axis, ...]]) -> Input:
    sizes = map(as_size, tensor.shape)
    letters = [each.removesuffix("|1") for each in op.SHAPES[name].split()]
    dims: Dims = tuple(() if size == 1 else axes[letter] for letter, size in zip(letters, sizes, strict=True))
    is_stored = name in ("key_cache", "value_cache") and tensor.dtype.itemsize == 1
    made_up = (-100.0, 100.0) if is_stored and tensor.dtype == torch.int8 else (-8.0, 8.0) if is_stored else None
    return Input(dims, implied="starts" if name == "query_starts" else None, range=_RANGES.get(name, made_up))
