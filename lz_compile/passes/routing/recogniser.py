"""Linear layers with a kept and a quarantined adapter, whose gradients are routed or read off a gate.

The anchor is a sum in which two low-rank adapters of one input meet. What its terms are, their axes say
(:mod:`~lz_compile.passes.routing.roles`); how gradients of the kept one are stopped, their signs. An adapter alone, or two of
which none is scaled along its rank, is left alone without a word. What becomes superfluous is asked of what was found
(:mod:`~lz_compile.passes.routing.matching`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, fresh, renamed
from lz_compile.passes.formula.edge import Edge
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import MutatedError, RefusedError, told
from lz_compile.passes.graph.view import known_tensor, tensor_of
from lz_compile.passes.routing.cosine_mask import Activation, Cosine, cosine_of
from lz_compile.passes.routing.products import DETACHED, FUNCTIONS, Products, Summands, Term
from lz_compile.passes.routing.roles import Adapter, Kept, Layer, Role, kept_of, role_of

OP = "routing"
#: How many values are tried as the input of both adapters, and how much is computed to make a weight.
_INPUTS, _WEIGHT = 6, 12


@dataclass(frozen=True)
class Edges:
    """Where reading stops: at the input, at other summands, and at what is computed from neither, unless that is little."""

    summands: Summands
    input: Edge
    others: frozenset[fx.Node]

    def __contains__(self, node: object) -> bool:
        if not isinstance(node, fx.Node) or node is self.input.source or node in self.others:
            return True
        return not self.input.depends(node) and self.summands.size.get(node, 0) > _WEIGHT


@dataclass(frozen=True)
class Operand:
    """One of the tensors that make up an operand, times a number; ``is_detached``: without its gradient."""

    leaf: Leaf
    is_detached: bool
    number: float = 1.0


@dataclass(frozen=True)
class Routed:
    """A sum of adapters: ``operands`` of the op by name, each as tensors that are multiplied (of the base: added).

    ``edges`` are those with who reads each first, ``interior`` is what lies between them and ``output``. ``ties`` are axes
    that are others by another name: each product has its own for what it sums over. ``unread`` is what the source reads
    although it makes no difference, ``products`` the nodes that are products.
    """

    operands: Mapping[str, tuple[Operand, ...]]
    output: fx.Node
    output_dims: Dims
    products: Sequence[fx.Node]
    cosine: Cosine | None
    ties: Mapping[Axis, Axis]
    unread: Mapping[fx.Node, Dims]
    edges: Mapping[fx.Node, fx.Node]
    interior: Mapping[fx.Node, Dims]


#: What is made of a routed adapter that was found.
Made = TypeVar("Made")


@dataclass(frozen=True)
class _Sum:
    """The terms of a sum: adapters, the layer where it is read along, and what else is added."""

    dims: Dims
    region: Products
    kept: list[Adapter]
    quarantine: list[Adapter]
    layer: Layer | None
    others: list[Term]


@dataclass
class Reader(Generic[Made]):
    """Reads a sum of a graph."""

    effects: Effects
    summands: Summands
    made: Callable[[Routed], Made]
    _dropped: set[fx.Node] = field(default_factory=set)

    def read(self, anchor: fx.Node) -> Made | None:
        """What is made of the routed adapter in the sum ``anchor``; None where there is none.

        Raises:
            RefusedError: it is one that cannot be replaced, with the reason.
            MutatedError: an alias of a value was overwritten before it is read.
        """
        deep = self.summands.deep(anchor)
        inputs = self.summands.inputs(deep) if len(deep) > 1 else iter(())
        scaled = (source for source in inputs if any(self.summands.is_scaled(node, source) for node in deep))
        refusal: RefusedError | None = None
        for source in itertools.islice(scaled, _INPUTS):
            try:
                complete = self._with_input(anchor, source)
            except LayoutError:
                continue
            except RefusedError as error:
                refusal = refusal or error
                continue
            if complete is not None:
                return complete
        if refusal is not None:
            raise refusal
        return None

    # ---- which sum -----------------------------------------------------------------------------------------------

    def _with_input(self, anchor: fx.Node, source: fx.Node) -> Made | None:
        found, sums = self.summands.of(anchor)
        edge = Edge(self.effects, source)
        roles = {node: self._roles(node, edge, set(sums)) for node in found if edge.depends(node)}
        kept = {node for node, own in roles.items() if any(is_kept(role) for role in own)}
        if kept and roles.keys() & self._dropped:
            raise RefusedError(
                "INPUT_DROPPED",
                "one of the adapters reads the input after dropout, the other does not",
                "set the dropout of the quarantine to zero (lora_dropout=0)",
            )
        low_rank = {node for node, own in roles.items() if any(isinstance(role, Adapter) for role in own)}
        if not kept or kept == low_rank:
            return None
        layers = {node for node, own in roles.items() if any(isinstance(role, Layer) for role in own)} - low_rank
        refusal: Exception | None = None
        fewer = [kept | {node} for node in low_rank - kept] if len(low_rank - kept) > 1 else []
        for wanted in ([low_rank | layers] if layers else []) + [low_rank] + fewer:
            output = self._lowest(sums, wanted)
            try:
                return self._finish(output, edge, low_rank & wanted, layers & wanted)
            except (RefusedError, LayoutError) as error:
                refusal = refusal if isinstance(refusal, RefusedError) else error
        assert refusal is not None, "it is returned or raises"
        raise refusal

    def _roles(self, node: fx.Node, edge: Edge, sums: set[fx.Node]) -> list[Role]:
        """What the terms of one summand are, without what its product is added to; none where any is something else."""
        tensor = tensor_of(node)
        if tensor is None or not self.summands.depth.get(node):
            return []
        added = self.summands.addend(node)
        region = self._region(node, edge, sums - {node} if added is None else {*sums, added} - {node})
        dims = fresh(shape_of(tensor))
        try:
            terms = region.terms(region.express(node, dims))
        except (LayoutError, MutatedError):
            return []
        if terms is None and region.drops(edge.source):
            self._dropped.add(node)
        span = frozenset(axes_of(dims))
        products = [term for term in terms or () if not _is_plain(term, region, edge)]
        roles = [role_of(region, term, edge.source, span) for term in products]
        return [role for role in roles if role is not None] if all(roles) else []

    def _lowest(self, sums: list[fx.Node], wanted: set[fx.Node]) -> fx.Node:
        """The first sum that has all of the summands."""
        holding = [each for each in sums if wanted <= set(self.summands.of(each)[0])]
        return min(holding, key=self.effects.position.__getitem__)

    def _region(self, node: fx.Node, edge: Edge, others: Iterable[fx.Node]) -> Products:
        return Products(
            self.effects,
            expand_masks=True,
            stops=Edges(self.summands, edge, frozenset(others)),
            functions=FUNCTIONS,
            records=grad_enabled(self.effects.ambient(node)),
        )

    # ---- what it is made of --------------------------------------------------------------------------------------

    def _finish(self, output: fx.Node, edge: Edge, low_rank: set[fx.Node], layers: set[fx.Node]) -> Made:
        found = self._sum(output, edge, low_rank, layers)
        products = [tensor_of(node) for node in found.region.products]
        if found.layer is not None and len({tensor.dtype for tensor in products if tensor is not None}) > 1:
            found = self._sum(output, edge, low_rank, set())  # the layer is computed in another precision
        kept, quarantine = kept_of(found.kept), kept_of(found.quarantine)
        _check(found, kept, quarantine)
        cosine = self._cosine(found, kept, edge)
        ties = _ties(found, kept, quarantine, cosine)
        operands = dict(_operands(found, kept, quarantine, cosine, ties))
        nodes = [each.leaf.node for group in operands.values() for each in group]
        if len(set(nodes)) != len(nodes):
            raise LayoutError("one tensor in two places")
        interior = {**found.region.interior, **(cosine.interior if cosine is not None else {})}
        readers = {**(cosine.readers if cosine is not None else {}), **found.region.readers}
        unread = _unread(found.region, [*nodes, *interior], ties)
        edges = {node: readers.get(node, output) for node in nodes}
        return self.made(
            Routed(operands, output, found.dims, found.region.products, cosine, ties, unread, edges, interior)
        )

    def _sum(self, output: fx.Node, edge: Edge, low_rank: set[fx.Node], layers: set[fx.Node]) -> _Sum:
        summands, sums = self.summands.of(output)
        read = low_rank | layers | set(sums)
        region = self._region(output, edge, set(summands) - read)
        dims = fresh(shape_of(known_tensor(output)))
        terms = region.terms(region.express(output, dims))
        if terms is None:
            raise LayoutError("no short sum of products")
        span = frozenset(axes_of(dims))
        if len(span) != len(axes_of(dims)):
            raise LayoutError("a diagonal is no sum of products")
        roles = [(term, role_of(region, term, edge.source, span)) for term in terms]
        kept = [role for _, role in roles if isinstance(role, Adapter) and is_kept(role)]
        others = [role for _, role in roles if isinstance(role, Adapter) and not is_kept(role)]
        kept, others = _first_alike(kept), _first_alike(others)
        found = [role for _, role in roles if isinstance(role, Layer)]
        rest = [term for term, role in roles if role is None]
        is_whole = len(kept) + len(others) + len(found) + len(rest) == len(terms)
        if not kept or not others or not is_whole or len(found) > 1 or any(len(term.symbols) != 1 for term in rest):
            raise LayoutError("no sum of two adapters and further tensors")
        return _Sum(dims, region, kept, others, found[0] if found else None, rest)

    def _cosine(self, found: _Sum, kept: Kept, edge: Edge) -> Cosine | None:
        if kept.mask is None:
            return None
        region, adapter = found.region, kept.adapter
        down = region.leaves[adapter.down]
        activation = Activation(edge.source, down, _rank(region, adapter), lambda: self._region(down.node, edge, ()))
        mask = region.leaves[kept.mask]
        tokens = region.leaves[adapter.x].axes & frozenset(axes_of(found.dims))
        if mask.axes != tokens:
            raise RefusedError("MASK_GENERAL", f"the mask {told(mask.node)} is none of tokens", "compare per token")
        return cosine_of(region, mask, activation, is_inverted=kept.is_inverted, depends=edge.depends)


def is_kept(role: Role) -> bool:
    """Whether an adapter's axes are scaled by a vector: what is left of a singular basis, and deployed."""
    return isinstance(role, Adapter) and role.has_vector


