"""Attention over packed sequences: what documents exclude is skipped, though only the data says where they begin.

One opaque operator finds the runs of equal ids and calls PyTorch's attention for each; equal documents that follow one
another are one call. Inside a document a band is what it was, counted from the document's own first query and key, and a
window is cut into blocks of queries with only the keys that these see. Nothing is kept for the backward but the operands.

Where an id comes back after others, or where a query has no key, everything is computed under one mask.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention import blocked, token_major, torch_sdpa
from lz_compile.lowering.kernels.attention.token_major import Operands
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import FEW_KEYS, merged_mask

#: Queries per block of a window.
BLOCK = 256
#: Up to how many queries gradients of 16 bits are computed in float32 on a CPU: for as few, conversions cost PyTorch's
#: kernel more than half of its time (at 32 to 128 queries 0.34 to 0.78 of it are left, from 256 on 1.1 to 1.3).
FEW_QUERIES = 128
#: The operands.
_TAKES = {"query", "key", "value", "query_documents", "key_documents"}


def attention(x: op.Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``): documents, and a band within them."""
    assert set(x.given()) == _TAKES, "lz.packed is given other operands than documents"
    assert (attrs.dropout_p, attrs.softcap) == (0, None), "lz.packed is asked for dropout or capped scores"
    found: torch.Tensor = _operator(*torch_sdpa.with_positive_scale(x, attrs))
    return found


