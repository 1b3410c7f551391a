"""How far two observations of a random program may be apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

#: Relative to the norm of what is expected, by the least exact dtype that a program names.
_TOLERANCES = {"bfloat16": 0.3, "float32": 2e-3, "float": 2e-3, "float64": 1e-6}
#: How many times eager's error from float64 a program in bfloat16 may err, and by what more, relative to the norm.
_TIMES, _ROUNDING = 4.0, 0.05


@dataclass(frozen=True)
class Open:
    """What may differ: what infinities add up to, as that depends on the order of a sum, and what is given for eager's NaN.

    ``nan_gradients``: the latter in gradients alone. ``values``: all of them.
    """

    sums: bool = False
    nan: bool = False
    nan_gradients: bool = False
    values: bool = False

    def in_gradients(self) -> Open:
        """What may differ there, all of which are sums."""
        return replace(self, sums=True, nan=self.nan or self.nan_gradients)


def tolerance_of(text: str) -> float:
    """That of a program which is spelled like this."""
    return next(tolerance for name, tolerance in _TOLERANCES.items() if name in f"{text} float64")


def difference(found: Any, expected: Any, exact: Any, tolerance: float, may_differ: Open) -> str:
    """How two values differ, empty if they do not; ``exact`` is the expected one in float64, where that is known."""
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        is_same = type(found) is type(expected) and found == expected
        return "" if is_same else f"{_short(found)}, eager has {_short(expected)}"
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, eager has {tuple(expected.shape)}"
    if may_differ.values:
        return ""
    one, other = found.double(), expected.double()
    finite = other.isfinite()
    if may_differ.nan:
        one = torch.where(other.isnan(), other, one)
    is_same = torch.equal(one.isfinite(), finite)
    if not may_differ.sums:
        is_same &= torch.equal(one.isnan(), other.isnan()) and torch.equal(one[one.isinf()], other[other.isinf()])
    if not is_same:
        return f"{_short(one)}, eager has {_short(other)}"
    one, other = one[finite], other[finite]
    error, norm = (one - other).norm().item(), other.norm().item()
    allowed = tolerance * max(norm, 1.0)
    truth = exact.double()[finite] if isinstance(exact, torch.Tensor) and exact.shape == expected.shape else None
    if truth is not None and bool(truth.isfinite().all()):
        error, own = (one - truth).norm().item(), (other - truth).norm().item()
        allowed = _TIMES * own + _ROUNDING * max(norm, 1.0)
        if own > truth.norm().item() / 2:  # eager has rounding and little else, of which another order may make more
            allowed *= _TIMES
    return "" if error <= allowed else f"error {error:.3g} of norm {norm:.3g}, allowed {allowed:.3g}"


def _short(value: Any) -> str:
    return str(value.tolist())[:200] if isinstance(value, torch.Tensor) else str(value)
