"""Every blend and every margin of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from lz_compile.ground.sizes import Size, shape_of
from lz_compile.lowering.ops.blend import SHAPES, BlendAttrs, BlendFacts, Mode, Operands
from lz_compile.passes.blend.digits import with_all_digits
from lz_compile.passes.blend.form import Form, Forms
from lz_compile.passes.blend.gate import Logits
from lz_compile.passes.blend.ranks import TriedRanks, has_ranks
from lz_compile.passes.blend.recogniser import OP, Blend, Margin, Weights, edges_behind, read_blend, read_margin
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.layout import stride_order
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, NearMiss, RefusedError, where_of
from lz_compile.passes.graph.view import called, known_tensor, reached, tensor_of
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Cell, Driver, Found, Input, Match, Outcome, Site, TableEmitter, Trial

#: The last operation of a margin.
_MARGINS = frozenset({"sub", "rsub", "add", "neg"})
#: Calls between one step of a loop and the next that are looked at.
_REACH = 64
Run = tuple[Axis, ...]
#: The axes of a blend's canonical layout: rows, channels and the rest.
Layout = tuple[Run, Run, Run]


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every blend in ``graph``, every margin of no blend, and every blend that was refused, with the reason."""
    ranks = TriedRanks(effects) if has_ranks(effects) else None
    reader = _Reader(effects, Forms.of(effects, ranks))
    driver, read = Driver(OP), partial(read_blend, effects, reader.forms, partial(_matched, effects))
    missed: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # the last operation of a blend is met first
        form = reader.forms.at(node) if node not in driver.covered and node not in missed else None
        if form is None:
            continue
        is_step = reader.is_of_recurrence(node, form)
        found = () if is_step else tuple(driver.at(node, read, form))
        yield from found
        if is_step or any(isinstance(each, NearMiss) for each in found):  # what it is made of is no blend of its own
            missed.update(reader.forms.sums.behind(node))
    if ranks is not None:
        yield from driver.walk(reversed(graph.nodes), reader.is_margin, reader.margin)


