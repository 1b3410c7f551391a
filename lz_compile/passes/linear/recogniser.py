"""Products whose weight is computed from stored numbers of few bits, however it is spelled.

The anchor is the product. Its weight may be int8, uint8 or float8, or bytes that hold two numbers of four bits, with scales,
zero points or offsets of rows, columns and groups of columns. A weight that is only cast is one, too: what its result is
multiplied by afterwards stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.linear import NATIVE
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.contraction import Contraction, Factor
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.linear.emitter import LinearEmitter
from lz_compile.passes.linear.kept import brought
from lz_compile.passes.linear.reading import Weight, read_weight, storage_of
from lz_compile.passes.linear.unpacked import numbers_of
from lz_compile.passes.masks.constants import hold_the_same
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins

OP = "linear"
#: A product whose weight only the machine that packed it can read.
_MACHINES_OWN = "_weight_int4pack_mm_for_cpu"


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every product with a stored weight in ``graph``, and every one that is nearly so, with the reason."""
    reader = _Reader(effects, Twins(effects, hold_the_same))
    return Driver(OP).walk(graph.nodes, reader.is_anchor, reader.read)


@dataclass
class _Reader:
    effects: Effects
    twins: Twins
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
            return self._native(call)
        region, dims = Region(self.effects), fresh(shape_of(known_tensor(anchor)))
        product, bias = self._product(region, call, dims)
        given, factor = product.left, product.right  # of a weight on the left nobody could tell that it is none
        rows = set(axes_of(given.dims)) - set(product.summed)
        if rows & set(axes_of(factor.dims)):
            raise RefusedError("BATCHED_WEIGHT", "every row has a weight of its own", "multiply each by itself")
        weight = brought(self.effects, read_weight(self.effects, product, factor, self.storage(factor.node)))
        core = self._core(weight.region, weight.leaf.node, anchor, [given.node, *([] if bias is None else [bias.node])])
        read: Mapping[fx.Node, Dims] = {**weight.read, anchor: dims}
        return LinearEmitter.of(product.dims, given, weight, bias, core).match(OP, core, read)

    def _native(self, call: Call) -> Match:
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
        core = self._core(region, stored, anchor, [given])
        emitter = LinearEmitter.of(dims, Factor(given, (dims[0], columns)), weight, None, core)
        return emitter.match(OP, core, {anchor: dims})

    def _product(self, region: Region, call: Call, dims: Dims) -> tuple[Contraction, Leaf | None]:
        """The product, and what is added to each of its columns.

        Raises:
            LayoutError: it is none, or something else is added.
        """
        product = contraction.read(region, call, dims)
        if product is None or product.coefficient != 1:
            raise LayoutError("no product, or a multiple of one")
        if product.addend is None:
            return product, None
        node, added_dims, weight = product.addend
        leaf = Leaf(node, added_dims)
        if weight != 1 or not leaf.axes <= set(axes_of(dims[-1:])):
            raise LayoutError("what is added is no bias")
        return product, leaf

    def _core(self, region: Region, storage: fx.Node, anchor: fx.Node, others: list[fx.Node]) -> Core:
        """What becomes superfluous.

        Raises:
            RefusedError: someone else needs the weight, a mode changes, or an operand is overwritten.
        """
        found = find_core(self.effects, storage, anchor, is_operand=True)
        core = replace(
            found, nodes=tuple(node for node in found.nodes if node is not storage)
        )  # others may read it, too
        edge = {leaf.node for leaf in region.leaves.values()} | set(others)
        readers: dict[fx.Node, fx.Node] = {node: region.readers.get(node, anchor) for node in edge}
        core.check(self.effects, readers, if_used="use the dequantised weight for one product only")
        return core
