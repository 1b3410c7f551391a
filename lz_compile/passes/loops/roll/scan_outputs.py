"""Scans that stay are made to compile; of those that went, the steps go, too.

Inductor compiles scans whose steps give something, and are given every symbol that sizes are made of, as Dynamo gives them.

Scans that are differentiated become an operator that computes steps again backwards instead of keeping what they made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import ScanAutogradImpl

from lz_compile.ground.isolation import isolated
from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import as_size
from lz_compile.lowering.checkpointed_scan import CHUNK_NOTE, checkpointed_scan, one_by_one
from lz_compile.passes.editing.edit import RefutedError, Rewrite
from lz_compile.passes.formula.moves import order_in_memory
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import origin_of, readable
from lz_compile.passes.graph.modes import ambient_of
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import known_tensor, tensor_of, tensor_operands, value_of
from lz_compile.passes.graph.writes import is_pure
from lz_compile.passes.loops.roll.roll import SCAN
from lz_compile.passes.proof.running import NotRunnableError
from lz_compile.passes.proof.trial_run import random_inputs

#: What the steps of our own making are called.
_OURS = ("loop_body_", "scan_part_")


def drop_steps(module: fx.GraphModule) -> None:
    """Delete the steps of our own making that no scan calls any more."""
    named = module.graph.find_nodes(op="get_attr")
    for node in named:
        if not node.users and str(node.target).startswith(_OURS):
            module.graph.erase_node(node)
    used = {str(node.target) for node in named if node.users}
    for name, child in list(module.named_children()):
        if isinstance(child, fx.GraphModule) and name.startswith(_OURS) and name not in used:
            module.delete_submodule(name)


def give_results(module: fx.GraphModule) -> int:
    """Let the steps of such scans give a zero that nobody reads, in place; how many scans there were."""

    def change(scan: Any, body: fx.GraphModule) -> bool:
        init, xs = scan.args[1:3]
        (output,) = body.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        if len(outputs) > len(init) + 1 or len(value_of(scan)) > len(init):
            return False
        if len(outputs) == len(init):
            like = next(each for each in map(tensor_of, (outputs[0], init[0])) if each is not None)
            with body.graph.inserting_before(output):
                zero = body.graph.call_method("new_zeros", (outputs[0], ()))
            zero.meta["example_value"] = like.new_zeros(())
            output.args = ([*outputs, zero],)
            body.recompile()
        steps, given = known_tensor(xs[0]), value_of(scan)
        scan.meta["example_value"] = (*given, steps.new_empty(steps.shape[:1], dtype=given[0].dtype))
        return True

    return _changed(module, change)


def _changed(module: fx.GraphModule, change: Callable[[fx.Node, fx.GraphModule], object]) -> int:
    """How many scans of a graph a change is one of, given the scan and its step."""
    scans = module.graph.find_nodes(op="call_function", target=SCAN)
    return sum(bool(change(each, operator.attrgetter(str(each.args[0].target))(module))) for each in scans)


def order_gradients(module: fx.GraphModule) -> int:
    """Let gradients reach the states of such scans contiguous, in place; how many scans there were.

    The operator's backward (2.13) carries them, and refuses what lies otherwise after a step, or at first, as where the last
    state is transposed. The gradient of a reshape is a reshape: what it hands on is contiguous, whatever comes.
    """
    bodies: set[fx.GraphModule] = set()

    def change(scan: Any, body: fx.GraphModule) -> bool:
        states = list(map(tensor_of, scan.args[1]))
        carried = [index for index, each in enumerate(states) if each is not None and each.dim() > 1]
        if not carried or not is_graded(scan) or any(each is None or not each.is_contiguous() for each in states):
            return False
        for item in [user for user in scan.users if user.target is operator.getitem and user.args[1] in carried]:
            _reshape_for(item, item.next)
        if body not in bodies:
            bodies.add(body)
            given = body.graph.find_nodes(op="placeholder")
            for index in carried:
                _reshape_for(given[index], given[-1].next)
            body.recompile()
        return True

    return _changed(module, change)


def gather_slices(module: fx.GraphModule) -> int:
    """Let such scans go over tensors that have their memory for themselves, in place; how many scans there were.

    What is a part of a larger one (of gates that are projected together) Inductor (2.13) copies whole in every step.
    """

    def change(scan: Any, _body: fx.GraphModule) -> bool:
        return _copied([each for each in scan.args[2] if order_in_memory(known_tensor(each)) is None], scan)

    return _changed(module, change)


def keep_operands(module: fx.GraphModule) -> int:
    """Let such scans read copies of what is overwritten behind them, in place; how many scans there were.

    The operator's backward keeps what it reads. AOTAutograd (2.13) writes to a graph's inputs as its forward ends, and
    hands them to the backward as they are then: gradients came out wrong.
    """
    effects = Effects(module.graph)

    def change(scan: Any, _body: fx.GraphModule) -> bool:
        operands = tensor_operands(scan)
        return _copied([each for each in operands if is_graded(scan) and effects.why_not_kept([each], scan)], scan)

    return _changed(module, change)


def attach_states(module: fx.GraphModule) -> int:
    """Let the first states of such scans require a gradient, in place; how many scans there were.

    The operator's backward (2.11) hands no gradient on from step to step for states that required none at first, as zeros do:
    only the last step had one. Nor does it compile where slices require none.
    """
    are_slices_too = not hasattr(ScanAutogradImpl, "_break_bw_input_output_aliasing")

    def change(scan: Any, _body: fx.GraphModule) -> bool:
        callee, init, xs, given = scan.args
        tensors = {each: tensor_of(each) for each in (*init, *(xs if are_slices_too else ()))}
        wanted = [x for x, own in tensors.items() if own is not None and (own.is_floating_point() or own.is_complex())]
        if not is_graded(scan):
            return False
        attached = {each: _attached(each, scan) for each in wanted}
        states, slices = ([attached.get(each, each) for each in nodes] for nodes in (init, xs))
        scan.args = (callee, states, slices, given)
        return bool(attached)

    return _changed(module, change)


def scans_of_ours(module: fx.GraphModule) -> list[fx.Node]:
    """The scans of a graph that were loops, however they are differentiated."""
    found = [node for node in module.graph.nodes if node.target in (SCAN, checkpointed_scan)]
    return [node for node in found if str(node.args[0].target).startswith(_OURS)]


def is_graded(scan: fx.Node) -> bool:
    """Whether a scan is differentiated."""
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in value_of(scan))


def _copied(operands: Sequence[fx.Node], scan: fx.Node) -> bool:
    """Let a scan read copies of some of what it is given; whether there are any."""
    whole: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for operand in operands:
        with scan.graph.inserting_before(scan):
            copied = scan.graph.call_method("clone", (operand,), whole)
        copied.meta.update(origin_of(scan), example_value=readable(value_of(operand)).clone(**whole))
        scan.replace_input_with(operand, copied)
    return bool(operands)


def _attached(state: fx.Node, scan: fx.Node) -> fx.Node:
    """A name of its own for a tensor; what requires a gradient by then, which no example value tells, is as it was."""
    with scan.graph.inserting_before(scan):
        found = scan.graph.call_method("view_as", (state, state))
        attached = scan.graph.call_method("requires_grad_", (found,))
    value = readable(value_of(state))
    found.meta["example_value"] = attached.meta["example_value"] = value.view_as(value).requires_grad_()
    return attached


def _reshape_for(state: fx.Node, place: fx.Node) -> None:
    """Let those that compute with a contiguous tensor read it by way of a reshape that changes nothing."""
    readers = [user for user in state.users if user.op != "output"]
    if not readers:
        return
    with state.graph.inserting_before(place):
        flat = state.graph.call_method("flatten", (state,))
        whole = state.graph.call_method("view_as", (flat, state))
    value = value_of(state)
    flat.meta["example_value"] = value.flatten()
    whole.meta["example_value"] = flat.meta["example_value"].view_as(value)
    for reader in readers:
        reader.replace_input_with(state, whole)


def give_symbols(module: fx.GraphModule) -> int:
    """Let the steps of scans with symbolic sizes take each symbol as a number, in place; how many scans there were.

    Inductor makes the memory for the results of a scan of what it is given (2.13).
    """
    bodies: set[fx.GraphModule] = set()

    def change(scan: Any, body: fx.GraphModule) -> bool:
        *others, given = scan.args
        known = {as_size(value_of(each)) for each in given if isinstance(value_of(each), torch.SymInt)}
        wanted = [symbol for symbol in _symbols(scan) if symbol not in known]
        sources = [_source(scan, symbol) for symbol in wanted]
        if not wanted or any(source is None for source in sources):
            return False
        scan.args = (*others, (*given, *sources))
        if body not in bodies:
            bodies.add(body)
            _take(body, [(str(symbol), value_of(source)) for symbol, source in zip(wanted, sources, strict=True)])
        return True

    return _changed(module, change)


def _symbols(scan: fx.Node) -> list[sympy.Symbol]:
    """The symbols in the sizes of what a scan gives and takes."""
    tensors = [*value_of(scan), *(value_of(node) for node in scan.all_input_nodes)]
    sizes = [
        as_size(size) for each in tensors if isinstance(each, torch.Tensor) for size in (*each.shape, *each.stride())
    ]
    found = {symbol for size in sizes if not isinstance(size, int) for symbol in size.free_symbols}
    return sorted(found, key=str)


def _source(scan: fx.Node, symbol: sympy.Symbol) -> fx.Node | None:
    """A node before a scan that is a symbol: a number of the graph, or the size of a tensor."""
    graph = scan.graph
    node: fx.Node
    for node in graph.nodes:
        if node is scan:
            return None
        value = value_of(node)
        if isinstance(value, torch.SymInt) and as_size(value) == symbol:
            return node
        if not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if as_size(size) == symbol:
                with graph.inserting_after(node if node.op != "placeholder" else _last_input(graph)):
                    found = graph.call_method("size", (node, dim))
                found.meta["example_value"] = size
                return found
    return None


def _last_input(graph: fx.Graph) -> fx.Node:
    *_, last = graph.find_nodes(op="placeholder")
    assert isinstance(last, fx.Node), "a graph with a loop has inputs"
    return last


def _take(body: fx.GraphModule, symbols: Sequence[tuple[str, torch.SymInt]]) -> None:
    """More inputs, which the step does not read."""
    for name, value in symbols:
        with body.graph.inserting_after(_last_input(body.graph)):
            taken = body.graph.placeholder(name)
        taken.meta["example_value"] = value
    body.recompile()


#: Steps that are tried, and those of a chunk: chunks that are even, and with some over.
_TRIED, _CHUNK = (6, 7), 2
#: How far apart results may be, of the largest: in float64 but for casts of a step's own, and where it takes no other dtypes.
_TOLERANCE, _OWN_TOLERANCE = 1e-3, 5e-2


def checkpoints(module: fx.GraphModule, unproven: list[Reason]) -> Iterator[Rewrite[None]]:
    """Replacements of such scans, each held against its loop: values and gradients, on few steps.

    PyTorch's operator (2.13) keeps all that a step makes, in memory of all steps that it copies in every step. It stays under
    autocast, which a step that is computed again backwards would not see, and where a step cannot be tried.

    Raises:
        RefutedError: one would compute something else.
    """
    modes = ambient_of(module.graph.nodes)
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        step = node.args[0]
        body = module.get_submodule(str(step.target)) if isinstance(step, fx.Node) else None
        if not isinstance(body, fx.GraphModule) or not is_graded(node) or not _can_be_repeated(body):
            continue
        if modes[node].autocast or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            continue
        chunk = (node.meta.get("custom") or {}).get(CHUNK_NOTE)
        try:
            _try(node, body)
        except (NotRunnableError, RuntimeError, TypeError) as error:
            unproven.append(Reason("EDIT_UNPROVEN", f"PyTorch's operator for the loop {told(node)} stays: {error}"))
            continue
        make = partial(_replace, node, None if chunk is None else int(chunk))
        yield Rewrite("computing steps again backwards", make, shown="held against its loop", undoes_itself=True)


def _replace(node: fx.Node, chunk: int | None) -> None:
    node.target, node.args = checkpointed_scan, (*node.args, chunk)


def _can_be_repeated(body: fx.GraphModule) -> bool:
    """Whether a step gives the same whenever it is computed, and holds no graph of its own."""
    return all(is_pure(node) for node in body.graph.nodes if node.op in ("call_function", "call_method", "call_module"))


def _try(node: fx.Node, body: fx.GraphModule) -> None:
    try:
        _compare(node, body, doubled=True)
    except (RuntimeError, TypeError):  # casts of its own, which float64 does not go with
        _compare(node, body, doubled=False)


def _compare(node: fx.Node, body: fx.GraphModule, *, doubled: bool) -> None:
    parts: list[list[Any]] = [list(each) for each in node.args[1:]]  # type: ignore[arg-type]
    nodes = [each for part in parts for each in part if isinstance(each, fx.Node)]
    tolerance = _TOLERANCE if doubled else _OWN_TOLERANCE
    with isolated(), torch.enable_grad():
        known = random_inputs(nodes, 0, positive=False, doubled=doubled, with_grad=False).values
        given = [[known.get(each, each) for each in part] for part in parts]
        for steps in _TRIED:
            expected = _results(partial(one_by_one, body), given, steps)
            found = _results(lambda init, xs, more: checkpointed_scan(body, init, xs, more, _CHUNK), given, steps)
            for one, other in zip(expected, found, strict=True):
                if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * _size(one), equal_nan=True):
                    raise RefutedError("a loop is another one where steps are computed again backwards")


def _size(found: Tensor) -> float:
    return float(found.abs().nan_to_num(posinf=0.0).max()) if found.numel() else 0.0


def _results(run: Callable[..., Any], given: list[list[Any]], steps: int) -> list[Tensor]:
    """Results and gradients of copies of the operands, on few steps."""
    init, xs, additional = ([each.clone() if isinstance(each, Tensor) else each for each in part] for part in given)
    xs = [each[:steps].clone() for each in xs]
    leaves = [each for each in (*init, *xs, *additional) if isinstance(each, Tensor) and each.is_floating_point()]
    for each in leaves:
        each.requires_grad_()
    found = [each for each in run(init, xs, additional) if isinstance(each, Tensor)]
    ends = [(each.double() * (1 + i)).cos().sum() for i, each in enumerate(found) if each.requires_grad]
    grads = (
        torch.autograd.grad(torch.stack(ends).sum(), leaves, allow_unused=True, materialize_grads=True) if ends else ()
    )
    return [*(each.detach() for each in found), *grads]
