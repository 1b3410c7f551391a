"""Replace calls that hide an attention (``F.multi_head_attention_forward``) by the operations that they consist of.

``nn.MultiheadAttention`` and the ``nn.Transformer`` layers reach a backend as one such call each. Spelled out
(:mod:`attention_calls`), recognisers see the attention inside. A call is replaced only after its spelling has been
proven against it (:mod:`inline_proof`).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula.strides import that_count
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient, grad_enabled
from lz_compile.passes.graph.provenance import EMITTED
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import tensor_of, value_of, where_of
from lz_compile.passes.inlining.attention_calls import BODIES, REFUSED
from lz_compile.passes.inlining.inline_proof import Structure, TensorSpec, difference
from lz_compile.passes.rewriting.builder import GraphBuilder
from lz_compile.passes.rewriting.core import dead_users, is_dead
from lz_compile.passes.rewriting.rewrite import RewriteError, laid_out


@dataclass(frozen=True)
class Inlined:
    """A call that was replaced: its name, the user's line, and the node that holds its output now."""

    call: str
    where: str
    output: fx.Node


def inline(graph: fx.Graph, *, strict: bool = False) -> list[Inlined | NearMiss]:
    """Replace, in place, every attention call whose weights nobody reads; recompiling is the caller's.

    Returns:
        in graph order, what was replaced and what was refused with its reason. A refused call is untouched.

    Raises:
        RewriteFailedError: a replacement failed or is wrong, and ``strict`` is set. Otherwise that is an event.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in BODIES]
    effects = Effects(graph) if calls else None
    found: list[Inlined | NearMiss] = []
    for node in calls:
        assert effects is not None, "made where there are calls"
        where = where_of(node)
        try:
            found.append(Inlined(node.target.__name__, where, _replace(graph, node, effects.ambient(node))))
        except RefusedError as refusal:
            found.append(NearMiss("attention", node, refusal.reason, refusal.edit, where))
        except Exception as error:
            text = f"{node.target.__name__} at {where} is left as one call"
            events.record("INLINE_FAILED", text, error)
            if strict:
                raise RewriteFailedError(f"{text}: {type(error).__name__}: {error}") from error
    return found


def _replace(graph: fx.Graph, node: fx.Node, ambient: Ambient) -> fx.Node:
    results, arguments = _results(node), _arguments(node)
    structure = _structure(arguments)
    builder = GraphBuilder(graph, results[0], ambient, {})
    try:
        with graph.inserting_before(node):
            output = _emit(builder, node, arguments, results[0])
        differs = difference(node.target, structure, ambient, grad_enabled(ambient))
        if differs:
            raise RewriteError(f"spelled out, {differs}")
    except BaseException:
        _erase(graph, builder.created)
        raise
    for result in results:
        result.replace_all_uses_with(output)
    for created in builder.created:
        created.meta.pop(EMITTED, None)  # spelled out to be recognised
    superfluous = {node, *node.users, *(each for user in node.users for each in dead_users(user))}
    superfluous.update(created for created in builder.created if created is not output)
    _erase(graph, [each for each in graph.nodes if each in superfluous])
    return output


def _emit(builder: GraphBuilder, node: fx.Node, arguments: Mapping[str, Any], replaced: fx.Node) -> fx.Node:
    # one proxy for each node: bodies ask which of their arguments are the same
    proxies = {operand: builder.value(operand) for operand in node.all_input_nodes}
    value = BODIES[node.target](**fx.map_arg(dict(arguments), proxies.__getitem__))
    old, new = tensor_of(replaced), tensor_of(value.node)
    if old is not None and new is not None and new.stride() != old.stride():  # a fast path keeps those of its input
        value = laid_out(value, [as_size(stride) for stride in old.stride()])
    output: fx.Node = value.node
    (expected, given) = (
        (tensor.dtype, tensor.device, tensor.shape, that_count(tensor.stride(), tensor))
        for tensor in map(tensor_of, (replaced, output))
        if tensor is not None
    )
    if given != expected:
        raise RewriteError(f"expected dtype, device, shape and strides {expected}, spelled out it has {given}")
    return output


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes that are the attention's output: those reading element 0, or the call itself."""
    if tensor_of(node) is not None:
        return [node]
    for user in node.users:
        if user.target is not operator.getitem:
            raise RefusedError(REFUSED, "its pair of results is passed on as a whole", "unpack it")
        if user.args[1] == 1 and not is_dead(user):
            raise RefusedError(REFUSED, "its attention weights are used", "call it with need_weights=False")
    results = [user for user in node.users if user.args[1] == 0]
    if not results:
        raise RefusedError(REFUSED, "its output is not used", "remove the call")
    return results


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments by parameter name, with defaults: tensors as their nodes, numbers and flags as values."""
    bound = inspect.signature(BODIES[node.target]).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return {name: _specialised(value) for name, value in bound.arguments.items()}


def _specialised(value: Any) -> Any:
    """A symbolic number as the value that it has, under a guard: it is an attribute of a module and does not vary."""
    number = value_of(value)
    if isinstance(number, torch.SymInt):
        return int(number)
    return float(number) if isinstance(number, torch.SymFloat) else value


def _structure(arguments: Mapping[str, Any]) -> Structure:
    first = {value: name for name, value in reversed(list(arguments.items())) if isinstance(value, fx.Node)}
    return tuple(
        (name, _describe(name, value, first[value]) if isinstance(value, fx.Node) else value)
        for name, value in arguments.items()
    )


def _describe(name: str, node: fx.Node, same_as: str) -> TensorSpec:
    tensor = tensor_of(node)
    if tensor is None:
        text = f"{name} is no constant but {node.meta.get('example_value')}"
        raise RefusedError(REFUSED, text, f"make {name} a constant")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise RefusedError(REFUSED, f"{name} is nested or sparse", "pad it to a dense tensor")
    return TensorSpec(same_as, tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad)
