"""Kernels for blends that PyTorch cannot look into: two operators each, on the signature of the op; gradients of the seed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.blend import BlendAttrs, Operands, Scalar, reference


class Weighed(NamedTuple):
    """A blend without its host; ``numbers`` are gain, offset, low and high, in the dtype that is computed in."""

    seed: torch.Tensor
    alpha: torch.Tensor
    logits: torch.Tensor | None
    numbers: torch.Tensor
    attrs: BlendAttrs


class BlendCode(Protocol):
    """What computes; results are contiguous."""

    def forward(self, host: torch.Tensor, given: Weighed) -> torch.Tensor:
        """The blend, ``[N, C, S]``."""

    def backward(self, gradient: torch.Tensor, given: Weighed) -> torch.Tensor:
        """The gradient of the seed, ``[N, C, S]``."""

    def margins(self, logits: torch.Tensor, attrs: BlendAttrs) -> torch.Tensor:
        """The largest logit of every row less the second largest, ``[N]``."""


def blender(
    name: str, kernel_id: str, source: str, *, is_cuda_graph_safe: bool = False
) -> Callable[[Operands, BlendAttrs], torch.Tensor]:
    """The kernel function of the op (see ``lowering/ops/blend.py``), without softmax and the host's own weight.

    Args:
        name: the operators are ``layerzero::<name>`` and ``layerzero::<name>_margin``.
        kernel_id: that of the descriptor.
        source: the module beside this one that computes (a :class:`BlendCode`), imported when it is called.
        is_cuda_graph_safe: whether CUDA graphs may capture it.
    """

    def load() -> BlendCode:
        return cast("BlendCode", importlib.import_module(f"{__package__}.{source}"))

    def run(
        seed: torch.Tensor,
        host: torch.Tensor,
        alpha: torch.Tensor,
        logits: torch.Tensor,
        numbers: torch.Tensor,
        attrs: str,
    ) -> torch.Tensor:
        given = _weighed(seed, alpha, logits, numbers, attrs)
        assert given.logits is None or logits.shape[0] == seed.shape[0], "every row has logits"
        return load().forward(host if host.shape == seed.shape else host.expand(seed.shape), given)

    def fake(seed: torch.Tensor, *others: Any) -> torch.Tensor:
        return seed.new_empty(seed.shape, dtype=decode(BlendAttrs, others[-1]).out_dtype)

    def fallback(seed: torch.Tensor, host: torch.Tensor, *others: Any) -> torch.Tensor:
        given = _weighed(seed, *others)
        x = Operands(host, seed, others[0], None, given.logits, *given.numbers.unbind())
        return reference(x, given.attrs).contiguous()

    def gradient(
        gradient: torch.Tensor,
        seed: torch.Tensor,
        host: torch.Tensor,
        alpha: torch.Tensor,
        logits: torch.Tensor,
        numbers: torch.Tensor,
        attrs: str,
    ) -> torch.Tensor:
        """Of the seed."""
        return load().backward(gradient, _weighed(seed, alpha, logits, numbers, attrs))

    def run_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
        return load().margins(logits, decode(BlendAttrs, attrs))

    def fake_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
        return logits.new_empty(logits.shape[:1], dtype=decode(BlendAttrs, attrs).out_dtype)

    def fallback_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
        return reference(Operands(logits=logits), decode(BlendAttrs, attrs)).contiguous()

    safe = is_cuda_graph_safe
    operator = opaque(
        name, run, fake, fallback=fallback, backward=gradient, kernel_id=kernel_id, is_cuda_graph_safe=safe
    )
    margin = opaque(
        f"{name}_margin",
        run_margin,
        fake_margin,
        fallback=fallback_margin,
        kernel_id=kernel_id,
        is_cuda_graph_safe=safe,
    )

    def blend(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
        assert x.host_weight is None, f"{kernel_id} is given a weight for the host"
        assert (attrs.normalised, attrs.is_distinct) == ("none", False), f"{kernel_id} is asked for a softmax"
        if attrs.mode == "margin":
            assert x.logits is not None, "a margin is that of logits"
            margins: torch.Tensor = margin(x.logits, encode(attrs))
            return margins
        host, seed = x.pair
        weight = seed.new_full((), x.alpha) if isinstance(x.alpha, (int, float)) else x.alpha
        wide = torch.promote_types(attrs.compute_dtype, torch.float32)
        bounds = (-math.inf if x.low is None else x.low, math.inf if x.high is None else x.high)
        numbers = torch.stack([_number(each, seed, wide) for each in (x.gain, x.offset, *bounds)])
        given = seed.new_empty(0, 0) if x.logits is None else x.logits.detach()
        result: torch.Tensor = operator(seed, host, weight.detach(), given, numbers, encode(attrs))
        return result

    return blend


def _weighed(
    seed: torch.Tensor, alpha: torch.Tensor, logits: torch.Tensor, numbers: torch.Tensor, attrs: str
) -> Weighed:
    """With logits where there is a gate, and a weight that is a condition as a number."""
    form = decode(BlendAttrs, attrs)
    weight = alpha if alpha.is_floating_point() else alpha.to(torch.float32)
    return Weighed(seed, weight, logits if form.has_gate else None, numbers, form)


def _number(value: Scalar, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return like.new_full((), value, dtype=dtype)
    return value.detach().to(dtype)
