"""Which tokens a filter keeps: those of a limit that keeps the same ones of many different rows.

An excerpt is run on random scores. Limits are made of the numbers and tensors that it reads, and held against what it
kept: top-k, top-p, min-p, or several of them at once, in the order of :mod:`lz_compile.lowering.ops.sampling`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from lz_compile.lowering.ops.sampling import SamplingAttrs, Ties, reference
from lz_compile.passes.axes import Size, axes_of
from lz_compile.passes.match import RefusedError
from lz_compile.passes.resize import shape
from lz_compile.passes.sampling.excerpt import Excerpt, random_leaves, sizes_for
from lz_compile.passes.view import tensor_of

#: What a filter is given or gives: scores, probabilities, or those of what is kept, without having been divided by their sum.
Form: TypeAlias = Literal["scores", "probs", "parts"]

#: A vocabulary in which limits can be told from each other.
VOCAB = 97
#: At or below this, a score that is filled in has no weight after a softmax.
_FILL = -1e4
_NEAR = 1e-9
_TIES: tuple[Ties, ...] = ("all", "first", "last")
#: More combinations of limits are not tried.
_MOST = 400
#: Of fewer tokens it is chance what fits; fewer than these are experts or classes, of which no filter is missed.
_LEAST_VOCAB, _LEAST_MISSED = 16, 64
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


@dataclass(frozen=True)
class Limit:
    """A number, or ``number + sign * leaf``, or ``vocab - leaf`` (``of_vocab``)."""

    number: float = 0.0
    leaf: fx.Node | None = None
    sign: int = 1
    of_vocab: bool = False

    def value(self, values: Mapping[fx.Node, Any], vocab: int) -> Any:
        """A number or a tensor, for values of the leaves."""
        given = 0.0 if self.leaf is None else self.sign * values[self.leaf]
        return (vocab if self.of_vocab else self.number) + given

    def __str__(self) -> str:
        if self.leaf is None:
            return f"{self.number:g}"
        before = "V" if self.of_vocab else f"{self.number:g}" if self.number else ""
        return f"{before}{' - ' if self.sign < 0 else ' + ' if before else ''}{self.leaf.name}"


@dataclass(frozen=True)
class Limits:
    """What a filter keeps, and what it makes of it.

    ``fill`` is what scores become that are not kept, ``vocab`` the number of tokens at which this was seen. ``is_any``: the
    source does not say which of several equal scores are kept.
    """

    result: Form
    top_k: Limit | None = None
    top_p: Limit | None = None
    min_p: Limit | None = None
    top_k_ties: Ties = "all"
    top_p_ties: Ties = "all"
    fill: float = -math.inf
    vocab: int = VOCAB
    is_any: bool = False

    @property
    def named(self) -> dict[str, Limit]:
        """Those that there are."""
        found = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: limit for name, limit in found.items() if limit is not None}

    def then(self, later: Limits) -> Limits | None:
        """Both, the later ones of what is left; None where the op has another order."""
        order = ["top_k", "top_p", "min_p"]
        mine, others = ([order.index(name) for name in each.named] for each in (self, later))
        if mine and others and max(mine) >= min(others):
            return None
        ties = self.top_k_ties if self.top_k is not None else later.top_k_ties
        more = self.top_p_ties if self.top_p is not None else later.top_p_ties
        named = {**self.named, **later.named}
        fill, vocab = max(self.fill, later.fill), max(self.vocab, later.vocab)
        is_any = self.is_any or later.is_any
        return Limits(later.result, **named, top_k_ties=ties, top_p_ties=more, fill=fill, vocab=vocab, is_any=is_any)


def limits_of(found: Excerpt, form: Form) -> Limits | None:
    """The limits that keep what an excerpt keeps, none of them where it only normalises; None where it is no filter.

    Raises:
        RefusedError: it keeps some and drops others, by a rule that the op does not have.
    """
    given = [leaf for leaf in found.leaves if _is_wide(found, leaf)]
    if given:
        return None
    vocab = _vocab(found)
    if vocab is None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        first = _Probe.of(found, form, vocab, 1.0)
        outcome = None if first is None else first.outcome()
        if first is None or outcome is None:
            return None
        outcome = replace(outcome, vocab=vocab)
        order = _Order.of(first, outcome)
        if not order.is_kept_first:
            return None
        probes = [first, *(_Probe.of(found, form, vocab, scale, shift=shift) for scale, shift in _PROBES)]
        rest = [probe for probe in probes if probe is not None]
        rest += _at_corners(found, form, vocab)
        likely = (each for each in _candidates(found, outcome, vocab) if order.may_fit(each))
        fits = next((each for each in likely if all(probe.fits(each) for probe in rest)), None)
        if fits is not None and all(probe.fits(fits) for probe in _of_more_rows(found, form, vocab)):
            return _with_ties(found, form, vocab, fits)
        _check_unlike(order, vocab)
        return None


def _is_wide(found: Excerpt, leaf: fx.Node) -> bool:
    return found.entry.vocab in axes_of(found.leaves[leaf])


def _vocab(found: Excerpt) -> int | None:
    """So many tokens that every number of the source has its meaning; None where they are too many to be told apart."""
    size = found.entry.vocab.size
    counts = [abs(int(x)) for x in found.numbers if math.isfinite(x) and x == int(x) and x != size]
    least = max([VOCAB, *(2 * count + 1 for count in counts if count < 2**20)])
    if isinstance(size, int):
        least = min(least, size)
    return least if least >= _LEAST_VOCAB else None


def _at_corners(found: Excerpt, form: Form, vocab: int) -> list[_Probe]:
    """Scores around the numbers of the source, where these have a meaning."""
    if form != "scores":
        return []
    low, high = _CORNERS
    numbers = sorted({abs(x) for x in found.numbers if low < abs(x) < high}, reverse=True)[:_MOST_CORNERS]
    probes = (_Probe.of(found, form, vocab, 1.0, shift=sign * x) for x in numbers for sign in (1, -1))
    return [probe for probe in probes if probe is not None and not probe.result.isnan().any()]


def _of_more_rows(found: Excerpt, form: Form, vocab: int) -> Iterator[_Probe]:
    """So many rows, of each axis, that whatever number of the source counts rows has its meaning.

    Raises:
        RefusedError: they are too many.
    """
    counts = [int(x) for x in found.row_numbers if 2 <= abs(x) < 2**20]
    least = 2 * max(map(abs, counts), default=0) + 1
    sizes = sizes_for(found.entry, vocab)
    for axis in found.entry.rows:
        extent = least if not isinstance(axis.size, int) else min(least, axis.size)
        if extent <= sizes[axis]:
            continue
        if extent * math.prod(sizes.values()) // sizes[axis] > _MOST_SCORES:
            raise RefusedError(
                "ROWS_UNKNOWN",
                f"{max(counts)} may be the number of a row: it is not seen whether all rows are filtered alike",
                "split rows that are treated differently before, and join them afterwards",
            )
        probe = _Probe.of(found, form, vocab, 1.0, rows={axis.size: extent})
        if probe is not None:
            yield probe


# ---- looking at what it does -----------------------------------------------------------------------------------------


@dataclass
class _Probe:
    """One run of an excerpt: log-probabilities or scores ``z``, the values of its leaves, what it gave."""

    found: Excerpt
    form: Form
    z: torch.Tensor
    given: torch.Tensor
    values: Mapping[fx.Node, Any]
    result: torch.Tensor
    sizes: Mapping[Any, int]

    @classmethod
    def of(
        cls,
        found: Excerpt,
        form: Form,
        vocab: int,
        scale: float,
        *,
        shift: float = 0.0,
        steps: int = 0,
        rows: Mapping[Size, int] | None = None,
    ) -> _Probe | None:
        """Run it; None where it raises, as what is no filter may at other sizes. ``steps``: so many different scores."""
        sizes = sizes_for(found.entry, vocab)
        sizes |= {axis: rows[axis.size] for axis in found.entry.rows if rows is not None and axis.size in rows}
        extents = shape(found.entry.dims, sizes)
        place = _place(found)
        z = (
            torch.randint(0, steps, extents).double() * 0.7
            if steps
            else torch.randn(extents, dtype=torch.float64) * scale
        )
        values = random_leaves(found, sizes, vocab)
        if form == "scores":
            z = z + shift
            if scale == 3.0:  # as if something had been masked before
                z = z.masked_fill(torch.rand(extents) < 0.3, -math.inf)
        else:
            z = torch.log_softmax(z, place)
            if form == "parts":
                z = torch.where((torch.rand(extents) < 0.4) & (z < z.amax(place, keepdim=True)), -math.inf, z)
        given = z if form == "scores" else z.exp()
        try:
            result = found.run(given, values, sizes)
        except Exception:  # noqa: BLE001 whatever runs into its limits at other sizes is no filter that is known
            return None
        if result.shape != given.shape:
            return None
        return cls(found, form, z, given, values, result, sizes)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[N, V]``."""
        return tensor.movedim(_place(self.found), -1).reshape(-1, tensor.shape[_place(self.found)])

    def outcome(self) -> Limits | None:
        """What became of the scores, without the limits; None where it is no filter."""
        given, result, z = self.rows(self.given), self.rows(self.result), self.rows(self.z)
        if result.isnan().any():
            return None
        changed = result != given
        if self.form == "scores":
            fills = result[changed].unique()
            if len(fills) == 1 and float(fills[0]) <= _FILL and not changed.all():
                return Limits("scores", fill=float(fills[0]))
            if len(fills) == 0:
                return None
        kept = result > 0
        if not kept.any(-1).all() or (result < 0).any():
            return None
        if _near(result, torch.softmax(z.masked_fill(~kept, -math.inf), -1)):
            return Limits("probs")
        return Limits("parts") if _near(result, torch.softmax(z, -1) * kept) and not kept.all() else None

    def kept(self, outcome: Limits) -> torch.Tensor:
        """Which tokens are left, ``[N, V]``."""
        result = self.rows(self.result)
        left = result == self.rows(self.given) if outcome.result == "scores" else result > 0
        return left & (self.rows(self.z) > -math.inf)

    def fits(self, limits: Limits) -> bool:
        """Whether the limits keep the same tokens here."""
        expected = self._expected(limits)
        return expected is not None and bool((expected == self.kept(limits)).all())

    def fits_but_for_ties(self, limits: Limits) -> bool:
        """Whether the limits keep equal scores, and as many of them."""
        expected = self._expected(limits)
        if expected is None:
            return False
        z = self.rows(self.z)
        ours, theirs = (z.masked_fill(~kept, -math.inf).sort(-1).values for kept in (expected, self.kept(limits)))
        return bool((ours == theirs).all())

    def _expected(self, limits: Limits) -> torch.Tensor | None:
        """What the limits keep, ``[N, V]``; None where they are none."""
        z = self.rows(self.z)
        vocab = z.shape[-1]
        operands: dict[str, Any] = {"logits": z}
        for name, limit in limits.named.items():
            value = limit.value(self.values, vocab)
            operands[name] = self.by_row(limit, value, len(z)).to(torch.int64 if name == "top_k" else torch.float64)
        if limits.top_k is not None and not (operands["top_k"] >= 1).all():
            return None
        for name in ("top_p", "min_p"):
            if name in operands and not ((operands[name] > 0) & (operands[name] <= 1)).all():
                return None
        attrs = replace(
            SamplingAttrs.of(operands, "scores", torch.float64),
            top_k_ties=limits.top_k_ties,
            top_p_ties=limits.top_p_ties,
        )
        return reference(**operands, attrs=attrs) > -math.inf

    def by_row(self, limit: Limit, value: Any, rows: int) -> torch.Tensor:
        """A limit for each row ``[N]``."""
        if not isinstance(value, torch.Tensor):
            return torch.full((rows,), value, dtype=torch.float64)
        assert limit.leaf is not None, "a tensor comes from a leaf"
        entry = self.found.entry
        own = axes_of(self.found.leaves[limit.leaf])
        flat = value.reshape([self.sizes[axis] if axis in own else 1 for axis in entry.rows])
        return flat.expand([self.sizes[axis] for axis in entry.rows]).reshape(-1)


