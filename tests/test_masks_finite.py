"""What a bias can hold: infinities, masking constants, or numbers of the order of scores. Both answers, each way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, nn

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.formula.expressions import INFINITY
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks.finite import is_bounded, is_finite
from tests.graphs import call_named, capture, effects_of, output_of

SIZE = 4
LOWEST = torch.finfo(torch.float32).min
Q, K = torch.rand(SIZE, 3), torch.rand(3, SIZE)
M = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
TABLE = torch.rand(SIZE, 7)
INDEX = torch.arange(SIZE)[:, None] + torch.arange(SIZE)[None, :]

Bias = Callable[[Tensor, Tensor], Tensor]


def bias_of(make: Bias, *, expand_masks: bool = False) -> tuple[Region, sympy.Expr]:
    """The bias that ``make(mask, anything)`` adds to scores, as recognisers see it."""

    def fn(q: Tensor, k: Tensor, m: Tensor, x: Tensor) -> Tensor:
        bias = make(m, x)
        return q @ k + bias

    module = capture(fn, Q, K, M, torch.rand(SIZE, SIZE))
    node = output_of(module)
    region = Region(effects_of(module), expand_masks=expand_masks)
    expression = region.express(node, fresh(shape_of(tensor_of(node))), next(iter(node.users)))
    scores = call_named(module, "matmul").node
    (product,) = (symbol for symbol, leaf in region.leaves.items() if leaf.node is scores)
    return region, sympy.expand(expression - product)


FINITE: dict[str, Bias] = {
    "filled_with_the_lowest": lambda m, x: torch.zeros(SIZE, SIZE).masked_fill(~m, LOWEST),
    "chosen": lambda m, x: torch.where(m, 0.0, LOWEST),
    "chosen_from_tensors": lambda m, x: torch.where(m, torch.zeros(SIZE, SIZE), torch.full((), -1e9)),
    "upper_triangle": lambda m, x: torch.full((SIZE, SIZE), LOWEST).triu(1),
    "reshaped": lambda m, x: torch.full((1, 1, SIZE, SIZE), LOWEST).triu(1)[0, 0].view(SIZE, SIZE).clone(),
    "expanded": lambda m, x: torch.zeros(SIZE).masked_fill(m[0], LOWEST)[None].expand(SIZE, SIZE).contiguous(),
    "widened": lambda m, x: torch.full((SIZE, SIZE), -1e4, dtype=torch.float16).triu(1).float(),
    "bfloat16_widened": lambda m, x: torch.full((SIZE, SIZE), -1e30, dtype=torch.bfloat16).triu(1).to(torch.float32),
    "of_ones": lambda m, x: torch.ones(SIZE, SIZE).masked_fill(m, 0.0),
    "full_like": lambda m, x: torch.full_like(x, -1e4).tril(),
    "new_full": lambda m, x: x.new_full((SIZE, SIZE), -1e4).tril(),
    "scalar_tensor_fill": lambda m, x: torch.zeros(SIZE, SIZE).masked_fill(m, torch.tensor(LOWEST)),
}

INFINITE_OR_UNKNOWN: dict[str, Bias] = {
    "input": lambda m, x: x,
    "filled_with_infinity": lambda m, x: torch.zeros(SIZE, SIZE).masked_fill(~m, float("-inf")),
    "chosen": lambda m, x: torch.where(m, 0.0, float("-inf")),
    "upper_triangle": lambda m, x: torch.full((SIZE, SIZE), float("-inf")).triu(1),
    "full_like": lambda m, x: torch.full_like(x, fill_value=float("-inf")).triu(1),
    "chosen_with_an_input": lambda m, x: torch.where(m, x, LOWEST),
    "scalar_tensor_fill": lambda m, x: torch.zeros(SIZE, SIZE).masked_fill(m, torch.tensor(float("-inf"))),
    "listed": lambda m, x: torch.tensor([0.0, 0.0, 0.0, float("-inf")]),
    "logarithm": lambda m, x: m.float().log(),
    "divided": lambda m, x: torch.ones(SIZE, SIZE) / m.float(),
    "in_place_fill": lambda m, x: torch.zeros(SIZE, SIZE).masked_fill_(~m, float("-inf")),
    "narrowed": lambda m, x: torch.full((SIZE, SIZE), LOWEST).triu(1).half(),
    "narrowed_to_bfloat16": lambda m, x: torch.full((SIZE, SIZE), LOWEST).triu(1).to(torch.bfloat16),
    "bfloat16_to_float16": lambda m, x: torch.full((SIZE, SIZE), -1e30, dtype=torch.bfloat16).triu(1).to(torch.float16),
    "beyond_its_dtype": lambda m, x: torch.where(m, torch.tensor(-1e30, dtype=torch.float16), 0.0).triu(),
    "beyond_float32": lambda m, x: torch.where(m, torch.tensor(-1e39), 0.0).triu(),
    "two_lowest": lambda m, x: torch.full((SIZE, SIZE), LOWEST).triu(1) + torch.full((SIZE, SIZE), LOWEST).tril(),
    "lowest_and_a_constant": lambda m, x: torch.full((SIZE, SIZE), LOWEST).triu(1) + LOWEST,
    "lowest_doubled": lambda m, x: torch.full((SIZE, SIZE), LOWEST).triu(1) * 2,
}


def _assigned(m: Tensor, x: Tensor) -> Tensor:
    bias = torch.zeros(SIZE, SIZE)
    bias[:, 2:] = float("-inf")
    return bias


def _assigned_where(m: Tensor, x: Tensor) -> Tensor:
    bias = torch.zeros(SIZE, SIZE)
    bias[m] = float("-inf")
    return bias


def _assigned_in_a_view(m: Tensor, x: Tensor) -> Tensor:
    bias = torch.zeros(SIZE, SIZE)
    bias.view(-1)[3] = float("-inf")
    return bias


def _viewed_after_assignment(m: Tensor, x: Tensor) -> Tensor:
    bias = torch.zeros(1, SIZE, SIZE)
    bias[..., 2:] = float("-inf")
    return bias.view(SIZE, SIZE)


def _copied(m: Tensor, x: Tensor) -> Tensor:
    bias = torch.zeros(SIZE, SIZE)
    bias.copy_(x)
    return bias


def _filled_below(m: Tensor, x: Tensor) -> Tensor:
    bias = torch.zeros(SIZE, SIZE)
    bias[1].fill_(float("-inf"))
    return bias


WRITTEN = [_assigned, _assigned_where, _assigned_in_a_view, _viewed_after_assignment, _copied, _filled_below]


@pytest.mark.parametrize("case", FINITE)
def test_a_bias_made_of_finite_numbers_is_finite(case: str) -> None:
    assert torch.isfinite(FINITE[case](M, torch.rand(SIZE, SIZE))).all(), "the example itself is wrong"
    assert is_finite(*bias_of(FINITE[case]))


@pytest.mark.parametrize("expand_masks", [False, True])
@pytest.mark.parametrize("case", INFINITE_OR_UNKNOWN)
def test_a_bias_that_may_hold_an_infinity_is_not_called_finite(case: str, expand_masks: bool) -> None:
    assert not is_finite(*bias_of(INFINITE_OR_UNKNOWN[case], expand_masks=expand_masks))


@pytest.mark.parametrize("expand_masks", [False, True])
@pytest.mark.parametrize("make", WRITTEN)
def test_a_bias_that_was_written_into_holds_what_was_written(make: Bias, expand_masks: bool) -> None:
    region, bias = bias_of(make, expand_masks=expand_masks)
    assert not is_finite(region, bias)
    assert not is_bounded(region, bias)


def test_no_bias_and_constants_are_finite_and_the_symbol_of_infinity_is_not() -> None:
    region, _ = bias_of(lambda m, x: x)
    assert is_finite(region, sympy.S.Zero)
    assert is_finite(region, sympy.Float(-1e30))
    assert not is_finite(region, -INFINITY)
    assert not is_bounded(region, -INFINITY)


class _Relative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 1)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k + self.table(torch.arange(SIZE)[:, None] + torch.arange(SIZE)[None, :])[..., 0] * 0.5


def test_a_bias_of_parameters_is_bounded() -> None:
    module = capture(_Relative(), Q, K)
    node = output_of(module)
    region = Region(effects_of(module))
    expression = region.express(node, fresh((SIZE, SIZE)), next(iter(node.users)))
    scores = call_named(module, "matmul").node
    (product,) = (symbol for symbol, leaf in region.leaves.items() if leaf.node is scores)
    assert is_bounded(region, expression - product)
    assert is_finite(region, expression - product)


class _Projected(nn.Module):
    """Scores and a bias of features that weights project: between them, and of each pair."""

    def __init__(self, bias: Callable[[_Projected, Tensor], Tensor], *, is_trained: bool = True) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, SIZE).requires_grad_(is_trained) for _ in range(2))
        self.bias = bias

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k + self.bias(self, q)


def _shifted(m: _Projected, x: Tensor) -> Tensor:
    """Scores of positions, shifted row by row as in a Conformer."""
    positions = (m.first(x) @ m.second(x).mT).chunk(1, 0)[0]
    padded = torch.cat([torch.zeros(SIZE, 1), positions], 1)
    return padded.view(SIZE + 1, SIZE)[1:].view_as(positions)


@pytest.mark.parametrize(
    ("bias", "is_trained", "bounded"),
    [
        (lambda m, x: m.first(x), True, True),
        (_shifted, True, True),
        (lambda m, x: m.first(x) * 0.5, True, True),
        (lambda m, x: m.first(x), False, False),
        (_shifted, False, False),
        (lambda m, x: x @ x.mT, True, False),
        (lambda m, x: m.first(x) @ x @ x.mT, True, False),
        (lambda m, x: m.first(x) + x @ x.mT, True, False),
        (lambda m, x: m.first(x) * -1e4, True, False),
        (lambda m, x: m.first(x).masked_fill(x[:, :1] > 0, -1e4), True, False),
        (lambda m, x: m.first(x).log(), True, False),
        (lambda m, x: 1 / m.first(x), True, False),
        (lambda m, x: m.first(x).sigmoid(), True, True),
        (lambda m, x: (m.first(x) / torch.tensor(3.0).sqrt()).flip(0).chunk(1)[0], True, True),
        (lambda m, x: (m.first(x) @ m.second(x).mT / 8).chunk(1)[0] / torch.tensor(3.0).sqrt().float(), True, True),
        (lambda m, x: (m.first(x) / torch.tensor(1e-4)).chunk(1)[0], True, False),
        (lambda m, x: (m.first(x) / x[:, :1]).chunk(1)[0], True, False),
        (lambda m, x: (x.mean() / torch.tensor(3.0) * m.first(x)).chunk(1)[0], True, False),
        (lambda m, x: torch.nn.functional.pad(m.first(x), (99, 0))[:, 99:].view(SIZE, SIZE), True, True),
        (lambda m, x: torch.nn.functional.pad(m.first(x), (1, 0), value=0.5)[:, :SIZE].view(SIZE, SIZE), True, True),
        (lambda m, x: torch.nn.functional.pad(m.first(x), (1, 0), value=-1e4)[:, :SIZE].view(SIZE, SIZE), True, False),
        (lambda m, x: torch.nn.functional.pad(x, (1, 0))[:, :SIZE].view(SIZE, SIZE), True, False),
    ],
)
@pytest.mark.parametrize("expand_masks", [False, True])
def test_what_trained_weights_project_is_no_mask(
    bias: Callable[[_Projected, Tensor], Tensor], is_trained: bool, bounded: bool, expand_masks: bool
) -> None:
    module = capture(_Projected(bias, is_trained=is_trained), Q, K)
    node = output_of(module)
    region = Region(effects_of(module), expand_masks=expand_masks)
    expression = region.express(node, fresh((SIZE, SIZE)), next(iter(node.users)))
    products = [each for each in module.graph.nodes if region.effects.name(each) == "matmul"]
    (scores,) = (symbol for symbol, leaf in region.leaves.items() if leaf.node is products[0])
    assert is_bounded(region, expression - scores) == bounded


BOUNDED: dict[str, Bias] = {
    "positions": lambda m, x: (torch.arange(SIZE)[None, :] - torch.arange(SIZE)[:, None]).float() * -0.5,
    "slopes": lambda m, x: torch.pow(torch.tensor(0.5), torch.arange(SIZE))[:, None] * torch.arange(SIZE).float(),
    "mask_itself": lambda m, x: m.float(),
}

UNBOUNDED: dict[str, Bias] = {
    "input": lambda m, x: x,
    "masking_constant": lambda m, x: (1 - m.float()) * -10000.0,
    "lowest": lambda m, x: torch.where(m, 0.0, LOWEST),
    "infinite": lambda m, x: torch.where(m, 0.0, float("-inf")),
    "scaled_input": lambda m, x: x * 0.5,
    "reciprocal_of_zero": lambda m, x: m.float().reciprocal(),
    "zero_to_the_minus_one": lambda m, x: torch.arange(SIZE).float().pow(-1.0).expand(SIZE, SIZE).clone(),
    "huge_exponential": lambda m, x: torch.exp2(m.float() * 999.0),
    "large_product": lambda m, x: m.float() * -500.0 * 500.0,
}


@pytest.mark.parametrize("case", BOUNDED)
def test_a_bias_of_positions_and_moderate_constants_is_bounded(case: str) -> None:
    assert is_bounded(*bias_of(BOUNDED[case]))


@pytest.mark.parametrize("case", UNBOUNDED)
def test_a_bias_that_may_mask_is_not_called_bounded(case: str) -> None:
    assert not is_bounded(*bias_of(UNBOUNDED[case]))
