"""Where the symbolic sizes of a step can be read: each is a product or quotient of sizes of what the step is given."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.ground.sizes import Size, as_size
from lz_compile.passes.formula.axes import quotient
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import hint_of, needed

#: So many sizes are multiplied or divided by each other, at most.
_MOST_FACTORS = 6


@dataclass(frozen=True)
class Place:
    """Where a size can be read: dimension ``dim`` of an operand of the step (by place); None: the operand is that number.

    ``hint`` is what it was when it was traced.
    """

    operand: int
    dim: int | None
    hint: int


@dataclass(frozen=True)
class StepSizes:
    """The symbolic sizes of the operands of a step, with all places of each."""

    places: dict[Size, list[Place]] = field(default_factory=dict)

    @staticmethod
    def of(operands: Sequence[Any]) -> StepSizes:
        """Those of tensors and numbers.

        Raises:
            RefusedError: data decides about a size.
        """
        found = StepSizes()
        for number, operand in enumerate(operands):
            is_tensor = isinstance(operand, torch.Tensor)
            for dim, value in enumerate(operand.shape if is_tensor else (operand,)):
                size = as_size(value)
                if isinstance(size, int):
                    continue
                if value.node.hint is None:
                    text = f"a step has the size {size}, which data decides"
                    raise RefusedError("STEP_SIZES", text, "pass sizes as inputs of the graph")
                place = Place(number, dim if is_tensor else None, int(value.node.hint))
                found.places.setdefault(size, []).append(place)
        return found

    def __bool__(self) -> bool:
        """Whether any of them is symbolic."""
        return bool(self.places)

    def hint(self, size: Size) -> int:
        """What a size was when it was traced."""
        return int(self.extent(size, lambda place: place.hint))

    def extent(self, size: Size, read: Callable[[Place], Any]) -> Any:
        """A size, of what ``read`` gives for places (None: it cannot be read there).

        Raises:
            RefusedError: it is no product of sizes that can be read.
        """
        found = self._found(size, read, _MOST_FACTORS)
        if found is None:
            text = f"a step has the symbolic size {size}, which is no product of sizes of what it is given"
            raise RefusedError(
                "STEP_SIZES", text, "read a tensor of that size in each step, or compile with dynamic=False"
            )
        return found

    def _found(self, size: Size, read: Callable[[Place], Any], most: int) -> Any:
        if isinstance(size, int):
            return size
        whole = next((value for value in map(read, self.places.get(size, ())) if value is not None), None)
        if whole is not None or not most:
            return whole
        factor, rest = size.as_coeff_Mul()
        if factor != 1 and factor.is_Integer:
            whole = self._found(rest, read, most - 1)
            return None if whole is None else whole * int(factor)
        for known in (each for each in self.places if each != size):
            for large, small, join in ((size, known, operator.mul), (known, size, operator.floordiv)):
                rest = quotient(large, small)
                one = None if rest is None else self._found(known, read, 0)
                other = None if rest is None or one is None else self._found(rest, read, most - 1)
                if other is not None:
                    return join(one, other)
        return None


def traced_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a value of a step as it was when it was traced."""
    return tuple(int(hint_of(size)) if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape)


def elements(node: fx.Node) -> int:
    """How many elements a value of a step had when it was traced."""
    return math.prod(traced_shape(node))


def name_sizes(graph: fx.Graph, sizes: StepSizes, states: int) -> None:
    """Let operations of a step take symbolic sizes from its operands, but for the first ``states``, in place.

    Raises:
        RefusedError: no other operand has a size.
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    first = next(each for each in graph.nodes if each.op != "placeholder")
    places = {
        size: [each for each in own if each.operand >= states and each.dim is not None]
        for size, own in sizes.places.items()
    }
    namer = _Namer(first, inputs, places)
    for node in list(graph.nodes):
        if node.op == "call_function" and not _is_size(node):
            leaves, form = pytree.tree_flatten((node.args, node.kwargs))
            if any(map(_is_size, leaves)):
                near = frozenset(needed([node], ())).intersection(inputs)
                values = [namer.size(leaf, near) if _is_size(leaf) else leaf for leaf in leaves]
                node.args, node.kwargs = pytree.tree_unflatten(values, form)


def _is_size(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), (int, torch.SymInt))


@dataclass
class _Namer:
    """Puts sizes of operands into the graph of a step, in front of its calls."""

    first: fx.Node
    inputs: Sequence[fx.Node]
    places: Mapping[Size, Sequence[Place]]
    known: dict[tuple[Size, frozenset[fx.Node]], Any] = field(default_factory=dict)

    def size(self, node: fx.Node, near: frozenset[fx.Node]) -> Any:
        """What a node is, read of inputs that are ``near`` if it can be."""
        size = as_size(node.meta["val"])
        if (size, near) not in self.known:
            ordered = {
                each: sorted(places, key=lambda place: self.inputs[place.operand] not in near)
                for each, places in self.places.items()
            }
            before = self.first.prev
            with self.first.graph.inserting_before(self.first):
                found = StepSizes(ordered).extent(size, self._read)
            while before.next is not self.first:
                before = before.next
                values = fx.map_arg(before.args, lambda each: each.meta["val"])
                before.meta["val"] = before.target(*values)  # type: ignore[operator]
            self.known[size, near] = found.node if isinstance(found, fx.Proxy) else found
        return self.known[size, near]

    def _read(self, place: Place) -> fx.Proxy:
        graph = self.first.graph
        node = graph.call_function(torch.Tensor.size, (self.inputs[place.operand], place.dim))
        return fx.Proxy(node, fx.proxy.GraphAppendingTracer(graph))