@dataclass(frozen=True)
class _Order:
    """The rows of a probe, the likeliest tokens first: what limits keep of them is a number then.

    ``shares`` are probabilities in that order and ``sums`` their sums ``[N, V]``, ``count`` how many are kept ``[N]``.
    """

    probe: _Probe
    shares: torch.Tensor
    sums: torch.Tensor
    count: torch.Tensor
    is_kept_first: bool

    @classmethod
    def of(cls, probe: _Probe, outcome: Limits) -> _Order:
        """The order of a probe of which all scores are different."""
        kept, z = probe.kept(outcome), probe.rows(probe.z)
        least = z.masked_fill(~kept, math.inf).amin(-1)
        most = z.masked_fill(kept, -math.inf).amax(-1)
        shares = torch.softmax(z, -1).sort(-1, descending=True).values
        return cls(probe, shares, shares.cumsum(-1), kept.sum(-1), bool((least >= most).all()))

    @property
    def keeps_all(self) -> bool:
        """Whether nothing was dropped."""
        return bool((self.count == self.shares.shape[-1]).all())

    def may_fit(self, limits: Limits) -> bool:
        """Whether limits keep as many tokens of every row; of none, what was dropped before says nothing."""
        if not limits.named:
            return True
        rows, vocab = self.shares.shape
        value = {
            name: self.probe.by_row(limit, limit.value(self.probe.values, vocab), rows)
            for name, limit in limits.named.items()
        }
        count = value["top_k"].long().clamp(1, vocab) if "top_k" in value else torch.full((rows,), vocab)
        total = self.sums.gather(-1, count[:, None] - 1)
        if "top_p" in value:
            reached = (self.sums < value["top_p"][:, None] * total).sum(-1) + 1
            count = torch.minimum(count, reached)
        if "min_p" in value:
            likely = (self.shares >= value["min_p"][:, None] * self.shares[:, :1]).sum(-1)
            count = torch.minimum(count, likely)
        return bool((count == self.count).all())


