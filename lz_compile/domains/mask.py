"""The tokens that one hard domain allows, as a bit for every token of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from lz_compile.domains.levels import Domain
from lz_compile.errors import ConstraintError
from lz_compile.lowering.cpp import bits
from lz_compile.runtime import events

#: Bits in a word, the lowest first: the layout of llguidance, xgrammar and the serving engines that use them.
WORD = 32


@dataclass(frozen=True, eq=False)
class DomainMask:
    """What ``domain`` allows.

    Shapes:
        words: ``[ceil(vocab_size / 32)]``, int32; bit ``t % 32`` of word ``t // 32`` says that token ``t`` is allowed. Bits
        beyond the vocabulary are zero.
    """

    domain: Domain
    vocab_size: int
    words: torch.Tensor

    @classmethod
    def from_ids(cls, domain: Domain, ids: Sequence[int] | torch.Tensor, vocab_size: int) -> DomainMask:
        """The mask that allows these tokens.

        Args:
            domain: whose opinion it is.
            ids: tokens in ascending order, without repetition; integers of any width.
            vocab_size: how many tokens there are.

        Raises:
            ConstraintError: the tokens are not ascending, or one lies outside of the vocabulary.
        """
        _check_size(domain, vocab_size)
        tokens = torch.as_tensor(ids, dtype=torch.int64).cpu()
        if tokens.dim() != 1:
            raise _error(domain, "a flat list of token ids", f"shape {list(tokens.shape)}")
        if tokens.numel() and (int(tokens[0]) < 0 or int(tokens[-1]) >= vocab_size):
            raise _error(domain, f"token ids within 0..{vocab_size - 1}", f"{int(tokens.min())}..{int(tokens.max())}")
        if bool((tokens[1:] <= tokens[:-1]).any()):
            raise _error(domain, "ascending token ids", "ids out of order, or twice; sort them and drop repetitions")
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[tokens] = True
        return cls(domain, vocab_size, pack(allowed))

    @classmethod
    def from_bitmask(cls, domain: Domain, words: torch.Tensor, vocab_size: int) -> DomainMask:
        """The mask that a grammar engine has filled: the same tensor, or a copy without bits beyond the vocabulary.

        Raises:
            ConstraintError: it is no flat int32 tensor of ``ceil(vocab_size / 32)`` words.
        """
        _check_size(domain, vocab_size)
        wanted = word_count(vocab_size)
        if words.dtype != torch.int32 or words.shape != (wanted,):
            found = f"{words.dtype} of shape {list(words.shape)}"
            raise _error(domain, f"int32 words of shape [{wanted}] for {vocab_size} tokens", found)
        rest = vocab_size % WORD
        if rest and int(words[-1]) & ~((1 << rest) - 1) & 0xFFFFFFFF:
            words = words.clone()
            words[-1] &= (1 << rest) - 1
        return cls(domain, vocab_size, words)

    @classmethod
    def from_bools(cls, domain: Domain, allowed: torch.Tensor) -> DomainMask:
        """The mask of a boolean tensor ``[vocab_size]``.

        Raises:
            ConstraintError: it has another shape or dtype.
        """
        if allowed.dim() != 1 or allowed.dtype != torch.bool:
            raise _error(domain, "a flat boolean tensor", f"{allowed.dtype} of shape {list(allowed.shape)}")
        _check_size(domain, allowed.numel())
        return cls(domain, allowed.numel(), pack(allowed))

    @cached_property
    def ids(self) -> torch.Tensor:
        """The tokens that are allowed, ascending, int32."""
        return ids_of(self.words, self.vocab_size)

    @property
    def count(self) -> int:
        """How many tokens are allowed."""
        return self.ids.numel()

    def __contains__(self, token: int) -> bool:
        inside = 0 <= token < self.vocab_size
        return inside and bool(int(self.words[token // WORD]) >> (token % WORD) & 1)


def intersect(masks: Iterable[DomainMask]) -> torch.Tensor:
    """The words of the tokens that every mask allows: one pass, whatever the order.

    Raises:
        ConstraintError: there is no mask, or they belong to different vocabularies.
    """
    masks = list(masks)
    if not masks:
        raise ConstraintError(
            "intersecting masks: expected at least one, got none. Without a mask every token is allowed"
        )
    sizes = {mask.vocab_size for mask in masks}
    if len(sizes) > 1:
        texts = ", ".join(f"{mask.domain.name} {mask.vocab_size}" for mask in masks)
        raise ConstraintError(
            f"intersecting masks: expected one vocabulary, got {texts}. Pad the smaller ones with zeros"
        )
    if len(masks) == 1:
        return masks[0].words.clone()
    words = torch.bitwise_and(masks[0].words, masks[1].words)
    for mask in masks[2:]:
        torch.bitwise_and(words, mask.words, out=words)
    return words


def word_count(vocab_size: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab_size // WORD)


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Booleans ``[..., V]`` as int32 words ``[..., ceil(V / 32)]``."""
    size = allowed.shape[-1]
    missing = word_count(size) * WORD - size
    padded = torch.nn.functional.pad(allowed, (0, missing)) if missing else allowed
    grouped = padded.reshape(*allowed.shape[:-1], word_count(size), WORD)
    weights = torch.ones(WORD, dtype=torch.int64, device=allowed.device) << torch.arange(WORD, device=allowed.device)
    # The sum is below 2**32; as int32 its upper half is negative, bit for bit the same.
    return (grouped * weights).sum(-1).to(torch.int32)


def unpack(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Int32 words ``[..., W]`` as booleans ``[..., vocab_size]``."""
    places = torch.arange(WORD, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> places) & 1
    return bits.flatten(-2)[..., :vocab_size].to(torch.bool)


def ids_of(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The tokens of flat words without bits beyond the vocabulary, ascending, int32."""
    if words.device.type == "cpu" and _has_compiler():
        return bits.set_bits(words.contiguous())
    return unpack(words, vocab_size).nonzero().flatten().to(torch.int32)


@cache
def _has_compiler() -> bool:
    """Whether C++ runs here; if not, that is an event, and PyTorch's operations take its place."""
    try:
        bits.set_bits(torch.zeros(1, dtype=torch.int32))
    except Exception as error:  # noqa: BLE001 whatever a compiler or a loader may raise
        events.record("NO_COMPILER", "listing tokens by PyTorch's operations, which takes longer", error)
        return False
    return True


def _check_size(domain: Domain, vocab_size: int) -> None:
    if not domain.is_hard:
        raise ConstraintError(
            f"masking for {domain.name}: it is a soft domain, which has scores (DomainScore) and no mask"
        )
    if vocab_size < 1:
        raise _error(domain, "a vocabulary of at least one token", str(vocab_size))


def _error(domain: Domain, expected: str, found: str) -> ConstraintError:
    return ConstraintError(f"masking for {domain.name}: expected {expected}, got {found}")
