"""A kernel that chooses at each call: for sizes that a compiled graph cannot be specialised for.

The graph holds one opaque operator. When it runs, the tensors have sizes, and the kernel is chosen for them as for an eager
call (``api/eager.py``), with its cache, policy and fallback. That rests on measurements of static sizes.
"""

from __future__ import annotations

import torch

from lz_compile.ground import hooks
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.attention import token_major, torch_sdpa
from lz_compile.lowering.ops.attention import Operands


def _dispatch(x: token_major.Operands, attrs: AttentionAttrs) -> torch.Tensor:
    found: torch.Tensor = hooks.attend(x, attrs.is_causal, attrs.scale).contiguous()
    return found


# Every call falls back by itself, as it was chosen.
_operator = token_major.through(kernel_operator("dispatch", token_major, _dispatch, has_fallback=False))


def attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without softcap, sinks and dropout."""
    assert attrs.dropout_p == 0, "lz.dispatch is asked for dropout"
    return torch_sdpa.through(_chosen, x, attrs)


def _chosen(x: Operands, attrs: AttentionAttrs, is_causal: bool) -> torch.Tensor:
    """The operator, which sees for itself where heads differ and masks are given."""
    found: torch.Tensor = _operator(x, AttentionAttrs(scale=attrs.scale, is_causal=is_causal))
    return found
