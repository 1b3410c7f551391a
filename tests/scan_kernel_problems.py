"""Scans to run kernels on: every structure that a step may have, and how far a kernel is from the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lz_compile.lowering.ops.scan import DROPPED, Operands, ScanAttrs, facts_of, features, reference
from lz_compile.runtime.kernels.kernel import KernelSpec

Scan = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    """A scan of given sizes. ``decay`` and ``drive`` say what these have one number for; ``shares`` broadcasts over the batch.

    ``drops``: some decays drop the state, those of a whole step do, and NaN is written before that.
    """

    decay: str | None = "key"
    erases: bool = False
    drive: str | None = None
    reads: str = "after"
    rank: int = 1
    queries: int | None = 1
    has_state: bool = True
    shares: bool = False
    drops: bool = False
    batch: int = 2
    heads: int = 2
    length: int = 21
    rows: int = 4
    columns: int = 3

    def operands(self, dtype: torch.dtype = torch.float64) -> Operands:
        """Random ones; decays are between -0.2 and 1.1, and some are exactly zero."""
        lead = (self.batch, self.heads)
        steps = (*lead, self.length)
        shared = (1, self.heads, self.length) if self.shares else steps
        found: dict[str, Tensor] = {}
        if self.has_state:
            found["state"] = torch.randn(*lead, self.rows, self.columns)
        if self.decay is not None:
            where = (1, self.heads, 1) if self.decay == "constant" else shared
            found["decay"] = torch.rand(*where, *self._part(self.decay)) * 1.3 - 0.2
            found["decay"].masked_fill_(torch.rand(found["decay"].shape) < 0.1, 0.0)
        if self.rank:
            key = F.normalize(torch.randn(*shared, self.rank, self.rows), dim=-1)
            found["left"] = key * torch.rand(*steps, self.rank, 1)
            found["right"] = torch.randn(*steps, self.rank, self.columns)
            if self.erases:
                found["erase"] = key * (found["decay"][..., 0].unsqueeze(3) if self.decay in ("key", "scalar") else 0.7)
        if self.drive is not None:
            found["drive"] = torch.randn(*steps, *self._part(self.drive))
        if self.queries is not None:
            found["query"] = torch.randn(*steps, self.queries, self.rows)
        if self.drops:
            found["decay"].masked_fill_(torch.rand(found["decay"].shape) < 0.1, DROPPED)[:, :, 3] = DROPPED
            found["right" if self.rank else "drive"][:, :, 1, ..., 0] = torch.nan
        return Operands(**{name: each.to(dtype) for name, each in found.items()})

    def _part(self, kind: str) -> tuple[int, int]:
        return self.rows if kind in ("key", "full") else 1, self.columns if kind in ("value", "full") else 1

    def attrs(self, dtype: torch.dtype = torch.float64) -> ScanAttrs:
        """With results in ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        return ScanAttrs("before" if self.reads == "before" else "after", self.erases, wide, dtype, dtype, self.drops)


PROBLEMS: Mapping[str, Problem] = {
    "kda": Problem(erases=True),
    "kda_shared_keys": Problem(erases=True, shares=True, has_state=False),
    "delta_rule": Problem(decay=None, erases=True),
    "gated_delta_rule": Problem(decay="scalar", erases=True, rows=5, columns=2),
    "two_erasing_updates": Problem(erases=True, rank=2, reads="before"),
    "two_erasing_updates_one_decay": Problem(decay="scalar", erases=True, rank=2, queries=2),
    "erasing_with_a_summand": Problem(erases=True, drive="full", queries=2),
    "erasing_with_a_row_as_summand": Problem(decay="scalar", erases=True, drive="value"),
    "gated_linear_attention": Problem(),
    "gated_linear_attention_of_the_past": Problem(reads="before", shares=True),
    "linear_attention": Problem(decay=None, has_state=False),
    "retention": Problem(decay="constant", rows=3, columns=5),
    "mamba_2": Problem(decay="scalar", queries=1, rank=1, length=40),
    "two_reads": Problem(rank=2, queries=2),
    "one_column": Problem(drive="key", columns=1),
    "dense_summand": Problem(rank=0, drive="full"),
    "no_input": Problem(rank=0),
    "average": Problem(decay="scalar", rank=0, drive="value", queries=None, rows=1),
    "average_before": Problem(decay="constant", rank=0, drive="value", queries=None, rows=1, reads="before"),
    "channels": Problem(decay="value", rank=0, drive="value", queries=None, rows=1, length=33),
    "mamba_1": Problem(decay="full", rank=1, has_state=False),
    "every_element": Problem(decay="full", rank=2, drive="key", queries=2),
    "erasing_under_column_decays": Problem(decay="value", erases=True),
    "erasing_under_element_decays": Problem(decay="full", erases=True, drive="full", reads="before"),
    "dropping": Problem(decay="value", rank=0, drive="value", queries=None, rows=1, drops=True),
    "dropping_what_was_read": Problem(decay="full", drive="full", reads="before", drops=True),
    "dropping_what_is_erased": Problem(erases=True, rank=2, drops=True),
    "one_step": Problem(erases=True, length=1),
    "one_step_before": Problem(length=1, reads="before"),
}


def missing(spec: KernelSpec, problem: Problem) -> list[str]:
    """What a kernel does not declare of a problem."""
    attrs = problem.attrs()
    if spec.operation not in ("scan", f"scan.{attrs.variant}"):
        return [spec.operation]
    needed = features(attrs, facts_of(problem.operands()))
    return [] if "*" in spec.supports else sorted({*needed} - spec.supports)


def with_gradients(scan: Scan, x: Operands, attrs: ScanAttrs) -> dict[str, Tensor]:
    """What :func:`measured` gives for the operands of a scan."""
    return measured(lambda **leaves: scan(Operands(**leaves), attrs), x.given())


def measured(function: Scan, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both results, and the gradients of a sum that weighs their elements differently, by name."""
    leaves = {name: each.detach().requires_grad_() for name, each in given.items()}
    results = function(**leaves)
    weights = (
        torch.linspace(-1, 1, max(each.numel(), 1), dtype=each.dtype, device=each.device)[: each.numel()]
        for each in results
    )
    total = sum((each * weight.view(each.shape)).sum() for each, weight in zip(results, weights, strict=True))
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    named = {f"of_{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {"reads": results[0].detach(), "last": results[1].detach(), **named}


def exactly(x: Operands, attrs: ScanAttrs) -> dict[str, Tensor]:
    """The same by the reference in float64."""
    wide = replace(attrs, compute_dtype=torch.float64, out_dtype=torch.float64, state_dtype=torch.float64)
    return with_gradients(reference, x.map(torch.Tensor.double), wide)


def assert_near(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], tolerance: float) -> None:
    """The error over the largest value of each tensor (at least 1) is small; shapes are equal, and so is where NaN is."""
    assert found.keys() == exact.keys()
    for name, one in found.items():
        other = exact[name]
        assert one.shape == other.shape, name
        if other.numel():
            assert torch.equal(one.isnan(), other.isnan()), name
            known = other.nan_to_num()
            error = (one.double().nan_to_num() - known).abs().max() / known.abs().max().clamp(min=1.0)
            assert error <= tolerance, f"{name}: {error:.2e}"
