"""An eager norm by the kernel that is chosen for it, found again by how its tensors lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lz_compile.api import eager
from lz_compile.api.arguments import is_plain
from lz_compile.lowering.ops.norm import NormAttrs, Operands


class Norm(NamedTuple):
    """What a norm is asked for: the ``shape`` of the last dimensions, which it is over, and how it is computed."""

    shape: tuple[int, ...]
    eps: float
    is_centred: bool


def norm(asked: Norm, input: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
    """The norm of an input, with its weight and bias; all of it is checked."""
    tensors = (input, *weights)
    given = [each for each in tensors if each is not None]
    is_bound = is_plain(*given) and 0 not in input.shape and eager.has_choice("norm", input.device.type)
    if not is_bound or not all(each.is_floating_point() for each in given):
        return _own(asked, input, *weights)
    names = (*asked, torch.is_grad_enabled(), *[eager.layout(each) for each in tensors])
    return eager.bound("norm", names, partial(_bind, asked, input, *weights))(*tensors)


def _bind(asked: Norm, input: torch.Tensor, *weights: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    own, hidden = partial(_own, asked), math.prod(asked.shape)
    x = _operands(hidden, input, *weights)
    attrs, facts = eager.problem_of(x, is_centred=asked.is_centred, eps=asked.eps)
    kernel = eager.kernel_for("norm", attrs, facts, input.device, x.given())
    if kernel is None or kernel.call is None:
        return own
    return eager.guarded(kernel.kernel_id, partial(_through, kernel.call, attrs, hidden), own)


def _own(asked: Norm, input: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
    """PyTorch's function; weights in another dtype are multiplied before the result is rounded."""
    wide = input.dtype
    for each in weights:
        wide = wide if each is None else torch.promote_types(wide, each.dtype)
    rows = input if input.dtype == wide else input.to(wide)
    factor, summand = (each if each is None or each.dtype == wide else each.to(wide) for each in weights)
    if asked.is_centred:
        return F.layer_norm(rows, asked.shape, factor, summand, asked.eps).to(input.dtype)
    return F.rms_norm(rows, asked.shape, factor, asked.eps).to(input.dtype)


def _operands(hidden: int, input: torch.Tensor, *weights: torch.Tensor | None) -> Operands:
    return Operands(input.reshape(-1, hidden), *(None if each is None else each.flatten() for each in weights))


def _through(
    call: Callable[..., torch.Tensor], attrs: NormAttrs, hidden: int, input: torch.Tensor, *weights: torch.Tensor | None
) -> torch.Tensor:
    return call(_operands(hidden, input, *weights), attrs).reshape(input.shape)
