"""Sizes of tensors, as numbers or as expressions where they are symbols. Nothing here adds a guard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"
Shape: TypeAlias = "tuple[Size, ...]"


def as_size(value: int | torch.SymInt) -> Size:
    """An extent as a plain ``int``, or as the sympy expression behind a ``SymInt`` (adds no guard).

    What a guard says to be a symbol is that symbol: as many numbers as ``torch.arange(1.0, n + 1)`` counts, beside ``n``.
    """
    if isinstance(value, int):
        return value
    expr: sympy.Expr = value.node.expr
    known = expr if expr.is_Symbol else expr.xreplace(_equal(value.node.shape_env))
    return int(known) if known.is_Integer else known


def _equal(shapes: Any) -> Mapping[sympy.Expr, sympy.Expr]:
    """The symbols or numbers that guards of a program say expressions to be; they are read again where there are more.

    Polynomials stay: ``n + m`` beside ``n`` says more than another symbol would.
    """
    guards = () if shapes is None else shapes.guards
    if not guards:
        return {}
    count, known = _KNOWN.get(shapes, (0, {}))
    if count != len(guards):
        equations = [guard.expr for guard in guards if isinstance(guard.expr, sympy.Eq)]
        pairs = [pair for each in equations for pair in permutations(each.args)]
        known = {one: other for one, other in pairs if other.is_Atom and not one.is_polynomial()}
        _KNOWN[shapes] = len(guards), known
    return known


_KNOWN: WeakKeyDictionary[Any, tuple[int, Mapping[sympy.Expr, sympy.Expr]]] = WeakKeyDictionary()


def is_guarded_from_zero(value: torch.SymInt) -> bool:
    """Whether a guard says that a number is not negative, as where a slice begins at a difference of sizes."""
    least = sympy.Ge(value.node.expr, 0)
    return any(least in sympy.And.make_args(guard.expr) for guard in value.node.shape_env.guards)


def shape_of(tensor: torch.Tensor) -> Shape:
    """The shape of a (fake) tensor without guarding on symbolic extents."""
    return tuple(as_size(size) for size in tensor.shape)


def strides_of(tensor: torch.Tensor) -> Shape:
    """The strides of a (fake) tensor, likewise."""
    return tuple(map(as_size, tensor.stride()))


def product(sizes: Iterable[Size]) -> Size:
    """The product of extents; an ``int`` where all of them are."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def is_one(size: Any) -> bool:
    """Whether a size is known to be one, so that the dimension broadcasts; a symbol never stands for one."""
    return isinstance(size, (int, torch.Tensor)) and bool(size == 1)  # a tensor while ``torch.jit.trace`` records it


# ---- symbolic sizes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SymbolicSize:
    """What is known of a symbolic size: the one of the trace (None for one that data decides), the least and the most."""

    hint: int | None = None
    lower: int = 0
    upper: int | None = None


def range_of(size: torch.SymInt) -> SymbolicSize:
    """What is known of a symbolic integer, its declared range (``mark_dynamic(min=, max=)``) and guards included."""
    return _known(size.node.expr, size.node.shape_env)


def symbolic_size(expression: sympy.Expr, tensors: Iterable[torch.Tensor]) -> SymbolicSize:
    """What is known of an expression over the symbols of fake tensors; adds no guard."""
    environments = (getattr(getattr(tensor, "fake_mode", None), "shape_env", None) for tensor in tensors)
    environment = next((each for each in environments if each is not None), None)
    return SymbolicSize() if environment is None else _known(expression, environment)


def _known(expression: sympy.Expr, environment: Any) -> SymbolicSize:
    if hasattr(environment, "guarding_hint_or_throw"):  # since 2.12; the older name warns there
        hint = environment.guarding_hint_or_throw(expression) if environment.has_guarding_hint(expression) else None
    else:
        hint = environment.size_hint(expression, allow_none=True)
    bounds = environment.bound_sympy(expression)
    least = max(_finite(bounds.lower) or 0, 0)
    return SymbolicSize(None if hint is None else int(hint), least, _finite(bounds.upper))


def _finite(bound: Any) -> int | None:
    """A bound as a number, None where it is infinite or stands for that (``sys.maxsize``)."""
    return int(bound) if bound.is_Integer and abs(bound) < 1 << 62 else None
