"""The activation ``a = Vh x`` of a kept adapter, wherever else it is computed: what a mask may compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of
from lz_compile.passes.graph.effects import MutatedError
from lz_compile.passes.routing.products import Products


@dataclass
class Activation:
    """The product of ``source`` and the weight ``down``, whose only axis of the rank is ``rank``.

    ``region`` makes a region to read in. ``interior`` has every node that was read through, ``inputs`` the axes along which
    the source was read.
    """

    source: fx.Node
    down: Leaf
    rank: tuple[Axis, ...]
    region: Callable[[], Products]
    interior: dict[fx.Node, Dims] = field(default_factory=dict)
    readers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[Dims] = field(default_factory=list)

    def is_it(self, node: fx.Node, dims: Dims, axis: Axis) -> bool:
        """Whether a value with axes ``dims``, ``axis`` among them as the rank, is the activation, times a positive number."""
        region = self.region()
        try:
            terms = region.terms(region.express(node, dims)) or []
        except (LayoutError, MutatedError):
            return False
        if len(terms) != 1 or len(terms[0].symbols) != 2 or terms[0].coefficient <= 0 or len(self.rank) != 1:
            return False
        leaves = [region.leaves[symbol] for symbol in terms[0].symbols]
        x, weight = sorted(leaves, key=lambda leaf: leaf.node is not self.source)
        features = x.axes - frozenset(axes_of(dims))
        if x.node is not self.source or weight.node is not self.down.node or weight.axes != features | {axis}:
            return False
        if _places(weight.dims, axis) != _places(self.down.dims, self.rank[0]):
            return False
        self.interior = {**region.interior, **self.interior}
        self.readers = {**region.readers, **self.readers}
        self.inputs.append(x.dims)
        return True


def _places(dims: Dims, axis: Axis) -> list[bool]:
    return [axis in atoms(dim) for dim in dims]
