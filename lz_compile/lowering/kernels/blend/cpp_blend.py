"""Gated blends on CPUs in C++ of our own (``cpp_source.py``): a row is blended while its logits are in the cache."""

from __future__ import annotations

import math
from typing import Any

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.kernels.blend import torch_blend
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.blend import BlendAttrs, Operands, Scalar, reference

_ID = "lz.cpp_blend"
_READ = (torch.float32, torch.bfloat16)


def blend(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
    """A blend in the op's canonical layout (see ``lowering/ops/blend.py``); PyTorch's for other dtypes."""
    tensors = [each for each in (x.seed, x.logits) if each is not None]
    is_wide = torch.float64 in (attrs.compute_dtype, attrs.out_dtype)
    if is_wide or any(each.dtype not in _READ for each in tensors):
        return torch_blend.blend(x, attrs)
    assert x.host_weight is None, f"{_ID} is given a weight for the host"
    assert (attrs.normalised, attrs.is_distinct) == ("none", False), f"{_ID} is asked for a softmax"
    assert x.logits is not None, f"{_ID} is given no logits"
    if attrs.mode == "margin":
        margins: torch.Tensor = _margin(x.logits, encode(attrs))
        return margins
    host, seed = x.pair
    weight = seed.new_full((), x.alpha) if isinstance(x.alpha, (int, float)) else x.alpha
    wide = torch.promote_types(attrs.compute_dtype, torch.float32)
    bounds = (-math.inf if x.low is None else x.low, math.inf if x.high is None else x.high)
    numbers = torch.stack([_number(each, seed, wide) for each in (x.gain, x.offset, *bounds)])
    result: torch.Tensor = _operator(seed, host, weight.detach(), x.logits.detach(), numbers, encode(attrs))
    return result


def _number(value: Scalar, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return like.new_full((), value, dtype=dtype)
    return value.detach().to(dtype)


# ---- the operators, of whose operands the seed alone has a gradient ---------------------------------------------------


def _run(
    seed: torch.Tensor, host: torch.Tensor, alpha: torch.Tensor, logits: torch.Tensor, numbers: torch.Tensor, attrs: str
) -> torch.Tensor:
    from lz_compile.lowering.kernels.blend import cpp_source

    assert logits.shape[0] == seed.shape[0], "every row has logits"
    whole = host if host.shape == seed.shape else host.expand(seed.shape)
    return cpp_source.forward(whole, seed, alpha, logits, numbers, decode(BlendAttrs, attrs))


def _fake(seed: torch.Tensor, *others: Any) -> torch.Tensor:
    return seed.new_empty(seed.shape, dtype=decode(BlendAttrs, others[-1]).out_dtype)


def _fallback(seed: torch.Tensor, host: torch.Tensor, *others: Any) -> torch.Tensor:
    alpha, logits, numbers, attrs = others
    x = Operands(host, seed, alpha, None, logits, *numbers.unbind())
    return reference(x, decode(BlendAttrs, attrs)).contiguous()


def _gradient(
    gradient: torch.Tensor,
    seed: torch.Tensor,
    host: torch.Tensor,
    alpha: torch.Tensor,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    from lz_compile.lowering.kernels.blend import cpp_source

    return cpp_source.backward(gradient.to(seed.dtype), alpha, logits, numbers)


def _run_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    from lz_compile.lowering.kernels.blend import cpp_source

    return cpp_source.margins(logits, decode(BlendAttrs, attrs))


def _fake_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    return logits.new_empty(logits.shape[:1], dtype=decode(BlendAttrs, attrs).out_dtype)


def _fallback_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    return reference(Operands(logits=logits), decode(BlendAttrs, attrs)).contiguous()


_operator = opaque("cpp_blend", _run, _fake, fallback=_fallback, backward=_gradient, kernel_id=_ID)
_margin = opaque("cpp_blend_margin", _run_margin, _fake_margin, fallback=_fallback_margin, kernel_id=_ID)
