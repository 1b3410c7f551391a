"""Sums of products in index notation: the algebra, held against PyTorch on random expressions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lz_compile.passes.formula.axes import axes_of, fresh, regroup
from lz_compile.passes.loops.recurrence.index_sum import IndexSum, refinement, substituted
from lz_compile.passes.loops.recurrence.index_terms import IDENTITY, Atom, Factor, Term, UnreadableError, normal_term
from lz_compile.passes.loops.recurrence.index_values import Source, Values


@dataclass(frozen=True)
class Pair:
    """A sum and the tensor that it must be."""

    whole: IndexSum
    tensor: torch.Tensor


class Tensors:
    """Atoms with random values."""

    def __init__(self) -> None:
        self.values: dict[Atom, torch.Tensor] = {}

    def atom(self, name: str, *shape: int, kind: str = "given") -> Pair:
        atom = Atom(name, kind)
        generator = torch.Generator().manual_seed(len(self.values))
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.values[atom] = value > 0 if kind == "mask" else value
        return Pair(IndexSum.of_atom(atom, shape), self.values[atom].double())

    def value(self, whole: IndexSum) -> torch.Tensor:
        places = [tuple(places) for places in whole.places]
        sizes = dict(enumerate(whole.sizes))
        like = next(iter(self.values.values())).double()
        values = Values(lambda atom: Source(self.values[atom], False), sizes, torch.float64, like)
        return values.of(whole, places).expand(whole.shape)

    def check(self, pair: Pair) -> None:
        assert pair.whole.shape == pair.tensor.shape
        torch.testing.assert_close(self.value(pair.whole), pair.tensor, rtol=1e-9, atol=1e-9)


def test_an_outer_product_of_a_vector_with_itself_has_two_indices():
    tensors = Tensors()
    k = tensors.atom("k", 4)
    outer = Pair(k.whole.unsqueezed(-1).times(k.whole.unsqueezed(0)), k.tensor[:, None] * k.tensor)
    assert next(iter(outer.whole.terms)).indices == {0, 1}
    tensors.check(outer)
    # Squared, summed and multiplied again by the same vector: no index may be taken for another one.
    inner = outer.whole.times(outer.whole).summed([0]).times(k.whole)
    tensors.check(Pair(inner, (outer.tensor**2).sum(0) * k.tensor))


def test_products_of_sums_keep_their_summed_indices_apart():
    tensors = Tensors()
    a, b = tensors.atom("a", 3, 3), tensors.atom("b", 3, 3)
    chain, whole = a.tensor, a.whole
    for _ in range(3):
        chain, whole = chain @ b.tensor @ a.tensor, whole.matmul(b.whole).matmul(a.whole)
    tensors.check(Pair(whole, chain))
    trace = whole.times(whole)
    tensors.check(Pair(trace.summed([0, 1]), (chain * chain).sum()))


def test_equal_sums_are_equal_whatever_the_order_in_which_they_were_made():
    tensors = Tensors()
    a, b, c = (tensors.atom(name, 3, 3).whole for name in "abc")
    assert a.matmul(b).matmul(c) == a.matmul(b.matmul(c))
    assert a.plus(b).matmul(c) == b.matmul(c).plus(a.matmul(c))
    assert a.times(b).summed([0, 1]) == b.times(a).summed([1]).summed([0])


def test_an_identity_disappears_in_products():
    tensors = Tensors()
    a, d = tensors.atom("a", 3, 4), tensors.atom("d", 3)
    assert IndexSum.identity(3).matmul(a.whole) == a.whole
    scaled = d.whole.diagonal_matrix().matmul(a.whole)
    assert scaled == d.whole.unsqueezed(-1).times(a.whole)
    assert not any(factor.atom == IDENTITY for term in scaled.terms for factor in term.factors)
    assert diagonal(d.whole.diagonal_matrix()) == d.whole
    assert IndexSum.identity(3).summed([1]) == IndexSum.of_number(1, (3,)).summed([]).expanded((3,))


def test_masks_are_zero_or_one():
    tensors = Tensors()
    m, a, b = tensors.atom("m", 3, kind="mask"), tensors.atom("a", 3), tensors.atom("b", 3)
    gone = IndexSum.of_number(1).plus(m.whole, -1)
    assert m.whole.times(m.whole) == m.whole
    assert not m.whole.times(gone).terms
    chosen = m.whole.times(a.whole).plus(gone.times(b.whole))
    tensors.check(Pair(chosen, torch.where(m.tensor.bool(), a.tensor, b.tensor)))
    tensors.values[Atom("a")][~m.tensor.bool()] = float("nan")
    assert tensors.value(chosen).isfinite().all()


def reshaped(whole: IndexSum, shape: Sequence[int]) -> IndexSum:
    result = fresh(shape)
    return whole.moved(result, regroup(axes_of(result), whole.shape))


def permuted(whole: IndexSum, order: Sequence[int]) -> IndexSum:
    source = fresh(whole.shape)
    return whole.moved(tuple(source[dim] for dim in order), source)


def diagonal(whole: IndexSum) -> IndexSum:
    """The diagonal of the first two dimensions, as the last one."""
    first, _, *rest = fresh(whole.shape)
    return whole.moved((*rest, first), (first, first, *rest))


def test_a_dimension_that_is_cut_in_one_operand_is_cut_in_the_other():
    tensors = Tensors()
    a, b = tensors.atom("a", 12, 2), tensors.atom("b", 3, 4, 2)
    merged = reshaped(b.whole, (12, 2))
    tensors.check(Pair(a.whole.times(merged), a.tensor * b.tensor.reshape(12, 2)))
    tensors.check(Pair(reshaped(a.whole, (3, 4, 2)).times(b.whole), a.tensor.reshape(3, 4, 2) * b.tensor))
    tensors.check(Pair(reshaped(merged.times(a.whole), (6, 4)), (b.tensor.reshape(12, 2) * a.tensor).reshape(6, 4)))
    assert refinement([12], [3, 4]) == [(3, 4)]
    with pytest.raises(UnreadableError, match="does not regroup"):
        refinement([6], [4])


def test_an_atom_is_replaced_by_what_it_stands_for():
    tensors = Tensors()
    a, b, c = tensors.atom("a", 3, 3), tensors.atom("b", 3, 3), tensors.atom("c", 3, 3)
    new = IndexSum.of_atom(Atom("new"), (3, 3))
    read = c.whole.matmul(new).plus(b.whole)
    assert substituted(read, Atom("new"), a.whole.matmul(b.whole)) == c.whole.matmul(a.whole).matmul(b.whole).plus(
        b.whole
    )


def test_an_index_that_nothing_has_counts_its_size():
    whole, number = normal_term([Factor(Atom("a"), (0,))], [5])
    assert (whole, number) == (Term((Factor(Atom("a"), (0,)),)), 5.0)


SIZES = (1, 2, 3)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Tensors, Pair]:
    """A random expression of operations that have a rule, over few atoms, so that they meet themselves."""
    tensors = Tensors()
    shapes = list(itertools.product(SIZES, SIZES, SIZES))
    pool = [
        tensors.atom(f"t{i}", *draw(st.sampled_from(shapes)), kind=draw(st.sampled_from(["given", "mask"])))
        for i in range(3)
    ]
    for _ in range(draw(st.integers(1, 6))):
        one, other = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        kind = draw(st.sampled_from(["permute", "sum", "times", "plus", "matmul", "reshape", "expand", "diagonal"]))
        found = _applied(draw, kind, one, other)
        if found is not None and len(found.whole.terms) <= 12:
            pool.append(found)
    return tensors, pool[-1]


def _applied(draw: st.DrawFn, kind: str, one: Pair, other: Pair) -> Pair | None:
    rank = one.tensor.dim()
    if kind == "permute":
        order = draw(st.permutations(range(rank)))
        return Pair(permuted(one.whole, order), one.tensor.permute(order))
    if kind == "sum" and rank:
        dim, keeps = draw(st.integers(0, rank - 1)), draw(st.booleans())
        return Pair(one.whole.summed([dim], keeps=keeps), one.tensor.sum(dim, keepdim=keeps))
    if kind == "reshape":
        shape = (one.tensor.numel(),)
        return Pair(reshaped(one.whole, shape), one.tensor.reshape(shape))
    if kind == "expand":
        shape = (2, *one.tensor.shape)
        return Pair(one.whole.expanded(shape), one.tensor.expand(shape)) if rank < 4 else None
    if kind == "diagonal" and rank >= 2 and one.tensor.shape[0] == one.tensor.shape[1]:
        return Pair(diagonal(one.whole), one.tensor.diagonal(dim1=0, dim2=1))
    try:
        shape = torch.broadcast_shapes(one.tensor.shape, other.tensor.shape)
    except RuntimeError:
        shape = None
    if kind == "times" and shape is not None:
        return Pair(one.whole.times(other.whole), one.tensor * other.tensor)
    if kind == "plus" and shape is not None:
        return Pair(one.whole.plus(other.whole, -2), one.tensor - 2 * other.tensor)
    if kind == "matmul" and rank >= 2 and rank == other.tensor.dim():
        turned = other.tensor.transpose(-1, -2)
        order = [*range(rank - 2), rank - 1, rank - 2]
        fits = one.tensor.shape[-1] == turned.shape[-2] and one.tensor.shape[:-2] == turned.shape[:-2]
        return Pair(one.whole.matmul(permuted(other.whole, order)), one.tensor @ turned) if fits else None
    return None


@settings(max_examples=150, deadline=None)
@given(expressions())
def test_random_expressions_have_the_values_that_pytorch_computes(case):
    tensors, pair = case
    tensors.check(pair)
