"""Every product with a stored weight of a graph as a match, calls of PyTorch's own among them. What is none is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.linear import SHAPES, LinearAttrs, LinearFacts, Operands, packed
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.formula.expressions import Values
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.linear import recogniser
from lz_compile.passes.linear.bits import Indexed
from lz_compile.passes.linear.form import brought, is_transposed
from lz_compile.passes.linear.recogniser import Dequantised, Weight, storage_of
from lz_compile.passes.linear.unpacked import bounds_of, numbers_of
from lz_compile.passes.masks.constants import Constants, hold_the_same
from lz_compile.passes.proof.resize import NATIVE
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rewriting.match import Cell, Driver, Found, Input, Match, Outcome, Site, TableEmitter, Trial
from lz_compile.passes.rewriting.twins import Twins

OP = "linear"
#: A product whose weight only the machine that packed it can read.
_MACHINES_OWN = "_weight_int4pack_mm_for_cpu"
#: Products of stored numbers with rows that were rounded to few bits as well.
_OF_FEW_BITS = frozenset({"_int_mm", "_scaled_mm"})
#: Of scales that are powers, the logarithm that proofs draw at the most.
_MODERATE = 6.0


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every product with a stored weight in ``graph``, and every one that is nearly so, with the reason."""
    reader = _Reader(effects, Twins(effects, hold_the_same), Constants(effects).value)
    return Driver(OP).walk(graph.nodes, reader.is_anchor, reader.read)


@dataclass
class _Reader:
    effects: Effects
    twins: Twins
    known: Values

    def __post_init__(self) -> None:
        self.storage = cache(partial(storage_of, self.effects))
        self._numbers = cache(partial(numbers_of, self.effects))

    def is_anchor(self, node: fx.Node) -> bool:
        """Whether a call is a product one of whose factors is computed from stored numbers."""
        name, tensor = self.effects.name(node), tensor_of(node)
        if name in (*NATIVE, _MACHINES_OWN, *_OF_FEW_BITS):
            return 0 not in shape_of(known_tensor(node))
        if name not in contraction.PRODUCTS or tensor is None or 0 in shape_of(tensor):
            return False
        factors = node.all_input_nodes
        if not tensor.is_floating_point():  # of a weight with rows that were rounded: both may be data else
            return len(factors) == 2 and sum(self.storage(each) is not None for each in factors) == 1
        return any(self.storage(each) is not None or self._numbers(each) is not None for each in factors)

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
        if call.name in _OF_FEW_BITS or not known_tensor(anchor).is_floating_point():
            text = f"both factors of {call.name} are numbers of few bits"
            edit = "leave it as it is, or multiply the rows themselves by (stored - zero) * scale"
            raise RefusedError("ROWS_OF_FEW_BITS", text, edit)
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


