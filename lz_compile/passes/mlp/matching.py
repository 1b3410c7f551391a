"""Every activation of an MLP in a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.lowering.ops.mlp import SHAPES, MlpAttrs, MlpFacts, Operands
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, fresh
from lz_compile.passes.formula.expressions import constant_value, is_cast
from lz_compile.passes.formula.projections import Supports, projection
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, memory_of, read, tensor_of
from lz_compile.passes.mlp import recogniser
from lz_compile.passes.mlp.recogniser import Activation
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Cell, Driver, Found, Input, Match, Outcome, Site, TableEmitter, Trial
from lz_compile.passes.rewriting.twins import Twins

OP = "mlp"
#: Numbers beyond this are no bounds that are met.
_LARGEST = 1e6


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every activation of an MLP in ``graph``, and every product that looks like a gated one's, with the reason."""
    missed: set[fx.Node] = set()
    reader = _Reader(effects, Supports(effects), Twins(effects))
    driver = Driver(OP, reader.is_meant)
    for found in driver.walk(reversed(graph.nodes), reader.is_last, reader.read):  # the last operation is met first
        if not isinstance(found, NearMiss):
            yield found
            continue
        if found.node not in missed:  # no part of another one that was refused
            yield found
        missed.update(reader.supports.behind(found.node))


@dataclass
class _Reader:
    """Activations of one graph; equal layers are read once."""

    effects: Effects
    supports: Supports
    twins: Twins

    def is_last(self, node: fx.Node) -> bool:
        """Whether a call may be the last one of an activation."""
        return self.effects.calls[node] is not None and (self._is_glu(node) or self.supports.is_candidate(node))

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        """What an anchor is.

        Raises:
            RefusedError: it is no activation of an MLP, with the reason.
            MutatedError: an alias of a value was overwritten before it is read.
            LayoutError: a layout has no exact form in axes.
        """
        if self._is_glu(anchor):
            return self.twins.read((anchor,), lambda: _halves(self.effects, self._call(anchor)))
        return self.twins.read((anchor,), lambda: _matched(recogniser.recognise(self.effects, self.supports, anchor)))

    def is_meant(self, anchor: fx.Node, refusal: RefusedError) -> bool:
        """Whether a refused anchor is clearly meant to be an activation of an MLP."""
        is_known = self._is_glu(anchor) or len(self.supports.of(anchor).rows) == 2
        return (refusal.reason.code != "NO_MLP" and is_known) or self._is_gated(anchor)

    def _call(self, anchor: fx.Node) -> Call:
        call = self.effects.calls[anchor]
        assert call is not None, "an anchor is a call"
        return call

    def _is_glu(self, anchor: fx.Node) -> bool:
        return self._call(anchor).name == "glu"

    def _is_gated(self, anchor: fx.Node) -> bool:
        """Whether an anchor multiplies a bent projection by another one of the same input and size.

        Where both bend, as in the cell of an LSTM, one of them is an activation of MLPs.
        """
        operands = anchor.all_input_nodes
        factors = [self.supports.of(node) for node in operands]
        if self._call(anchor).name != "mul" or len(factors) != 2 or not any(factor.is_bent for factor in factors):
            return False
        if any(len(factor.rows) != 1 for factor in factors) or factors[0].rows == factors[1].rows:
            return False
        if any(known_tensor(given).dim() > 1 for factor in factors for given in factor.given):  # no biases
            return False
        tensors = [tensor for tensor in map(tensor_of, (anchor, *operands)) if tensor is not None]
        if len({shape_of(tensor) for tensor in tensors}) != 1:
            return False
        products = [projection(self.effects, row) for factor in factors for row in factor.rows]
        calls = [None if node is None else self.effects.calls.get(node) for node in products]
        if not all(each is not None and each.input is calls[0].input for each in calls):  # type: ignore[union-attr]
            return False
        return not all(factor.is_bent for factor in factors) or any(map(self._is_activation, operands))

    def _is_activation(self, node: fx.Node) -> bool:
        try:
            return recogniser.recognise(self.effects, self.supports, node) is not None
        except (RefusedError, MutatedError, LayoutError):
            return False


