"""Recurrences that are affine in their state, in all of their spellings, and calls of ``lz.kda`` and ``lz.linear_scan``.

The anchor is a ``scan``: a loop that was one in the source, or that was rolled up again. Its step is read as algebra
(:mod:`step_form`), and what the state becomes as factors, rank-one updates and a summand (:mod:`transition`).

Which kernel a call of the op selects by itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.ground.sizes import as_size
from lz_compile.lowering.ops import scan as scan_op
from lz_compile.lowering.ops.scan import DIMS, RESULTS, Operands, ScanAttrs
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, mutated, told
from lz_compile.passes.graph.view import reached, tensor_of, where_of
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.loops.recurrence.outer_products import running_sums, with_reads
from lz_compile.passes.loops.recurrence.plan import Part, Plan
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan, prefix_scans
from lz_compile.passes.loops.recurrence.prefix_scan_emitter import match_of
from lz_compile.passes.loops.recurrence.prefix_scan_logs import log_scans
from lz_compile.passes.loops.recurrence.states import Readings
from lz_compile.passes.loops.recurrence.step_check import check, with_drops
from lz_compile.passes.loops.recurrence.step_form import StepForm
from lz_compile.passes.loops.recurrence.step_trace import SCAN, ScanCall, scan_call
from lz_compile.passes.loops.recurrence.transition import Transition
from lz_compile.passes.masks.meaning import Axes, Meaning
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.rewriting.core import wants_grad
from lz_compile.passes.rewriting.match import Driver, Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, arguments_of, op_calls
from lz_compile.passes.scan.match import OP, finished


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every scan in ``graph`` whose step has a structure that the op knows; of the others, why it has none."""
    driver, readings = Driver(OP), Readings(follows_masks=False)
    checked: dict[int, Transition] = {}
    for call in (scan_call(node) for node in graph.nodes if node.target is SCAN and node.users):
        if call is not None:
            yield from driver.at(call.node, _match, call, effects, readings, checked)
    yield from scan_calls(graph, effects)
    known: set[fx.Node] = set()
    for found in (*prefix_scans(graph, effects), *log_scans(graph, effects)):
        if isinstance(found, PrefixScan):
            yield match_of(with_reads(found, effects), effects)
            known.update(found.core)
        else:
            yield found
    for scan in running_sums(graph, effects, frozenset(known)):
        yield match_of(scan, effects) if isinstance(scan, PrefixScan) else scan
        known.add(scan.output if isinstance(scan, PrefixScan) else scan.node)
    yield from chunked_forms(graph, effects, known)


def _match(
    _anchor: fx.Node, call: ScanCall, effects: Effects, readings: Readings, checked: dict[int, Transition]
) -> Match:
    """The match of one scan; ``checked`` are the transitions that were compared with their steps already, by identity.

    Raises:
        RefusedError: its step has no structure that the op knows.
    """
    results = call.results()
    refuse_transformed(effects.ambient(call.node))
    _check_written(call.node, call.operands, max(call.node.users), effects)
    plan = readings.plan(call, effects.ambient(call.node))
    transition = _only(plan)
    if id(transition) not in checked:
        check(plan.form, transition)
        checked[id(transition)] = with_drops(plan.form, transition)
    return finished(call, effects, plan.form, checked[id(transition)], results)


def _only(plan: Plan) -> Transition:
    """The transition of a loop that is nothing else."""
    for part in plan.parts:
        if part.reason is not None:
            raise part.reason
    transitions = [part.transition for part in plan.parts if part.transition is not None]
    if plan.is_apart or len(transitions) != 1:
        text = f"the loop does more than one recurrence: {_described(plan.parts, plan.form)}"
        raise RefusedError("LOOP_NOT_APART", text, "compute what needs no state before or after the loop")
    return transitions[0]


def _described(parts: list[Part], form: StepForm) -> str:
    names = [form.step.names[form.step.states[state]] for part in parts for state in part.states]
    return f"its states are {', '.join(names)}" if names else "it has no state"


def _check_written(scan: fx.Node, operands: Iterable[fx.Node], last: fx.Node, effects: Effects) -> None:
    for node in operands:
        writer = effects.overwritten_after(node, scan, last)
        if writer is not None:
            raise mutated(f"{told(node)} is overwritten by {told(writer)} before the results are taken")


