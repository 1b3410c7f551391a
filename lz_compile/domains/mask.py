"""The tokens that one hard domain allows, as a bit for every token of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from lz_compile.domains.levels import Domain
from lz_compile.errors import ConstraintError
from lz_compile.ground import events
from lz_compile.lowering.cpp import bits
from lz_compile.lowering.token_bits import WORD, pack, unpack, word_count

#: More than int32 can number.
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class DomainMask:
    """What ``domain`` allows.

    A grammar engine that fills the tensor of words again changes the mask.

    Shapes:
        words: ``[ceil(vocab_size / 32)]``, int32; bit ``t % 32`` of word ``t // 32`` says that token ``t`` is allowed. Bits
        beyond the vocabulary count for nothing.

    Raises:
        ConstraintError: the domain is a soft one, the vocabulary is empty or has more tokens than int32 can number, or the
        words are of another shape or dtype.
    """

    domain: Domain
    vocab_size: int
    words: torch.Tensor

    def __post_init__(self) -> None:
        _check_size(self.domain, self.vocab_size)
        wanted = word_count(self.vocab_size)
        words = self.words
        if not isinstance(words, torch.Tensor) or words.dtype != torch.int32 or words.shape != (wanted,):
            is_tensor = isinstance(words, torch.Tensor)
            found = f"{words.dtype} of shape {list(words.shape)}" if is_tensor else type(words).__name__
            raise _error(self.domain, f"int32 words of shape [{wanted}] for {self.vocab_size} tokens", found)

    @classmethod
    def from_ids(cls, domain: Domain, ids: Sequence[int] | torch.Tensor, vocab_size: int) -> DomainMask:
        """The mask that allows these tokens.

        Args:
            domain: whose opinion it is.
            ids: tokens in ascending order, without repetition; integers of any width.
            vocab_size: how many tokens there are.

        Raises:
            ConstraintError: they are no flat list of integers, not ascending, or one lies outside of the vocabulary.
        """
        _check_size(domain, vocab_size)
        tokens = _as_ids(domain, ids, vocab_size)
        if tokens.numel() and (int(tokens[0]) < 0 or int(tokens[-1]) >= vocab_size):
            raise _error(domain, f"token ids within 0..{vocab_size - 1}", f"{int(tokens.min())}..{int(tokens.max())}")
        if bool((tokens[1:] <= tokens[:-1]).any()):
            raise _error(domain, "ascending token ids", "ids out of order, or twice; sort them and drop repetitions")
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[tokens] = True
        return cls(domain, vocab_size, pack(allowed))

    @classmethod
    def from_bitmask(cls, domain: Domain, words: torch.Tensor, vocab_size: int) -> DomainMask:
        """The mask that a grammar engine has filled: the same tensor.

        Raises:
            ConstraintError: it is no flat int32 tensor of ``ceil(vocab_size / 32)`` words.
        """
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

    @property
    def ids(self) -> torch.Tensor:
        """The tokens that are allowed, ascending, int32."""
        return ids_of(self.words, self.vocab_size)

    @property
    def count(self) -> int:
        """How many tokens are allowed."""
        return feasible([self])[1]

    def __contains__(self, token: int) -> bool:
        inside = 0 <= token < self.vocab_size
        return inside and bool(int(self.words[token // WORD]) >> (token % WORD) & 1)


def intersect(masks: Iterable[DomainMask]) -> torch.Tensor:
    """The words of the tokens that every mask allows: one pass, whatever the order; bits beyond the vocabulary are zero.

    Raises:
        ConstraintError: there is no mask, or they belong to different vocabularies or lie on different devices.
    """
    return feasible(list(masks))[0]


def feasible(masks: Sequence[DomainMask]) -> tuple[torch.Tensor, int]:
    """As :func:`intersect`, and how many tokens that are."""
    if not masks:
        raise ConstraintError(
            "intersecting masks: expected at least one, got none. Without a mask every token is allowed"
        )
    first = masks[0]
    if any(mask.vocab_size != first.vocab_size for mask in masks):
        texts = ", ".join(f"{mask.domain.name} {mask.vocab_size}" for mask in masks)
        raise ConstraintError(
            f"intersecting masks: expected one vocabulary, got {texts}. Pad the smaller ones with zeros"
        )
    if any(mask.words.device != first.words.device for mask in masks):
        texts = ", ".join(f"{mask.domain.name} on {mask.words.device}" for mask in masks)
        raise ConstraintError(f"intersecting masks: expected one device, got {texts}. Move the words to one of them")
    last = _last(first.vocab_size)
    if first.words.device.type == "cpu" and has_compiler():
        return bits.intersect([mask.words.contiguous() for mask in masks], last)
    words = first.words.clone()
    for mask in masks[1:]:
        words.bitwise_and_(mask.words)
    words[-1:].bitwise_and_(_signed(last))
    return words, int(unpack(words, first.vocab_size).sum())


def everything(vocab_size: int) -> torch.Tensor:
    """The words of a mask that allows every token."""
    words = torch.full((word_count(vocab_size),), -1, dtype=torch.int32)
    words[-1] = _signed(_last(vocab_size))
    return words


def ids_of(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The tokens of flat words, ascending, int32."""
    if words.device.type == "cpu" and has_compiler():
        return bits.set_bits(words.contiguous(), _last(vocab_size))
    return unpack(words, vocab_size).nonzero().flatten().to(torch.int32)


@cache
def has_compiler() -> bool:
    """Whether C++ runs here; if not, that is an event, and PyTorch's operations take its place."""
    try:
        bits.set_bits(torch.zeros(1, dtype=torch.int32), 1)
    except Exception as error:  # noqa: BLE001 whatever a compiler or a loader may raise
        events.record("NO_COMPILER", "intersecting masks by PyTorch's operations, which takes longer", error)
        return False
    return True


def _last(vocab_size: int) -> int:
    """The bits of the last word that are tokens."""
    return 0xFFFFFFFF >> -vocab_size % WORD


def _signed(word: int) -> int:
    """32 bits as the int32 that has them."""
    return word - (word >> (WORD - 1) << WORD)


def _as_ids(domain: Domain, ids: Sequence[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Integers as int64 on the CPU."""
    try:
        tokens = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # texts, say, or integers beyond int64
        raise _error(
            domain, f"a flat list of token ids within 0..{vocab_size - 1}", f"what is none ({error})"
        ) from error
    if tokens.dim() != 1:
        raise _error(domain, "a flat list of token ids", f"shape {list(tokens.shape)}")
    if tokens.numel() and (tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool):
        hint = "; for booleans there is from_bools" if tokens.dtype == torch.bool else ""
        raise _error(domain, "integer token ids", f"{tokens.dtype}{hint}")
    return tokens.to("cpu", torch.int64)


def _check_size(domain: Domain, vocab_size: int) -> None:
    if not domain.is_hard:
        raise ConstraintError(
            f"masking for {domain.name}: it is a soft domain, which has scores (DomainScore) and no mask"
        )
    if not 1 <= vocab_size <= _MOST_TOKENS:
        raise _error(domain, f"a vocabulary of at least one token, at most {_MOST_TOKENS}", str(vocab_size))


def _error(domain: Domain, expected: str, found: str) -> ConstraintError:
    return ConstraintError(f"masking for {domain.name}: expected {expected}, got {found}")