def _matched(read: Activation) -> Match:
    """The match of an activation that was read.

    Raises:
        RefusedError: someone else needs a value between rows and result, a mode changes, or an operand is overwritten.
    """
    region, effects = read.region, read.region.effects
    rows = [read.leaves[name].node for name in ("gate", "up") if name in read.leaves]
    core = core_between(effects, rows, region.interior, read.output)
    readers = {leaf.node: region.readers.get(leaf.node, read.output) for leaf in region.leaves.values()}
    core.check(effects, readers, if_used="use the activation for its product only")
    return MlpEmitter.of(read, core).match(OP, core, region.interior)


def _halves(effects: Effects, call: Call) -> Match:
    """``F.glu``: the first half of a tensor times the sigmoid of the second.

    Raises:
        RefusedError: the tensor is overwritten.
        LayoutError: it is no call on a tensor of floating-point numbers.
    """
    source, tensor, at = tensor_of(call.input), tensor_of(call.node), call.get("dim", -1)
    if source is None or tensor is None or not isinstance(at, int) or not tensor.is_floating_point():
        raise LayoutError("halves of what is no tensor")
    if 0 in shape_of(tensor):
        raise LayoutError("nothing to halve")
    at %= source.dim()
    halves, dims = Axis(2), fresh(shape_of(tensor))
    leaf = Leaf(effects.current(call.input, call.node), (*dims[:at], (halves, *dims[at]), *dims[at + 1 :]))
    core = Core((call.node,), effects.ambient(call.node))
    core.check(effects, {leaf.node: call.node})
    return MlpEmitter.of_halves(leaf, halves, dims, at, call.node).match(OP, core, {call.node: dims})


@dataclass(frozen=True)
class MlpEmitter(TableEmitter):
    """``op(gate, up, gate_bias, up_bias)`` over ``rows`` and ``hidden``, the axes of the gate.

    With ``halves`` the operand ``gate`` holds both: first what is multiplied, then the gate, along that axis.
    """

    kind: ClassVar = Operands
    result_shape: ClassVar = "N F"

    leaves: Mapping[str, Leaf]
    rows: tuple[Axis, ...]
    hidden: tuple[Axis, ...]
    output: fx.Node
    output_dims: Dims
    attrs: MlpAttrs
    halves: Axis | None = None

    @classmethod
    def of(cls, read: Activation, core: Core) -> MlpEmitter:
        """What was read, over the axes of the gate."""
        form, leaves, hidden = read.form, read.leaves, read.hidden
        rows = tuple(axis for axis in axes_of(leaves["gate"].dims) if axis not in hidden)
        attrs = MlpAttrs(
            activation=form.activation,
            is_gated="up" in leaves,
            has_gate_bias="gate_bias" in leaves,
            has_up_bias="up_bias" in leaves,
            limit=form.limit,
            up_offset=form.up_offset,
            **_packing(leaves),
            compute_dtype=_compute_dtype(read.region.effects, core, {leaf.node for leaf in leaves.values()}),
            out_dtype=known_tensor(core.output).dtype,
        )
        return cls(leaves, rows, hidden, core.output, read.output_dims, attrs)

    @classmethod
    def of_halves(cls, leaf: Leaf, halves: Axis, dims: Dims, at: int, output: fx.Node) -> MlpEmitter:
        """A tensor of which the first half along dimension ``at`` is multiplied by the sigmoid of the second."""
        dtype = known_tensor(output).dtype
        wide = torch.promote_types(dtype, torch.float32)  # the call rounds once, at its end
        attrs = MlpAttrs("sigmoid", is_packed=True, is_up_first=True, compute_dtype=wide, out_dtype=dtype)
        return cls({"gate": leaf}, axes_of(dims[:at]), axes_of(dims[at:]), output, dims, attrs, halves)

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """Rows and columns."""
        return {"N": self.rows, "F": self.hidden}

    def table(self) -> dict[str, Cell]:
        """What is there of gate, up and their biases."""
        return {name: Cell(leaf, self.axes(SHAPES[name]), is_whole=True) for name, leaf in self.leaves.items()}

    def operands(self, builder: Builder) -> Any:
        """Those of the table; halves are two parts of one tensor, which is arranged once."""
        if self.halves is None:
            return super().operands(builder)
        both = Cell(self.leaves["gate"], (self.rows, (self.halves,), self.hidden)).value(builder)
        return Operands(both.select(1, 1), both.select(1, 0))

    def match(self, op: str, core: Core, read: Mapping[fx.Node, Dims]) -> Match:
        """The finished match."""
        rows = self._rows()
        inputs = {leaf.node: Input(leaf.dims, rows=rows.get(leaf.node, ())) for leaf in self.leaves.values()}
        dtype, device = known_tensor(self.leaves["gate"].node).dtype, known_tensor(self.output).device.type
        count, width = self.extents("N F")
        facts = MlpFacts(count, width, dtype, device, core.wants_grad(inputs))
        operands = {name: leaf.node for name, leaf in self.leaves.items() if not name.endswith("bias")}
        magnitudes = () if self.attrs.limit is None else (2 * self.attrs.limit,)
        return Match(
            op,
            Site.of(core, self.output_dims, read),
            Found(self.attrs, facts, inputs, operands, self),
            Trial(magnitudes=magnitudes, points=_corners(core), masked_rows_count=False),
        )

    def _rows(self) -> dict[fx.Node, tuple[Axis, ...]]:
        """The operand, of which a row may be NaN: what the source makes of that is what the kernel must make of it."""
        leaf = self.leaves["gate"]
        own = tuple(axis for axis in axes_of(leaf.dims) if axis in set(self.rows))
        return {leaf.node: own} if own else {}


