"""Conditions that drop a state: selected away, a state takes its NaN along, where a product with zero would keep it.

As sums of products, ``where(done, 0, h)`` and ``h * (1 - done)`` are the same. So a step whose factor vanishes under
conditions is run as it is written, with a state of NaN, once for each way in which the conditions may hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

from torch import fx

from lz_compile.passes.loops.recurrence.index_sum import IndexSum, mapped
from lz_compile.passes.loops.recurrence.index_terms import Atom, Factor, Term
from lz_compile.passes.loops.recurrence.index_values import MAX_MASKS
from lz_compile.passes.loops.recurrence.step_check import poisoned
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.transition import Read, Transition


def with_drops(form: StepForm, transition: Transition) -> Transition:
    """The transition and its reads, with one as ``drops`` where the step as it is written drops a state of NaN, else zero.

    ``leaks`` likewise where it does not drop the NaN of what the state would have been multiplied by.
    """
    old, new = form.step.states[transition.state], form.step.carried[transition.state]
    seen = (old,) if transition.mode == "before" else (old, new)
    reads = (replace(read, drops=_dropped_read(form, read, seen)) for read in transition.reads)
    drops, leaks = _dropped(form, transition.decay, new, (old,)), _leaking(form, transition.decay, new)
    return replace(transition, drops=drops, leaks=leaks, reads=tuple(reads))


def _dropped_read(form: StepForm, read: Read, states: Sequence[fx.Node]) -> IndexSum | None:
    """Where a read drops the state; one that drops some of what it sums over multiplies by zero there."""
    found = None if read.query is None else _dropped(form, read.query, read.node, states)
    is_inside = found is not None and all(term.indices <= {*read.places} for term in found.terms)
    return found if is_inside else None


def _dropped(form: StepForm, factor: IndexSum, node: fx.Node, states: Sequence[fx.Node]) -> IndexSum | None:
    """Where a factor of states vanishes, and the value of ``node`` is none of NaN although the states are."""
    dropped = IndexSum(factor.dims, {})
    for held in _vanishing(factor):
        if not bool(poisoned(form, node, held, states).isnan().any()):
            dropped = dropped.plus(_indicator(factor, held))
    return dropped if dropped.terms else None


def _leaking(form: StepForm, decay: IndexSum, new: fx.Node) -> IndexSum | None:
    """Where a decay vanishes under conditions, and the next state is NaN all the same if the decay's other factors are."""
    atoms = dict.fromkeys(each.atom for term in decay.terms for each in term.of("given"))
    factors = [form.atoms[atom] for atom in atoms if form.atoms[atom].meta["val"].is_floating_point()]
    leaking = IndexSum(decay.dims, {})
    for held in _vanishing(decay) if factors else ():
        if bool(poisoned(form, new, held, factors).isnan().any()):
            leaking = leaking.plus(_indicator(decay, held))
    return leaking if leaking.terms else None


def factors_of(decay: IndexSum) -> IndexSum:
    """What a decay is made of beside conditions: not finite where one of its factors is not."""
    return IndexSum(decay.dims, dict.fromkeys((term.without(term.of("mask")) for term in decay.terms), 1.0))


def _vanishing(factor: IndexSum) -> Iterator[Mapping[Atom, bool]]:
    """The ways in which the conditions of a factor may hold that leave nothing of it."""
    masks = sorted({each.atom for term in factor.terms for each in term.of("mask")})
    if not masks or len({each for term in factor.terms for each in term.of("mask")}) > MAX_MASKS:
        return
    for values in itertools.product((False, True), repeat=len(masks)):
        held = dict(zip(masks, values, strict=True))
        if not mapped(factor, partial(_where, held)).terms:
            yield held


def _where(held: Mapping[Atom, bool], term: Term) -> Term | None:
    """A product where conditions hold, or do not."""
    masks = term.of("mask")
    return term.without(masks) if all(held[each.atom] for each in masks) else None


def _indicator(factor: IndexSum, held: Mapping[Atom, bool]) -> IndexSum:
    """One where all conditions of a factor hold so, else zero."""

    def chosen(mask: Factor) -> IndexSum:
        own = IndexSum(factor.dims, {Term((mask,)): 1.0})
        return own if held[mask.atom] else IndexSum(factor.dims, {Term(): 1.0}).plus(own, -1)

    return reduce(IndexSum.times, map(chosen, sorted({each for term in factor.terms for each in term.of("mask")})))
