"""A match together with others that a kernel computes along: those directly before it, and its sibling.

Before it is what an operand *is*: the result of another match, or a sum of two tensors (:mod:`sums`). Nobody else reads
that, unless the kernel gives it, too; no mode changes in between, nothing is overwritten, and the canonical result of the
one is the canonical operand of the other, element by element. The last is tried out, on numbered elements at the sizes of a
proof, and so holds whatever transposes lie in between.

A sibling is another match of the same op, with the same attributes and some of the same operands, as the rotations of query
and key are. Both results are given where the first of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.ground.records import Reason
from lz_compile.lowering import ops
from lz_compile.lowering.fused import GIVEN, RESIDUAL, SIBLING, Fused
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.layout import SPLITS
from lz_compile.passes.formula.moments import CALLS, STATISTICS
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.fusion.emitter import FusedEmitter, in_order, kind_of, operands_of, results_of
from lz_compile.passes.fusion.sums import sum_before
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import is_symbolic, read, tensor_of
from lz_compile.passes.proof.resize import shape
from lz_compile.passes.proof.running import Sizes
from lz_compile.passes.proof.sizes import representative_sizes
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Input, Match

#: Whole numbers up to this are exact in every dtype, bfloat16 included.
_EXACT = 128

#: The axes of one dimension in one match, what they are called in the other, and whether they correspond.
_Pair: TypeAlias = tuple[tuple[Axis, ...], tuple[Axis, ...], bool]


@dataclass(frozen=True)
class Fusion:
    """A match with ``others`` that a kernel may compute along: what operands of these names are, or its sibling.

    ``hoisted`` are the nodes to be computed before, ``refused`` says of what is not among the others why.
    """

    match: Match
    others: Mapping[str, Match] = field(default_factory=dict)
    hoisted: tuple[fx.Node, ...] = ()
    refused: tuple[Reason, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """What a kernel could compute along, by the names of descriptors: as long as somebody still reads it."""
        there_is = {name: each for name, each in self.others.items() if any(node.users for node in each.outputs)}
        return tuple(sorted({kind_of(name, each) for name, each in there_is.items()}))

    def of(self, fused: Sequence[str]) -> Match:
        """The match that a kernel replaces which fuses these: everything from the first inputs to the last result."""
        others = {name: each for name, each in self.others.items() if kind_of(name, each) in fused}
        inner = {each.site.output for each in others.values()}
        own = {node: each for node, each in self.match.found.inputs.items() if node not in inner}
        operands = {name: node for name, node in self.match.found.operands.items() if node not in inner}
        for name, one in others.items():
            further = {f"{name}.{each}": node for each, node in one.found.operands.items()}
            operands |= {each: node for each, node in further.items() if node not in operands.values()}
        core = in_order((*(node for each in others.values() for node in each.core), *self.match.core))
        also = tuple(_given(others, {*core}))
        inputs = {node: Input(dims) for each in others.values() for node, dims in each.inputs.items()}
        inputs |= {node: replace(each, rows=(), dropped=()) for node, each in own.items()}
        pairs = [*_corresponding([*others.values()], self.match, {node: each.dims for node, each in inputs.items()})]
        read = {**self.match.read, **{one.site.output: one.site.output_dims for one in others.values()}}
        for each in others.values():
            read |= each.read
        trials = [each.trial for each in (self.match, *others.values())]
        return replace(
            self.match,
            site=replace(self.match.site, core=core, read=read, extra_outputs=also, hoisted=self.hoisted),
            found=replace(
                self.match.found, inputs=inputs, operands=operands, emitter=FusedEmitter(self.match, others, also)
            ),
            trial=replace(
                self.match.trial,
                limited=frozenset().union(*(each.limited for each in trials)),
                pinned=frozenset().union(*(each.pinned for each in trials), _cut_apart(pairs)),
                ties=dict(_ties(pairs)),
            ),
            prototype=None,
            renamed={},
        )


def fusions(
    matches: Sequence[Match], effects: Effects, wanted: Callable[[Match], Collection[str]]
) -> dict[fx.Node, Fusion]:
    """By output: every match with what comes directly before it, or beside, of what is ``wanted`` for it."""
    planner = _Planner(matches, effects)
    found = {match.site.output: planner.before(match, names) for match in matches if (names := wanted(match))}
    planner.with_siblings(found, [match for match in matches if SIBLING in wanted(match)])
    return {output: fusion for output, fusion in found.items() if fusion.others or fusion.refused}


class _Planner:
    """What can be computed together in one graph."""

    def __init__(self, matches: Sequence[Match], effects: Effects) -> None:
        self._matches, self._effects = matches, effects
        self._by_output = {match.site.output: match for match in matches}
        self._along: dict[fx.Node, Match] = {}

    def before(self, match: Match, names: Collection[str]) -> Fusion:
        """What the operands of a match are, of these kinds."""
        fusion = Fusion(match)
        for name, node in match.found.operands.items():
            first: Match | Reason | None = self._by_output.get(node)
            if first is None and RESIDUAL in names:
                first = sum_before(match, name, self._effects)
            if isinstance(first, Reason):
                fusion = replace(fusion, refused=(*fusion.refused, first))
            elif first is not None and first.op in names:
                fusion = self.joined(fusion, name, first)
        return fusion

    def joined(self, fusion: Fusion, name: str, first: Match) -> Fusion:
        """With another match, unless something speaks against it."""
        where = f"at {first.site.where}" if name == SIBLING else f"before {name} ({first.site.where})"
        what = f"the {first.op} {where}"
        together = replace(fusion, others={**fusion.others, name: first})
        reason = self._obstacle(first, fusion.match, name, what) or self._conflict(together, what)
        both = together.of(together.ops)
        early = () if reason is not None else brought(what, both.inputs, both.outputs, self._effects)
        if reason is None and isinstance(early, tuple):
            if first.op == RESIDUAL:
                self._along |= dict.fromkeys(first.core, fusion.match)
            return replace(together, hoisted=early)
        return replace(fusion, refused=(*fusion.refused, reason or early))  # type: ignore[arg-type]

    def _obstacle(self, first: Match, match: Match, name: str, what: str) -> Reason | None:
        """Why ``first`` cannot be computed together with ``match``, whose operand ``name`` it is."""
        reader = None if kind_of(name, first) in GIVEN else _stranger(first.site.output, set(match.core))
        if reader is not None:
            return Reason("NOT_FUSED", f"{what} is also read by {told(reader)}")
        writer = self._writer(first, match)
        if writer is not None:
            return Reason("NOT_FUSED", f"{what} stays by itself, for {told(writer)} overwrites what is read")
        if first.site.ambient != match.site.ambient:
            return Reason("NOT_FUSED", f"{what} runs under another autocast or gradient mode")
        if sum(node is first.site.output for node in match.found.operands.values()) > 1:
            return Reason("NOT_FUSED", f"{what} is several operands at once")
        if name == SIBLING:
            difference = _difference(first, match)
            return None if difference is None else Reason("NOT_FUSED", f"{what} {difference}")
        cut = _cut_apart(_corresponding((first,), match, match.inputs))
        if not all(isinstance(axis.size, int) for axis in cut) or not _fits(first, match, name):
            return Reason("NOT_FUSED", f"{what} is laid out or scaled otherwise than {name} is")
        return None

    def _writer(self, first: Match, match: Match) -> fx.Node | None:
        """What overwrites anything that is read or given, from where that begins up to the last result."""
        start = min(first.core, key=self._effects.position.__getitem__)
        touched = dict.fromkeys((*first.inputs, *first.outputs, *match.inputs))
        writers = (self._effects.overwritten_after(node, start, match.site.output) for node in touched)
        return next(filter(None, writers), None)

    def _conflict(self, fusion: Fusion, what: str) -> Reason | None:
        """Matches are replaced from the last to the first: those in between must not read what is given early."""
        position, together = self._effects.position, fusion.of(fusion.ops)
        along = {id(self._along.get(node, fusion.match)) for each in fusion.others.values() for node in each.core}
        for other in self._matches:
            if id(other) in along and other is not fusion.match:
                return Reason("NOT_FUSED", f"{what} is computed along with the {other.op} at {other.site.where}")
        given = {*together.site.extra_outputs}
        last, own = position[fusion.match.site.output], {each.site.output for each in fusion.others.values()}
        for other in self._matches if given else ():
            if position[other.site.output] >= last or other.site.output in own:
                continue
            if not given.isdisjoint((*other.inputs, *other.read, *other.core)):
                return Reason("NOT_FUSED", f"{what} is read by the {other.op} at {other.site.where} before")
        return None

    def with_siblings(self, fusions: dict[fx.Node, Fusion], matches: Sequence[Match]) -> None:
        """Join neighbours that share operands, each with one other at most."""
        alone: dict[tuple[Any, ...], Match] = {}
        for match in sorted(matches, key=lambda match: self._effects.position[match.site.output]):
            names = getattr(ops.module(match.op), "SIBLINGS_SHARE", None)
            if names is None:
                continue
            shared = (match.op, *(match.found.operands[name] for name in names))
            first = alone.pop(shared, None)
            if first is not None:
                fusions[match.site.output] = self.joined(fusions[match.site.output], SIBLING, first)
            if first is None or SIBLING not in fusions[match.site.output].others:
                alone[shared] = match


# ---- axes ------------------------------------------------------------------------------------------------------------


def _corresponding(others: Collection[Match], match: Match, inputs: Mapping[fx.Node, Dims]) -> Iterator[_Pair]:
    """The axes of every dimension that two matches call differently, and whether they correspond."""
    sites = [each.site for each in others if each.site.output in match.inputs]
    pairs = [(site.output_dims, match.inputs[site.output]) for site in sites]
    for each in (*others, match):
        pairs += [(dims, inputs[node]) for node, dims in each.inputs.items() if inputs.get(node, dims) is not dims]
    for own, other in pairs:
        for ours, theirs in zip(map(atoms, own), map(atoms, other), strict=True):
            yield ours, theirs, [axis.size for axis in ours] == [axis.size for axis in theirs]


def _ties(pairs: Iterable[_Pair]) -> Iterator[tuple[Axis, Axis]]:
    for ours, theirs, correspond in pairs:
        if correspond:
            yield from zip(ours, theirs, strict=True)


def _cut_apart(pairs: Iterable[_Pair]) -> Iterator[Axis]:
    """The axes of dimensions that come apart in one match otherwise than in the other: these keep their sizes in proofs."""
    for ours, theirs, correspond in pairs:
        if not correspond:
            yield from (*ours, *theirs)


# ---- readers ---------------------------------------------------------------------------------------------------------


def _stranger(node: fx.Node, core: set[fx.Node]) -> fx.Node | None:
    """Who reads a value, behind casts and layout changes, without being part of the match."""
    for user in node.users:
        if user in core:
            continue
        call = read(user)
        passes_on = call is not None and (layout.rearranges(call) or is_cast(call))
        found = _stranger(user, core) if passes_on else user
        if found is not None:
            return found
    return None


def _given(others: Mapping[str, Match], core: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The outputs of others that a kernel gives, as far as somebody else reads them."""
    for name, each in others.items():
        for node in each.outputs if kind_of(name, each) in GIVEN else ():
            if any(user not in core for user in node.users):
                yield node


