"""Layers become calls of one region, which is compiled once.

A region is a graph of its own with a placeholder for each tensor that a layer reads from outside, its parameters included.
PyTorch's ``invoke_subgraph`` calls it, as it does what ``torch.compiler.nested_compile_region`` decorates. The calls of every
layer are held against those of the region before anything is changed, so that nothing is computed another way.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from lz_compile.ground import events, machine
from lz_compile.ground.isolation import isolated
from lz_compile.ground.records import Reason
from lz_compile.ground.store import Store
from lz_compile.lowering import configured, frames, inductor
from lz_compile.lowering.regions import INVOKE, NAME
from lz_compile.passes.editing.edit import Rewrite, apply
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import origin_of
from lz_compile.passes.graph.modes import Ambient, ambient_of, grad_enabled
from lz_compile.passes.graph.refusal import RefusedError, told, where_of
from lz_compile.passes.graph.view import memories_of, read, tensor_of, tensors_in, value_of
from lz_compile.passes.graph.writes import refuse_impure
from lz_compile.passes.layers.repeats import Inside, Layers, repeats
from lz_compile.passes.loops.roll.search import Program, rebuilt

#: Calls that a region has at least, and saves at least, where it is worth it: each costs Inductor some 10 ms, calling a
#: region some microseconds at every run.
WORTHWHILE_CALLS, WORTHWHILE_SAVED = 12, 64


@dataclass(frozen=True)
class Folded:
    """``count`` equal layers of ``calls`` calls each that were found; ``kept`` is why they stay as they are."""

    where: str
    count: int
    calls: int
    kept: Reason | None = None


def fold_layers(module: fx.GraphModule, policy: str = "auto", unfit: str = "") -> list[Folded]:
    """Let repeated layers of a graph be calls of one region, in place; recompiling is the caller's.

    Args:
        module: its graph is changed; regions become submodules.
        policy: ``"auto"`` folds layers where that is worth it, ``"fold"`` all that may be.
        unfit: why none may be; empty if they may.

    Returns:
        what was found, folded or not.
    """
    program = Program(module.graph)
    found: list[Folded] = []
    planned: list[Layers] = []
    looked = _Looked(module.graph)
    for phases in repeats(program):
        tried: list[tuple[Layers, Reason | None]] = []
        for layers in phases:
            kept = Reason("NO_REGIONS", unfit) if unfit else _why_not_worth(layers, policy) or looked.why_kept(layers)
            tried.append((layers, kept))
            if kept is None or unfit:
                break
        layers, kept = tried[-1] if tried[-1][1] is None else tried[0]
        planned += [layers] if kept is None else []
        found.append(Folded(where_of(layers.node(0, 0)), layers.count, layers.calls, kept))
    now: dict[fx.Node, fx.Node] = {}
    for layers in planned:
        text = "every layer makes the calls of the region"
        apply(module, Rewrite("computing layers by one region", partial(_fold, module, layers, now), shown=text))
    return found


def _why_not_worth(layers: Layers, policy: str) -> Reason | None:
    saved = (layers.count - 1) * layers.calls
    if policy == "auto" and (layers.calls < WORTHWHILE_CALLS or saved < WORTHWHILE_SAVED):
        return Reason("FEW_CALLS", f"a region of {layers.calls} calls would save {saved} of them")
    if policy == "auto" and layers.lost:
        return Reason("CUTS_FUSIONS", f"{layers.lost} values would be written to memory that Inductor never writes")
    return None


class _Looked:
    """What is asked of a graph once, for all its layers."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self._graph)

    @cached_property
    def _ambient(self) -> dict[fx.Node, Ambient]:
        return ambient_of(self._graph.nodes)

    def why_kept(self, layers: Layers) -> Reason | None:
        """Why layers cannot be calls of one region."""
        nodes = layers.nodes
        if any(not _is_ordinary(self._ambient[node]) for node in nodes):
            return Reason("MODES", "they run under a mode that was entered in the graph")
        writer = next(self._writers_elsewhere(layers), None)
        if writer is not None:
            return Reason("WRITTEN_INSIDE", f"{told(writer)} writes in place to memory that its layer did not make")
        product = next((node for node in nodes[: layers.calls] if _goes_by_gradients(node)), None)
        if product is not None:
            text = f"{product.name} multiplies in another order inside of a region, where no weight requires a gradient"
            return Reason("ANOTHER_PRODUCT", text)
        try:
            for place in range(layers.calls):
                refuse_impure(layers.node(0, place))
        except RefusedError as refusal:
            return refusal.reason
        return self._why_not_handed_out(layers) or self._why_not_differentiated(layers)

    def _why_not_differentiated(self, layers: Layers) -> Reason | None:
        """Asked last: where nothing else speaks against it, a backward pass is tried, which takes seconds the first time."""
        attached = next(
            (each for node in layers.nodes for each in tensors_in(value_of(node)) if each.requires_grad), None
        )
        if attached is None or not torch.is_grad_enabled():
            return None
        operands = [node for each in layers.operands for node in each]
        overwritten = self._effects.why_not_kept(operands, layers.nodes[-1])
        if overwritten:
            return Reason("OVERWRITTEN_LATER", f"the backward pass may need what changes: {overwritten}")
        wrong = why_not_differentiated(attached.device)
        if not wrong:
            return None
        return Reason("GRADIENTS", f"PyTorch's backward through a region that is called more than once: {wrong}")

    def _writers_elsewhere(self, layers: Layers) -> Iterator[fx.Node]:
        """Calls of a layer that write to what was not made by it."""
        layer_of = {node: place // layers.calls for place, node in enumerate(layers.nodes)}
        for writer, target in self._effects.writes_made:
            if writer in layer_of and layer_of.get(self._effects.owner(target)) != layer_of[writer]:
                yield writer

    def _why_not_handed_out(self, layers: Layers) -> Reason | None:
        """Why what is read of layers cannot be a region's result: it is no tensor, or shares memory."""
        middle = layers.count // 2
        taken = {memory for operand in layers.operands for memory in self._memories(operand[middle])}
        for place in layers.outputs:
            node = layers.node(middle, place)
            if tensor_of(node) is None:
                return Reason("NO_TENSOR", f"{told(node)} is read of a layer, and is no tensor")
            memory = self._memories(node)
            if not memory or not taken.isdisjoint(memory):
                return Reason(
                    "SHARES_MEMORY", f"{told(node)} is read of a layer, and shares memory with something else"
                )
            taken.update(memory)
        return None

    def _memories(self, node: fx.Node) -> list[Any]:
        """What memory a node is in: also what Dynamo's values do not tell, where anything is overwritten."""
        found = memories_of(node)
        return [*found, self._effects.owner(node)] if found and self._effects.has_mutations else found


def _is_ordinary(ambient: Ambient) -> bool:
    """Whether a mode is the one that the whole graph runs under."""
    return replace(ambient, grad=None) == Ambient() and grad_enabled(ambient) == torch.is_grad_enabled()


def _goes_by_gradients(node: fx.Node) -> bool:
    """Whether PyTorch flattens a batch before it multiplies only because the other factor requires a gradient.

    ``at::native::should_fold`` (2.13) does so even where gradients are off. What lies row by row is flattened anyway.
    """
    call = read(node)
    if call is None or call.name not in ("matmul", "linear"):
        return False
    one, other = (tensor_of(call.get(name)) for name in ("input", "other" if call.name == "matmul" else "weight"))
    is_batch = one is not None and other is not None and one.dim() > 2 >= other.dim() and other.requires_grad
    return is_batch and one is not None and not one.is_contiguous()


def _fold(module: fx.GraphModule, layers: Layers, now: dict[fx.Node, fx.Node]) -> None:
    """Replace layers; ``now`` is what values of those before are by now, and gets those of these."""
    graph = module.graph
    names = (f"{NAME}_{number}" for number in itertools.count())
    name = next(name for name in names if not hasattr(module, name))
    setattr(module, name, _region(module, layers))
    for layer in range(layers.count):
        replaced = {layers.node(layer, place): None for place in layers.outputs}
        last = layers.node(layer, layers.calls - 1)
        with graph.inserting_before(last):  # behind every attribute that the layer reads
            region = graph.get_attr(name)
            operands = _apart(graph, [now.get(operand[layer], operand[layer]) for operand in layers.operands])
            call = graph.call_function(INVOKE, (region, name, *operands))
            call.meta.update(origin_of(last), example_value=tuple(map(value_of, replaced)))
            for number, node in enumerate(replaced):
                item = graph.call_function(operator.getitem, (call, number))
                item.meta.update(node.meta)
                now[node] = item
                node.replace_all_uses_with(item, delete_user_cb=_outside(layers, layer))
        for place in reversed(range(layers.calls)):
            graph.erase_node(layers.node(layer, place))


def _apart(graph: fx.Graph, operands: Sequence[fx.Node]) -> list[fx.Node]:
    """Operands, of which those that are one tensor are two.

    PyTorch (2.13) traces a region with what its first call is handed, and tells operands apart by which tensor they are:
    two that are one there would be one in every other call.
    """
    taken: set[int] = set()
    found: list[fx.Node] = []
    for operand in operands:
        memory, node = memories_of(operand), operand
        if not taken.isdisjoint(memory):
            node = graph.call_function(torch.ops.aten.alias.default, (operand,))
            node.meta.update(operand.meta)
        taken.update(memory)
        found.append(node)
    return found


def _outside(layers: Layers, layer: int) -> Callable[[fx.Node], bool]:
    own = {layers.node(layer, place) for place in range(layers.calls)}
    return lambda user: user not in own


def _region(module: fx.GraphModule, layers: Layers) -> fx.GraphModule:
    """The calls of a layer as a graph of its own."""
    graph = fx.Graph()
    operands = []
    for number, operand in enumerate(layers.operands):
        operands.append(graph.placeholder(f"operand_{number}"))
        operands[-1].meta["example_value"] = value_of(operand[0])
    made: list[fx.Node] = []
    slots = iter(layers.slots)

    def inside(leaf: Any) -> Any:
        if isinstance(leaf, Inside):
            return made[leaf.place]
        return operands[next(slots)] if isinstance(leaf, fx.Node) else leaf

    leaves = map(inside, layers.leaves(0))
    for place in range(layers.calls):
        node = layers.node(0, place)
        args, kwargs = rebuilt((node.args, node.kwargs), leaves)
        made.append(graph.create_node(node.op, node.target, args, kwargs, node.name))
        made[-1].meta.update(node.meta)
    graph.output(tuple(made[place] for place in layers.outputs))
    return fx.GraphModule(module, graph)


# ---- backward passes -------------------------------------------------------------------------------------------------
# Whether a backward pass through a region that is called more than once is right: tried, once for each environment.
# It was wrong in PyTorch 2.13 (:mod:`lz_compile.lowering.regions` says why, and mends it); nobody knows about the next one.


_LAYERS, _WIDTH = 3, 16
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Tried:
    """What was found: what was wrong, empty if nothing was."""

    wrong: str


def why_not_differentiated(device: torch.device) -> str:
    """Why no backward pass goes through regions on a device, under the configuration of this compile; empty if it may."""
    try:
        where = f"{machine.proven_on(device)} {configured.settings_digest()}"
        return Store("regions").recall(where, Tried, lambda: Tried(_try(device))).wrong
    except Exception as error:  # noqa: BLE001 what cannot be tried is not trusted, and the reason says so
        events.record("REGIONS_NOT_TRIED", "no backward pass goes through regions", error)
        return f"it cannot be tried here: {type(error).__name__}: {error}"


def _layer(x: torch.Tensor, scale: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor]:
    """One whose backward pass needs what it is handed, views of it, pieces of one product, and what it gives."""
    one, other = (F.layer_norm(x, (_WIDTH,), scale) @ up).chunk(2, -1)
    return (torch.tanh(x + (one * torch.sigmoid(other)) @ down),)


def _stacked(layer: Callable[..., Any], one: Any, other: Any, *weights: Any) -> tuple[Any, Any]:
    """Two stacks of layers: one is a result, behind the other something takes memory. Each shows a fault of its own."""
    given = other
    for number in range(_LAYERS):
        operands = weights[3 * number : 3 * number + 3]
        (one,), (other,) = layer(one, *operands), layer(other, *operands)
    return one, torch.sin(other @ other.mT) @ given


def _graph() -> fx.GraphModule:
    """Both stacks as calls of one region."""
    graph = fx.Graph()

    def layer(*operands: fx.Proxy) -> tuple[fx.Proxy]:
        call = graph.call_function(
            INVOKE, (graph.get_attr("region"), f"{NAME}_tried", *(each.node for each in operands))
        )
        return (fx.Proxy(graph.call_function(operator.getitem, (call, 0))),)

    given = [fx.Proxy(graph.placeholder(f"operand_{number}")) for number in range(2 + 3 * _LAYERS)]
    graph.output(tuple(each.node for each in _stacked(layer, *given)))
    return fx.GraphModule({"region": fx.symbolic_trace(_layer)}, graph)


def _inputs(device: torch.device) -> list[torch.Tensor]:
    """The same numbers every time, drawn from nobody's generator."""
    shapes = [(4, 3, _WIDTH), (4, 3, _WIDTH), *((_WIDTH,), (_WIDTH, 2 * _WIDTH), (_WIDTH, _WIDTH)) * _LAYERS]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in shapes]
    return [each.to(device).requires_grad_() for each in found]


def _try(device: torch.device) -> str:
    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        inputs = _inputs(device)
        results = function(*inputs)
        total = torch.stack([each.sum() for each in results]).sum()
        return [*(each.detach() for each in results), *torch.autograd.grad(total, inputs)]

    with isolated(), frames.apart(), torch.inference_mode(False), torch.enable_grad():
        expected = gradients(partial(_stacked, _layer))
        found = gradients(inductor.compile_graph(_graph(), _inputs(device), configured.configuration(), ""))
    off = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True))
    return f"it is off by {off:.2g} here" if not off <= _ROUNDING else ""
