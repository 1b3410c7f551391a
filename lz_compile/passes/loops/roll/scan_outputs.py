"""Scans that stay are made to compile; of those that went, the steps go, too.

Inductor compiles scans whose steps give something, and are given every symbol that sizes are made of, as Dynamo gives them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._higher_order_ops.scan import ScanAutogradImpl

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.checkpointed_scan import checkpointed_scan
from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import known_tensor, origin_of, tensor_of, value_of
from lz_compile.passes.loops.roll.scan import SCAN
from lz_compile.passes.loops.roll.step_graph import readable

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
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        callee, init, xs = node.args[:3]
        body = operator.attrgetter(str(callee.target))(module)
        (output,) = body.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        if len(outputs) > len(init) + 1 or len(value_of(node)) > len(init):
            continue
        if len(outputs) == len(init):
            like = next(each for each in map(tensor_of, (outputs[0], init[0])) if each is not None)
            with body.graph.inserting_before(output):
                zero = body.graph.call_method("new_zeros", (outputs[0], ()))
            zero.meta["example_value"] = like.new_zeros(())
            output.args = ([*outputs, zero],)
            body.recompile()
        steps = known_tensor(xs[0])
        node.meta["example_value"] = (*value_of(node), steps.new_empty(steps.shape[:1], dtype=value_of(node)[0].dtype))
        count += 1
    return count


def order_gradients(module: fx.GraphModule) -> int:
    """Let gradients reach the states of such scans contiguous, in place; how many scans there were.

    The operator's backward (2.13) carries them, and refuses what lies otherwise after a step, or at first, as where the last
    state is transposed. The gradient of a reshape is a reshape: what it hands on is contiguous, whatever comes.
    """
    count = 0
    bodies: set[str] = set()
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        callee, init = node.args[:2]
        states = list(map(tensor_of, init))
        carried = [index for index, each in enumerate(states) if each is not None and each.dim() > 1]
        if not carried or not is_graded(node) or any(each is None or not each.is_contiguous() for each in states):
            continue
        items = [user for user in node.users if user.target is operator.getitem and user.args[1] in carried]
        for item in items:
            _reshape_for(item, item.next)
        if str(callee.target) not in bodies:
            bodies.add(str(callee.target))
            body = operator.attrgetter(str(callee.target))(module)
            given = body.graph.find_nodes(op="placeholder")
            for index in carried:
                _reshape_for(given[index], given[-1].next)
            body.recompile()
        count += 1
    return count


def gather_slices(module: fx.GraphModule) -> int:
    """Let such scans go over tensors that have their memory for themselves, in place; how many scans there were.

    What is a part of a larger one (of gates that are projected together) Inductor (2.13) copies whole in every step.
    """
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        parts = [each for each in node.args[2] if not _is_dense(known_tensor(each))]
        for each in parts:
            _copied(each, node)
        count += bool(parts)
    return count


def keep_operands(module: fx.GraphModule) -> int:
    """Let such scans read copies of what is overwritten behind them, in place; how many scans there were.

    The operator's backward keeps what it reads. AOTAutograd (2.13) writes to a graph's inputs as its forward ends, and
    hands them to the backward as they are then: gradients came out wrong.
    """
    count, effects = 0, Effects(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        operands = [each for each in node.all_input_nodes if tensor_of(each) is not None]
        written = [each for each in operands if is_graded(node) and effects.why_not_kept([each], node)]
        for each in written:
            _copied(each, node)
        count += bool(written)
    return count


def attach_states(module: fx.GraphModule) -> int:
    """Let the first states of such scans require a gradient, in place; how many scans there were.

    The operator's backward (2.11) hands no gradient on from step to step for states that required none at first, as zeros do:
    only the last step had one. Nor does it compile where slices require none.
    """
    count, are_slices_too = 0, not hasattr(ScanAutogradImpl, "_break_bw_input_output_aliasing")
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        callee, init, xs, given = node.args
        if not is_graded(node):
            continue
        wanted = [each for each in (*init, *(xs if are_slices_too else ())) if _can_be_attached(tensor_of(each))]
        attached = {each: _attached(each, node) for each in wanted}
        states, slices = ([attached.get(each, each) for each in nodes] for nodes in (init, xs))
        node.args = (callee, states, slices, given)
        count += bool(attached)
    return count


def scans_of_ours(module: fx.GraphModule) -> list[fx.Node]:
    """The scans of a graph that were loops, however they are differentiated."""
    found = [node for node in module.graph.nodes if node.target in (SCAN, checkpointed_scan)]
    return [node for node in found if str(node.args[0].target).startswith(_OURS)]


def is_graded(scan: fx.Node) -> bool:
    """Whether a scan is differentiated."""
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in value_of(scan))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether elements lie one after the other, in whatever order of dimensions."""
    order, _ = stride_order(list(map(as_size, value.stride())))
    return value.permute(order).is_contiguous()


def _copied(operand: fx.Node, scan: fx.Node) -> None:
    """Let a scan read a copy of what it is given."""
    whole: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with scan.graph.inserting_before(scan):
        copied = scan.graph.call_method("clone", (operand,), whole)
    copied.meta.update(origin_of(scan), example_value=readable(value_of(operand)).clone(**whole))
    scan.replace_input_with(operand, copied)


def _can_be_attached(value: torch.Tensor | None) -> bool:
    return value is not None and (value.is_floating_point() or value.is_complex())


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
    count = 0
    bodies: dict[str, fx.GraphModule] = {}
    for node in module.graph.find_nodes(op="call_function", target=SCAN):
        callee, init, xs, given = node.args
        known = {as_size(value_of(each)) for each in given if isinstance(value_of(each), torch.SymInt)}
        wanted = [symbol for symbol in _symbols(node) if symbol not in known]
        sources = [_source(node, symbol) for symbol in wanted]
        if not wanted or any(source is None for source in sources):
            continue
        node.args = (callee, init, xs, (*given, *sources))
        if str(callee.target) not in bodies:
            bodies[str(callee.target)] = body = operator.attrgetter(str(callee.target))(module)
            _take(body, [(str(symbol), value_of(source)) for symbol, source in zip(wanted, sources, strict=True)])
        count += 1
    return count


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
