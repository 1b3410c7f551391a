"""Gated MLPs (SwiGLU, GEGLU, ReGLU, GLU and the like) and activations of projections, in all of their spellings.

The anchor is the last operation of a pointwise function of one or two projections: the product of the activated gate and the
other row, or the activation itself. The projections before and after it are not part of the op. What becomes superfluous,
whoever asks for matches asks of what was found (:mod:`matching`).

Which function it is, ``activation(gate + a) * (up + b)``, its values say. ``x * sigmoid(x)``, ``x / (1 + exp(-x))`` and
``F.silu(x)`` have the same values at every point, so they are one function; no list of spellings is kept. The slope in one
row, at all points of the other, names the activation and tells which of the rows is the gate; whatever is added to either
follows from a few more values. The form that is found must then agree with the expression at points where all of its symbols
differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.mlp import ACTIVATIONS, MlpAttrs, Operands, compute
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, axes_of, fresh
from lz_compile.passes.formula.pointwise import AT_LEAST, AT_MOST, evaluate, is_moved, tensor
from lz_compile.passes.formula.projections import Supports
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor

#: Activations that are MLPs by themselves, without a second factor; others are gates, or routers.
PLAIN = frozenset({"silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "mish"})
_LOW, _HIGH = 0.25, 0.75
#: Values differ where they differ by more than this, relative to their size: constants in sources have few digits.
TOLERANCE = 1e-6
_REACH = 12.0
#: Of this, activations that vanish are exactly zero, however they are computed.
_VANISHED = -1e4


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


@dataclass(frozen=True)
class Activation:
    """An activation of ``leaves``, which are of ``region``, by the names of the op's operands; ``output`` has the result.

    ``hidden`` are the axes of its columns: those of the biases, of the last dimension where there are none.
    """

    region: Region
    form: Form
    leaves: Mapping[str, Leaf]
    hidden: tuple[Axis, ...]
    output: fx.Node
    output_dims: Dims


def recognise(effects: Effects, supports: Supports, anchor: fx.Node) -> Activation:
    """The activation that ends in ``anchor``.

    Raises:
        RefusedError: it is none, with the reason.
        MutatedError: an alias of a value was overwritten before it is read.
        LayoutError: a layout has no exact form in axes.
    """
    dims = fresh(shape_of(known_tensor(anchor)))
    region, form = _read(effects, anchor, dims, _Stops(supports))
    for cut in _cuts(region, supports) if form is None else ():
        region, form = _read(effects, anchor, dims, _Stops(supports, cut))
        if form is not None:
            break
    if form is None:
        raise RefusedError("NO_MLP", "the activation is none that is known", "use silu, gelu or relu")
    symbols = {"gate": form.gate, "up": form.up, "gate_bias": form.gate_bias, "up_bias": form.up_bias}
    leaves = {name: region.leaves[symbol] for name, symbol in symbols.items() if symbol is not None}
    gate, biases = leaves["gate"].dims, {leaf.axes for name, leaf in leaves.items() if name.endswith("bias")}
    columns = next(iter(biases), frozenset(axes_of(gate[-1:])))
    if len(biases) > 1 or (biases and not set() < columns < {*axes_of(gate)}):
        raise RefusedError("BIAS_NOT_A_ROW", "a bias is not one number per column", "add it to the projection")
    hidden = tuple(axis for axis in axes_of(gate) if axis in columns)
    return Activation(region, form, leaves, hidden, anchor, dims)


@dataclass(frozen=True)
class _Stops:
    """Where reading stops: at rows, and at values that are rows for this reading."""

    supports: Supports
    further: frozenset[fx.Node] = frozenset()

    def __contains__(self, node: object) -> bool:
        return node in self.supports or node in self.further


def _read(effects: Effects, anchor: fx.Node, dims: Dims, stops: _Stops) -> tuple[Region, Form | None]:
    """What was read, and the form that it has if its rows are as large as the result."""
    region = Region(effects, expand_masks=True, stops=stops, functions=stops.supports.functions)
    expression = region.express(anchor, dims)
    symbols = region.leaves_in(expression)
    rows = [symbol for symbol, leaf in symbols.items() if leaf.node in stops]
    weights = [symbol for symbol in symbols if symbol not in rows]
    span = set(axes_of(dims))
    if not 1 <= len(rows) <= 2 or any(region.leaves[symbol].axes != span for symbol in rows):
        return region, None
    return region, _form(expression, rows, weights)


def _cuts(region: Region, supports: Supports) -> Iterator[frozenset[fx.Node]]:
    """What the rows become without bending, where only that is used; the last such values first."""
    chains = []
    for row in {leaf.node for leaf in region.leaves.values()}:
        chain = [row]
        while (following := _only_user(chain[-1], region, supports)) is not None:
            chain.append(following)
        if len(chain) > 1:
            chains.append(chain[1:])
    for length in range(max(map(len, chains), default=0), 0, -1):
        yield frozenset(chain[:length][-1] for chain in chains)


def _only_user(node: fx.Node, region: Region, supports: Supports) -> fx.Node | None:
    """The one operation that uses a value, if that is no more than a function of one row that does not bend."""
    users = [user for user in node.users if user in region.interior]
    for user in users:
        if is_moved(region.effects.calls[user]):
            users += [each for each in user.users if each in region.interior]
    users = [user for user in users if not is_moved(region.effects.calls[user])]
    if len(users) != 1:
        return None
    support = supports.of(users[0])
    return users[0] if len(support.rows) == 1 and not support.is_bent else None


# ---- which function ---------------------------------------------------------------------------------------------------


def _form(expression: sympy.Expr, rows: Sequence[sympy.Symbol], weights: Sequence[sympy.Symbol]) -> Form | None:
    """The form of an expression in ``rows`` (one or two) and ``weights``; None where it has none."""
    try:
        samples = _samples(rows, weights)
        values = evaluate(expression, samples)
        for found in _candidates(expression, rows, weights):
            for complete in _with_biases(found, weights):
                far = torch.stack([abs(each) for each in samples.values()]).amax(0)
                if agree(values, _values(complete, samples), far) and _vanishes(expression, complete, weights):
                    return complete
    except LookupError:
        pass
    return None


def _vanishes(expression: sympy.Expr, form: Form, weights: Sequence[sympy.Symbol]) -> bool:
    """Whether an expression is zero where its form is: ``clamp(min=1e-9)`` is no relu to a logarithm.

    Beside a gate that is far, what float32 has no normal number for is zero: exponents are held to where they overflow.
    """
    gate, up = torch.tensor([[0.0, _VANISHED, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64, device="cpu")
    rows = {form.gate: gate} if form.up is None else {form.gate: gate, form.up: up}
    samples = {**rows, **dict.fromkeys(weights, torch.zeros_like(gate))}
    expected, values = _values(form, samples), tensor(evaluate(expression, samples)).expand(gate.shape)
    nearly = gate.abs() * torch.finfo(torch.float32).tiny
    return not ((expected == 0) & values.isfinite() & (values.abs() > nearly)).any()


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
        found.append(replace(form, gate_bias=own.get(True), up_bias=own.get(False)))
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
    bends = [sign * 10.0**power for sign in (-1, 1) for power in (-5.5, -4, -3, -2, -1)]
    far = [sign * size for sign in (-1, 1) for size in (31.0, 257.0, 3e3, 7e4, 1e6, 1e9, 1e12, 1e15, 1e18)]
    return torch.cat([near, torch.tensor([*bends, *far], dtype=torch.float64, device="cpu")])


@lru_cache(maxsize=64)
def _table(limit: float) -> torch.Tensor:
    """The values of every activation, a row each, of arguments that are held to ``limit``."""
    return torch.stack([function(points().clamp(max=limit)) for function in ACTIVATIONS.values()])


def agree(first: Any, second: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Whether values are those of each row. A value that overflows on its way may be anything, where its point is far."""
    first = tensor(first).expand(second.shape)
    near = (first - second).abs() <= TOLERANCE * (1 + second.abs())
    near |= ~first.isfinite() & (where.abs() > _REACH)
    found: torch.Tensor = near.all(-1)
    return found


def name_of_values(values: Any, limits: Iterable[float] = ()) -> tuple[str, float | None] | None:
    """The activation that has these values at :func:`points`, and the one of ``limits`` that its argument is held to."""
    for limit in (math.inf, *limits):
        equal = agree(values, _table(limit), points()).tolist()
        if any(equal):
            return list(ACTIVATIONS)[equal.index(True)], None if limit == math.inf else limit
    return None