def _is_plain(term: Term, region: Products, edge: Edge) -> bool:
    """Whether a term is one tensor that is added, as a bias is."""
    return len(term.symbols) == 1 and region.leaves[term.symbols[0]].node is not edge.source


def _first_alike(adapters: list[Adapter]) -> list[Adapter]:
    """The terms that are of the same tensors as the first."""
    return [each for each in adapters if each.marks == adapters[0].marks]


def _check(found: _Sum, kept: Kept, quarantine: Kept) -> None:
    """Refuse what the op has no form for."""
    if len(kept.adapter.gates) > 1:
        raise RefusedError("SEVERAL_GATES", "the kept adapter is multiplied by several gates", "one gate for a layer")
    if quarantine.adapter.gates or quarantine.mask is not None:
        raise RefusedError(
            "QUARANTINE_GATED",
            "the quarantine is gated or masked, too",
            "let the quarantine learn from every rollout; gate the kept adapter only",
        )
    kinds = {found.region.leaves[each.adapter.x].kind == DETACHED for each in (kept, quarantine)}
    if len(kinds) > 1:
        raise RefusedError(
            "INPUT_DETACHED",
            "one of the adapters reads a detached input, the other does not",
            "give both the same input",
        )


def _operands(
    found: _Sum, kept: Kept, quarantine: Kept, cosine: Cosine | None, ties: Mapping[Axis, Axis]
) -> Iterator[tuple[str, tuple[Operand, ...]]]:
    """The operands of the op by name, each as tensors that are multiplied (of the base: added)."""
    region = found.region

    def of(*symbols: sympy.Symbol, number: float = 1.0) -> tuple[Operand, ...]:
        leaves = [region.leaves[symbol] for symbol in symbols]
        return tuple(
            Operand(_renamed(leaf, ties), leaf.kind == DETACHED, number if index == 0 else 1.0)
            for index, leaf in enumerate(leaves)
        )

    first, second = kept.adapter, quarantine.adapter
    vectors = [each for each in first.scales if region.leaves[each].axes]
    yield "x", of(first.x)
    yield "vh", of(first.down)
    yield "u", of(first.up)
    yield "delta", of(*vectors, *(each for each in first.scales if each not in vectors), number=kept.coefficient)
    yield "a_q", of(second.down)
    yield "b_q", of(second.up, *second.scales, number=quarantine.coefficient)
    yield "gate", of(*first.gates)
    yield "v", () if cosine is None else (Operand(_renamed(cosine.v, ties), is_detached=False),)
    rest = list(found.others)
    if found.layer is not None:
        yield "weight", of(found.layer.weight, number=found.layer.coefficient)
        outputs = frozenset(axes_of(found.dims)) - region.leaves[first.x].axes
        biases = [term for term in rest if region.leaves[term.symbols[0]].axes == outputs]
        rest = [term for term in rest if term not in biases[:1]]
        yield "bias", of(*biases[0].symbols, number=biases[0].coefficient) if biases else ()
    yield "base", tuple(operand for term in rest for operand in of(*term.symbols, number=term.coefficient))


