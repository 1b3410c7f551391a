"""An eager blend as one call of a kernel, where another one than PyTorch's operations can run and is expected to be quicker.

Without a compiler a blend is several passes over memory. What is handed over is the sum of host and seed by a weight that is
there already, one number for all, for each row or for each channel, of tensors that lie in memory without gaps. Everything
else (a softmax after it, weights that want gradients, one for each element) stays with PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import is_plain
from lz_compile.lowering.ops.blend import BlendAttrs, Operands

#: What is handed over has no gate of its own.
_NEVER = frozenset({"gate", "sorted"})


def one_call(host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor, *, is_residual: bool) -> torch.Tensor | None:
    """The blend by the kernel that is chosen for it; None where that is PyTorch's own.

    Shapes:
        host and seed alike; weight broadcasts to them; the result is like the seed.
    """
    if torch.compiler.is_dynamo_compiling() or not eager.has_choice("blend", seed.device.type, _NEVER):
        return None
    if not is_plain(host, seed, weight):
        return None
    names = (is_residual, torch.is_grad_enabled(), *[eager.layout(each) for each in (host, seed, weight)])
    return eager.bound("blend", names, partial(_bind, host, seed, weight, is_residual))(host, seed, weight)


def _bind(
    host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor, is_residual: bool
) -> Callable[..., torch.Tensor | None]:
    """The blend of tensors like these, by the kernel that is chosen for them; what gives None where that is PyTorch's own."""
    axis = _axis_of(weight, seed)
    if axis is None or not _is_alike(host, seed, weight):
        return _left
    spread, along = axis
    before, after = math.prod(seed.shape[:along]), math.prod(seed.shape[along + spread :])
    is_by_row = spread == 1 and along == 0
    shape = (seed.shape[0], 1, after) if is_by_row else (before, math.prod(seed.shape[along : along + spread]), after)
    alpha_shape = (-1, 1, 1) if is_by_row else (1, -1, 1)
    x = Operands(host.reshape(shape), seed.reshape(shape), weight.reshape(alpha_shape))
    mode = "residual" if is_residual else "channel" if spread and along else "convex"
    wide = torch.promote_types(seed.dtype, weight.dtype if spread else seed.dtype)
    attrs, facts = eager.problem_of(x, mode=mode, is_residual=is_residual, compute_dtype=wide)
    operands = {"host": x.host, "seed": x.seed, "alpha": x.alpha}
    kernel = eager.kernel_for("blend", attrs, facts, seed.device, operands)
    if kernel is None or kernel.call is None:
        return _left
    own = partial(_own, is_residual=is_residual)
    run = eager.guarded(kernel.kernel_id, partial(_through, kernel.call, attrs), own)

    def call(host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(host.reshape(shape), seed.reshape(shape), weight.reshape(alpha_shape))
        return result.reshape(seed.shape)

    return call


def _through(kernel: Callable[..., Any], attrs: BlendAttrs, *tensors: torch.Tensor) -> Any:
    return kernel(Operands(*tensors), attrs)


def _left(*_tensors: torch.Tensor) -> None:
    """PyTorch's own is as good."""


def _own(host: torch.Tensor, seed: torch.Tensor, alpha: torch.Tensor, *, is_residual: bool) -> torch.Tensor:
    """What the call would be without us, of canonical operands."""
    blended = host + alpha * seed if is_residual else alpha * seed + (1 - alpha) * host
    return blended.to(seed.dtype)


def _axis_of(weight: torch.Tensor, seed: torch.Tensor) -> tuple[int, int] | None:
    """Along how many dimensions of the seed a weight differs (none or one), and the first of them; None for others."""
    missing = seed.dim() - weight.dim()
    along = [missing + place for place, size in enumerate(weight.shape) if size != 1]
    if not along:
        return 0, 0
    return (1, along[0]) if len(along) == 1 else None


def _is_alike(host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the tensors are those that a kernel reads: dense and alike, of which none but the seed wants a gradient."""
    is_alike = host.dtype == seed.dtype and host.is_contiguous() and seed.is_contiguous() and bool(seed.numel())
    on_device = all(each.device == seed.device for each in (host, seed, weight))
    return is_alike and on_device and not (torch.is_grad_enabled() and weight.requires_grad)
