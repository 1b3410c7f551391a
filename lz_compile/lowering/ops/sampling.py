"""Sampling of the next token: mask, additive scores, temperature, top-k, top-p, min-p and a draw, as one operation.

Canonical layout:

    logits       [N, V]
    bitmask      [N or 1, W] int32, W = ceil(V / 32); bit ``t % 32`` of word ``t // 32`` allows token ``t``
    bias         [N or 1, V], added to the logits
    temperature  [N or 1] float32; 0 takes the largest
    top_k        [N or 1] int32; 0 keeps all
    top_p        [N or 1] float32; 1 keeps all, and 0 or less the likeliest
    min_p        [N or 1] float32, from 0 to 1
    seeds        [N] int64; without them the largest is taken
    result       ids [N] int32, or scores or probabilities [N, V]

Scores are ``z = (logits + bias) / temperature``, and minus infinity where the mask forbids. Kept are the ``top_k``
largest of a row; of those the fewest, the largest first, whose probabilities sum up to ``top_p``; of those the ones at
least ``min_p`` times as probable as the likeliest. This is the order of ``transformers``. A score of minus infinity is
never kept, and never counted. Of tokens that are as likely as the last that ``top_k`` or ``top_p`` keeps, ``Ties`` says
which are kept; at temperature 0 all that are the largest are, whatever the limits. Where that is open, for the source leaves
it to a sort, a row of which a token is dropped that is as likely as the last that is kept is NaN, and its token -1: whoever
asked computes it by other means (``lowering/kernels/sampling/open_ties.py``).

A draw is a race of exponential clocks (Gumbel-max): the token is that for which ``z - log(clock(seed, token))`` is
largest. A clock is a function of the seed and the token alone: equal in every kernel, on every device, wherever in a
batch the row is. A row is no distribution if it holds NaN or plus infinity where it is not masked, or nothing: its
token is -1, its probabilities are NaN, and of its scores all are kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.arange import arange
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler
from lz_compile.lowering.token_bits import unpack, word_count

#: What is given back: a token for each row, the scores with minus infinity for what is not kept, or their softmax.
Result: TypeAlias = Literal["ids", "scores", "probs"]
#: Of equal scores, the last of which a limit keeps: all are kept, or as many as it needs, those with the lowest ids ("first",
#: which a stable descending sort keeps) or with the highest ("last", which a stable ascending one keeps). "open": it is not
#: said, and rows of which it matters are NaN.
Ties: TypeAlias = Literal["all", "first", "last", "open"]
TIES: tuple[Ties, ...] = ("all", "first", "last", "open")

LAYOUT = "NV"
EAGER_KERNEL = "torch.sampling"
#: About what that takes where nothing fuses it, over Inductor's code for the same: priors are over the latter.
UNFUSED = {"cpu": 2.0}
EXACT_DIMS: tuple[str, ...] = ()
BUCKETED_DIMS = (("num_rows",), ("vocab_size",))
TIMELESS_FEATURES: frozenset[str] = frozenset({"bias", "temperature"})


@dataclass(frozen=True)
class SamplingAttrs(OpAttributes):
    """The attributes of one sampling: what it gives, which limits it is given, and the dtype of scores and probabilities."""

    result: Result = "ids"
    has_bitmask: bool = False
    has_bias: bool = False
    has_temperature: bool = False
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False
    is_random: bool = False
    top_k_ties: Ties = "all"
    top_p_ties: Ties = "all"
    out_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, given: Collection[str], result: Result, out_dtype: torch.dtype) -> SamplingAttrs:
        """Of a sampling with the operands of these names."""
        limits: dict[str, Any] = {f"has_{name}": name in given for name in _LIMITS}
        return cls(result=result, is_random="seeds" in given, out_dtype=out_dtype, **limits)

    @property
    def breaks_ties(self) -> bool:
        """Whether some tokens may be left out that are as likely as one that is kept."""
        return (self.has_top_k and self.top_k_ties != "all") or (self.has_top_p and self.top_p_ties != "all")

    @property
    def leaves_ties_open(self) -> bool:
        """Whether rows are NaN of which it matters which of equally likely tokens are kept."""
        return self.opens_top_k or self.opens_top_p

    @property
    def opens_top_k(self) -> bool:
        """Whether it is top-k that does."""
        return self.has_top_k and self.top_k_ties == "open"

    @property
    def opens_top_p(self) -> bool:
        """Whether it is top-p that does."""
        return self.has_top_p and self.top_p_ties == "open"


Attributes = SamplingAttrs
#: The operands that kernels give gradients of: none; PyTorch's own operations have theirs.
DIFFERENTIABLE: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingFacts:
    """Sizes, dtype (of the logits) and device of one sampling, for kernel selection."""

    num_rows: Size
    vocab_size: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False


SHAPES: Mapping[str, str] = {
    "logits": "N V",
    "bitmask": "N|1 W",
    "bias": "N|1 V",
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), "N|1"),
    "seeds": "N",
}
#: What the elements of operands are that are no floating-point numbers.
KINDS: Mapping[str, str] = {"bitmask": "int32", "top_k": "int32", "seeds": "int64"}
LENGTHS = ("N",)
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {each: {"result": each} for each in get_args(Result)}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {"num_rows": (1, 16), "vocab_size": (32000, 128000)}


@operands
class Operands(base.Operands):
    """Rows of logits, and what tokens are drawn by; shapes as in the module's legend."""

    logits: torch.Tensor
    bitmask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    seeds: torch.Tensor | None = None


