"""What attention kernels do on a CPU, in amounts of work over its sizes.

Two forms are told apart of what is left to Inductor: one that it makes PyTorch's fused kernel of (then that kernel is what
the source calls), and the other, which writes all scores to memory. Factors are of what the kernels' code does to a score;
those of conditions are how Inductor's C++ fares with them, and were read off one machine, an Intel Xeon with AMX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lz_compile.lowering.kernels.attention.blocked import BLOCK, MAX_KINDS
from lz_compile.lowering.kernels.attention.mask_numbers import FEWEST
from lz_compile.lowering.work import USUAL, Kind, Work, fresh, is_looped

#: Features by which work depends on data, or on what no size says: priors speak of these.
_UNKNOWN = frozenset({"documents", "sliding_window", "alibi", "masked_row_fill"})
#: Queries up to which products are reads of keys and values.
_FEW = 4
#: Keys of a block of PyTorch's kernel, where causal blocks are left out.
_FUSED_BLOCK = 512
#: Operators of no size that a call of PyTorch's kernel takes as long as: it is dispatched twice, and allocates more.
_FUSED_CALLS = 8
#: The same of the operators that see to rows whose every key is masked, one forward and one backward (a Xeon with AMX).
_ROW_CALLS = 200
#: What PyTorch's kernel takes for one query where the heads of a token lie next to each other, as projections leave them.
_INTERLEAVED = 1.25
#: What products in 16 bits take more for an element of keys and values that lie so, in softmaxed scores (an EPYC).
_APART = 1.5
#: Bytes of keys and values that a cache still holds at the next call, at the most; what loops that read values in strips of
#: a register's width take of larger ones, which come from memory, over one that reads whole keys (an EPYC).
_HELD, _IN_STRIPS = 1 << 24, 1.5

#: Of keys that a mask may hide from a few queries, those that it shows: a cache fills from nothing on, which no size tells;
#: and how many are hidden together.
_SHOWN, _TILE = 0.5, 64
#: What a row of `lz.flash_decoding` takes beside its keys, in softmaxed scores: most of it, in batches of short sentences.
_ROW = 40
#: A key of a row that fills no register: PyTorch's fused kernel takes these one after the other (read off an EPYC).
_ONE_BY_ONE = 2.4
#: Operators of no size that two products of a few rows in 16 bits take as long to call as (oneDNN, a Xeon with AMX).
_HALF_CALLS = 60
#: What a band and a boolean mask take of a softmax in Inductor's C++, and each where a kernel makes numbers of it first.
#: A band takes 1.8 on a Xeon with AMX, and 0.5 to 1.2 on two EPYCs by how it is written: more chose slower kernels there.
_BAND, _BOOLEANS = 1.0, 4.0
_BAND_NUMBERS, _NUMBERS = 0.3, 0.6
#: What PyTorch's tanh takes of a softmax, in C++ and in Inductor's code alike (an EPYC with AVX-512), and what the quotient
#: of ours does (capping.py): with Inductor's loads and stores around it, or in one pass over a tile. The last two take 1.0
#: and 0.5 on that EPYC, and 1.7 and 2 to 3.4 on a Xeon with AMX, whose softmax is faster.
_TANH, _CAPPED, _CAPPED_TILE = 3.3, 1.5, 1.5
#: What a random number takes of a softmax: sixteen bits of PyTorch's generator, those of `dropping.py`, and a mask of them
#: that is kept for the backward (an EPYC with AVX2).
_DRAWN, _MIXED, _KEPT_MASK = 4.0, 0.5, 15.0
#: What two products take of a softmax to widen scores of 16 bits and round them, where no instructions multiply these.
_WIDENED = 3.0


@dataclass(frozen=True)
class _Shape:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dims: int
    bytes_each: int
    features: frozenset[str]
    copies: int = 1
    is_widened: bool = False
    lanes: int = 8

    @property
    def scores(self) -> float:
        return float(self.batch * self.heads * self.queries * self.keys)

    @property
    def flops(self) -> float:
        return 2.0 * self.scores * self.dims

    @property
    def rows(self) -> int:
        return min(self.queries, self.keys)

    @property
    def held(self) -> float:
        """Elements of keys and values."""
        return float(self.batch * self.kv_heads * self.keys * self.dims)

    @property
    def read(self) -> float:
        """The same as keys of a float32 attention of 8 heads with 64 features, which tells the cache that they come from.

        None come from memory in 16 bits: widening them takes longer than that.
        """
        return 0.0 if self.is_half else self.held / (8 * 128)

    @property
    def looked_at(self) -> float:
        """The same where heads that share keys read them again, of which a cache holds some."""
        return float(self.held * self.groups**0.65)

    @property
    def in_strips(self) -> float:
        """What Inductor's loops take to read keys and values, of what reading them one after the other takes."""
        return _IN_STRIPS if self.held * self.bytes_each >= _HELD else 1.0

    @property
    def copied(self) -> dict[Kind, float]:
        """What copies of keys and values take, written and read by the product: as the source makes them."""
        size = self.held / 2 * self.copies * self.bytes_each  # bytes of either; a row's elements have four
        return {"row": 2 * 2 * size / 4, **fresh(size, times=2)}

    @property
    def is_half(self) -> bool:
        return self.bytes_each == 2

    @property
    def buffers(self) -> list[int]:
        """Bytes of a score in each buffer that compiled code has of them: twice, and in float32 where they are narrower."""
        return [self.bytes_each] * 2 + [4] * self.is_half

    @property
    def is_training(self) -> bool:
        return "training" in self.features

    @property
    def groups(self) -> int:
        return max(self.heads // self.kv_heads, 1)

    def conditions(self, causal: float, boolean: float, added: float, capped: float = 0.0, drawn: float = 0.0) -> float:
        """What is done to scores beside a softmax, each in softmaxes."""
        own = {"causal": causal, "bool_mask": boolean, "float_mask": added, "softcap": capped, "dropout": drawn}
        return sum(cost for name, cost in own.items() if name in self.features)

    @property
    def widened(self) -> float:
        """What widening takes of a softmax."""
        return _WIDENED if self.is_widened else 0.0

    def seen(self, block: float) -> float:
        """The share of scores that a kernel computes which leaves out blocks of so many keys."""
        return min(1.0, 0.5 + block / (2 * self.keys)) if "causal" in self.features else 1.0


def _written_out(x: _Shape) -> Work:
    """Two products, a softmax, and scores in memory: twice, or once more in float32 where they are narrower."""
    points = x.scores * (1.2 + x.conditions(_BAND, _BOOLEANS, 0.3, _TANH))
    if x.queries <= _FEW:
        # A product with one row is no call: it reads keys where they lie, again for each head that shares them.
        is_called = x.copies > 1 and x.queries * x.groups > x.copies
        reads: dict[Kind, float] = {"row": (1.3 if x.is_half else 1.0) * x.in_strips * x.held * x.copies**0.65}
        return _work(x, {**(x.copied if is_called else reads), "pointwise": points, "call": 2})
    if x.is_half and x.batch == 1:  # the heads of several sequences become one dimension by a copy
        points += _APART * x.held
    times = 3 if x.is_training else 1
    memory = fresh(*(x.scores * each for each in x.buffers * (2 if x.is_training else 1)))
    points = times * (points + x.widened * x.scores) + x.scores * x.conditions(0.0, 0.0, 0.0, drawn=_KEPT_MASK)
    return _work(x, {"product": times * x.flops, "pointwise": points, **memory, "call": 4 * times})


def _fused(x: _Shape) -> Work:
    """PyTorch's kernel for CPUs, which draws nothing. It adds masks: boolean ones are made numbers first."""
    if "dropout" in x.features:
        return _written_out(x)
    masks: dict[Kind, float] = {"pointwise": x.scores * x.conditions(0.0, 1.0, 0.3) * (2 if x.is_training else 1)}
    if x.queries <= _FEW:
        return _work(x, {"fused_row": _INTERLEAVED * x.looked_at, **masks, "call": _FUSED_CALLS})
    kind: Kind = "fused_training" if x.is_training else "fused"
    points = masks["pointwise"] + _ONE_BY_ONE * x.batch * x.heads * x.queries * (x.keys % x.lanes)
    return _work(x, {kind: x.flops * x.seen(_FUSED_BLOCK), "pointwise": points, "call": _FUSED_CALLS})


def _fused_with_rows(x: _Shape) -> Work:
    """The same, and two operators more, of which one looks at all that is added."""
    return _more(_fused(x), {"pointwise": 0.3 * x.scores, "call": _ROW_CALLS})


def _fused_by_inductor(x: _Shape) -> Work:
    """The same, of keys and values that are copied before for the heads that share them."""
    return _fused(x) if x.copies == 1 else _more(_fused(x), x.copied)


def _more(work: Work, amounts: Mapping[Kind, float]) -> Work:
    return Work(
        {**work.amounts, **{kind: work.amounts.get(kind, 0.0) + more for kind, more in amounts.items()}}, work.size
    )


def _tiled(x: _Shape) -> Work:
    """Operators over tiles of scores, one by one; the backward computes each tile again."""
    is_short = x.is_half and not x.is_widened
    seen, passes, causal = x.seen(BLOCK), 1.0 if is_short else 1.3, 1.4 if is_short else 0.3
    # Some of each tile; and what is prepared in Python before the first, which takes as long as 250
    calls = 250 + 6 * x.batch * x.kv_heads * max(x.queries / BLOCK, 1)
    points = x.scores * seen * (passes + x.conditions(causal, _NUMBERS, 1.0, _CAPPED_TILE, _DRAWN))
    if x.queries <= _FEW:
        return _work(x, {"row": (5.0 if x.is_half else 2.3) * x.held, "pointwise": points, "call": calls})
    times = 4.2 if x.is_training else 1.0
    amounts: dict[Kind, float] = {"own_product": times * x.flops * seen, "pointwise": times * points}
    return _work(x, {**amounts, "call": times * calls}, rows=BLOCK)


def _blocked(x: _Shape) -> Work:
    """Blocks of queries that Inductor compiles; conditions are looked at where a block meets the diagonal."""
    block = max(BLOCK, x.queries / MAX_KINDS) if "causal" in x.features else BLOCK
    seen, causal = x.seen(block), min(1.0, block / x.keys)
    band, boolean = (_BAND, _BOOLEANS) if x.scores < FEWEST else (_BAND_NUMBERS, _NUMBERS)
    points = x.scores * seen * (1.2 + x.conditions(band * causal, boolean, 0.3, _CAPPED, _MIXED))
    if x.queries <= _FEW:
        if x.groups == x.queries == 1:
            reads = (1.15 if x.is_half else 1.0) * x.in_strips * x.held
            return _work(x, {"row": reads, "pointwise": points, "call": 2})
        # Products of a few rows: those of one head, or those of the heads that share its keys, which want these in one piece.
        copies = 0.65 if not x.is_half else 1.0 if x.groups == 1 else 4.0
        calls = _HALF_CALLS if x.is_half and x.groups == 1 else 2
        return _work(x, {"group": copies * x.in_strips * x.held, "pointwise": points, "call": calls})
    points += x.widened * x.scores * seen
    times, blocks = 4 if x.is_training else 1, math.ceil(x.queries / block)
    # Blocks of one size share their memory; causal ones see more keys each, and differ.
    shares = [(i + 1) / blocks for i in range(blocks)] if causal < 1.0 and blocks <= MAX_KINDS else [1.0]
    buffers = x.buffers if x.is_training else [x.bytes_each] * 2
    memory = fresh(*(each * x.scores / blocks * share for share in shares for each in buffers), times=times)
    amounts: dict[Kind, float] = {"product": times * x.flops * seen, "pointwise": times * points}
    return _work(x, {**amounts, **memory, "call": 3 * times * blocks}, rows=BLOCK)


def _decoded(x: _Shape) -> Work:
    """C++ that reads each key once for all rows that see it; what is done for each further one was read off a Xeon."""
    rows = x.groups * x.queries
    is_cache = x.queries <= _FEW and x.keys > _TILE and bool(x.features & {"bool_mask", "float_mask"})
    shown = _SHOWN if is_cache else 1.0
    read = shown * x.held * (1 + 0.09 * (rows - 1))
    points = x.scores * (0.6 + x.conditions(0.1, 0.3, 0.3, _CAPPED_TILE)) + _ROW * x.batch * x.heads * x.queries
    return _work(x, {"row": read, "pointwise": points, "call": 16})


def _work(x: _Shape, amounts: Mapping[Kind, float], rows: int | None = None) -> Work:
    kinds: tuple[Kind, ...] = ("product", "own_product", "pointwise", "fused", "fused_training")
    size: dict[Kind, float] = dict.fromkeys(kinds, min(x.rows, rows or x.rows))
    return Work(
        {kind: amount for kind, amount in amounts.items() if amount},
        {**size, "row": x.read, "group": x.keys, "fused_row": x.keys if x.is_half else x.read},
    )


_KERNELS: Mapping[str, Callable[[_Shape], Work]] = {
    "inductor": _written_out,
    "inductor torch.sdpa": _fused_by_inductor,
    "torch.sdpa": _fused,
    "lz.fused_training": _fused_with_rows,
    "lz.tiled": _tiled,
    "lz.blocked": _blocked,
    "lz.flash_decoding": _decoded,
}


def work(
    kernel_id: str,
    dtype: torch.dtype,
    features: frozenset[str],
    sizes: Mapping[str, int],
    isa: frozenset[str] = USUAL,
) -> Work | None:
    """What a kernel does in one call on a CPU with these instruction sets; None where no formula says it.

    ``inductor`` with the name of a kernel is what Inductor makes of a source that it fuses into that one.
    """
    found = _KERNELS.get(kernel_id)
    if found is None or features & _UNKNOWN or not all(sizes.values()):
        return None
    shape = _Shape(
        batch=sizes["batch_size"],
        heads=sizes["num_heads"],
        kv_heads=sizes["num_kv_heads"],
        queries=sizes["seq_len_q"],
        keys=sizes["seq_len_k"],
        dims=sizes["head_dim"] + sizes["value_dim"],
        bytes_each=dtype.itemsize,
        features=features,
        copies=sizes.get("copies", 1),
        is_widened=is_looped(dtype, isa),
        lanes=16 if "avx512" in isa else 8,
    )
    return found(shape)
