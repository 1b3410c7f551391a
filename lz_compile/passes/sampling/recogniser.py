"""What is done to the scores of the next token before it is drawn: masks, temperature, top-k, top-p, min-p and the softmax.

A filter is found by what it does. The anchor is whatever orders or compares the scores of a row: a sort, a selection, a
maximum. What is computed from the same scores afterwards, and looks like them, is run at a small size: if it keeps some
tokens and drops the others, it is a filter (:mod:`limits`). Filters that follow each other become one, with what was done to
the scores before (:mod:`logit_processors`) and the softmax that follows (:mod:`matching`). The draw itself stays: PyTorch's
generator would give other tokens to another kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.formula.expressions import is_cast, is_constant
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, is_floating, known_tensor, reached, tensor_of
from lz_compile.passes.sampling.excerpt import Affected, Excerpt, Scores, excerpt, exits
from lz_compile.passes.sampling.kept import LEAST_MISSED, Form, Limits
from lz_compile.passes.sampling.logit_processors import logit_processors_of
from lz_compile.passes.sampling.ordering import MAXIMA, ORDERING, ordered_dim

OP = "sampling"
SOFTMAXES = frozenset({"softmax", "log_softmax", "exp"})
#: So many values are tried as the scores that an anchor is about, and so many as what became of them.
_MOST_ENTRIES = 3
_MOST_EXITS = 8


@dataclass(frozen=True)
class Filter:
    """Scores at ``entry``, of the form ``form``, of which ``limits`` are kept at ``exit``."""

    entry: Scores
    form: Form
    exit: fx.Node
    limits: Limits
    core: frozenset[fx.Node]


@dataclass
class FilterReader:
    """Finds the filters of a graph, one anchor after the other; ``covered`` is what they are made of.

    ``limits_of`` says what an excerpt keeps of scores of some form; None is no filter, and a refusal one that the op has not.
    """

    effects: Effects
    limits_of: Callable[[Excerpt, Form], Limits | None]
    filters: list[Filter] = field(default_factory=list)
    covered: set[fx.Node] = field(default_factory=set)

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
                self._note(found)
                return None
        return None if refused is None else NearMiss.of(OP, anchor, refused)

    def _entries(self, anchor: fx.Node, source: fx.Node, place: int | None) -> Iterator[Scores]:
        """The values of the anchor's shape that it may be about, nearest first."""
        tensor = known_tensor(source)
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
        if call is None or tensor is None or not (is_pointwise(call) or call.name in SOFTMAXES | {"clone"}):
            return None
        alike = [
            each
            for each in node.all_input_nodes
            if (other := tensor_of(each)) is not None
            and other.is_floating_point()
            and shape_of(other) == shape_of(tensor)
        ]
        return alike[0] if len(alike) == 1 else None

    def _filter(self, entry: Scores, affected: Affected, anchor: fx.Node) -> Filter | None:
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
                limits = self.limits_of(found, form)
            except RefusedError as refusal:
                refused = refused or refusal
                continue
            if limits is None or not limits.named:
                continue
            check_dtypes(found, limits)
            check_rounding(self.effects, found)
            return self._divided(Filter(entry, form, exit_, limits, frozenset(found.core)))
        if refused is not None:
            raise refused
        return None

    def _divided(self, found: Filter) -> Filter | None:
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
            limits = None if inner is None else self.limits_of(inner, "parts")
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
        return "probs" if softmax_input(self.effects, entry) is not None else "scores"

    def _note(self, found: Filter) -> None:
        self.filters.append(found)
        self.covered.update(found.core)

    # ---- chains -------------------------------------------------------------------------------------------------

    def chains(self) -> list[Filter]:
        """Filters that follow each other as one, as far as the op has their order and nobody reads what is between."""
        found: list[Filter] = []
        for each in self.filters:
            last = found[-1] if found else None
            is_next = last is not None and last.exit is each.entry.node and set(last.exit.users) <= each.core
            both = last.limits.then(each.limits) if last is not None and is_next else None
            if last is not None and both is not None:
                found[-1] = replace(last, exit=each.exit, limits=both, core=last.core | each.core | {last.exit})
            else:
                found.append(each)
        return [self._with_softmax(each) for each in found]

    def _with_softmax(self, chain: Filter) -> Filter:
        """The chain with the softmax of its scores, where that is all that they are for."""
        user = next(iter(chain.exit.users), None)
        if chain.limits.result != "scores" or user is None or len(chain.exit.users) != 1:
            return chain
        source = softmax_input(self.effects, chain.entry.at(user))
        call = self.effects.calls.get(user)
        if source is None or source.node is not chain.exit or call is None or call.name != "softmax":
            return chain
        return replace(chain, exit=user, limits=replace(chain.limits, result="probs"), core=chain.core | {chain.exit})


def softmax_input(effects: Effects, scores: Scores) -> Scores | None:
    """The scores of which these are the softmax over the tokens."""
    call = effects.calls.get(scores.node)
    if call is not None and call.name == "exp":
        call = effects.calls.get(call.input)
        if call is None or call.name != "log_softmax":
            return None
    elif call is None or call.name != "softmax":
        return None
    dim = call.get("dim")
    is_over = isinstance(dim, int) and scores.vocab in scores.dims[dim % len(scores.dims)]
    return scores.at(call.input) if is_over and isinstance(call.input, fx.Node) else None


# ---- rounding --------------------------------------------------------------------------------------------------------


