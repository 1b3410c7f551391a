"""Masks in many spellings: conditions on positions, padding and documents, joined and written in the ways that people do.

A recipe is drawn as plain data and built into a function that Dynamo traces. ``must_be_exact`` tells of which recipes the
whole meaning has to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from mask_oracle import HEADS
from torch import Tensor

Variant = int
FILLS = {"infinite": -torch.inf, "lowest": torch.finfo(torch.float32).min, "large": -1e9}


@dataclass(frozen=True)
class Term:
    """One condition: its kind, a number (of a window, a block, a prefix) and how it is spelled."""

    kind: str
    number: int
    variant: Variant


@dataclass(frozen=True)
class Recipe:
    """A mask: the conditions, where queries begin among the keys, how conditions are joined and the mask is written."""

    terms: tuple[Term, ...]
    has_past: bool
    joined: Variant
    form: str
    written: Variant
    layout: str
    dynamic: bool

    @property
    def keeps(self) -> bool:
        """Whether True keeps."""
        return self.form != "drop"

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of its conditions."""
        return frozenset(term.kind for term in self.terms)

    @property
    def must_be_exact(self) -> bool:
        """Whether the meaning has to be found, and be the whole of it."""
        same = sum(term.kind in ("block", "documents") for term in self.terms)
        sums = self.is_sum and bool({"padding", "documents", "block"} & self.kinds)
        return "prefix" not in self.kinds and same <= 1 and not sums

    @property
    def is_sum(self) -> bool:
        """Whether the mask is a sum of additive ones."""
        return self.form in FILLS and len(self.terms) > 1 and self.written % len(WRITTEN) == SUMMED


# ---- comparisons --------------------------------------------------------------------------------------------------

#: ``one <= two`` for integers.
COMPARED: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda one, two: one <= two,
    lambda one, two: two >= one,
    lambda one, two: ~(one > two),
    lambda one, two: one - two <= 0,
    lambda one, two: one < two + 1,
    lambda one, two: torch.logical_not(torch.gt(one, two)),
    lambda one, two: torch.maximum(one, two) == two,
    lambda one, two: (two - one).clamp(min=-1).ne(-1),
    lambda one, two: two.to(torch.int32) - one.to(torch.int32) > -1,
    lambda one, two: one.double() < two.double() + 0.5,
    lambda one, two: (two - one).lt(0).logical_not(),
    lambda one, two: torch.where(one > two, 0, 1).bool(),
    lambda one, two: (two - one).abs() == two - one,
    lambda one, two: torch.min(one, two).eq(one),
)


def _places(x: Tensor, past: Tensor, variant: Variant, *, has_past: bool) -> tuple[Tensor, Tensor]:
    """Positions of queries (a column) and keys (a row)."""
    queries, before = x.shape[1], past.shape[1] if has_past else 0
    keys = before + queries
    if variant % 4 == 0:
        return (torch.arange(queries) + before)[:, None], torch.arange(keys)[None]
    if variant % 4 == 1:
        return torch.arange(before, keys).unsqueeze(-1), torch.arange(keys).view(1, -1)
    if variant % 4 == 2:
        return torch.arange(keys)[before:].reshape(-1, 1), torch.ones(keys, dtype=torch.int64).cumsum(0)[None] - 1
    both = torch.arange(keys).expand(1, keys)
    return both[:, keys - queries :].transpose(0, 1), both


def _triangular(x: Tensor, past: Tensor, term: Term, *, has_past: bool) -> Tensor:
    """A causal mask, or one side of a window, by triangles."""
    queries, before = x.shape[1], past.shape[1] if has_past else 0
    keys = before + queries
    is_window = term.kind == "window"
    diagonal = before - term.number + 1 if is_window else before
    spelled = term.variant % 5
    if spelled == 0:
        whole = torch.ones(queries, keys)
        return (torch.triu(whole, diagonal) if is_window else torch.tril(whole, diagonal)) != 0
    if spelled == 1:
        whole = torch.ones(queries, keys, dtype=torch.bool)
        return ~(whole.tril(diagonal - 1) if is_window else whole.triu(diagonal + 1))
    if spelled == 2:
        square = torch.ones(keys, keys, dtype=torch.uint8)
        square = square.triu(1 - term.number) if is_window else square.tril()
        return square[before:keys, :keys].to(torch.bool)
    if spelled == 3:
        full = torch.full((queries, keys), -1.0)
        return (full.tril(diagonal - 1) if is_window else full.triu(diagonal + 1)) > -0.5
    out = torch.zeros(queries, keys, dtype=torch.bool)
    out.fill_(True)
    return out.triu_(diagonal) if is_window else out.tril_(diagonal)


