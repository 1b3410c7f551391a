"""What a product of leaves is to a routed adapter: the layer itself, a low-rank adapter, or neither.

The axes decide: what depends on tokens and features of the input is the input, what joins these features to the outputs is
a weight, and the axes that neither input nor output has are the rank of an adapter. A factor along the rank alone scales its
axes; one along tokens, too, is a gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from torch import fx

from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, atoms, axes_of
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.routing.products import DETACHED, Products, Term

#: The same for two factors only if both are the same tensor, read along the same axes.
Mark: TypeAlias = tuple[fx.Node, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class Layer:
    """``x`` times a weight."""

    coefficient: float
    x: sympy.Symbol
    weight: sympy.Symbol


@dataclass(frozen=True)
class Adapter:
    """``x`` times ``down``, scaled along the rank, times ``up``: a number times the product of all of these.

    ``scales`` are along the rank (``has_vector``) or have no axes at all, ``gates`` depend on tokens, ``masks`` are boolean.
    ``marks`` are equal for terms of the same tensors; of these, no gradient flows to those in ``detached``.
    """

    coefficient: float
    x: sympy.Symbol
    down: sympy.Symbol
    up: sympy.Symbol
    scales: tuple[sympy.Symbol, ...]
    gates: tuple[sympy.Symbol, ...]
    masks: frozenset[sympy.Symbol]
    has_vector: bool
    marks: tuple[Mark, ...]
    detached: frozenset[Mark]
    is_detached: bool

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Everything but the masks."""
        return (self.x, self.down, self.up, *self.scales, *self.gates)


Role: TypeAlias = "Layer | Adapter"


def role_of(region: Products, term: Term, x: fx.Node, span: frozenset[Axis]) -> Role | None:
    """What a term of a result with axes ``span`` is; None where it is neither."""
    masks = frozenset(symbol for symbol in term.symbols if symbol.is_integer)
    factors = [symbol for symbol in term.symbols if symbol not in masks]
    inputs = [symbol for symbol in factors if region.leaves[symbol].node is x]
    if len(inputs) != 1:
        return None
    own = region.leaves[inputs[0]].axes
    tokens, features, outputs = own & span, own - span, span - own
    others = [symbol for symbol in factors if symbol != inputs[0]]
    if not features or not outputs:
        return None
    axes = {symbol: region.leaves[symbol].axes for symbol in others}
    if len(others) == 1 and not masks and axes[others[0]] == features | outputs:
        return Layer(term.coefficient, inputs[0], others[0])
    rank = frozenset[Axis]().union(*axes.values()) - own - span
    down = [each for each in others if axes[each] == features | rank]
    up = [each for each in others if axes[each] == outputs | rank]
    scales = [each for each in others if axes[each] in (rank, frozenset())]
    gates = [each for each in others if axes[each] & tokens and axes[each] <= tokens | rank]
    is_whole = len(down) == len(up) == 1 and len(scales) + len(gates) + 2 == len(others)
    if not rank or not is_whole:
        return None
    names = {axis: f"rank {index}" for index, axis in enumerate(_within(region.leaves[down[0]], rank))}
    names |= {axis: f"feature {index}" for index, axis in enumerate(_within(region.leaves[inputs[0]], features))}
    marks = {symbol: _mark(region.leaves[symbol], names) for symbol in factors}
    wanting = [symbol for symbol in factors if region.wants_grad(symbol)]
    stopped = [symbol for symbol in wanting if region.leaves[symbol].kind == DETACHED]
    return Adapter(
        term.coefficient,
        inputs[0],
        down[0],
        up[0],
        tuple(scales),
        tuple(gates),
        masks,
        any(axes[each] for each in scales),
        tuple(sorted((marks[symbol] for symbol in factors), key=repr)),
        frozenset(marks[symbol] for symbol in stopped),
        bool(wanting) and len(stopped) == len(wanting),
    )


def _within(leaf: Leaf, axes: frozenset[Axis]) -> list[Axis]:
    return [axis for axis in axes_of(leaf.dims) if axis in axes]


def _mark(leaf: Leaf, names: Mapping[Axis, str]) -> Mark:
    """Axes that are summed over differ between terms, and are told apart by their place."""
    dims = tuple(tuple(names.get(axis, f"axis {id(axis)}") for axis in atoms(dim)) for dim in leaf.dims)
    return leaf.node, dims


# ---- where gradients stop --------------------------------------------------------------------------------------------
# Where gradients of the kept adapter stop: nowhere, or for the tokens of a mask.
# ``where(m, kept.detach(), kept)`` is ``m * stopped + (1 - m) * kept``, and so is every other way to spell it. The value must
# be that of the adapter; only what flows back may depend on the mask.


_NEAR = 1e-9


@dataclass(frozen=True)
class Kept:
    """An adapter, its number, and where gradients stop: where ``mask`` is (not, with ``is_inverted``) set."""

    adapter: Adapter
    coefficient: float
    mask: sympy.Symbol | None = None
    is_inverted: bool = False


def kept_of(adapters: Sequence[Adapter]) -> Kept:
    """The one adapter that terms of the same tensors are.

    Raises:
        RefusedError: they are none, or their gradients are not simply kept or stopped.
    """
    masks = {mask for each in adapters for mask in each.masks}
    if len(masks) > 1 or any(len(each.masks) > 1 for each in adapters):
        raise RefusedError(
            "MASK_GENERAL",
            "the kept adapter is chosen by several masks",
            "detach it where one cosine is above a threshold",
        )
    flowing = [each for each in adapters if not each.is_detached]
    if len({each.detached for each in flowing}) > 1:
        raise RefusedError(
            "PARTLY_DETACHED",
            "some tensors of the kept adapter are detached for some tokens, others are not",
            "detach the adapter's whole result: torch.where(m, kept.detach(), kept)",
        )
    flows = [sum(each.coefficient for each in flowing if bool(each.masks) == masked) for masked in (False, True)]
    values = [sum(each.coefficient for each in adapters if bool(each.masks) == masked) for masked in (False, True)]
    first = (flowing or adapters)[0]
    if abs(values[1]) > _NEAR:
        raise RefusedError(
            "VALUE_MASKED", "the mask changes the value of the kept adapter", "let the mask stop gradients only"
        )
    if not flowing or (_same(flows[0], values[0]) and _same(flows[1], 0)):
        return Kept(first, values[0])
    mask = next(iter(masks), None)
    if mask is not None and _same(flows[0], values[0]) and _same(flows[1], -values[0]):
        return Kept(first, values[0], mask)
    if mask is not None and _same(flows[0], 0) and _same(flows[1], values[0]):
        return Kept(first, values[0], mask, is_inverted=True)
    raise RefusedError(
        "GRADIENT_SCALED",
        f"the kept adapter is {values[0]:g} times its tensors, its gradient {flows[0]:g} times",
        "let gradients flow as they are, or stop them",
    )


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * max(1.0, abs(other))
