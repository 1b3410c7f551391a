"""A soft cap's tanh as a quotient of polynomials, which CPUs take in a fraction of the time of their libraries' own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: ``tanh(x) / x`` is a quotient of 1 and these times the powers of ``x ** 2``, to 2.2e-8 of itself up to the bound (a minimax
#: fit of its own); beyond, tanh rounds to one. Rounded in float32 it is within 6 units in the last place, 1 on average.
_OVER = (0.1338269, 0.00349746054, 2.06358544e-05, 1.33843071e-08)
_UNDER = (0.467160113, 0.0258843728, 0.000328852138, 7.79026174e-07)
_BOUND = 9.02


def tanh(x: torch.Tensor) -> torch.Tensor:
    """``tanh(x)``, to 4e-7 of itself; in float64 PyTorch's own."""
    if x.dtype == torch.float64:
        return torch.tanh(x)
    x = x.clamp(-_BOUND, _BOUND)
    square = x * x
    return (x * _polynomial(_OVER, square) / _polynomial(_UNDER, square)).clamp(-1.0, 1.0)


def _polynomial(factors: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    found = x * factors[-1] + factors[-2]
    for factor in (*factors[-3::-1], 1.0):
        found = found * x + factor
    return found


def _spelled(factors: Sequence[float]) -> str:
    """The same in C++, of ``square``."""
    found = f"filled({factors[-1]!r}f)"
    for factor in (*factors[-2::-1], 1.0):
        found = f"({found} * square + {factor!r}f)"
    return found


#: The same in C++, of a register of floats (``cpp/floats.py``).
TANGENT = f"""
INLINE Floats limited(Floats x, float bound) {{
  x = x > bound ? filled(bound) : x;  // a NaN stays
  return x < -bound ? filled(-bound) : x;
}}
INLINE Floats tangent(Floats x) {{
  x = limited(x, {_BOUND}f);
  const Floats square = x * x;
  return limited(x * {_spelled(_OVER)} / {_spelled(_UNDER)}, 1.0f);
}}
"""
