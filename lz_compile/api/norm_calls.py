"""An eager norm by the kernel that is chosen for it, found again by how its tensors lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from lz_compile.api import eager
from lz_compile.api.arguments import is_plain
from lz_compile.lowering.ops.norm import NormAttrs, Operands, from_operands


def norm(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centred: bool,
) -> torch.Tensor:
    """The norm over the last dimensions, which have a ``shape``; arguments are those of ``layer_norm``, checked."""
    given = [each for each in (input, weight, bias) if each is not None]
    is_bound = is_plain(*given) and 0 not in input.shape and eager.has_choice("norm", input.device.type)
    if not is_bound or not all(each.is_floating_point() for each in given):
        return _own(input, weight, bias, shape=shape, eps=eps, is_centred=is_centred)
    names = (shape, eps, is_centred, torch.is_grad_enabled(), *[eager.layout(each) for each in (input, weight, bias)])
    build = partial(_bind, input, weight, bias, shape, eps, is_centred)
    found: torch.Tensor = eager.bound("norm", names, build)(input, weight, bias)
    return found


def _bind(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    is_centred: bool,
) -> Callable[..., torch.Tensor]:
    """The norm of tensors like these."""
    own = partial(_own, shape=shape, eps=eps, is_centred=is_centred)
    hidden = math.prod(shape)
    x = _operands(hidden, input, weight, bias)
    attrs, facts = from_operands(x, {"N": input.numel() // hidden, "D": hidden}, is_centred=is_centred, eps=eps)
    kernel = eager.kernel_for("norm", attrs, facts, input.device, x.given())
    if kernel is None or kernel.call is None:
        return own
    return eager.guarded(kernel, partial(_through, kernel.call, attrs, hidden), own)


def _own(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    shape: tuple[int, ...],
    eps: float,
    is_centred: bool,
) -> torch.Tensor:
    """PyTorch's function; weights in another dtype are multiplied before the result is rounded."""
    wide = input.dtype
    for each in (weight, bias):
        wide = wide if each is None else torch.promote_types(wide, each.dtype)
    given = (each if each is None or each.dtype == wide else each.to(wide) for each in (input, weight, bias))
    rows, factor, summand = given
    assert rows is not None, "the input is given"
    if is_centred:
        return F.layer_norm(rows, shape, factor, summand, eps).to(input.dtype)
    return F.rms_norm(rows, shape, factor, eps).to(input.dtype)


def _operands(hidden: int, input: torch.Tensor, *weights: torch.Tensor | None) -> Operands:
    """The op's canonical ones."""
    return Operands(input.reshape(-1, hidden), *(None if each is None else each.flatten() for each in weights))


def _through(
    call: Callable[..., torch.Tensor],
    attrs: NormAttrs,
    hidden: int,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A kernel over the op's canonical operands."""
    return call(_operands(hidden, input, weight, bias), attrs).reshape(input.shape)
