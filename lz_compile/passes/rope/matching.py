"""Every rotary embedding of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import product, shape_of
from lz_compile.lowering.ops.rope import SHAPES, Operands, RopeAttrs, RopeFacts, joined
from lz_compile.passes.formula import moves
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.formula.expressions import Known, is_cast
from lz_compile.passes.formula.parts import may_turn
from lz_compile.passes.formula.places import FixedIndex, affine, evenly, has_fixed_index
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.masks.constants import Constants, hold_the_same
from lz_compile.passes.proof.resize import input_left_out
from lz_compile.passes.rewriting.builder import Builder, Groups
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Driver, Found, Input, Match, Outcome, Site, TableEmitter, Trial
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.rope import recogniser
from lz_compile.passes.rope.given_matrices import turned_alike
from lz_compile.passes.rope.rotations import Rotation, Table, moving

OP = "rope"
_LAST = frozenset("add sub addcmul cat stack view_as_real sum".split()) | moves.STORES
_PRODUCTS = frozenset({"mul", "add", "sub", "addcmul", "rsub", "complex"})


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every rotary embedding in ``graph``, and every one that is there but cannot be replaced, with the reason."""
    twins, known = Twins(effects, hold_the_same), Constants(effects).value

    def once(node: fx.Node) -> Match | NearMiss | None:
        return twins.read((node,), lambda: read(node)) if recogniser.sources(effects, node) else None

    def read(node: fx.Node) -> Match | NearMiss | None:
        first = None
        for found in recogniser.recognise(effects, node, known):
            result = _checked(effects, *found)
            if isinstance(result, NearMiss) or input_left_out(result) is None:
                return first or result if isinstance(result, NearMiss) else result
            first = first or result  # what is left out of this may be made of another tensor that is turned
        return first

    driver = Driver(OP)
    yield from driver.walk(reversed(graph.nodes), lambda node: _may_be_last(effects, node), once)
    yield from turned_alike(OP, effects, driver.covered, lambda node: isinstance(known(node), Known))


def _may_be_last(effects: Effects, node: fx.Node) -> bool:
    call, tensor = effects.calls[node], tensor_of(node)
    if call is None or tensor is None or not tensor.is_floating_point() or tensor.dim() < 2 or call.is_inplace:
        return False
    if 0 in shape_of(tensor) or not node.users:
        return False
    return call.name in _LAST or may_turn(call) or (is_cast(call) and _rounds(call))


def _rounds(call: Call) -> bool:
    """Whether a cast is to a narrower dtype; others are not part of what was computed before."""
    source, result = tensor_of(call.input), tensor_of(call.node)
    return source is not None and result is not None and source.dtype.itemsize > result.dtype.itemsize


def _checked(effects: Effects, rotation: Rotation, core: Core) -> Match | NearMiss:
    emitter = RopeEmitter.of(rotation, core)
    readers = {node: rotation.region.readers.get(node, core.nodes[0]) for node in emitter.edge()}
    readers[rotation.source] = core.nodes[0]
    try:
        core.check(effects, readers)
        _check_tables(emitter, core)
    except RefusedError as refusal:
        edit = "use the result of the rotation only" if refusal.reason.code == "INTERIOR_USED" else refusal.edit
        return NearMiss.of(OP, rotation.output, refusal, edit)
    return emitter.match(OP, core)


def _check_tables(emitter: RopeEmitter, core: Core) -> None:
    """Refuse complex tables that are learned: proofs compare real gradients."""
    for node in emitter.edge():
        tensor = tensor_of(node)
        if tensor is not None and tensor.is_complex() and tensor.requires_grad and grad_enabled(core.ambient):
            raise RefusedError("COMPLEX_GRADIENT", f"{told(node)} is complex and needs a gradient", "learn real tables")