_SELECTIONS = frozenset(
    {"masked_fill", "where", "neg", "clone", "min", "amin", "gather", "scatter", "take_along_dim", "getitem"}
)


def is_choice(node: fx.Node) -> bool:
    """Whether a value says which tokens are meant: a comparison, or places."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype in (torch.bool, torch.int64)


def check_dtypes(found: Excerpt, limits: Limits) -> None:
    """Refuse sums and quotients of probabilities that are rounded to half precision: who is kept hangs on that.

    Raises:
        RefusedError: there are such.
    """
    tensors = [tensor_of(node) for node in found.core]
    halves = [each for each in tensors if each is not None and each.is_floating_point() and each.dtype.itemsize < 4]
    if halves and (limits.top_p is not None or limits.min_p is not None):
        raise RefusedError(
            "SUMS_IN_HALF",
            f"probabilities are compared in {halves[0].dtype}, whose rounding decides which tokens are kept",
            "take the softmax of scores in float32",
        )


def check_rounding(effects: Effects, found: Excerpt) -> None:
    """Refuse choices among values that were rounded to fewer bits than the scores have: more of them are equal.

    Raises:
        RefusedError: there are such.
    """
    rounded: dict[fx.Node, torch.dtype] = {}
    own = tensor_of(found.entry.node)
    for node in found.core:
        tensor = tensor_of(node)
        before = next((rounded[each] for each in node.all_input_nodes if each in rounded), None)
        if before is None and tensor is not None and tensor.is_floating_point() and own is not None:
            is_narrow = tensor.dtype.itemsize < max(own.dtype.itemsize, 4)
            before = tensor.dtype if is_narrow and not _is_exact(effects.calls[node], own.dtype) else None
        if before is None:
            continue
        rounded[node] = before
        if is_choice(node):
            raise RefusedError(
                "SUMS_IN_HALF",
                f"which tokens are kept is decided by values in {before}, and rounding makes some of them equal",
                "compare the scores themselves",
            )


def _is_exact(call: Call | None, kind: torch.dtype) -> bool:
    """Whether a call gives values that it was given, or known ones, in the dtype that these had."""
    tensor = None if call is None else tensor_of(call.node)
    if call is None or tensor is None or tensor.dtype != kind:
        return False
    is_same = layout.rearranges(call) or is_cast(call) or is_constant(call)
    return is_same or call.name in ORDERING | MAXIMA | _SELECTIONS


_DRAWS = frozenset({"multinomial", "argmax", "cumsum"})
#: Calls after which scores, or what is left of them, are scores still, or their weights.
_BETWEEN = ORDERING | {"softmax", "log_softmax", "scatter", "gather", "sum", "dropout", "min", "amin", "amax", "select"}
#: How many values are looked at.
_FAR = 128


def draws(effects: Effects, node: fx.Node) -> bool:
    """Whether probabilities are drawn from, as they are or after they were rearranged, given back, or compared."""
    call = effects.calls.get(node)
    if call is None:
        return node.op == "output"
    if call.name in _DRAWS or call.name == "div":
        return True
    if call.name in contraction.PRODUCTS or not (layout.rearranges(call) or is_cast(call)):
        return False
    return any(draws(effects, user) for user in node.users)


def weighs(effects: Effects, scores: fx.Node) -> bool:
    """Whether scores end up in a product with other values, and in no draw: top-k attention is none of tokens."""

    def calls(node: fx.Node) -> Iterator[Call]:
        return (call for call in map(effects.calls.get, node.users) if call is not None)

    def goes_on(call: Call) -> bool:
        if call.name in _DRAWS or call.name in contraction.PRODUCTS:
            return False
        is_number = tensor_of(call.node) is None or is_floating(call.node) or is_pointwise(call)  # or a mask of them
        return is_number and (call.name in _BETWEEN or is_pointwise(call) or layout.rearranges(call))

    near = reached([scores], lambda node: (call.node for call in calls(node) if goes_on(call)), _FAR)
    names = {call.name for node in near for call in calls(node)}
    return names.isdisjoint(_DRAWS) and not names.isdisjoint(contraction.PRODUCTS)


# ---- masks without a filter ------------------------------------------------------------------------------------------


def masked_softmax(effects: Effects, node: fx.Node) -> Filter | None:
    """The masks, temperature and additions before a softmax that is no weight of a sum, as attention's is; else None."""
    call, tensor = effects.calls[node], tensor_of(node)
    if call is None or call.name != "softmax" or tensor is None or not isinstance(call.get("dim"), int):
        return None
    is_computed = isinstance(call.input, fx.Node) and effects.calls.get(call.input) is not None
    is_drawn = any(draws(effects, user) for user in node.users)
    if not is_computed or not is_drawn or shape_of(tensor)[call.get("dim")] == 1:
        return None
    dims = fresh(shape_of(tensor))
    entry = Scores(call.input, dims, dims[call.get("dim") % len(dims)][0])
    processors = logit_processors_of(effects, entry, {node})
    if not processors.masks and not any(_is_additive_mask(effects, part.node) for part in processors.bias):
        return None
    return Filter(entry, "scores", node, Limits("probs"), frozenset({node}))


def _is_additive_mask(effects: Effects, node: fx.Node) -> bool:
    """Whether what is added to scores is minus infinity somewhere, by what made it."""
    call = effects.calls.get(node)
    if call is None or call.name not in ("where", "masked_fill", "mul"):
        return False
    return any(abs(each) == math.inf for each in call.arguments.values() if isinstance(each, float))
