"""Every chain of filters of a graph as a match, and every call that is the op itself. What is none is told.

Calls of ``lz.sample`` and its kin are held as the operator ``layerzero::sampling``. Which kernel such a call selects by
itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, SamplingFacts
from lz_compile.lowering.token_bits import WORD, word_count
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.gradients import differentiated
from lz_compile.passes.graph.own_calls import arguments_of
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import reached
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.rewriting.core import Core, wants_grad
from lz_compile.passes.rewriting.match import Driver, Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, op_calls
from lz_compile.passes.sampling.emitter import SamplingEmitter, check_repeatable
from lz_compile.passes.sampling.excerpt import Affected, Excerpt, excerpt
from lz_compile.passes.sampling.kept import Limits
from lz_compile.passes.sampling.limits import limits_of
from lz_compile.passes.sampling.logit_processors import logit_processors_of
from lz_compile.passes.sampling.near_misses import sorted_draw, unknown_filter
from lz_compile.passes.sampling.ordering import ORDERING
from lz_compile.passes.sampling.recogniser import OP, SOFTMAXES, Filter, FilterReader, masked_softmax, softmax_input

#: So many calls are followed up from what is scattered.
_MOST_CALLS = 64
#: Between what numbers operands are.
_RANGES: Mapping[str, tuple[float, float]] = {
    "bitmask": (-(2.0**31), 2.0**31 - 1),
    "temperature": (0.3, 2.0),
    "top_k": (0.0, 8.0),
    "top_p": (0.05, 1.0),
    "min_p": (0.0, 0.5),
    "seeds": (0.0, 2.0**62),
}


def _match(node: fx.Node, effects: Effects) -> Match:
    """The match of one call; RefusedError where it is mapped over a dimension."""
    ambient = effects.ambient(node)
    refuse_transformed(ambient)
    given, tensors, named = arguments_of(node, Operands, "result", "out_dtype")
    attrs = SamplingAttrs.of(given, **named)
    logits = tensors["logits"]
    rows, vocab = (as_size(size) for size in logits.shape)
    axes = _Axes(rows, vocab)
    needs_grad = wants_grad(ambient, given.values())
    facts = SamplingFacts(rows, vocab, logits.dtype, logits.device.type, needs_grad)
    inputs = {each: Input(axes.dims(name, tensors[name]), range=_RANGES.get(name)) for name, each in given.items()}
    emitter, formula = CallEmitter(given, attrs, Operands), f"{attrs.result} of {', '.join(given)}"
    return Match(
        OP,
        Site.of(Core((node,), ambient), (axes.rows,) if attrs.result == "ids" else (axes.rows, axes.vocab), {}),
        Found(attrs, facts, inputs, {"logits": given["logits"]}, emitter, formula),
        Trial(pinned=axes.pinned),
    )


class _Axes:
    """Rows and tokens; tokens are words times bits, where they fill the last word."""

    def __init__(self, rows: Any, vocab: Any) -> None:
        self.rows = () if rows == 1 else (Axis(rows),)
        is_whole = isinstance(vocab, int) and vocab % WORD == 0 and vocab > WORD
        self.words = (Axis(vocab // WORD if is_whole else word_count(vocab)),)
        bits = Axis(WORD)
        self.vocab = (*self.words, bits) if is_whole else (Axis(vocab),)
        self.pinned = frozenset({bits} if is_whole else {*self.vocab, *self.words})

    def dims(self, name: str, tensor: torch.Tensor) -> Dims:
        """The dimensions of an operand; of a single row it has none."""
        last = {"logits": self.vocab, "bias": self.vocab, "bitmask": self.words}.get(name)
        rows = () if as_size(tensor.shape[0]) == 1 else self.rows
        return (rows,) if last is None else (rows, last)


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every chain of filters in ``graph``, masks before a softmax, and every filter that was refused, with the reason."""
    yield from op_calls(OP, graph, effects, _match)
    reader = FilterReader(effects, partial(limits_of, told=set()))
    misses = [*Driver(OP, covered=reader.covered).walk(graph.nodes, reader.is_anchor, reader.filter)]
    yield from misses
    matcher = _Matcher(effects, reader.covered | {miss.node for miss in misses if isinstance(miss, NearMiss)})
    driver = Driver(OP)
    for chain in reader.chains():
        yield from driver.at(chain.exit, matcher.match, chain)
    yield from driver.walk(graph.nodes, lambda node: effects.calls[node] is not None, matcher.unfiltered)
    yield from filter(None, (_written_back(effects, node) for node in graph.nodes))


