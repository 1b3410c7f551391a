"""A recognised blend, or a margin alone: its operands in the op's canonical layout, and its result in the source's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.lowering.ops.blend import SHAPES, BlendAttrs, BlendFacts, Operands
from lz_compile.passes.blend.gate import Gate, Logits
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, broadcast_from, resolve
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import Call, called, known_tensor, needed, tensor_of
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Cell, Found, Input, Match, Site, TableEmitter, Trial

Run = tuple[Axis, ...]
#: The axes of a blend's canonical layout: rows, channels and the rest.
Layout = tuple[Run, Run, Run]


@dataclass(frozen=True)
class Weights:
    """What a blend is weighed by, as expressions over the leaves of a region."""

    region: Region
    seed: sympy.Expr
    host: sympy.Expr | None
    gate: Gate | None

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors that are read for them, without the logits."""
        pairs = [(self.region, each) for each in (self.seed, self.host) if each is not None and self.gate is None]
        if self.gate is not None:
            parts = (self.gate.alpha, self.gate.gain, self.gate.offset, self.gate.low, self.gate.high)
            pairs = [(self.gate.region, each) for each in parts if each is not None]
        leaves = [leaf for region, expression in pairs for leaf in region.leaves_in(expression).values()]
        return list({(leaf.node, leaf.dims): leaf for leaf in leaves}.values())

    @property
    def axes(self) -> set[Axis]:
        """Everything that alpha depends on; not the gate."""
        return {axis for leaf in self.leaves for axis in atoms(leaf.axes)}


@dataclass(frozen=True)
class BlendEmitter(TableEmitter):
    """``op(host, seed, alpha, ...)`` over rows, channels and the rest, in the order in which they lie in memory."""

    kind: ClassVar = Operands
    result_shape: ClassVar = "N C S"

    host: Leaf
    seed: Leaf
    weights: Weights
    layout: Layout
    output: fx.Node
    output_dims: Dims
    attrs: BlendAttrs
    edges: Mapping[fx.Node, Dims]
    again: frozenset[fx.Node]

    @property
    def runs(self) -> dict[str, Run]:
        """Rows, channels and the rest, and the classes of a gate."""
        gate = self.weights.gate
        return {**dict(zip("NCS", self.layout, strict=True)), "K": () if gate is None else gate.logits.classes}

    def table(self) -> dict[str, Cell]:
        """Host, seed, alpha, and what is there of a host's weight, logits and a gate's numbers."""
        whole, dtype, weights, gate = self.groups, self.attrs.compute_dtype, self.weights, self.weights.gate
        found = {"host": Cell(self.host, whole), "seed": Cell(self.seed, whole, is_whole=True)}
        if gate is None:
            found["alpha"] = Cell(weights.seed, whole, region=weights.region, dtype=dtype)
            if weights.host is not None:
                found["host_weight"] = Cell(weights.host, whole, region=weights.region, dtype=dtype)
            return found
        found["alpha"] = Cell(gate.alpha, whole, region=gate.region, dtype=dtype)
        logits = Leaf(gate.logits.node, gate.logits.dims)
        found["logits"] = Cell(logits, self.axes(SHAPES["logits"]), is_detached=gate.logits.is_detached)
        for name in ("gain", "offset", "low", "high"):
            expression = getattr(gate, name)
            if expression is not None:
                found[name] = Cell(expression, (), region=gate.region, dtype=dtype)
        return found

    def operands(self, builder: Builder) -> Any:
        """Those of the table, with values that are computed again."""
        return super().operands(self._replaying(builder))

    def _replaying(self, builder: Builder) -> Builder:
        """The builder with the values that are computed again."""
        known = builder.value
        return builder.over(lambda node: replay(node, known, self.edges) if node in self.again else known(node))

    def _inputs(self, leaf: Leaf) -> Mapping[fx.Node, Dims]:
        """A leaf at the edge, or what it is computed from."""
        if leaf.node not in self.again:
            return {leaf.node: leaf.dims}
        return {node: self.edges[node] for node in reached(leaf.node, self.edges)}

    def match(self, op: str, core: Core, read: Mapping[fx.Node, Dims]) -> Match:
        """The finished match."""
        gate = self.weights.gate
        weighing = {node: own for leaf in self.weights.leaves for node, own in self._inputs(leaf).items()}
        inputs = {**self._inputs(self.seed), **self._inputs(self.host), **weighing}
        inputs = inputs if gate is None else {gate.logits.node: gate.logits.dims, **inputs}
        operands = {"seed": self.seed.node, "host": self.host.node}
        operands = {name: node for name, node in operands.items() if node in inputs}
        if gate is not None:
            operands["logits"] = gate.logits.node
        if gate is not None and not gate.logits.is_detached:
            weighing[gate.logits.node] = gate.logits.dims
        wants = core.wants_grad(inputs), core.wants_grad(weighing)
        return _match(op, self, core, inputs, operands, read, None if gate is None else gate.logits, wants)


