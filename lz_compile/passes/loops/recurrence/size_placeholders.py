"""Numbers that stand for symbolic sizes while a step is read.

Every symbolic size of what a loop is given gets a prime that divides no number of the step. A size in the trace of the step
is then a product of primes and of a number without them, and says which product of symbolic sizes it is. Steps are traced
with two such sets of primes: what does not look like the same product in both is no product of sizes, and is refused.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.ground.sizes import Size, as_size
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.walks import needed

#: How often other primes are tried.
ATTEMPTS = 4


@dataclass(frozen=True)
class Place:
    """Where a size can be read: ``divisor`` times it is the size of dimension ``dim`` of an operand of the step (by place).

    ``dim`` None: the operand itself is that number.
    """

    operand: int
    dim: int | None
    divisor: int


@dataclass
class SizePlaceholder:
    """A symbolic size that is no product of others: its two primes, its size when it was traced, and where it can be read."""

    size: sympy.Expr
    first: int
    second: int
    hint: int = 1
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class SizePlaceholders:
    """The placeholders of one step. A *number* is a size as it is in the (first) trace."""

    symbols: tuple[SizePlaceholder, ...]

    @staticmethod
    def of(operands: Sequence[Sequence[Any] | Any], taken: Iterable[int], attempt: int) -> SizePlaceholders:
        """Placeholders for the sizes of operands.

        Args:
            operands: their shapes, or the numbers that they are.
            taken: what else is a number in the step.
            attempt: how many sets of primes were of no use before.

        Raises:
            RefusedError: data decides about a size.
        """
        sizes = list(_sizes(operands))
        given = {size for size, *_ in sizes if isinstance(size, int)} | set(taken)
        bases: list[Counter[sympy.Expr]] = []
        for size in sorted({size for size, *_ in sizes if not isinstance(size, int)}, key=_complexity):
            coefficient, rest = _divided(size, bases)
            given.add(coefficient)
            if rest:
                bases.append(rest)
        primes = _primes(given, attempt * 2 * len(bases))
        expressions = [reduce(mul, (factor**count for factor, count in base.items())) for base in bases]
        firsts, seconds = ([next(primes) for _ in bases] for _ in range(2))
        found = SizePlaceholders(tuple(map(SizePlaceholder, expressions, firsts, seconds)))
        for size, value, place, dim in sorted(sizes, key=lambda each: _complexity(each[0])):
            if not isinstance(size, int):
                found._note(found.number(size), value, place, dim)
        return found

    def _note(self, number: int, value: torch.SymInt, place: int, dim: int | None) -> None:
        """Where a symbol is the last factor of a size, all others of which can be read already."""
        _, exponents = self.parts(number)
        for position in reversed(range(len(self.symbols))):
            symbol = self.symbols[position]
            others = [each for each, count in enumerate(exponents) if count and each != position]
            if exponents[position] != 1 or not all(self.symbols[other].places and other < position for other in others):
                continue
            if value.node.hint is None:
                text = f"a step has the size {symbol.size}, which data decides"
                raise RefusedError("STEP_SIZES", text, "pass sizes as inputs of the graph")
            if not symbol.places:
                symbol.hint = int(value.node.hint) // self.hint(number // symbol.first)
            symbol.places.append(Place(place, dim, number // symbol.first))
            return

    # ---- numbers --------------------------------------------------------------------------------------------------

    def number(self, size: Size, *, second: bool = False) -> int:
        """What stands for a size in the first trace, or in the second one.

        Raises:
            RefusedError: it is no product of sizes of operands.
        """
        if isinstance(size, int):
            return size
        coefficient, rest = _powers(size)
        for symbol in self.symbols:
            base = _powers(symbol.size)[1]
            while rest and all(rest[each] >= count for each, count in base.items()):
                rest = rest - base
                coefficient *= symbol.second if second else symbol.first
        if rest:
            text = f"a step has the symbolic size {size}, which is no product of sizes of what it is given"
            raise RefusedError("STEP_SIZES", text, "compile with dynamic=False")
        return coefficient

    def parts(self, number: int) -> tuple[int, tuple[int, ...]]:
        """A number as a coefficient and an exponent for every symbol."""
        exponents = []
        for symbol in self.symbols:
            count = 0
            while number and number % symbol.first == 0:
                number //= symbol.first
                count += 1
            exponents.append(count)
        return number, tuple(exponents)

    def twin(self, number: int) -> int:
        """What a number of the first trace is in the second one."""
        return int(self._product(number, [symbol.second for symbol in self.symbols]))

    def size(self, number: int) -> Size:
        """The size that a number stands for."""
        found: Size = self._product(number, [symbol.size for symbol in self.symbols])
        return found

    def hint(self, number: int) -> int:
        """The size that a number stands for, as it was when it was traced."""
        return int(self._product(number, [symbol.hint for symbol in self.symbols]))

    def extent(self, number: int, read: Callable[[Place], Any]) -> Any:
        """The size that a number stands for, with what ``read`` gives for a place (None: it cannot be read there).

        A plain number where nothing of it is symbolic.
        """
        total, exponents = self.parts(number)
        factors: list[Any] = [total] if total != 1 else []
        for symbol, count in zip(self.symbols, exponents, strict=True):
            factors += [self._read(symbol, read) for _ in range(count)]
        return reduce(mul, factors[::-1]) if factors else 1

    def _read(self, symbol: SizePlaceholder, read: Callable[[Place], Any]) -> Any:
        found = ((place, read(place)) for place in symbol.places)
        place, whole = next(each for each in found if each[1] is not None)
        divisor = self.extent(place.divisor, read)
        return whole if isinstance(divisor, int) and divisor == 1 else whole // divisor

    def _product(self, number: int, sizes: Sequence[Any]) -> Any:
        coefficient, exponents = self.parts(number)
        return reduce(mul, (size**count for size, count in zip(sizes, exponents, strict=True) if count), coefficient)


#: Where no size is symbolic.
NO_SYMBOLS = SizePlaceholders(())


def is_ambiguous(sizes: SizePlaceholders, number: int) -> bool:
    """Whether a size that is none of the symbolic ones looks like one."""
    return number > 0 and any(sizes.parts(number)[1])


def symbolic(value: Any) -> bool:
    """Whether a number, or a size of a tensor, is symbolic."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(not isinstance(as_size(size), int) for size in sizes)


