"""A match together with the matches directly before it, for kernels that compute both.

What may be fused is an operand that *is* the result of another match: nobody else reads that, no mode changes in between,
nothing is overwritten, and the canonical result of the one is the canonical operand of the other, element by element. The
last is tried out, on numbered elements at the sizes of a proof, and so holds whatever transposes lie in between.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.fused import Fused
from lz_compile.passes import layout
from lz_compile.passes.algebra import is_cast
from lz_compile.passes.axes import Axis, atoms
from lz_compile.passes.builder import Builder
from lz_compile.passes.core import is_dead
from lz_compile.passes.effects import Effects
from lz_compile.passes.match import Attributes, Match
from lz_compile.passes.resize import representative_sizes, shape
from lz_compile.passes.view import read, tensor_of
from lz_compile.reasons import Reason

#: Whole numbers up to this are exact in every dtype, bfloat16 included.
_EXACT = 128


@dataclass(frozen=True)
class Fusion:
    """A match with the matches ``before`` it, by operand; ``refused`` says of others why they are not among them."""

    match: Match
    before: Mapping[str, Match] = field(default_factory=dict)
    refused: tuple[Reason, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that a kernel could compute along."""
        return tuple(sorted({each.op for each in self.before.values()}))

    def of(self, fused: Sequence[str]) -> Match:
        """The match that a kernel replaces which fuses these ops: everything from their inputs to the last result."""
        before = {name: each for name, each in self.before.items() if each.op in fused}
        inner = {each.output for each in before.values()}
        own = {node: dims for node, dims in self.match.inputs.items() if node not in inner}
        earlier = [item for each in before.values() for item in each.inputs.items()]
        read_through = [item for each in before.values() for item in each.read.items()]
        return replace(
            self.match,
            inputs={**dict(earlier), **own},
            operands={
                **{name: node for name, node in self.match.operands.items() if node not in inner},
                **{f"{name}.{each}": node for name, one in before.items() for each, node in one.operands.items()},
            },
            rows={},
            dropped={},
            core=_in_order((*(node for each in before.values() for node in each.core), *self.match.core)),
            read={**self.match.read, **{node: one.output_dims for one in before.values() for node in (one.output,)}}
            | dict(read_through),
            emitter=FusedEmitter(self.match, before),
            limited=self.match.limited.union(*(each.limited for each in before.values())),
            fixed=self.match.fixed.union(
                *(each.fixed for each in before.values()), *(_cut_apart(each, self.match) for each in before.values())
            ),
            ties={axis: other for each in before.values() for axis, other in _ties(each, self.match)},
            prototype=None,
            renamed={},
        )


def fusions(matches: Sequence[Match], effects: Effects, wanted: Collection[str]) -> dict[fx.Node, Fusion]:
    """By output: every match of an op in ``wanted`` that has another one directly before it."""
    by_output = {match.output: match for match in matches}
    found = {}
    for match in matches:
        if match.op not in wanted:
            continue
        before, refused = {}, []
        for name, node in match.operands.items():
            first = by_output.get(node)
            if first is None:
                continue
            reason = _obstacle(first, match, name, effects)
            if reason is None:
                before[name] = first
            else:
                refused.append(reason)
        if before or refused:
            found[match.output] = Fusion(match, before, tuple(refused))
    return found


def _obstacle(first: Match, match: Match, name: str, effects: Effects) -> Reason | None:
    """Why ``first`` cannot be computed together with ``match``, whose operand ``name`` it is."""
    what = f"the {first.op} before {name} ({first.where})"
    reader = _stranger(first.output, set(match.core))
    if reader is not None:
        return Reason("NOT_FUSED", f"{what} is also read by {reader.name}")
    if effects.has_mutations:
        return Reason("NOT_FUSED", f"{what} stays by itself in a graph that overwrites tensors")
    if first.ambient != match.ambient:
        return Reason("NOT_FUSED", f"{what} runs under another autocast or gradient mode")
    if sum(node is first.output for node in match.operands.values()) > 1:
        return Reason("NOT_FUSED", f"{what} is several operands at once")
    if not all(isinstance(axis.size, int) for axis in _cut_apart(first, match)) or not _fits(first, match, name):
        return Reason("NOT_FUSED", f"{what} is laid out or scaled otherwise than {name} is")
    return None


