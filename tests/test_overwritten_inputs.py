"""What a graph overwrites is read before: states, statistics, caches, weights that decay; and gradients of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lz_compile.lowering import inductor
from lz_compile.lowering.overwritten_inputs import copy_what_is_overwritten, keep_what_was

PLACES = torch.tensor([1, 3])


def states(first: Tensor, second: Tensor, cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Read, then overwritten, as a whole, in part and by steps; and read once more."""
    gate = (x * weight).sigmoid()
    carried = gate * first.clone() + x
    first.copy_(carried.detach()[:1])
    rows = (second * 2).exp() * gate
    second.mul_(0.9).add_(carried.detach().mean(0), alpha=0.1)
    again = (carried * second).tanh()
    past = cache.clone()
    cache[1:3] = x.detach()
    return rows + again + (gate @ past.mT) @ past + (gate @ cache.clone().mT.sin()).sum(1, keepdim=True)


def written_in_part(first: Tensor, second: Tensor, cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Parts that are overwritten, and what the backward pass reads of the whole, through views too."""
    second[PLACES] = 0.0
    cache[1:3] = x.detach()
    first[0][2:4] = 1.0
    found = (x * weight).sin() * second + ((x @ cache.T) @ cache).tanh() * first[0].expand(2, -1)
    return found + x.exp() * cache[:2] + weight.cos() * cache[3].expand(2, -1)


def decayed(first: Tensor, second: Tensor, cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A weight that is made smaller ahead of its product, and states that move on."""
    with torch.no_grad():
        weight.mul_(0.5)
        first.copy_(second)
        second.copy_(x[0])
    return (x * weight).sin() * first + cache[:2].clone().cos() * weight


@pytest.mark.parametrize("function", [states, written_in_part, decayed], ids=lambda function: function.__name__)
def test_a_backward_pass_reads_what_was_there_before(function: Callable[..., Tensor]) -> None:
    def run(called: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        given = [torch.randn(1, 8), torch.randn(8), torch.randn(4, 8)]
        x, weight = torch.randn(2, 8).requires_grad_(), torch.randn(8).requires_grad_()
        found = []
        for _ in range(2):  # the second step goes on from what the first one left
            found += [y := called(*given, x, weight), *torch.autograd.grad(y.square().sum(), [x, weight])]
        return [*found, *given, weight.detach()]

    expected = run(function)
    torch.testing.assert_close(run(torch.compile(function, backend="layerzero")), expected, rtol=1e-4, atol=1e-4)


def test_what_only_updates_an_input_reads_no_copy() -> None:
    graph = fx.Graph()
    mean, x, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    smaller = graph.call_function(torch.ops.aten.mul.Tensor, (mean, 0.9))
    copied = graph.call_function(torch.ops.aten.copy_.default, (mean, smaller))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, tangent)), copied))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(2)
    keep_what_was(graph)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def moved(x: Tensor, y: Tensor) -> Tensor:
    """Values that lie in what they are written to: of inputs, of what is made here, through views, and added."""
    total = x.clone().sum()
    x[:, PLACES] = x.clone()[:, :2]
    y[1:] = y.clone()[:-1]
    y[4:8][1:] = y.clone()[4:7]
    made = x * 2
    made[2:6] = made[3:7].index_put((PLACES,), x[0])
    made.index_put_((PLACES,), made[:2].clone(), accumulate=True)
    made[:, PLACES] = made.clone()[:, 4:6]
    made.t()[PLACES] = made.clone().flip(0).t()[:2]
    made.chunk(2, -1)[1][PLACES] = made.clone().chunk(2, -1)[0][:2]
    return made + total


def turned(x: Tensor, y: Tensor) -> None:
    """An input that moves on when a part of it was overwritten, as a ring of states does."""
    x[:, PLACES] = 1.0
    x.copy_(x.roll(-1, 1))
    y.copy_(y.roll(1))
    y[PLACES] = 0.5
    y.mul_(y.flip(0))
    y.copy_(y.roll(3))


def rolled(x: Tensor, y: Tensor) -> None:
    """Inputs that become views of what is computed of them."""
    x.copy_(x.roll(1))
    y[0] = 1.0
    y.copy_(y.roll(3))


def functional(x: Tensor, y: Tensor) -> Tensor:
    """A result that an input becomes, without a clone in the program."""
    put = x.index_put((PLACES,), y[:2])
    x.copy_(put)
    return put


def complex_numbers(x: Tensor, y: Tensor) -> Tensor:
    """What has no order changes places, too."""
    numbers = torch.view_as_complex(x.view(64, 32, 2))
    numbers[:, PLACES] = numbers.clone()[:, :2]
    return numbers.abs() + y[:, :32]


def swapped(x: Tensor, y: Tensor) -> Tensor:
    """Two inputs that change places."""
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


def swapped_by_a_power(x: Tensor, y: Tensor) -> Tensor:
    """The same, where a power of one is the copy."""
    kept = x.pow(1)
    x.copy_(y)
    y.copy_(kept)
    return x - y


