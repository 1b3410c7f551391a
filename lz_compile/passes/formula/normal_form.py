"""An expression in a row and its moments as a normalisation: ``gain * (row - mean) / sqrt(variance + eps) + shift``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import sympy

from lz_compile.passes.formula.expressions import tidy
from lz_compile.passes.formula.moments import MEAN, MEAN_SQUARE, ROW, halves
from lz_compile.passes.formula.pointwise import AT_LEAST

#: Where ``eps`` stands, by the words of the op: mypy holds the two alike.
EpsAt: TypeAlias = Literal["inside", "outside", "floor"]

_VARIANCE = sympy.Symbol("variance", positive=True)
_ROOT = sympy.Symbol("root", positive=True)
_HALF = sympy.Rational(1, 2)
_RESIDUE, _ROUNDING = 1e-9, 1e-13


@dataclass(frozen=True)
class NormalForm:
    """``gain * (row - mean if is_centred) / root(variance, eps) + shift``; see ``EpsAt`` for the root."""

    is_centred: bool
    eps: float
    eps_at: EpsAt
    gain: sympy.Expr
    shift: sympy.Expr


@dataclass(frozen=True)
class _Root:
    """``coefficient / root(variance, eps)``."""

    coefficient: sympy.Expr
    eps: float
    eps_at: EpsAt


@lru_cache(maxsize=256)
def normal_form(expression: sympy.Expr) -> NormalForm | None:
    """The normalisation that an expression is, None where it is none. Equal layers give equal expressions."""
    if not expression.has(ROW) or not expression.has(MEAN_SQUARE):
        return None
    slope = sympy.diff(expression, ROW)
    if slope.has(ROW):
        return None
    for is_centred in (True, False) if expression.has(MEAN) else (False,):
        found = _read(expression, slope, is_centred)
        if found is not None:
            return found
    return None


def _read(expression: sympy.Expr, slope: sympy.Expr, is_centred: bool) -> NormalForm | None:
    square = _VARIANCE + MEAN**2 if is_centred else _VARIANCE
    slope = _plain(slope, square)
    if slope.has(MEAN) or slope.has(MEAN_SQUARE):
        return None
    factors = sympy.Mul.make_args(sympy.factor_terms(slope))
    root = _root(sympy.Mul(*(factor for factor in factors if factor.has(_VARIANCE))))
    if root is None:
        return None
    gain = sympy.Mul(root.coefficient, *(factor for factor in factors if not factor.has(_VARIANCE)))
    centre = ROW - MEAN if is_centred else ROW
    shift = _without_residue(sympy.expand(_plain(expression, square) - slope * centre))
    if shift.has(ROW) or shift.has(MEAN) or shift.has(_VARIANCE):
        return None
    return NormalForm(is_centred, root.eps, root.eps_at, _whole(gain), _whole(shift))


def _plain(expression: sympy.Expr, square: sympy.Expr) -> sympy.Expr:
    """The expression in the variance, every sum under a root expanded, so that the mean disappears from it."""
    replaced = expression.xreplace({MEAN_SQUARE: square})
    powers = {
        power: sympy.Pow(sympy.expand(power.base), power.exp)
        for power in replaced.atoms(sympy.Pow)
        if power.base.is_Add and not power.exp.is_Integer
    }
    floors = {each: AT_LEAST(*(sympy.expand(part) for part in each.args)) for each in replaced.atoms(AT_LEAST)}
    result = replaced.xreplace(powers).xreplace(floors)
    return halves(result)


def _whole(expression: sympy.Expr) -> sympy.Expr:
    """The expression with its factor as one number, and floats that are whole but for rounding as whole numbers."""
    factor, rest = expression.as_independent(*expression.free_symbols, as_Add=False)
    if factor.has(sympy.Float):
        expression = sympy.Float(float(factor)) * rest
    near = {
        x: sympy.Integer(round(x)) for x in expression.atoms(sympy.Float) if round(x) and abs(x - round(x)) < _ROUNDING
    }
    return tidy(expression.xreplace(near)) if near else expression


def _without_residue(expression: sympy.Expr) -> sympy.Expr:
    """The expression without terms of the row that floating-point arithmetic left over."""
    terms = sympy.Add.make_args(expression)
    return sympy.Add(*(term for term in terms if not (term.has(ROW, MEAN) and abs(term.as_coeff_Mul()[0]) < _RESIDUE)))


def _root(factor: sympy.Expr) -> _Root | None:
    """``coefficient / root(variance, eps)``, whatever the root's own coefficient."""
    if not factor.is_Pow:
        return _several(factor)
    base, exponent = factor.base, factor.exp
    if base.func == AT_LEAST and not (base.args[1].is_number and base.args[1] >= 0):
        return None
    if exponent == -_HALF:
        if base.func == AT_LEAST:  # the root of what is at least c is at least the root of c
            inner, floor = base.args
            return _floored(_affine(inner), float(floor) ** 0.5, 0.5)
        parts = _affine(base)
        if parts is None or parts[1] < 0:
            return None
        coefficient, eps = parts
        return _Root(coefficient**-_HALF, _divided(eps, coefficient), "inside")
    if exponent != -1:
        return None
    if base.func == AT_LEAST:
        inner, floor = base.args
        return _floored(_affine_in_root(inner), float(floor), 1.0)
    parts = _affine_in_root(base)
    if parts is None or parts[1] < 0:
        return None
    coefficient, eps = parts
    return _Root(1 / coefficient, _divided(eps, coefficient), "outside" if eps else "inside")


def _affine_in_root(expression: sympy.Expr) -> tuple[sympy.Expr, float] | None:
    """The same of the root of the variance, where the variance stands under roots only."""
    in_roots = expression.xreplace({sympy.sqrt(_VARIANCE): _ROOT})
    return None if in_roots.has(_VARIANCE) else _affine(in_roots.xreplace({_ROOT: _VARIANCE}))


def _several(factor: sympy.Expr) -> _Root | None:
    """A product of numbers and one root."""
    numbers = [each for each in sympy.Mul.make_args(factor) if each.is_number]
    rest = [each for each in sympy.Mul.make_args(factor) if not each.is_number]
    if len(rest) != 1 or not numbers:
        return None
    found = _root(rest[0])
    return None if found is None else _Root(sympy.Mul(found.coefficient, *numbers), found.eps, found.eps_at)


def _floored(parts: tuple[sympy.Expr, float] | None, floor: float, power: float) -> _Root | None:
    if parts is None or parts[1] != 0 or floor < 0 or not parts[0].is_number:
        return None
    scale = parts[0] ** sympy.Rational(1, 2) if power == 0.5 else parts[0]
    return _Root(1 / scale, floor / float(scale), "floor")


def _affine(expression: sympy.Expr) -> tuple[sympy.Expr, float] | None:
    """``(coefficient, constant)`` of an expression that is affine in the variance; positive, and a number."""
    expression = sympy.expand(expression)
    coefficient = sympy.diff(expression, _VARIANCE)
    constant = sympy.expand(expression - coefficient * _VARIANCE)
    is_known = coefficient.is_number or constant == 0  # a symbolic size may be a factor, not part of epsilon
    if not is_known or not constant.is_number or not coefficient.is_positive:
        return None
    return coefficient, float(constant)


def _divided(eps: float, coefficient: sympy.Expr) -> float:
    return eps / float(coefficient) if eps else 0.0