def _powers(size: sympy.Expr) -> tuple[int, Counter[sympy.Expr]]:
    """A size as a coefficient and powers; what is no product is one factor."""
    coefficient, rest = size.as_coeff_Mul()
    if not coefficient.is_Integer:
        return 1, Counter({size: 1})
    powers = rest.as_powers_dict() if rest.is_Mul or rest.is_Pow else {rest: 1}
    if not all(sympy.sympify(count).is_Integer and count > 0 for count in powers.values()):
        powers = {rest: 1}
    return int(coefficient), Counter({base: int(count) for base, count in powers.items()})


def _divided(size: sympy.Expr, bases: Sequence[Counter[sympy.Expr]]) -> tuple[int, Counter[sympy.Expr]]:
    coefficient, rest = _powers(size)
    for base in bases:
        while rest and all(rest[each] >= count for each, count in base.items()):
            rest = rest - base
    return coefficient, rest


def _complexity(size: Size) -> tuple[int, str]:
    """How many factors and operations a size has."""
    return (
        (0, "") if isinstance(size, int) else (sum(_powers(size)[1].values()) + int(sympy.count_ops(size)), str(size))
    )


def _sizes(operands: Sequence[Sequence[Any] | Any]) -> Iterator[tuple[Size, Any, int, int | None]]:
    """Every size, also as it was given, with the place of the operand and the dimension."""
    for place, operand in enumerate(operands):
        if isinstance(operand, (int, torch.SymInt)):
            yield as_size(operand), operand, place, None
            continue
        for dim, size in enumerate(operand):
            yield as_size(size), size, place, dim


def _primes(taken: Iterable[int], skipped: int) -> Iterator[int]:
    """Odd primes that divide none of the numbers that are taken."""
    numbers = {abs(each) for each in taken if each}
    known: list[int] = []
    candidate = 3
    while True:
        if all(candidate % prime for prime in known):
            known.append(candidate)
            if all(number % candidate for number in numbers):
                if skipped:
                    skipped -= 1
                else:
                    yield candidate
        candidate += 2


# ---- two traces of one step ------------------------------------------------------------------------------------------


#: In the metadata of nodes that are sizes.
_SIZE = "layerzero_size"


def check_twins(first: fx.GraphModule, second: fx.GraphModule, sizes: SizePlaceholders) -> None:
    """Compare the traces node by node.

    Raises:
        RefusedError: what a step does depends on a symbolic size in another way than by a product of sizes.
    """
    nodes, others = list(first.graph.nodes), list(second.graph.nodes)
    is_alike = len(nodes) == len(others)
    for node, other in zip(nodes, others, strict=False):
        is_alike = is_alike and (node.op, node.name) == (other.op, other.name)
        is_alike = is_alike and (node.op != "call_function" or node.target is other.target)
        pairs = _pairs((node.args, node.kwargs), (other.args, other.kwargs)) if is_alike else None
        if pairs is None:
            is_alike = False
            break
        for value, twin in (*pairs, *zip(_shape(node), _shape(other), strict=True)):
            if value != twin and not (isinstance(value, int) and sizes.twin(value) == twin):
                text = (
                    f"{told(node)} has a size or a number ({value}, then {twin}) that is no product of symbolic sizes"
                )
                raise RefusedError("STEP_SIZES", text, "compile with dynamic=False")
    if not is_alike:
        text = "a step does other things where a symbolic size is another one"
        raise RefusedError("STEP_SIZES", text, "compile with dynamic=False")


