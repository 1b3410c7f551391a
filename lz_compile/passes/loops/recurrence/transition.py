"""What one state becomes in a step, where that is affine: factors, rank-one updates, a summand, and what is read.

    S[k,v] <- decay[k,v] S[k,v] + sum of left[k] (right[v] - sum over k' of erase[k'] S[k',v]) + drive[k,v]
    y[q,v]  = sum over k of query[q,k] S[k,v]

Every index of the state has one of three roles. *Keys* are those that an update or a read sums over, *values* are those that
nothing but decay, right and drive have, and the others are the *batch*, each element of which is a recurrence of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch import fx

from lz_compile.ground.sizes import Size, product
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import needed
from lz_compile.passes.loops.recurrence.index_sum import Dims, IndexSum, substituted
from lz_compile.passes.loops.recurrence.index_terms import (
    IDENTITY,
    Atom,
    Factor,
    Term,
    UnreadableError,
    connected,
    subterm,
)
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_rules import Product, is_curved, paired, products_of, shape_of

_MAX_RANK = 8
#: More updates than this that nothing erases are one dense summand.
_MAX_WRITES = 4


#: An operand of a transition by its name here, and the place of its update or read among those.
Role: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class Update:
    """``left (right - erase S)``; what is None is zero."""

    left: IndexSum
    right: IndexSum | None
    erase: IndexSum | None


@dataclass(frozen=True)
class Read:
    """``sum of query * S``, plus ``rest``.

    The query has the state's indices and then ``extras`` of its own. ``places`` are, for every index of the result, that
    among the query's; ``query`` None is the state itself. ``drops`` is one where a condition drops the state, else zero.
    """

    node: fx.Node
    query: IndexSum | None
    extras: tuple[Size, ...]
    places: tuple[int, ...]
    rest: IndexSum
    drops: IndexSum | None = None


@dataclass(frozen=True)
class Transition:
    """A state's step; operands have the indices of the state, ``space`` their sizes. ``shape`` is that of the state.

    ``drops`` is one where a condition drops the state, else zero (None: none does). ``leaks`` are what operands leave out
    under conditions that must be finite all the same: a product with zero is NaN otherwise.
    """

    state: int
    space: tuple[Size, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    decay: IndexSum
    updates: tuple[Update, ...]
    drive: IndexSum | None
    reads: tuple[Read, ...] = ()
    mode: Reads = "after"
    shape: tuple[Size, ...] = ()
    drops: IndexSum | None = None
    leaks: Mapping[Role, IndexSum] = field(default_factory=dict)

    @property
    def batch(self) -> tuple[int, ...]:
        """The other indices."""
        return tuple(i for i in range(len(self.space)) if i not in self.keys + self.values)

    def sums(self) -> Iterator[IndexSum]:
        """Everything that is multiplied or added."""
        yield from self.operands()
        yield from (read.rest for read in self.reads)

    def operands(self) -> Iterator[IndexSum]:
        """What the op is given, which is all that it knows of sizes: not what is added to its results."""
        yield self.decay
        for update in self.updates:
            yield from (part for part in (update.left, update.right, update.erase) if part is not None)
        if self.drive is not None:
            yield self.drive
        yield from (read.query for read in self.reads if read.query is not None)


def transition_of(form: StepForm, component: int, wanted: Sequence[fx.Node]) -> Transition:
    """What the one state of a component becomes, and how the values ``wanted`` of the step are read from it.

    Raises:
        RefusedError: there are several states, the step is not affine, or it has a structure that the op does not.
    """
    states = form.components[component]
    state = states[0]
    step = form.step
    new = step.carried[state]
    _check_affine(form, component)
    if len(states) > 1:
        names = ", ".join(step.names[step.states[each]] for each in states)
        text = f"the states {names} depend on each other"
        raise RefusedError("STATES_COUPLED", text, "carry one state, or update one from the other in one direction")
    atom, whole = form.state_atom(state), form.values[new]
    space = whole.sizes
    if whole.dims != form.values[step.states[state]].dims:
        raise RefusedError("STATE_CUT", "the state is cut in other pieces than it is carried in", "reshape it outside")
    split = _split(whole, atom)
    reads, mode = state_reads(form, state, whole, wanted)
    return replace(_joined(state, space, split, reads, mode), shape=whole.shape)


def _check_affine(form: StepForm, component: int) -> None:
    step, states = form.step, form.components[component]
    carried = [step.carried[each] for each in states]
    for state, node in zip(states, carried, strict=True):
        if step.states[state].meta["val"].is_complex():
            text = f"the state {step.names[step.states[state]]} holds complex numbers"
            raise RefusedError("COMPLEX_STATE", text, "carry its real and imaginary parts as two states")
        if not step.states[state].meta["val"].is_floating_point():
            text = f"the state {step.names[step.states[state]]} holds no real numbers"
            raise RefusedError("NOT_AFFINE", text, "keep counters out of the state")
        if node not in form.values:
            inner = [each for each in needed([node], ()) if each in form.reasons]
            multiple = next((each for each in inner if each.name in form.multiples), None)
            if multiple is not None:
                text = f"{multiple.name} multiplies the state by a symbolic size"
                raise RefusedError("STEP_SIZES", text, "make that size static, or multiply by a tensor")
            curved = [each for each in inner if is_curved(each)]
            first = next((form.reasons[each] for each in [*curved, *inner]), "something without a form")
            text = f"the step is not affine in its state: {first}"
            raise RefusedError("NOT_AFFINE", text, "only products, sums and masks of the state can be run in parallel")


# ---- the update ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Split:
    """``decay``: factors of the state itself; ``mixing``: products of what is written and what is read for it; the rest."""

    space: tuple[Size, ...]
    keys: frozenset[int]
    decay: Mapping[Term, float]
    mixing: tuple[tuple[Term, Term, float], ...]
    constant: Mapping[Term, float]


def _split(whole: IndexSum, atom: Atom) -> _Split:
    decay: dict[Term, float] = {}
    constant: dict[Term, float] = {}
    mixing: list[tuple[Term, Term, float]] = []
    keys: set[frozenset[int]] = set()
    for term, number in whole.terms.items():
        own = next((factor for factor in term.factors if factor.atom == atom), None)
        if own is None:
            constant[term] = number
            continue
        summed = _summed(own, range(len(whole.sizes)))
        rest = term.without([own])
        if not summed:
            decay[subterm(rest, rest.factors)] = number
            continue
        keys.add(frozenset(summed.values()))
        inner = connected(rest, set(summed))
        outer = [factor for factor in rest.factors if factor not in inner]
        if any(index in summed.values() for factor in inner for index in factor.indices):
            text = "a full matrix multiplies the state: its transition is dense"
            raise RefusedError("DENSE_TRANSITION", text, "a diagonal and few rank-one terms can be run in parallel")
        mixing.append((subterm(rest, outer), subterm(rest, inner, summed), number))
    if len(keys) > 1:
        text = "the state is multiplied from both sides"
        raise RefusedError("TWO_SIDED_TRANSITION", text, "multiply the state from one side only")
    return _Split(whole.sizes, next(iter(keys), frozenset()), decay, tuple(mixing), constant)


def _summed(own: Factor, places: Iterable[int]) -> dict[int, int]:
    """The summed indices of a state, with their places in it; RefusedError where elements move to other places."""
    places = list(places)
    found = {index: place for place, index in enumerate(own.indices) if index < 0}
    moved = len(own.indices) != len(places) or any(i not in (p, *found) for p, i in enumerate(own.indices))
    if moved or len(found) != sum(index < 0 for index in own.indices):
        text = "elements of the state move to other places (a transpose, a diagonal or a shift)"
        raise RefusedError("STATE_MOVES", text, "keep every element of the state in its place")
    return found


# ---- roles ---------------------------------------------------------------------------------------------------------


def _joined(state: int, space: tuple[Size, ...], split: _Split, raw: Sequence[RawRead], mode: Reads) -> Transition:
    keys = split.keys or _read_keys(raw) or (frozenset() if raw else _written_keys(split, len(space)))
    dims = tuple((size,) for size in space)
    reads = tuple(_read(each, keys, dims) for each in raw)
    touched = {i for first, second, _ in split.mixing for i in first.indices | second.indices}
    touched |= {i for read in reads if read.query is not None for term in read.query.terms for i in term.indices}
    free = [i for i in range(len(space)) if i not in keys | touched]
    values = tuple(free[-1:])
    erasures = products_of(split.mixing, dims)
    constant = IndexSum(dims, dict(split.constant))
    written, dense = _written(constant, keys, frozenset(values))
    writes = products_of(written, dims)
    if len(writes) > _MAX_WRITES:
        writes, dense = [], dict(split.constant)
    if len(erasures) > _MAX_RANK:
        text = f"{len(erasures)} rank-one terms multiply the state"
        raise RefusedError("DENSE_TRANSITION", text, f"up to {_MAX_RANK} can be run in parallel")
    updates = tuple(Update(*each) for each in paired(erasures, writes, keys))
    drive = IndexSum(dims, dense) if dense else None
    return Transition(
        state, space, tuple(sorted(keys)), values, IndexSum(dims, dict(split.decay)), updates, drive, reads, mode
    )


def _read_keys(raw: Sequence[RawRead]) -> frozenset[int]:
    """What reads sum over, where all of them do so alike."""
    found = {read.summed for read in raw}
    if len(found) > 1:
        raise RefusedError("READS_DIFFER", "reads sum over different indices of the state", "read it in one way")
    return next(iter(found), frozenset())


def _written_keys(split: _Split, rank: int) -> frozenset[int]:
    """Of a state that nothing reads, the index before the last if what is written are outer products over it."""
    for value in reversed(range(rank)):
        for key in reversed(range(rank)):
            sides = [(key in f.indices, value in f.indices) for term in split.constant for f in term.factors]
            is_outer = (True, True) not in sides and {(True, False), (False, True)} <= set(sides)
            if key != value and is_outer:
                return frozenset({key})
    return frozenset()


def _read(raw: RawRead, keys: frozenset[int], dims: Dims) -> Read:
    sizes = (*(dim[0] for dim in dims), *raw.extras)
    terms: dict[Term, float] = {}
    for term, number in raw.terms:
        terms[term] = terms.get(term, 0.0) + number
    query = IndexSum(tuple((size,) for size in sizes), terms)
    if raw.summed == keys:
        is_plain = not keys and not raw.extras and query.terms == {Term(): 1.0}
        return Read(raw.node, None if is_plain else query, raw.extras, raw.places, raw.rest)
    if raw.summed:
        raise RefusedError("READS_DIFFER", "a read sums over other indices than the update", "read it along the keys")
    extras = (*raw.extras, *(dims[key][0] for key in sorted(keys)))
    moved = {key: len(dims) + len(raw.extras) + position for position, key in enumerate(sorted(keys))}
    same = tuple(Factor(IDENTITY, (key, place)) for key, place in moved.items())
    whole = IndexSum(
        (*query.dims, *((dims[key][0],) for key in sorted(keys))),
        {replace(term, factors=tuple(sorted((*term.factors, *same)))): number for term, number in terms.items()},
    )
    return Read(raw.node, whole, extras, tuple(moved.get(place, place) for place in raw.places), raw.rest)


def _written(
    constant: IndexSum, keys: frozenset[int], values: frozenset[int]
) -> tuple[list[Product], dict[Term, float]]:
    """What is written as products of a part with keys and one with values; what does not come apart so is dense."""
    if not keys:
        return [], dict(constant.terms)
    outer: list[Product] = []
    dense: dict[Term, float] = {}
    for term, number in constant.terms.items():
        right = [factor for factor in term.factors if values & set(factor.indices)]
        indices = {index for factor in right for index in factor.indices if index < 0}
        right += [factor for factor in connected(term, indices) if factor not in right]
        if any(keys & set(factor.indices) for factor in right):
            dense[term] = number
            continue
        left = [factor for factor in term.factors if factor not in right]
        outer.append((subterm(term, left), subterm(term, right), number))
    return outer, dense


# ---- what is read ----------------------------------------------------------------------------------------------------


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
    extras: tuple[Size, ...]
    places: tuple[int, ...]
    rest: IndexSum


def _before(form: StepForm, atom: Atom, node: fx.Node) -> RawRead | None:
    value = form.values.get(node)
    return None if value is None else _raw(node, value, atom)


def _after(form: StepForm, state: int, whole: IndexSum, node: fx.Node) -> RawRead | None:
    """As a read of the new state, or of something that can be taken for it where it is looked at."""
    atom, old = Atom(_NEW, "state"), form.state_atom(state)
    new, value = form.step.carried[state], form.values.get(node)
    size = product(shape_of(new))
    inner = [each for each in reversed(needed([node], ())) if each in form.values and each is not new]
    like = [each for each in inner if form.home[each] == form.home[new] and product(shape_of(each)) == size]
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
