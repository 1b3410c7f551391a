"""An expression in one or two rows as an MLP's activation, by its values: ``activation(gate + a) * (up + b)``.

``x * sigmoid(x)``, ``x / (1 + exp(-x))`` and ``F.silu(x)`` have the same values at every point, so they are one function;
no list of spellings is kept. The slope in one row, at all points of the other, names the activation and tells which of the
rows is the gate; whatever is added to either follows from a few more values. The form that is found must then agree with the
expression at points where all of its symbols differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch

from lz_compile.lowering.ops.mlp import ACTIVATIONS, MlpAttrs, Operands, compute
from lz_compile.passes.formula.bends import AT_LEAST, AT_MOST, evaluate, tensor

#: Activations that are MLPs by themselves, without a second factor; others are gates, or routers.
PLAIN = frozenset({"silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "mish"})
_LOW, _HIGH = 0.25, 0.75
#: Values differ where they differ by more than this, relative to their size: constants in sources have few digits.
TOLERANCE = 1e-6
_REACH = 12.0


@dataclass(frozen=True)
class Form:
    """``activation(gate + gate_bias) * (up + up_bias + up_offset)``, both held to ``limit`` where there is one."""

    activation: str
    gate: sympy.Symbol
    up: sympy.Symbol | None = None
    gate_bias: sympy.Symbol | None = None
    up_bias: sympy.Symbol | None = None
    limit: float | None = None
    up_offset: float = 0.0


def read_form(expression: sympy.Expr, rows: Sequence[sympy.Symbol], weights: Sequence[sympy.Symbol]) -> Form | None:
    """The form of an expression in ``rows`` (one or two) and ``weights``; None where it has none."""
    try:
        samples = _samples(rows, weights)
        values = evaluate(expression, samples)
        for found in _candidates(expression, rows, weights):
            for complete in _with_biases(found, weights):
                if agree(
                    values, _values(complete, samples), torch.stack([abs(each) for each in samples.values()]).amax(0)
                ):
                    return complete
    except LookupError:
        pass
    return None


def _candidates(expression: sympy.Expr, rows: Sequence[sympy.Symbol], weights: Sequence[sympy.Symbol]) -> list[Form]:
    """Forms that agree where nothing is added, and what is added is zero."""
    nothing: dict[sympy.Symbol, Any] = dict.fromkeys(weights, 0.0)
    if len(rows) == 1:
        named = name_of_values(evaluate(expression, nothing | {rows[0]: points()}))
        return [Form(named[0], rows[0])] if named is not None and named[0] in PLAIN else []
    found = []
    limits = _limits(expression)
    for gate, up in (rows, rows[::-1]):
        low, high = (evaluate(expression, nothing | {gate: points(), up: at}) for at in (_LOW, _HIGH))
        slope = (high - low) / (_HIGH - _LOW)
        named = name_of_values(slope, limits) if isinstance(slope, torch.Tensor) else None
        if named is not None:
            at = int((points() - 1).abs().argmin())
            offset = float(low[at] / slope[at]) - _LOW
            offset = round(offset, 6) if abs(offset - round(offset, 6)) < 1e-9 else offset
            found.append(Form(named[0], gate, up, limit=named[1], up_offset=offset))
    return found


def _limits(expression: sympy.Expr) -> list[float]:
    """The numbers that anything in the expression is held to."""
    bounds = [argument for each in expression.atoms(AT_LEAST, AT_MOST) for argument in each.args]
    return sorted({abs(float(bound)) for bound in bounds if bound.is_number and bound != 0})


def _with_biases(form: Form, weights: Sequence[sympy.Symbol]) -> list[Form]:
    """The form with every way to add each of the weights to the gate or to the other row."""
    if not weights:
        return [form]
    if len(weights) > 1 + (form.up is not None):
        return []
    places = itertools.permutations((True, False) if form.up is not None else (True,), len(weights))
    found = []
    for place in places:
        own = dict(zip(place, weights, strict=True))
        found.append(
            Form(form.activation, form.gate, form.up, own.get(True), own.get(False), form.limit, form.up_offset)
        )
    return found


def _samples(rows: Sequence[sympy.Symbol], weights: Sequence[sympy.Symbol]) -> Mapping[sympy.Symbol, torch.Tensor]:
    """Values for all symbols, no two alike."""
    count = len(points())
    found = {symbol: points().roll(23 * index) for index, symbol in enumerate(rows)}
    steps = torch.arange(count, dtype=torch.float64, device="cpu")
    return found | {symbol: 2 * torch.sin(steps * (1.3 + index)) for index, symbol in enumerate(weights)}


def _values(form: Form, samples: Mapping[sympy.Symbol, torch.Tensor]) -> torch.Tensor:
    """What the op gives for the form."""
    attrs = MlpAttrs(form.activation, form.up is not None, limit=form.limit, up_offset=form.up_offset)
    given = {name: getattr(form, name) for name in Operands.names}
    x = Operands(**{name: samples[each] for name, each in given.items() if each is not None})
    return compute(x, attrs, torch.float64)


@cache
def points() -> torch.Tensor:
    """Where functions are compared, in float64: dense where activations bend, and far to both sides, where clamps show.

    None of them is zero, where a choice between two equal values is free.
    """
    near = torch.linspace(-_REACH, _REACH, 44, dtype=torch.float64, device="cpu")
    bends = [sign * 10.0**power for sign in (-1, 1) for power in (-3, -2, -1)]
    far = [sign * size for sign in (-1, 1) for size in (31.0, 257.0, 3e3, 7e4)]
    return torch.cat([near, torch.tensor([*bends, *far], dtype=torch.float64, device="cpu")])


@cache
def _table() -> Mapping[str, torch.Tensor]:
    """The values of every activation."""
    return {name: function(points()) for name, function in ACTIVATIONS.items()}


def agree(first: Any, second: torch.Tensor, where: torch.Tensor | None = None) -> bool:
    """Whether values are equal. A value that overflows on its way may be anything, where ``where`` (the point) is far."""
    first = tensor(first).expand(second.shape)
    near = (first - second).abs() <= TOLERANCE * (1 + second.abs())
    if where is not None:
        near |= ~first.isfinite() & (where.abs() > _REACH)
    return bool(near.all())


def name_of_values(values: Any, limits: Iterable[float] = ()) -> tuple[str, float | None] | None:
    """The activation that has these values at :func:`points`, and the one of ``limits`` that its argument is held to."""
    for name, known in _table().items():
        if agree(values, known, points()):
            return name, None
    for limit in limits:
        for name, function in ACTIVATIONS.items():
            if agree(values, function(points().clamp(max=limit)), points()):
                return name, limit
    return None
