"""An eager attention with all that the op knows: windows, softcap, sinks, biases; found again by its tensors' layouts.

``lz.attention`` is the quick way to what PyTorch's own function can do; this one is what integrations call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from lz_compile.api import eager
from lz_compile.api.arguments import PLAIN
from lz_compile.api.mask_reading import kept
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands

#: Elements of a mask from which on another kernel than PyTorch's may bring more than reading the mask costs.
_WORTHWHILE = 1 << 18


def attend(x: Operands, *, is_causal: bool = False, **attributes: Any) -> torch.Tensor:
    """The attention over canonical operands (see ``lowering/ops/attention.py``); rows that see no key give zero.

    A kernel gets what a mask says instead of the mask, where that is known exactly (:mod:`mask_reading`). In a function that
    is compiled these are PyTorch's operations, which our backend reads like any others.

    Args:
        x: the operands; a mask is all that drops scores, but for causality.
        is_causal: whether a query sees the keys up to its own position only, counted from the first ones.
        **attributes: others of :class:`AttentionAttrs` that no operand tells, by name.

    Shapes:
        the result is ``[B, Hq, Sq, E]``.
    """
    tensors = x.flat()
    is_traced = torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0
    if is_traced or any(each is not None and type(each) not in PLAIN for each in tensors):
        return _own(x, _problem(x, is_causal, attributes)[0])
    told = _without_mask(x, is_causal)
    plain, known, limits = (x, x, {"is_causal": is_causal}) if told is None else (x, *told)
    names = (
        *(tuple(sorted(each.items())) for each in (attributes, limits)),
        is_causal,
        torch.is_grad_enabled(),
        *map(eager.layout, (*known.flat(), x.mask)),
    )
    build = partial(_bind, plain, known, is_causal, limits, attributes)
    found: torch.Tensor = eager.bound("attention", names, build)(known, plain)
    return found


def _without_mask(x: Operands, is_causal: bool) -> tuple[Operands, dict[str, Any]] | None:
    """The same attention without its mask, and what is said instead; None where there is none, or it says more."""
    mask = x.mask
    if mask is None or is_causal or mask.dim() != 4 or mask.shape[1] != 1:
        return None
    is_whole = mask.shape[-2:] == (x.query.shape[2], x.key.shape[2])
    if not is_whole or mask.numel() < _WORTHWHILE or not eager.has_choice("attention", mask.device.type):
        return None
    found = kept(mask)
    if found is None:
        return None
    given = {name: each for name, each in x.given().items() if name != "mask"}
    return Operands(**given, **found.operands), found.attributes


def _bind(
    plain: Operands, known: Operands, is_causal: bool, limits: dict[str, Any], attributes: dict[str, Any]
) -> Callable[[Operands, Operands], torch.Tensor]:
    """The attention of tensors like these: by a kernel over what is ``known``, or PyTorch's over the ``plain`` operands."""
    own = partial(_plainly, _problem(plain, is_causal, attributes)[0])
    attrs, facts = _problem(known, **limits, attributes=attributes)
    if 0 in (facts.batch, facts.query_len, facts.key_len):
        return own
    kernel = eager.kernel_for("attention", attrs, facts, known.query.device, known.given())
    if kernel is None or kernel.call is None:
        return own
    return eager.guarded(kernel, partial(_through, kernel.call, attrs), own)


def _problem(
    x: Operands, is_causal: bool, attributes: dict[str, Any], band: Band | None = None
) -> tuple[AttentionAttrs, Any]:
    batch, heads, queries, width = x.query.shape
    sizes = {"B": batch, "Hq": heads, "Sq": queries, "D": width}
    sizes |= {"Hk": x.key.shape[1], "Sk": x.key.shape[2], "E": x.value.shape[3]}
    attrs, facts = op.from_operands(x, sizes, is_causal=is_causal, band=band, **attributes)
    masks_keys = x.mask is not None and x.mask.shape[1:3] == (1, 1)
    wide = torch.promote_types(x.query.dtype, torch.float32)
    return replace(attrs, masked_rows="zero", masks_keys=masks_keys, score_dtype=wide), facts


def _own(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """PyTorch's function; what it does not know is written out."""
    is_known = x.sinks is None and attrs.softcap is None
    return torch_sdpa.attention(x, attrs) if is_known else op.reference(x, attrs)


def _plainly(attrs: AttentionAttrs, _known: Operands, plain: Operands) -> torch.Tensor:
    return _own(plain, attrs)


def _through(
    call: Callable[..., torch.Tensor], attrs: AttentionAttrs, known: Operands, _plain: Operands
) -> torch.Tensor:
    return call(known, attrs)
