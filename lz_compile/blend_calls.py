"""An eager blend as one call of a kernel, where another one than PyTorch's operations can run and is expected to be quicker.

Without a compiler a blend is several passes over memory. What is handed over is the sum of host and seed by a weight that is
there already, one number for all, for each row or for each channel, of tensors that lie in memory without gaps. Everything
else (a softmax after it, weights that want gradients, one for each element) stays with PyTorch.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.autograd import forward_ad

from lz_compile.lowering.ops.blend import BlendAttrs, BlendFacts
from lz_compile.runtime import eager, health, policy

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def one_call(host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor, *, is_residual: bool) -> torch.Tensor | None:
    """The blend by the kernel that is chosen for it; None where that is PyTorch's own.

    Shapes:
        host and seed alike; weight broadcasts to them; the result is like the seed.
    """
    if torch.compiler.is_dynamo_compiling() or not eager.has_choice("blend", seed.device.type):
        return None
    axis = _axis_of(weight, seed)
    if axis is None or not _is_plain(host, seed, weight):
        return None
    spread, along = axis
    before, after = math.prod(seed.shape[:along]), math.prod(seed.shape[along + spread :])
    is_by_row = spread == 1 and along == 0
    shape = (seed.shape[0], 1, after) if is_by_row else (before, math.prod(seed.shape[along : along + spread]), after)
    attrs = BlendAttrs(
        mode="residual" if is_residual else "channel" if spread and along else "convex",
        is_residual=is_residual,
        compute_dtype=torch.promote_types(seed.dtype, weight.dtype if spread else seed.dtype),
        out_dtype=seed.dtype,
    )
    needs_grad = torch.is_grad_enabled() and seed.requires_grad
    facts = BlendFacts(*shape, 1, seed.dtype, seed.device.type, needs_grad)
    kernel = eager.kernel_for("blend", attrs, facts, seed.device)
    if kernel is None or kernel.call is None:
        return None
    alpha = weight.reshape((-1, 1, 1) if is_by_row else (1, -1, 1))
    result: torch.Tensor = health.guarded(
        kernel.kernel_id,
        partial(kernel.call, attrs=attrs),
        partial(_own, is_residual=is_residual),
        host.reshape(shape),
        seed.reshape(shape),
        alpha,
        fallback_enabled=policy.current().settings.fallback_enabled,
    )
    return result.reshape(seed.shape)


def _own(host: torch.Tensor, seed: torch.Tensor, alpha: torch.Tensor, *, is_residual: bool) -> torch.Tensor:
    """What the call would be without us, of canonical operands; every decision in which the kernel took part is forgotten."""
    eager.forget()
    blended = host + alpha * seed if is_residual else alpha * seed + (1 - alpha) * host
    return blended.to(seed.dtype)


def _axis_of(weight: torch.Tensor, seed: torch.Tensor) -> tuple[int, int] | None:
    """Along how many dimensions of the seed a weight differs (none or one), and the first of them; None for others."""
    missing = seed.dim() - weight.dim()
    along = [missing + place for place, size in enumerate(weight.shape) if size != 1]
    if not along:
        return 0, 0
    return (1, along[0]) if len(along) == 1 else None


def _is_plain(host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the tensors are those that a kernel reads: dense, alike, and looked on by no transform."""
    given = (host, seed, weight)
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    is_alike = host.dtype == seed.dtype and host.is_contiguous() and seed.is_contiguous() and bool(seed.numel())
    on_device = all(each.device == seed.device for each in given)
    wants = torch.is_grad_enabled() and weight.requires_grad
    return not is_transformed and is_alike and on_device and not wants and all(type(each) in _PLAIN for each in given)
