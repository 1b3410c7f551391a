"""Masks over a vocabulary as words of bits: bit ``t % 32`` of word ``t // 32`` is that of token ``t``.

Both ways are plain functions of tensors, which also write graphs.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.arange import arange

#: Bits of a word.
WORD = 32


def word_count(vocab_size: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab_size // WORD)


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Booleans ``[..., V]`` as int32 words ``[..., ceil(V / 32)]``."""
    size = allowed.shape[-1]
    missing = word_count(size) * WORD - size
    is_whole = isinstance(missing, int) and missing == 0  # of a size that is not known yet nothing is asked
    padded = allowed if is_whole else torch.nn.functional.pad(allowed, (0, missing))
    grouped = padded.reshape(*allowed.shape[:-1], word_count(size), WORD)
    # The sum is below 2**32; as int32 its upper half is negative, bit for bit the same.
    return (grouped * (1 << arange(allowed, WORD))).sum(-1).to(torch.int32)


def unpack(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Int32 words ``[..., W]`` as booleans ``[..., vocab_size]``."""
    bits = (words.unsqueeze(-1) >> arange(words, WORD).to(torch.int32)) & 1
    return bits.flatten(-2)[..., :vocab_size] != 0
