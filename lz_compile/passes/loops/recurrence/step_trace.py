"""One step of a scan as ATen operations without side effects, or why there is no such thing.

Operations that take symbolic sizes as arguments get them from operands of the step (:mod:`step_sizes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.expressions import constant_value
from lz_compile.passes.graph.modes import Ambient, faking
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import known_tensor, memory_of, needed, read, tensor_of, value_of
from lz_compile.passes.graph.writes import overwritten
from lz_compile.passes.loops.recurrence.step_sizes import StepSizes, name_sizes

aten = torch.ops.aten
SCAN = torch.ops.higher_order.scan
#: How the steps of parts of a loop are called, in whose results every tensor is a copy.
PART = "scan_part"

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CHANGES_GRADIENTS = frozenset({"_set_grad_enabled", "inference_mode", "_enter_inference_mode"})


@dataclass(frozen=True)
class ScanCall:
    """A node that calls ``scan``: its step, what the step carries, what it takes apart over time, and what stays.

    What stays may be a number: a size that is symbolic.
    """

    node: fx.Node
    body: fx.GraphModule
    init: tuple[fx.Node, ...]
    xs: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """In the order in which the step takes them."""
        return (*self.init, *self.xs, *self.given)

    @property
    def length(self) -> Any:
        """The number of steps."""
        return known_tensor(self.xs[0]).shape[0]


def results_of(node: fx.Node) -> dict[int, list[fx.Node]]:
    """The nodes that pick a result of a scan, by its place: of a loop, final states come first, then what the steps give.

    Raises:
        RefusedError: somebody takes all of them.
    """
    found: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            raise RefusedError("SCAN_USED_WHOLE", f"{told(user)} takes all results of a scan", "unpack them")
        found.setdefault(user.args[1], []).append(user)
    return found


def scan_call(node: fx.Node) -> ScanCall | None:
    """The parts of a node that calls ``scan``; None where it is none, or carries something other than tensors."""
    if node.op != "call_function" or node.target is not SCAN:
        return None
    names = ("combine_fn", "init", "xs", "additional_inputs")
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    target, owner = values["combine_fn"], node.graph.owning_module
    body = getattr(owner, str(target.target), None) if isinstance(target, fx.Node) else None
    groups: list[tuple[Any, ...]] = [tuple(values.get(name, ())) for name in names[1:]]  # type: ignore[arg-type]
    init, xs, given = groups
    is_plain = all(tensor_of(each) is not None for each in (*init, *xs)) and all(
        isinstance(each, fx.Node) and isinstance(value_of(each), (torch.Tensor, torch.SymInt, int)) for each in given
    )
    if not isinstance(body, fx.GraphModule) or not is_plain or not xs:
        return None
    return ScanCall(node, body, init, xs, given)


@dataclass(frozen=True)
class Step:
    """A step as a graph of ATen operations with example values in ``meta["val"]``.

    ``states``, ``slices`` and ``given`` are its inputs: what is carried, what time takes apart, what stays the same.
    ``names`` are what the source calls them, ``sizes`` say where those that are symbolic can be read.
    """

    module: fx.GraphModule
    states: tuple[fx.Node, ...]
    slices: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    names: Mapping[fx.Node, str]
    sizes: StepSizes = field(default_factory=StepSizes)

    @property
    def graph(self) -> fx.Graph:
        """Its operations."""
        return self.module.graph

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The states after the step, and what the step gives."""
        (found,) = self.graph.output_node().args
        return tuple(found)  # type: ignore[arg-type]

    @property
    def carried(self) -> tuple[fx.Node, ...]:
        """The states after the step."""
        return self.outputs[: len(self.states)]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """What the step gives besides."""
        return self.outputs[len(self.states) :]


def trace_step(call: ScanCall, ambient: Ambient) -> Step:
    """The step of a scan in ATen operations, without writes and with equal ones merged.

    Raises:
        RefusedError: it does something that cannot be moved in time, or a size is no product of sizes of what it is given.
    """
    _check_body(call.body)
    values = [known_tensor(node) for node in call.init]
    values += [_slice(known_tensor(node)) for node in call.xs]
    values += [value_of(node) for node in call.given]
    if any(0 in shape_of(value) for value in values if isinstance(value, torch.Tensor)):
        raise RefusedError("STEP_SIZES", "sizes inside of a step are zero", "skip the loop where there is nothing")
    sizes = StepSizes.of(values)
    return replace(_step(call, _module(call, values, ambient, sizes)), sizes=sizes)


