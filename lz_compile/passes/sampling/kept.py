"""What a filter keeps, as the op says it: top-k, top-p and min-p, as numbers and tensors of the source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import fx

#: Which of several equal scores are kept; the op has one more, for a source that does not say.
Ties: TypeAlias = Literal["all", "first", "last"]
#: What a filter is given or gives: scores, probabilities, or those of what is kept, without having been divided by their sum.
Form: TypeAlias = Literal["scores", "probs", "parts"]

#: A vocabulary in which limits can be told from each other.
VOCAB = 97
#: Fewer than these are experts or classes, of which no filter is missed.
LEAST_MISSED = 64


@dataclass(frozen=True)
class Limit:
    """A number, or ``number + sign * leaf``, or ``vocab - leaf`` (``of_vocab``)."""

    number: float = 0.0
    leaf: fx.Node | None = None
    sign: int = 1
    of_vocab: bool = False

    def value(self, values: Mapping[fx.Node, Any], vocab: int) -> Any:
        """A number or a tensor, for values of the leaves."""
        given = 0.0 if self.leaf is None else self.sign * values[self.leaf]
        return (vocab if self.of_vocab else self.number) + given

    def __str__(self) -> str:
        if self.leaf is None:
            return f"{self.number:g}"
        before = "V" if self.of_vocab else f"{self.number:g}" if self.number else ""
        return f"{before}{' - ' if self.sign < 0 else ' + ' if before else ''}{self.leaf.name}"


@dataclass(frozen=True)
class Limits:
    """What a filter keeps, and what it makes of it.

    ``fill`` is what scores become that are not kept, ``vocab`` the number of tokens at which this was seen. ``is_any``: the
    source does not say which of several equal scores are kept.
    """

    result: Form
    top_k: Limit | None = None
    top_p: Limit | None = None
    min_p: Limit | None = None
    top_k_ties: Ties = "all"
    top_p_ties: Ties = "all"
    fill: float = -math.inf
    vocab: int = VOCAB
    is_any: bool = False

    @property
    def named(self) -> dict[str, Limit]:
        """Those that there are."""
        found = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: limit for name, limit in found.items() if limit is not None}

    def then(self, later: Limits) -> Limits | None:
        """Both, the later ones of what is left; None where the op has another order."""
        order = ["top_k", "top_p", "min_p"]
        mine, others = ([order.index(name) for name in each.named] for each in (self, later))
        if mine and others and max(mine) >= min(others):
            return None
        ties = self.top_k_ties if self.top_k is not None else later.top_k_ties
        more = self.top_p_ties if self.top_p is not None else later.top_p_ties
        named = {**self.named, **later.named}
        fill, vocab = max(self.fill, later.fill), max(self.vocab, later.vocab)
        is_any = self.is_any or later.is_any
        return Limits(later.result, **named, top_k_ties=ties, top_p_ties=more, fill=fill, vocab=vocab, is_any=is_any)
