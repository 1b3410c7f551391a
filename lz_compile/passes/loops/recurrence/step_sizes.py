"""Two traces of one step with different numbers for its symbolic sizes: whether they are equal but for these, and where."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.walks import needed
from lz_compile.passes.loops.recurrence.size_placeholders import SizePlaceholder, SizePlaceholders

#: In the metadata of nodes that are sizes.
_SIZE = "layerzero_size"


def check_twins(first: fx.GraphModule, second: fx.GraphModule, sizes: SizePlaceholders) -> None:
    """Compare the traces node by node.

    Raises:
        RefusedError: what a step does depends on a symbolic size in another way than by a product of sizes.
    """
    nodes, others = list(first.graph.nodes), list(second.graph.nodes)
    is_alike = len(nodes) == len(others)
    for node, other in zip(nodes, others, strict=False):
        is_alike = is_alike and (node.op, node.name) == (other.op, other.name)
        is_alike = is_alike and (node.op != "call_function" or node.target is other.target)
        pairs = _pairs((node.args, node.kwargs), (other.args, other.kwargs)) if is_alike else None
        if pairs is None:
            is_alike = False
            break
        for value, twin in (*pairs, *zip(_shape(node), _shape(other), strict=True)):
            if value != twin and not (isinstance(value, int) and sizes.twin(value) == twin):
                text = (
                    f"{told(node)} has a size or a number ({value}, then {twin}) that is no product of symbolic sizes"
                )
                raise RefusedError("STEP_SIZES", text, "compile with dynamic=False")
    if not is_alike:
        text = "a step does other things where a symbolic size is another one"
        raise RefusedError("STEP_SIZES", text, "compile with dynamic=False")


def unchanged_sizes(first: fx.GraphModule, second: fx.GraphModule) -> Iterator[int]:
    """The sizes that are the same in both traces."""
    for node, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        for size, twin in zip(_shape(node), _shape(other), strict=True):
            if size == twin:
                yield size


def name_sizes(first: fx.GraphModule, second: fx.GraphModule, states: int, sizes: SizePlaceholders) -> None:
    """Let operations of both traces take symbolic sizes from operands of the step, in place.

    Args:
        first: the trace whose numbers are those of ``sizes``.
        second: the other one.
        states: how many of the operands are states, of which sizes are not to depend.
        sizes: the placeholders.

    Raises:
        RefusedError: no other operand has a size.
    """
    pairs = list(zip(first.graph.nodes, second.graph.nodes, strict=True))
    namers = [_Namer(module.graph, states, sizes) for module in (first, second)]
    for both in pairs:
        leaves, forms = zip(*(pytree.tree_flatten((node.args, node.kwargs)) for node in both), strict=True)
        changed = {
            place: leaf
            for place, (leaf, twin) in enumerate(zip(*leaves, strict=True))
            if isinstance(leaf, int) and leaf != twin
        }
        for node, namer, own, form in zip(both, namers, leaves, forms, strict=True):
            named = {place: namer.size(number, own[place], node) for place, number in changed.items()}
            if named:
                values = [named.get(place, value) for place, value in enumerate(own)]
                node.args, node.kwargs = pytree.tree_unflatten(values, form)
    for module in (first, second):
        module.recompile()


class _Namer:
    """Puts the sizes of operands into the graph of a step."""

    def __init__(self, graph: fx.Graph, states: int, sizes: SizePlaceholders) -> None:
        self._graph = graph
        self._states = states
        self._sizes = sizes
        self._inputs = list(graph.find_nodes(op="placeholder"))
        self._known: dict[tuple[int, frozenset[fx.Node]], fx.Node] = {}

    def size(self, number: int, value: int, reader: fx.Node) -> fx.Node:
        """The size that a number of the first trace stands for, which is ``value`` in this one, in front of its reader."""
        near = frozenset(needed([reader], ())).intersection(self._inputs)
        if (number, near) not in self._known:
            with self._graph.inserting_before(self._first_call()):
                found = self._product(number, near)
            assert found.meta["val"] == value, f"{found.name} is {found.meta['val']} instead of {value}"
            self._known[number, near] = found
        return self._known[number, near]

    def _first_call(self) -> fx.Node:
        found: fx.Node = next(each for each in self._graph.nodes if each.op != "placeholder" and _SIZE not in each.meta)
        return found

    def _product(self, number: int, near: frozenset[fx.Node]) -> fx.Node:
        coefficient, exponents = self._sizes.parts(number)
        factors: list[fx.Node] = []
        for symbol, count in zip(self._sizes.symbols, exponents, strict=True):
            factors += [self._symbol(symbol, near) for _ in range(count)]
        total: fx.Node = factors[0]
        for factor in factors[1:]:
            total = self._call(operator.mul, total, factor)
        return total if coefficient == 1 else self._call(operator.mul, total, coefficient)

    def _symbol(self, symbol: SizePlaceholder, near: frozenset[fx.Node]) -> fx.Node:
        places = [place for place in symbol.places if place.operand >= self._states and place.dim is not None]
        if not places:
            text = f"a step needs the symbolic size {symbol.size}, which is that of no slice"
            raise RefusedError("STEP_SIZES", text, "read a tensor of that size in each step")
        place = min(places, key=lambda each: self._inputs[each.operand] not in near)
        whole = self._call(torch.Tensor.size, self._inputs[place.operand], place.dim)
        if place.divisor == 1:
            return whole
        is_plain = not any(self._sizes.parts(place.divisor)[1])
        return self._call(operator.floordiv, whole, place.divisor if is_plain else self._product(place.divisor, near))

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node: fx.Node = self._graph.call_function(target, args)
        values = fx.map_arg(args, lambda each: each.meta["val"])
        node.meta.update({"val": target(*values), _SIZE: True})
        return node


def _shape(node: fx.Node) -> Sequence[int]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _pairs(one: Any, two: Any) -> list[tuple[Any, Any]] | None:
    """The leaves of two arguments beside each other, nodes by their names; None where they have other forms."""
    first, form = pytree.tree_flatten(one)
    second, other = pytree.tree_flatten(two)
    if form != other or [type(each) for each in first] != [type(each) for each in second]:
        return None
    return [
        (value.name, twin.name) if isinstance(value, fx.Node) else (value, twin)
        for value, twin in zip(first, second, strict=True)
    ]
