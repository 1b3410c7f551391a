"""What conditions leave out of a step: selected away, it takes its NaN along, where a product with zero would keep it.

As sums of products, ``where(done, 0, h)`` and ``h * (1 - done)`` are the same. So a step of which something vanishes under
conditions is run as it is written, with NaN there, once for each way in which the conditions may hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType

from torch import fx

from lz_compile.passes.loops.recurrence.index_sum import Dims, IndexSum, mapped
from lz_compile.passes.loops.recurrence.index_terms import Atom, Factor, Term, subterm
from lz_compile.passes.loops.recurrence.index_values import masks_of, ways_of, where_held
from lz_compile.passes.loops.recurrence.step_check import poisoned
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.transition import Read, Role, Transition


def with_drops(form: StepForm, transition: Transition) -> Transition:
    """The transition and its reads, with what conditions drop of the state, and what they do not drop of operands."""
    old, new = form.step.states[transition.state], form.step.carried[transition.state]
    seen = (old,) if transition.mode == "before" else (old, new)
    reads = (replace(read, drops=_dropped_read(form, read, seen)) for read in transition.reads)
    drops = _dropped(form, transition.decay, new, (old,))
    return replace(transition, drops=drops, leaks=_leaks(form, transition), reads=tuple(reads))


def masked(part: IndexSum | None, left: IndexSum, keys: tuple[int, ...]) -> IndexSum | None:
    """Zero wherever a mask alone makes ``left`` zero: what is left out there may be NaN, and zero times NaN is not zero.

    A mask over keys makes only some rows zero, and says nothing of the other side.
    """
    if part is None:
        return None
    masks = {factor for term in left.terms for factor in term.of("mask")}
    for mask in sorted(each for each in masks if not set(keys) & set(each.indices)):
        whole = IndexSum(part.dims, {Term((mask,)): 1.0})
        if all(mask in term.factors for term in left.terms):
            part = part.times(whole)
        elif not mapped(left, partial(_there, mask)).terms:
            part = part.plus(part.times(whole), -1)
    return part


def _there(mask: Factor, term: Term) -> Term:
    return term.without([mask]) if mask in term.factors else term


def _dropped_read(form: StepForm, read: Read, states: Sequence[fx.Node]) -> IndexSum | None:
    """Where a read drops the state; one that drops some of what it sums over multiplies by zero there."""
    found = None if read.query is None else _dropped(form, read.query, read.node, states)
    is_inside = found is not None and all(term.indices <= {*read.places} for term in found.terms)
    return found if is_inside else None


def _dropped(form: StepForm, factor: IndexSum, node: fx.Node, states: Sequence[fx.Node]) -> IndexSum | None:
    """Where a factor of states vanishes, and the value of ``node`` is none of NaN although the states are."""
    dropped = IndexSum(factor.dims, {})
    for held in (held for held in ways_of(masks_of([factor])) if not mapped(factor, partial(where_held, held)).terms):
        if not bool(poisoned(form, node, held, states).isnan().any()):
            dropped = dropped.plus(_indicator(factor.dims, masks_of([factor]), held))
    return dropped if dropped.terms else None


def _leaks(form: StepForm, transition: Transition) -> dict[Role, IndexSum]:
    """Of operands, what they leave out under conditions although the step as it is written multiplies it by zero.

    NaN and infinities of that are NaN afterwards. What another operand holds under the same conditions is seen there.
    """
    whole = {("drive", 0): transition.drive, ("decay", 0): transition.decay}
    parts: dict[Role, IndexSum | None] = {}
    for place, update in enumerate(transition.updates):
        parts["left", place] = update.left
        for name in ("right", "erase"):
            parts[name, place] = masked(getattr(update, name), update.left, transition.keys)
    found = _leaking(form, form.step.carried[transition.state], whole, parts)
    for place, read in enumerate(transition.reads):
        for name in ("query", "rest"):
            found |= _leaking(form, read.node, {(name, place): getattr(read, name)})
    return found


def _leaking(
    form: StepForm,
    node: fx.Node,
    whole: Mapping[Role, IndexSum | None],
    parts: Mapping[Role, IndexSum | None] = MappingProxyType({}),
) -> dict[Role, IndexSum]:
    """What of each of the sums reaches a node although conditions leave it out; ``parts`` do not have all indices."""
    found: dict[Role, IndexSum] = {}
    sums = {role: each for role, each in (*whole.items(), *parts.items()) if each is not None}
    for atom in sorted({each for own in sums.values() for each in own.atoms}):
        node_of = form.atoms.get(atom)
        if atom.kind != "given" or node_of is None or not node_of.meta["val"].is_floating_point():
            continue
        roles = [role for role, each in sums.items() if atom in each.atoms]
        own = [sums[role] for role in roles]
        masks = masks_of(own)
        is_whole = any(role in whole for role in roles)
        places = [*(role for role in sums if is_whole and role in whole)]
        places += [role for role in roles if masks_of([sums[role]]) == masks]
        for held in ways_of(masks) if places else ():
            is_there = any(atom in mapped(each, partial(where_held, held)).atoms for each in own)
            if not is_there and bool(poisoned(form, node, held, [node_of]).isnan().any()):
                place, lost = places[0], _indicator(own[0].dims, masks, held).times(_alone(own[0], atom))
                found[place] = found[place].plus(lost) if place in found else lost
    return found


def _alone(whole: IndexSum, atom: Atom) -> IndexSum:
    """A factor of some products of a sum, without the others."""
    found = (subterm(term, [each for each in term.factors if each.atom == atom]) for term in whole.terms)
    return IndexSum(whole.dims, dict.fromkeys((term for term in found if term.factors), 1.0))


def _indicator(dims: Dims, masks: frozenset[Factor], held: Mapping[Atom, bool]) -> IndexSum:
    """One where all conditions hold so, else zero."""

    def chosen(mask: Factor) -> IndexSum:
        own = IndexSum(dims, {Term((mask,)): 1.0})
        return own if held[mask.atom] else IndexSum(dims, {Term(): 1.0}).plus(own, -1)

    return reduce(IndexSum.times, map(chosen, sorted(masks)))
