"""Regions of a graph that Inductor is handed, with a backward pass: nothing they hand out may lie in other memory of theirs.

AOTAutograd (2.13) lets a region hand out what its backward pass needs: also what it was handed, and views of what it hands
out anyhow. Inductor takes each result for memory of its own. It writes to it again once that one name is read no more, and
gradients are wrong.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

INVOKE = torch.ops.higher_order.invoke_subgraph
#: What our regions are called.
NAME = "layer_region"
#: Whether calls with gradients may write to operands: if not, PyTorch looks whether they do.
_MAY_WRITE = "_supports_training_input_mutation"
#: How many arguments of a call are no operands: the region and its name.
_AHEAD = 2
#: A view that counts from where the memory begins.
_FROM_THE_START = torch.ops.aten.as_strided.default
#: What Inductor may make views of, though their schemas do not say so.
_MAYBE_VIEWS = frozenset({"reshape", "_unsafe_view", "_reshape_alias"})


@dataclass(frozen=True)
class _Lies:
    """Where a result lies: in a result (or an operand) of that number, behind ``views``, the first of which reads it."""

    number: int
    is_operand: bool
    views: tuple[Any, ...]


def has_regions(module: fx.GraphModule) -> bool:
    """Whether a graph calls regions of our making: what others decorate is left as it is."""
    return any(map(_is_ours, module.graph.find_nodes(op="call_function", target=INVOKE)))


def _is_ours(call: fx.Node) -> bool:
    return str(call.args[1]).startswith(NAME)


@contextmanager
def writing_to_no_operand(module: fx.GraphModule) -> Iterator[None]:
    """Spare PyTorch's look at every call, whether its region writes to an operand: ours never do.

    With gradients, 2.13 traces the region anew for it, at each of its calls. Where there are regions of others, it looks.
    """
    graphs = (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))
    calls = (call for graph in graphs for call in graph.find_nodes(op="call_function", target=INVOKE))
    if not hasattr(INVOKE, _MAY_WRITE) or not all(map(_is_ours, calls)):
        yield
        return
    with patch.object(INVOKE, _MAY_WRITE, True):
        yield


def untangle(graph: fx.Graph) -> None:
    """Make what regions hand out twice, or hand back, outside of them: by the views that they make of it.

    Args:
        graph: calls regions, is changed in place, and so are they. Every node has its value (``meta["val"]``).
    """
    module = graph.owning_module
    calls: dict[fx.GraphModule, list[Any]] = {}
    for call in graph.find_nodes(op="call_function", target=INVOKE):
        if NAME not in str(call.args[1]):
            continue
        calls.setdefault(operator.attrgetter(call.args[0].target)(module), []).append(call)
    for region, those in calls.items():
        before = _output(region.graph).args
        moved = _moved(region.graph, those)
        if _output(region.graph).args == before:
            continue
        region.recompile()
        for call in those:
            _move(graph, call, moved, region.graph)
            call.meta["val"] = tuple(map(_value, _output(region.graph).args[0]))
            call.update_arg(1, f"{call.args[1]}_untangled")  # PyTorch keeps what a region gives by its name


def _output(graph: fx.Graph) -> Any:
    return next(iter(graph.find_nodes(op="output")))


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _moved(region: fx.Graph, calls: Sequence[Any]) -> dict[int, _Lies]:
    """The results that a region hands out no more, and where they lie; what cannot be told from outside is copied inside."""
    output = _output(region)
    results: list[Any] = list(output.args[0])
    operands = {node: number for number, node in enumerate(region.find_nodes(op="placeholder"))}
    lies = [behind_views(node) if isinstance(_value(node), torch.Tensor) else None for node in results]
    shared = Counter(each[0] for each in lies if each is not None)
    moved: dict[int, _Lies] = {}
    for number, each in enumerate(lies):
        if each is None:
            continue
        base, views = each
        is_told = all(view.all_input_nodes == [view.args[0]] and view.target != _FROM_THE_START for view in views)
        if base in operands:
            place = operands[base]
            is_told &= all(_is_like(base, call.args[_AHEAD + place]) for call in calls)
        elif shared[base] > 1:
            if base not in results:
                results.append(base)
            place = results.index(base)
            if place == number:
                continue
        else:
            continue
        if is_told:
            moved[number] = _Lies(place, base in operands, views)
        else:
            with region.inserting_before(output):
                copied = region.call_function(torch.ops.aten.clone.default, (results[number],))
            copied.meta["val"], results[number] = _value(results[number]), copied
    for number in moved:
        results[number] = None
    appended = range(len(output.args[0]), len(results))
    _tell(
        output, [place for place in range(len(results)) if place not in moved], [results[place] for place in appended]
    )
    output.args = (tuple(results),)
    return moved


def _tell(output: Any, places: Sequence[int], appended: Sequence[fx.Node]) -> None:
    """Keep up what Inductor notes of a region's results: which keep their strides, and what those are."""
    name, strides = "user_visible_output_idxs", "original_output_strides"
    count = len(output.args[0])
    if name in output.meta:
        output.meta[name] = [place for place in places if place in output.meta[name] or place >= count]
    if strides in output.meta:
        output.meta[strides] = [*output.meta[strides], *(_value(node).stride() for node in appended)]


def behind_views(node: Any) -> tuple[fx.Node, tuple[Any, ...]]:
    """What a node is a view of, and the calls that lead from there to it."""
    views: list[Any] = []
    while _is_view(node) or (node.target is operator.getitem and _is_view(node.args[0])):
        views.append(node)
        node = node.args[0]
    return node, tuple(reversed(views))


def _is_view(node: Any) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    is_aliased = any(each.alias_info is not None for each in target._schema.returns)
    return is_aliased or target.overloadpacket.__name__ in _MAYBE_VIEWS


def _is_like(placeholder: fx.Node, operand: Any) -> bool:
    """Whether an operand lies as a region expects it: without a copy. Symbols are compared as they are spelled."""
    one, other = (_value(node) for node in (placeholder, operand))
    lies = [repr((each.shape, each.stride(), each.dtype)) for each in (one, other) if isinstance(each, torch.Tensor)]
    return len(lies) == 2 and lies[0] == lies[1]


def _move(graph: fx.Graph, call: Any, moved: Mapping[int, _Lies], region: fx.Graph) -> None:
    results = _output(region).args[0]
    item: Any
    for item in list(call.users):
        lies = moved.get(item.args[1]) if item.target is operator.getitem else None
        if lies is None:
            continue
        if lies.is_operand:
            made = call.args[_AHEAD + lies.number]
        else:
            with graph.inserting_after(call):
                made = graph.call_function(operator.getitem, (call, lies.number))
            made.meta["val"] = _value(results[lies.number])
        with graph.inserting_before(item):
            for view in lies.views:
                made = graph.node_copy(view, {view.args[0]: made}.__getitem__)
        item.replace_all_uses_with(made)
        graph.erase_node(item)