def _module(call: ScanCall, values: Sequence[Any], ambient: Ambient, sizes: StepSizes) -> fx.GraphModule:
    """A step as operations of ATen."""
    body, mode = call.body, values[0].fake_mode
    module = traced(torch.func.functionalize(body), values, ambient, mode)
    if any(_writes(node) for node in module.graph.nodes):  # some compound operations write into tensors of their own
        module = traced(torch.func.functionalize(module), values, ambient, mode)
    for node in module.graph.nodes:
        _check(node)
        if node.target in _VIEWS:
            node.target = aten.reshape.default
    if sizes:
        name_sizes(module.graph, sizes, len(call.init))
    _merge_equal(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _copied(node: Any) -> Any:
    """What was copied where a loop was taken apart: that a result has memory of its own is not what a step computes."""
    is_copy = isinstance(node, fx.Node) and node.target is aten.clone.default and "memory_format" in node.kwargs
    return node.args[0] if is_copy else node


def _step(call: ScanCall, module: fx.GraphModule) -> Step:
    """A traced step with its inputs by their roles."""
    if str(call.node.args[0].target).startswith(PART):  # type: ignore[union-attr]
        output = module.graph.output_node()
        output.args = pytree.tree_map(_copied, output.args)
        module.graph.eliminate_dead_code()
        module.recompile()
    inputs = list(module.graph.find_nodes(op="placeholder"))
    first, second = len(call.init), len(call.init) + len(call.xs)
    names = {inner: _source_name(outer) for inner, outer in zip(inputs, call.operands, strict=True)}
    names |= {state: "state" for state, outer in zip(inputs, call.init, strict=False) if is_filled(outer)}
    step = Step(module, tuple(inputs[:first]), tuple(inputs[first:second]), tuple(inputs[second:]), names)
    if not all(isinstance(each, fx.Node) for each in step.outputs):
        raise RefusedError("STEP_RESULTS", "a step gives something that is no tensor", "return tensors")
    return step


def traced(function: Callable[..., Any], values: Sequence[Any], ambient: Ambient, mode: Any) -> fx.GraphModule:
    """``function`` over example values of a fake mode as ATen operations, under the modes of ``ambient``."""
    with faking(mode, ambient), torch.no_grad():
        return make_fx(function)(*values)


def is_filled(node: fx.Node, number: float | None = None) -> bool:
    """Whether a tensor is known to hold one number everywhere (this one): it was made so, and nothing was written to it."""
    call = read(node)
    while call is not None and layout.rearranges(call) and isinstance(call.input, fx.Node) and not call.is_inplace:
        call = read(call.input)
    found = None if call is None or call.is_inplace else constant_value(call)
    return call is not None and found is not None and number in (None, found) and not _is_written(call.node)


def _is_written(made: fx.Node) -> bool:
    """Whether anything writes to a tensor, under any name; memory of which nobody can tell counts as another's."""
    memory = memory_of(made)
    views = needed([made], (), lambda node: (user for user in node.users if memory_of(user) in (None, memory)))
    calls = (read(user) for view in views for user in view.users)
    return any(memory_of(target) == memory for call in calls if call is not None for target in overwritten(call))


def _source_name(node: fx.Node) -> str:
    """What the source calls a tensor, or what it was moved from."""
    found = read(node)
    while found is not None and layout.rearranges(found) and isinstance(found.input, fx.Node):
        node = found.input
        found = read(node)
    name = node.name.removesuffix("_") if node.op == "placeholder" else node.name
    for prefix in ("l_self_modules_", "l_self_", "l_stack0_", "l_", "g_"):
        if node.op == "placeholder" and name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _slice(value: torch.Tensor) -> torch.Tensor:
    """One step of what time takes apart; no view, for a fake mode that remembers views may give one that is a leaf."""
    with faking(value.fake_mode):  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape[1:], value.stride()[1:], dtype=value.dtype, device=value.device)


