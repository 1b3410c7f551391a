"""Every value of a graph as a sum of products, as far as it is one: a cheap look before anything is read in axes.

Axes are not looked at: a tensor and its transpose are the same factor here. What looks like a blend is read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from lz_compile.passes import layout
from lz_compile.passes.activations import is_read
from lz_compile.passes.algebra import constant_value, is_cast, specialised
from lz_compile.passes.axes import LayoutError, fresh, shape_of
from lz_compile.passes.builder import EMITTED
from lz_compile.passes.effects import Effects
from lz_compile.passes.view import Call, tensor_of, value_of

#: The factors of a product (in the order of the graph, as often as they occur), and the number before it.
Terms: TypeAlias = Mapping[tuple[fx.Node, ...], float]

#: The last operation of a blend.
ANCHORS = frozenset({"add", "sub", "rsub", "mul", "div", "neg", "lerp", "addcmul"})
_PRODUCTS = frozenset({"mul", "div", "lerp", "addcmul"})
_MOST_TERMS, _MOST_FACTORS = 8, 5
_MOST_NODES, _DEEPEST = 32, 16
_NEAR = 1e-9


@dataclass
class Sums:
    """Sums of products in one graph; values that are computed twice in the same way are one factor."""

    effects: Effects
    _first: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        computed: dict[Any, fx.Node] = {}
        for node, call in self.effects.calls.items():
            key = None if call is None else self._key(call)
            self._first[node] = node if key is None else computed.setdefault(key, node)

    def first(self, node: fx.Node) -> fx.Node:
        """The first of the nodes that compute the same."""
        return self._first[node]

    def _key(self, call: Call) -> Any:
        """What makes two calls the same; None for one that may be another each time."""
        if call.is_inplace or tensor_of(call.node) is None or not is_repeatable(call):
            return None
        if any(self.effects.is_overwritten(each) for each in call.node.all_input_nodes):
            return None
        arguments = fx.map_arg((call.node.args, dict(call.node.kwargs)), lambda node: self._first[node].name)
        return call.node.op, call.node.target, repr(arguments), self.effects.ambient(call.node)

    def behind(self, anchor: fx.Node) -> list[fx.Node]:
        """The values that an anchor is a sum of products of, or that these are, the nearest first; not too many."""
        found, queue = {anchor: True}, [anchor]
        while queue and len(found) < _MOST_NODES:
            node = queue.pop(0)
            call = self.effects.calls[node]
            if call is None or not self.is_sum(call):
                continue
            for operand in node.all_input_nodes:
                inner = self.effects.current(operand, node)
                if inner not in found and value_of(inner) is not None:
                    found[inner] = True
                    queue.append(inner)
        return list(found)[1:]

    def has_product(self, anchor: fx.Node, nodes: Iterable[fx.Node]) -> bool:
        """Whether anything is multiplied or divided on the way, or scaled as it is added."""
        calls = [self.effects.calls[node] for node in (anchor, *nodes)]
        return any(call is not None and (call.name in _PRODUCTS or call.get("alpha", 1) != 1) for call in calls)

    def is_moved(self, node: fx.Node) -> bool:
        """Whether a value is another one, cast or rearranged."""
        call = self.effects.calls[node]
        return call is not None and (is_cast(call) or _is_moved(call))

    def is_sum(self, call: Call) -> bool:
        """Whether a call adds, multiplies, casts or rearranges."""
        tensor = tensor_of(call.node)
        if tensor is None or EMITTED in call.node.meta or not (tensor.is_floating_point() or is_cast(call)):
            return False
        return call.name in _RULES or is_cast(call) or _is_moved(call)

    def of(self, anchor: fx.Node, cuts: Collection[fx.Node]) -> Terms | None:
        """The terms of an anchor, of which ``cuts`` are factors; None where there are too many."""
        try:
            return _Expansion(self, frozenset(map(self.first, cuts))).of(anchor)
        except _TooLargeError:
            return None


class _TooLargeError(Exception):
    """A sum of too many products."""


@dataclass
class _Expansion:
    """The terms of one anchor."""

    sums: Sums
    cuts: frozenset[fx.Node]
    _found: dict[fx.Node, Terms] = field(default_factory=dict)
    depth: int = 0

    def of(self, node: fx.Node) -> Terms:
        """The terms of a node."""
        if node not in self._found:
            first = self.sums.first(node)
            call = self.sums.effects.calls[node]
            self.depth += 1
            terms = None if first in self.cuts or call is None or self.depth > _DEEPEST else self._read(call)
            self.depth -= 1
            self._found[node] = {(first,): 1.0} if terms is None else terms
            if _is_large(self._found[node]):
                raise _TooLargeError
        return self._found[node]

    def _read(self, call: Call) -> Terms | None:
        """None for what is a factor itself."""
        if tensor_of(call.node) is None:
            return None
        constant = constant_value(call)
        if constant is not None:
            return {(): float(constant)}
        if not self.sums.is_sum(call):
            return None
        rule = _RULES.get(call.name)
        return self._operand(call, call.input) if rule is None else rule(self, call)

    def _operand(self, call: Call, value: Any) -> Terms | None:
        value = specialised(value)
        if isinstance(value, fx.Node):
            return self.of(self.sums.effects.current(value, call.node))
        return {(): float(value)} if isinstance(value, (int, float)) else None

    def operands(self, call: Call, *names: str) -> list[Terms] | None:
        """The terms of arguments; None where one has none."""
        found = [self._operand(call, call.get(name)) for name in names]
        return None if any(each is None for each in found) else found  # type: ignore[return-value]  # none is None

    def scale(self, call: Call, name: str) -> Terms | None:
        """The terms of an argument that is one by default."""
        return self._operand(call, call.get(name, 1))


def is_repeatable(call: Call) -> bool:
    """Whether a call is pointwise, rearranges, detaches or is a softmax: the same arguments give the same value."""
    return is_read(call) or is_cast(call) or layout.rearranges(call) or call.name in ("detach", "softmax")


def _is_moved(call: Call) -> bool:
    tensor = tensor_of(call.node)
    if tensor is None or not layout.rearranges(call):
        return False
    try:
        return layout.read_input_dims(call, fresh(shape_of(tensor))) is not None
    except LayoutError:
        return False


def _is_large(terms: Terms) -> bool:
    return len(terms) > _MOST_TERMS or any(len(factors) > _MOST_FACTORS for factors in terms)


def plus(first: Terms, second: Terms, sign: float = 1.0) -> Terms:
    """``first + sign * second``."""
    found = dict(first)
    for factors, number in second.items():
        found[factors] = found.get(factors, 0.0) + sign * number
    return {factors: number for factors, number in found.items() if abs(number) > _NEAR}


def times(first: Terms, second: Terms) -> Terms:
    """The product of two sums."""
    found: dict[tuple[fx.Node, ...], float] = {}
    for one, number in first.items():
        for other, factor in second.items():
            key = tuple(sorted((*one, *other), key=lambda node: node.name))
            found[key] = found.get(key, 0.0) + number * factor
    return {factors: number for factors, number in found.items() if abs(number) > _NEAR}


def _added(sums: _Expansion, call: Call, first: str, second: str, sign: float) -> Terms | None:
    found, scale = sums.operands(call, first, second), sums.scale(call, "alpha")
    return None if found is None or scale is None else plus(found[0], times(scale, found[1]), sign)


def _mul(sums: _Expansion, call: Call) -> Terms | None:
    found = sums.operands(call, "input", "other")
    return None if found is None else times(*found)


def _div(sums: _Expansion, call: Call) -> Terms | None:
    found = sums.operands(call, "input", "other")
    if found is None or call.get("rounding_mode") is not None or set(found[1]) != {()}:
        return None
    return times(found[0], {(): 1.0 / found[1][()]})


def _neg(sums: _Expansion, call: Call) -> Terms | None:
    found = sums.operands(call, "input")
    return None if found is None else times(found[0], {(): -1.0})


def _lerp(sums: _Expansion, call: Call) -> Terms | None:
    found = sums.operands(call, "input", "end", "weight")
    return None if found is None else plus(found[0], times(found[2], plus(found[1], found[0], -1.0)))


def _addcmul(sums: _Expansion, call: Call) -> Terms | None:
    found, scale = sums.operands(call, "input", "tensor1", "tensor2"), sums.scale(call, "value")
    return None if found is None or scale is None else plus(found[0], times(scale, times(found[1], found[2])))


_RULES: Mapping[str, Any] = {
    "add": lambda sums, call: _added(sums, call, "input", "other", 1.0),
    "sub": lambda sums, call: _added(sums, call, "input", "other", -1.0),
    "rsub": lambda sums, call: _added(sums, call, "other", "input", -1.0),
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "lerp": _lerp,
    "addcmul": _addcmul,
}


def weights(terms: Terms, seed: fx.Node, host: fx.Node) -> tuple[Terms, Terms] | None:
    """What ``seed`` and ``host`` are multiplied by, if every product holds exactly one of them, once."""
    found: tuple[dict[tuple[fx.Node, ...], float], ...] = ({}, {})
    for factors, number in terms.items():
        counts = factors.count(seed), factors.count(host)
        if counts not in ((1, 0), (0, 1)):
            return None
        of_host = counts == (0, 1)
        rest = list(factors)
        rest.remove(host if of_host else seed)
        found[of_host][tuple(rest)] = number
    return found if all(found) else None  # type: ignore[return-value]  # a pair


def is_one(terms: Terms) -> bool:
    """Whether terms are the number one."""
    return set(terms) == {()} and abs(terms[()] - 1.0) < _NEAR