# ---- whether one is the other ----------------------------------------------------------------------------------------


def _fits(first: Match, match: Match, name: str) -> bool:
    """Whether the canonical result of one match is the canonical operand of the other."""
    sizes = representative_sizes(Fusion(match, {name: first}).of((first.op,)))
    ones = {node: _ones(node, dims, sizes) for node, dims in {**match.inputs, **first.inputs}.items()}
    earlier = Builder(ones.__getitem__, sizes=sizes)
    try:
        result = Fused(first.op, operands_of(first, earlier), first.found.attributes).reference()
        for numbered in _numbered(result):
            given = ones | {first.site.output: results_of(first, earlier, numbered)[0]}
            operand = getattr(operands_of(match, Builder(given.__getitem__, sizes=sizes)), name)
            if operand.numel() != numbered.numel():
                return False
            if not bool((operand.reshape(numbered.shape) == numbered.to(operand.dtype)).all()):
                return False
    except (LookupError, RuntimeError):  # the axes of one do not come apart in the other
        return False
    return True


def _numbered(like: torch.Tensor) -> Iterator[torch.Tensor]:
    """The position along every dimension, in parts that every dtype holds exactly."""
    for dim, size in enumerate(like.shape):
        position = torch.arange(size, device=like.device).reshape(
            [-1 if each == dim else 1 for each in range(like.dim())]
        )
        for part in (position % _EXACT + 1, position // _EXACT + 1):
            yield part.to(like.dtype).expand(like.shape).contiguous()


def _ones(node: fx.Node, dims: Dims, sizes: Sizes) -> Any:
    example = tensor_of(node)
    if example is None:
        return 1
    return torch.ones(shape(dims, sizes), dtype=example.dtype, device=example.device)


def _difference(first: Match, match: Match) -> str | None:
    """Why two matches of an op are no siblings."""
    module = ops.module(match.op)
    if first.found.attributes != match.found.attributes:
        return "has other attributes"
    one, other = first.found.facts, match.found.facts
    if replace(one, **{name: getattr(other, name) for name in module.SIBLINGS_DIFFER}) != other:
        return "has other sizes or dtypes"
    sizes = representative_sizes(Fusion(match, {SIBLING: first}).of((SIBLING,)))
    with isolated():
        given = {node: _any(node, dims, sizes) for node, dims in {**first.inputs, **match.inputs}.items()}
    found = [operands_of(each, Builder(given.__getitem__, sizes=sizes)) for each in (first, match)]
    if not all(torch.equal(*(getattr(each, name) for each in found)) for name in module.SIBLINGS_SHARE):
        return f"reads other parts of {' and '.join(module.SIBLINGS_SHARE)}"
    return None


def _any(node: fx.Node, dims: Dims, sizes: Sizes) -> Any:
    example = tensor_of(node)
    if example is None:
        return 1
    values = torch.randn(shape(dims, sizes), dtype=torch.complex64 if example.is_complex() else torch.float32)
    return values.to(example.device, example.dtype)


# ---- what is computed earlier ----------------------------------------------------------------------------------------


_MOVABLE = contraction.PRODUCTS | STATISTICS | SPLITS | CALLS.keys() | {"getitem", "cat", "stack", "narrow", "select"}
_MANY = 64


def brought(
    what: str, inputs: Collection[fx.Node], outputs: Collection[fx.Node], effects: Effects
) -> tuple[fx.Node, ...] | Reason:
    """The nodes to be computed before the first of ``outputs``, so that all of ``inputs`` are there; or why they cannot be.

    Args:
        what: is to be computed at that place, in words.
        inputs: what the kernel reads.
        outputs: what it gives.
        effects: of the graph.
    """
    place = min(outputs, key=effects.position.__getitem__)
    start = effects.position[place]
    stack = [node for node in inputs if effects.position[node] > start]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node in outputs:
            return Reason("NOT_FUSED", f"{what} is needed for the rest of what the kernel reads")
        if not _is_movable(node, effects) or effects.ambient(node) != effects.ambient(place):
            return Reason("NOT_FUSED", f"{what} comes before {told(node)}, which is not computed earlier")
        found.add(node)
        stack.extend(operand for operand in node.all_input_nodes if effects.position[operand] >= start)
        writer = next(filter(None, (effects.overwritten_after(x, place, node) for x in node.all_input_nodes)), None)
        if writer is not None or len(found) > _MANY:
            return Reason("NOT_FUSED", f"{what} comes too early for what else the kernel reads ({told(node)})")
    return in_order([*found]) if found else ()


def _is_movable(node: fx.Node, effects: Effects) -> bool:
    """Whether a node gives the same wherever it stands: it draws no random numbers and overwrites nothing."""
    call = effects.calls[node]
    if node.op == "get_attr" or (is_symbolic(node) and node.op != "placeholder"):
        return True
    if call is None or call.is_inplace or "out" in call.arguments:
        return False
    if call.name == "dropout":
        return not call.get("training", True) or call.get("p", 0.5) == 0
    return is_pointwise(call) or layout.rearranges(call) or call.name in _MOVABLE