def copied_otherwise(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Copies that are spelled as casts and the like."""
    kept = x.to(x.dtype, copy=True)
    x.copy_(y)
    y.copy_(kept)
    x[:, PLACES] = x.repeat(1, 1)[:, :2]
    y[PLACES] = 1.0
    return x.to(x.dtype, copy=True), F.pad(y, (0, 0))


def handed_out(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Copies of overwritten inputs, as of a state that is noted, and what became of a copy while the input went another way."""
    x[:, PLACES] = 0.0
    then = x.clone()
    x[PLACES] = 1.0
    went = y.clone()
    went[2:] = 3.0
    y.mul_(2.0)
    return then, x.clone()[1:], went, went + 1


def unchanged(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Results with the numbers of an input or of another result, in memory of their own."""
    made, zeros, ones = y * 2, torch.zeros_like(x), torch.ones_like(x)
    views = (x + zeros).t(), (y * ones)[1:]
    return zeros + x, x - zeros, x / ones, x.pow(1), made + zeros, made, made * ones, *views


@torch.library.custom_op("test_overwritten_inputs::add_rolled", mutates_args=("x",))
def add_rolled(x: Tensor, other: Tensor) -> None:
    """Adds in two steps, so that an operand that lies where the result does is seen half-way."""
    x.mul_(2.0)
    x.add_(other.roll(1, 0))


def overwritten_by_an_operator(x: Tensor, y: Tensor) -> Tensor:
    """What an operator reads beside what it overwrites."""
    add_rolled(x, x.clone())
    add_rolled(y[:32], y.clone()[32:])
    add_rolled(y[:32], y[:32].clone())
    made = x * y
    add_rolled(made, made.clone().flip(0))
    return made


@pytest.mark.parametrize(
    "function",
    [
        moved,
        turned,
        rolled,
        functional,
        complex_numbers,
        swapped,
        copied_otherwise,
        handed_out,
        unchanged,
        overwritten_by_an_operator,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_overwritten_was_read_before_and_results_have_memory_of_their_own(
    function: Callable[..., object],
) -> None:
    def run(called: Callable[..., object]) -> list[Tensor]:
        torch.manual_seed(0)
        given = [torch.randn(64, 64), torch.randn(64, 64)]
        found = [each for each in tree_leaves(called(*given)) if each is not None]
        first = [each.clone() for each in (*found, *given)]
        for each in (*given, *found):  # each of another factor: what shares memory shows
            each.mul_(float(len(first) + 1))
            first.append(each.clone())
        return [*first, *found, *given]

    torch.testing.assert_close(run(torch.compile(function, backend="layerzero")), run(function))


def test_two_steps_read_a_bank_as_each_of_them_found_it() -> None:
    """What one step writes to a bank is written by the next again, ahead of both backward passes."""

    def step(bank: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        bank[PLACES] = x
        return (bank.clone() @ weight).sin().sum()

    def run(called: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        bank, weight = torch.randn(8, 8), torch.randn(8, 8).requires_grad_()
        losses = [called(bank, torch.randn(2, 8), weight) for _ in range(2)]
        return [bank, *(torch.autograd.grad(loss, weight)[0] for loss in losses)]

    torch.testing.assert_close(run(torch.compile(step, backend="layerzero")), run(step))


def test_tensors_without_numbers_are_results() -> None:
    """Inductor makes new ones of these, of which nothing is noted."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to("meta")
    result = torch.compile(model, backend="layerzero")(torch.randn(3, 8, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (3, 4))
    result.sum().backward()


def cached(cache: Tensor, x: Tensor) -> Tensor:
    """Keys that are written to a cache, which is read."""
    cache[:, PLACES] = x[:, :2]
    cache.index_copy_(0, PLACES, x[:2])
    return x @ cache.T


def cached_by_layers(cache: Tensor, x: Tensor) -> Tensor:
    """Keys that are written to a part of a part of a cache, by two views and by three."""
    layers = cache.view(4, 16, 64)
    layers[0][2:4] = x[:2]
    layers[1][:, PLACES] = x[:16, :2]
    layers[2][4:8][1:3] = x[:2]
    return x @ cache.T


def shifted(cache: Tensor, x: Tensor) -> Tensor:
    """What the program itself has not copied: eager reads what it has just written."""
    cache[:, PLACES.flip(0)] = cache[:, 1:][:, :2]
    return x @ cache.T


@pytest.mark.parametrize("cached", [cached, cached_by_layers, shifted])
def test_what_is_written_to_a_cache_is_not_copied(
    cached: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[object] = []

    def noted(graph: fx.Graph) -> None:
        copy_what_is_overwritten(graph)
        targets.extend(node.target for node in graph.nodes)

    monkeypatch.setattr(inductor, "copy_what_is_overwritten", noted)
    cache, x = torch.randn(64, 64), torch.randn(64, 64)
    expected = cached(cache.clone(), x)
    with torch._inductor.config.patch(force_disable_caches=True):  # else the graph may be there already
        torch.testing.assert_close(torch.compile(cached, backend="layerzero")(cache, x), expected)
    assert torch.ops.aten.index_put.default in targets
    assert torch.ops.aten.maximum.default not in targets