def _corners(core: Core) -> tuple[float, ...]:
    """Where the source may have corners: at zero, and at the numbers that it spells out and beside them."""
    numbers = {0.0}
    for node in core.nodes:
        calls = [call for call in map(read, node.all_input_nodes) if call is not None]
        given = [*pytree.tree_leaves((node.args, node.kwargs)), *map(constant_value, calls)]
        for value in given:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                numbers |= {sign * value * beside for sign in (-1.0, 1.0) for beside in (1.0, 0.96875, 1.03125)}
    return tuple(sorted(number for number in numbers if abs(number) < _LARGEST))


def _packing(leaves: Mapping[str, Leaf]) -> dict[str, bool]:
    """Whether gate and up are parts of one tensor, and in which order."""
    gate, up = (tensor_of(leaves[name].node) if name in leaves else None for name in ("gate", "up"))
    if gate is None or up is None or memory_of(gate) is None or memory_of(gate) != memory_of(up):
        return {}
    distance = sympy.sympify(as_size(gate.storage_offset()) - as_size(up.storage_offset()))
    large = distance.xreplace(dict.fromkeys(distance.free_symbols, sympy.Integer(8192)))
    is_interleaved = gate.dim() > 0 and as_size(gate.stride(-1)) == 2 == as_size(up.stride(-1))
    return {"is_packed": True, "is_up_first": bool(large > 0), "is_interleaved": is_interleaved}


def _compute_dtype(effects: Effects, core: Core, operands: set[fx.Node]) -> torch.dtype:
    """The widest dtype of what is computed before the result; that of the result where nothing is."""
    same = set(operands)  # what only holds an operand
    found: list[torch.dtype] = []
    for node in core.nodes[:-1]:
        call, tensor = effects.calls[node], tensor_of(node)
        is_moved = call is not None and (is_cast(call) or layout.rearranges(call))
        if is_moved and isinstance(call.input, fx.Node) and call.input in same:  # type: ignore[union-attr]
            same.add(node)
        elif tensor is not None and tensor.is_floating_point():
            found.append(tensor.dtype)
    return max(found, key=lambda kind: kind.itemsize, default=known_tensor(core.output).dtype)