@dataclass(frozen=True)
class RopeEmitter(TableEmitter):
    """``op(input, cos, sin)``; ``batch``, ``heads`` and ``positions`` are the rows: tables have no heads."""

    result_shape: ClassVar = "B H S D"

    rotation: Rotation
    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    positions: tuple[Axis, ...]
    attrs: RopeAttrs
    _plain: dict[FixedIndex, Axis] = field(default_factory=dict)

    @classmethod
    def of(cls, rotation: Rotation, core: Core) -> RopeEmitter:
        """What was read, with the rows told apart by whether the tables have them."""
        tables = (rotation.cos, rotation.sin)
        own = {axis for table in tables for leaf in table.leaves.values() for axis in moving(leaf.dims)}
        first, rest = rotation.rows[:1], rotation.rows[1:]
        positions = tuple(axis for axis in rest if axis in own)
        if not positions and first and first[0] in own:
            first, positions = (), first
        attrs = RopeAttrs(
            is_interleaved=rotation.is_interleaved,
            rotary_dim=2 * product(axis.size for axis in atoms((rotation.pairs,))),
            rotary_start=rotation.start,
            has_half_tables=all(table.is_half for table in tables),
            compute_dtype=_compute_dtype(rotation, core),
            out_dtype=tensor_of(rotation.output).dtype,  # type: ignore[union-attr]
        )
        heads = tuple(axis for axis in rest if axis not in own)
        return cls(rotation, first, heads, positions, attrs)

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """Rows and features; those that are turned are fewer."""
        rows, turned = {"B": self.batch, "H": self.heads, "S": self.positions}, (self.rotation.pairs,)
        return {
            **rows,
            "D": self.rotation.features,
            "W": turned if self.attrs.has_half_tables else self.rotation.turned,
        }

    def edge(self) -> dict[fx.Node, Dims]:
        """The nodes that the replacement reads, with their axes."""
        found = {self.rotation.source: self.rotation.dims}
        for table in (self.rotation.cos, self.rotation.sin):
            for symbol in sorted(table.leaves, key=str):
                leaf = table.leaves[symbol]
                tensor = tensor_of(leaf.node)
                dims = leaf.dims if tensor is None else leaf.dims[: tensor.dim()]
                found.setdefault(leaf.node, self.plain(dims))
        return found

    def plain(self, dims: Dims) -> Dims:
        """The dims with every place that stands still as an axis of its own."""
        found = []
        for dim in dims:
            own = atoms(dim)
            found.append(tuple(self._axis(axis) if isinstance(axis, FixedIndex) else axis for axis in own))
        return tuple(found)

    def _axis(self, place: FixedIndex) -> Axis:
        return self._plain.setdefault(place, Axis(place.size))

    def operands(self, builder: Builder) -> Operands:
        """Input and tables in the canonical layout."""
        rotation = self.rotation
        given = builder.arrange(builder.value(rotation.source), rotation.dims, self.groups)
        return Operands(given, self._table(builder, rotation.cos), self._table(builder, rotation.sin))

    def _table(self, builder: Builder, table: Table) -> Any:
        groups = self.axes(SHAPES["cos"])
        if table.second is not None:
            halves = (*groups[:-1], (self.rotation.pairs,))
            first, second = (self._value(builder, each, table, halves) for each in (table.expression, table.second))
            return joined(first, second, self.attrs.is_interleaved)
        return self._value(builder, table.expression, table, groups)

    @staticmethod
    def _value(builder: Builder, expression: sympy.Expr, table: Table, groups: Groups) -> Any:
        """A polynomial of leaves; a leaf by itself, or its negative, keeps its dtype."""
        if -expression in table.leaves:
            return -_leaf(builder, table.leaves[-expression], groups)
        return builder.evaluate(expression, table.leaves, groups, _wide(table), partial(_leaf, builder))

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's ``[B, H, S, D]`` in the layout of the node that it replaces."""
        return builder.restore(value, self.groups, self.rotation.output_dims)

    def match(self, op: str, core: Core) -> Match:
        """The finished match."""
        rotation, inputs = self.rotation, self.edge()
        read = {node: self.plain(dims) for node, dims in rotation.region.interior.items()}
        features = {*atoms((*rotation.features, *rotation.turned, *rotation.region.features)), *self._plain.values()}
        matrices = {axis for dims, _ in self._matrices.values() for axis in axes_of(dims)}
        features |= matrices - set(rotation.rows)
        cos, sin = (sorted(table.leaves, key=str)[0] for table in (rotation.cos, rotation.sin))
        operands = {
            "input": rotation.source,
            "cos": rotation.cos.leaves[cos].node,
            "sin": rotation.sin.leaves[sin].node,
        }
        known = {node: Input(dims) for node, dims in inputs.items()}
        known |= {node: Input(dims, implied="a matrix that turns pairs") for node, (dims, _) in self._matrices.items()}
        return Match(
            op,
            Site.of(core, rotation.output_dims, read),
            Found(self.attrs, self._facts(core, inputs), known, operands, self, buffers=self._buffers),
            Trial(pinned=frozenset(features), masked_rows_count=False),
        )

    @property
    def _matrices(self) -> dict[fx.Node, tuple[Dims, Known]]:
        """The constant matrices, with their axes as those of the input are."""
        return {node: (self.plain(dims), known) for node, (dims, known) in self.rotation.region.matrices.items()}

    @property
    def _buffers(self) -> tuple[fx.Node, ...]:
        return tuple({node: None for _, known in self._matrices.values() for node in known.buffers})

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """What a constant matrix holds, at the rows of a proof: if these are more, they begin again."""
        value = self._matrices[node][1].value.to(given.device, given.dtype)
        for dim, size in enumerate(given.shape):
            value = value.index_select(dim, torch.arange(size, device=given.device) % value.shape[dim])
        return value

    def _facts(self, core: Core, inputs: Mapping[fx.Node, Dims]) -> RopeFacts:
        rotation, source = self.rotation, known_tensor(self.rotation.source)
        table_dtype = torch.promote_types(_dtype(rotation.cos), _dtype(rotation.sin))
        wants = core.wants_grad(inputs), core.wants_grad(node for node in inputs if node is not rotation.source)
        batch, heads, length, width = self.extents("B H S D")
        known = self.attrs.rotary_dim, source.dtype, source.device.type, table_dtype
        return RopeFacts(batch, heads, length, width, *known, *wants)


