"""Masks of dropout that are mixed of a seed and an element's place, in the place of Inductor's generator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import inductor_prims  # noqa: F401 - defines the operators that are asked for below
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lz_compile.lowering.dropping import mark_masks, mix_masks

RANDOM = torch.ops.prims.inductor_random.default


def mixed(sizes: Any, p: float, dtype: torch.dtype | None = None, test: Any = torch.gt) -> Any:
    """The graph of a mask of some sizes over a seed, and whether Inductor's generator is left in it."""

    def mask(seed: torch.Tensor) -> torch.Tensor:
        drawn = RANDOM(list(sizes), seed, "rand")
        return test(drawn if dtype is None else torch.ops.prims.convert_element_type(drawn, dtype), p)

    module = make_fx(mask, tracing_mode="fake")(torch.tensor(1))
    mark_masks(module.graph)
    mix_masks(module.graph, select_decomp_table())
    module.graph.lint()
    module.recompile()
    return module, bool(module.graph.find_nodes(op="call_function", target=RANDOM))


def seeds(count: int) -> list[torch.Tensor]:
    return [*torch.randint(torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max, (count,)).unbind(0)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [(300, 240), (4, 150, 128), (70000,), (2000, 5, 7), (64, 48, 3, 8)], ids=str)
def test_a_mask_drops_its_share_and_no_neighbours_agree(sizes, p, dtype):
    module, is_left = mixed(sizes, p, dtype)
    assert not is_left
    assert len(module.graph.nodes) < 40, "what Inductor would spell out again wherever it is read is one call"
    masks = torch.stack([module(seed) for seed in seeds(8)]).double()
    assert masks.shape == (8, *sizes)
    count, spread = masks.numel(), (p * (1 - p)) ** 0.5
    assert abs(masks.mean().item() - (1 - p)) < 5 * spread / count**0.5 + 2**-16
    noise = (masks - (1 - p)) / spread
    for dim in range(noise.dim()):
        for step in {1, 2, 8} & {*range(noise.shape[dim])}:
            ahead, behind = (
                noise.narrow(dim, step, noise.shape[dim] - step),
                noise.narrow(dim, 0, noise.shape[dim] - step),
            )
            agreement = (ahead * behind).mean().item()
            assert abs(agreement) < 6 / ahead.numel() ** 0.5 + 1e-3, (dim, step)


def test_rows_and_columns_drop_as_many_as_chance_would():
    module, _ = mixed((500, 400), 0.2)
    masks = torch.stack([module(seed) for seed in seeds(8)]).double()
    for dim, count in ((1, 500), (2, 400)):
        sums = masks.sum(dim)
        expected = count * 0.2 * 0.8
        assert abs(sums.var().item() / expected - 1) < 0.15


def test_blocks_of_rows_and_columns_agree_by_chance_only():
    module, _ = mixed((256, 256), 0.5)
    masks = torch.stack([module(seed) for seed in seeds(16)]).double() * 2 - 1
    for rows, columns in itertools.product((1, 4, 32), repeat=2):
        corners = masks[:, :-rows, :-columns] * masks[:, rows:, :-columns] * masks[:, :-rows, columns:]
        agreement = (corners * masks[:, rows:, columns:]).mean().item()
        assert abs(agreement) < 6 / corners.numel() ** 0.5 + 4e-3, (rows, columns)


def test_seeds_decide_and_nothing_else_does():
    module, _ = mixed((300, 240), 0.5)
    first, second = seeds(2)
    assert torch.equal(module(first), module(first))
    for one, other in ((first, second), (first, first + 1), (first, first + 2**31), (first, first ^ 2**61)):
        assert abs((module(one) == module(other)).double().mean().item() - 0.5) < 0.02


@pytest.mark.parametrize(
    "given",
    [{"sizes": (200, 200)}, {"p": 1e-6}, {"p": 0.9995}, {"test": torch.lt}, {"test": lambda drawn, p: drawn + p}, {"test": lambda drawn, p: (drawn > p) * drawn}],
    ids=["few", "rarely dropped", "rarely kept", "another test", "the numbers", "both"],
)  # fmt: skip
def test_other_random_numbers_are_inductors(given):
    assert mixed(**{"sizes": (300, 240), "p": 0.5, **given})[1]


def compiled_dropout(**config: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x: F.dropout(x, 0.25), backend="layerzero", **config)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_dropout_drops_again_what_it_dropped(dynamic):
    call, x = compiled_dropout(dynamic=dynamic), torch.randn(160, 512).requires_grad_()
    torch.manual_seed(0)
    first = call(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    second = call(x)
    torch.manual_seed(0)
    assert torch.equal(call(x), first)
    assert torch.equal(gradient != 0, first != 0)
    torch.testing.assert_close(gradient * x, first)
    assert abs((first == 0).double().mean().item() - 0.25) < 0.02
    assert abs(((first == 0) == (second == 0)).double().mean().item() - (0.25**2 + 0.75**2)) < 0.02


@pytest.mark.slow
def test_a_checkpoint_drops_the_same_again_where_its_forward_gives_the_numbers_too():
    def function(x):
        drawn = torch.rand_like(x)
        return x.sin() * (drawn > 0.5), drawn

    torch._dynamo.reset()
    x = torch.rand(256, 512).requires_grad_()
    compiled = torch.compile(lambda x: checkpoint(function, x, use_reentrant=False), backend="layerzero")
    result, drawn = compiled(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, x.cos() * (drawn > 0.5))
    torch.testing.assert_close(result, x.sin() * (drawn > 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 0.5])
def test_a_backward_drops_the_same_where_little_memory_is_kept_for_it(budget):
    x, other = torch.rand(256, 512).requires_grad_(), torch.rand(256, 512)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        call = torch.compile(lambda x: F.dropout(x * other, 0.25).sin() + other, backend="layerzero")
        torch.manual_seed(0)
        result = call(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient != 0, result != other)


@pytest.mark.slow
def test_whoever_asks_for_the_numbers_of_eager_code_gets_them():
    x = torch.randn(160, 512)
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(0)
        found = compiled_dropout()(x)
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(x, 0.25))
