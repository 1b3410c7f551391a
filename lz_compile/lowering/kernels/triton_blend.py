"""Blends in Triton (see ``lowering/triton/blend.py``), which is imported when it is called."""

from __future__ import annotations

import math

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.blend import BlendAttrs, Scalar, reference


def blend(
    host: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    alpha: Scalar = 1.0,
    host_weight: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    gain: Scalar = 1.0,
    offset: Scalar = 0.0,
    low: Scalar | None = None,
    high: Scalar | None = None,
    *,
    attrs: BlendAttrs,
) -> torch.Tensor:
    """A blend in the op's canonical layout (see ``lowering/ops/blend.py``), without softmax and the host's own weight."""
    assert host_weight is None, "lz.triton_blend is given a weight for the host"
    assert (attrs.normalised, attrs.is_distinct) == ("none", False), "lz.triton_blend is asked for a softmax"
    if attrs.mode == "margin":
        assert logits is not None, "a margin is that of logits"
        margins: torch.Tensor = _margin(logits, encode(attrs))
        return margins
    assert host is not None, "a blend has a host"
    assert seed is not None, "a blend has a seed"
    weight = seed.new_full((), alpha) if isinstance(alpha, (int, float)) else alpha
    wide = torch.promote_types(attrs.compute_dtype, torch.float32)
    numbers = [
        _number(each, seed, wide)
        for each in (gain, offset, -math.inf if low is None else low, math.inf if high is None else high)
    ]
    given = seed.new_empty(0, 0) if logits is None else logits.detach()
    result: torch.Tensor = _blend(seed, host, weight.detach(), given, torch.stack(numbers), encode(attrs))
    return result


def _number(value: Scalar, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return like.new_full((), value, dtype=dtype)
    return value.detach().to(dtype)


def _run(
    seed: torch.Tensor,
    host: torch.Tensor,
    alpha: torch.Tensor,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    from lz_compile.lowering.triton.blend import Blend

    form = decode(BlendAttrs, attrs)
    return Blend(seed, alpha, logits if form.has_gate else None, numbers, form).forward(host)


def _fake(
    seed: torch.Tensor,
    host: torch.Tensor,
    alpha: torch.Tensor,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    return seed.new_empty(seed.shape, dtype=decode(BlendAttrs, attrs).out_dtype)


def _fallback(
    seed: torch.Tensor,
    host: torch.Tensor,
    alpha: torch.Tensor,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    form = decode(BlendAttrs, attrs)
    given = logits if form.has_gate else None
    return reference(host, seed, alpha, None, given, *numbers.unbind(), attrs=form).contiguous()


def _gradient(
    gradient: torch.Tensor,
    seed: torch.Tensor,
    host: torch.Tensor,
    alpha: torch.Tensor,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    """Of the seed."""
    from lz_compile.lowering.triton.blend import Blend

    form = decode(BlendAttrs, attrs)
    return Blend(seed, alpha, logits if form.has_gate else None, numbers, form).backward(gradient)


def _run_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    from lz_compile.lowering.triton.blend import margins

    return margins(logits, decode(BlendAttrs, attrs))


def _fake_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    return logits.new_empty(logits.shape[:1], dtype=decode(BlendAttrs, attrs).out_dtype)


def _fallback_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    return reference(logits=logits, attrs=decode(BlendAttrs, attrs)).contiguous()


_KERNEL = "lz.triton_blend"
_blend = opaque(
    "triton_blend",
    _run,
    _fake,
    fallback=_fallback,
    backward=_gradient,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
_margin = opaque(
    "triton_margin", _run_margin, _fake_margin, fallback=_fallback_margin, kernel_id=_KERNEL, is_cuda_graph_safe=True
)
