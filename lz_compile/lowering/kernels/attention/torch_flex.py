"""FlexAttention: PyTorch's generator of fused attention kernels, called as Dynamo would record it.

Softcap, bias and ALiBi become a function of one score, which Inductor compiles into the kernel, and band, documents and
mask a predicate on its position; nothing of the size of the scores is ever stored. Tiles in which the predicate keeps
nothing are skipped, and where it keeps everything it is not asked.

Not on CPUs: the template for them (PyTorch 2.13) fails where a mask is computed in the same graph, for it reads only what is
in memory, and where something pointwise follows, for it takes no epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.nn.attention.flex_attention import BlockMask

from lz_compile.ground.sizes import is_one
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import block_mask
from lz_compile.lowering.ops.attention import Operands

#: Queries and keys per tile that is skipped or not, as ``create_block_mask`` has it. Tests use small tiles.
TILE = 128
#: One tile that is larger than any sequence: nothing is ever skipped.
_WHOLE = 1 << 30
#: A finite fill: half of float32's lowest number, for the kernel multiplies scores by log2(e).
_LOWEST = torch.finfo(torch.float32).min / 2
_POSITION = ("batch", "head", "query_index", "key_index")
#: Which parts of a position the dimensions of a tensor go by, where these are not all four.
#: The operands that drop scores, in the order of a block mask's parts.
_DROPPING = ("mask", "query_documents", "key_documents")
_DIMENSIONS: Mapping[str, tuple[int, ...]] = {"query_documents": (0, 2), "key_documents": (0, 3), "offset": ()}

Buffers: TypeAlias = Mapping[str, Any]


def attention(x: Operands, attrs: AttentionAttrs, tile: int = TILE) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without dropout.

    FlexAttention gives zero for a row that masks every key; where the source gives NaN, that is restored. Where it gives the
    mean of all values, the predicate is part of the score instead, and nothing is skipped.
    """
    assert x.fill is None, "torch.flex is given fills"
    assert attrs.dropout_p == 0, "torch.flex is asked for dropout"
    query = x.query
    grid = block_mask.Grid(query, query.shape[2], x.key.shape[2], tile)
    seen = _predicate(grid, _given(x, _DROPPING), attrs)
    fills = seen.can_be_empty and attrs.masked_rows == "mean" and x.sinks is None
    added = _given(x, ("bias", "slopes"))
    outputs = _flex(
        query,
        x.key,
        x.value,
        _function(query, "score_mod", *_score(attrs, added, seen if fills else None)),
        _whole(query) if fills or not seen else _block_mask(grid, seen),
        query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale,
        dict(_OPTIONS),
        tuple({**added, **(seen.buffers if fills else {})}.values()),
        () if fills else tuple(seen.buffers.values()),
    )
    out: torch.Tensor = outputs[0]
    logsumexp: torch.Tensor = outputs[1]
    if x.sinks is not None:
        return _with_sinks(out, logsumexp, x.sinks)
    is_infinite = x.bias is not None and not attrs.bias_is_finite
    if attrs.masked_rows == "zero" or not (is_infinite or (seen.can_be_empty and not fills)):
        return out
    return torch.where(logsumexp.unsqueeze(-1) == -math.inf, math.nan, out)


def _given(x: Operands, names: Sequence[str]) -> dict[str, Any]:
    """Those of the names that there are, in this order."""
    return {name: getattr(x, name) for name in names if getattr(x, name) is not None}


def _flex(query: Any, *operands: Any) -> Any:
    """The higher-order operator; it takes no proxies, so its node is made here."""
    operator = torch.ops.higher_order.flex_attention
    if isinstance(query, fx.Proxy):
        return query.tracer.create_proxy("call_function", operator, (query, *operands), {})
    return operator(query, *operands)


def _function(query: Any, name: str, function: Callable[..., Any], parameters: Sequence[str]) -> Any:
    """A function as the higher-order operator takes it: itself, or the node of a graph where a graph is built."""
    if not isinstance(query, fx.Proxy):
        return function
    tracer: Any = query.tracer  # the builder's
    return tracer.subgraph(name, function, parameters)


