"""Every product with a stored weight of a graph as a match, calls of PyTorch's own among them. What is none is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.linear import NATIVE
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import LayoutError, fresh
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.formula.expressions import Values
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.linear import recogniser
from lz_compile.passes.linear.emitter import LinearEmitter
from lz_compile.passes.linear.form import brought
from lz_compile.passes.linear.reading import Weight, storage_of
from lz_compile.passes.linear.recogniser import Dequantised
from lz_compile.passes.linear.unpacked import numbers_of
from lz_compile.passes.masks.constants import Constants, hold_the_same
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins

OP = "linear"
#: A product whose weight only the machine that packed it can read.
_MACHINES_OWN = "_weight_int4pack_mm_for_cpu"


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every product with a stored weight in ``graph``, and every one that is nearly so, with the reason."""
    reader = _Reader(effects, Twins(effects, hold_the_same), Constants(effects).value)
    return Driver(OP).walk(graph.nodes, reader.is_anchor, reader.read)


@dataclass
class _Reader:
    effects: Effects
    twins: Twins
    known: Values
    _storage: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    _stored: dict[fx.Node, bool] = field(default_factory=dict)

    def is_anchor(self, node: fx.Node) -> bool:
        """Whether a call is a product one of whose factors is computed from stored numbers."""
        call, tensor = self.effects.calls[node], tensor_of(node)
        if call is not None and call.name in (*NATIVE, _MACHINES_OWN):
            return 0 not in shape_of(known_tensor(node))
        is_product = call is not None and call.name in contraction.PRODUCTS
        if not is_product or tensor is None or not tensor.is_floating_point() or 0 in shape_of(tensor):
            return False
        return any(map(self._is_stored, node.all_input_nodes))

    def _is_stored(self, node: fx.Node) -> bool:
        if node not in self._stored:
            self._stored[node] = self.storage(node) is not None or numbers_of(self.effects, node) is not None
        return self._stored[node]

    def storage(self, node: fx.Node) -> fx.Node | None:
        """See :func:`storage_of`."""
        if node not in self._storage:
            self._storage[node] = storage_of(self.effects, node)
        return self._storage[node]

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        """What an anchor is.

        Raises:
            RefusedError: its weight means something else, with the reason.
            MutatedError: an alias of a value was overwritten before it is read.
            LayoutError: it is no product of a weight and rows.
        """
        return self.twins.read((anchor,), lambda: self._match(anchor))

    def _match(self, anchor: fx.Node) -> Match:
        call = self.effects.calls[anchor]
        assert call is not None, "an anchor is a call"
        if call.name in (*NATIVE, _MACHINES_OWN):
            read = self._native(call)
        else:
            read = recogniser.recognise(self.effects, call, self.storage, self.known)
            read = replace(read, weight=brought(self.effects, read.weight))
        core = self._core(read)
        return LinearEmitter.of(read, core).match(OP, core, {**read.weight.read, anchor: read.output_dims})

    def _native(self, call: Call) -> Dequantised:
        """The product that a call of PyTorch's own is.

        Raises:
            RefusedError: its weight has a layout that other machines do not know.
        """
        if call.name == _MACHINES_OWN:
            text = "the weight is laid out for the instructions of this machine, and PyTorch's own product of it stays"
            raise RefusedError("NOT_DEQUANTISED", text, "store two numbers in a byte, and multiply by what they mean")
        anchor, region = call.node, Region(self.effects)
        nodes = [region.seen_by(anchor, each) for each in anchor.args if isinstance(each, fx.Node)]
        if len(nodes) != 3:
            raise LayoutError("operands by other names")
        (given, stored, scale), dims = nodes, fresh(shape_of(known_tensor(anchor)))
        (columns,) = fresh(shape_of(known_tensor(given))[1:])
        if not columns or not dims[1]:
            raise LayoutError("a product without columns")
        meant, leaf = region.leaf(scale, (dims[1],)), Leaf(stored, (dims[1], columns))
        weight = Weight(leaf, "none", meant, sympy.S.Zero, region, dims[1], columns, (), columns, is_native=True)
        return Dequantised(Factor(given, (dims[0], columns)), weight, None, anchor, dims)

    def _core(self, read: Dequantised) -> Core:
        """What becomes superfluous.

        Raises:
            RefusedError: someone else needs the weight, a mode changes, or an operand is overwritten.
        """
        region, storage, anchor = read.weight.region, read.weight.leaf.node, read.output
        found = find_core(self.effects, storage, anchor, is_operand=True)  # others may read what is stored, too
        core = replace(found, nodes=tuple(node for node in found.nodes if node is not storage))
        edge = {leaf.node for leaf in region.leaves.values()} | {read.given.node}
        edge |= set() if read.bias is None else {read.bias.node}
        readers = {node: region.readers.get(node, anchor) for node in edge}
        core.check(self.effects, readers, if_used="use the dequantised weight for one product only")
        return core