def _condition(term: Term, x: Tensor, past: Tensor, padding: Tensor, documents: Tensor, *, has_past: bool) -> Tensor:
    """The condition as a boolean tensor that broadcasts to ``[B, 1, Q, K]``."""
    at_most = COMPARED[term.variant % len(COMPARED)]
    query, key = _places(x, past, term.variant // len(COMPARED), has_past=has_past)
    if term.kind in ("causal", "window") and term.variant % 3 == 0:
        return _triangular(x, past, term, has_past=has_past)
    if term.kind == "causal":
        return at_most(key, query)
    if term.kind == "window":
        return at_most(query - (term.number - 1), key)
    if term.kind == "near":
        return _near(at_most, query, key, term)
    if term.kind == "prefix":
        return at_most(key, torch.full_like(query, term.number - 1)) | at_most(key, query)
    if term.kind == "block":
        return _block(query, key, term)
    if term.kind == "padding":
        return _padding(padding, term)
    if term.kind == "documents":
        return _documents(documents, x.shape[1], term)
    return torch.ones(1, 1, 1, 1, dtype=torch.bool) if term.variant % 2 else key >= 0


def _near(at_most: Callable[[Tensor, Tensor], Tensor], query: Tensor, key: Tensor, term: Term) -> Tensor:
    if term.variant % 3 == 1:
        return (query - key).abs() <= term.number
    if term.variant % 3 == 2:
        return (key - query).clamp(-term.number, term.number) == key - query
    return at_most(query - term.number, key) & at_most(key, query + term.number)


def _block(query: Tensor, key: Tensor, term: Term) -> Tensor:
    if term.variant % 3 == 1:
        return torch.div(query, term.number, rounding_mode="floor").eq(key // term.number)
    if term.variant % 3 == 2:
        return query - query % term.number == key - key.remainder(term.number)
    return key // term.number == query // term.number


def _padding(padding: Tensor, term: Term) -> Tensor:
    spelled = term.variant % 5
    if spelled == 0:
        return padding[:, None, None, :].bool()
    if spelled == 1:
        return padding.ne(0)[:, None, None]
    if spelled == 2:
        return ~(padding == 0).view(padding.shape[0], 1, 1, padding.shape[1])
    if spelled == 3:
        rows = torch.arange(padding.shape[0])[:, None, None, None]
        return padding.to(torch.bool)[rows, torch.arange(padding.shape[1])[None, None, None, :]]
    return (padding > 0).unsqueeze(1).unsqueeze(2)


def _documents(documents: Tensor, queries: int, term: Term) -> Tensor:
    batch, keys = documents.shape
    spelled = term.variant % 3
    if spelled == 0:
        return documents[:, None, keys - queries :, None] == documents[:, None, None, :]
    if spelled == 1:
        rows = torch.arange(batch)[:, None, None, None]
        places = torch.arange(queries) + (keys - queries)
        mine = documents[rows, places[None, None, :, None]]
        return mine.eq(documents[rows, torch.arange(keys)[None, None, None, :]])
    return ~(documents[:, -queries:].unsqueeze(-1) != documents.unsqueeze(1)).unsqueeze(1)


# ---- joins and forms ----------------------------------------------------------------------------------------------

_JOINED: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda one, two: one & two,
    torch.logical_and,
    lambda one, two: one * two,
    lambda one, two: torch.where(one, two, torch.zeros((), dtype=torch.bool)),
    lambda one, two: ~(~one | ~two),
    lambda one, two: torch.minimum(one.int(), two.int()) == 1,
    lambda one, two: (one.float() * two.float()).bool(),
    lambda one, two: (one.long() + two.long()) > 1,
    lambda one, two: ~torch.logical_or(one.logical_not(), two.logical_not()),
)


def _in_place(keep: Tensor, fill: float) -> Tensor:
    out = torch.zeros(keep.shape)
    out.masked_fill_(~keep, fill)
    return out


#: An additive mask of a boolean one; the last ones only for finite fills.
WRITTEN: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda keep, fill: torch.where(keep, 0.0, fill),
    lambda keep, fill: torch.zeros(keep.shape).masked_fill(~keep, fill),
    lambda keep, fill: torch.full(keep.shape, fill).masked_fill(keep, 0.0),
    lambda keep, fill: torch.where(keep, torch.zeros(()), torch.tensor(fill)),
    _in_place,
    lambda keep, fill: torch.where(keep, 0.0, fill),
    lambda keep, fill: (1.0 - keep.float()) * fill,
    lambda keep, fill: keep.logical_not().to(torch.float32) * fill,
)
SUMMED = 5
_FINITE_ONLY = 6


