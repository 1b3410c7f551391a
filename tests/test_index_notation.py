"""An ``einsum`` that sums no products is spelled out as what it is: the same numbers, gradients and strides, and read by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from graphs import capture
from torch import Tensor

from lz_compile.passes.inlining.index_notation import spell_out_notation

#: Equations with the shapes of their tensors.
SPELLED: dict[str, tuple[tuple[int, ...], ...]] = {
    "bsd,bs->bsd": ((2, 3, 4), (2, 3)),
    "bs,bsd->dsb": ((2, 3), (2, 3, 4)),
    "...d,d->...d": ((2, 3, 4), (4,)),
    "b...,...b->...b": ((2, 3, 4), (3, 4, 2)),
    "i,j": ((3,), (4,)),
    "i,j,k->ijk": ((2,), (3,), (4,)),
    "bsd,bs,d->bsd": ((2, 3, 4), (2, 3), (4,)),
    "ij,ij->ij": ((3, 4), (1, 4)),
    ",ij->ji": ((), (3, 4)),
    "...d->...": ((2, 3, 4),),
    "abc->b": ((2, 3, 4),),
    "bhqd->bqhd": ((2, 3, 4, 5),),
    "a b->b": ((3, 4),),
    "a,b,c,->cab": ((2,), (3,), (4,), ()),
}


def spelled(function: Callable[..., Any], *inputs: Tensor) -> int:
    """How many calls are spelled out; results, gradients and strides are as before."""
    module = capture(function, *inputs)
    before = run(module, inputs)
    count = spell_out_notation(module.graph)
    module.graph.lint()
    module.recompile()
    for one, other in zip(before, run(module, inputs), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
        assert other.stride() == one.stride()
    return count


def run(module: torch.fx.GraphModule, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    given = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    (result,) = module(*given)
    leaves = [each for each in given if each.requires_grad]
    return [result, *(torch.autograd.grad(result.square().sum(), leaves) if leaves else ())]


#: Joins by other names, with the ranks of tensors that each joins.
JOINS: dict[str, tuple[int, ...]] = {
    "hstack": (1, 2, 3),
    "vstack": (1, 2, 3),
    "row_stack": (2,),
    "column_stack": (1, 2),
    "dstack": (2, 3),
}


@pytest.mark.parametrize(("name", "rank"), [(name, rank) for name, ranks in JOINS.items() for rank in ranks])
def test_joins_by_other_names_are_spelled_out(name: str, rank: int) -> None:
    inputs = [torch.randn((2, 3, 4)[-rank:], requires_grad=True) for _ in range(2)]
    assert spelled(lambda *given: getattr(torch, name)(given), *inputs) == 1


def test_a_join_of_vectors_as_planes_is_left_alone() -> None:
    assert spelled(lambda *given: torch.dstack(given), torch.randn(3), torch.randn(3)) == 0


def test_a_rotation_whose_halves_are_stacked_is_one() -> None:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.hstack((a * cos - b * sin, b * cos + a * sin))

    inputs = torch.randn(5, 8), torch.randn(5, 4), torch.randn(5, 4)
    torch._dynamo.reset()
    backend = Rewriting(lock={"rope": "torch.rope"})
    found = torch.compile(turned, backend=backend, fullgraph=True)(*inputs)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(found, turned(*inputs))


@pytest.mark.parametrize("equation", SPELLED)
def test_what_sums_no_products_is_spelled_out(equation: str) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in SPELLED[equation]]
    assert spelled(lambda *given: torch.einsum(equation, *given), *inputs) == 1


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bsd,bs->bd", ((2, 3, 4), (2, 3))),
        ("ii->i", ((3, 3),)),
        ("ij->ij", ((3, 4),)),
        ("ij,jk", ((3, 1), (1, 4))),
    ],
)
def test_other_equations_stay(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    assert spelled(lambda *given: torch.einsum(equation, *given), *inputs) == 0


def test_where_autocast_would_round_a_product_it_stays() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.einsum("bs,s->bs", a, b)

    assert spelled(function, torch.randn(3, 4), torch.randn(4)) == 0


def test_integers_keep_their_dtype() -> None:
    spelled(lambda a: torch.einsum("ab->a", a), torch.arange(6, dtype=torch.int32).view(2, 3))


def test_one_of_another_is_spelled_out_after_it() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bs,s->bs", torch.einsum("sb->bs", a), torch.einsum("sb->s", b))

    assert spelled(function, torch.randn(3, 4), torch.randn(3, 4)) == 3


def test_rotations_and_norms_are_read_through_it() -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        times = lambda x, table: torch.einsum("bhsp,sp->bhsp", x, table)  # noqa: E731 short
        return torch.cat((times(first, cos) - times(second, sin), times(second, cos) + times(first, sin)), -1)

    def normalised(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        root = torch.rsqrt(torch.einsum("...d->...", x * x) / 8 + 1e-3)
        return torch.einsum("...d,d->...d", torch.einsum("bhsd,bhs->bhsd", x, root), torch.cat((cos, sin), -1)[0])

    inputs = torch.randn(2, 3, 5, 8), torch.randn(5, 4), torch.randn(5, 4)
    for op, function in (("rope", rotated), ("norm", normalised)):
        torch._dynamo.reset()
        backend = Rewriting(lock={op: f"torch.{op}"})
        found = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        assert [(match.op, match.rewritten) for match in backend.report.matches] == [(op, True)], backend.why_not()
        assert not backend.report.events
        exact = function(*(each.double() for each in inputs))
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_gate_by_index_notation_is_one() -> None:
    gate, up = torch.randn(24, 8), torch.randn(24, 8)
    torch._dynamo.reset()
    backend = Rewriting(lock={"mlp": "torch.mlp"})
    run = torch.compile(
        lambda x: torch.einsum("bh,bh->bh", F.silu(x @ gate.T), x @ up.T), backend=backend, fullgraph=True
    )
    run(torch.randn(3, 8))
    (found,) = backend.report.matches
    assert found.rewritten, backend.why_not()
    assert found.attributes["is_gated"]


def test_a_softmax_that_is_summed_by_index_notation_is_one() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, k) / 4)
        return (weights / torch.einsum("bhqk->bhq", weights)[..., None]) @ v

    inputs = torch.randn(3, 2, 4, 12, 16)
    torch._dynamo.reset()
    backend = Rewriting()
    found = torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*inputs), rtol=1e-4, atol=1e-5)
