"""Constant tensors as functions of their index: one number, positions, or two values of which a band of indices decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from lz_compile.passes.formula.piecewise import Piecewise, Value, everywhere, plain, selection
from lz_compile.passes.formula.polynomial import Polynomial, number
from lz_compile.passes.formula.predicates import FALSE, TRUE, Predicate, at_least, both, negation

#: Elements that are compared at a time.
_BLOCK = 2**20


def read(value: torch.Tensor, places: Sequence[Polynomial]) -> Value | None:
    """What a constant holds at an index, exactly; None where no pattern is all of it.

    Args:
        value: on the CPU.
        places: the position in each dimension; where it is one that the tensor has, it is in range.
    """
    if value.is_complex() or not value.numel():
        return None
    value, kept = _varying(value)
    places = [places[dim] for dim in kept]
    if value.dtype == torch.bool:
        found = _region(value, places)
        outside = _region(~value, places) if found is None else None
        return found if outside is None else negation(outside)
    if value.isnan().any() if value.is_floating_point() else False:
        return None
    return _two_values(value, places) or _linear(value, places)


def _varying(value: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The tensor without the dimensions along which it is the same, and those that are left."""
    kept = []
    for dim in reversed(range(value.dim())):
        first = value.select(dim, 0)
        if value.shape[dim] == 1 or bool((value == first.unsqueeze(dim)).all()):
            value = first
        else:
            kept.append(dim)
    return value, kept[::-1]


def _region(value: torch.Tensor, places: Sequence[Polynomial]) -> Predicate | None:
    """Where a boolean tensor is True, if that is everywhere, a range, or a band of two dimensions (or all but that)."""
    if not value.dim():
        return TRUE if value else FALSE
    if value.dim() > 2:
        return None
    if value.dim() == 1:
        return _range(value[None], places[0])
    return _range(value, places[1] - places[0])


def _range(value: torch.Tensor, distance: Polynomial) -> Predicate | None:
    """Where a matrix is True, as a range of the distance of its column from its row; None where that is not one."""
    rows, columns = value.shape
    is_seen, row = value.any(1), torch.arange(rows)
    marks = value.to(torch.uint8)
    least = int((marks.argmax(1) - row)[is_seen].min())
    most = int((columns - 1 - marks.flip(1).argmax(1) - row)[is_seen].max())
    if not _is_band(value, least, most):
        return None
    bounds = []
    if least > 1 - rows:
        bounds.append(at_least(distance - number(least)))
    if most < columns - 1:
        bounds.append(at_least(number(most) - distance))
    return both(*bounds)


def _is_band(value: torch.Tensor, least: int, most: int) -> bool:
    """Whether a matrix is True just where the distance is in a range; a few rows at a time."""
    rows, columns = value.shape
    column, step = torch.arange(columns), max(_BLOCK // columns, 1)
    for start in range(0, rows, step):
        part = value[start : start + step]
        distance = column - torch.arange(start, start + part.shape[0])[:, None]
        if not torch.equal(part, (distance >= least) & (distance <= most)):
            return False
    return True


def _two_values(value: torch.Tensor, places: Sequence[Polynomial]) -> Piecewise | None:
    first = value.flatten()[0]
    is_first = value == first
    others = value[~is_first]
    if not others.numel():
        return everywhere(plain(first.item()))
    if not bool((others == others[0]).all()):
        return None
    found = [(_region(is_first, places), first, others[0]), (_region(~is_first, places), others[0], first)]
    for where, chosen, otherwise in found:
        if where is not None:
            return selection(where, everywhere(plain(chosen.item())), everywhere(plain(otherwise.item())))
    return None


def _linear(value: torch.Tensor, places: Sequence[Polynomial]) -> Piecewise | None:
    """Numbers that grow evenly along every dimension."""
    wide = value.to(torch.float64)
    if not bool(wide.isfinite().all()) or (not value.is_floating_point() and int(value.abs().max()) > 2**53):
        return None
    origin = wide.flatten()[0].item()
    found, expected = number(Fraction(origin)), torch.full_like(wide, origin)
    for dim, place in enumerate(places):
        step = wide.select(dim, 1).flatten()[0].item() - origin
        positions = torch.arange(value.shape[dim], dtype=torch.float64)
        expected = expected + step * positions.reshape([-1 if i == dim else 1 for i in range(value.dim())])
        found = found + place.scaled(Fraction(step)) if step else found
    return everywhere(found) if torch.equal(expected, wide) and math.isfinite(origin) else None
