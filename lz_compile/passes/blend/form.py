"""Which values of a graph look like a blend: two tensors, their weights, and which of the two is the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import Size, is_one, product, shape_of
from lz_compile.passes.blend.bounds import Bound
from lz_compile.passes.blend.gate import Gates, Ranks
from lz_compile.passes.blend.terms import ANCHORS, CASTS, NEAR, Sums, Terms, integers_of
from lz_compile.passes.formula import layout, moves
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.formula.expressions import constant_value, is_constant, specialised
from lz_compile.passes.formula.indices import Indices
from lz_compile.passes.formula.layout import SPLITS
from lz_compile.passes.formula.pointwise import is_moved, is_pointwise, is_read
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import EMITTED, Call, known_tensor, reached, tensor_of, tensor_operands, value_of
from lz_compile.passes.graph.writes import ELEMENTWISE

#: Calls that pick or repeat parts of what is given, beside pointwise and layout operations.
_PICKS = frozenset({"select", "index_select", "narrow", "chunk", "split", "unbind", "gather", "stack", "cat", "detach"})

#: ``x.detach()``, and ``x.data`` as Dynamo writes it.
_DETACHING = frozenset({"detach", "_get_data_attr"})
#: Of two tensors, element by element; of one they are something else.
_OF_TWO = frozenset({"min", "max", "minimum", "maximum", "fmin", "fmax"})
#: Calls behind a value that are looked at.
_REACH = 64


@dataclass(frozen=True)
class Form:
    """``weight * seed + host_weight * host``, the weights by their factors.

    ``is_residual`` says that the host's weight is one, ``is_soft`` that both are shares of a softmax over two (the seed's the
    second where it ``is_reversed``), otherwise they add up to one. ``is_isolated`` says that no gradient flows to the host.
    ``is_strict`` says that they do so for every number, without it ``integers`` are the dtypes of sums that may wrap around.
    ``bounds`` holds the bounded values that are read as others.
    """

    seed: fx.Node
    host: fx.Node
    weight: Terms
    host_weight: Terms
    is_residual: bool
    is_soft: bool
    is_isolated: bool
    is_reversed: bool = False
    is_strict: bool = True
    integers: frozenset[torch.dtype] = frozenset()
    bounds: Mapping[fx.Node, Bound] = field(default_factory=dict, compare=False)

    @property
    def factors(self) -> set[fx.Node]:
        """Everything that the weights are made of."""
        return {factor for terms in (self.weight, self.host_weight) for factors in terms for factor in factors}


@dataclass
class Forms:
    """The blends of one graph, by a look at their terms."""

    effects: Effects
    sums: Sums
    gates: Gates | None
    _given: dict[fx.Node, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, effects: Effects, ranks: Ranks | None) -> Forms:
        """The forms of a graph; ``ranks`` is None where it has no order statistics."""
        return cls(effects, Sums(effects), None if ranks is None else Gates(effects, ranks))

    def at(self, node: fx.Node) -> Form | None:
        """The blend that ends in ``node``; None where that is clearly none."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        if call is None or call.name not in ANCHORS or EMITTED in node.meta or tensor is None:
            return None
        if not tensor.dim() or not tensor.is_floating_point() or 0 in shape_of(tensor):
            return None
        behind = self.sums.behind(node)
        if not self.sums.has_product(node, behind) or not any(map(self._tells, behind)):
            return None
        shape, size = shape_of(tensor), product(shape_of(tensor))
        places = {
            self.sums.first(each): place
            for place, each in reversed(list(enumerate(behind)))
            if _spreads(each, shape, size) and not is_moved(self.effects.calls[each])
        }
        pairs = vanishing(self.sums, node, behind, sorted(places, key=places.__getitem__))
        found = [self._form(node, seed, host) for seed, host in pairs]
        if not any(found) and self.sums.is_lax(behind):
            lax = [self._form(node, seed, host, is_strict=False) for seed, host in pairs]
            found = [form and replace(form, integers=integers_of(behind)) for form in lax]
        forms = [form for form in found if form is not None and self._is_meant(form)]

        def order(form: Form) -> tuple[bool, bool, bool, int, bool, int]:
            near, is_small = places[form.seed] + places[form.host], not _is_row(form.seed, size)
            return not form.is_isolated, form.is_residual, is_small, near, form.is_reversed, len(form.weight)

        return min(forms, key=order, default=None)

    def _tells(self, node: fx.Node) -> bool:
        """Whether a value is what only blends are made of: a host that is detached, or a weight that is given."""
        call = self.effects.calls.get(node)
        if call is not None and call.name in _DETACHING:
            return True
        if self.gates is not None and self.gates.depends(node):
            return True
        return self._share(node) is not None or self._is_given(node)

    def _form(self, node: fx.Node, seed: fx.Node, host: fx.Node, *, is_strict: bool = True) -> Form | None:
        terms = self.sums.of(node, (seed, host), is_lenient=not is_strict)
        found = None if terms is None else _weights(terms, seed, host)
        if found is None:
            return None
        of_seed, of_host = found
        is_residual = _is_one(of_host)
        shares = self._shares(of_seed, of_host)
        is_soft = shares is not None
        if is_residual and (not is_strict or self._are_spread(node, seed, host) or self._is_scaled(host)):
            return None
        if not is_residual and not is_soft and not _is_one(of_seed + of_host):
            return None
        if set(of_seed) == {()} and abs(of_seed[()]) == 1:  # a sum or a difference
            return None
        records = grad_enabled(self.effects.ambient(node))
        wants = [records and known_tensor(each).requires_grad for each in (seed, host)]
        if wants == [False, True]:
            return None
        is_reversed = shares == (1, 0)
        bounds = self.sums.bounds(node, (seed, host)) if is_strict else {}
        return Form(
            seed, host, of_seed, of_host, is_residual, is_soft, not wants[1], is_reversed, is_strict, bounds=bounds
        )

    def _are_spread(self, node: fx.Node, *operands: fx.Node) -> bool:
        """Whether any of them is smaller than the result: then it is a factor or a summand as any other."""
        size = product(shape_of(known_tensor(node)))
        return not all(_is_row(each, size) for each in operands)

    def _is_scaled(self, host: fx.Node) -> bool:
        """Whether a host is another one times a weight: then that weight is the host's."""
        terms = self.sums.of(host, ())
        if not terms or terms == {(self.sums.first(host),): 1.0}:
            return False
        return bool(set.intersection(*map(set, terms)))

    def _shares(self, of_seed: Terms, of_host: Terms) -> tuple[int, int] | None:
        """Which of the two numbers of a softmax over two the weights are; None where they are no such."""
        factors = [factor for terms in (of_seed, of_host) for factor in terms]
        if len(of_seed) != 1 or len(of_host) != 1 or any(len(each) != 1 for each in factors):
            return None
        if any(number != 1 for terms in (of_seed, of_host) for number in terms.values()):
            return None
        first, second = (self._share(factor) for (factor,) in factors)
        if first is None or second is None or first[1] != second[1] or self._differ(first[0].node, second[0].node):
            return None
        softmax, dim, place = first
        shape = shape_of(known_tensor(softmax.node))
        is_along = softmax.get("dim") is not None and softmax.get("dim") % len(shape) == dim
        return (place, second[2]) if is_along and shape[dim] == 2 and place != second[2] else None

    def _share(self, node: fx.Node) -> tuple[Call, int, int] | None:
        """The softmax, the dimension and the position, where a value is one of a softmax's numbers along a dimension."""
        call, tensor = self.effects.calls.get(node), tensor_of(node)
        source = None if call is None or call.name not in moves.RULES else self.effects.calls.get(call.input)
        if source is not None and source.name in SPLITS:
            source = self.effects.calls.get(source.input)
        if call is None or source is None or source.name != "softmax" or tensor is None:
            return None
        indices, dims = Indices(self.effects), fresh(shape_of(tensor))
        indices.give(dims)
        found = moves.shown(indices, call, dims)
        fixed = [] if found is None else [(d, dim) for d, dim in enumerate(found.dims) if not indices.is_plain((dim,))]
        place = indices.place(fixed[0][1]).constant if len(fixed) == 1 else None
        return None if place is None else (source, fixed[0][0], int(place))

    def _differ(self, one: fx.Node, other: fx.Node) -> bool:
        return self.sums.first(one) is not self.sums.first(other)

    # ---- what is meant -----------------------------------------------------------------------------------------------

    def _is_meant(self, form: Form) -> bool:
        """Whether it is a blend and no other sum: a host that was detached, or weights that nothing was trained to give."""
        if not form.is_isolated and self._are_of_one(form.seed, form.host, *form.factors):
            return False
        records = known_tensor(form.seed).requires_grad
        if form.is_isolated and (records or not form.is_residual) and self.is_detached(form.host):
            return True
        if form.is_soft:
            return True
        if self.gates is not None and any(self.gates.depends(factor) for factor in form.factors):
            return True
        if not form.factors or not all(self._is_given(factor) for factor in form.factors):
            return False
        if not form.is_residual:
            return True
        size = product(shape_of(known_tensor(form.seed)))
        if any(_is_row(factor, size) for factor in form.factors):  # the product of two tensors
            return False
        if form.is_isolated:
            return True
        return all(map(_is_number_like, form.factors)) and not self._is_residual_connection(form.seed, form.host)

    def _is_residual_connection(self, *nodes: fx.Node) -> bool:
        """Whether one of two values is computed from the other: a layer's output beside its input, no two branches."""
        position = self.effects.position
        first, last = sorted(nodes, key=position.__getitem__)
        return first in reached(
            [last], lambda node: [x for x in node.all_input_nodes if position[x] >= position[first]]
        )

    def _are_of_one(self, *nodes: fx.Node) -> bool:
        """Whether all are functions of the elements of one tensor, as an activation by cases is, and of numbers."""

        def behind(node: fx.Node) -> list[fx.Node]:
            call = self.effects.calls.get(node)
            is_of_elements = call is not None and (is_pointwise(call) or is_moved(call) or call.name in ELEMENTWISE)
            is_of_two = call is not None and call.name in _OF_TWO and len(tensor_operands(node)) > 1
            return node.all_input_nodes if is_of_elements or is_of_two else []

        def sources(node: fx.Node) -> set[fx.Node]:
            seen = list(reached([node], behind, _REACH))
            found = {self.sums.first(each) for each in seen if not behind(each) and _is_many(each)}
            return found if len(seen) < _REACH else {node}

        first, host, *weights = map(sources, nodes)
        return len(first) == 1 and host == first and all(each <= first for each in weights)

    def is_detached(self, node: fx.Node) -> bool:
        """Whether a value was cut off from its gradient: by ``detach``, or as ``data``."""
        call = self.effects.calls.get(node)
        while call is not None and is_moved(call):
            if call.name == "getattr" and call.arguments.get("#1") == "data":
                return True
            call = self.effects.calls.get(call.input)
        return call is not None and call.name in _DETACHING

    def _is_given(self, node: fx.Node) -> bool:
        """Whether a weight is a number or tensor that the graph is given, or a function of such: no parameter."""
        if node not in self._given:
            self._given[node] = False
            self._given[node] = self._read_given(node)
        return self._given[node]

    def _read_given(self, node: fx.Node) -> bool:
        call, value = self.effects.calls.get(node), value_of(node)
        if isinstance(value, torch.Tensor) and (isinstance(value, torch.nn.Parameter) or value.requires_grad):
            return False
        if call is None:
            return node.op in ("placeholder", "get_attr")
        if is_constant(call) or not isinstance(value, (torch.Tensor, tuple, list)):
            return True
        is_plain = is_read(call) or is_moved(call) or call.name in _PICKS | CASTS | {"softmax"}
        given = [call.input] if layout.is_in_axes(call) else node.all_input_nodes  # others give no more than a shape
        tensors = [each for each in given if isinstance(value_of(each), (torch.Tensor, tuple, list))]
        return is_plain and all(map(self._is_given, tensors))


