"""Attention on CPUs in which a row has the same bits in every batch, whatever its padding and the chunks of its prefill.

C++ of our own (``rows_source.py``): a row is a lane, and its sums go from key to key.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands


def _attention(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.attention import rows_source as code

    return code.run(x, attrs)


attention = kernel_operator("row_attention", op, _attention, kernel_id="lz.row_attention")
