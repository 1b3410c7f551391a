"""Replace calls that hide an attention (``F.multi_head_attention_forward``) by the operations that they consist of.

``nn.MultiheadAttention`` and the ``nn.Transformer`` layers reach a backend as one such call each. Spelled out
(:mod:`attention_calls`), recognisers see the attention inside. What is written in Python is called and so spells itself
out; a fast path is replaced only after its spelling has been proven against it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from lz_compile.errors import RewriteFailedError
from lz_compile.ground import events
from lz_compile.ground.isolation import Outside, isolated
from lz_compile.passes.editing.dead import dead_calls
from lz_compile.passes.formula.moves import that_count
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient, ambient_context
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, where_of
from lz_compile.passes.graph.view import EMITTED, reached, tensor_of, value_of
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.inlining.attention_calls import BODIES, CALLED, REFUSED
from lz_compile.passes.proof.agreement import TOLERANCE, Special, doubled, elementwise
from lz_compile.passes.rewriting.builder import GraphBuilder
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
    refuse_transformed(ambient)
    results, arguments = _results(node), _arguments(node)
    structure = _structure(arguments)
    builder = GraphBuilder(graph, results[0], ambient, {})
    try:
        with graph.inserting_before(node):
            output = _emit(builder, node, arguments, results[0])
        differs = difference(node.target, structure, ambient)
        if differs:
            raise RewriteError(f"spelled out, {differs}")
    except BaseException:
        _erase(graph, builder.created)
        raise
    for result in results:
        result.replace_all_uses_with(output)
    for created in builder.created:
        created.meta.pop(EMITTED, None)  # spelled out to be recognised
    superfluous = {*reached([node], operator.attrgetter("users")), *builder.created} - {
        output
    }  # nobody reads them any more
    _erase(graph, [each for each in graph.nodes if each in superfluous])
    return output


def _emit(builder: GraphBuilder, node: fx.Node, arguments: Mapping[str, Any], replaced: fx.Node) -> fx.Node:
    # one proxy for each node: bodies ask which of their arguments are the same
    proxies = {operand: builder.value(operand) for operand in node.all_input_nodes}
    value = BODIES[node.target](**fx.map_arg(dict(arguments), proxies.__getitem__))
    old, new = tensor_of(replaced), tensor_of(value.node)
    if old is not None and new is not None and new.stride() != old.stride():  # a fast path keeps those of its input
        value = laid_out(value, old)
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
        if user.args[1] == 1 and user not in dead_calls(node.graph):
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
    return TensorSpec(same_as, tensor.dtype, tensor.device)


# ---- proofs ----------------------------------------------------------------------------------------------------------
# Of the fast paths, which have no gradient. They run in float64, where both have to agree but for the order of sums, and in
# the dtypes and modes of the graph. Masks leave every row a key at first, and then hide some rows completely.


# Dimensions of every tensor argument's sample: N batch, L queries, S keys, E features, P = 3E, H heads, F hidden features.
_DIMS: Mapping[str, str] = dict(
    argument.split(":")
    for argument in (
        "query:NLE key:NSE value:NSE src:NLE qkv_weight:PE qkv_bias:P proj_weight:EE proj_bias:E norm_weight_1:E "
        "norm_bias_1:E norm_weight_2:E norm_bias_2:E ffn_weight_1:FE ffn_bias_1:F ffn_weight_2:EF ffn_bias_2:E"
    ).split()
)
#: Those of a mask, by ``mask_type``.
_MASKS: Mapping[Any, str] = {0: "LS", 1: "NS", 2: "NHLS"}


@dataclass(frozen=True)
class TensorSpec:
    """All that a proof needs to know of a tensor argument; ``same_as`` is the first argument that is the same node."""

    same_as: str
    dtype: torch.dtype
    device: torch.device


#: The arguments of a call by name: tensors as their spec, flags as they are.
Structure = tuple[tuple[str, Any], ...]


def difference(target: Any, structure: Structure, ambient: Ambient) -> str:
    """How the spelling of ``target`` differs from it, empty if it does not; remembered by structure."""
    return "" if target in CALLED else _difference(target, structure, ambient, Outside.now())


@cache
def _difference(target: Any, structure: Structure, ambient: Ambient, outside: Outside) -> str:
    with isolated():
        for masks_rows in (False, True):
            sample = _sample(structure, masks_rows)
            wide: dict[int, Any] = {}  # one for each: bodies ask which of their arguments are the same
            exact = {name: wide.setdefault(id(value), doubled(value)) for name, value in sample.items()}
            truth = _run(target, exact)
            for given, modes in ((exact, ()), (sample, (outside, ambient))):
                base, spelled = _run(target, given, *modes), _run(BODIES[target], given, *modes)
                error, _, is_near = elementwise(truth, base, spelled, TOLERANCE[base.dtype], Special(False, True))
                if not is_near.all():
                    rows = f"{'with' if masks_rows else 'without'} fully masked rows"
                    return f"the output in {base.dtype} is off by {error:.2g}, {rows}"
    return ""


def _sample(structure: Structure, masks_rows: bool) -> dict[str, Any]:
    """Small arguments with the flags, dtypes and devices of ``structure``."""
    torch.default_generator.manual_seed(0)
    given = dict(structure)
    heads = given["num_heads"] if "num_heads" in given else given["num_head"]
    sizes = {"N": 3, "L": 5, "S": 5 if "src" in given or given["key"].same_as == "query" else 7}
    sizes |= {"H": heads, "E": 4 * heads, "P": 12 * heads, "F": 6}
    sample: dict[str, Any] = {}
    for name, spec in structure:
        if name == "embed_dim":
            sample[name] = sizes["E"]
        elif not isinstance(spec, TensorSpec):
            sample[name] = spec
        elif spec.same_as in ("query", "key") and spec.same_as != name:
            sample[name] = sample[spec.same_as]
        else:
            extents = [sizes[dim] for dim in (_MASKS[given["mask_type"]] if name == "mask" else _DIMS[name])]
            value = _mask(extents, spec.dtype, masks_rows) if name == "mask" else torch.randn(extents) / 2
            sample[name] = value.to(spec.device, spec.dtype)
    return sample


def _mask(extents: list[int], dtype: torch.dtype, masks_rows: bool) -> torch.Tensor:
    """Not zero where a key is hidden: never the first one, but for all keys of some rows if asked."""
    is_hidden = torch.rand(extents) > 0.6
    rows = is_hidden.view(-1, extents[-1])
    rows[:, 0] = False
    if masks_rows:
        rows[1::3] = True
    return is_hidden.to(dtype)


def _run(
    call: Callable[..., Any], sample: Mapping[str, Any], outside: Outside | None = None, ambient: Ambient | None = None
) -> torch.Tensor:
    """The output; without modes, no autocast."""
    with ExitStack() as stack:
        for manager in () if outside is None or ambient is None else (outside.entered(), *ambient_context(ambient)):
            stack.enter_context(manager)
        output = call(**sample)
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found.detach()