_EXPONENTIALS = frozenset({"exp", "exp2"})
_SOLVERS = frozenset({"solve_triangular", "inverse", "solve"})
_THROUGH = frozenset(
    {"cumsum", "getitem", "slice", "pad", "cat", "stack", "masked_fill", "where", "tril", "triu", "select"}
)
#: Calls that are followed from one cumulative sum.
_REACH = 200


def chunked_forms(graph: fx.Graph, effects: Effects, known: Collection[fx.Node]) -> Iterator[NearMiss]:
    """One near miss for each such recurrence; those that read what is ``known`` to be another op are none."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        call, tensor = effects.calls[node], tensor_of(node)
        if call is None or call.name != "cumsum" or tensor is None or not tensor.is_floating_point():
            continue
        follows = _followed(node, effects)
        names = {call.name for call in map(effects.calls.__getitem__, follows) if call is not None}
        is_product = bool(names & contraction.PRODUCTS or names & _SOLVERS)
        if names & _EXPONENTIALS and is_product and follows.isdisjoint(known):
            if seen.isdisjoint(follows):
                text = "it is computed in chunks already, with decays as exponentials of cumulative sums"
                edit = "write the recurrence as a loop over tokens to have it run by a kernel"
                yield NearMiss("scan", node, Reason("CHUNKED_ALREADY", text), edit, where_of(node))
            seen |= follows
    yield from _parallel_forms(graph, effects, seen)


#: What products of queries and keys pass through where they are masked and weighted, but for no softmax.
_WEIGHS = frozenset({"mul", "div", "masked_fill", "where", "tril", "triu", "nan_to_num"})
_MASKS = frozenset({"tril", "triu"})


def _parallel_forms(graph: fx.Graph, effects: Effects, told_already: Collection[fx.Node]) -> Iterator[NearMiss]:
    """Recurrences as products of all queries with all earlier keys, weighted by decays and multiplied by values."""
    for node in graph.nodes:
        call, tensor = effects.calls[node], tensor_of(node)
        if call is None or call.name not in contraction.PRODUCTS or tensor is None or node in told_already:
            continue
        if tensor.dim() > 2 and any(_is_masked_product(each, effects) for each in node.all_input_nodes):
            text = "products with all earlier keys are masked, weighted, and meet values without a softmax"
            edit = "write it as a loop over tokens, state = decay * state + key * value, to have it run by a kernel"
            yield NearMiss("scan", node, Reason("PARALLEL_FORM", text), edit, where_of(node))


def _is_masked_product(node: fx.Node, effects: Effects) -> bool:
    """Whether a value is one product of two computed tensors that is masked by what lies above or below a diagonal."""
    products, is_masked, weights, seen, queue = set[fx.Node](), False, set[fx.Node](), {node}, [node]
    while queue and len(seen) < _REACH:
        call = effects.calls.get(queue.pop())
        if call is None:
            continue
        if call.name in contraction.PRODUCTS:
            products.add(call.node)
            continue
        is_moved = is_cast(call) or layout.is_view(call) or layout.rearranges(call)
        if not is_moved and call.name not in _WEIGHS:
            continue
        weights |= set(call.node.all_input_nodes) - {call.input} if call.name in _WEIGHS else set()
        is_masked |= call.name in _MASKS
        behind = {call.input} if is_moved or call.name == "div" else set(call.node.all_input_nodes)
        queue += [each for each in behind - seen if isinstance(each, fx.Node)]
        seen |= behind
    (product, *rest) = products or (None,)
    operands = [] if product is None or rest else product.all_input_nodes
    if len(operands) < 2 or any(effects.calls.get(each) is None for each in operands):
        return False
    return is_masked or any(_has_diagonal(each, effects) for each in weights)


def _has_diagonal(node: fx.Node, effects: Effects) -> bool:
    """Whether a mask is made of what lies above or below a diagonal."""
    return any(effects.name(each) in _MASKS or _is_one_sided(each, effects) for each in reached([node], most=40))


def _is_one_sided(node: fx.Node, effects: Effects) -> bool:
    """Whether truth values, or their opposites, keep what lies on one side of a diagonal of the last two dimensions."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dtype != torch.bool or tensor.dim() < 2:
        return False
    *batch, query, key = (Axis(as_size(size)) for size in tensor.shape)
    dims, axes = tuple((axis,) for axis in (*batch, query, key)), Axes(tuple(batch), (), (query,), (key,))
    meanings = (Masks(effects).read(node, dims, axes, keeps=keeps) for keeps in (True, False))
    bands = [each.band for each in meanings if isinstance(each, Meaning) and each.band is not None]
    return any((band.lower is None) != (band.upper is None) for band in bands)


