"""Every routed adapter of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.lowering.ops.routing import SHAPES, Operands, RoutingAttrs, RoutingFacts
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import NearMiss, where_of
from lz_compile.passes.graph.view import known_tensor, tensor_of, tensor_operands
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Driver, Found, Input, Match, Outcome, Site, TableEmitter, Trial
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.routing.products import Summands
from lz_compile.passes.routing.recogniser import OP, Operand, Reader, Routed

Run = tuple[Axis, ...]
#: Operands that are multiplied as matrices, in one dtype.
_MATRICES = ("x", "vh", "u", "a_q", "b_q", "weight")


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every routed adapter in ``graph``, every one that was refused, and gates of tokens where rollouts are meant."""
    summands, twins, gates, driver = Summands(effects), Twins(effects), Gates(effects), Driver(OP)

    def read(anchor: fx.Node) -> Match | NearMiss | None:
        sums = summands.of(anchor)[1]
        driver.covered.update(sums)
        return twins.read(sums, lambda: Reader(effects, summands, partial(_matched, effects)).read(anchor))

    for found in driver.walk(reversed(graph.nodes), summands.is_sum, read):  # the last addition of a sum is met first
        if isinstance(found, Match):
            yield from gates.notices(OP, found)
        yield found


def _matched(effects: Effects, read: Routed) -> Match:
    """The match of a routed adapter that was read: the nodes between the tensors that are given and the sum go.

    Raises:
        RefusedError: someone else needs one of them, a mode changes, or an operand is overwritten.
    """
    output, interior = read.output, read.interior
    found = core_between(effects, read.edges, interior.keys() - read.edges.keys(), output)
    nodes = _without_shared(effects, [*found.nodes[:-1]], output)
    dead = _only_for(effects, read.unread, {*nodes, output})
    nodes = sorted({*nodes, *dead}, key=effects.position.__getitem__)
    ungraded = dead if read.cosine is None else dead | set(read.cosine.interior)
    core = Core((*nodes, output), effects.ambient(output), frozenset(ungraded))
    core.check(effects, read.edges, if_used="use the sum only, and compute what else is needed of it apart")
    return RoutingEmitter.of(read, core).match(OP, core, interior)


def _only_for(effects: Effects, unread: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """What is computed for values that make no difference, and for nothing else."""
    found, queue = set[fx.Node](), list(unread)
    while queue:
        node = queue.pop()
        is_own = all(user in inside or user in found for user in node.users)
        if node in found or effects.calls[node] is None or not is_own:
            continue
        found.add(node)
        queue.extend(each for each in node.all_input_nodes if each not in inside)
    return found


def _without_shared(effects: Effects, nodes: list[fx.Node], output: fx.Node) -> list[fx.Node]:
    """The nodes without those that only cast or rearrange a given tensor, and that others read, too."""
    inside, found = {*nodes, output}, list[fx.Node]()
    for node in nodes:
        call = effects.calls[node]
        is_moved = call is not None and (is_cast(call) or layout.rearranges(call)) and not call.is_inplace
        is_made = any(operand in inside for operand in node.all_input_nodes)
        if is_moved and not is_made and any(user not in inside for user in node.users):
            inside.discard(node)
        else:
            found.append(node)
    return found


# ---- gates of tokens -------------------------------------------------------------------------------------------------
# Gates that are there for their gradient, one row for every token: what is read off them scatters.
# The unit of routing is the rollout. A gate of ones per token tells the gradient of a token, whose cosine with a direction is
# above zero by noise for about half of the tokens of a clean rollout.


CODE = "GATE_PER_TOKEN"


@dataclass
class Gates:
    """The gates of one graph; of several layers with such a gate, the first is an event."""

    effects: Effects
    is_told: bool = False

    def notices(self, op: str, match: Match) -> Iterator[NearMiss]:
        """What is to be said of the gate of a match: nothing, where it is one per rollout or computed by the model."""
        gate = _gate_of(match)
        if gate is None or match.found.attributes.to_dict()["gate"] != "token" or not grad_enabled(match.site.ambient):
            return
        tensor = tensor_of(gate)
        is_computed = self.effects.calls[gate] is not None and tensor_operands(gate)
        if tensor is None or not tensor.requires_grad or is_computed:  # what a network computes is a gate of its own
            return
        rows = " x ".join(str(size) for size in tensor.shape[:-1]) or "1"
        text = (
            f"the gate {gate.name} has a row for every token ({rows}): cosines of tokens scatter, about half of the tokens "
            "of a clean rollout are flagged by noise, and half of its gradient is routed wrongly"
        )
        edit = "a gate per rollout, [G, 1, rank]; or sum its gradient over the tokens of each rollout before the cosine"
        if not self.is_told:
            events.record(CODE, f"{op} at {match.site.where}: {text}; use {edit}")
            self.is_told = True
        yield NearMiss(op, gate, Reason(CODE, text), edit, match.site.where or where_of(gate))


def _gate_of(match: Match) -> fx.Node | None:
    parts = getattr(match.found.emitter, "parts", {}).get("gate")
    if not parts:
        return None
    gate: fx.Node = parts[0].leaf.node
    return match.renamed.get(gate, gate)


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
