"""PyTorch's fused attention for CPUs, with gradients that are right in rows whose every key is masked.

Of a row the kernel keeps one number, the logarithm of its sum of exponentials. Where all that is added to a row's scores is
as low as a mask's fill, float32 has no digits left for that sum, and PyTorch's backward takes each weight for one. Whether
there is such a row only the data says: the backward looks, and computes these rows as ``lz.tiled`` does.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

from lz_compile.ground.sizes import is_one
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention import tiled, token_major, torch_sdpa
from lz_compile.lowering.operands import operands
from lz_compile.lowering.ops import attention as op

Attributes = AttentionAttrs
DIFFERENTIABLE = ("query", "key", "value")
fake, reference = token_major.fake, token_major.reference
#: How far from zero the most that is added in a row may be: weights of the backward are off by 6e-8 of that.
FURTHEST = 128.0


@operands
class Operands(token_major.Operands):
    """The op's with tokens before heads, and what the forward kernel gave.

    Shapes:
        out: as the result; row_sums: ``[B, Hq, Sq]``, their logarithms; added: ``[B or 1, Hq or 1, Sq or 1, Sk]``.
    """

    out: torch.Tensor | None = None
    row_sums: torch.Tensor | None = None
    added: torch.Tensor | None = None


def attention(x: op.Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), as ``torch.sdpa`` but for dropout."""
    assert attrs.dropout_p == 0, "lz.fused_training is asked for dropout"
    width = x.value.shape[-1]
    x, attrs = torch_sdpa.with_positive_scale(*_alike(x, attrs))
    kept: dict[str, torch.Tensor] = {}

    def fused(y: op.Operands, said: AttentionAttrs, is_causal: bool) -> torch.Tensor:
        added = y.bias
        if y.mask is not None:
            added = torch.zeros_like(y.mask, dtype=y.query.dtype).masked_fill(torch.logical_not(y.mask), -math.inf)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_in_rows, (y.query, y.key, y.value)), 0.0, is_causal, attn_mask=added, scale=said.scale
        )
        kept.update({"row_sums": found[1]} if added is None else {"row_sums": found[1], "added": added})
        return found[0]  # type: ignore[no-any-return]

    out = torch_sdpa.through(fused, op.Operands(**{name: each.detach() for name, each in x.given().items()}), attrs)
    trained: torch.Tensor = _operator(x, attrs, out=out.transpose(1, 2), **kept)
    return trained[..., :width]


def _alike(x: op.Operands, attrs: AttentionAttrs) -> tuple[op.Operands, AttentionAttrs]:
    """The same of as many key heads as there are heads, and of rows that are as wide: PyTorch's kernel takes no others."""
    given = {name: getattr(x, name) for name in DIFFERENTIABLE}
    if attrs.enable_gqa:
        groups = x.query.shape[1] // x.key.shape[1]
        given |= {name: given[name].repeat_interleave(groups, 1) for name in ("key", "value")}
    width, value_width = x.query.shape[-1], x.value.shape[-1]
    if width != value_width:
        narrow = ("query", "key") if width < value_width else ("value",)
        given |= {name: F.pad(given[name], (0, abs(width - value_width))) for name in narrow}
    scale = width**-0.5 if attrs.scale is None else attrs.scale
    return op.Operands(**{**x.given(), **given}), replace(attrs, enable_gqa=False, scale=scale)


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the elements of a row next to each other, without which PyTorch's kernel reads others."""
    return tensor if is_one(tensor.stride()[-1]) else tensor.contiguous()


def _given(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    assert x.out is not None, "lz.fused_training is given no result"
    return x.out.clone(memory_format=torch.contiguous_format)


def _gradients(gradient: torch.Tensor, x: Operands, attrs: AttentionAttrs) -> dict[str, torch.Tensor | None]:
    """Of query, key and value."""
    assert x.out is not None, "lz.fused_training is given no result"
    assert x.row_sums is not None, "lz.fused_training is given no sums of rows"
    with torch.no_grad():
        row_sums, known = x.row_sums, token_major.turned(x, op.Operands)
        lost = _lost(x.added, known.query.shape[2])
        apart = None if lost is None else lost.nonzero()[:, 0]
        exact = None if apart is None else _of_rows(apart, gradient, x, attrs)
        if lost is not None:  # its weights become zero
            row_sums = row_sums.masked_fill(lost, math.inf)
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_in_rows, (gradient.transpose(1, 2), known.query, torch_sdpa.shown_keys(known, attrs), known.value)),
            x.out.transpose(1, 2),
            row_sums,
            0.0,
            attrs.is_causal and x.added is None,
            attn_mask=x.added,
            scale=attrs.scale,
        )
        found = dict(zip(DIFFERENTIABLE, (each.transpose(1, 2) for each in (of_query, of_key, of_value)), strict=True))
        if exact is not None:
            found["query"].index_copy_(1, apart, exact["query"])
            for name in ("key", "value"):
                found[name] += exact[name]
    return {name: each.contiguous() for name, each in found.items()}


def _lost(added: torch.Tensor | None, queries: int) -> torch.Tensor | None:
    """Of which queries the backward cannot be PyTorch's in some sequence or head, ``[Sq]``; None where there is none."""
    if added is None:
        return None
    is_near = (added.amax(-1).abs() <= FURTHEST).reshape(-1, added.shape[-2]).all(0)
    return None if bool(is_near.all()) else torch.logical_not(is_near).expand(queries)


def _of_rows(
    apart: torch.Tensor, gradient: torch.Tensor, x: Operands, attrs: AttentionAttrs
) -> dict[str, torch.Tensor | None]:
    """The gradients that come from some queries, by tiles of scores."""
    known = token_major.turned(x, op.Operands)
    mask, bias = op.merged_mask(known, attrs), torch_sdpa.whole_bias(known)
    mask = mask if mask is None else mask[(None,) * (4 - mask.dim())]  # a band alone has no batch and no heads
    mask, bias = (
        each if each is None or is_one(each.shape[-2]) else each.index_select(-2, apart) for each in (mask, bias)
    )
    rows = token_major.Operands(x.query.index_select(1, apart), x.key, x.value, mask=mask, bias=bias)
    said = replace(attrs, is_causal=False, band=None, reach=None, has_slopes=False, has_documents=False)
    said = replace(said, has_mask=mask is not None, has_bias=bias is not None)
    return tiled.gradients(gradient.index_select(1, apart), rows, said)


# Nothing completes a call: its backward reads what the forward kernel gave.
_operator = token_major.through(
    kernel_operator("fused_training", sys.modules[__name__], _given, backward=_gradients, has_fallback=False), Operands
)