@dataclass(frozen=True)
class LinearEmitter(TableEmitter):
    """``op(input, weight, scale, zero, offset, bias)`` over the rows of the input."""

    kind: ClassVar = Operands
    result_shape: ClassVar = "N O"

    given: Factor
    weight: Weight
    bias: Leaf | None
    rows: tuple[Axis, ...]
    output: fx.Node
    output_dims: Dims
    attrs: LinearAttrs

    @classmethod
    def of(cls, read: Dequantised, core: Core) -> LinearEmitter:
        """What was read, over the axes of the result."""
        dims, weight = read.output_dims, read.weight
        rows = tuple(axis for axis in axes_of(dims) if axis not in set(weight.out))
        numbers = meaning(weight)
        dtypes = [known_tensor(node).dtype for node in core.nodes]
        attrs = LinearAttrs(
            packing=weight.packing,
            is_transposed=weight.unpacked is None and not weight.is_kept and is_transposed(weight),
            **{f"has_{name}": name in numbers for name in ("scale", "zero", "offset")},
            has_bias=read.bias is not None,
            has_codebook=weight.codebook is not None,
            has_order=weight.order is not None,
            is_native=weight.is_native,
            compute_dtype=max((each for each in dtypes if each.is_floating_point), key=lambda each: each.itemsize),
            out_dtype=known_tensor(core.output).dtype,
        )
        return cls(read.given, weight, read.bias, rows, core.output, dims, attrs)

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """Rows, and those of the weight."""
        weight = self.weight
        return {"N": self.rows, "K": weight.columns, "O": weight.out, "W": weight.stored_columns, "G": weight.groups}

    def operands(self, builder: Builder) -> Any:
        """Those of the table; what is the same number everywhere is a tensor of one element."""
        table = self.table()
        given = {name: cell.value(builder) for name, cell in table.items()}
        like = given["input"]
        if self.weight.order is not None:
            given["order"] = builder.value(self.weight.order).argsort(stable=True)
        given["weight"] = self._formed(given["weight"], given.get("order"))
        for name in ("scale", "zero", "offset"):
            value = given.get(name)
            if isinstance(value, float):
                given[name] = like.new_full((1, 1), value, dtype=torch.float32)
            elif value is not None and value.dim() == 0:
                given[name] = value.reshape(1, 1)
            elif value is not None and self.weight.is_kept:
                given[name] = value.contiguous()
        return Operands(**given)

    def _formed(self, numbers: Any, order: Any) -> Any:
        """The weight in the form that kernels get: see ``form.py``."""
        weight, unpacked = self.weight, self.weight.unpacked
        if order is not None:
            numbers = numbers.index_select(1, order)
        if weight.low is not None:
            return packed(numbers - weight.low, weight.packing).contiguous()  # bytes lie as the numbers did
        if unpacked is not None:
            numbers = numbers.to(unpacked.dtype)
        return numbers.contiguous() if weight.is_kept or unpacked is not None else numbers

    def table(self) -> dict[str, Cell]:
        """The input, what is stored, and what that means."""
        weight = self.weight
        table = {
            "input": Cell(Leaf(self.given.node, self.given.dims), self.axes(SHAPES["input"])),
            "weight": Cell(weight.leaf, self.axes(SHAPES["weight"])),
        }
        for name, what in meaning(weight).items():
            table[name] = Cell(what, self.axes(SHAPES[name]), region=weight.region)
        if weight.codebook is not None:
            table["codebook"] = Cell(weight.codebook, (axes_of(weight.codebook.dims),))
        if self.bias is not None:
            table["bias"] = Cell(self.bias, self.axes(SHAPES["bias"]), is_whole=True)
        return table

    def match(self, op: str, core: Core, read: Mapping[fx.Node, Dims]) -> Match:
        """The finished match."""
        weight, unpacked = self.weight, self.weight.unpacked
        inputs = {self.given.node: Input(self.given.dims)}
        leaves, powers = weight.region.leaves_in(*meaning(weight).values()), _exponents(meaning(weight).values())
        ranges = {leaf.node: powers[symbol] for symbol, leaf in leaves.items() if symbol in powers}
        for leaf in (*leaves.values(), *(each for each in (self.bias, weight.codebook) if each is not None)):
            drawn = ranges.get(leaf.node) or _range(weight.region.effects, leaf.node)
            inputs.setdefault(leaf.node, Input(leaf.dims, range=drawn))
        drawn = _range(weight.region.effects, weight.leaf.node) if unpacked is None else _drawn(unpacked.bounds)
        inputs[weight.leaf.node] = Input(weight.leaf.dims, range=drawn)
        region, buffers = weight.region, tuple[fx.Node, ...]()
        if isinstance(region, Indexed):
            buffers = tuple(region.buffers)
            is_shuffled = weight.order is not None
            inputs |= {
                node: Input(dims, counts=axis, is_shuffled=is_shuffled) for node, (dims, axis) in region.counts.items()
            }
        rows, columns, out, groups = self.extents("N K O G")
        dtypes, device = (known_tensor(self.given.node).dtype, _stored_dtype(weight)), known_tensor(self.output).device
        facts = LinearFacts(rows, columns, out, int(groups), *dtypes, device.type, core.wants_grad(inputs))
        operands = {"input": self.given.node, "weight": weight.leaf.node}
        pairs = () if weight.packing == "none" else atoms((*weight.columns, *weight.stored_columns))
        pinned = frozenset((*pairs, *(() if weight.codebook is None else weight.codebook.axes)))
        told = (Reason("WEIGHT_UNPACKED", f"in every call: {weight.unkept}"),) if weight.unkept else ()
        return Match(
            op,
            Site.of(core, self.output_dims, read),
            Found(self.attrs, facts, inputs, operands, self, buffers=buffers, notes=told),
            Trial(masked_rows_count=False, pinned=pinned),
        )


def _stored_dtype(weight: Weight) -> torch.dtype:
    """That of what kernels get."""
    if weight.low is not None:
        return torch.uint8
    return known_tensor(weight.leaf.node).dtype if weight.unpacked is None else weight.unpacked.dtype


def meaning(weight: Weight) -> dict[str, sympy.Expr]:
    """What stored numbers mean, by the op's names: a summand is a zero point where it is a simple multiple of the scale."""
    found = {} if weight.scale == 1 else {"scale": weight.scale}
    if weight.summand != 0:
        zero = sympy.cancel(-weight.summand / weight.scale)
        is_simple = not sympy.fraction(zero)[1].free_symbols
        found["zero" if is_simple else "offset"] = zero if is_simple else weight.summand
    return found


def _exponents(meant: Iterable[sympy.Expr]) -> dict[sympy.Symbol, tuple[float, float]]:
    """Of numbers that scales are powers with, those from which and up to which the powers are moderate."""
    found = {}
    for each in {power for expression in meant for power in expression.atoms(sympy.exp)}:
        for symbol in each.args[0].free_symbols:
            slope, rest = each.args[0].coeff(symbol), each.args[0].xreplace({symbol: sympy.S.Zero})
            if slope.is_number and rest.is_number and slope != 0:
                middle, reach = float(-rest / slope), abs(_MODERATE / float(slope))
                found[symbol] = (middle - reach, middle + reach)
    return found


def _range(effects: Effects, node: fx.Node) -> tuple[float, float] | None:
    """From which number on, and up to which, proofs draw what is stored.

    Integers beyond those that it holds would wrap around in the source, and in no kernel.
    """
    tensor = known_tensor(node)
    if tensor.dtype.is_floating_point:
        return (-8.0, 8.0) if tensor.dtype.itemsize == 1 else None
    limits = torch.iinfo(tensor.dtype)
    return _drawn(bounds_of(effects, node) or (max(limits.min, -128), min(limits.max, 255)))


def _drawn(bounds: tuple[int, int]) -> tuple[float, float]:
    return float(bounds[0]), bounds[1] + 1.0
