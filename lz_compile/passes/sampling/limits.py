"""Which tokens a filter keeps: those of a limit that keeps the same ones of many different rows.

An excerpt is run on random scores. Limits are made of the numbers and tensors that it reads, and held against what it
kept: top-k, top-p, min-p, or several of them at once, in the order of :mod:`lz_compile.lowering.ops.sampling`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from lz_compile.ground.isolation import isolated
from lz_compile.passes.formula.axes import axes_of
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.sampling.excerpt import Excerpt
from lz_compile.passes.sampling.kept import LEAST_MISSED, VOCAB, Form, Limit, Limits, Ties
from lz_compile.passes.sampling.probes import Order, Probe, Trial
from lz_compile.passes.sampling.tried import Tried, sizes_for

_TIES: tuple[Ties, ...] = ("all", "first", "last")
#: More combinations of limits are not tried.
_MOST = 400
#: Of fewer tokens it is chance what fits.
_LEAST_VOCAB = 16
#: So many more probes tell limits apart that all of the others fit.
_MOST_MORE = 40
#: How far scores are spread, and by how much all of them are moved.
_PROBES = (
    (0.2, 0.0),
    (3.0, -7.0),
    (1.0, 4.0),
    (6.0, 0.0),
    (1.0, -1.0),
    (2.0, 30.0),
    (0.5, 0.0),
    (3.0, 0.0),
    (120.0, 0.0),
)
#: Numbers of the source between these are tried as scores, and so many of them: a function may have a corner there.
_CORNERS, _MOST_CORNERS = (5.0, 1e4), 6
#: More scores are not tried at once.
_MOST_SCORES = 2**23


def limits_of(found: Excerpt, form: Form, told: set[fx.Node]) -> Limits | None:
    """The limits that keep what an excerpt keeps, none of them where it only normalises; None where it is no filter.

    Of scores, the first excerpt that does not run at a small size is an event; those of which it was ``told`` are noted.

    Raises:
        RefusedError: it keeps some and drops others, by a rule that the op does not have.
    """
    given = [leaf for leaf in found.leaves if found.entry.vocab in axes_of(found.leaves[leaf])]
    if given:
        return None
    vocab, tried = _vocab(found), Tried(found)
    if vocab is None:
        return None
    try:
        return _limits_of(Trial(tried, form, vocab))
    finally:
        size = found.entry.vocab.size
        is_missed = not isinstance(size, int) or size >= LEAST_MISSED
        if tried.failures and is_missed and found.entry.node not in told:
            told.add(found.entry.node)
            tried.tell_failures()


def _limits_of(trial: Trial) -> Limits | None:
    found, vocab = trial.found, trial.vocab
    with isolated():
        first = trial.probe()
        outcome = None if first is None else first.outcome()
        if first is None or outcome is None:
            return None
        outcome = replace(outcome, vocab=vocab)
        order = Order.of(first, outcome)
        if not order.is_kept_first:
            return None
        probes = [first, *(trial.probe(scale, shift=shift) for scale, shift in _PROBES)]
        rest = [probe for probe in probes if probe is not None]
        rest += _at_corners(trial)
        likely = (each for each in _candidates(found, outcome, vocab) if order.may_fit(each))
        fits = _only([*_alike(each for each in likely if all(probe.fits(each) for probe in rest))], trial)
        if fits is not None and all(probe.fits(fits) for probe in _of_more_rows(trial)):
            return _with_ties(trial, fits)
        _check_unlike(order, vocab)
        return None


def _alike(fitting: Iterable[Limits]) -> Iterator[Limits]:
    """The first, and those after it of the same kinds of limits."""
    first: Limits | None = None
    for each in fitting:
        first = first or each
        if each.named.keys() != first.named.keys():
            return
        yield each


def _only(fitting: list[Limits], trial: Trial) -> Limits | None:
    """The one that fits more rows as well, of limits that are nearly equal: 0.37 and exp(-1), of a dimension."""
    for _ in range(_MOST_MORE):
        probe = trial.probe() if len(fitting) > 1 else None
        if probe is None:
            break
        fitting = [each for each in fitting if probe.fits(each)] or fitting
    return next(iter(fitting), None)


def _vocab(found: Excerpt) -> int | None:
    """So many tokens that every number of the source has its meaning; None where they are too many to be told apart."""
    size = found.entry.vocab.size
    counts = [abs(int(x)) for x in found.numbers if math.isfinite(x) and x == int(x) and x != size]
    least = max([VOCAB, *(2 * count + 1 for count in counts if count < 2**20)])
    if isinstance(size, int):
        least = min(least, size)
    return least if least >= _LEAST_VOCAB else None


def _at_corners(trial: Trial) -> list[Probe]:
    """Scores around the numbers of the source, where these have a meaning."""
    if trial.form != "scores":
        return []
    low, high = _CORNERS
    numbers = sorted({abs(x) for x in trial.found.numbers if low < abs(x) < high}, reverse=True)[:_MOST_CORNERS]
    probes = (trial.probe(shift=sign * x) for x in numbers for sign in (1, -1))
    return [probe for probe in probes if probe is not None and not probe.result.isnan().any()]


def _of_more_rows(trial: Trial) -> Iterator[Probe]:
    """So many rows, of each axis, that whatever number of the source counts rows has its meaning.

    Raises:
        RefusedError: they are too many.
    """
    found = trial.found
    counts = [int(x) for x in found.row_numbers if 2 <= abs(x) < 2**20]
    least = 2 * max(map(abs, counts), default=0) + 1
    sizes = sizes_for(found.entry, trial.vocab)
    for axis in found.entry.rows:
        extent = least if not isinstance(axis.size, int) else min(least, axis.size)
        if extent <= sizes[axis]:
            continue
        if extent * math.prod(sizes.values()) // sizes[axis] > _MOST_SCORES:
            raise RefusedError(
                "ROWS_UNKNOWN",
                f"{extent // 2} may be the number of a row: it is not seen whether all rows are filtered alike",
                "split rows that are treated differently before, and join them afterwards",
            )
        probe = trial.probe(rows={axis.size: extent})
        if probe is None:
            raise RefusedError(
                "ROWS_UNKNOWN",
                f"it cannot be run with {extent} rows, and a number of the source may be that of a row",
                "leave numbers of rows to the tensors: reshape with -1",
            )
        yield probe


# ---- candidates ------------------------------------------------------------------------------------------------------


def _candidates(found: Excerpt, outcome: Limits, vocab: int) -> Iterator[Limits]:
    """Combinations of limits that can be made of what the source reads, fewer ones first."""
    counts, shares = list(_counts(found, vocab)), list(_shares(found))
    every: Sequence[tuple[str, Sequence[Limit]]] = (("top_k", counts), ("top_p", shares), ("min_p", shares))
    tried = 0
    if outcome.result == "probs":
        yield outcome
    for number in (1, 2, 3):
        for chosen in itertools.combinations(every, number):
            for limits in itertools.product(*(own for _, own in chosen)):
                tried += 1
                if tried > _MOST:
                    return
                named: dict[str, Any] = dict(zip((name for name, _ in chosen), limits, strict=True))
                yield replace(outcome, **named)


def _counts(found: Excerpt, vocab: int) -> Iterator[Limit]:
    given = {abs(int(x)) for x in found.numbers if math.isfinite(x) and x == int(x)}
    if vocab == found.entry.vocab.size:  # a number may count from the other end
        given |= {vocab - each for each in given}
    whole = {each + more for each in given for more in (-1, 0, 1)}
    yield from (Limit(count) for count in sorted(whole) if 1 <= count < vocab)
    for leaf in found.leaves:
        tensor = tensor_of(leaf)
        if tensor is None or not tensor.is_floating_point():
            yield from (Limit(0, leaf), Limit(1, leaf), Limit(0, leaf, -1, of_vocab=True))


def _shares(found: Excerpt) -> Iterator[Limit]:
    numbers = {abs(x) for x in found.numbers if math.isfinite(x)}
    numbers |= {math.exp(x) for x in found.numbers if -50 < x < 0}
    numbers |= {math.exp(-x) for x in found.numbers if 1 < x < 50 and x != int(x)}  # a logarithm that is subtracted
    for share in sorted({each for x in numbers for each in (x, 1 - x) if 0 < each < 1}):
        yield Limit(share)
    for leaf in found.leaves:
        tensor = tensor_of(leaf)
        if tensor is None or tensor.is_floating_point():
            yield from (Limit(0, leaf), Limit(1, leaf, -1))


def _with_ties(trial: Trial, fits: Limits) -> Limits:
    """The limits with what becomes of equal scores.

    Raises:
        RefusedError: equal scores are treated in a way that the op does not have.
    """
    names = [name for name in ("top_k", "top_p") if name in fits.named]
    if not names:
        return fits
    probes = [trial.probe(steps=steps) for steps in (6, 12, 25, 3)]
    tied = [probe for probe in probes if probe is not None]
    picks_any = _picks_any(trial.found)
    # What a sort without an order of equals seems to do with so few tokens, it need not do with more.
    for choice in itertools.product(_TIES[:1] if picks_any else _TIES, repeat=len(names)):
        chosen: dict[str, Any] = {f"{name}_ties": ties for name, ties in zip(names, choice, strict=True)}
        tried = replace(fits, **chosen)
        if tied and all(probe.fits(tried) for probe in tied):
            return tried
    some = replace(fits, top_k_ties="first", top_p_ties="first", is_any=True)
    free: tuple[dict[str, Any], ...] = ({}, {"top_k_ties": "all"}, {"top_p_ties": "all"}) if picks_any else ()
    for whole in free:
        tried = replace(some, **whole)
        if tied and all(probe.fits_but_for_ties(tried) for probe in tied):
            absent: dict[str, Any] = {f"{name}_ties": "all" for name in ("top_k", "top_p") if name not in names}
            return replace(tried, **absent)
    raise RefusedError(
        "TIES_DIFFER",
        "which of several equally likely tokens it keeps is no rule that the op has",
        "compare with the k-th largest score, or scatter back what a sort has ordered",
    )


def _picks_any(found: Excerpt) -> bool:
    """Whether an order is asked for that says nothing of equal scores."""
    for node in found.core:
        name = getattr(node.target, "__name__", node.target)
        if name in ("topk", "msort") or (name in ("sort", "argsort") and node.kwargs.get("stable") is not True):
            return True
    return False


def _check_unlike(order: Order, vocab: int) -> None:
    """Refuse what keeps the likeliest tokens by another rule."""
    if order.keeps_all or vocab < LEAST_MISSED:
        return
    raise RefusedError(
        "LIMIT_UNKNOWN",
        "it keeps the likeliest tokens, but by none of the limits top-k, top-p and min-p",
        "keep the k likeliest, the fewest that reach p together, or those at least m times as likely as the first",
    )
