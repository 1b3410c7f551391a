"""What ATen operations are in index notation: a rule for each, over sums of products and numbers.

Only operations that are linear in each of their operands, and those that move elements about, have a rule.

Sums of outer products are told with as few summands as shared factors allow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.ground import sizes
from lz_compile.ground.sizes import Shape, Size
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.arithmetic import ARITHMETIC, CHOICES, LOGIC, Arithmetic
from lz_compile.passes.formula.axes import LayoutError, fresh
from lz_compile.passes.graph.view import read
from lz_compile.passes.loops.recurrence.index_sum import Dims, IndexSum, as_sum, mapped
from lz_compile.passes.loops.recurrence.index_terms import Atom, Factor, Term, UnreadableError, common, others

aten = torch.ops.aten
Value: TypeAlias = "IndexSum | float"
#: A rule takes the node and its arguments, by position, with sums in the place of tensors.
Rule: TypeAlias = Callable[..., IndexSum]


def shape_of(node: fx.Node) -> Shape:
    """The shape of the result."""
    return sizes.shape_of(node.meta["val"])


def _computed(rule: Arithmetic) -> Rule:
    def compute(_: fx.Node, *given: Value, **named: Value) -> IndexSum:
        found = {**dict(zip((*rule.operands, *rule.factors), given, strict=False)), **named}
        operands = (as_sum(found[name]) for name in rule.operands)
        result: IndexSum = rule.of(*operands, *(found.get(name, 1) for name in rule.factors))
        return result

    return compute


def _div(_: fx.Node, one: Value, other: Value) -> IndexSum:
    if isinstance(other, IndexSum):
        numbers = [number for term, number in other.terms.items() if not term.factors]
        if other.atoms or len(numbers) != 1:
            raise UnreadableError("a quotient of tensors")
        other = numbers[0]
    return as_sum(one).scaled(1 / other)


def _pow(_: fx.Node, base: IndexSum, exponent: Value) -> IndexSum:
    if not isinstance(exponent, (int, float)) or exponent not in (1, 2, 3, 4):
        raise UnreadableError("a power that is no small whole number")
    return base.power(int(exponent))


def _added(product: Callable[[IndexSum, IndexSum], IndexSum]) -> Rule:
    """A product that is added to a tensor, each times a number."""

    def rule(
        _: fx.Node, base: IndexSum, one: IndexSum, other: IndexSum, *, beta: float = 1, alpha: float = 1
    ) -> IndexSum:
        return base.scaled(beta).plus(product(one, other), alpha)

    return rule


def _sum(node: fx.Node, value: IndexSum, dims: Sequence[int] | None = None, keepdim: bool = False) -> IndexSum:
    return value.summed(dims or range(len(value.dims)), keeps=keepdim).expanded(shape_of(node))


def _mean(node: fx.Node, value: IndexSum, dims: Sequence[int] | None = None, keepdim: bool = False) -> IndexSum:
    found = _sum(node, value, dims, keepdim)
    count: Size = 1
    for dim in {each % len(value.dims) for each in dims or range(len(value.dims))}:
        count *= value.shape[dim]
    return found.scaled(1 / count)


def _same(_: fx.Node, value: IndexSum) -> IndexSum:
    return value


def _cast(node: fx.Node, value: IndexSum) -> IndexSum:
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    if source == target or (target.is_floating_point and (source.is_floating_point or source == torch.bool)):
        return value
    raise UnreadableError(f"a cast from {source} to {target}")


def _copy(node: fx.Node, _target: IndexSum, source: IndexSum) -> IndexSum:
    return source.expanded(shape_of(node))


def _moved(node: fx.Node, value: IndexSum, *_: Any) -> IndexSum:
    """What a change of layout makes of its input."""
    call, result = read(node), fresh(shape_of(node))
    assert call is not None, "a rule is of a call"
    try:
        source = layout.read_input_dims(call, result)
    except LayoutError as error:
        raise UnreadableError(str(error)) from error
    assert source is not None, f"{call.name} changes a layout only"
    return value.moved(result, source)


def _select(node: fx.Node, value: IndexSum, dim: int, _index: int) -> IndexSum:
    if value.dims[dim]:
        raise UnreadableError("it takes one of several elements")
    result = fresh(shape_of(node))
    return value.moved(result, (*result[:dim], (), *result[dim:]))


def _slice(node: fx.Node, value: IndexSum, *_: Any) -> IndexSum:
    if shape_of(node) != value.shape:
        raise UnreadableError("it takes some of the elements")
    return value


def _cat(_: fx.Node, values: Sequence[IndexSum], _dim: int = 0) -> IndexSum:
    if len(values) != 1:
        raise UnreadableError("it joins several tensors")
    return values[0]


def _stack(_: fx.Node, values: Sequence[IndexSum], dim: int = 0) -> IndexSum:
    if len(values) != 1:
        raise UnreadableError("it joins several tensors")
    return values[0].unsqueezed(dim)


def _diag_embed(_: fx.Node, value: IndexSum, offset: int = 0, first: int = -2, second: int = -1) -> IndexSum:
    rank = len(value.dims) + 1
    if offset or {first % rank, second % rank} != {rank - 2, rank - 1} or len(value.dims[-1]) > 1:
        raise UnreadableError("a diagonal beside the main one")
    return value.diagonal_matrix()


def _diagonal(node: fx.Node, value: IndexSum, offset: int = 0, first: int = 0, second: int = 1) -> IndexSum:
    if offset or value.shape[first] != value.shape[second]:
        raise UnreadableError("a diagonal beside the main one")
    *rest, last = fresh(shape_of(node))
    own = {first % len(value.dims), second % len(value.dims)}
    return value.moved((*rest, last), tuple(last if d in own else rest.pop(0) for d in range(len(value.dims))))


def _eye(node: fx.Node, *_: int) -> IndexSum:
    rows, columns = shape_of(node)
    if rows != columns:
        raise UnreadableError("a part of an identity")
    return IndexSum.identity(rows)


def _number(number: float) -> Rule:
    return lambda node, *_: IndexSum.of_number(number, shape_of(node))


def _full(node: fx.Node, _given: Any, value: float) -> IndexSum:
    return IndexSum.of_number(float(value), shape_of(node))


def _scalar(_: fx.Node, value: float) -> IndexSum:
    return IndexSum.of_number(float(value))


def _overloads(rules: Mapping[str, Arithmetic]) -> dict[Any, Rule]:
    """The rules of arithmetic by the overloads that a step may call."""
    packets = ((getattr(aten, name), _computed(rule)) for name, rule in rules.items())
    return {getattr(packet, overload): rule for packet, rule in packets for overload in packet.overloads()}


RULES: Mapping[Any, Rule] = {
    **_overloads(ARITHMETIC),
    **_overloads(CHOICES),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _div),
    aten.pow.Tensor_Scalar: _pow,
    **dict.fromkeys((aten.mm.default, aten.bmm.default), lambda _, one, other: one.matmul(other)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _added(IndexSum.matmul)),
    **dict.fromkeys((aten.mv.default, aten.dot.default), lambda _, one, other: one.times(other).summed([-1])),
    aten.addr.default: _added(lambda one, other: one.unsqueezed(-1).times(other)),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(
        (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten.contiguous.default), _same
    ),
    aten._to_copy.default: _cast,
    aten.copy.default: _copy,
    **dict.fromkeys((aten.reshape.default, aten.expand.default, aten.permute.default, aten.unsqueeze.default), _moved),
    **dict.fromkeys((aten.transpose.int, aten.t.default), _moved),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _moved),
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.diag_embed.default: _diag_embed,
    aten.diagonal.default: _diagonal,
    **dict.fromkeys((aten.eye.default, aten.eye.m), _eye),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _number(0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _number(1)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _full),
    aten.scalar_tensor.default: _scalar,
}

#: Rules of operations on truth values.
LOGICAL: Mapping[Any, Rule] = _overloads(
    {"logical_not": LOGIC["not"], "bitwise_not": LOGIC["not"], "logical_xor": LOGIC["xor"], "bitwise_xor": LOGIC["xor"]}
    | {f"{kind}_{name}": LOGIC[name] for kind in ("logical", "bitwise") for name in ("and", "or")}
)

#: Rules of calls that compute nothing.
_MOVES: frozenset[Rule] = frozenset({_same, _cast, _moved, _select, _slice, _cat, _stack})
#: Rules that hold for truth values too.
OF_TRUTH_VALUES: frozenset[Rule] = _MOVES | {
    _copy,
    _full,
    _diagonal,
    _scalar,
    RULES[aten.mul.Tensor],
    RULES[aten.where.self],
}

#: Calls that read no number of their first operand.
_SHAPES_ONLY = frozenset(
    {aten.copy.default, aten.zeros_like.default, aten.new_zeros.default, aten.ones_like.default, aten.new_ones.default}
    | {aten.full_like.default}
)


def cancelled(node: fx.Node, arguments: Any, value: IndexSum) -> list[Atom]:
    """The tensors that a call reads and its sum does not: NaN in them would not cancel out, nor do their gradients."""
    if node.target in _SHAPES_ONLY:
        return []
    sums = [each for each in pytree.tree_leaves(arguments) if isinstance(each, IndexSum)]
    return sorted(
        a for a in frozenset[Atom]().union(*(s.atoms for s in sums)) - value.atoms if a.kind in ("given", "state")
    )


def moves_only(node: fx.Node) -> bool:
    """Whether a call moves or casts numbers, and computes none."""
    return RULES.get(node.target) in _MOVES


#: Operations without a rule that are linear all the same.
_LINEAR = frozenset(
    "getitem split split_with_sizes unbind chunk select slice index index_select gather cat stack roll flip cumsum tril triu "
    "select_scatter slice_scatter scatter convolution constant_pad_nd unfold as_strided repeat".split()
)


def name_of(node: fx.Node) -> str:
    """What a value is computed by; of one of several results, the call that gives them."""
    target = (node.args[0] if node.target is operator.getitem else node).target  # type: ignore[union-attr]
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", getattr(target, "__name__", "")))


def is_curved(node: fx.Node) -> bool:
    """Whether a call is none of those that are linear."""
    return node.target not in RULES and name_of(node) not in _LINEAR


#: A number times two products of disjoint indices.
Product: TypeAlias = "tuple[Term, Term, float]"
Outer: TypeAlias = "tuple[IndexSum, IndexSum]"


def products_of(products: Iterable[Product], dims: Dims) -> list[Outer]:
    """The sum of ``number * first * second`` as few pairs of sums: parallel rows of its matrix of numbers are one."""
    rows: dict[Term, dict[Term, float]] = {}
    columns: dict[Term, dict[Term, float]] = {}
    for first, second, number in products:
        rows.setdefault(first, {})[second] = rows.get(first, {}).get(second, 0.0) + number
        columns.setdefault(second, {})[first] = columns.get(second, {}).get(first, 0.0) + number
    by_row = _parallel(rows, dims)
    by_column = [(first, second) for second, first in _parallel(columns, dims)]
    return by_row if len(by_row) <= len(by_column) else by_column


def _parallel(rows: Mapping[Term, Mapping[Term, float]], dims: Dims) -> list[Outer]:
    found: dict[tuple[tuple[Term, float], ...], dict[Term, float]] = {}
    for term, row in rows.items():
        entries = sorted(row.items(), key=lambda entry: entry[0].order)
        lead = entries[0][1]
        direction = tuple((other, number / lead) for other, number in entries)
        found.setdefault(direction, {})[term] = lead
    return [(IndexSum(dims, first), IndexSum(dims, dict(second))) for second, first in found.items()]


def paired(
    erasures: Sequence[Outer], writes: Sequence[Outer], keys: frozenset[int]
) -> list[tuple[IndexSum, IndexSum | None, IndexSum | None]]:
    """``(left, right, erase)`` for ``left (right - erase S)``: what is erased and what is written under one key together.

    ``erasures`` are added to the state as they are, and so have the sign of a write.
    """
    found: list[tuple[IndexSum, IndexSum | None, IndexSum | None]] = []
    left = list(writes)
    for under, erase in erasures:
        scale, factors, core = _content(under, keys)
        for candidate in left:
            other_scale, other_factors, other_core = _content(candidate[0], keys)
            if other_core != core:
                continue
            left.remove(candidate)
            shared = common(factors, other_factors)
            whole = _times(core, shared, other_scale)
            written = _times(candidate[1], others(other_factors, shared), 1.0)
            found.append((whole, written, _times(erase, others(factors, shared), -scale / other_scale)))
            break
        else:
            found.append((under, None, erase.scaled(-1)))
    return found + [(under, right, None) for under, right in left]


def _content(whole: IndexSum, keys: frozenset[int]) -> tuple[float, tuple[Factor, ...], IndexSum]:
    """A number and the factors without keys that all products share, and what is left."""
    terms = sorted(whole.terms, key=lambda term: term.order)
    shared = common(*(term.factors for term in terms))
    outside = [each for each in shared if min(each.indices, default=0) >= 0 and not keys & set(each.indices)]
    core = mapped(whole, lambda term: term.without(outside))
    lead = core.terms[min(core.terms, key=lambda term: term.order)]
    return lead, tuple(outside), core.scaled(1 / lead)


def _times(whole: IndexSum, factors: Sequence[Factor], number: float) -> IndexSum:
    return mapped(whole, lambda term: Term((*term.factors, *factors), term.bound)).scaled(number)