def unchanged_sizes(first: fx.GraphModule, second: fx.GraphModule) -> Iterator[int]:
    """The sizes that are the same in both traces."""
    for node, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        for size, twin in zip(_shape(node), _shape(other), strict=True):
            if size == twin:
                yield size


def name_sizes(first: fx.GraphModule, second: fx.GraphModule, states: int, sizes: SizePlaceholders) -> None:
    """Let operations of both traces take symbolic sizes from operands of the step, in place.

    Args:
        first: the trace whose numbers are those of ``sizes``.
        second: the other one.
        states: how many of the operands are states, of which sizes are not to depend.
        sizes: the placeholders.

    Raises:
        RefusedError: no other operand has a size.
    """
    pairs = list(zip(first.graph.nodes, second.graph.nodes, strict=True))
    namers = [_Namer(module.graph, states, sizes) for module in (first, second)]
    for both in pairs:
        leaves, forms = zip(*(pytree.tree_flatten((node.args, node.kwargs)) for node in both), strict=True)
        changed = {
            place: leaf
            for place, (leaf, twin) in enumerate(zip(*leaves, strict=True))
            if isinstance(leaf, int) and leaf != twin
        }
        for node, namer, own, form in zip(both, namers, leaves, forms, strict=True):
            named = {place: namer.size(number, own[place], node) for place, number in changed.items()}
            if named:
                values = [named.get(place, value) for place, value in enumerate(own)]
                node.args, node.kwargs = pytree.tree_unflatten(values, form)
    for module in (first, second):
        module.recompile()


class _Namer:
    """Puts the sizes of operands into the graph of a step."""

    def __init__(self, graph: fx.Graph, states: int, sizes: SizePlaceholders) -> None:
        self._graph = graph
        self._states = states
        self._sizes = sizes
        self._inputs = list(graph.find_nodes(op="placeholder"))
        self._known: dict[tuple[int, frozenset[fx.Node]], fx.Node] = {}

    def size(self, number: int, value: int, reader: fx.Node) -> fx.Node:
        """The size that a number of the first trace stands for, which is ``value`` in this one, in front of its reader."""
        near = frozenset(needed([reader], ())).intersection(self._inputs)
        if (number, near) not in self._known:
            with self._graph.inserting_before(self._first_call()):
                found = self._product(number, near)
            assert found.meta["val"] == value, f"{found.name} is {found.meta['val']} instead of {value}"
            self._known[number, near] = found
        return self._known[number, near]

    def _first_call(self) -> fx.Node:
        found: fx.Node = next(each for each in self._graph.nodes if each.op != "placeholder" and _SIZE not in each.meta)
        return found

    def _product(self, number: int, near: frozenset[fx.Node]) -> fx.Node:
        coefficient, exponents = self._sizes.parts(number)
        factors: list[fx.Node] = []
        for symbol, count in zip(self._sizes.symbols, exponents, strict=True):
            factors += [self._symbol(symbol, near) for _ in range(count)]
        total: fx.Node = factors[0]
        for factor in factors[1:]:
            total = self._call(operator.mul, total, factor)
        return total if coefficient == 1 else self._call(operator.mul, total, coefficient)

    def _symbol(self, symbol: SizePlaceholder, near: frozenset[fx.Node]) -> fx.Node:
        places = [place for place in symbol.places if place.operand >= self._states and place.dim is not None]
        if not places:
            text = f"a step needs the symbolic size {symbol.size}, which is that of no slice"
            raise RefusedError("STEP_SIZES", text, "read a tensor of that size in each step")
        place = min(places, key=lambda each: self._inputs[each.operand] not in near)
        whole = self._call(torch.Tensor.size, self._inputs[place.operand], place.dim)
        if place.divisor == 1:
            return whole
        is_plain = not any(self._sizes.parts(place.divisor)[1])
        return self._call(operator.floordiv, whole, place.divisor if is_plain else self._product(place.divisor, near))

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node: fx.Node = self._graph.call_function(target, args)
        values = fx.map_arg(args, lambda each: each.meta["val"])
        node.meta.update({"val": target(*values), _SIZE: True})
        return node


def _shape(node: fx.Node) -> Sequence[int]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _pairs(one: Any, two: Any) -> list[tuple[Any, Any]] | None:
    """The leaves of two arguments beside each other, nodes by their names; None where they have other forms."""
    first, form = pytree.tree_flatten(one)
    second, other = pytree.tree_flatten(two)
    if form != other or [type(each) for each in first] != [type(each) for each in second]:
        return None
    return [
        (value.name, twin.name) if isinstance(value, fx.Node) else (value, twin)
        for value, twin in zip(first, second, strict=True)
    ]
