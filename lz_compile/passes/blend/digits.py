"""Weights as the products that they are: multiplied out, a small one is a difference of numbers near one, with few digits.

A large host is weighed by ``(1 - a) * (1 - b)`` where two blends follow each other, and by ``0.7 * (1 - b)`` where one of
their weights is a number. Both are one less the seed's weight, but as products they keep all digits.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from lz_compile.passes.blend.gate import as_fractions
from lz_compile.passes.blend.recogniser import Blend, Weights


def with_all_digits(blend: Blend) -> Weights:
    """The weights of a blend, the host's told beside the seed's where it is a product."""
    weights = blend.weights
    if weights.gate is not None:
        return weights
    rest = 1 - weights.seed if weights.host is None else weights.host
    host = as_product(rest)
    is_told = weights.host is not None or not (blend.form.is_residual or blend.form.is_soft or host is rest)
    return replace(weights, seed=as_product(weights.seed), host=host if is_told else None)


def as_product(expression: sympy.Expr) -> sympy.Expr:
    """A sum as a product of sums, or of a number and a sum of units; the same where it is none, or loses a tensor by that."""
    if not expression.is_Add:
        return expression
    found = sympy.factor(as_fractions(expression))
    number, rest = found.as_coeff_Mul()
    is_scaled = rest.is_Add and abs(number) != 1 and all(abs(each.as_coeff_Mul()[0]) == 1 for each in rest.args)
    is_product = rest.is_Mul or rest.is_Pow or is_scaled
    return found if is_product and found.free_symbols == expression.free_symbols else expression