#: What ``flex_attention`` passes by default on CUDA.
_OPTIONS: Mapping[str, Any] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def _with_sinks(out: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """``out``, whose share of the softmax is one, beside an extra score that has no value; ``logsumexp`` has base 2."""
    share = torch.sigmoid(logsumexp.unsqueeze(-1) * math.log(2) - sinks)
    return (out * share).to(out.dtype)


# ---- functions of a position -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Predicate:
    """Which keys a query sees: a band, counted from the first query and key, and what tensors say."""

    band: Band | None
    offset: int
    buffers: Buffers

    def __bool__(self) -> bool:
        return self.band is not None or bool(self.buffers)

    @property
    def can_be_empty(self) -> bool:
        """Whether a query may see no key; under a band it does."""
        return bool(self.buffers.keys() - {"offset"})

    def keeps(self, position: Sequence[Any], at: Buffers) -> Any:
        """Whether the query of a position sees the key; ``at`` is what tensors say there."""
        parts = []
        if self.band is not None:
            distance = position[3] - position[2] - at.get("offset", self.offset)
            parts += [] if self.band.lower is None else [distance >= self.band.lower]
            parts += [] if self.band.upper is None else [distance <= self.band.upper]
        if "query_documents" in at:
            parts.append(at["query_documents"] == at["key_documents"])
        if "mask" in at:
            parts.append(at["mask"])
        keep = parts[0]
        for part in parts[1:]:
            keep = torch.logical_and(keep, part)
        return keep

    def function(self) -> tuple[Callable[..., Any], Sequence[str]]:
        """As the higher-order operator takes it, with its parameters."""
        read = _reader(self.buffers)

        def keep(*arguments: Any) -> Any:
            position, tensors = arguments[:4], arguments[4:]
            return self.keeps(position, read(position, tensors))

        return keep, (*_POSITION, *self.buffers)


def _predicate(grid: block_mask.Grid, masks: Buffers, attrs: AttentionAttrs) -> _Predicate:
    offset = 0 if attrs.limits is None else attrs.limits.offset(grid.rows, grid.columns)
    if isinstance(offset, int):
        return _Predicate(attrs.limits, offset, masks)
    # A symbolic length is no constant that a function could hold.
    return _Predicate(attrs.limits, 0, {**masks, "offset": grid.like.new_full((), offset, dtype=torch.int32)})


def _score(
    attrs: AttentionAttrs, added: Buffers, dropping: _Predicate | None
) -> tuple[Callable[..., Any], Sequence[str]]:
    """One score after softcap, bias, ALiBi and fills, as a function of its position, with its parameters."""
    buffers = {**added, **({} if dropping is None else dropping.buffers)}
    read = _reader(buffers)

    def score(value: Any, *arguments: Any) -> Any:
        position, tensors = arguments[:4], arguments[4:]
        at = read(position, tensors)
        if attrs.softcap is not None:
            value = torch.tanh(value / attrs.softcap) * attrs.softcap
        if "bias" in at:
            value = value + at["bias"]
            if attrs.bias_is_finite:
                value = torch.clamp_min(value, _LOWEST)
        if "slopes" in at:
            value = value + at["slopes"] * (position[3] - position[2]).to(torch.float32)
        return value if dropping is None else torch.where(dropping.keeps(position, at), value, _LOWEST)

    return score, ("score", *_POSITION, *buffers)


def _reader(buffers: Buffers) -> Callable[[Sequence[Any], Sequence[Any]], Buffers]:
    """Reads tensors at a position; ``buffers`` are these as the graph around has them, with shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in buffers.items()}

    def read(position: Sequence[Any], tensors: Sequence[Any]) -> Buffers:
        found = {}
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            parts = [position[part] for part in _DIMENSIONS.get(name, (0, 1, 2, 3))]
            index = tuple(part * 0 if is_one(size) else part for size, part in zip(shape, parts, strict=True))
            found[name] = tensor[index] if index else tensor
        return found

    return read


# ---- block masks -----------------------------------------------------------------------------------------------------


def _block_mask(grid: block_mask.Grid, seen: _Predicate) -> tuple[Any, ...]:
    """The block mask of a predicate, in arithmetic of the graph."""
    if seen.can_be_empty:
        by_query, by_key = block_mask.of_parts(grid, seen.band, *(seen.buffers.get(name) for name in _DROPPING))
    else:
        assert seen.band is not None, "a predicate without a band and without tensors keeps everything"
        by_query, by_key = block_mask.of_band(grid, seen.band)
    fields = {
        "kv_num_blocks": by_query.count,
        "kv_indices": by_query.indices,
        "full_kv_num_blocks": by_query.full_count,
        "full_kv_indices": by_query.full_indices,
        "q_num_blocks": by_key.count,
        "q_indices": by_key.indices,
        "full_q_num_blocks": by_key.full_count,
        "full_q_indices": by_key.full_indices,
    }
    return _as_tuple(fields, (grid.rows, grid.columns), grid.tile, _function(grid.like, "mask_mod", *seen.function()))


def _whole(query: Any) -> tuple[Any, ...]:
    """The block mask of one tile that is computed as a part, its tensors (of one element each) beside ``query``."""
    count = query.new_full((1, 1, 1), 1, dtype=torch.int32)
    index = query.new_full((1, 1, 1, 1), 0, dtype=torch.int32)
    names = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
    fields: dict[str, Any] = dict(zip(names, (count, index, count, index), strict=True))
    fields |= dict.fromkeys(f"full_{name}" for name in names)
    return _as_tuple(fields, (1, 1), _WHOLE, _function(query, "mask_mod", _keep_all, _POSITION))


def _keep_all(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
    return batch.new_ones((), dtype=torch.bool)


def _as_tuple(fields: Buffers, lengths: tuple[Any, Any], tile: int, mask_mod: Any) -> tuple[Any, ...]:
    """A block mask as the operator takes it, in the order that this PyTorch has; ``BlockMask`` itself takes no proxies."""
    placeholders: dict[str, Any] = {
        name: None if tensor is None else torch.empty(1, 1, 1, 1) for name, tensor in fields.items()
    }
    order = BlockMask(seq_lengths=lengths, **placeholders, BLOCK_SIZE=(tile, tile), mask_mod=mask_mod).as_tuple()
    found = {id(placeholder): fields[name] for name, placeholder in placeholders.items() if placeholder is not None}
    return tuple(found.get(id(each), each) for each in order)