def _dims(first: Match, match: Match) -> Iterator[tuple[tuple[Axis, ...], tuple[Axis, ...], bool]]:
    """The axes of every dimension of one match's result, what they are called in the other, and whether they correspond."""
    for own, other in zip(first.output_dims, match.inputs[first.output], strict=True):
        ours, theirs = atoms(own), atoms(other)
        yield ours, theirs, [axis.size for axis in ours] == [axis.size for axis in theirs]


def _ties(first: Match, match: Match) -> Iterator[tuple[Axis, Axis]]:
    for ours, theirs, correspond in _dims(first, match):
        if correspond:
            yield from zip(ours, theirs, strict=True)


def _cut_apart(first: Match, match: Match) -> Iterator[Axis]:
    """The axes of dimensions that come apart in one match otherwise than in the other: these keep their sizes in proofs."""
    for ours, theirs, correspond in _dims(first, match):
        if not correspond:
            yield from (*ours, *theirs)


def _stranger(node: fx.Node, core: set[fx.Node]) -> fx.Node | None:
    """Who reads a value, behind casts and layout changes, without being part of the match; dead code does not count."""
    for user in node.users:
        if user in core or is_dead(user):
            continue
        call = read(user)
        passes_on = call is not None and (layout.rearranges(call) or is_cast(call))
        found = _stranger(user, core) if passes_on else user
        if found is not None:
            return found
    return None


def _fits(first: Match, match: Match, name: str) -> bool:
    """Whether the canonical result of one match is the canonical operand of the other."""
    sizes = representative_sizes(Fusion(match, {name: first}).of((first.op,)))
    earlier = Builder({node: _ones(node, first, sizes) for node in first.inputs}.__getitem__, sizes=sizes)
    others = {node: _ones(node, match, sizes) for node in match.inputs}
    try:
        result = Fused(first.op, _operands(first, earlier), first.attributes).reference()
        for numbered in _numbered(result):
            given = others | {first.output: _result(first, earlier, numbered)}
            operand = _operands(match, Builder(given.__getitem__, sizes=sizes))[name]
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


def _ones(node: fx.Node, match: Match, sizes: Mapping[Axis, int]) -> Any:
    example = tensor_of(node)
    if example is None:
        return 1
    return torch.ones(shape(match.inputs[node], sizes), dtype=example.dtype, device=example.device)


# ---- matches that may be twins: their emitters speak of the prototype's nodes ------------------------------------------


def _own(match: Match, builder: Builder) -> Builder:
    if not match.renamed:
        return builder
    return _with_values(builder, lambda node: builder.value(match.renamed.get(node, node)))


def _with_values(builder: Builder, values: Any) -> Builder:
    changed = copy.copy(builder)
    changed.value = values
    return changed


def _operands(match: Match, builder: Builder) -> dict[str, Any]:
    return match.emitter.operands(_own(match, builder))


def _result(match: Match, builder: Builder, value: Any) -> Any:
    return match.emitter.result(_own(match, builder), value)


@dataclass(frozen=True)
class FusedEmitter:
    """The emitter of a match whose operands in ``before`` come from other matches."""

    match: Match
    before: Mapping[str, Match]

    def operands(self, builder: Builder) -> dict[str, Any]:
        """The operands that are given, and as ``fused`` those that are still to be computed."""
        fused = {
            name: Fused(first.op, _operands(first, builder), first.attributes) for name, first in self.before.items()
        }
        inner = {first.output: name for name, first in self.before.items()}

        def value(node: fx.Node) -> Any:
            try:
                return builder.value(node)  # in a graph it is still there, and nobody reads it in the end
            except LookupError:
                name = inner.get(node)
                if name is None:
                    raise
                return _result(self.before[name], builder, fused[name].reference())

        found = _operands(self.match, _with_values(builder, value))
        return {**{name: each for name, each in found.items() if name not in self.before}, "fused": fused}

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's result in the layout and dtype of the last match's."""
        return _result(self.match, builder, value)

    def attributes_at(self, sizes: Mapping[Axis, int]) -> Attributes:
        """The last match's attributes for a proof at other sizes."""
        return self.match.emitter.attributes_at(sizes)

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """What an implied input holds at other sizes."""
        back = {own: node for node, own in self.match.renamed.items()}
        return self.match.emitter.implied_value(back.get(node, node), _own(self.match, builder), given, sizes)


def _in_order(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Nodes of one graph, each once, in its order."""
    wanted = set(nodes)
    return tuple(node for node in nodes[0].graph.nodes if node in wanted)