def _followed(node: fx.Node, effects: Effects) -> set[fx.Node]:
    """What is made of a cumulative sum of logarithms: up to products after an exponential, and what these give."""
    found: dict[fx.Node, bool] = {node: False}
    queue = [node]
    while queue and len(found) < _REACH:
        current = queue.pop(0)
        for user in current.users:
            call = effects.calls[user]
            if user in found or call is None:
                continue
            is_decay = found[current] or call.name in _EXPONENTIALS
            is_product = call.name in contraction.PRODUCTS | _SOLVERS
            passes = is_pointwise(call) or layout.is_view(call) or layout.rearranges(call) or call.name in _THROUGH
            if passes or (is_product and found[current]):
                found[user] = is_decay
                queue.append(user)
    return set(found)


_OP = "scan"
_ERASING = "S[k,v] <- decay S[k,v] + left[k] (right[v] - sum over k' of erase[k'] S[k',v])"
_PLAIN = "S[k,v] <- decay S[k,v] + left[k] right[v] + drive[k,v]"


def scan_calls(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every such call whose results are taken apart."""
    return op_calls(_OP, graph, effects, _call_match)


def _call_match(node: fx.Node, effects: Effects) -> Match:
    """The match of one call.

    Raises:
        RefusedError: its results are not taken apart, it is mapped over a dimension, or an operand is overwritten.
    """
    given, tensors, named = arguments_of(node, Operands, "out_dtype", "state_dtype")
    outputs = _outputs(node, effects, given)
    x = Operands(**tensors)
    wide = torch.promote_types(scan_op.common_dtype(x), torch.float32)
    attrs = ScanAttrs("after", "erase" in given, wide, named["out_dtype"], named["state_dtype"])
    axes = {letter: Axis(as_size(size)) for letter, size in scan_op.sizes_of(x).by_dim().items()}
    scales = _scales(given, axes["K"])
    inputs = {
        each: Input(_dims(name, tensors[name], axes), scale=scales.get(each, 1.0)) for name, each in given.items()
    }
    ambient = effects.ambient(node)
    sizes: dict[str, Any] = {name: as_size(size) for name, size in scan_op.sizes_of(x)._asdict().items()}
    needs_grad = wants_grad(ambient, given.values())
    facts = replace(scan_op.facts_of(x), **sizes, needs_grad=needs_grad)
    places = {place: tuple(axes[letter] for letter in letters) for place, letters in enumerate(RESULTS)}
    dims = {each: tuple(() if axis.size == 1 else (axis,) for axis in places[place]) for each, place in outputs.items()}
    output, *others = sorted(outputs)
    emitter = CallEmitter(given, attrs, Operands, tuple(outputs[each] for each in (output, *others)))
    formula = f"{_ERASING if attrs.erases else _PLAIN}; y[q,v] = sum over k of query[q,k] S[k,v]"
    return Match(
        _OP,
        Site(
            output=output,
            output_dims=dims[output],
            core=(node, *others, output),
            ambient=ambient,
            where=where_of(node),
            extra_outputs=tuple(others),
        ),
        Found(attrs, facts, inputs, {}, emitter, formula),
        Trial(masked_rows_count=False),
    )


def _outputs(node: fx.Node, effects: Effects, given: Mapping[str, fx.Node]) -> dict[fx.Node, int]:
    """The nodes that pick a result, with its place."""
    refuse_transformed(effects.ambient(node))
    found: dict[fx.Node, int] = {}
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            raise RefusedError("SCAN_USED_WHOLE", f"{told(user)} takes all results of a scan", "unpack them")
        found[user] = user.args[1] % 2
    read = {user: place for user, place in found.items() if user.users}
    _check_written(node, given.values(), max(read or found), effects)
    return read or found


def _dims(name: str, tensor: torch.Tensor, axes: Mapping[str, Axis]) -> Dims:
    """Every dimension of an operand is one axis, or broadcasts."""
    sizes = [as_size(size) for size in tensor.shape]
    return tuple(() if size == 1 else (axes[letter],) for letter, size in zip(DIMS[name], sizes, strict=True))


def _scales(given: Mapping[str, fx.Node], keys: Axis) -> dict[fx.Node, float]:
    """For keys that erase: their length is about one, or a state would grow."""
    size = keys.size if isinstance(keys.size, int) else 64
    return {given[name]: size**-0.5 for name in ("left", "erase") if "erase" in given}