@dataclass(frozen=True)
class _Piece:
    """Queries and keys that are computed together, ``count`` times one after the other, in the ``rows`` of the batch.

    Query ``i`` of each sees its keys from ``i + band.lower`` to ``i + band.upper``.
    """

    rows: slice
    query: int
    queries: int
    key: int
    keys: int
    band: Band
    count: int = 1

    def of_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor ``[B, Sq, H, D]``, as ``[rows * count, H, queries, D]``."""
        return self._cut(tensor, self.query, self.queries)

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor ``[B, Sk, H, D]``, as ``[rows * count, H, keys, D]``."""
        return self._cut(tensor, self.key, self.keys)

    def _cut(self, tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
        part = tensor[self.rows, start : start + self.count * length]
        found: torch.Tensor = part.unflatten(1, (self.count, length)).flatten(0, 1).transpose(1, 2)
        return found

    def put(self, target: torch.Tensor, value: torch.Tensor, *, is_query: bool, adds: bool = False) -> None:
        """Write (or add) what :meth:`of_queries` or :meth:`of_keys` would give back into a tensor of tokens."""
        start, length = (self.query, self.queries) if is_query else (self.key, self.keys)
        place = target[self.rows, start : start + self.count * length]
        tokens = value.transpose(1, 2).reshape(place.shape)
        if adds:
            place += tokens
        else:
            place.copy_(tokens)

    def is_followed_by(self, other: _Piece) -> bool:
        """Whether ``other`` is the same again, right after."""
        query, key = self.query + self.count * self.queries, self.key + self.count * self.keys
        return other == replace(self, query=query, key=key, count=1)


def _packed(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention over ``[B, S, H, D]``; the result is ``[B, Sq, Hq, E]``, contiguous."""
    pieces = _pieces(x, attrs.limits or Band())
    if pieces is None:
        return _under_one_mask(x, attrs).transpose(1, 2).contiguous()
    result = token_major.fake(x, attrs)
    for piece in pieces:
        operands = (piece.of_queries(x.query), piece.of_keys(x.key), piece.of_keys(x.value))
        piece.put(result, _piecewise(*operands, piece.band, attrs.scale), is_query=True)
    return result


def _packed_gradients(gradient: torch.Tensor, x: Operands, attrs: AttentionAttrs) -> dict[str, torch.Tensor | None]:
    """The gradients of query, key and value, each document's from its forward, computed once more."""
    pieces = _pieces(x, attrs.limits or Band())
    query, key, value = x.query, x.key, x.value
    if pieces is None:
        leaves = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
        out = _under_one_mask(x, attrs)
        found = torch.autograd.grad(out, leaves, gradient.transpose(1, 2))
        return {name: each.contiguous() for name, each in zip(("query", "key", "value"), found, strict=True)}
    of_query = query.new_empty(query.shape)
    of_key, of_value = key.new_zeros(key.shape), value.new_zeros(value.shape)
    is_window = attrs.limits is not None and attrs.limits.lower is not None
    for piece in pieces:
        is_widened = query.device.type == "cpu" and query.dtype.itemsize == 2 and piece.queries <= FEW_QUERIES
        dtype = torch.float32 if is_widened else query.dtype
        parts = (piece.of_queries(query), piece.of_keys(key), piece.of_keys(value))
        rows, keys, values = (each.detach().to(dtype).requires_grad_() for each in parts)
        out = _piecewise(rows, keys, values, piece.band, attrs.scale)
        found = torch.autograd.grad(out, (rows, keys, values), piece.of_queries(gradient).to(dtype))
        with torch.no_grad():
            piece.put(of_query, found[0], is_query=True)
            for target, each in zip((of_key, of_value), found[1:], strict=True):
                piece.put(target, each, is_query=False, adds=is_window)  # its blocks share keys
    return {"query": of_query, "key": of_key, "value": of_value}


_operator = token_major.through(
    kernel_operator("packed", token_major, _packed, backward=_packed_gradients, has_fallback=False)
)


def _piecewise(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: Band, scale: float | None
) -> torch.Tensor:
    """Attention of one piece, ``[N, H, S, D]``, by PyTorch's kernel, which skips what causality excludes."""
    queries, keys = query.shape[2], key.shape[2]
    lower = None if band.lower is None or band.lower + queries <= 1 else band.lower
    upper = None if band.upper is None or band.upper >= keys - 1 else band.upper
    is_causal = (lower, upper) == (None, 0)
    needs_mask = not is_causal and (lower, upper) != (None, None)
    if keys < FEW_KEYS:  # where PyTorch's CPU kernel drops NaN unless it is given a mask
        is_causal, needs_mask = False, True
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=Band(lower, upper).mask(query, queries, keys) if needs_mask else None,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _under_one_mask(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention over ``[B, S, H, D]`` with everything that drops scores as one mask; the result is ``[B, Hq, Sq, E]``.

    The blocked kernel knows what becomes of rows without any key, and of their gradients.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (x.query, x.key, x.value))
    documents = {"query_documents": x.query_documents, "key_documents": x.key_documents}
    mask = merged_mask(op.Operands(query, key, value, **documents), attrs)
    assert mask is not None, "documents make a mask"
    kernel = torch_sdpa if bool(mask.any(-1).all()) else blocked
    wide = torch.promote_types(query.dtype, torch.float32)
    plain = replace(attrs, is_causal=False, band=None, reach=None, has_mask=True, has_documents=False, score_dtype=wide)
    found: torch.Tensor = kernel.attention(op.Operands(query, key, value, mask=mask), plain)
    return found


# ---- documents -------------------------------------------------------------------------------------------------------

#: Where documents begin and end in one row of the batch, and their ids.
Layout: TypeAlias = list[tuple[int, int, int]]


def _pieces(x: Operands, band: Band) -> list[_Piece] | None:
    """What to compute for tokens ``[B, S, H, D]``; None where a query has no key, or an id comes back among the keys."""
    assert x.query_documents is not None, "the documents of queries are given"
    assert x.key_documents is not None, "the documents of keys are given"
    offset = band.offset(x.query.shape[1], x.key.shape[1])
    lower, upper = (None if limit is None else limit + offset for limit in (band.lower, band.upper))
    own = _layouts(x.query_documents)
    theirs = own if x.query_documents is x.key_documents else _layouts(x.key_documents)
    pairs = [(own[row % len(own)], theirs[row % len(theirs)]) for row in range(max(len(own), len(theirs)))]
    found: list[_Piece] = []
    row = 0
    for (queries, keys), same in itertools.groupby(pairs):
        count = x.query.shape[0] if len(pairs) == 1 else len(list(same))
        pieces = _of_rows(slice(row, row + count), queries, keys, Band(lower, upper))
        if pieces is None:
            return None
        found.extend(_joined(pieces))
        row += count
    return found


def _layouts(documents: torch.Tensor) -> list[Layout]:
    """The runs of equal ids, row by row."""
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    rows, starts = (each.tolist() for each in begins.nonzero(as_tuple=True))
    found: list[Layout] = [[] for _ in documents]
    stops = [*starts[1:], 0]
    for row, start, stop, identity in zip(rows, starts, stops, documents[begins].tolist(), strict=True):
        found[row].append((start, stop or documents.shape[1], identity))
    return found


def _of_rows(rows: slice, queries: Layout, keys: Layout, band: Band) -> list[_Piece] | None:
    """The pieces of rows with one layout, cut to blocks of queries where a window leaves out part of a document."""
    places = {identity: (first, last) for first, last, identity in keys}
    if len(places) < len(keys):
        return None
    found = []
    for start, stop, identity in queries:
        first, last = places.get(identity, (0, 0))
        is_window = band.lower is not None and stop - 1 + band.lower > first
        step = BLOCK if is_window else stop - start
        for begin in range(start, stop, step):
            piece = _piece(rows, begin, min(begin + step, stop), first, last, band)
            if piece is None:
                return None
            found.append(piece)
    return found


def _piece(rows: slice, start: int, stop: int, first: int, last: int, band: Band) -> _Piece | None:
    """Queries of a document with those of its keys, from ``first`` to before ``last``, that they see."""
    low, high = band.span(start, stop, stop, last)
    low = max(low, first)
    all_see = (band.upper is None or start + band.upper >= first) and (band.lower is None or stop + band.lower <= last)
    if low >= high or not all_see:
        return None
    shift = start - low
    lower, upper = (None if limit is None else limit + shift for limit in (band.lower, band.upper))
    return _Piece(rows, start, stop - start, low, high - low, Band(lower, upper))


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    """Equal pieces that follow one another as one."""
    found: list[_Piece] = []
    for piece in pieces:
        if found and found[-1].is_followed_by(piece):
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(piece)
    return found
