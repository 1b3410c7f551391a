"""Sampling in Triton: a program for each row; limits are found bit by bit of the smallest score that is kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, fake
from lz_compile.lowering.triton_launch import next_power_of_2, on

#: Tokens that are looked at at a time.
BLOCK = 4096


@triton.jit
def _mixed(x):
    """A permutation of 32-bit numbers, as in ``lowering/ops/sampling.py``."""
    x = x ^ (x >> 16)
    x = x * tl.full((1,), 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((1,), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _log_clock(token, seed):
    """``log(-log(1 - v))`` with ``v`` a hash of token and seed; of a small ``v`` by its series, for ``1 - v`` would round."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    first = _mixed(low ^ tl.full((1,), 0x9E3779B9, tl.uint32))
    second = _mixed(_mixed(high ^ tl.full((1,), 0x85EBCA6B, tl.uint32)) ^ first)
    bits = _mixed(_mixed(token.to(tl.uint32) + first) ^ second)
    v = ((bits >> 16).to(tl.float32) * 65536.0 + ((bits & 0xFFFF).to(tl.float32) + 0.5)) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * (0.25 + v * 0.2))))
    rest = tl.maximum(1.0 - v, 1.1754944e-38)
    return tl.log(tl.where(v < 0.03, series, -tl.log(rest)))


