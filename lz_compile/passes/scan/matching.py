"""Every recurrence of a graph as a match: what its operands and results are there, and how it is tried.

Of what looks like one and is none, the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, product, shape_of
from lz_compile.lowering.ops.scan import ScanAttrs
from lz_compile.passes.formula.axes import Axis, Dims, fresh
from lz_compile.passes.formula.expressions import is_constant
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError, told, where_of
from lz_compile.passes.graph.view import known_tensor, read, tensor_of
from lz_compile.passes.loops.recurrence.index_sum import IndexSum
from lz_compile.passes.loops.recurrence.index_terms import Atom
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_sizes import StepSizes
from lz_compile.passes.loops.recurrence.step_trace import ScanCall, is_filled
from lz_compile.passes.loops.recurrence.transition import Transition
from lz_compile.passes.proof.trial_run import may_be_special
from lz_compile.passes.rewriting.core import wants_grad
from lz_compile.passes.rewriting.match import Driver, Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.scan.calls import scan_calls
from lz_compile.passes.scan.emitter import Given, ScanEmitter
from lz_compile.passes.scan.near_misses import chunked_forms
from lz_compile.passes.scan.prefix_emitter import match_of
from lz_compile.passes.scan.recogniser import OP, Loops, without_steps
from lz_compile.passes.scan.text import text_of


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every scan in ``graph`` whose step has a structure that the op knows; of the others, why it has none."""
    driver, loops = Driver(OP), Loops(effects)
    for call in loops.calls(graph):
        yield from driver.at(call.node, _matched, call, loops)
    yield from scan_calls(graph, effects)
    known: set[fx.Node] = set()
    for found in without_steps(graph, effects):
        if isinstance(found, PrefixScan):
            yield match_of(found, effects)
        else:
            yield found
        known.update(found.core if isinstance(found, PrefixScan) else (found.node,))
    yield from chunked_forms(graph, effects, known)


def _matched(_anchor: fx.Node, call: ScanCall, loops: Loops) -> Match:
    """The match of one loop.

    Raises:
        RefusedError: it has no structure that the op knows, nothing differs from step to step, or a gradient under a
            condition may be NaN.
    """
    form, transition, results = loops.read(call)
    emitter, step, ambient = _emitter(call, form, transition, results), form.step, loops.effects.ambient(call.node)
    given = emitter.given
    time = Axis(as_size(known_tensor(call.xs[0]).shape[0]))
    inputs = {each.node: _dims(each.node, time if each.over_time else None) for each in given.values()}
    unused = {node: _dims(node, time) for node in call.xs}
    unused |= {node: _dims(node, None) for node in call.given if tensor_of(node) is not None}
    inputs = {**unused, **inputs}
    interior: dict[fx.Node, Dims] = {}
    for node in call.init:
        if emitter.first is None:
            interior.update((each, _dims(each, None)) for each in _origins(node))
        else:
            inputs[node] = _dims(node, None)
    ordered = sorted(emitter.outputs)
    dims = {node: _dims(node, time if node not in emitter.final else None) for node in ordered}
    needs_grad = wants_grad(ambient, inputs)
    if needs_grad:
        _refuse_special(transition, given)
    axes = {axis for each in (*inputs.values(), *interior.values(), *dims.values()) for dim in each for axis in dim}
    scales, rows = _scales(transition, given, step.sizes), _poisoned(transition, given, time)
    known = {node: Input(each, scale=scales.get(node, 1.0), rows=rows.get(node, ())) for node, each in inputs.items()}
    formula = text_of(transition, {atom: step.names[form.atoms[atom]] for atom in given})
    output, *others = emitter.outputs
    return Match(
        OP,
        Site(
            output=output,
            output_dims=dims[output],
            core=(call.node, *(node for node in ordered if node is not output), output),
            ambient=ambient,
            where=where_of(call.node),
            read=interior,
            extra_outputs=tuple(others),
        ),
        Found(emitter.attrs, emitter.facts(time.size, needs_grad), known, {}, emitter, formula),
        Trial(pinned=frozenset(axes - {time}), masked_rows_count=False),
    )


