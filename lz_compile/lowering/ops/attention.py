"""Attention: ``softmax(scale * query @ key^T + bias, keys) @ value``, with masks, softcap, sinks and dropout.

Canonical layout, in which every kernel takes and returns it:

    query  [B, Hq, Sq, D]       key  [B, Hk, Sk, D]       value  [B, Hk, Sk, E]      result  [B, Hq, Sq, E]
    mask   bool, True keeps, broadcastable to [B, Hq, Sq, Sk]
    bias   float, added to the scaled (and capped) scores, broadcastable to [B, Hq, Sq, Sk]
    fill   float, the score of an element that the mask drops, where ``masked_rows == "fill"``; broadcastable likewise
    sinks  float, an extra score that takes part in the softmax and has no value, broadcastable to [B, Hq, Sq, 1]
    slopes float, times (key position - query position) it is added to the scores (ALiBi), broadcastable to [B, Hq, 1, 1]
    query_documents, key_documents  integers, a query sees the keys of its own document only, [B or 1, Sq] and [B or 1, Sk]

``Hq`` is a multiple of ``Hk``: query head ``h`` reads key head ``h // (Hq // Hk)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lz_compile.lowering import operands as base
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.bands import Band
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, sampler

LAYOUT = "BHSD"
LIBRARY_LAYOUTS = ("BSHD", "NHD")
EAGER_KERNEL = "torch.sdpa"
EXACT_DIMS = ("head_dim", "value_dim")
#: Features that say what a kernel must get right, and nothing of how long it takes.
TIMELESS_FEATURES = frozenset({"masked_nan", "masked_nan_keys", "nan_rows", "nan_in_few_keys", "masked_row_gradient"})
BUCKETED_DIMS = (("seq_len_q",), ("seq_len_k",), ("batch_size", "num_heads"))
#: Rounding of scores shows in the result as it is, and grows with this power of the size of query and key.
ROUNDING_POWER = 2

#: Without a mask, PyTorch's CPU kernel gives zero, not NaN, for a row of NaN in fewer keys than a vector register holds
#: (16 float32 with AVX-512).
FEW_KEYS = 16


Attributes = AttentionAttrs
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "slopes")


SHAPES: Mapping[str, str] = {
    "query": "B Hq Sq D",
    "key": "B Hk Sk D",
    "value": "B Hk Sk E",
    "bias": "B|1 Hq|1 Sq|1 Sk|1",
    "sinks": "B|1 Hq|1 Sq|1 1",
    "slopes": "B|1 Hq|1 1 1",
    "mask": "B|1 Hq|1 Sq|1 Sk|1",
    "fill": "B|1 Hq|1 Sq|1 Sk|1",
    "query_documents": "B|1 Sq",
    "key_documents": "B|1 Sk",
}
#: What the elements of operands are that are no floating-point numbers.
KINDS: Mapping[str, str] = {"mask": "boolean", "query_documents": "int64", "key_documents": "int64"}
LENGTHS = ("Sq", "Sk")
#: Layouts beside the canonical one in which callers may have query, key and value.
CALL_LAYOUTS = ("BSHD",)
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {"causal": {"is_causal": True}, "full": {"is_causal": False}}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {
    "batch_size": (1,),
    "seq_len_q": (128, 512, 2048),
    "num_heads": (8,),
    "head_dim": (64,),
}
SIZES_FOLLOW: Mapping[str, str] = {"seq_len_k": "seq_len_q", "num_kv_heads": "num_heads", "value_dim": "head_dim"}


@operands
class Operands(base.Operands):
    """What looks, what is looked at and what is read; what is added to scores, and what drops them.

    Shapes:
        as in the module's legend.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    fill: torch.Tensor | None = None
    query_documents: torch.Tensor | None = None
    key_documents: torch.Tensor | None = None

    @property
    def drops_scores(self) -> bool:
        """Whether a row may lose every score: to a mask or to documents; a band leaves one to each."""
        return self.mask is not None or self.query_documents is not None


