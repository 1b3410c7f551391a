"""cuDNN's fused attention, as PyTorch calls it: ``aten::_scaled_dot_product_cudnn_attention``.

The operator itself and not ``scaled_dot_product_attention`` under ``sdpa_kernel``: which kernel that picks is decided again
at run time, and a mode is no part of a graph's node.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops.attention import Operands


def attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention in the op's canonical layout (see ``lowering/ops/attention.py``), without masks, sinks and dropout."""
    assert x.given().keys() == {"query", "key", "value"}, "torch.cudnn is given a mask or sinks"
    assert (attrs.dropout_p, attrs.softcap) == (0, None), "torch.cudnn is asked for dropout or capped scores"
    assert attrs.band is None, "torch.cudnn is asked for a band that does not start at the first query and key"
    if isinstance(x.key.shape[2], int) and x.key.shape[2] == 1:  # cuDNN takes no single key
        return torch_sdpa.attention(x, attrs)
    outputs = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        x.query,
        x.key,
        x.value,
        None,
        True,  # the logsumexp, which the backward reads
        0.0,
        attrs.is_causal,
        False,
        scale=attrs.scale,
    )
    found: torch.Tensor = outputs[0]
    return found