@triton.jit
def _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """``(logits + bias) / temperature`` of some tokens of a row, minus infinity where they are masked or there are none."""
    inside = token < vocab
    z = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        z = z + tl.load(bias + token, mask=inside, other=0.0).to(tl.float32)
    z = z * inverse
    if HAS_MASK:
        word = tl.load(mask + token // 32, mask=inside, other=0)
        inside = inside & (((word >> (token % 32)) & 1) != 0)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _ordered(z):
    """Integers whose order is that of floats."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _is_kept(z, token, least, low, high, HAS_TIES: tl.constexpr):
    """Whether a score is larger than that of key ``least``, or equal and its token is from ``low`` to ``high``."""
    key = _ordered(z)
    is_kept = key >= least
    if HAS_TIES:
        is_kept = (key > least) | ((key == least) & (token >= low) & (token <= high))
    return is_kept & (z > float("-inf"))


@triton.jit
def _weight(z, token, least, low, high, most, HAS_TIES: tl.constexpr, COUNTS: tl.constexpr):
    """What a score weighs: one, or its probability but for a factor; nothing if it is not kept."""
    is_kept = _is_kept(z, token, least, low, high, HAS_TIES)
    return tl.where(is_kept, 1.0, 0.0) if COUNTS else tl.where(is_kept, tl.exp(z - most), 0.0)


@triton.jit
def _reaching(
    logits, mask, bias, vocab, inverse, least, low, high, most, wanted,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TIES: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that what is at least as large weighs ``wanted``, of what is kept."""
    lane = tl.arange(0, BLOCK)
    found = tl.full((), -2147483648, tl.int32)
    for step in range(32):
        bit = 31 - step
        tried = tl.where(step == 0, 0, found + (tl.full((), 1, tl.int32) << tl.minimum(bit, 30)))
        total = tl.full((), 0.0, tl.float64)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
            weight = _weight(z, token, least, low, high, most, HAS_TIES, COUNTS)
            total += tl.sum(tl.where(_ordered(z) >= tried, weight, 0.0), 0).to(tl.float64)
        found = tl.where(total >= wanted, tried, found)
    return found


@triton.jit
def _tied(
    logits, mask, bias, vocab, inverse, least, low, high, most, wanted,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, COUNTS: tl.constexpr, IS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The range of tokens, of those from ``low`` to ``high`` that equal ``least``, with which scores weigh ``wanted``."""
    lane = tl.arange(0, BLOCK)
    above = tl.full((), 0.0, tl.float64)
    left = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
        weight = _weight(z, token, least, low, high, most, True, COUNTS)
        above += tl.sum(tl.where(_ordered(z) > least, weight, 0.0), 0).to(tl.float64)
        left += tl.sum(((_ordered(z) == least) & (weight > 0)).to(tl.int32), 0)
    first = tl.full((), 2147483647, tl.int32)
    last = tl.full((), -1, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
        weight = _weight(z, token, least, low, high, most, True, COUNTS)
        is_tie = (_ordered(z) == least) & (weight > 0)
        count = seen + tl.cumsum(is_tie.to(tl.int32), 0)
        before = left - count if IS_LAST else count - 1
        is_needed = is_tie & (above + before.to(tl.float64) * weight.to(tl.float64) < wanted)
        first = tl.minimum(first, tl.min(tl.where(is_needed, token, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(is_needed, token, -1), 0))
        seen += tl.sum(is_tie.to(tl.int32), 0)
    return first, last


@triton.jit
def _largest(logits, mask, bias, vocab, inverse, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest score of a row, and whether it is no distribution."""
    lane = tl.arange(0, BLOCK)
    most = tl.full((), float("-inf"), tl.float32)
    bad = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        z = _scores(logits, mask, bias, start + lane, vocab, inverse, HAS_MASK, HAS_BIAS)
        is_bad = (z != z) | (z == float("inf"))  # noqa: PLR0124 NaN
        bad = tl.maximum(bad, tl.max(is_bad.to(tl.int32), 0))
        most = tl.maximum(most, tl.max(tl.where(is_bad, float("-inf"), z), 0))
    return most, (bad != 0) | (most == float("-inf"))


@triton.jit
def _weigh(
    logits, mask, bias, vocab, inverse, least, low, high, most,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the probabilities, but for a factor, of what is kept."""
    lane = tl.arange(0, BLOCK)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
        total += tl.sum(_weight(z, token, least, low, high, most, HAS_TIES, False), 0).to(tl.float64)
    return total


@triton.jit
def _least_kept(
    logits, mask, bias, vocab, inverse, most, top_k, top_p, min_p,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr, HAS_K_TIES: tl.constexpr, HAS_P_TIES: tl.constexpr, IS_K_LAST: tl.constexpr,
    IS_P_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key that is kept, and from which to which token it is; the limits are this row's."""
    least = tl.full((), -2147483648, tl.int32)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 2147483647, tl.int32)
    if HAS_TOP_K:
        k = tl.load(top_k)
        if (k > 0) & (k < vocab):
            wanted = k.to(tl.float64)
            least = _reaching(
                logits, mask, bias, vocab, inverse, least, low, high, most, wanted, HAS_MASK, HAS_BIAS, False, True,
                BLOCK,
            )  # fmt: skip
            if HAS_K_TIES:
                low, high = _tied(
                    logits, mask, bias, vocab, inverse, least, low, high, most, wanted, HAS_MASK, HAS_BIAS, True,
                    IS_K_LAST, BLOCK,
                )  # fmt: skip
    if HAS_TOP_P:
        p = tl.load(top_p)
        if p < 1:
            total = _weigh(
                logits, mask, bias, vocab, inverse, least, low, high, most, HAS_MASK, HAS_BIAS, HAS_K_TIES, BLOCK
            )
            wanted = tl.maximum(p.to(tl.float64) * total, 1e-300)  # at least one token
            own = _reaching(
                logits, mask, bias, vocab, inverse, least, low, high, most, wanted, HAS_MASK, HAS_BIAS, HAS_K_TIES, False,
                BLOCK,
            )  # fmt: skip
            least, low, high = _raised(least, low, high, own)
            if HAS_P_TIES:
                low, high = _tied(
                    logits, mask, bias, vocab, inverse, least, low, high, most, wanted, HAS_MASK, HAS_BIAS, False,
                    IS_P_LAST, BLOCK,
                )  # fmt: skip
    if HAS_MIN_P:
        share = tl.load(min_p)
        if share > 0:
            least, low, high = _raised(least, low, high, _ordered(most + tl.log(share)))
    return least, low, high


@triton.jit
def _raised(least, low, high, key):
    """The larger of two smallest keys; of one that is larger than ``least`` all tokens are kept."""
    return tl.maximum(least, key), tl.where(key > least, 0, low), tl.where(key > least, 2147483647, high)


@triton.jit
def _is_cut(
    logits, mask, bias, vocab, inverse, least, low, high,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether a score is dropped that equals the smallest one that is kept."""
    lane = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
        is_dropped = (_ordered(z) == least) & ((token < low) | (token > high)) & (z > float("-inf"))
        found = tl.maximum(found, tl.max(is_dropped.to(tl.int32), 0))
    return found != 0


@triton.jit
def _drawn(
    logits, mask, bias, vocab, inverse, least, low, high, seed, is_greedy,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TIES: tl.constexpr, IS_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token whose score, less its clock, is largest; the first of several."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((), float("-inf"), tl.float32)
    place = tl.full((), -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
        y = tl.where(is_greedy, z, z - _log_clock(token, seed)) if IS_RANDOM else z
        y = tl.where(_is_kept(z, token, least, low, high, HAS_TIES), y, float("-inf"))
        value = tl.max(y, 0)
        first = tl.min(tl.where(y == value, token, 2147483647), 0)
        place = tl.where(value > best, first, place)
        best = tl.maximum(best, value)
    return place


@triton.jit
def _sample(
    logits, mask, bias, temperature, top_k, top_p, min_p, seeds, out,
    vocab, logit_stride, mask_stride, bias_stride, temperature_stride, k_stride, p_stride, min_stride, out_stride,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_K_TIES: tl.constexpr, HAS_P_TIES: tl.constexpr,
    IS_K_LAST: tl.constexpr, IS_P_LAST: tl.constexpr, IS_OPEN: tl.constexpr, IS_RANDOM: tl.constexpr, RESULT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    HAS_TIES: tl.constexpr = HAS_K_TIES or HAS_P_TIES
    row = tl.program_id(0).to(tl.int64)
    logits += row * logit_stride
    mask += row * mask_stride
    bias += row * bias_stride
    t = tl.load(temperature + row * temperature_stride) if HAS_TEMPERATURE else tl.full((), 1.0, tl.float32)
    is_greedy = t == 0
    inverse = 1.0 / tl.where(is_greedy, 1.0, t)
    most, is_bad = _largest(logits, mask, bias, vocab, inverse, HAS_MASK, HAS_BIAS, BLOCK)
    least, low, high = _least_kept(
        logits, mask, bias, vocab, inverse, most, top_k + row * k_stride, top_p + row * p_stride, min_p + row * min_stride,
        HAS_MASK, HAS_BIAS, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, HAS_K_TIES, HAS_P_TIES, IS_K_LAST, IS_P_LAST, BLOCK,
    )  # fmt: skip
    least = tl.where(is_greedy, _ordered(most), least)
    low = tl.where(is_greedy, 0, low)
    high = tl.where(is_greedy, 2147483647, high)
    is_open = is_bad & False
    if IS_OPEN:
        is_open = is_bad | _is_cut(logits, mask, bias, vocab, inverse, least, low, high, HAS_MASK, HAS_BIAS, BLOCK)
    if RESULT == "ids":
        seed = tl.load(seeds + row) if IS_RANDOM else 0
        place = _drawn(
            logits, mask, bias, vocab, inverse, least, low, high, seed, is_greedy, HAS_MASK, HAS_BIAS, HAS_TIES, IS_RANDOM,
            BLOCK,
        )  # fmt: skip
        tl.store(out + row, tl.where(is_bad | is_open, -1, place))
    else:
        total = tl.full((), 1.0, tl.float64)
        if RESULT == "probs":
            total = _weigh(
                logits, mask, bias, vocab, inverse, least, low, high, most, HAS_MASK, HAS_BIAS, HAS_TIES, BLOCK
            )
        lane = tl.arange(0, BLOCK)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            z = _scores(logits, mask, bias, token, vocab, inverse, HAS_MASK, HAS_BIAS)
            if RESULT == "probs":
                weight = _weight(z, token, least, low, high, most, HAS_TIES, False)
                y = weight / total.to(tl.float32)
                y = tl.where(is_bad, float("nan"), y)
            else:
                y = tl.where(is_bad | _is_kept(z, token, least, low, high, HAS_TIES), z, float("-inf"))
            y = tl.where(is_open, float("nan"), y)
            tl.store(out + row * out_stride + token, y.to(out.dtype.element_ty), mask=token < vocab)


def run(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """The op (see ``lowering/ops/sampling.py``)."""
    out = fake(x, attrs)
    if not out.numel():
        return out
    x = x.map(lambda each: each if each.dim() == 1 or each.stride(-1) == 1 else each.contiguous())
    rows, vocab = x.logits.shape
    given = [x.logits if each is None else each for each in x.flat()]  # of those that are not given nothing is read
    strides = [0 if each is None or each.shape[0] == 1 else each.stride(0) for each in x.flat()[:-1]]
    block = min(BLOCK, next_power_of_2(vocab))
    with on(x.logits.device):
        _sample[(rows,)](
            *given, out, vocab, *strides, out.stride(0),
            HAS_MASK=x.bitmask is not None, HAS_BIAS=x.bias is not None, HAS_TEMPERATURE=x.temperature is not None,
            HAS_TOP_K=x.top_k is not None, HAS_TOP_P=x.top_p is not None, HAS_MIN_P=x.min_p is not None,
            HAS_K_TIES=x.top_k is not None and attrs.top_k_ties != "all", IS_K_LAST=attrs.top_k_ties == "last",
            HAS_P_TIES=x.top_p is not None and attrs.top_p_ties != "all", IS_P_LAST=attrs.top_p_ties == "last",
            IS_OPEN=attrs.leaves_ties_open, IS_RANDOM=x.seeds is not None, RESULT=attrs.result, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
