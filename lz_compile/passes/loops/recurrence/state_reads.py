"""How values of a step are read from its state: of the one that it leaves behind, or of the one that it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.walks import needed
from lz_compile.passes.loops.recurrence.index_sum import IndexSum, substituted
from lz_compile.passes.loops.recurrence.index_terms import Atom, Term, UnreadableError, subterm
from lz_compile.passes.loops.recurrence.step_form import StepForm

Reads = Literal["after", "before"]


_NEW = "state after the step"


def state_reads(form: StepForm, state: int, whole: IndexSum, wanted: Sequence[fx.Node]) -> tuple[list[RawRead], Reads]:
    """Every value as a read of the state after the step; if that does not work, of the one before."""
    atom = form.state_atom(state)
    plain = [_before(form, atom, node) for node in wanted]
    is_before = all(read is not None and not read.rest.terms for read in plain)
    if wanted and is_before:
        return [read for read in plain if read is not None], "before"
    after = [_after(form, state, whole, node) for node in wanted]
    if all(read is not None for read in after):
        return [read for read in after if read is not None], "after"
    if all(read is not None for read in plain):
        return [read for read in plain if read is not None], "before"
    lost = next(node for node, read in zip(wanted, plain, strict=True) if read is None)
    why = form.reasons.get(lost, "it is no sum of products of the state's elements")
    raise RefusedError("READ_UNKNOWN", f"{lost.name} is read in a way that has no form: {why}", "read by a query")


@dataclass(frozen=True)
class RawRead:
    """A value as ``terms`` (query, whose summed indices of the state have their places) and ``rest``."""

    node: fx.Node
    terms: tuple[tuple[Term, float], ...]
    summed: frozenset[int]
    extras: tuple[int, ...]
    places: tuple[int, ...]
    rest: IndexSum


def _before(form: StepForm, atom: Atom, node: fx.Node) -> RawRead | None:
    value = form.values.get(node)
    return None if value is None else _raw(node, value, atom)


def _after(form: StepForm, state: int, whole: IndexSum, node: fx.Node) -> RawRead | None:
    """As a read of the new state, or of something that can be taken for it where it is looked at."""
    atom, old = Atom(_NEW, "state"), form.state_atom(state)
    new, value = form.step.carried[state], form.values.get(node)
    size = new.meta["val"].numel()
    inner = [each for each in reversed(needed([node], ())) if each in form.values and each is not new]
    like = [each for each in inner if form.home[each] == form.home[new] and each.meta["val"].numel() == size]
    for candidate in [new, *(each for each in like if each not in form.step.states)]:
        found = form.with_atom(candidate, atom, node)
        if found is None or old in found.atoms or atom not in found.atoms:
            continue
        try:
            is_same = candidate is new or (value is not None and substituted(found, atom, whole) == value)
        except UnreadableError:
            continue
        if is_same:
            return _raw(node, found, atom)
    return None


def _raw(node: fx.Node, value: IndexSum, atom: Atom) -> RawRead | None:
    """A value as a read; None where its products look at the state in different ways."""
    terms: list[tuple[Term, float]] = []
    rest: dict[Term, float] = {}
    layouts: set[tuple[tuple[int, int], ...]] = set()
    rank = 0
    for term, number in value.terms.items():
        own = next((factor for factor in term.factors if factor.atom == atom), None)
        if own is None:
            rest[term] = number
            continue
        rank = len(own.indices)
        layouts.add(tuple((index, place) for place, index in enumerate(own.indices) if index >= 0))
        if len(set(own.indices)) != rank:
            return None
        terms.append((term, number))
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    extras = [index for index in range(len(value.sizes)) if index not in dict(layout)]
    places = {**dict(layout), **{index: rank + position for position, index in enumerate(extras)}}
    found = []
    for term, number in terms:
        own = next(factor for factor in term.factors if factor.atom == atom)
        summed = {index: place for place, index in enumerate(own.indices) if index < 0}
        found.append((subterm(term, term.without([own]).factors, {**places, **summed}), number))
    return RawRead(
        node,
        tuple(found),
        frozenset(range(rank)) - {place for _, place in layout},
        tuple(value.sizes[index] for index in extras),
        tuple(places[index] for index in range(len(value.sizes))),
        IndexSum(value.dims, rest),
    )
