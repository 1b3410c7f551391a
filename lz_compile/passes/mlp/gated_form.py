"""An expression in one or two rows as an MLP's activation, by its values: ``activation(gate + a) * (up + b)``.

The slope in one row, at all points of the other, names the activation and tells which of the rows is the gate; whatever is
added to either follows from a few more values. The form that is found must then agree with the expression at points where
all of its symbols differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from lz_compile.lowering.ops.mlp import MlpAttrs, Operands, compute
from lz_compile.passes.formula.activations import AT_LEAST, AT_MOST, agree, evaluate, name_of_values, points

#: Activations that are MLPs by themselves, without a second factor; others are gates, or routers.
PLAIN = frozenset({"silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "mish"})
_LOW, _HIGH = 0.25, 0.75


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