#: The operands that attributes say of whether they are given; seeds are called random there.
_LIMITS = Operands.names[1:-1]


# ---- definition ------------------------------------------------------------------------------------------------------


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[SamplingAttrs, SamplingFacts]:
    """The attributes, of which some are given, and the facts of a sampling over tensors (real or fake)."""
    words = word_count(sizes["V"])
    if x.bitmask is not None and sizes["W"] != words:
        raise MisfitError("sampling", "bitmask", f"of {words} words, one for 32 tokens", sizes["W"])
    told = SamplingAttrs.of(x.given(), given.get("result", "ids"), x.logits.dtype)
    named = {f"has_{name}" for name in _LIMITS} | {"is_random"}
    attrs = replace(told, **{name: value for name, value in given.items() if name not in named})
    dtype, device = x.logits.dtype, x.logits.device.type
    return attrs, SamplingFacts(sizes["N"], sizes["V"], dtype, device, x.wants_gradient())


def fake(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """An empty result, contiguous as kernels give it."""
    if attrs.result == "ids":
        return x.logits.new_empty(x.logits.shape[:1], dtype=torch.int32)
    return x.logits.new_empty(x.logits.shape, dtype=attrs.out_dtype)


def reference(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """The definition of the op, by sorting, in float32 or the wider dtype of its logits."""
    z = scores(x, torch.promote_types(x.logits.dtype, torch.float32))
    kept = z > -math.inf
    if x.top_k is not None:
        wanted = torch.where(x.top_k > 0, x.top_k, z.shape[-1])[:, None]
        kept = kept & _reaching(z, kept.long(), wanted, attrs.top_k_ties)
    if x.top_p is not None:
        left = torch.where(kept, z, -math.inf)
        reaching = _reaching(left, torch.softmax(left, -1), x.top_p.to(z.dtype)[:, None], attrs.top_p_ties)
        kept = kept & ((x.top_p >= 1)[:, None] | reaching)
    if x.min_p is not None:
        kept = kept & (z >= z.amax(-1, keepdim=True) + x.min_p.to(z.dtype).log()[:, None])
    if x.temperature is not None:
        is_likeliest = (z > -math.inf) & (z == z.amax(-1, keepdim=True))
        kept = torch.where((x.temperature == 0)[:, None], is_likeliest, kept)
    return finished(z, kept, x, attrs)


def _reaching(z: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, ties: Ties) -> torch.Tensor:
    """The fewest tokens, the largest scores first, that weigh ``wanted`` or more, at least one; of equals what ``ties`` says.

    Shapes:
        z, weights ``[N, V]``; wanted ``[N or 1, 1]``; result booleans ``[N, V]``.
    """
    if ties == "last":
        return _reaching(z.flip(-1), weights.flip(-1), wanted, "first").flip(-1)
    ordered, tokens = z.sort(dim=-1, descending=True, stable=True)
    own = weights.gather(-1, tokens)
    count = (own.cumsum(-1) - own < wanted).sum(-1, keepdim=True).clamp(min=1)
    if ties == "all":
        return z >= ordered.gather(-1, count - 1)
    is_reaching = torch.arange(z.shape[-1], device=z.device) < count
    return torch.zeros_like(is_reaching).scatter(-1, tokens, is_reaching)


def scores(x: Operands, dtype: torch.dtype) -> torch.Tensor:
    """``(logits + bias) / temperature`` in ``dtype``, and minus infinity where the mask forbids; ``[N, V]``."""
    z = x.logits.to(dtype)
    if x.bias is not None:
        z = z + x.bias.to(dtype)
    if x.temperature is not None:
        z = z / torch.where(x.temperature == 0, 1.0, x.temperature).to(dtype)[:, None]
    return z if x.bitmask is None else torch.where(unpack(x.bitmask, z.shape[-1]), z, -math.inf)


def finished(z: torch.Tensor, kept: torch.Tensor, x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """The result, from scores and the tokens that are kept, both ``[N, V]``."""
    is_finite = (z < math.inf).all(-1) & (z > -math.inf).any(-1)
    if attrs.leaves_ties_open:
        least = torch.where(kept, z, math.inf).amin(-1, keepdim=True)
        is_open = ~is_finite | (~kept & (z == least)).any(-1)  # of what is no distribution nobody knows what is kept
        z = torch.where(is_open[:, None], math.nan, z)
        is_finite = is_finite & ~is_open
    if attrs.result == "ids":
        y = z if x.seeds is None else z - noise(x.seeds, x.temperature, z)
        token = torch.where(kept, y, -math.inf).argmax(-1)
        return torch.where(is_finite, token, -1).to(torch.int32)
    left = torch.where(kept | ~is_finite[:, None], z, -math.inf)
    return (left if attrs.result == "scores" else torch.softmax(left, -1)).to(attrs.out_dtype)


# ---- noise -----------------------------------------------------------------------------------------------------------


def noise(seeds: torch.Tensor, temperature: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """What every token's clock shows, as its logarithm ``[N, V]``; nothing in rows of temperature zero."""
    found = log_clocks(seeds, like.shape[-1], like.dtype)
    return found if temperature is None else torch.where((temperature == 0)[:, None], 0.0, found)


def log_clocks(seeds: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``log(-log(1 - v))`` ``[N, count]``, where ``v``, uniform in (0, 1), is a hash of the seed ``[N]`` and of a number."""
    uniform = (bits(seeds, count).to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log1p(-uniform)).log().to(dtype)


def bits(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """32 random bits for each of ``count`` numbers under each seed ``[N]``, as int64 ``[N, count]``."""
    first = _mixed((seeds & _LOW) ^ 0x9E3779B9)
    second = _mixed(_mixed(((seeds >> 32) & _LOW) ^ 0x85EBCA6B) ^ first)
    tokens = arange(seeds, count)
    found: torch.Tensor = _mixed(_mixed((tokens + first[:, None]) & _LOW) ^ second[:, None])
    return found


def mixed_seed(number: Any) -> Any:
    """62 bits, each of which depends on all 64 of ``number``, an integer or a tensor of them."""
    first = _mixed((number & _LOW) ^ 0xA511E9B3)
    second = _mixed(_mixed(((number >> 32) & _LOW) ^ 0x63D83595) ^ first)
    return ((second & 0x3FFFFFFF) << 32) | _mixed((first + second) & _LOW)


_LOW = 0xFFFFFFFF


def _mixed(x: Any) -> Any:
    """A permutation of 32-bit numbers in which every bit of the result depends on all of ``x``.

    **Source** C. Wellons, *Prospecting for hash functions* (2018): ``lowbias32``.
    """
    x = x ^ (x >> 16)
    x = _times(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Any, factor: int) -> Any:
    """The lower 32 bits of a product, of which no part exceeds 63 bits."""
    high = ((x >> 16) * factor) & 0xFFFF
    return ((high << 16) + (x & 0xFFFF) * factor) & _LOW


# ---- for selection ---------------------------------------------------------------------------------------------------


def features(attrs: SamplingAttrs, facts: SamplingFacts) -> dict[str, str]:
    """What a kernel must support for this sampling: feature name (``supports`` in descriptors) and what asks for it."""
    needed = {
        "bitmask": attrs.has_bitmask and "a mask of bits",
        "bias": attrs.has_bias and "scores to add",
        "temperature": attrs.has_temperature and "a temperature",
        "top_k": attrs.has_top_k and "top-k",
        "top_p": attrs.has_top_p and "top-p",
        "min_p": attrs.has_min_p and "min-p",
        "ties": attrs.breaks_ties and "some of equal scores",
        "open_top_k": attrs.opens_top_k and "rows told that top-k cuts between equal scores",
        "open_top_p": attrs.opens_top_p and "rows told that top-p cuts between equal scores",
        "random": attrs.is_random and "a draw",
        "training": facts.needs_grad and "gradients",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


@sampler("ids")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with a mask of half of all tokens, temperature and a draw.

    Decoding loops spell it as the definition does, with the same draw.
    """
    (rows, vocab), variant, device = asked.of("num_rows", "vocab_size"), asked.variant, asked.device
    given: dict[str, torch.Tensor] = {
        "logits": asked.random(rows, vocab, scale=3.0),
        "bitmask": torch.randint(-(2**31), 2**31, (rows, word_count(vocab)), device=device, dtype=torch.int32),
        "temperature": torch.full((rows,), 0.8, device=device),
    }
    if variant == "ids":
        given["seeds"] = torch.arange(rows, device=device)

    def canonical(*tensors: torch.Tensor) -> Operands:
        return Operands(**dict(zip(given, tensors, strict=True)))

    def written(attrs: SamplingAttrs, *tensors: torch.Tensor) -> torch.Tensor:
        return reference(canonical(*tensors), attrs)

    return Sample.of(tuple(given.values()), canonical, written, result=variant)