def _check_body(body: fx.GraphModule) -> None:
    """Refuse what a trace would hide."""
    for node in body.graph.nodes:
        call = read(node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            text = f"a step calls {node.target.name()}, which is not looked into"
            raise RefusedError("STEP_OPAQUE", text, "write the step in plain operations")
        if call is not None and call.name in _CHANGES_GRADIENTS:
            text = "a step turns gradients on or off inside"
            raise RefusedError("STEP_GRADIENTS", text, "detach the values instead")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check(node: fx.Node) -> None:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            text = f"a step draws random numbers ({node.target.overloadpacket.__name__})"
            raise RefusedError("STEP_RANDOM", text, "draw them for all steps before the loop")
        if _writes(node) or node.target.namespace not in ("aten", "prims"):
            text = f"a step calls {node.target.name()}, which is no plain operation of PyTorch"
            raise RefusedError("STEP_OPAQUE", text, "write the step in plain operations")
    elif node.op == "get_attr":
        text = f"a step holds the constant tensor {node.target}"
        raise RefusedError("STEP_CONSTANT", text, "make it before the loop")
    elif (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not isinstance(node.meta["val"], (int, float, torch.SymInt, torch.SymFloat))
    ):
        raise RefusedError("STEP_OPAQUE", f"a step calls {told(node)}, which is not looked into", "write it out")


def _merge_equal(graph: fx.Graph) -> None:
    """Operations with equal arguments are done once."""
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


#: The home of what depends on no state.
FREE = -1


def homes(step: Step) -> tuple[tuple[tuple[int, ...], ...], dict[fx.Node, int]]:
    """The components, and the one that every node belongs to. A state that never changes is none."""
    changing = [i for i, state in enumerate(step.states) if _origin(step.carried[i]) is not state]
    depends: dict[fx.Node, frozenset[int]] = {step.states[i]: frozenset({i}) for i in changing}
    for node in step.graph.nodes:
        if node not in depends:
            depends[node] = frozenset[int]().union(*(depends[each] for each in node.all_input_nodes))
    reach = {i: set(depends[step.carried[i]]) for i in changing}
    for middle in changing:
        for i in changing:
            if middle in reach[i]:
                reach[i] |= reach[middle]
    order: list[tuple[int, ...]] = []
    left = list(changing)
    while left:
        ready = next(i for i in left if all(j not in left or j == i or i in reach[j] for j in reach[i]))
        component = tuple(j for j in left if j == ready or (j in reach[ready] and ready in reach[j]))
        order.append(component)
        left = [j for j in left if j not in component]
    where = {state: place for place, component in enumerate(order) for state in component}
    return tuple(order), {node: max((where[i] for i in found), default=FREE) for node, found in depends.items()}


def _origin(node: fx.Node) -> fx.Node:
    """What a tensor is a copy of."""
    while node.target in (aten.clone.default, aten.alias.default):
        (node,) = node.all_input_nodes
    return node


def is_delay(step: Step, states: tuple[int, ...]) -> bool:
    """Whether what states become depends on none of them."""
    own = {step.states[state] for state in states}
    return not any(own & set(needed([step.carried[state]], ())) for state in states)


def prepare(step: Step, home: Mapping[fx.Node, int]) -> bool:
    """Spell out quotients of a state, and choices between values of several components; whether there were any."""
    changed = False
    for node in list(step.graph.nodes):
        with step.graph.inserting_before(node):
            spelled = _spelled(step.graph, node, home)
        if spelled is not None:
            node.replace_all_uses_with(spelled)
            step.graph.erase_node(node)
            changed = True
    if changed:
        step.module.recompile()
    return changed


def _spelled(graph: fx.Graph, node: fx.Node, home: Mapping[fx.Node, int]) -> fx.Node | None:
    if node.target is aten.div.Tensor and is_tensor(node.args[1]):
        return _as_product(graph, node, home)
    if node.target is aten.addcdiv.default:
        base, one, other = node.args
        quotient = insert(graph, aten.div.Tensor, (one, other))
        return insert(graph, aten.add.Tensor, (base, quotient), {"alpha": node.kwargs.get("value", 1)})
    return _as_sum_of_choices(graph, node, home) if node.target is aten.where.self else None


def _as_product(graph: fx.Graph, node: fx.Node, home: Mapping[fx.Node, int]) -> fx.Node | None:
    over, under = node.args
    is_state = isinstance(over, fx.Node) and home.get(over, FREE) != FREE
    assert isinstance(under, fx.Node)
    if not is_state or home[under] >= home[over] or not node.meta["val"].is_floating_point():  # type: ignore[index]
        return None
    dtype = node.meta["val"].dtype
    if under.meta["val"].dtype != dtype:  # a quotient is computed in the wider of both
        under = insert(graph, aten._to_copy.default, (under,), {"dtype": dtype})
    return insert(graph, aten.mul.Tensor, (over, insert(graph, aten.reciprocal.default, (under,))))


def _as_sum_of_choices(graph: fx.Graph, node: fx.Node, home: Mapping[fx.Node, int]) -> fx.Node | None:
    condition, one, other = node.args
    homes = {home.get(each, FREE) for each in (one, other) if isinstance(each, fx.Node)}
    if FREE in homes or len(homes) < 2 or home.get(condition, FREE) != FREE:  # type: ignore[arg-type]
        return None
    kind = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
    zero = insert(graph, aten.scalar_tensor.default, (0.0,), kind)
    first = insert(graph, aten.where.self, (condition, one, zero))
    return insert(graph, aten.add.Tensor, (first, insert(graph, aten.where.self, (condition, zero, other))))


def insert(graph: fx.Graph, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """A new call at the insertion point of a graph, with its example value."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    given_args, given_kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    mode = next(each.meta["val"].fake_mode for each in graph.find_nodes(op="placeholder"))
    with faking(mode), torch.no_grad():
        node.meta["val"] = target(*given_args, **given_kwargs)
    return node


def is_tensor(value: Any) -> bool:
    """Whether an argument is a node that holds a tensor, not a size: the shape of a result says what that is."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