def _shaped(mask: Tensor, x: Tensor, layout: str) -> Tensor:
    """The mask with one dimension per letter."""
    mask = mask.reshape(1, 1, *mask.shape) if mask.dim() == 2 else mask
    if layout == "qk":
        return mask[0, 0]
    if layout == "11qk":
        return mask
    batch, queries, keys = x.shape[0], mask.shape[-2], mask.shape[-1]
    if layout == "b1qk":
        return mask.expand(batch, -1, queries, keys)
    spread = mask.expand(batch, HEADS, queries, keys)
    return spread if layout == "bhqk" else spread.reshape(batch * HEADS, queries, keys)


def build(recipe: Recipe) -> Callable[..., Tensor]:
    """The function that computes the mask, of ``x``, ``past``, ``padding`` and ``documents``."""

    def mask(x: Tensor, past: Tensor, padding: Tensor, documents: Tensor) -> Tensor:
        has_past = recipe.has_past
        parts = [_condition(term, x, past, padding, documents, has_past=has_past) for term in recipe.terms]
        queries, keys = x.shape[1], x.shape[1] + (past.shape[1] if has_past else 0)
        parts = [part.expand(*part.shape[:-2], queries, keys) for part in parts]
        if recipe.is_sum:
            total = _written(recipe, parts[0])
            for part in parts[1:]:
                total = total + _written(recipe, part)
            return _shaped(total, x, recipe.layout)
        keep = parts[0]
        for position, part in enumerate(parts[1:]):
            keep = _JOINED[(recipe.joined + position) % len(_JOINED)](keep, part)
        if recipe.form in FILLS:
            return _shaped(_written(recipe, keep), x, recipe.layout)
        return _shaped(keep if recipe.keeps else ~keep, x, recipe.layout)

    return mask


def _written(recipe: Recipe, keep: Tensor) -> Tensor:
    spelled = recipe.written % len(WRITTEN)
    if recipe.form == "infinite" and spelled >= _FINITE_ONLY:
        spelled = 0
    return WRITTEN[spelled](keep, FILLS[recipe.form])


# ---- what is drawn ------------------------------------------------------------------------------------------------

_KINDS = ("causal", "window", "near", "prefix", "block", "documents", "padding", "everything")


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe; a mask for every batch has no layout without one."""
    variants = st.integers(0, 10**4)
    term = st.builds(Term, st.sampled_from(_KINDS), st.integers(1, 6), variants)
    terms = tuple(draw(st.lists(term, min_size=1, max_size=3)))
    per_batch = any(each.kind in ("documents", "padding") for each in terms)
    layouts = ("b1qk", "bhqk", "nqk") if per_batch else ("qk", "11qk", "b1qk", "bhqk", "nqk")
    return Recipe(
        terms,
        has_past=draw(st.booleans()),
        joined=draw(variants),
        form=draw(st.sampled_from(("keep", "drop", *FILLS))),
        written=draw(variants),
        layout=draw(st.sampled_from(layouts)),
        dynamic=draw(st.booleans()),
    )


def inputs(recipe: Recipe, batch: int, queries: int, past: int, seed: int = 0) -> Mapping[str, Tensor]:
    """Arguments of the function at these sizes."""
    random = torch.Generator().manual_seed(seed)
    keys = queries + (past if recipe.has_past else 0)
    return {
        "x": torch.zeros(batch, queries),
        "past": torch.zeros(batch, past),
        "padding": torch.randint(0, 2, (batch, keys), generator=random),
        "documents": torch.randint(0, 3, (batch, keys), generator=random),
    }
