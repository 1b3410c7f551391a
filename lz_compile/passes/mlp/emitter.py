"""A recognised activation of an MLP: its operands in the op's canonical layout, and its result in the source's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.ops.mlp import SHAPES, MlpAttrs, MlpFacts, Operands
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, axes_of
from lz_compile.passes.formula.expressions import constant_value, is_cast
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import known_tensor, memory_of, read, tensor_of
from lz_compile.passes.mlp.recogniser import Activation
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Cell, Found, Input, Match, Site, TableEmitter, Trial

#: Numbers beyond this are no bounds that are met.
_LARGEST = 1e6


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
        """What was read, over the axes of the gate; the last dimension's are the columns."""
        form, leaves = read.form, read.leaves
        dims = leaves["gate"].dims
        hidden = axes_of(dims[-1:])
        rows = tuple(axis for axis in axes_of(dims) if axis not in hidden)
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