def _place(found: Excerpt) -> int:
    return next(at for at, dim in enumerate(found.entry.dims) if found.entry.vocab in dim)


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs() <= _NEAR).all())


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
    for share in sorted({each for x in numbers for each in (x, 1 - x) if 0 < each < 1}):
        yield Limit(share)
    for leaf in found.leaves:
        tensor = tensor_of(leaf)
        if tensor is None or tensor.is_floating_point():
            yield from (Limit(0, leaf), Limit(1, leaf, -1))


def _with_ties(found: Excerpt, form: Form, vocab: int, fits: Limits) -> Limits:
    """The limits with what becomes of equal scores.

    Raises:
        RefusedError: equal scores are treated in a way that the op does not have.
    """
    names = [name for name in ("top_k", "top_p") if name in fits.named]
    if not names:
        return fits
    probes = [_Probe.of(found, form, vocab, 1.0, steps=steps) for steps in (6, 12, 25, 3)]
    tied = [probe for probe in probes if probe is not None]
    for choice in itertools.product(_TIES, repeat=len(names)):
        chosen: dict[str, Any] = {f"{name}_ties": ties for name, ties in zip(names, choice, strict=True)}
        tried = replace(fits, **chosen)
        if tied and all(probe.fits(tried) for probe in tied):
            return tried
    some = replace(fits, top_k_ties="first", top_p_ties="first", is_any=True)
    free: tuple[dict[str, Any], ...] = ({}, {"top_k_ties": "all"}, {"top_p_ties": "all"}) if _picks_any(found) else ()
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


def _check_unlike(order: _Order, vocab: int) -> None:
    """Refuse what keeps the likeliest tokens by another rule.

    Raises:
        RefusedError: it does.
    """
    if order.keeps_all or vocab < _LEAST_MISSED:
        return
    raise RefusedError(
        "LIMIT_UNKNOWN",
        "it keeps the likeliest tokens, but by none of the limits top-k, top-p and min-p",
        "keep the k likeliest, the fewest that reach p together, or those at least m times as likely as the first",
    )