def _leaf(builder: Builder, leaf: Leaf, groups: Groups) -> Any:
    """The part of a tensor at a place, in the layout of ``groups``."""
    value, tensor = builder.value(leaf.node), tensor_of(leaf.node)
    if tensor is None or not leaf.dims:
        return value
    dims = leaf.dims
    if tensor.is_complex():
        value = torch.imag(value) if affine(dims[-1])[0] else torch.real(value)
        dims = dims[:-1]
    found = []
    for position, dim in enumerate(dims):
        if not has_fixed_index(dim):
            found.append(dim)
            continue
        offset, terms = affine(dim)
        step, stop = evenly(terms)
        index = [slice(None)] * len(dims)
        index[position] = slice(offset, offset + stop, step)
        value = value[tuple(index)]
        found.append(tuple(axis for axis, _ in terms))
    twice = next((dim for place, dim in enumerate(found) if dim and dim in found[:place]), None)
    if twice is not None:  # of a matrix, at places of a pair that go on together
        one, other = (place for place, dim in enumerate(found) if dim == twice)
        value = value.diagonal(0, one, other)
        found = [*(dim for dim in found if dim != twice), twice]
    return builder.arrange(value, tuple(found), groups)


def _dtype(table: Table) -> torch.dtype:
    """The dtype of a table as an operand."""
    return (
        _leaf_dtype(table)
        if table.expression.is_Symbol or table.expression == -next(iter(table.leaves))
        else _wide(table)
    )


def _leaf_dtype(table: Table) -> torch.dtype:
    tensors = [tensor for tensor in (tensor_of(leaf.node) for leaf in table.leaves.values()) if tensor is not None]
    kinds = [tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype for tensor in tensors]
    return reduce(torch.promote_types, kinds)


def _wide(table: Table) -> torch.dtype:
    """The dtype in which a table is computed from several leaves."""
    return torch.promote_types(_leaf_dtype(table), torch.float32)


def _compute_dtype(rotation: Rotation, core: Core) -> torch.dtype:
    """The widest dtype in which the source multiplies and adds."""
    tensors = [tensor_of(node) for node in core.nodes if rotation.region.effects.name(node) in _PRODUCTS]
    kinds = [each.dtype.to_real() if each.is_complex() else each.dtype for each in tensors if each is not None]
    return reduce(torch.promote_types, kinds, tensor_of(rotation.source).dtype)  # type: ignore[union-attr]
