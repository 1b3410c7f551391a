"""A sum of two tensors that an op reads: what a kernel computes along that also adds a residual, and gives.

However it is spelled, the operand is the sum if its value is, at every index, that of one tensor plus that of another one
of the same shape and dtype. Layout changes, and dropout that drops nothing, may lie between the sum and the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.fused import RESIDUAL
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.fusion.emitter import operands_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, where_of
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, TableEmitter


@dataclass(frozen=True)
class SumAttributes(OpAttributes):
    """A sum has none."""


@dataclass(frozen=True)
class SumEmitter(TableEmitter):
    """Both summands in the canonical layout of what reads their sum: of the operand ``name`` of ``reader``.

    ``outputs`` are the sum as it is read, and every node back to where it is computed, each with its axes.
    """

    reader: Match
    name: str
    summands: tuple[Leaf, Leaf]
    outputs: Mapping[fx.Node, Dims]
    attrs: SumAttributes = SumAttributes()

    def operands(self, builder: Builder) -> dict[str, Any]:
        """The summands, each as if it were what is read."""
        given, other = (self._operand(builder, leaf) for leaf in self.summands)
        return {"input": given, "residual": other}

    def _operand(self, builder: Builder, leaf: Leaf) -> Any:
        read, dims = next(iter(self.outputs.items()))
        summand = builder.arrange(builder.value(leaf.node), leaf.dims, dims)
        alone = builder.over(lambda node: summand if node is read else builder.value(node))
        return getattr(operands_of(self.reader, alone), self.name)

    def result(self, builder: Builder, value: Any) -> Any:
        """The sum in the layouts of all outputs; in the canonical one its elements lie as in what is read."""
        axes = axes_of(next(iter(self.outputs.values())))
        flat = value.reshape([builder.extent(axis) for axis in axes])
        each = tuple((axis,) for axis in axes)
        found = tuple(builder.restore(flat, each, dims) for dims in self.outputs.values())
        return found if len(found) > 1 else found[0]


def sum_before(reader: Match, name: str, effects: Effects) -> Match | Reason | None:
    """The sum that an operand of a match is; why it is none that a kernel adds, or None where it is no sum at all."""
    read = reader.found.operands[name]
    dims = reader.inputs.get(read)
    chain = None if dims is None else _chain(effects, read, dims)
    if dims is None or chain is None:
        return None
    total = next(iter(reversed(chain)))
    region = Region(effects, stops=frozenset(total.all_input_nodes), expand_masks=True)
    try:
        expression = region.express(total, chain[total])
    except (MutatedError, LayoutError):
        return None
    leaves = [*region.leaves_in(expression).values()]
    tensors = [tensor for tensor in map(tensor_of, (*chain, *(leaf.node for leaf in leaves))) if tensor is not None]
    wanted = {*axes_of(chain[total])}
    is_of_two = len(leaves) == 2 and len(tensors) == len(chain) + 2
    if not is_of_two or any({*axes_of(leaf.dims)} != wanted for leaf in leaves):
        return None
    coefficients = [expression.coeff(symbol) for symbol in expression.free_symbols]
    if expression - sum(expression.free_symbols) != 0:
        is_scaled = expression.is_Add and all(each.is_number and each != 0 for each in coefficients)
        return _refused(name, total, "scales what it adds") if is_scaled else None
    if len({tensor.dtype for tensor in tensors}) != 1:
        return _refused(name, total, "is of tensors of several dtypes")
    return _match(reader, name, effects, chain, (leaves[0], leaves[1]), region)


def _chain(effects: Effects, read: fx.Node, dims: Dims) -> dict[fx.Node, Dims] | None:
    """From what is read back to the first node that computes something, with the axes of each."""
    found = {read: dims}
    call = effects.calls[read]
    while call is not None and isinstance(call.input, fx.Node) and not call.is_inplace:
        try:
            before = _before(call, dims)
        except LayoutError:
            return None
        if before is None:
            return found if is_pointwise(call) else None
        dims = found[call.input] = before
        call = effects.calls[call.input]
    return found if call is not None and is_pointwise(call) and not call.is_inplace else None


def _before(call: Call, dims: Dims) -> Dims | None:
    """The axes of what a call only moves, or passes on as it is; None where it computes something."""
    if call.name == "dropout":
        return dims if not call.get("training", True) or call.get("p", 0.5) == 0 else None
    given, result = tensor_of(call.input), tensor_of(call.node)
    if is_cast(call) and given is not None and result is not None and given.dtype == result.dtype:
        return dims
    return layout.read_input_dims(call, dims) if layout.rearranges(call) else None


def _refused(name: str, total: fx.Node, why: str) -> Reason:
    return Reason("NOT_FUSED", f"the sum before {name} ({where_of(total)}) {why}")


def _match(
    reader: Match, name: str, effects: Effects, chain: dict[fx.Node, Dims], summands: tuple[Leaf, Leaf], region: Region
) -> Match:
    read, total = next(iter(chain)), next(iter(reversed(chain)))
    inputs = {leaf.node: Input(leaf.dims) for leaf in summands}
    operands = dict(zip(("input", RESIDUAL), (leaf.node for leaf in summands), strict=True))
    return Match(
        RESIDUAL,
        Site(
            output=read,
            output_dims=chain[read],
            core=tuple(reversed(chain)),
            ambient=effects.ambient(total),
            where=where_of(total),
            read={**region.interior, **chain},
            extra_outputs=tuple(chain)[1:],
        ),
        Found(SumAttributes(), reader.found.facts, inputs, operands, SumEmitter(reader, name, summands, chain)),
    )
