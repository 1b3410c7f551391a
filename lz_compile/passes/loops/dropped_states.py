"""Conditions that drop a state: selected away, a state takes its NaN along, where a product with zero would keep it.

As sums of products, ``where(done, 0, h)`` and ``h * (1 - done)`` are the same. So a step whose factor vanishes under conditions is
run as it is written, with a state of NaN, once for each way in which the conditions may hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce

import torch

from lz_compile.passes.loops.index_sum import IndexSum, mapped
from lz_compile.passes.loops.index_terms import Atom, Factor, Term
from lz_compile.passes.loops.index_values import MAX_MASKS
from lz_compile.passes.loops.step_check import carried_state
from lz_compile.passes.loops.step_form import StepForm
from lz_compile.passes.loops.transition import Transition


def with_drops(form: StepForm, transition: Transition) -> Transition:
    """The transition, with one where the step as it is written drops a state of NaN, else zero, as ``drops``."""
    decay, dropped = transition.decay, IndexSum(transition.decay.dims, {})
    for held in _vanishing(decay):
        found = carried_state(form, transition, torch.nan, held)
        if not bool(found.isnan().any()):
            dropped = dropped.plus(_indicator(decay, held))
    return replace(transition, drops=dropped) if dropped.terms else transition


def _vanishing(decay: IndexSum) -> Iterator[Mapping[Atom, bool]]:
    """The ways in which the conditions of a factor may hold that leave nothing of it."""
    masks = sorted({each.atom for term in decay.terms for each in term.of("mask")})
    if not masks or len({each for term in decay.terms for each in term.of("mask")}) > MAX_MASKS:
        return
    for values in itertools.product((False, True), repeat=len(masks)):
        held = dict(zip(masks, values, strict=True))
        if not mapped(decay, partial(_where, held)).terms:
            yield held


def _where(held: Mapping[Atom, bool], term: Term) -> Term | None:
    """A product where conditions hold, or do not."""
    masks = term.of("mask")
    return term.without(masks) if all(held[each.atom] for each in masks) else None


def _indicator(decay: IndexSum, held: Mapping[Atom, bool]) -> IndexSum:
    """One where all conditions of a factor hold so, else zero."""

    def chosen(mask: Factor) -> IndexSum:
        own = IndexSum(decay.dims, {Term((mask,)): 1.0})
        return own if held[mask.atom] else IndexSum(decay.dims, {Term(): 1.0}).plus(own, -1)

    return reduce(IndexSum.times, map(chosen, sorted({each for term in decay.terms for each in term.of("mask")})))