def _ties(found: _Sum, kept: Kept, quarantine: Kept, cosine: Cosine | None) -> Mapping[Axis, Axis]:
    """The axes of the input's features, and of the rank, that are the kept adapter's by another name.

    Raises:
        LayoutError: the features are taken apart in different ways.
    """
    region, first = found.region, kept.adapter
    others = [quarantine.adapter.x, *([] if found.layer is None else [found.layer.x])]
    inputs = [region.leaves[other].dims for other in others]
    inputs += [] if cosine is None else cosine.inputs
    pairs = [(dims, region.leaves[first.x].dims) for dims in inputs]
    if cosine is not None:
        pairs += [(((axis,),), (_rank(region, first),)) for axis in cosine.ranks]
    ties = dict[Axis, Axis]()
    for other, own in pairs:
        names, axes = axes_of(other), axes_of(own)
        if len(names) != len(axes):
            raise LayoutError("the features of the input are taken apart in different ways")
        ties.update({name: axis for name, axis in zip(names, axes, strict=True) if name is not axis})
    return ties


def _unread(region: Products, operands: Iterable[fx.Node], ties: Mapping[Axis, Axis]) -> dict[fx.Node, Dims]:
    """What the source reads and the result does not depend on: masks where no gradient flows."""
    given = set(operands)
    leaves = [_renamed(leaf, ties) for leaf in region.leaves.values() if tensor_of(leaf.node) is not None]
    return {leaf.node: leaf.dims for leaf in leaves if leaf.node not in given}


def _rank(region: Products, adapter: Adapter) -> tuple[Axis, ...]:
    down = region.leaves[adapter.down]
    return tuple(axis for axis in axes_of(down.dims) if axis not in region.leaves[adapter.x].axes)


def _renamed(leaf: Leaf, ties: Mapping[Axis, Axis]) -> Leaf:
    return Leaf(leaf.node, renamed(leaf.dims, ties))
