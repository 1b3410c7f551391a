"""A sum over a stack of two is the sum of two: the same bits and gradients, and a blend like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from graphs import capture
from torch import Tensor

from lz_compile.passes.inlining.stacked_terms import add_terms

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def _shares(c: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([c, 1 - c], dim)


#: Of two tensors ``[2, 5, 6]`` and a share ``[2, 1, 1]``.
MIXES: dict[str, Mix] = {
    "first": lambda a, b, c: (torch.stack([a, b]) * _shares(c)).sum(0),
    "last": lambda a, b, c: (_shares(c, -1) * torch.stack([a, b], -1)).sum(-1),
    "between": lambda a, b, c: (torch.stack([a, b], dim=2) * _shares(c, 2)).sum(2),
    "kept": lambda a, b, c: (torch.stack([a, b], 1) * _shares(c, 1)).sum(1, keepdim=True),
    "joined": lambda a, b, c: (torch.cat([a[None], b[None]]) * _shares(c)).sum(dim=0),
    "mean": lambda a, b, c: torch.stack([a * c, b]).mean(0),
    "bare": lambda a, b, c: torch.stack([a * c, b * (1 - c)]).sum(0),
    "softmax": lambda a, b, c: (torch.stack([a, b], -1) * torch.stack([c, -c], -1).softmax(-1)).sum(-1),
    "fewer_dimensions": lambda a, b, c: (torch.stack([a, b], 1) * c[0, 0] * _shares(c[:, 0], 1)[..., None]).sum(1),
    "in_float64": lambda a, b, c: (torch.stack([a, b]).double() * _shares(c)).sum(0),
}


def _read_twice(both: Tensor) -> Tensor:
    return both.sum(0) + both[0]


OTHERS: dict[str, Mix] = {
    "three": lambda a, b, c: torch.stack([a, b, a * b]).sum(0),
    "read_twice": lambda a, b, c: _read_twice(torch.stack([a, b])),
    "another_dimension": lambda a, b, c: torch.stack([a, b]).sum(1).sum(0),
    "all": lambda a, b, c: torch.stack([a, b]).sum((0, 1)),
    "no_stack": lambda a, b, c: (a * b).sum(0),
    "in_another_dtype": lambda a, b, c: torch.stack([a, b]).sum(0, dtype=torch.float64),
    "bent": lambda a, b, c: torch.stack([a, b]).exp().sum(0),
    "joined_with_nothing": lambda a, b, c: torch.cat([a[:0], a * b]).sum(0),
    "joined_along": lambda a, b, c: torch.cat([a, b], -1).sum(-1),
}


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 6), (2, 5, 6), (2, 1, 1))]
    found[0][0, 0, 0] = float("nan")
    return [each.requires_grad_() for each in found]


def added(mix: Mix, dtype: torch.dtype = torch.float32) -> int:
    module = capture(mix, *operands(dtype))
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    results = []
    for edited in (False, True):
        count = add_terms(module.graph) if edited else 0
        module.graph.lint()
        module.recompile()
        given = operands(dtype)
        (result,) = module(*(given["abc".index(name[2])] for name in names))
        results.append([result, *torch.autograd.grad(result.square().sum(), given, allow_unused=True)])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=0, equal_nan=True)
    for before, after in zip(*results, strict=True):  # what the share gets is summed up in another order
        slack = torch.finfo(dtype).eps * 20
        torch.testing.assert_close(after, before, rtol=slack, atol=slack, equal_nan=True)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_two_terms_are_added_and_no_bit_changes(mix: Mix, dtype: torch.dtype) -> None:
    assert added(mix, dtype) == 1


@pytest.mark.parametrize("mix", OTHERS.values(), ids=OTHERS)
def test_other_sums_stay(mix: Mix) -> None:
    assert added(mix) == 0


def _overwritten(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    both = torch.stack([a, b]) * _shares(c)
    a.add_(1)
    return both.sum(0)


def _without_gradients(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    with torch.no_grad():
        both = torch.stack([a, b]) * _shares(c)
    return both.sum(0) * a


@pytest.mark.parametrize(
    "mix",
    [
        _overwritten,
        _without_gradients,
        lambda a, b, c: torch.stack([a, b]).mul_(_shares(c)).sum(0),
        lambda a, b, c: (torch.stack([a.half(), b]) * c[0].half()).sum(0),
        lambda a, b, c: torch.stack([a.half(), b.half()]).mean(0),
    ],
    ids=["overwritten", "without_gradients", "in_place", "promoted", "mean_of_large"],
)
def test_what_would_be_another_value_at_the_sum_stays(mix: Mix) -> None:
    given = [each.detach().requires_grad_(mix is _without_gradients) for each in operands()]
    assert add_terms(capture(mix, *given).graph) == 0


def test_a_sum_among_what_is_summed_is_spelled_out_too() -> None:
    assert added(lambda a, b, c: torch.stack([torch.stack([a, b]).sum(0) * c, b]).sum(0)) == 2


@pytest.mark.parametrize("name", ["first", "last", "between", "kept", "softmax"])
def test_a_blend_over_a_stack_is_one(name: str) -> None:
    def blend(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return MIXES[name](a, b.detach(), c)

    torch._dynamo.reset()
    backend = Rewriting(lock={"blend": "torch.blend"}, strict=True)
    result = torch.compile(blend, backend=backend, fullgraph=True)(*operands())
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [("blend", True)], backend.why_not()
    torch.testing.assert_close(result, blend(*operands()), equal_nan=True)
