"""What depends on which state of a step, spelled so that states come apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.modes import faking
from lz_compile.passes.graph.walks import needed
from lz_compile.passes.loops.recurrence.step_trace import Step

aten = torch.ops.aten
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
