"""Masks that compare the cosine of ``a`` with a direction with a threshold, in all of their spellings.

Both sides of the comparison are functions of three numbers: the product of ``a`` and ``v``, and the square of the length of
each. The comparison is that of the cosine with a threshold if it has the same outcome for all of them; at a threshold of
zero the lengths do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.routing import EPS
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, broadcast_from
from lz_compile.passes.formula.pointwise import AT_LEAST, BENDS, Rule, evaluate
from lz_compile.passes.graph.refusal import MutatedError, RefusedError, told
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.routing.products import Products


@dataclass
class Activation:
    """The product of ``source`` and the weight ``down``, whose only axis of the rank is ``rank``.

    ``region`` makes a region to read in. ``interior`` has every node that was read through, ``inputs`` the axes along which
    the source was read.
    """

    source: fx.Node
    down: Leaf
    rank: tuple[Axis, ...]
    region: Callable[[], Products]
    interior: dict[fx.Node, Dims] = field(default_factory=dict)
    readers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[Dims] = field(default_factory=list)

    def is_it(self, node: fx.Node, dims: Dims, axis: Axis) -> bool:
        """Whether a value with axes ``dims``, ``axis`` among them as the rank, is the activation, times a positive number."""
        region = self.region()
        try:
            terms = region.terms(region.express(node, dims)) or []
        except (LayoutError, MutatedError):
            return False
        if len(terms) != 1 or len(terms[0].symbols) != 2 or terms[0].coefficient <= 0 or len(self.rank) != 1:
            return False
        leaves = [region.leaves[symbol] for symbol in terms[0].symbols]
        x, weight = sorted(leaves, key=lambda leaf: leaf.node is not self.source)
        features = x.axes - frozenset(axes_of(dims))
        if x.node is not self.source or weight.node is not self.down.node or weight.axes != features | {axis}:
            return False
        if _places(weight.dims, axis) != _places(self.down.dims, self.rank[0]):
            return False
        self.interior = {**region.interior, **self.interior}
        self.readers = {**region.readers, **self.readers}
        self.inputs.append(x.dims)
        return True


def _places(dims: Dims, axis: Axis) -> list[bool]:
    return [axis in atoms(dim) for dim in dims]


A, V = sympy.symbols("a v", real=True)
DOT = sympy.Symbol("dot", real=True)
LENGTH_A, LENGTH_V = sympy.symbols("aa vv", positive=True)
#: What a sum over the rank makes of products of two elements.
_SUMMED: Mapping[tuple[int, int], sympy.Expr] = {(1, 1): DOT, (2, 0): LENGTH_A, (0, 2): LENGTH_V}
_NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "vector_norm"})
_COMPARED = {"gt": (1, True), "lt": (-1, True), "ge": (1, False), "le": (-1, False)}


@dataclass(frozen=True)
class Cosine:
    """``cos(a, v) > threshold``, with ``v`` as it is read and every node on the way with its axes.

    ``inputs`` are the axes along which the input was read, ``ranks`` the names that the axis of the rank has.
    """

    v: Leaf
    threshold: float
    interior: Mapping[fx.Node, Dims]
    readers: Mapping[fx.Node, fx.Node]
    inputs: list[Dims]
    ranks: list[Axis]


def cosine_of(
    region: Region, mask: Leaf, activation: Activation, *, is_inverted: bool, depends: Callable[[fx.Node], bool]
) -> Cosine:
    """The cosine and the threshold that a mask compares.

    Args:
        region: that the mask was read in.
        mask: the comparison, with the axes of its dimensions.
        activation: the kept adapter's ``a``.
        is_inverted: gradients stop where it is False.
        depends: whether a value is computed from the layer's input.

    Raises:
        RefusedError: it is another mask.
        LayoutError: a layout has no exact form in axes.
    """
    call = region.effects.calls[mask.node]
    if call is None or call.name not in _COMPARED or not depends(mask.node):
        raise _general(mask, "is no comparison of the layer's own a = Vh x")
    sign, is_strict = _COMPARED[call.name]
    reader = _Reader(region.effects, expand_masks=True, activation=activation, depends=depends)
    try:
        sides = [reader.operand(call, name, mask.dims) for name in ("input", "other")]
    except _OtherError as other:
        raise _general(mask, str(other)) from other
    difference = sign * (sides[0] - sides[1]) * (-1 if is_inverted else 1)
    if is_inverted:
        is_strict = not is_strict
    if reader.v is None or not difference.free_symbols <= {DOT, LENGTH_A, LENGTH_V} or not difference.has(DOT):
        raise _general(mask, "compares something else than a cosine with a direction")
    if not is_strict:
        raise RefusedError(
            "MASK_NOT_STRICT",
            f"the mask {told(mask.node)} holds for a cosine that is the threshold itself, too: of tokens that are zero",
            "stop gradients where the cosine is above the threshold (>), and nowhere else",
        )
    interior = {mask.node: mask.dims, **activation.interior, **reader.interior}
    readers = {**activation.readers, **reader.readers}
    return Cosine(reader.v, _threshold(mask, difference), interior, readers, activation.inputs, reader.ranks)


def _general(mask: Leaf, why: str) -> RefusedError:
    return RefusedError(
        "MASK_GENERAL",
        f"the mask {told(mask.node)} of the kept adapter {why}",
        "mask by torch.cosine_similarity(a, v, dim=-1) > threshold, or leave the mask to the op: arm='act'",
    )


# ---- the comparison as a function of three numbers -------------------------------------------------------------------


#: A length beyond what anything is held to from above; its square is a number in float32.
_FAR = 1e18


def _threshold(mask: Leaf, difference: sympy.Expr) -> float:
    """The cosine at which a difference changes its sign, for all lengths; RefusedError where there is none."""

    def value(cosine: float, length: float, other: float) -> float:
        numbers = {DOT: cosine * length * other, LENGTH_A: length**2, LENGTH_V: other**2}
        return float(
            evaluate(difference, {symbol: torch.tensor(x, dtype=torch.float64) for symbol, x in numbers.items()})
        )

    lengths = [(length, other) for length in (1.0, 0.03, 7.0, 300.0, 1e-5, 1e-7, 1e-9) for other in (0.2, 1.0, 5.0)]
    lengths += [(_FAR, 1.0), (1.0, _FAR), (_FAR, _FAR)]
    zero = all(value(c, *each) * c > 0 for each in lengths for c in (-1.0, -0.3, -1e-3, 1e-3, 0.2, 1.0))
    if zero and not value(0.0, 1.0, 1.0) > 0 and not value(0.0, 0.0, 1.0) > 0:
        return 0.0
    threshold = _root(lambda c: value(c, 1.0, 1.0))
    if threshold is None:
        raise _general(mask, "is no cosine that is compared with a threshold")
    floors = [(max(length, EPS), max(other, EPS)) for length, other in lengths]
    for (length, other), (low, under) in zip(lengths, floors, strict=True):
        for c in (-1.0, -0.5, 0.0, threshold - 1e-4, threshold + 1e-4, 0.5, 1.0):
            true = c * length * other / (low * under)
            if abs(c) <= 1 and (value(c, length, other) > 0) != (true > threshold):
                raise _unlike(mask, threshold, length, other)
    return threshold


def _unlike(mask: Leaf, threshold: float, length: float, other: float) -> RefusedError:
    if length < EPS * 100:
        return RefusedError(
            "COSINE_FLOOR",
            f"the mask {told(mask.node)} treats a of length {length:g} "
            f"otherwise than a cosine with norms of at least {EPS:g}",
            f"torch.cosine_similarity(a, v, dim=-1, eps={EPS:g}), or the threshold zero instead of {threshold:g}",
        )
    return RefusedError(
        "COSINE_NOT_NORMALISED",
        f"the mask {told(mask.node)} depends on the lengths of a and v ({length:g} and {other:g}), not on their cosine alone",
        f"divide by both norms, or compare with zero instead of {threshold:g}",
    )


def _root(function: Callable[[float], float]) -> float | None:
    """Where a function of a cosine changes from negative to positive, as the number that was meant."""
    low, high = -1.0, 1.0
    if not function(low) < 0 < function(high):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return next(
        (meant for meant in (round(high, digits) for digits in range(1, 12)) if abs(meant - high) < 1e-12), high
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


class _OtherError(Exception):
    """What is read is no function of a cosine; the text goes on ``the mask``."""


@dataclass
class _Reader(Region):
    """Reads numbers, and elements of ``a`` and ``v`` along an axis that is about to be summed over."""

    activation: Activation | None = None
    depends: Callable[[fx.Node], bool] = field(default=lambda _node: True)
    v: Leaf | None = None
    ranks: list[Axis] = field(default_factory=list)
    _rank: list[Axis] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.functions = _FUNCTIONS

    def express(self, node: Any, dims: Dims, reader: fx.Node | None = None) -> sympy.Expr:
        """As of every region; ``a`` is a symbol, and so is what gives a direction."""
        if not isinstance(node, fx.Node) or tensor_of(node) is None:
            return super().express(node, dims, reader)
        seen = node if reader is None else self.seen_by(reader, node)
        has_rank = bool(self._rank) and self._rank[-1] in axes_of(dims)
        is_own = has_rank and self.depends(seen) and self.activation is not None
        if is_own and self.activation.is_it(seen, dims, self._rank[-1]):  # type: ignore[union-attr]
            return A
        if self.depends(seen):
            return super().express(node, dims, reader)
        before = self.v
        try:
            return super().express(node, dims, reader)
        except _OtherError:  # a direction that is computed somehow
            self.v = before
            return self._given(seen, dims, has_rank)

    def _given(self, node: fx.Node, dims: Dims, has_rank: bool) -> sympy.Expr:
        if not has_rank or set(axes_of(dims)) != {self._rank[-1]}:
            raise _OtherError(f"reads {told(node)}, which is no direction along the rank")
        if self.v is not None and self.v.node is not node:
            raise _OtherError(f"compares two directions, {told(self.v.node)} and {told(node)}")
        if self.v is None:
            self.v = Leaf(node, dims)
        return V

    def leaf(  # nothing may be left that is not understood
        self, node: fx.Node, dims: Dims, kind: str = "tensor", contraction_: contraction.Contraction | None = None
    ) -> sympy.Symbol:
        """Nothing is a leaf here.

        Raises:
            _OtherError: always.
        """
        raise _OtherError(f"depends on {told(node)}")

    def _express_call(self, call: Call, dims: Dims) -> sympy.Expr:
        rule = _REDUCTIONS.get(call.name)
        if rule is None:
            return super()._express_call(call, dims)
        expression: sympy.Expr = rule(self, call, dims)
        self.interior.setdefault(call.node, dims)
        return expression

    def over(self, axis: Axis, operands: list[tuple[Any, Dims]], reader: fx.Node) -> list[sympy.Expr]:
        """Values along an axis."""
        self._rank.append(axis)
        self.ranks.append(axis)
        try:
            return [self.express(node, dims, reader) for node, dims in operands]
        finally:
            self._rank.pop()

    def total(self, expression: sympy.Expr) -> sympy.Expr:
        """The sum over the rank of a polynomial in elements of ``a`` and ``v``."""
        found = sympy.S.Zero
        for (of_a, of_v), coefficient in sympy.Poly(sympy.expand(expression), A, V).terms():
            if (of_a, of_v) not in _SUMMED or coefficient.has(A, V):
                raise _OtherError("sums something else than products of a and v")
            found += coefficient * _SUMMED[of_a, of_v]
        return found


def _only(axes: tuple[Axis, ...]) -> Axis:
    if len(axes) != 1:
        raise _OtherError("sums over more than the rank" if axes else "has a rank of one")
    return axes[0]


def _element(reader: _Reader, call: Call, dims: Dims) -> sympy.Expr:
    """What a reduction along the rank reduces; a vector has no other dimension to name."""
    tensor = tensor_of(call.input)
    if call.get("dim") is None and tensor is not None and tensor.dim() == 1:
        call = replace(call, arguments={**call.arguments, "dim": 0})
    inner = contraction.reduction_dims(call, dims)
    if inner is None:
        raise _OtherError("reduces everything")
    (element,) = reader.over(_only(inner[1]), [(call.input, inner[0])], call.node)
    return element


def _norm(reader: _Reader, call: Call, dims: Dims) -> sympy.Expr:
    if call.get("p", call.get("ord", 2)) not in (2, 2.0, None, "fro"):
        raise _OtherError("takes another norm than the Euclidean one")
    return sympy.sqrt(reader.total(_element(reader, call, dims) ** 2))


def _product(reader: _Reader, call: Call, dims: Dims) -> sympy.Expr:
    """A product with a vector, whichever call it is."""
    found = contraction.factors(call, dims)
    if found is None or len(found.factors) != 2 or not found.is_plain:
        raise _OtherError(f"depends on {told(call.node)}")
    if found.addend is not None:
        raise _OtherError("adds something to products of a and v")
    left, right = reader.over(_only(found.summed), list(found.factors), call.node)
    return reader.total(left * right)


def _cosine_similarity(reader: _Reader, call: Call, dims: Dims) -> sympy.Expr:
    given, at, floor = [call.input, call.get("other")], call.get("dim", 1), call.get("eps", 1e-8)
    tensors = [tensor_of(each) for each in given]
    if any(tensor is None for tensor in tensors) or not isinstance(at, int):
        raise _OtherError("is no cosine of two tensors")
    shapes = [shape_of(tensor) for tensor in tensors if tensor is not None]
    rank = max(map(len, shapes))
    whole = list(dims)
    size = next(shape[at % rank - rank] for shape in shapes if len(shape) >= rank - at % rank)
    axis = Axis(size)
    whole.insert(at % rank, (axis,))
    operands = [(node, broadcast_from(tuple(whole), shape)) for node, shape in zip(given, shapes, strict=True)]
    one, other = reader.over(axis, operands, call.node)
    lengths = [AT_LEAST(sympy.sqrt(reader.total(each**2)), sympy.Float(floor)) for each in (one, other)]
    return reader.total(one * other) / (lengths[0] * lengths[1])


def _normalize(region: Region, call: Call, dims: Dims) -> sympy.Expr:
    """Elements of a tensor over its length along the rank."""
    assert isinstance(region, _Reader), "only masks are read so"
    tensor, at = tensor_of(call.input), call.get("dim", 1)
    floor, power = call.get("eps", 1e-12), call.get("p", 2.0)
    is_along = tensor is not None and isinstance(at, int) and region._rank and region._rank[-1] in axes_of((dims[at],))
    if not is_along or power != 2:
        raise _OtherError("normalises along something else than the rank")
    element = region.express(call.input, dims, call.node)
    return element / AT_LEAST(sympy.sqrt(region.total(element**2)), sympy.Float(floor))


_REDUCTIONS: Mapping[str, Callable[[_Reader, Call, Dims], sympy.Expr]] = {
    "sum": lambda reader, call, dims: reader.total(_element(reader, call, dims)),
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(contraction.PRODUCTS, _product),
    "cosine_similarity": _cosine_similarity,
}
_FUNCTIONS: Mapping[str, Rule] = {
    "normalize": _normalize,
    **{name: BENDS[name] for name in ("clamp", "clamp_min", "maximum")},
    "detach": lambda region, call, dims: region.operand(call, "input", dims),
}
