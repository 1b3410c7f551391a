"""A numerical check of what was read of a step: one step in float64, on random states, operands and masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.walks import needed
from lz_compile.passes.loops.recurrence.index_sum import IndexSum
from lz_compile.passes.loops.recurrence.index_terms import Atom
from lz_compile.passes.loops.recurrence.index_values import Source, Values
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.transition import Transition
from lz_compile.passes.proof.running import run

#: States with more elements than this are left to the proof of the rewrite.
_LARGEST = 1 << 22
_TOLERANCE = 1e-9


def check(form: StepForm, transition: Transition) -> None:
    """Compare one step by the transition with one as it is written.

    Raises:
        RefusedError: they differ, or a size is not known.
    """
    state = form.step.states[transition.state]
    for node in form.step.states:
        _check_sizes(node)
    if state.meta["val"].numel() > _LARGEST:
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
    known = {Atom(node.name, kind): value for node, value in given.items() for kind in ("given", "mask")}
    ours = _step(transition, known, given[state].reshape(transition.space))
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


def _step(transition: Transition, known: Mapping[Atom, torch.Tensor], state: torch.Tensor) -> list[torch.Tensor]:
    """The state after a step, and what is read, by the formula alone."""
    rank = len(transition.space)

    def value(whole: IndexSum, sizes: Iterable[int] = transition.space) -> torch.Tensor:
        sizes = tuple(sizes)
        values = Values(lambda atom: Source(known[atom], False), dict(enumerate(sizes)), torch.float64, state)
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
    found = [new.expand(transition.space)]
    looked = new if transition.mode == "after" else state
    for read in transition.reads:
        sizes = (*transition.space, *read.extras)
        whole = looked.expand(transition.space).reshape((*transition.space, *(1 for _ in read.extras)))
        if read.query is not None:
            whole = whole * value(read.query, sizes)
        keys = [key for key in transition.keys if key not in read.places]
        whole = whole.expand(sizes).sum(keys, keepdim=True) if keys else whole.expand(sizes)
        order = [*read.places, *(index for index in range(rank + len(read.extras)) if index not in read.places)]
        moved = whole.permute(order).reshape([sizes[place] for place in read.places])
        found.append(moved + value(read.rest, read.rest.sizes))
    return found


def _check_sizes(node: fx.Node) -> None:
    if any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape):
        text = f"{told(node)} has a size that stays a symbol while the step is read"
        raise RefusedError("SIZE_UNKNOWN", text, "mark that dimension as static (torch._dynamo.mark_static)")


def _random(node: fx.Node, generator: torch.Generator, *, is_mask: bool) -> torch.Tensor:
    _check_sizes(node)
    example = node.meta["val"]
    value = torch.randn(tuple(example.shape), generator=generator, dtype=torch.float64)
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
