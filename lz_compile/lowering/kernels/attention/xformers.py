"""xFormers' memory-efficient attention: ``xformers.ops.memory_efficient_attention_forward``.

Its ``LowerTriangularMask`` starts at the first query and the first key, as our causality does, and its
``LowerTriangularFromBottomRightMask`` ends at the last ones.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernels.attention.library_attention import NO_LIMIT, library_attention, unit_stride, window
from lz_compile.lowering.kernels.attention.token_major import Operands


def check_library() -> None:
    """Some builds import everywhere and have no kernel for any GPU.

    Raises:
        ImportError: this is one of them.
    """
    from xformers._cpp_lib import _built_with_cuda

    if not _built_with_cuda:
        raise ImportError("this build of xformers has no CUDA kernels")


def _xformers(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention_forward
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    left, right = window(attrs)
    assert (attrs.softcap, x.slopes) == (None, None), "xformers is asked for capped scores or given slopes"
    assert left == NO_LIMIT, "xformers is asked for a window"
    assert right in (NO_LIMIT, 0), "xformers is asked for a window"
    query, key, value = unit_stride(x.query, x.key, x.value)
    groups, per_group = key.shape[2], query.shape[2] // key.shape[2]
    if per_group > 1:  # one more dimension: the key heads, and the query heads that share each of them
        query = query.unflatten(2, (groups, per_group))
        key = key.unsqueeze(3).expand(-1, -1, -1, per_group, -1)
        value = value.unsqueeze(3).expand(-1, -1, -1, per_group, -1)
    at_end = attrs.limits is not None and attrs.limits.at_end
    causal = LowerTriangularFromBottomRightMask if at_end else LowerTriangularMask
    bias = causal() if right == 0 else None
    out: torch.Tensor = memory_efficient_attention_forward(query, key, value, attn_bias=bias, scale=attrs.scale)
    return out.flatten(2, 3) if per_group > 1 else out


attention = library_attention("xformers", _xformers, kernel_id="xformers")