def _emitter(call: ScanCall, form: StepForm, transition: Transition, results: dict[int, list[fx.Node]]) -> ScanEmitter:
    """Where the operands and results of a transition are in the graph."""
    step = form.step
    outer = dict(zip((*step.slices, *step.given), (*call.xs, *call.given), strict=True))
    known = {atom for whole in transition.sums() for atom in whole.atoms if atom.kind in ("given", "mask")}
    atoms = {atom: form.atoms[atom] for atom in sorted(known)}
    given = {atom: Given(outer[node], node in step.slices, shape_of(node.meta["val"])) for atom, node in atoms.items()}
    driving = {atom for whole in transition.operands() for atom in whole.atoms if atom in given}
    if not any(given[atom].over_time for atom in driving):
        raise RefusedError("NOTHING_OVER_TIME", "every step does the same", "a power of one matrix is no scan")
    places = {read.node: index for index, read in enumerate(transition.reads)}
    reads = [
        (node, places[result])
        for index, result in enumerate(step.results)
        for node in results.get(len(step.states) + index, ())
    ]
    first = None if is_filled(call.init[0], 0) and _is_spanned(transition) else call.init[0]
    return ScanEmitter(
        transition=transition,
        given=given,
        first=first,
        final=tuple(results.get(0, ())),
        reads=tuple(reads),
        attrs=_attributes(form, transition),
        sizes=step.sizes,
        places=((first, 0), *((node, 1) for node in call.xs), *((node, 0) for node in call.given)),
    )


def _poisoned(transition: Transition, given: Mapping[Atom, Given], time: Axis) -> dict[fx.Node, tuple[Axis, ...]]:
    """What is NaN in the first step of a proof, where a condition drops the state: a product would keep the NaN."""
    if transition.drops is None:
        return {}
    written = (transition.drive, *(update.right for update in transition.updates))
    factors = (factor for each in written if each is not None for term in each.terms for factor in term.of("given"))
    nodes = dict.fromkeys(given[factor.atom].node for factor in factors if given[factor.atom].over_time)
    return {node: (time,) for node in nodes if known_tensor(node).is_floating_point()}


def _refuse_special(transition: Transition, given: Mapping[Atom, Given]) -> None:
    """Refuse a factor under a condition that may be NaN or infinite where it is not selected.

    The gradient of ``where(c, a * s, s)`` is then NaN there (zero times ``a``), and that of ``where(c, a, 1) * s`` is not.
    """
    for whole in transition.sums():
        for term in whole.terms:
            factors = term.of("given")
            if not term.of("mask") or len(factors) < (2 if whole is transition.drive else 1):
                continue
            node = next(filter(may_be_special, (given[each.atom].node for each in factors)), None)
            if node is not None:
                text = (
                    f"{told(node)} is multiplied under a condition, and may be NaN or infinite where it does not hold"
                )
                raise RefusedError("GRADIENT_NAN", text, "put torch.where around what it is computed from")


def _origins(node: fx.Node) -> Iterator[fx.Node]:
    """What a tensor that is filled with a number is a copy or view of, down to the call that fills it."""
    while tensor_of(node) is not None:
        yield node
        call = read(node)
        if call is None or is_constant(call) or not isinstance(call.input, fx.Node):
            return
        node = call.input


def _scales(transition: Transition, given: Mapping[Atom, Given], sizes: StepSizes) -> dict[fx.Node, float]:
    """For keys that erase: their length is about one, as that of the keys of models is, or a state would grow."""
    size = sizes.hint(product(transition.space[key] for key in transition.keys))
    sums = [part for u in transition.updates if u.erase is not None for part in (u.left, u.erase)]
    factors = {each for whole in sums for term in whole.terms for each in term.factors if each.atom in given}
    keyed = {each.atom for each in factors if set(transition.keys) & set(each.indices)}
    decays = transition.decay.atoms
    return {given[atom].node: size**-0.5 for atom in sorted(keyed - decays)}


def _attributes(form: StepForm, transition: Transition) -> ScanAttrs:
    state = form.step.states[transition.state].meta["val"].dtype
    values = [node.meta["val"] for node in form.step.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    compute = state
    for value in values:
        if value.is_floating_point():
            compute = torch.promote_types(compute, value.dtype)
    compute = torch.promote_types(compute, torch.float32)
    kinds = {read.node.meta["val"].dtype for read in transition.reads}
    is_last = len(kinds) == 1 and not any(read.rest.terms for read in transition.reads)
    return ScanAttrs(
        reads=transition.mode,
        erases=any(update.erase is not None for update in transition.updates),
        compute_dtype=compute,
        out_dtype=kinds.pop() if is_last else compute,
        state_dtype=state,
        drops=transition.drops is not None,
    )


def _is_spanned(transition: Transition) -> bool:
    """Whether the operands have every index of the state, so that its size is known without it."""
    sums: list[IndexSum] = [whole for whole in transition.operands() if whole.terms]
    return {i for whole in sums for term in whole.terms for i in term.indices} >= set(range(len(transition.space)))


def _dims(node: fx.Node, time: Axis | None) -> Dims:
    own = fresh(shape_of(known_tensor(node)))
    return own if time is None else ((time,), *own[1:])
