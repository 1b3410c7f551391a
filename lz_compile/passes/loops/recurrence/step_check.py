"""A numerical check of what was read of a step: one step in float64, on random states, operands and masks.

As sums of products, ``where(done, 0, h)`` and ``h * (1 - done)`` are the same; only the latter keeps NaN. So a step of which
something vanishes under conditions is run as it is written, with NaN there, once for each way in which the conditions hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import Size
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import needed
from lz_compile.passes.loops.recurrence.index_sum import Dims, IndexSum, mapped
from lz_compile.passes.loops.recurrence.index_terms import Atom, Factor, Term, subterm
from lz_compile.passes.loops.recurrence.index_values import Source, Values, masks_of, ways_of, where_held
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_rules import shape_of
from lz_compile.passes.loops.recurrence.step_sizes import elements, traced_shape
from lz_compile.passes.loops.recurrence.transition import Read, Role, Transition
from lz_compile.passes.proof.running import agree, run

#: States with more elements than this are left to the proof of the rewrite.
_LARGEST = 1 << 22


def check(form: StepForm, transition: Transition) -> None:
    """Compare one step by the transition with one as it is written.

    Raises:
        RefusedError: they differ.
    """
    state = form.step.states[transition.state]
    if elements(state) > _LARGEST:
        return
    outputs = [form.step.carried[transition.state], *(read.node for read in transition.reads)]
    generator = torch.Generator().manual_seed(0)
    given: dict[fx.Node, torch.Tensor] = {}
    for atom in sorted({atom for whole in transition.sums() for atom in whole.atoms}):
        if atom.kind in ("state", "identity"):
            continue
        given[form.atoms[atom]] = _random(form.atoms[atom], generator, is_mask=atom.kind == "mask")
    given[state] = _random(state, generator, is_mask=False)
    with isolated():
        written = _run(outputs, given, generator)
    known = {
        Atom(node.name, kind): Source(value, False, shape_of(node))
        for node, value in given.items()
        for kind in ("given", "mask")
    }
    ours = _step(transition, known, given[state], form.step.sizes.hint)
    for node, value in zip(outputs, ours, strict=True):
        expected = written[node].reshape(value.shape)
        scale = 1 + expected.abs().max()
        if not agree(value / scale, expected / scale):
            error = float((value - expected).abs().max())
            text = f"{told(node)} as it was read is off by {error:.3g}"
            raise RefusedError("STEP_MISREAD", text, "this is a fault of the recogniser: please report it")


def poisoned(form: StepForm, node: fx.Node, held: Mapping[Atom, bool], nodes: Iterable[fx.Node]) -> torch.Tensor:
    """A value of the step as it is written, from states or operands of NaN, where conditions hold or do not."""
    generator = torch.Generator().manual_seed(0)
    given = {
        form.atoms[atom]: _random(form.atoms[atom], generator, is_mask=True).fill_(on) for atom, on in held.items()
    }
    given |= {each: _random(each, generator, is_mask=False).fill_(torch.nan) for each in nodes}
    with isolated():
        found: torch.Tensor = _run([node], given, generator)[node]
    return found


def _step(
    transition: Transition, known: Mapping[Atom, Source], state: torch.Tensor, hint: Callable[[Size], int]
) -> list[torch.Tensor]:
    """The state after a step, and what is read, by the formula alone, at the sizes that ``hint`` gives."""
    rank, space = len(transition.space), list(map(hint, transition.space))
    state = state.reshape(space)

    def value(whole: IndexSum, sizes: Iterable[Size] = transition.space) -> torch.Tensor:
        sizes = tuple(sizes)
        values = Values(known.__getitem__, dict(enumerate(sizes)), torch.float64, state, hint)
        found: torch.Tensor = values.of(whole, [(index,) for index in range(len(sizes))])
        return found

    new = value(transition.decay) * state
    for update in transition.updates:
        inner = torch.zeros((), dtype=torch.float64) if update.right is None else value(update.right)
        if update.erase is not None:
            inner = inner - (value(update.erase) * state).sum(transition.keys, keepdim=True)
        new = new + value(update.left) * inner
    if transition.drive is not None:
        new = new + value(transition.drive)
    found = [new.expand(space)]
    looked = new if transition.mode == "after" else state
    for read in transition.reads:
        sizes = (*transition.space, *read.extras)
        extents = list(map(hint, sizes))
        whole = looked.expand(space).reshape((*space, *(1 for _ in read.extras)))
        if read.query is not None:
            whole = whole * value(read.query, sizes)
        keys = [key for key in transition.keys if key not in read.places]
        whole = whole.expand(extents).sum(keys, keepdim=True) if keys else whole.expand(extents)
        order = [*read.places, *(index for index in range(rank + len(read.extras)) if index not in read.places)]
        moved = whole.permute(order).reshape([extents[place] for place in read.places])
        found.append(moved + value(read.rest, read.rest.sizes))
    return found


def _random(node: fx.Node, generator: torch.Generator, *, is_mask: bool) -> torch.Tensor:
    example = node.meta["val"]
    value = torch.randn(traced_shape(node), generator=generator, dtype=torch.float64)
    if not is_mask:
        return value
    return value > 0 if example.dtype == torch.bool else (value > 0).double()


def _run(
    outputs: list[fx.Node], given: Mapping[fx.Node, torch.Tensor], generator: torch.Generator
) -> dict[fx.Node, Any]:
    """The step as it is written, in float64 on the CPU; what the transition does not depend on is random."""
    order = needed(outputs, given)
    others = [node for node in order if node.op != "call_function"]
    values = {node: _random(node, generator, is_mask=node.meta["val"].dtype == torch.bool) for node in others}
    return run(
        order,
        {**given, **values},
        adapt=lambda node, args, kwargs: (node.target, args, {name: _exact(name, x) for name, x in kwargs.items()}),
    )


def _exact(name: str, value: Any) -> Any:
    if name == "device" and value is not None:
        return torch.device("cpu")
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


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
