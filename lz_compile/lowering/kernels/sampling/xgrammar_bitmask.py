"""xgrammar's ``apply_token_bitmask_inplace``: logits with minus infinity where a mask of bits forbids, and nothing else."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs
from lz_compile.lowering.token_bits import WORD


def _masked(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    from xgrammar import apply_token_bitmask_inplace

    assert x.bitmask is not None, "this kernel is for masks"
    masked = x.logits.clone(memory_format=torch.contiguous_format)
    if masked.numel():
        words = _words(x.bitmask, *masked.shape)
        with torch.cuda.device_of(masked):
            apply_token_bitmask_inplace(masked, words, vocab_size=masked.shape[-1])
    return masked.to(attrs.out_dtype)


def _words(bitmask: torch.Tensor, rows: int, vocab: int) -> torch.Tensor:
    """A copy of the mask as its kernels need it.

    They read a row of words for every row of logits, and on CUDA take the distance of rows for their length. On a CPU a
    row that allows every token has minus infinity written past its end, unless the bits past the vocabulary allow as well.
    """
    words = bitmask.new_empty(rows, bitmask.shape[-1]).copy_(bitmask)
    if vocab % WORD:
        words[:, -1] |= -1 << vocab % WORD
    return words


sampling = kernel_operator("xgrammar_bitmask", op, _masked, kernel_id="xgrammar.bitmask")
