"""When two results are the same: how far rounding may take them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

#: Absolute and relative slack against the float64 reference, by dtype. On top of it a replacement may err :data:`SLACK`
#: times as much as the original itself does. ARCHITECTURE.md tells users. Integers are equal to those of one of the two.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
}
#: Two correct orders of the same sums differ by a few times what either differs from the truth.
SLACK = 4


class Special(NamedTuple):
    """What infinities and NaN come of.

    Where the original overflows (``may_overflow``: nothing but overflow makes infinities or NaN here), ours may be finite.
    Where it does not, ours is NaN where the original is, even if float64 is not (``keeps_nan``), and the NaN of what
    ``is_poisoned`` stays, unless everything is NaN.
    """

    may_overflow: bool
    keeps_nan: bool
    is_poisoned: bool = False


def elementwise(
    truth: torch.Tensor, given: torch.Tensor, ours: torch.Tensor, tolerance: float, special: Special
) -> tuple[float, float, torch.Tensor]:
    """Largest error of ours and of the original against float64, and where ours is acceptable."""
    may_overflow, keeps_nan, is_poisoned = special
    is_counted = not given.dtype.is_floating_point and not given.is_complex()
    truth, given, ours = truth.double(), given.double(), ours.double()
    source_error = 0.0 if is_counted else _finite_max((given - truth).abs())
    slack = SLACK * source_error + tolerance * (1 + truth.abs())
    near = ((ours - truth).abs() <= slack) | ((ours - given).abs() <= tolerance * (1 + given.abs()))
    if keeps_nan and not may_overflow:
        near &= ~given.isnan()
    same_special = (ours.isnan() & (truth.isnan() | given.isnan())) | (ours == truth) | (ours == given)
    overflowed = ours.isfinite() & ~(truth.isfinite() & given.isfinite()) if may_overflow else torch.zeros_like(near)
    if not (is_poisoned and truth.isnan().all()):
        overflowed &= ~truth.isnan()  # NaN in float64 is no overflow
    return _finite_max((ours - truth).abs()), source_error, near | same_special | overflowed


def _finite_max(error: torch.Tensor) -> float:
    finite = error[error.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def doubled(value: Any) -> Any:
    """A tensor of real numbers in float64, which requires a gradient as it did; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def is_same(before: Any, after: Any) -> bool:
    """Whether two tensors hold the same, NaN included."""
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return bool(((before == after) | ((before != before) & (after != after))).all())  # noqa: PLR0124  NaN differs from itself
