"""A recognised routed adapter: its operands in the op's canonical layout, and its result in the source's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from lz_compile.lowering.ops.routing import SHAPES, Operands, RoutingAttrs, RoutingFacts
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.graph.view import known_tensor, tensor_of
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, TableEmitter, Trial
from lz_compile.passes.routing.recogniser import Operand, Routed

Run = tuple[Axis, ...]
#: Operands that are multiplied as matrices, in one dtype.
_MATRICES = ("x", "vh", "u", "a_q", "b_q", "weight")


@dataclass(frozen=True)
class RoutingEmitter(TableEmitter):
    """``op(x, vh, u, delta, a_q, b_q, ...)``; every operand is a product of tensors (the base: a sum).

    ``ties`` and ``unread`` are as they were read.
    """

    result_shape: ClassVar = "G S E"

    parts: Mapping[str, tuple[Operand, ...]]
    letters: Mapping[str, Run]
    output: fx.Node
    output_dims: Dims
    matrix_dtype: torch.dtype
    attrs: RoutingAttrs
    ties: Mapping[Axis, Axis]
    unread: Mapping[fx.Node, Dims]

    @classmethod
    def of(cls, read: Routed, core: Core) -> RoutingEmitter:
        """What was read, over the axes of the result."""
        parts, cosine = {name: own for name, own in read.operands.items() if own}, read.cosine
        runs = _runs(parts, read.output_dims)
        kinds = [tensor.dtype for tensor in map(tensor_of, read.products) if tensor is not None]
        gate = parts.get("gate")
        is_per_token = gate is not None and not set(runs["S"]).isdisjoint(axes_of(gate[0].leaf.dims))
        out = known_tensor(read.output)
        attrs = RoutingAttrs(
            arm="none" if cosine is None else "act",
            gate="none" if gate is None else "token" if is_per_token else "rollout",
            has_weight="weight" in parts,
            threshold=0.0 if cosine is None else cosine.threshold,
            compute_dtype=core.widest(),
            out_dtype=out.dtype,
        )
        matrix_dtype = max(kinds, key=lambda kind: kind.itemsize)
        return cls(parts, runs, read.output, read.output_dims, matrix_dtype, attrs, read.ties, read.unread)

    def operands(self, builder: Builder) -> Operands:
        """Everything that there is, in the canonical layout."""
        return Operands(**{name: self._operand(builder, name, parts) for name, parts in self.parts.items()})

    def _operand(self, builder: Builder, name: str, parts: tuple[Operand, ...]) -> Any:
        total: Any = None
        for part in parts:
            value = builder.value(part.leaf.node)
            if tensor_of(part.leaf.node) is not None:
                value = value.detach() if part.is_detached else value
                is_other = name in _MATRICES and value.dtype != self.matrix_dtype
                value = value.to(self.matrix_dtype) if is_other else value
            if axes_of(part.leaf.dims) or name == "base":
                gate = "G S R" if self.attrs.gate == "token" else "G R"
                groups = self.axes(gate if name == "gate" else SHAPES[name])
                value = builder.arrange(value, part.leaf.dims, groups, expand=True)
            value = value if part.number == 1 else value * part.number
            if total is None:
                total = value
            else:
                total = total + value if name == "base" else total * value
        return total

    @property
    def runs(self) -> Mapping[str, Run]:
        """Rollouts and tokens, features, and ranks."""
        return self.letters

    def match(self, op: str, core: Core, read: Mapping[fx.Node, Dims]) -> Match:
        """The finished match."""
        leaves = {part.leaf.node: part.leaf.dims for parts in self.parts.values() for part in parts}
        inputs = {node: Input(dims) for node, dims in {**leaves, **self.unread}.items()}
        operands = {"x": self.parts["x"][0].leaf.node}
        return Match(
            op,
            Site.of(core, self.output_dims, read),
            Found(self.attrs, self._facts(core), inputs, operands, self, self._formula()),
            Trial(ties=self.ties, masked_rows_count=False),
        )

    def _facts(self, core: Core) -> RoutingFacts:
        def wants_grad(*names: str) -> bool:
            return core.wants_grad(part.leaf.node for name in names for part in self.parts.get(name, ()))

        device, wants = known_tensor(self.output).device.type, (wants_grad(*self.parts), wants_grad("vh", "u"))
        groups, length, features, outputs, rank, few = self.extents("G S D E R Q")
        return RoutingFacts(groups, length, features, outputs, rank, few, self.matrix_dtype, device, *wants)

    def _formula(self) -> str:
        gate = {"none": "", "rollout": " * c[rollout]", "token": " * c[token]"}[self.attrs.gate]
        stopped = f", detached where cos(a, v) > {self.attrs.threshold:g}" if self.attrs.arm == "act" else ""
        layer = "W x + " if self.attrs.has_weight else "base + " if "base" in self.parts else ""
        return f"{layer}U ((Vh x{gate}) * delta){stopped} + B (A x)"


def _runs(parts: Mapping[str, tuple[Operand, ...]], output_dims: Dims) -> dict[str, Run]:
    x = axes_of(parts["x"][0].leaf.dims)
    every = axes_of(output_dims)
    tokens = tuple(axis for axis in every if axis in set(x))
    outputs = tuple(axis for axis in every if axis not in set(x))
    features = tuple(axis for axis in x if axis not in set(every))
    down, few = (axes_of(parts[name][0].leaf.dims) for name in ("vh", "a_q"))
    rank = tuple(axis for axis in down if axis not in set(features))
    gate = parts.get("gate")
    gated = set() if gate is None else set(axes_of(gate[0].leaf.dims)) & set(tokens)
    rollouts = tuple(axis for axis in tokens if axis in gated)
    if len(rollouts) in (
        0,
        len(tokens),
    ):  # nothing, or every token for itself: rollouts are what the first dimension counts
        first = set(atoms(output_dims[0])) if len(output_dims) > 2 else set(tokens[: len(tokens) - 1])
        rollouts = tuple(axis for axis in tokens if axis in first)
    others = tuple(axis for axis in tokens if axis not in set(rollouts))
    quarantine = tuple(axis for axis in few if axis not in set(features))
    return {"G": rollouts, "S": others, "D": features, "E": outputs, "R": rank, "Q": quarantine}
