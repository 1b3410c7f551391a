"""Tiles of attention scores: which there are, and what is done to one; ``tiled.py`` goes through them.

A tile is some queries of the heads that share some key heads, and the keys that these queries may see. Its tensors are

    query  [N, R, D]    key  [N, C, D]    value  [N, C, E]    scores and weights  [N, R, C]

for ``N`` key heads, ``R`` rows (the queries of the first of a group's heads, then of the second, ...) and ``C`` keys.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lz_compile.lowering import dropping
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention import cpp_scores
from lz_compile.lowering.kernels.attention.bit_fills import Fill, fill_where
from lz_compile.lowering.kernels.attention.token_major import Operands
from lz_compile.lowering.work import product_dtype

#: Rows of a tile of 4 and of 2 bytes, and the fewest queries.
ROWS, SHORT_ROWS, FEWEST_QUERIES = 128, 256, 16
#: What a thread's share of a tile may take, to stay in its cache.
TILE_BYTES = 2**20


@dataclass(frozen=True)
class Problem:
    """One attention over tokens (see ``lowering/kernels/attention/token_major.py``), and the memory that its tiles share."""

    x: Operands
    attrs: AttentionAttrs
    _scratch: dict[str, torch.Tensor] = field(default_factory=dict)
    _outside: dict[tuple[Any, ...], Fill] = field(default_factory=dict)

    def memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, the same for every tile."""
        count, known = math.prod(shape), self._scratch.get(name)
        if known is None or known.numel() < count:
            known = self._scratch[name] = torch.empty(count, dtype=dtype)
        return known[:count].view(shape)

    def outside(self, part: torch.Tensor, diagonal: int, value: float, *, is_after: bool) -> Fill:
        """What a band drops of a part of a tile, after a diagonal or ahead of it: most tiles have the same."""
        shape, cut = part.shape[-2:], torch.triu if is_after else torch.tril
        key = (*shape, diagonal, value, is_after, part.dtype)
        if key not in self._outside:
            self._outside[key] = Fill.of(cut(torch.ones(shape, dtype=torch.bool), diagonal), value, part.dtype)
        return self._outside[key]

    # ---- sizes and dtypes -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """How many query heads share a key head."""
        return self.x.query.shape[2] // self.x.key.shape[2]

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.x.query.shape[-1] ** -0.5 if self.attrs.scale is None else self.attrs.scale)

    @property
    def product_dtype(self) -> torch.dtype:
        """Of query and key: as in the source, but wider where this CPU multiplies that slowly."""
        return product_dtype(self.attrs.score_dtype)

    @property
    def value_dtype(self) -> torch.dtype:
        """Of values, and of what is multiplied with them."""
        return product_dtype(self.x.value.dtype)

    @property
    def wide(self) -> torch.dtype:
        """Of sums over tiles."""
        return torch.promote_types(self.attrs.score_dtype, torch.float32)

    @property
    def score_dtype(self) -> torch.dtype:
        """Of scores and weights: 16 bits where nothing but a softmax, which computes in 32, happens to them."""
        is_plain = self.attrs.softcap is None and self.x.bias is None and self.x.slopes is None and self.x.sinks is None
        return self.product_dtype if is_plain else self.wide

    # ---- rows that mask every key ---------------------------------------------------------------------------------

    @property
    def may_be_empty(self) -> bool:
        """Whether a row may mask every key; a band leaves one to each."""
        return self.x.drops_scores or self._bias_masks

    @property
    def _bias_masks(self) -> bool:
        return self.x.bias is not None and (self.attrs.bias_can_mask or not self.attrs.bias_is_finite)

    @property
    def masks_otherwise(self) -> bool:
        """Whether anything but the mask and a band may drop scores."""
        return self._bias_masks or self.x.query_documents is not None

    @property
    def _may_skip(self) -> bool:
        """Whether keys that nobody sees may be left out: not if they count in a row that masks every key."""
        if self.attrs.masked_rows == "mean" and self.may_be_empty:  # the mean is given, but no gradient of a bias there
            return not self.attrs.dropout_p and not self._bias_masks
        return self.attrs.masked_rows != "fill"

    # ---- tiles ----------------------------------------------------------------------------------------------------

    def heads(self) -> Iterator[Heads]:
        """Everything, as key heads whose tiles fit together into the caches of the threads."""
        batch, keys, count, _ = self.x.key.shape
        if not keys:  # whoever writes a tile at a time begins with zeros then
            return
        size = self._queries_per_tile * self.groups * keys * self.product_dtype.itemsize
        together = max(torch.get_num_threads() * TILE_BYTES // max(size, 1), 1)
        for index in range(batch):
            spans = list(self._spans(index))
            for first in range(0, count, together):
                yield Heads(self, index, slice(first, min(first + together, count)), spans)

    @property
    def _queries_per_tile(self) -> int:
        itemsize = self.product_dtype.itemsize
        fitting = TILE_BYTES // (self.groups * self.x.key.shape[1] * itemsize)
        most = (SHORT_ROWS if itemsize == 2 else ROWS) // self.groups
        return self.x.rows or max(min(fitting, most), FEWEST_QUERIES)

    def _spans(self, index: int) -> Iterator[tuple[int, int, int, int]]:
        """The queries of every tile (from the first to before the last) and its keys."""
        queries, keys = self.x.query.shape[1], self.x.key.shape[1]
        for start in range(0, queries, self._queries_per_tile):
            stop = min(start + self._queries_per_tile, queries)
            first, last = 0, keys
            if self._may_skip:
                first, last = self.attrs.span(start, stop, queries, keys)
                seen = None if first >= last else self._seen(index, start, stop)
                found = None if seen is None else seen[first:last].nonzero()
                if found is not None:
                    first, last = (first + int(found[0]), first + int(found[-1]) + 1) if len(found) else (0, 0)
            yield (start, stop, first, last) if first < last else (start, stop, 0, 1)  # the mask drops that one, too

    def _seen(self, index: int, start: int, stop: int) -> torch.Tensor | None:
        """A necessary condition for a key to be seen by any of the queries, ``[Sk]``, from the data."""
        seen = None
        if self.x.mask is not None and self.x.mask.shape[-1] > 1:
            mask = self.x.mask[index if self.x.mask.shape[0] > 1 else 0]
            part = (mask if mask.shape[-2] == 1 else mask[:, start:stop]).flatten(0, 1)
            seen = part.view(torch.int8).amax(0).bool()  # in a fortieth of the time that `any` takes
        if self.x.query_documents is not None and self.x.key_documents is not None:
            queries, keys = (
                each[index if len(each) > 1 else 0] for each in (self.x.query_documents, self.x.key_documents)
            )
            low, high = queries[start:stop].aminmax()
            inside = (keys >= low) & (keys <= high)
            seen = inside if seen is None else seen & inside
        return seen


@dataclass(frozen=True)
class Heads:
    """Some key heads of one row of the batch, and the query heads that share them."""

    problem: Problem
    index: int
    heads: slice
    spans: list[tuple[int, int, int, int]]

    @cached_property
    def key(self) -> torch.Tensor:
        """``[N, Sk, D]``, contiguous."""
        return self.of_keys(self.problem.x.key).to(self.problem.product_dtype).contiguous()

    @cached_property
    def value(self) -> torch.Tensor:
        """``[N, Sk, E]``, contiguous."""
        return self.of_keys(self.problem.x.value).to(self.problem.value_dtype).contiguous()

    @cached_property
    def mean(self) -> torch.Tensor:
        """Of the values, ``[N, 1, E]``."""
        return self.value.mean(1, keepdim=True, dtype=self.problem.wide)

    @property
    def count(self) -> int:
        """How many key heads."""
        return int(self.heads.stop - self.heads.start)

    @property
    def query_heads(self) -> slice:
        """The heads of the query that share these."""
        return slice(self.heads.start * self.problem.groups, self.heads.stop * self.problem.groups)

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``[B, Sk, Hk, D]``, as ``[N, Sk, D]``."""
        return tensor[self.index, :, self.heads].transpose(0, 1)

    def tiles(self) -> Iterator[Tile]:
        """The tiles of these heads."""
        for start, stop, first, last in self.spans:
            yield Tile(self, slice(start, stop), slice(first, last))


@dataclass(frozen=True)
class Weights:
    """The softmax of a tile, ``[N, R, C]``, and what its gradients need.

    ``sink`` is the weight of the sinks, ``capped`` the tanh of a soft cap, ``is_mean`` the rows ``[N, R, 1]`` that give the
    mean of all values, and have no weights here, for they mask every key.
    """

    scores: torch.Tensor
    sink: torch.Tensor | None = None
    capped: torch.Tensor | None = None
    is_mean: torch.Tensor | None = None


@dataclass(frozen=True)
class Tile:
    """Some queries of some heads, and the keys that they may see."""

    heads: Heads
    queries: slice
    keys: slice

    # ---- operands -------------------------------------------------------------------------------------------------

    @cached_property
    def query(self) -> torch.Tensor:
        """``[N, R, D]``."""
        return self.rows_of(self.heads.problem.x.query).to(self.heads.problem.product_dtype)

    @property
    def key(self) -> torch.Tensor:
        """``[N, C, D]``."""
        return self.heads.key[:, self.keys]

    @property
    def value(self) -> torch.Tensor:
        """``[N, C, E]``."""
        return self.heads.value[:, self.keys]

    def memory(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for what is as large as the tile's scores."""
        count, rows, _ = self.query.shape
        return self.heads.problem.memory(name, (count, rows, self.keys.stop - self.keys.start), dtype)

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``[B, Sq, Hq, X]``, as ``[N, R, X]``."""
        part = tensor[self.heads.index, self.queries, self.heads.query_heads].transpose(0, 1)
        return part.reshape(self.heads.count, -1, tensor.shape[-1])

    def put(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Write what :meth:`rows_of` gives back."""
        part = rows.view(-1, self.queries.stop - self.queries.start, rows.shape[-1]).transpose(0, 1)
        target[self.heads.index, self.queries, self.heads.query_heads] = part.to(target.dtype)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of what broadcasts to ``[B, Hq, Sq, Sk]``: it broadcasts to what :meth:`by_head` gives."""
        row = slice(self.heads.index, self.heads.index + 1)
        place = (row, self.heads.query_heads, self.queries, self.keys)
        return tensor[tuple(slice(None) if size == 1 else at for size, at in zip(tensor.shape, place, strict=True))]

    def by_head(self, scores: torch.Tensor) -> torch.Tensor:
        """``[N, R, X]`` as ``[1, Hq, Sq, X]``."""
        return scores.view(1, -1, self.queries.stop - self.queries.start, scores.shape[-1])

    @cached_property
    def distances(self) -> torch.Tensor:
        """Key position minus query position, ``[Sq, C]``."""
        rows = torch.arange(self.queries.start, self.queries.stop, dtype=self.heads.problem.wide)
        return torch.arange(self.keys.start, self.keys.stop, dtype=self.heads.problem.wide) - rows[:, None]

    # ---- what the tile's part of a mask over keys alone says, in few numbers ----------------------------------------

    @cached_property
    def _of_keys(self) -> torch.Tensor | None:
        mask = self.heads.problem.x.mask
        return None if mask is None or mask.shape[-2] > 1 else self.of(mask)

    @property
    def _keeps_all(self) -> bool:
        return self._of_keys is not None and bool(self._of_keys.all())

    @cached_property
    def may_be_empty(self) -> bool:
        """Whether a row may mask every key."""
        problem, kept = self.heads.problem, self._of_keys
        if kept is None or problem.attrs.limits is not None or problem.masks_otherwise:
            return problem.may_be_empty
        return not bool(kept.any(-1).all())

    # ---- forward --------------------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """The softmax over the keys."""
        problem, attrs = self.heads.problem, self.heads.problem.attrs
        scores = self.memory("products", problem.product_dtype)
        scores.baddbmm_(self.query, self.key.transpose(1, 2), beta=0, alpha=problem.scale)
        if scores.dtype != problem.score_dtype:
            scores = self.memory("scores", problem.score_dtype).copy_(scores)
        capped = None
        if attrs.softcap is not None:
            capped = self.memory("capped", scores.dtype)
            cpp_scores.cap_(scores, attrs.softcap, capped)
        if problem.x.bias is not None:
            self.by_head(scores).add_(self.of(problem.x.bias))
        if problem.x.slopes is not None:
            self.by_head(scores).addcmul_(self.of(problem.x.slopes).to(scores.dtype), self.distances)
        fill = torch.finfo(scores.dtype).min if attrs.masked_rows == "mean" else -math.inf
        self.drop(scores, fill)
        return self._softmax(scores, fill, capped)

    def drop(self, scores: torch.Tensor, fill: float) -> None:
        """Put ``fill`` where a query does not see a key."""
        problem, by_head = self.heads.problem, self.by_head(scores)
        band, (rows, columns) = problem.attrs.limits, by_head.shape[2:]
        if band is not None:
            shift = self.queries.start + band.offset(problem.x.query.shape[1], problem.x.key.shape[1]) - self.keys.start
            after = columns if band.upper is None else min(max(shift + band.upper + 1, 0), columns)
            if band.upper is not None and after < columns:
                part = by_head[..., after:]
                problem.outside(part, shift + band.upper + 1 - after, fill, is_after=True).into(part)
            before = 0 if band.lower is None else min(max(rows - 1 + shift + band.lower, 0), columns)
            if band.lower is not None and before > 0:
                part = by_head[..., :before]
                problem.outside(part, shift + band.lower - 1, fill, is_after=False).into(part)
        if problem.x.mask is not None and not self._keeps_all:
            fill_where(by_head, torch.logical_not(self.of(problem.x.mask)), fill)
        if problem.x.query_documents is not None and problem.x.key_documents is not None:
            queries, keys = problem.x.query_documents[:, None, :, None], problem.x.key_documents[:, None, None, :]
            fill_where(by_head, self.of(queries) != self.of(keys), fill)

    def _softmax(self, scores: torch.Tensor, fill: float, capped: torch.Tensor | None) -> Weights:
        problem, outcome = self.heads.problem, self.heads.problem.attrs.masked_rows
        largest, sink = None, None
        if problem.x.sinks is not None:
            sinks = self.of(problem.x.sinks).to(scores.dtype)
            largest = torch.maximum(self.by_head(scores).amax(-1, keepdim=True), sinks)
            self.by_head(scores).sub_(largest).exp_()
            sink = torch.exp(sinks - largest)
            total = self.by_head(scores).sum(-1, keepdim=True).add_(sink)
            self.by_head(scores).div_(total)
            sink = sink / total
        elif self.may_be_empty and outcome in ("mean", "zero"):
            largest = scores.amax(-1, keepdim=True)
        if sink is None:
            cpp_scores.softmax_(scores)
        is_mean = None
        if largest is not None and self.may_be_empty and outcome in ("mean", "zero"):
            is_empty = (largest <= fill).view(*scores.shape[:2], 1)
            is_partial = self.keys != slice(0, problem.x.key.shape[1])  # else its weights are equal, as they should be
            is_mean = is_empty if outcome == "mean" and is_partial else None
            if outcome == "zero" or is_partial:
                fill_where(scores, is_empty, 0.0)
        if problem.attrs.zeroes_nan:
            fill_where(scores, scores.isnan(), 0.0)
        return Weights(scores, sink, capped, is_mean)

    def noise(self) -> torch.Tensor | None:
        """What dropout multiplies the weights with, a function of the seed; None without dropout.

        Sixteen bits about each are a quarter of the work that a random number is.
        """
        problem = self.heads.problem
        if problem.x.seed is None:
            return None
        generator = torch.Generator().manual_seed(self._own_seed(problem.x.seed))
        dropped, gain = dropping.share(problem.attrs.dropout_p)
        noise = self.memory("noise", problem.score_dtype)
        words = problem.memory("random", (-(-noise.numel() // 4),), torch.int64)
        bits = words.random_(-(2**63), None, generator=generator).view(torch.int16)[: noise.numel()].view(noise.shape)
        if dropped == dropping.LEVELS:
            return noise.zero_()
        return torch.ge(bits, dropped - dropping.LEVELS // 2, out=noise).mul_(gain)

    def _own_seed(self, seed: torch.Tensor) -> int:
        """The seed of this tile alone; 32 bits are what PyTorch's generators on CPUs take."""
        numbers = (int(number * 2**24) for number in seed.tolist())
        text = repr((*numbers, self.heads.index, self.heads.heads.start, self.queries.start))
        return zlib.crc32(text.encode())

    def rounded(self, weights: torch.Tensor) -> torch.Tensor:
        """In the dtype of the values."""
        dtype = self.heads.problem.value_dtype
        return weights if weights.dtype == dtype else self.memory("rounded", dtype).copy_(weights)