@dataclass
class _Reader:
    """Blends and margins of one graph."""

    effects: Effects
    forms: Forms

    def is_of_recurrence(self, anchor: fx.Node, form: Form) -> bool:
        """Whether a sum follows, by pointwise operations, from that of another step of the same loop, and detaches nothing.

        A membrane that leaks and resets, a moving average or a running softmax weigh what they hold; they blend no branches.
        A first step may hold nothing yet, and is no blend then: its sum is what the second one weighs.
        """
        if self.forms.is_detached(form.host, form.is_residual):
            return False
        if form.seed in _alike(self.effects, anchor, lambda node: node.all_input_nodes):
            return True
        directions = (lambda node: node.all_input_nodes), (lambda node: list(node.users))
        return any(self.forms.at(node) for each in directions for node in _alike(self.effects, anchor, each))

    def is_margin(self, node: fx.Node) -> bool:
        """Whether a value is computed from two order statistics by its last operation."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        gates = self.forms.gates
        if call is None or gates is None or tensor is None or call.is_inplace:
            return False
        return call.name in _MARGINS and gates.depends(node)

    def margin(self, anchor: fx.Node) -> Match | None:
        """The margin that ends in ``anchor``; None where it is none, or not a margin alone."""
        try:
            return _margin(self.effects, read_margin(self.effects, self.forms, anchor))
        except (RefusedError, MutatedError, LayoutError):  # the values that were sorted are wanted themselves
            return None


def _margin(effects: Effects, read: Margin) -> Match:
    """The match of a margin that was read; RefusedError where the ordered values are used otherwise, too."""
    logits, dtype = read.logits, known_tensor(read.output).dtype
    core = _core(effects, {logits.node: read.output}, {*read.region.interior, *logits.nodes}, read.output)
    attrs = BlendAttrs(
        mode="margin",
        has_gate=True,
        is_distinct=logits.is_distinct,
        is_sorted=True,
        is_differentiated=core.wants_grad([logits.node]),
        compute_dtype=dtype,
        out_dtype=dtype,
    )
    return MarginEmitter(logits, read.output, read.output_dims, attrs).match(OP, core, read.region.interior)


def _matched(effects: Effects, blend: Blend, output: fx.Node) -> Match:
    """The match of a blend that was read, whose result is ``output``.

    Raises:
        RefusedError: someone else needs a value of it, a mode changes, or an operand is overwritten.
        LayoutError: it has another layout than kernels take, or a gradient that is each source's own.
    """
    anchor, weights = blend.anchor, with_all_digits(blend)
    gate, channels = weights.gate, set[Axis]()
    if output is not anchor:
        call = effects.calls[output]
        assert call is not None, "a softmax is a call"
        channels = set(atoms(blend.dims[call.get("dim") % len(blend.dims)]))
        if not channels:
            raise LayoutError("a softmax over one number")
    rows = None if gate is None else set(axes_of(gate.logits.dims)) - set(atoms(gate.logits.classes))
    groups = group(output, blend.dims, weights.axes, rows, channels)
    if groups is None:
        raise LayoutError("the weights are along dimensions that are not next to one another")
    inside = {anchor, *blend.region.interior, *blend.again}
    tensors = [each for leaf in (blend.seed, blend.host) for each in blend.inputs_of(leaf)]
    edges = dict.fromkeys(tensors, anchor)
    read = dict(blend.region.interior)
    if gate is not None:
        inside |= {*gate.region.interior, *gate.logits.nodes}
        edges = {gate.logits.node: anchor, **edges}
        read = {**gate.region.interior, **read}
    stops = {leaf.node for leaf in weights.leaves} - blend.again
    core = _core(effects, edges, inside - stops, output)
    is_differentiated = gate is not None and not gate.logits.is_detached and core.wants_grad([gate.logits.node])
    if gate is not None and is_differentiated and not gate.logits.is_sorted:
        raise LayoutError("equal maxima share a gradient, each source in its own way")
    attrs = BlendAttrs(
        mode=_mode(blend, output),
        is_residual=blend.form.is_residual,
        has_gate=gate is not None,
        has_host_weight=gate is None and weights.host is not None,
        is_distinct=gate is not None and gate.logits.is_distinct,
        is_sorted=gate is not None and gate.logits.is_sorted,
        is_differentiated=is_differentiated,
        normalised=effects.calls[output].name if output is not anchor else "none",  # type: ignore[union-attr,arg-type]
        compute_dtype=core.widest(),
        out_dtype=known_tensor(output).dtype,
    )
    emitter = BlendEmitter(blend.host, blend.seed, weights, groups, output, blend.dims, attrs, blend.edges, blend.again)
    return emitter.match(OP, core, {**read, output: blend.dims})


def _mode(blend: Blend, output: fx.Node) -> Mode:
    """The name of a blend: by what follows it, by its gate, and by the axes of its weight."""
    if output is not blend.anchor:
        return "logit"
    if blend.form.is_soft:
        return "soft_gate"
    if blend.is_gated:
        return "confidence"
    if blend.form.is_residual:
        return "residual"
    axes = [set(atoms(dim)) & blend.weights.axes for dim in blend.dims]
    is_channel = len(axes) > 1 and not axes[0] and sum(map(bool, axes)) == 1
    return "channel" if is_channel else "convex"


def _core(effects: Effects, edges: Mapping[fx.Node, fx.Node], inside: set[fx.Node], output: fx.Node) -> Core:
    """The nodes between the edges and the output.

    Raises:
        RefusedError: someone else needs one of them, a mode changes, or an operand is overwritten.
    """
    core = core_between(effects, edges, inside, output)
    core.check(effects, edges, if_used="use the blend only, and compute what else is needed apart")
    return core


def _alike(effects: Effects, anchor: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """Calls like this one, of the same source line and shape, that are reached through pointwise operations."""

    def near(node: fx.Node) -> Iterator[fx.Node]:
        calls = (call for call in map(effects.calls.get, neighbours(node)) if call is not None)
        return (x.node for x in calls if is_pointwise(x) or is_cast(x) or layout.is_view(x))

    def like(node: fx.Node) -> tuple[object, ...]:
        return effects.calls[node].name, where_of(node), _shape(node)  # type: ignore[union-attr]  # these are calls

    return (node for node in reached([anchor], near, _REACH) if node is not anchor and like(node) == like(anchor))


def _shape(node: fx.Node) -> tuple[Size, ...] | None:
    tensor = tensor_of(node)
    return None if tensor is None else shape_of(tensor)


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
        return {node: self.edges[node] for node in edges_behind(leaf.node, self.edges)}

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
    order, _ = stride_order(known_tensor(output))
    return tuple(axis for dim in order for axis in atoms(dims[dim]))


def replay(node: fx.Node, value: Callable[[fx.Node], Any], edges: Mapping[fx.Node, Dims]) -> Any:
    """A node computed again from the values of the edges."""
    if node in edges:
        return value(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: replay(each, value, edges))
    assert node.op in ("call_function", "call_method"), f"{node.name} is no call"
    return called(node.target, args, kwargs)
