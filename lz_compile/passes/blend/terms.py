"""Every value of a graph as a sum of products, as far as it is one: a cheap look before anything is read in axes.

Axes are not looked at: a tensor and its transpose are the same factor here. What looks like a blend is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.passes.blend.bounds import BOUNDING, Affine, Bound, Interval, Limits, Twin, limits_of, product, reach_of
from lz_compile.passes.formula.arithmetic import ARITHMETIC, CHOICES, LOGIC, Arithmetic
from lz_compile.passes.formula.equal_values import numbers
from lz_compile.passes.formula.expressions import constant_value, is_cast, specialised
from lz_compile.passes.formula.pointwise import is_moved
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import EMITTED, Call, is_boolean, is_integer, reached, tensor_of, value_of

#: The factors of a product, in the order of their names, as often as they occur.
Factors: TypeAlias = tuple[fx.Node, ...]

#: The last operation of a blend.
ANCHORS = frozenset({"add", "sub", "rsub", "mul", "div", "neg", "lerp", "addcmul"})
_PRODUCTS = frozenset({"mul", "div", "lerp", "addcmul"})
#: Sums in integers, and what turns a condition into its opposite, or into numbers.
_COUNTED = frozenset({"add", "sub", "rsub", "mul", "neg"})
_LOGIC = frozenset({"not", "eq", "ne"})
_MOST_TERMS, _MOST_FACTORS, _MOST_NODES, _DEEPEST = 8, 5, 32, 16
#: Numbers that differ by less, or in later digits, are equal.
NEAR, _DIGITS = 1e-9, 9


class Terms(dict[Factors, float]):
    """A sum of products: the number before each, none of which is zero."""

    def __add__(self, other: Terms) -> Terms:
        found = dict(self)
        for factors, number in other.items():
            found[factors] = found.get(factors, 0.0) + number
        return Terms({factors: number for factors, number in found.items() if abs(number) > NEAR})

    def __mul__(self, other: Terms | float) -> Terms:
        found: dict[Factors, float] = {}
        for one, number in self.items():
            for two, factor in (other if isinstance(other, Terms) else {(): other}).items():
                key = tuple(sorted((*one, *two), key=lambda node: node.name))
                found[key] = found.get(key, 0.0) + number * factor
        return Terms({factors: number for factors, number in found.items() if abs(number) > NEAR})

    __rmul__ = __mul__

    def __neg__(self) -> Terms:
        return self * -1.0

    def __sub__(self, other: Terms) -> Terms:
        return self + -other

    def __rsub__(self, number: float) -> Terms:
        return Terms({(): number}) - self


@dataclass
class Sums:
    """Sums of products in one graph; values that are computed twice in the same way are one factor."""

    effects: Effects
    _first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _limits: dict[fx.Node, Limits | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number, known = self.effects.numbers or numbers(self.effects), dict[int, fx.Node]()
        self._first = {node: known.setdefault(number[node], node) for node in self.effects.calls}

    def first(self, node: fx.Node) -> fx.Node:
        """The first of the nodes that compute the same."""
        return self._first[node]

    def behind(self, anchor: fx.Node) -> list[fx.Node]:
        """The values that an anchor is a sum of products of, or that these are, the nearest first; not too many."""

        def operands(node: fx.Node) -> Iterator[fx.Node]:
            call = self.effects.calls[node]
            given = node.all_input_nodes if call is not None and self.is_sum(call) else []
            inner = (self.effects.current(each, node) for each in given)
            return (each for each in inner if value_of(each) is not None)

        return [*reached([anchor], operands, _MOST_NODES)][1:]

    def has_product(self, anchor: fx.Node, nodes: Iterable[fx.Node]) -> bool:
        """Whether anything is multiplied or divided on the way, or scaled as it is added."""
        calls = [self.effects.calls[node] for node in (anchor, *nodes)]
        return any(call is not None and (call.name in _PRODUCTS or call.get("alpha", 1) != 1) for call in calls)

    def is_sum(self, call: Call) -> bool:
        """Whether a call adds, multiplies, casts or rearranges."""
        tensor = tensor_of(call.node)
        if tensor is None or EMITTED in call.node.meta or self.is_cut_off(call.node):
            return False
        if call.name == "where":
            return chooses_numbers(call)
        if tensor.dtype == torch.bool:
            return call.name in _LOGIC or (is_cast(call) and is_boolean(call.input))
        if is_integer(tensor):
            return call.name in _COUNTED or is_count(call)
        if call.name in BOUNDING:
            return self.limits(call.node) is not None
        return call.name in _ARITHMETIC or is_moved(call)

    def is_cut_off(self, node: fx.Node) -> bool:
        """Whether a value was made without gradients, and is read where they are recorded: what it is made of gets none."""
        ambient = self.effects.ambient
        return not grad_enabled(ambient(node)) and any(grad_enabled(ambient(user)) for user in node.users)

    def of(self, anchor: fx.Node, cuts: Collection[fx.Node], *, is_lenient: bool = False) -> Terms | None:
        """The terms of an anchor, of which ``cuts`` are factors; None where there are too many.

        With ``is_lenient``, bounds are taken off and integers summed up as if there were no largest one.
        """
        try:
            return self._expanded(anchor, cuts, is_lenient).of(anchor)
        except _TooLargeError:
            return None

    def bounds(self, anchor: fx.Node, cuts: Collection[fx.Node]) -> dict[fx.Node, Bound]:
        """The bounded values that :meth:`of` reads as others."""
        return self._expanded(anchor, cuts).bounds

    def _expanded(self, anchor: fx.Node, cuts: Collection[fx.Node], is_lenient: bool = False) -> _Expansion:
        found = _Expansion(self, frozenset(map(self.first, cuts)), is_lenient)
        if found.of(anchor) and found.bounds:  # by now it is known which one of two is read as the other
            found = replace(found, bounds={}, _found={})
            found.of(anchor)
        return found

    def is_lax(self, nodes: Collection[fx.Node]) -> bool:
        """Whether there is anything that a lenient reading would read in another way."""
        return bool(integers_of(nodes)) or any(self.limits(node) is not None for node in nodes)

    def limits(self, node: fx.Node) -> Limits | None:
        """The bounds of a value, if its call does nothing else."""
        if node not in self._limits:
            call = self.effects.calls.get(node)
            self._limits[node] = None if call is None else limits_of(self.effects, call)
        return self._limits[node]

    def reach(self, terms: Terms) -> Interval:
        """Between which numbers a sum of products surely lies."""
        low = high = 0.0
        for factors, number in terms.items():
            part = (number, number)
            for factor in factors:
                part = product(part, reach_of(self.effects, factor, self.limits(factor)))
            low, high = low + part[0], high + part[1]
        return low, high


class _TooLargeError(Exception):
    """A sum of too many products."""


@dataclass(frozen=True)
class _Nested:
    """Bounds of ``terms``, which are ``inner`` of what is held."""

    limits: Limits
    terms: Terms
    inner: Affine


@dataclass
class _Expansion:
    """The terms of one anchor."""

    sums: Sums
    cuts: frozenset[fx.Node]
    is_lenient: bool = False
    bounds: dict[fx.Node, Bound] = field(default_factory=dict)
    _found: dict[fx.Node, Terms] = field(default_factory=dict)
    _held: dict[Any, tuple[fx.Node, fx.Node, tuple[Affine, Affine]]] = field(default_factory=dict)
    depth: int = 0

    def of(self, node: fx.Node) -> Terms:
        """The terms of a node."""
        if node not in self._found:
            first = self.sums.first(node)
            call = self.sums.effects.calls[node]
            self.depth += 1
            terms = None if first in self.cuts or call is None or self.depth > _DEEPEST else self._read(call)
            self.depth -= 1
            found = self._found[node] = Terms({(first,): 1.0}) if terms is None else terms
            if len(found) > _MOST_TERMS or any(len(factors) > _MOST_FACTORS for factors in found):
                raise _TooLargeError
        return self._found[node]

    def _read(self, call: Call) -> Terms | None:
        """None for what is a factor itself."""
        if tensor_of(call.node) is None:
            return None
        constant = constant_value(call)
        if constant is not None:
            return Terms({(): float(constant)})
        if not self.sums.is_sum(call):
            return None
        rule = RULES.get(call.name)
        terms = self._operand(call, call.input) if rule is None else rule(self, call)
        tensor = tensor_of(call.node)
        is_exact = terms is None or tensor is None or not is_integer(tensor) or self._fits(terms, tensor.dtype)
        return terms if is_exact or self.is_lenient else None

    def _fits(self, terms: Terms, dtype: torch.dtype) -> bool:
        """Whether integers never wrap around: sums of conditions, which are small."""
        low, high = self.sums.reach(terms)
        return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max

    def held(self, call: Call) -> Terms | None:
        """The terms of a bounded value: those of what it holds, or of another bounded value."""
        limits = self.sums.limits(call.node)
        terms = None if limits is None else self._operand(call, limits.held)
        if limits is None or terms is None or self.is_lenient:
            return terms
        reach = self.sums.reach(terms)
        if limits.low <= reach[0] and reach[1] <= limits.high:
            self.bounds[call.node] = Bound(limits.held)
            return terms
        nested = self._nested(limits, terms)
        offset, rest = nested.terms.get((), 0.0), {key: number for key, number in nested.terms.items() if key}
        if not rest:
            return None
        sign = 1 if rest[min(rest, key=str)] > 0 else -1
        ends = [sign * (end - offset) for end in (nested.limits.low, nested.limits.high)][::sign]
        numbers = frozenset((factors, round(sign * number, _DIGITS)) for factors, number in rest.items())
        key = (numbers, *(round(end, _DIGITS) for end in ends))
        outer = Affine(sign, offset)
        own = outer, nested.inner.inverse().after(outer)
        twin, held, theirs = self._held.setdefault(key, (call.node, nested.limits.held, own))
        if theirs[0].offset and not outer.offset:  # 1 - a is rounded, which a is not: from now on a is first
            self._held[key] = (call.node, nested.limits.held, own)
        if twin is call.node:
            return None
        outside, inside = (mine.after(their.inverse()) for mine, their in zip(own, theirs, strict=True))
        self.bounds[call.node] = Bound(nested.limits.held, Twin(twin, held, outside, inside))
        return Terms({(self.sums.first(twin),): float(outside.sign)}) + Terms({(): outside.offset})

    def _nested(self, limits: Limits, terms: Terms) -> _Nested:
        """Bounds within bounds as one."""
        (factors, number), *others = [(key, value) for key, value in terms.items() if key] or [((), 0.0)]
        inner = self.sums.limits(factors[0]) if len(factors) == 1 and not others and abs(number) == 1 else None
        call = self.sums.effects.calls.get(factors[0]) if inner is not None else None
        own = None if inner is None or call is None else self._operand(call, inner.held)
        if inner is None or own is None:
            return _Nested(limits, terms, Affine())
        below = self._nested(inner, own)
        outer = Affine(1 if number > 0 else -1, terms.get((), 0.0))
        ends = sorted(outer(end) for end in (below.limits.low, below.limits.high))
        low, high = (min(max(end, limits.low), limits.high) for end in ends)
        whole = Terms({(): outer.offset}) + below.terms * float(outer.sign)
        return _Nested(Limits(below.limits.held, low, high), whole, outer.after(below.inner))

    def _operand(self, call: Call, value: Any) -> Terms | None:
        value = specialised(value)
        if isinstance(value, fx.Node):
            return self.of(self.sums.effects.current(value, call.node))
        return Terms({(): float(value)}) if isinstance(value, (int, float)) else None

    def operands(self, call: Call, *names: str) -> list[Terms] | None:
        """The terms of arguments; None where one has none."""
        found = [self._operand(call, call.get(name)) for name in names]
        return None if any(each is None for each in found) else found  # type: ignore[return-value]  # none is None

    def scale(self, call: Call, name: str) -> Terms | None:
        """The terms of an argument that is one by default."""
        return self._operand(call, call.get(name, 1))


Rule: TypeAlias = Callable[[_Expansion, Call], "Terms | None"]


def _computed(rule: Arithmetic) -> Rule:
    def compute(sums: _Expansion, call: Call) -> Terms | None:
        found = sums.operands(call, *rule.operands)
        factors = [sums.scale(call, name) for name in rule.factors]
        return None if found is None or None in factors else rule.of(*found, *factors)

    return compute


def _div(sums: _Expansion, call: Call) -> Terms | None:
    found = sums.operands(call, "input", "other")
    if found is None or call.get("rounding_mode") is not None or set(found[1]) != {()} or found[1][()] == 0:
        return None
    return found[0] * (1.0 / found[1][()])


def _compared(is_equal: bool) -> Rule:
    """A condition, or sums of such that are zero or one, compared with one of these."""

    def rule(sums: _Expansion, call: Call) -> Terms | None:
        source, value = tensor_of(call.input), call.get("other")
        found = sums.operands(call, "input")
        if found is None or source is None or source.is_floating_point() or value not in (0, 1):
            return None
        low, high = sums.sums.reach(found[0])
        if low < 0 or high > 1 or any(number != round(number) for number in found[0].values()):
            return None
        return found[0] if (value == 1) == is_equal else 1.0 - found[0]

    return rule


def _where(sums: _Expansion, call: Call) -> Terms | None:
    return _computed(CHOICES["where"])(sums, call) if chooses_numbers(call) else None


RULES: Mapping[str, Rule] = {
    **{name: _computed(rule) for name, rule in ARITHMETIC.items()},
    "div": _div,
    "pow": lambda sums, call: _computed(ARITHMETIC["square"])(sums, call) if call.get("exponent") == 2 else None,
    "not": lambda sums, call: _computed(LOGIC["not"])(sums, call) if is_boolean(call.input) else None,
    "eq": _compared(is_equal=True),
    "ne": _compared(is_equal=False),
    "where": _where,
    **dict.fromkeys(BOUNDING, lambda sums, call: sums.held(call)),
}
_ARITHMETIC = RULES.keys() - {*_LOGIC, *BOUNDING, "where"}


# ---- conditions as numbers -------------------------------------------------------------------------------------------


#: Calls that may give integers of what are none.
CASTS = frozenset({"to", "type", "type_as", "long", "int", "short", "char", "byte", "_to_copy", "convert_element_type"})


def integers_of(nodes: Iterable[fx.Node]) -> frozenset[torch.dtype]:
    """The dtypes of those that hold integers."""
    tensors = [tensor_of(node) for node in nodes]
    return frozenset(tensor.dtype for tensor in tensors if tensor is not None and is_integer(tensor))


def is_count(call: Call) -> bool:
    """Whether a condition becomes the integer zero or one."""
    result = tensor_of(call.node)
    return call.name in CASTS and is_boolean(call.input) and result is not None and is_integer(result)


def chooses_numbers(call: Call) -> bool:
    """Whether it is a condition that is given two numbers; of tensors, what is not chosen may be no number."""
    return all(isinstance(call.get(name), (int, float)) for name in ("input", "other"))