def _spreads(node: fx.Node, shape: Sequence[Size], size: object) -> bool:
    """Whether it is a tensor that is as large as a result, or is repeated to be so."""
    tensor = tensor_of(node)
    if tensor is None or not tensor.is_floating_point() or _is_row(node, size):
        return tensor is not None and _is_row(node, size)
    own = shape_of(tensor)
    pairs = zip(reversed(own), reversed(shape), strict=False)
    return len(own) <= len(shape) and all(one in (1, other) for one, other in pairs)


def _is_many(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and not all(map(is_one, shape_of(tensor)))


def _is_row(node: fx.Node, size: object) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point() and product(shape_of(tensor)) == size


def _is_number_like(node: fx.Node) -> bool:
    """Whether a weight is one number, or a row of them."""
    tensor = tensor_of(node)
    return tensor is None or (tensor.is_floating_point() and sum(size != 1 for size in tensor.shape) <= 1)


def _weights(terms: Terms, seed: fx.Node, host: fx.Node) -> tuple[Terms, Terms] | None:
    """What ``seed`` and ``host`` are multiplied by, if every product holds exactly one of them, once."""
    found = Terms(), Terms()
    for factors, number in terms.items():
        counts = factors.count(seed), factors.count(host)
        if counts not in ((1, 0), (0, 1)):
            return None
        of_host = counts == (0, 1)
        rest = list(factors)
        rest.remove(host if of_host else seed)
        found[of_host][tuple(rest)] = number
    return found if all(found) else None


def _is_one(terms: Terms) -> bool:
    """Whether terms are the number one."""
    return set(terms) == {()} and abs(terms[()] - 1.0) < NEAR


# ---- pairs of tensors ------------------------------------------------------------------------------------------------
# Which two of many tensors a value could be a weighted sum of: those with which it vanishes.
# A sum of products in which every product holds one of two factors is zero where both are. That is asked of all pairs at
# once, as bits of a number, and spares the expansion of the value for each: of the 500 pairs in a chain of residual layers
# there are then none, or one.


#: A bit for each pair.
Bits: TypeAlias = int


def vanishing(
    sums: Sums, anchor: fx.Node, behind: Collection[fx.Node], places: Collection[fx.Node]
) -> list[tuple[fx.Node, fx.Node]]:
    """The pairs of ``places`` with which ``anchor`` is zero, unless terms cancel; in both orders.

    ``behind`` are the values of which it is a sum of products, ``places`` of these the first that compute the same.
    """
    pairs = list(combinations(places, 2))
    own: dict[fx.Node, Bits] = dict.fromkeys(places, 0)
    for number, pair in enumerate(pairs):
        for node in pair:
            own[node] |= 1 << number
    reader = _Reader(sums, frozenset(behind), own, (1 << len(pairs)) - 1)
    found = reader.of(anchor, is_anchor=True)
    kept = [pair for number, pair in enumerate(pairs) if found >> number & 1]
    return [order for one, two in kept for order in ((one, two), (two, one))]


class _Reader:
    """The pairs with which values are zero."""

    def __init__(self, sums: Sums, behind: frozenset[fx.Node], own: Mapping[fx.Node, Bits], every: Bits) -> None:
        self._sums, self._behind, self._own, self._every = sums, behind, own, every
        self._found: dict[fx.Node, Bits] = {}

    def of(self, node: fx.Node, *, is_anchor: bool = False) -> Bits:
        """Those of a value."""
        if node not in self._found:
            self._found[node] = self._own.get(self._sums.first(node), 0)
            call = self._sums.effects.calls.get(node)
            if call is not None and (is_anchor or node in self._behind):
                self._found[node] |= self._read(call)
        return self._found[node]

    def _read(self, call: Call) -> Bits:
        constant = constant_value(call)
        if constant is not None:
            return self._every if constant == 0 else 0
        if not self._sums.is_sum(call):
            return 0
        if call.name in ("add", "sub", "rsub"):
            return self._operand(call, "input") & self._operand(call, "other")
        if call.name == "mul":
            return self._operand(call, "input") | self._operand(call, "other")
        if call.name == "lerp":
            return self._operand(call, "input") & (self._operand(call, "end") | self._operand(call, "weight"))
        if call.name == "addcmul":
            return self._operand(call, "input") & (self._operand(call, "tensor1") | self._operand(call, "tensor2"))
        limits = self._sums.limits(call.node)
        if limits is not None:
            return self.of(self._sums.effects.current(limits.held, call.node))
        if call.name in ("not", "eq", "ne", "where"):  # conditions are neither host nor seed
            return 0
        return self._operand(call, "input")  # a quotient, a negative, a cast, another layout

    def _operand(self, call: Call, name: str) -> Bits:
        value: Any = specialised(call.input if name == "input" else call.get(name))
        if isinstance(value, fx.Node):
            return self.of(self._sums.effects.current(value, call.node))
        return self._every if isinstance(value, (int, float)) and value == 0 else 0
