"""What is a pointwise function of one or two projections: where an activation of an MLP may be.

One walk over the graph notes, for every value, the *rows* that it is computed from by pointwise and layout operations only,
the tensors that are given (weights and inputs), and whether anything on the way bends. What has more than two rows is a row
itself: nothing is followed through residual streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction, layout, moves
from lz_compile.passes.formula.equal_values import is_torchs
from lz_compile.passes.formula.expressions import is_cast, is_constant
from lz_compile.passes.formula.pointwise import BENDS, Rule, bends, is_moved, is_read
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import EMITTED, Call, is_floating, known_tensor, reached, tensor_of, tensor_operands

if TYPE_CHECKING:
    from lz_compile.passes.formula.algebra import Region
    from lz_compile.passes.formula.axes import Dims

#: Products that are projections; the last ones with weights of several experts, or over neighbours.
PRODUCTS = contraction.PRODUCTS | {
    *("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "scaled_mm", "_scaled_mm", "linalg_multi_dot")
}
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
#: How rows and weights are cut out of others, and experts' picked, or are put together.
_MADE = layout.SPLITS | moves.RULES.keys()
#: A weight of several experts is a matrix for each.
_WEIGHT_RANK = 3
_ROWS, _GIVEN, _SIZE, _DEPTH = 2, 3, 48, 10
#: Functions that PyTorch composes of others.
_COMPOSED = frozenset({"softsign", "tanhshrink", "special_i0", "prelu"})


@dataclass(frozen=True)
class Support:
    """What a value is a pointwise function of; ``size`` counts the operations, each as often as it is used."""

    rows: frozenset[fx.Node] = frozenset()
    given: frozenset[fx.Node] = frozenset()
    is_bent: bool = False
    size: int = 0


@dataclass
class Supports:
    """The support of every tensor of a graph; contains the nodes at which reading stops.

    ``functions`` are what may bend a projection: beside parts of activations, functions of which no kernel knows.
    """

    effects: Effects
    functions: dict[str, Rule] = field(default_factory=lambda: {**BENDS})
    _found: dict[fx.Node, Support] = field(default_factory=dict)
    _stops: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node, call in self.effects.calls.items():
            if tensor_of(node) is not None:
                self._found[node] = self._read(node, call)

    def __contains__(self, node: object) -> bool:
        return node in self._stops

    def of(self, node: fx.Node) -> Support:
        """The support of a node."""
        return self._found.get(node, Support())

    def behind(self, node: fx.Node) -> set[fx.Node]:
        """Everything between a value and what it is a pointwise function of."""

        def inner(each: fx.Node) -> Iterator[fx.Node]:
            return (operand for operand in each.all_input_nodes if operand not in self._stops)

        return {*reached(inner(node), inner)}

    def _read(self, node: fx.Node, call: Call | None) -> Support:
        if call is None:
            return Support(given=frozenset({node}))
        if is_constant(call):
            return Support()
        is_known = is_read(call) or layout.is_in_axes(call)
        is_unknown = not is_known and _is_function(call)
        if is_unknown:
            self.functions[call.name] = _unknown
        if EMITTED not in node.meta and (is_unknown or is_known):
            inner = [self._of_operand(each, node) for each in tensor_operands(node)]
            if call.name in ("add", "sub") and self._is_of_projections(node, inner):
                self._stops.add(node)
                return Support(rows=frozenset({node}))
            rows = frozenset[fx.Node]().union(*(each.rows for each in inner))
            given = frozenset[fx.Node]().union(*(each.given for each in inner))
            size = 1 + sum(each.size for each in inner)
            if len(rows) <= _ROWS and len(given) <= _GIVEN and size <= _SIZE:
                return Support(rows, given, is_unknown or bends(call) or any(each.is_bent for each in inner), size)
        self._stops.add(node)
        return Support(rows=frozenset({node}))

    def _is_of_projections(self, node: fx.Node, summands: Sequence[Support]) -> bool:
        """Whether a sum is of two projections, as with a low-rank adapter: of their inputs, joined, that is one."""
        rows = [row for each in summands for row in each.rows]
        if any(len(each.rows) != 1 or each.is_bent or not all(map(_is_row, each.given)) for each in summands):
            return False
        whole = shape_of(known_tensor(node))
        return len({*rows}) == 2 and all(
            shape_of(known_tensor(row)) == whole and projection(self.effects, row) is not None for row in rows
        )

    def _gates(self, node: fx.Node) -> bool:
        """Whether a value is multiplied by another row: by what is computed, and not from the same."""
        own, users = self.of(node).rows, list(node.users)
        for user in users:
            call = self.effects.calls.get(user)
            if is_moved(call):
                users += user.users
            elif call is not None and call.name in ("mul", "addcmul"):
                rows = [self._of_operand(each, user).rows for each in tensor_operands(user)]
                if any(each and not each <= own for each in rows):
                    return True
        return False

    def _of_operand(self, node: fx.Node, reader: fx.Node) -> Support:
        return self._found.get(self.effects.current(node, reader)) or Support(rows=frozenset({node}))

    def is_candidate(self, node: fx.Node) -> bool:
        """Whether a value may be an activation: the last operation of a bent function of one or two projections."""
        call, tensor, support = self.effects.calls.get(node), tensor_of(node), self.of(node)
        if call is None or tensor is None or not tensor.is_floating_point() or 0 in shape_of(tensor):
            return False
        if not support.is_bent or not support.rows or not is_read(call):
            return False
        source = tensor_of(call.input)
        if is_cast(call) and (source is None or source.dtype.itemsize <= tensor.dtype.itemsize):
            return False  # what follows wants another precision
        products = PRODUCTS | CONVOLUTIONS
        if len(support.rows) == 1:
            products = PRODUCTS
            if self._gates(node):
                return False
        return all(projection(self.effects, row, products) is not None for row in support.rows)


def _is_function(call: Call) -> bool:
    """Whether a call is a function of the elements of tensors, and of numbers: PyTorch says so."""
    packet = getattr(torch.ops.aten, call.name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    tags = {tag for each in overloads for tag in getattr(packet, each).tags}
    is_function = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    is_own = (is_function or call.name in _COMPOSED) and is_torchs(call.node.target) and not call.is_inplace
    return is_own and is_floating(call.node) and {*tensor_operands(call.node)} == {*_operands(call).values()}


def _operands(call: Call) -> dict[str, Any]:
    """The arguments of a call that are tensors."""
    return {name: each for name, each in call.arguments.items() if tensor_of(each) is not None}


def _unknown(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    """What such a function is called: by its numbers, too."""
    operands = _operands(call)
    numbers = {name: each for name, each in call.arguments.items() if name not in operands}
    function = sympy.Function(f"{call.name}{numbers or ''}")
    return function(*(region.operand(call, name, dims) for name in operands))


def _is_row(node: fx.Node) -> bool:
    """Whether a tensor is one number for each column, as a bias is."""
    return known_tensor(node).dim() <= 1


def projection(
    effects: Effects, node: fx.Node, products: frozenset[str] = PRODUCTS, depth: int = _DEPTH
) -> fx.Node | None:
    """The product with a weight that a row is, or is cut out of, the first one of a sum; None where it is none."""
    for left in reversed(range(depth)):
        call = effects.calls.get(node)
        if call is None:
            return None
        if call.name in products:
            is_own = call.name == "linear" or call.name in CONVOLUTIONS
            return node if is_own or any(_is_weight(effects, each) for each in tensor_operands(node)) else None
        summed = effects.calls.get(call.input) if call.name == "sum" else None
        if summed is not None and summed.name == "mul":  # a product by hand
            return node if any(_is_weight(effects, each) for each in tensor_operands(summed.node)) else None
        if call.name in ("add", "sub"):
            terms = [each for each in tensor_operands(node) if not _is_weight(effects, each)]
        elif call.name in ("cat", "stack"):  # of the parts of several experts, or of a weight
            terms = _first(call)
        else:
            terms = []
        if terms:
            found = [projection(effects, each, products, left) for each in terms]
            return found[0] if None not in found else None
        if call.name in ("mul", "div"):  # by a number
            following = tensor_operands(node)[0] if len(tensor_operands(node)) == 1 else None
        else:
            is_sum = summed is not None and summed.name == "stack"
            is_through = is_sum or call.name in _MADE or layout.rearranges(call) or is_cast(call)
            following = call.input if is_through else None
        if not isinstance(following, fx.Node):
            return None
        node = following
    return None


def _first(call: Call) -> list[fx.Node]:
    """What a call takes its values from: not the indices, nor symbolic sizes."""
    joined = call.get("tensors", call.input)
    return [joined] if isinstance(joined, fx.Node) else [each for each in joined or () if isinstance(each, fx.Node)]


def _is_weight(effects: Effects, node: fx.Node, depth: int = _DEPTH) -> bool:
    """Whether a value is given, or is made of parts of what is."""
    call = effects.calls.get(node)
    if call is None:
        tensor = known_tensor(node)
        return tensor.dim() <= _WEIGHT_RANK or isinstance(tensor, torch.nn.Parameter)
    if is_constant(call):
        return True
    is_through = call.name in _MADE or layout.rearranges(call) or is_cast(call)
    return is_through and depth > 0 and all(_is_weight(effects, each, depth - 1) for each in _first(call))