def _written_back(effects: Effects, node: fx.Node) -> NearMiss | None:
    """The refusal of scores that are ordered, filtered and scattered back into a tensor that the graph is given."""
    call = effects.calls[node]
    if (
        call is None
        or not call.is_inplace
        or call.name != "scatter"
        or effects.calls[effects.owner(call.input)] is not None
    ):
        return None
    orderings = [
        {each for each in reached([given], most=_MOST_CALLS) if effects.name(each) in ORDERING}
        for given in node.all_input_nodes
        if given is not call.input
    ]
    if len(orderings) < 2 or orderings[0].isdisjoint(orderings[1]):
        return None
    target = effects.owner(call.input).name
    text = f"{node.name} writes the scores that are left into {target}, which the caller holds: no kernel writes there"
    return NearMiss.of(
        OP, node, RefusedError("SCORES_WRITTEN_BACK", text, f"scatter into a tensor of its own: {target}.scatter(...)")
    )


@dataclass
class _Matcher:
    """Makes matches of chains of filters, and of masks that no filter follows; what is ``known`` was told already."""

    effects: Effects
    known: set[fx.Node]

    def match(self, _anchor: fx.Node, chain: Filter) -> Match:
        """The match of a chain.

        Raises:
            RefusedError: what stands in its way.
            MutatedError: an alias of a value was overwritten before it is read.
        """
        if chain.limits.result == "scores" and chain.limits.fill != -math.inf:
            raise RefusedError(
                "FILL_FINITE",
                f"what is not kept becomes {chain.limits.fill:g}, and is read as a score",
                "fill with -inf, or take the softmax of it at once",
            )
        entry = chain.entry
        if chain.form == "probs":
            entry = softmax_input(self.effects, entry) or entry
        processors = logit_processors_of(self.effects, entry, {chain.exit, *chain.core})
        logits = processors.logits
        affected = Affected(self.effects, logits.node)
        stops = frozenset(part.node for part in processors.parts)
        found = excerpt(self.effects, logits, affected, chain.exit, stops)
        if found is None:
            raise RefusedError("OPERANDS_UNKNOWN", "it reads tensors of other shapes", "compute them before")
        self._check_leaves(found, chain.limits, stops)
        output = entry.at(chain.exit)
        core = self._core(found, chain.exit)
        match = SamplingEmitter.of(processors, chain.limits, found, output).match(OP, core)
        if chain.limits.is_any:
            wants_grad = match.found.facts.needs_grad
            is_used = wants_grad and core.output in differentiated(core.output.graph, self.effects)
            check_repeatable(found, wants_grad=wants_grad, is_differentiated=is_used)
        return match

    @staticmethod
    def _check_leaves(found: Excerpt, limits: Limits, stops: frozenset[fx.Node]) -> None:
        known = stops | {limit.leaf for limit in limits.named.values() if limit.leaf is not None}
        other = next((leaf for leaf in found.leaves if leaf not in known), None)
        if other is not None:
            raise RefusedError("OPERANDS_UNKNOWN", f"it also reads {other.name}", "compute that before")

    def _core(self, found: Excerpt, exit_: fx.Node) -> Core:
        """What becomes superfluous; RefusedError where it may not."""
        effects, nodes = self.effects, list(found.core)
        for node in [each for each in nodes if self._is_softmax_for_others(each, set(nodes))]:
            nodes.remove(node)
        inside = set(nodes)
        for writer, target in effects.writes_made:
            if (effects.owner(target) in inside) != (writer in inside):
                raise RefusedError(
                    "OPERAND_MUTATED", f"{told(writer)} overwrites part of it", "use the out-of-place form"
                )
        core = Core((*(node for node in nodes if node is not exit_), exit_), effects.ambient(exit_))
        readers = {
            node: min(
                (user for user in node.users if user in found.core or user in found.read),
                key=effects.position.__getitem__,
                default=exit_,
            )
            for node in found.inputs
        }
        core.check(effects, readers)
        return core

    def _is_softmax_for_others(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a softmax that a filter starts from is read by others, too: it stays for them."""
        return self.effects.name(node) in SOFTMAXES and any(user not in inside for user in node.users)

    def unfiltered(self, node: fx.Node) -> Match | NearMiss | None:
        """Masks before a softmax that no filter stands between, and draws that no filter can be taken from."""
        name = self.effects.name(node)
        if name in ("multinomial", "argmax"):
            ordered = sorted_draw(self.effects, node) if name == "multinomial" else None
            return ordered or unknown_filter(self.effects, node, self.known)
        masked = masked_softmax(self.effects, node)
        return None if masked is None else self.match(node, masked)