def canonical(operands: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Operands as callers have them in the canonical layout: an additive ``mask`` is a bias, and may lack dimensions."""
    found = dict(operands)
    for name in ("query", "key", "value"):
        if layout == "BSHD" and isinstance(found.get(name), torch.Tensor) and found[name].dim() == 4:
            found[name] = found[name].transpose(1, 2)
    mask = found.get("mask")
    if isinstance(mask, torch.Tensor):
        mask = mask[(None,) * (4 - mask.dim())]
        is_added = mask.is_floating_point() and found.get("bias") is None
        found |= {"mask": None, "bias": mask} if is_added else {"mask": mask}
    return found


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[AttentionAttrs, AttentionFacts]:
    """The attributes, of which some are given, and the facts of an attention over tensors (real or fake).

    What rows give that hold NaN is not asked for.
    """
    heads, kv_heads = sizes["Hq"], sizes["Hk"]
    if kv_heads == 0 or heads % kv_heads:
        advice = "Check the layout: BHSD is [batch, heads, length, features]"
        raise MisfitError("attention", "query", f"heads in a multiple of the key heads, {kv_heads}", heads, advice)
    if (x.query_documents is None) != (x.key_documents is None):
        raise MisfitError("attention", "query_documents", "and key_documents together", "one of them")
    told: dict[str, Any] = {
        **x.has("mask", "bias", "sinks", "slopes"),
        "has_documents": x.query_documents is not None,
        "enable_gqa": True if heads != kv_heads else False,  # noqa: SIM210  # a branch, for Dynamo's bool() stays a symbol
    }
    told |= {} if x.fill is None else {"masked_rows": "fill"}
    attrs = AttentionAttrs(**{"nan_is_open": True, "score_dtype": x.query.dtype, **given, **told})
    batch, queries, keys, width, value_width = (sizes[each] for each in ("B", "Sq", "Sk", "D", "E"))
    lengths = (batch, heads, kv_heads, queries, keys, width, value_width)
    wants = x.wants_gradient(), x.wants_gradient("bias")
    copies = heads // kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) else 1
    return attrs, AttentionFacts(*lengths, x.query.dtype, x.query.device.type, *wants, copies=copies)


def fake(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """An empty result, contiguous."""
    return x.query.new_empty((*x.query.shape[:3], x.value.shape[-1]))


def reference(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """The definition of the op, in the dtype of its inputs (float64 is the ground truth of every test).

    Shapes:
        as in the module's legend; the result is ``[B, Hq, Sq, E]``.
    """
    groups = x.query.shape[1] // x.key.shape[1]
    key, value = x.key.repeat_interleave(groups, 1), x.value.repeat_interleave(groups, 1)
    scale = x.query.shape[-1] ** -0.5 if attrs.scale is None else attrs.scale
    scores = x.query @ key.transpose(-2, -1) * scale
    if attrs.softcap is not None:
        scores = torch.tanh(scores / attrs.softcap) * attrs.softcap
    if x.bias is not None:
        scores = scores + x.bias
    if x.slopes is not None:
        scores = scores + x.slopes * distances(x.query, key, scores.dtype)
    mask = merged_mask(x, attrs)
    if mask is not None:
        fill = x.fill
        if fill is None:
            lowest = torch.finfo(scores.dtype).min if attrs.masked_rows == "mean" else -math.inf
            fill = torch.full((), lowest, dtype=scores.dtype, device=scores.device)
        scores = torch.where(mask, scores, fill)
    if x.sinks is not None:
        column = x.sinks.expand(*scores.shape[:-1], 1)
        probabilities = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    if attrs.zeroes_nan:
        probabilities = torch.nan_to_num(probabilities)
    elif attrs.masked_rows == "zero":
        probabilities = probabilities.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    probabilities = torch.nn.functional.dropout(probabilities, attrs.dropout_p)
    return probabilities @ value


def reference_in_parts(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """The definition, one key head of one row of the batch at a time: the scores of all may not fit into memory."""
    batch, heads, kv_heads = *x.query.shape[:2], x.key.shape[1]
    group = heads // kv_heads
    found = [_of_head(x, row, head, group) for row, head in itertools.product(range(batch), range(kv_heads))]
    parts = [reference(each, attrs) for each in found]
    rows = [torch.cat(parts[start : start + kv_heads], 1) for start in range(0, len(parts), kv_heads)]
    return torch.cat(rows) if rows else reference(x, attrs)


def _of_head(x: Operands, row: int, head: int, group: int) -> Operands:
    """The operands of one key head, and of the query heads that share it, in one row of the batch."""
    shared = {"key": x.key[row : row + 1, head : head + 1], "value": x.value[row : row + 1, head : head + 1]}

    def part(each: torch.Tensor) -> torch.Tensor:
        if each.dim() == 2:  # documents
            return each.expand(x.query.shape[0], -1)[row : row + 1]
        whole = each.expand(*x.query.shape[:2], *each.shape[-2:])
        return whole[row : row + 1, head * group : (head + 1) * group]

    return Operands(**{name: shared[name] if name in shared else part(each) for name, each in x.given().items()})


def positive(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """A query and a scale above zero for a scale that is not: the query turned, or none.

    PyTorch's CPU kernel hides what causality excludes before it scales, and gives NaN below and at zero (2.13).
    """
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def distances(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Key position minus query position, ``[Sq, Sk]``."""
    rows = query.new_ones((query.shape[2], 1), dtype=dtype).cumsum(0)
    columns = key.new_ones((1, key.shape[2]), dtype=dtype).cumsum(1)
    return columns - rows


def merged_mask(x: Operands, attrs: AttentionAttrs) -> torch.Tensor | None:
    """Everything that drops scores (band, documents and the given mask) as one mask, True keeps; None without any."""
    keep = x.mask
    if x.query_documents is not None and x.key_documents is not None:
        same = x.query_documents[:, None, :, None] == x.key_documents[:, None, None, :]
        keep = same if keep is None else torch.logical_and(keep, same)
    band = attrs.limits
    if band is not None:
        queries, keys = x.query.shape[2], x.key.shape[2]
        inside = band.mask(x.query, queries, keys, band.offset(queries, keys))
        keep = inside if keep is None else torch.logical_and(keep, inside)
    return keep


def features(attrs: AttentionAttrs, facts: AttentionFacts) -> dict[str, str]:
    """What a kernel must support for this attention: feature name (``supports`` in descriptors) and what asks for it."""
    symbolic = [name for name in ("query_len", "key_len") if not isinstance(getattr(facts, name), int)]
    keeps_nan, keeps_masked = not attrs.nan_is_open, attrs.selects_masked and not attrs.nan_is_open
    has_band, band = attrs.limits is not None, attrs.limits or Band()
    is_window = has_band and (band.lower is not None or band.upper != 0)
    is_cut_short = has_band and not band.at_end and facts.query_len != facts.key_len
    lengths = f"{facts.query_len} queries and {facts.key_len} keys"
    masks = attrs.has_mask or attrs.has_bias or attrs.has_slopes or attrs.has_documents or attrs.band is not None
    empties = attrs.bias_can_mask or (attrs.masked_rows in ("mean", "zero") and (attrs.has_mask or attrs.has_documents))
    drops_keys = attrs.has_mask and attrs.masks_keys
    is_rough = keeps_nan and facts.device == "cpu" and not masks
    has_few_keys = is_rough and isinstance(facts.key_len, int) and facts.key_len < FEW_KEYS
    needed = {
        "causal": attrs.hides_future and "a causal mask",
        "gqa": attrs.enable_gqa and f"{facts.heads} query heads share {facts.kv_heads} key heads",
        "bool_mask": attrs.has_mask and "a boolean mask",
        "float_mask": attrs.has_bias and "an additive mask or bias",
        "alibi": attrs.has_slopes and "a bias that is linear in the distance (ALiBi)",
        "documents": attrs.has_documents and "documents that do not see each other",
        "sliding_window": is_window and f"a window from {band.lower} to {band.upper} around each query",
        "dropout": attrs.dropout_p > 0 and f"dropout of {attrs.dropout_p:g}",
        "eager_dropout": attrs.dropout_p > 0 and _draws_as_eager() and "uncompiled random numbers (fallback_random)",
        "softcap": attrs.softcap is not None and f"scores capped at {attrs.softcap}",
        "sinks": attrs.has_sinks and "an attention sink in the softmax",
        "masked_row_fill": attrs.masked_rows == "fill" and "fills of masked scores that differ within a row",
        "masked_nan": keeps_masked
        and attrs.has_mask
        and not drops_keys
        and "a mask that drops scores even where they are NaN",
        "masked_nan_keys": keeps_masked and drops_keys and "a mask that drops keys even where they are NaN",
        "nan_rows": keeps_nan and attrs.zeroes_nan and "zeros for rows of NaN",
        "nan_in_few_keys": has_few_keys and f"NaN in rows of {facts.key_len} keys",
        "training": facts.needs_grad and "gradients",
        "masked_row_gradient": facts.needs_grad and empties and "gradients of rows whose every key is masked",
        "bias_gradient": facts.bias_needs_grad and "a gradient of the bias",
        "wide_bias": facts.bias_is_wide and facts.device != "cpu" and "a bias that is wider than the operands",
        "value_dim": facts.value_dim != facts.head_dim and f"head dim {facts.head_dim}, value dim {facts.value_dim}",
        "causal_rectangular": is_cut_short and f"positions counted from the first of {lengths}",
        "causal_at_end": band.at_end and f"positions counted from the last of {lengths}",
        "dynamic_causal": has_band and symbolic and f"a causal mask with symbolic {' and '.join(symbolic)}",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


def _draws_as_eager() -> bool:
    from lz_compile.lowering import configured  # it loads Inductor's settings, and Triton with them

    return configured.draws_as_eager()


@dataclass(frozen=True)
class Sample:
    """A problem to measure: a function of ``inputs`` for a kernel, and the same as a model's source would spell it.

    Both take what projections give, ``[B, S, H * D]``, and give what the next one takes: the layout changes around an
    attention are part of what it costs.
    """

    inputs: tuple[torch.Tensor, ...]
    attrs: AttentionAttrs
    facts: AttentionFacts

    def with_kernel(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The problem with a kernel over the canonical operands."""

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
            masks = {"mask" if self.attrs.has_mask else "bias": each for each in mask}
            return self._merged(call(Operands(*self._heads(query, key, value), **masks), self.attrs))

        return run

    def as_written(self, softmax: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Callable[..., torch.Tensor]:
        """The problem as models spell it: two products, a softmax in float32, keys and values for each group.

        Inductor makes nothing fused of the softmax, unless another is given: what a fused one takes is that kernel's.
        """

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
            query, key, value = self._heads(query, key, value)
            groups = query.shape[1] // key.shape[1]
            if groups > 1:
                key, value = (each[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for each in (key, value))
            scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
            if mask and self.attrs.has_bias:
                scores = scores + mask[0]
            elif mask:
                scores = scores.masked_fill(torch.logical_not(mask[0]), -math.inf)
            if self.attrs.is_causal:
                keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
                scores = scores.masked_fill(torch.logical_not(keep), -math.inf)
            wide = scores.float()
            weights = (wide - wide.logsumexp(-1, keepdim=True)).exp() if softmax is None else softmax(scores)
            weights = torch.nn.functional.dropout(weights.to(query.dtype), self.attrs.dropout_p)
            return self._merged(weights @ value)

        return run

    def _heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        counts = (self.facts.heads, self.facts.kv_heads, self.facts.kv_heads)
        return [
            tensor.unflatten(-1, (count, -1)).transpose(1, 2) for tensor, count in zip(tensors, counts, strict=True)
        ]

    def _merged(self, output: torch.Tensor) -> torch.Tensor:
        return output.transpose(1, 2).flatten(2)


@sampler("full")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with random inputs."""
    dtype, mask = asked.dtype, asked.mask
    batch, heads, kv_heads = asked.of("batch_size", "num_heads", "num_kv_heads")
    queries, keys, head_dim, value_dim = asked.of("seq_len_q", "seq_len_k", "head_dim", "value_dim")
    widths = ((queries, heads * head_dim), (keys, kv_heads * head_dim), (keys, kv_heads * value_dim))
    inputs = [asked.random(batch, *each) for each in widths]
    if mask != "none":
        keep = torch.rand(batch, 1, queries, keys, device=asked.device) > 0.1
        keep[..., 0] = True
        lowest = torch.finfo(dtype).min
        inputs.append(keep if mask == "bool" else torch.zeros_like(keep, dtype=dtype).masked_fill(~keep, lowest))
    attrs = AttentionAttrs(
        is_causal=asked.variant == "causal",
        has_mask=mask == "bool",
        has_bias=mask == "float",
        bias_is_finite=mask == "float",
        bias_can_mask=mask == "float",
        masked_rows="mean" if mask == "float" else "nan",
        enable_gqa=heads != kv_heads,
        score_dtype=dtype,
    )
    sizes = (batch, heads, kv_heads, queries, keys, head_dim, value_dim)
    facts = AttentionFacts(*sizes, dtype, asked.device.type, asked.is_training, copies=heads // kv_heads)
    return Sample(tuple(inputs), attrs, facts)
