"""xgrammar's ``apply_token_bitmask_inplace``: logits with minus infinity where a mask of bits forbids, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.lowering.opaque_sampling import sampler
from lz_compile.lowering.ops.sampling import SamplingAttrs
from lz_compile.lowering.token_bits import WORD


def _fill(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> None:
    from xgrammar import apply_token_bitmask_inplace

    logits = operands["logits"]
    masked = out if out.dtype == logits.dtype else logits.new_empty(logits.shape)
    masked.copy_(logits)
    words = _words(operands["bitmask"], *logits.shape)
    with torch.cuda.device_of(masked):
        apply_token_bitmask_inplace(masked, words, vocab_size=logits.shape[-1])
    if masked is not out:
        out.copy_(masked)


def _words(bitmask: torch.Tensor, rows: int, vocab: int) -> torch.Tensor:
    """A copy of the mask as its kernels need it.

    They read a row of words for every row of logits, and on CUDA take the distance of rows for their length. On a CPU a
    row that allows every token has minus infinity written past its end, unless the bits past the vocabulary allow as well.
    """
    words = bitmask.new_empty(rows, bitmask.shape[-1]).copy_(bitmask)
    if vocab % WORD:
        words[:, -1] |= -1 << vocab % WORD
    return words


sampling = sampler("xgrammar_bitmask", "xgrammar.bitmask", _fill)
