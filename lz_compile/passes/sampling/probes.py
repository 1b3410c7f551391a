"""Runs of an excerpt on random scores, and whether limits keep the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import Size
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, reference
from lz_compile.passes.formula.axes import axes_of
from lz_compile.passes.proof.resize import shape
from lz_compile.passes.proof.running import agree
from lz_compile.passes.sampling.excerpt import Excerpt
from lz_compile.passes.sampling.kept import Form, Limit, Limits
from lz_compile.passes.sampling.tried import Tried, random_leaves, sizes_for

#: At or below this, a score that is filled in has no weight after a softmax.
_FILL = -1e4


@dataclass(frozen=True)
class Trial:
    """An excerpt whose entry has a form, to be run with so many tokens."""

    tried: Tried
    form: Form
    vocab: int

    @property
    def found(self) -> Excerpt:
        """The excerpt."""
        return self.tried.found

    def probe(
        self, scale: float = 1.0, *, shift: float = 0.0, steps: int = 0, rows: Mapping[Size, int] | None = None
    ) -> Probe | None:
        """Run it; None where it raises, as what is no filter may at other sizes.

        ``steps``: so many different scores.
        """
        found, form = self.found, self.form
        sizes = sizes_for(found.entry, self.vocab)
        sizes |= {axis: rows[axis.size] for axis in found.entry.rows if rows is not None and axis.size in rows}
        extents = shape(found.entry.dims, sizes)
        place = _place(found)
        z = (
            torch.randint(0, steps, extents).double() * 0.7
            if steps
            else torch.randn(extents, dtype=torch.float64) * scale
        )
        values = random_leaves(found, sizes, self.vocab)
        if form == "scores":
            z = z + shift
            if scale == 3.0:  # as if something had been masked before
                z = z.masked_fill(torch.rand(extents) < 0.3, -math.inf)
        else:
            z = torch.log_softmax(z, place)
            if form == "parts":
                z = torch.where((torch.rand(extents) < 0.4) & (z < z.amax(place, keepdim=True)), -math.inf, z)
        given = z if form == "scores" else z.exp()
        result = self.tried.run(given, values, sizes)
        if result is None or result.shape != given.shape:
            return None
        return Probe(found, form, z, given, values, result, sizes)


@dataclass(frozen=True)
class Probe:
    """One run of an excerpt: log-probabilities or scores ``z``, the values of its leaves, what it gave."""

    found: Excerpt
    form: Form
    z: torch.Tensor
    given: torch.Tensor
    values: Mapping[fx.Node, Any]
    result: torch.Tensor
    sizes: Mapping[Any, int]

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
        if agree(result, torch.softmax(z.masked_fill(~kept, -math.inf), -1)):
            return Limits("probs")
        return Limits("parts") if agree(result, torch.softmax(z, -1) * kept) and not kept.all() else None

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
        return reference(Operands(**operands), attrs) > -math.inf

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
class Order:
    """The rows of a probe, the likeliest tokens first: what limits keep of them is a number then.

    ``shares`` are probabilities in that order and ``sums`` their sums ``[N, V]``, ``count`` how many are kept ``[N]``.
    """

    probe: Probe
    shares: torch.Tensor
    sums: torch.Tensor
    count: torch.Tensor
    is_kept_first: bool

    @classmethod
    def of(cls, probe: Probe, outcome: Limits) -> Order:
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