@dataclass(frozen=True)
class MarginEmitter(TableEmitter):
    """``op(logits)`` over the axes of a margin, and the classes."""

    kind: ClassVar = Operands
    result_shape: ClassVar = "N"

    logits: Logits
    output: fx.Node
    output_dims: Dims
    attrs: BlendAttrs

    @property
    def runs(self) -> dict[str, Run]:
        """All axes, and the classes; there is one number for each row."""
        return {"N": axes_of(self.output_dims), "C": (), "S": (), "K": self.logits.classes}

    def table(self) -> dict[str, Cell]:
        """The logits."""
        return {"logits": Cell(Leaf(self.logits.node, self.logits.dims), self.axes(SHAPES["logits"]))}

    def match(self, op: str, core: Core, read: Mapping[fx.Node, Dims]) -> Match:
        """The finished match."""
        inputs = {self.logits.node: self.logits.dims}
        wants = (core.wants_grad(inputs),) * 2
        return _match(op, self, core, inputs, {"logits": self.logits.node}, read, self.logits, wants)


def _match(
    op: str,
    emitter: BlendEmitter | MarginEmitter,
    core: Core,
    inputs: Mapping[fx.Node, Dims],
    operands: Mapping[str, fx.Node],
    read: Mapping[fx.Node, Dims],
    logits: Logits | None,
    wants: tuple[bool, bool],
) -> Match:
    main = emitter.seed.node if isinstance(emitter, BlendEmitter) else emitter.logits.node
    device = known_tensor(emitter.output).device.type
    rows, channels, inner, count = emitter.extents("N C S K")
    facts = BlendFacts(rows, channels, inner, count, known_tensor(main).dtype, device, *wants)
    classes = atoms(logits.classes) if logits is not None and logits.is_spelled else ()
    known = {node: Input(dims) for node, dims in inputs.items()}
    return Match(
        op,
        Site.of(core, emitter.output_dims, read),
        Found(emitter.attrs, facts, known, operands, emitter),
        Trial(pinned=frozenset(classes), masked_rows_count=False),
    )


def group(output: fx.Node, dims: Dims, alpha: set[Axis], rows: set[Axis] | None, channels: set[Axis]) -> Layout | None:
    """The axes of a result as rows, channels and the rest, each of them next to one another in memory.

    Args:
        output: the result.
        dims: its axes.
        alpha: the axes of what it is weighed by.
        rows: those of a gate, of which there may be one only; None without a gate.
        channels: those over which the blend is normalised.

    Returns:
        None where there are no such runs.
    """
    order = _in_memory(output, dims)
    places = {axis: place for place, axis in enumerate(order)}
    if channels:
        start, stop = _run(places, channels)
        if (
            stop - start != len(channels)
            or any(places[axis] >= stop for axis in alpha)
            or _run(places, rows or set())[1] > start
        ):
            return None
        return order[:start], order[start:stop], order[stop:]
    if rows is not None:
        stop = _run(places, rows)[1]
        if stop != len(rows):
            return None
        last = max(stop, _run(places, alpha - rows)[1])
        return order[:stop], order[stop:last], order[last:]
    if not alpha:
        return order, (), ()
    start, stop = _run(places, alpha)
    return (order[:start], order[start:stop], order[stop:]) if start else (order[:stop], (), order[stop:])


def _run(places: Mapping[Axis, int], axes: set[Axis]) -> tuple[int, int]:
    """The first place of some axes, and the one after the last."""
    own = [places[axis] for axis in axes]
    return (min(own), max(own) + 1) if own else (0, 0)


def _in_memory(output: fx.Node, dims: Dims) -> Run:
    """The axes of a tensor, those that are far apart in memory first."""
    order, _ = stride_order([as_size(stride) for stride in known_tensor(output).stride()])
    return tuple(axis for dim in order for axis in atoms(dims[dim]))


# ---- values that are computed again ----------------------------------------------------------------------------------


def shared_inputs(effects: Effects, nodes: Sequence[fx.Node], dims: Dims) -> dict[fx.Node, Dims]:
    """The nodes from which several, that compute the same, are computed, with their dims.

    Raises:
        LayoutError: they spell out sizes, which differ in a proof.
    """
    if len(set(nodes)) == 1:
        return {nodes[0]: dims}
    calls = [effects.calls[node] for node in nodes]
    found: dict[fx.Node, Dims] = {}
    for operands in zip(*(node.all_input_nodes for node in nodes), strict=True):
        call = calls[0]
        assert call is not None, "what is computed twice is a call"
        for node, own in shared_inputs(effects, operands, _dims_of(call, operands[0], dims)).items():
            if resolve(found.setdefault(node, own)) != resolve(own):
                raise LayoutError(f"{told(node)} is read along different dimensions")
    return found


def _dims_of(call: Call, operand: fx.Node, dims: Dims) -> Dims:
    """The dims of an operand, given those of the result."""
    tensor = tensor_of(operand)
    if tensor is None:
        return ()
    if is_cast(call) or call.name == "detach":
        return dims
    if not layout.rearranges(call):
        return broadcast_from(dims, shape_of(tensor))
    read = None if call.name in layout.SIZED else layout.read_input_dims(call, dims)
    if read is None:
        raise LayoutError(f"{told(call.node)} spells out sizes, or picks")
    return read


def reached(node: fx.Node, edges: Mapping[fx.Node, Dims]) -> set[fx.Node]:
    """The edges from which a node is computed."""
    return {each for inner in needed([node], edges) for each in inner.all_input_nodes if each in edges}


def replay(node: fx.Node, value: Callable[[fx.Node], Any], edges: Mapping[fx.Node, Dims]) -> Any:
    """A node computed again from the values of the edges."""
    if node in edges:
        return value(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: replay(each, value, edges))
    assert node.op in ("call_function", "call_method"), f"{node.name} is no call"
    return called(node.target, args, kwargs)
