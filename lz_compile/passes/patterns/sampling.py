"""What is done to the scores of the next token before it is drawn: masks, temperature, top-k, top-p, min-p and the softmax.

The anchor is whatever orders or compares the scores of a row: a sort, a selection, a maximum. What is computed from the
same scores afterwards, and looks like them, is run at a small size: if it keeps some tokens and drops the others, it is a
filter (:mod:`~lz_compile.passes.sampling.limits`). Filters that follow each other become one, with what was done to the
scores before (:mod:`~lz_compile.passes.sampling.warps`) and the softmax that follows. The draw itself stays: PyTorch's
generator would give other tokens to another kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from lz_compile.passes.algebra import is_pointwise
from lz_compile.passes.axes import Dims, fresh, shape_of
from lz_compile.passes.builder import EMITTED
from lz_compile.passes.core import Core
from lz_compile.passes.effects import Effects, MutatedError
from lz_compile.passes.match import Failure, Match, NearMiss, RefusedError, attempt
from lz_compile.passes.patterns.sampling_call import sampling_calls
from lz_compile.passes.sampling.drawn import draws, weighs
from lz_compile.passes.sampling.excerpt import Affected, Excerpt, Scores, excerpt, exits
from lz_compile.passes.sampling.kept import Form, Limits
from lz_compile.passes.sampling.limits import LEAST_MISSED, limits_of
from lz_compile.passes.sampling.rounding import check_dtypes, check_rounding, is_choice
from lz_compile.passes.sampling.sampling_emitter import SamplingEmitter
from lz_compile.passes.sampling.sorted_draws import sorted_draw
from lz_compile.passes.sampling.stores import MAXIMA, ORDERING, ordered_dim
from lz_compile.passes.sampling.verbatim import check_repeatable
from lz_compile.passes.sampling.warps import warps_of
from lz_compile.passes.view import tensor_of, where_of

OP = "sampling"
#: So many values are tried as the scores that an anchor is about, and so many as what became of them.
_MOST_ENTRIES = 3
_MOST_EXITS = 8


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Match | NearMiss | Failure]:
    """Every chain of filters in ``graph``, masks before a softmax, and every filter that was refused, with the reason."""
    yield from sampling_calls(graph, effects)
    reader = _Reader(effects)
    for node in graph.nodes:
        if node in reader.covered or EMITTED in node.meta or not reader.is_anchor(node):
            continue
        missed = attempt(OP, node, reader.filter, node)
        if missed is not None:
            yield missed
    covered: set[fx.Node] = set()
    for chain in reader.chains():
        found = attempt(OP, chain.exit, reader.match, chain)
        if isinstance(found, Match):
            covered.update(found.core)
        if found is not None:
            yield found
    for node in graph.nodes:
        if node not in covered and EMITTED not in node.meta:
            found = attempt(OP, node, reader.unfiltered, node)
            if found is not None:
                yield found


@dataclass(frozen=True)
class _Filter:
    """Scores at ``entry``, of the form ``form``, of which ``limits`` are kept at ``exit``."""

    entry: Scores
    form: Form
    exit: fx.Node
    limits: Limits
    core: frozenset[fx.Node]


@dataclass
class _Reader:
    """The filters of one graph."""

    effects: Effects
    filters: list[_Filter] = field(default_factory=list)
    covered: set[fx.Node] = field(default_factory=set)
    told: set[fx.Node] = field(default_factory=set)

    # ---- filters ------------------------------------------------------------------------------------------------

    def is_anchor(self, node: fx.Node) -> bool:
        """Whether a call orders the scores of rows."""
        call = self.effects.calls[node]
        if call is None or call.name not in ORDERING | MAXIMA:
            return False
        source = tensor_of(call.input)
        is_ordered = source is not None and source.is_floating_point() and ordered_dim(call) is not None
        return is_ordered and not weighs(self.effects, call.input)

    def filter(self, anchor: fx.Node) -> NearMiss | None:
        """Note the filter that an anchor is part of; what stands in the way of one that looks like it."""
        call = self.effects.calls[anchor]
        assert call is not None, "an anchor is a call"
        place = ordered_dim(call)
        refused: RefusedError | None = None
        for entry in self._entries(anchor, call.input, place):
            affected = Affected(self.effects, entry.node)
            if not any(is_choice(node) for node in affected.order):
                continue
            try:
                found = self._filter(entry, affected, anchor)
            except RefusedError as refusal:
                refused = refused or refusal
                continue
            if found is not None:
                self.filters.append(found)
                self.covered.update(found.core)
                return None
        return None if refused is None else _missed(anchor, refused)

    def _entries(self, anchor: fx.Node, source: fx.Node, place: int | None) -> Iterator[Scores]:
        """The values of the anchor's shape that it may be about, nearest first."""
        tensor = tensor_of(source)
        assert tensor is not None, "an anchor has a tensor"
        assert place is not None, "an anchor has a dimension"
        dims = fresh(shape_of(tensor))
        node: fx.Node | None = self.effects.current(source, anchor)
        for _ in range(_MOST_ENTRIES):
            if node is None:
                return
            yield Scores(node, dims, dims[place][0])
            node = self._above(node)
            while node is not None and len(node.users) < 2:
                node = self._above(node)

    def _above(self, node: fx.Node) -> fx.Node | None:
        """What a value of the same shape is computed from element by element, or row by row."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        if call is None or tensor is None or not (is_pointwise(call) or call.name in _SOFTMAXES | {"clone"}):
            return None
        alike = [
            each
            for each in node.all_input_nodes
            if (other := tensor_of(each)) is not None
            and other.is_floating_point()
            and shape_of(other) == shape_of(tensor)
        ]
        return alike[0] if len(alike) == 1 else None

    def _filter(self, entry: Scores, affected: Affected, anchor: fx.Node) -> _Filter | None:
        """The first exit at which some tokens are kept.

        Raises:
            RefusedError: some are, by a rule that the op does not have.
        """
        form = self._form(entry)
        refused: RefusedError | None = None
        for tried, exit_ in enumerate(exits(self.effects, entry, affected, anchor)):
            if tried == _MOST_EXITS:
                break
            found = excerpt(self.effects, entry, affected, exit_)
            if found is None or not any(is_choice(node) for node in found.core):
                continue
            try:
                limits = limits_of(found, form, self.told)
            except RefusedError as refusal:
                refused = refused or refusal
                continue
            if limits is None or not limits.named:
                continue
            check_dtypes(found, limits)
            check_rounding(self.effects, found)
            return self._divided(_Filter(entry, form, exit_, limits, frozenset(found.core)))
        if refused is not None:
            raise refused
        return None

    def _divided(self, found: _Filter) -> _Filter | None:
        """Probabilities of what is kept with what divides them by their sum; None where that is nothing to look for.

        Raises:
            RefusedError: nothing does.
        """
        if found.limits.result != "parts":
            return found
        entry = found.entry.at(found.exit)
        affected = Affected(self.effects, entry.node)
        for tried, exit_ in enumerate(exits(self.effects, entry, affected, entry.node)):
            inner = excerpt(self.effects, entry, affected, exit_)
            limits = None if inner is None else limits_of(inner, "parts", self.told)
            if inner is not None and limits is not None and limits.result == "probs" and not limits.named:
                return replace(
                    found, exit=exit_, limits=replace(found.limits, result="probs"), core=found.core | {*inner.core}
                )
            if tried == _MOST_EXITS:
                break
        size = entry.vocab.size
        if isinstance(size, int) and size < LEAST_MISSED:  # experts, whose weights need no sum
            return None
        raise RefusedError(
            "NOT_NORMALISED",
            "the probabilities of what is kept are not divided by their sum",
            "divide them by their sum, or mask the scores before the softmax",
        )

    def _form(self, entry: Scores) -> Form:
        """What is known of the scores: that they are probabilities, if a softmax or a filter made them."""
        known = next((each.limits.result for each in self.filters if each.exit is entry.node), None)
        if known is not None:
            return known
        return "probs" if self._softmax_input(entry) is not None else "scores"

    def _softmax_input(self, scores: Scores) -> Scores | None:
        """The scores of which these are the softmax over the tokens."""
        call = self.effects.calls.get(scores.node)
        if call is not None and call.name == "exp":
            call = self.effects.calls.get(call.input)
            if call is None or call.name != "log_softmax":
                return None
        elif call is None or call.name != "softmax":
            return None
        dim = call.get("dim")
        is_over = isinstance(dim, int) and scores.vocab in scores.dims[dim % len(scores.dims)]
        return scores.at(call.input) if is_over and isinstance(call.input, fx.Node) else None

    # ---- chains -------------------------------------------------------------------------------------------------

    def chains(self) -> list[_Filter]:
        """Filters that follow each other as one, as far as the op has their order and nobody reads what is between."""
        found: list[_Filter] = []
        for each in self.filters:
            last = found[-1] if found else None
            is_next = last is not None and last.exit is each.entry.node and set(last.exit.users) <= each.core
            both = last.limits.then(each.limits) if last is not None and is_next else None
            if last is not None and both is not None:
                found[-1] = replace(last, exit=each.exit, limits=both, core=last.core | each.core | {last.exit})
            else:
                found.append(each)
        return [self._with_softmax(each) for each in found]

    def _with_softmax(self, chain: _Filter) -> _Filter:
        """The chain with the softmax of its scores, where that is all that they are for."""
        user = next(iter(chain.exit.users), None)
        if chain.limits.result != "scores" or user is None or len(chain.exit.users) != 1:
            return chain
        source = self._softmax_input(chain.entry.at(user))
        call = self.effects.calls.get(user)
        if source is None or source.node is not chain.exit or call is None or call.name != "softmax":
            return chain
        return replace(chain, exit=user, limits=replace(chain.limits, result="probs"), core=chain.core | {chain.exit})

    def match(self, chain: _Filter) -> Match | NearMiss | None:
        """The match of a chain, or what stands in its way."""
        try:
            return self._match(chain)
        except RefusedError as refusal:
            return _missed(chain.exit, refusal)
        except MutatedError as error:
            return _missed(
                chain.exit, RefusedError("OPERAND_MUTATED", f"a value is {error}", "use its out-of-place form")
            )

    def _match(self, chain: _Filter) -> Match:
        """The match of a chain.

        Raises:
            RefusedError: what stands in its way.
        """
        if chain.limits.result == "scores" and chain.limits.fill != -math.inf:
            raise RefusedError(
                "FILL_FINITE",
                f"what is not kept becomes {chain.limits.fill:g}, and is read as a score",
                "fill with -inf, or take the softmax of it at once",
            )
        entry = chain.entry
        if chain.form == "probs":
            entry = self._softmax_input(entry) or entry
        inside = {chain.exit, *chain.core}
        warps = warps_of(self.effects, entry, lambda node: self._is_inside(node, inside))
        logits = warps.logits
        affected = Affected(self.effects, logits.node)
        stops = frozenset(part.node for part in warps.parts)
        found = excerpt(self.effects, logits, affected, chain.exit, stops)
        if found is None:
            raise RefusedError("OPERANDS_UNKNOWN", "it reads tensors of other shapes", "compute them before")
        self._check_leaves(found, chain.limits, stops)
        dims = entry.dims
        output = Scores(chain.exit, dims, entry.vocab)
        core = self._core(found, chain.exit)
        match = SamplingEmitter.of(warps, chain.limits, found, output).match(OP, core)
        if chain.limits.is_any:
            check_repeatable(found, wants_grad=match.facts.needs_grad)
        return match

    def _is_inside(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether all readers of a value are among those that become superfluous; if so, so does it."""
        if not all(user in inside for user in node.users):
            return False
        inside.add(node)
        return True

    @staticmethod
    def _check_leaves(found: Excerpt, limits: Limits, stops: frozenset[fx.Node]) -> None:
        known = stops | {limit.leaf for limit in limits.named.values() if limit.leaf is not None}
        other = next((leaf for leaf in found.leaves if leaf not in known), None)
        if other is not None:
            raise RefusedError("OPERANDS_UNKNOWN", f"it also reads {other.name}", "compute that before")

    def _core(self, found: Excerpt, exit_: fx.Node) -> Core:
        """What becomes superfluous.

        Raises:
            RefusedError: it may not.
        """
        effects, nodes = self.effects, list(found.core)
        for node in [each for each in nodes if self._is_softmax_for_others(each, set(nodes))]:
            nodes.remove(node)
        inside = set(nodes)
        for writer, target in effects.writes_made:
            if (effects.owner(target) in inside) != (writer in inside):
                raise RefusedError(
                    "OPERAND_MUTATED", f"{writer.name} overwrites part of it", "use the out-of-place form"
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
        call = self.effects.calls[node]
        return call is not None and call.name in _SOFTMAXES and any(user not in inside for user in node.users)

    # ---- masks alone --------------------------------------------------------------------------------------------

    def unfiltered(self, node: fx.Node) -> Match | NearMiss | None:
        """Masks before a softmax that no filter stands between, and draws that no filter can be taken from."""
        call = self.effects.calls[node]
        if call is not None and call.name == "multinomial":
            return sorted_draw(OP, self.effects, node)
        return self._masked(node) if self._is_masked_softmax(node) else None

    def _is_masked_softmax(self, node: fx.Node) -> bool:
        """Whether a call is a softmax whose result is no weight of a sum, as attention's is."""
        call, tensor = self.effects.calls[node], tensor_of(node)
        if call is None or call.name != "softmax" or tensor is None or not isinstance(call.get("dim"), int):
            return False
        before = self.effects.calls.get(call.input) if isinstance(call.input, fx.Node) else None
        is_drawn = any(draws(self.effects, user) for user in node.users)
        return before is not None and is_drawn and shape_of(tensor)[call.get("dim")] != 1

    def _masked(self, node: fx.Node) -> Match | NearMiss | None:
        """The masks, temperature and additions before a softmax, None where nothing is masked."""
        call, tensor = self.effects.calls[node], tensor_of(node)
        assert call is not None, "a softmax is a call"
        assert tensor is not None, "of a tensor"
        dims: Dims = fresh(shape_of(tensor))
        entry = Scores(call.input, dims, dims[call.get("dim") % len(dims)][0])
        inside = {node}
        warps = warps_of(self.effects, entry, lambda each: self._is_inside(each, inside))
        if not warps.masks and not any(self._is_additive_mask(part.node) for part in warps.bias):
            return None
        return self.match(_Filter(entry, "scores", node, Limits("probs"), frozenset({node})))

    def _is_additive_mask(self, node: fx.Node) -> bool:
        """Whether what is added to scores is minus infinity somewhere, by what made it."""
        call = self.effects.calls.get(node)
        if call is None or call.name not in ("where", "masked_fill", "mul"):
            return False
        return any(abs(each) == math.inf for each in call.arguments.values() if isinstance(each, float))


_SOFTMAXES = frozenset({"softmax", "log_softmax", "exp"})


def _missed(node: fx.Node, refusal: RefusedError) -> NearMiss:
    return NearMiss(OP, node, refusal.reason, refusal.edit, where_of(node))
