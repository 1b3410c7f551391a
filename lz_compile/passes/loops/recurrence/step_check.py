"""A numerical check of what was read of a step: one step in float64, on random states, operands and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import Size
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.walks import needed
from lz_compile.passes.loops.recurrence.index_sum import IndexSum
from lz_compile.passes.loops.recurrence.index_terms import Atom
from lz_compile.passes.loops.recurrence.index_values import Source, Values
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_rules import shape_of
from lz_compile.passes.loops.recurrence.step_sizes import elements, traced_shape
from lz_compile.passes.loops.recurrence.transition import Transition
from lz_compile.passes.proof.running import run

#: States with more elements than this are left to the proof of the rewrite.
_LARGEST = 1 << 22
_TOLERANCE = 1e-9


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
        if not torch.allclose(value, expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(1 + expected.abs().max())):
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
    return run(order, {**given, **values}, adapt=_exactly)


def _exactly(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return node.target, args, {name: _exact(name, value) for name, value in kwargs.items()}


def _exact(name: str, value: Any) -> Any:
    if name == "device" and value is not None:
        return torch.device("cpu")
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
