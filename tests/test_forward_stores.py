"""Values that go from step to step by way of a tensor that is filled: read as values, where that is the same."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from torch import Tensor

from lz_compile.passes.loops.roll.forward_stores import forward_stores

Program = Callable[[Tensor, Tensor], Tensor]
Place = Callable[[int], tuple[object, ...]]


def by_index(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for t in range(1, x.shape[1]):
        out[:, t] = a * out[:, t - 1] + x[:, t]
    return out


def by_ellipsis(x: Tensor, a: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        before = out[..., t - 1, :] if t else torch.zeros_like(x[:, 0])
        out[:, t, ...] = a * before + x[:, t]
    return out


def masked(x: Tensor, a: Tensor) -> Tensor:
    x = x.clone()
    for t in range(1, x.shape[1]):
        x[:, t].masked_fill_(a > 0.5, 0.0).add_(a * x[:, t - 1])
    return x


def two_back(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(2, x.shape[1]):
        out[:, t] = a * out[:, t - 1] + x[:, t] - 0.5 * out[:, t - 2]
    return out


def run(program: Program, x: Tensor, a: Tensor) -> Rewriting:
    torch._dynamo.reset()
    backend = Rewriting()
    got = torch.compile(program, backend=backend, fullgraph=True)(x, a)
    want = program(x, a)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)
    return backend


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 18, 3, dtype=torch.float64, requires_grad=True)
    # Eager has no gradient for the factor: what it multiplies is overwritten.
    return x, torch.rand(3, dtype=torch.float64)


@pytest.mark.parametrize("program", [by_index, by_ellipsis, masked])
def test_a_state_that_is_read_back_is_a_recurrence(program: Program) -> None:
    backend = run(program, *inputs())
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()


def test_two_steps_back_gives_the_same() -> None:
    run(two_back, *inputs())


def stored(seed: int) -> Program:
    """A recurrence over what is in a tensor already, kept in that tensor: ``x[t] <- x[t] + a x[t - 1]``, in one spelling."""
    rng = random.Random(seed)
    how = UPDATES[seed % len(UPDATES)]
    place = rng.choice(PLACES)
    start, is_backward = rng.choice((1, 2)), rng.random() < 0.4
    base = rng.choice(("clone", "input", "computed"))

    def program(x: Tensor, a: Tensor) -> Tensor:
        x = x.clone() if base == "clone" else x if base == "input" else x.cos()
        steps = range(start, x.shape[1])
        for t in reversed(range(x.shape[1] - start)) if is_backward else steps:
            how(x, place, t, x[place(t + start if is_backward else t - start)] * a)
        return x * 1 if base == "input" else x

    return program


def _added(x: Tensor, place: Place, t: int, value: Tensor) -> None:
    x[place(t)] += value


def _added_in_place(x: Tensor, place: Place, t: int, value: Tensor) -> None:
    x[place(t)].add_(value)


def _assigned(x: Tensor, place: Place, t: int, value: Tensor) -> None:
    x[place(t)] = x[place(t)] + value


def _twice(x: Tensor, place: Place, t: int, value: Tensor) -> None:
    now = x[place(t)]
    now *= 0.5
    now += value


def _chained(x: Tensor, place: Place, t: int, value: Tensor) -> None:
    x[place(t)].mul_(0.5).add_(value)


def _copied(x: Tensor, place: Place, t: int, value: Tensor) -> None:
    x[place(t)].copy_(x[place(t)].sin() + value)


UPDATES = (_added, _added_in_place, _assigned, _twice, _chained, _copied)
PLACES: tuple[Place, ...] = (
    lambda t: (slice(None), t),
    lambda t: (..., t, slice(None)),
    lambda t: (slice(None), slice(t, t + 1)),
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 36))])
def test_a_recurrence_over_what_a_tensor_holds_is_read_however_it_is_spelled(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, a = (torch.rand(2, 36, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    a = a[0, 0]
    program, given, own = stored(seed), x.clone(), x.clone()
    torch._dynamo.reset()
    backend = Rewriting()
    got = torch.compile(program, backend=backend, fullgraph=True)(given, a)
    torch.testing.assert_close(got, program(own, a), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(given, own, rtol=1e-9, atol=1e-9)
    assert {match.op for match in backend.report.matches if match.rewritten} == {"scan"}, backend.why_not()


VIEWS: dict[str, Callable[[Tensor], Callable[[int], Tensor]]] = {
    "index": lambda x: lambda t: x[:, t],
    "select": lambda x: lambda t: x.select(-2, t - x.shape[1]),
    "narrow": lambda x: lambda t: x.narrow(1, t, 1),
    "unbind": lambda x: x.unbind(1).__getitem__,
    "split": lambda x: x.split(1, dim=1).__getitem__,
}


@pytest.mark.parametrize("name", VIEWS)
def test_results_are_stored_by_any_view_of_one_step(name: str) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        out, state = torch.empty_like(x), x[:, 0]
        piece = VIEWS[name](out)
        for t in range(x.shape[1]):
            state = a * state + x[:, t]
            piece(t).copy_(state[:, None] if piece(t).dim() == x.dim() else state)
        return out

    x, a = torch.randn(2, 18, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    backend = Rewriting()
    got = torch.compile(program, backend=backend, fullgraph=True)(x, a)
    torch.testing.assert_close(got, program(x, a), rtol=1e-9, atol=1e-9)
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()


@pytest.mark.parametrize("name", ["index", "select", "narrow"])
def test_a_state_is_read_back_by_any_view_of_one_step(name: str) -> None:
    def program(x: Tensor, a: Tensor) -> Tensor:
        out = x.clone()
        piece = VIEWS[name](out)
        for t in range(1, x.shape[1]):
            piece(t).add_(a * piece(t - 1))
        return out

    backend = run(program, *inputs())
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()


def overwritten_later(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    seen = out[:, 0]
    out[:, 0] = x[:, 1]
    return seen * a + out.sum(1)


def overlapping(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    out[0] = x[1]
    return out[:, 0] * a


def through_a_view(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    out.transpose(0, 1)[0] = x[:, 1]
    return out[:, 0] * a


def value_changes(x: Tensor, a: Tensor) -> Tensor:
    out, value = torch.zeros_like(x), x[:, 0] * 2
    out[:, 0] = value
    value.mul_(3)
    return out[:, 0] * a + value


def broadcast(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = a
    return out[:, 0] * x[:, 0]


def narrowed(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[:, 0] = x[:, 0]
    return out[:, 0].double() * a


@pytest.mark.parametrize(
    "program", [overwritten_later, overlapping, through_a_view, value_changes, broadcast, narrowed]
)
def test_what_would_be_another_value_is_read_from_memory(program: Program) -> None:
    counts: list[int] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        counts.append(forward_stores(module.graph))
        module.recompile()
        return module.forward

    x, a = inputs()
    torch._dynamo.reset()
    got = torch.compile(program, backend=backend, fullgraph=True)(x, a)
    torch.testing.assert_close(got, program(x, a))
    assert counts == [0]


@pytest.mark.parametrize("steps", [2, 6])
def test_two_readers_keep_a_gradient_of_zeros_that_they_have_of_the_tensor_only(steps: int) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        out = x.clone()
        for t in reversed(range(steps)):
            h = out[:, t] + out[:, t]
            out[:, t] = y[:, t]
        return h

    x, y = torch.randn(2, 6, 3), torch.randn(2, 6, 3, requires_grad=True)
    backend = Rewriting()
    got = torch.compile(program, backend=backend, fullgraph=True)(x, y)
    assert got.requires_grad
    assert not backend.report.events, backend.why_not()


def overwritten(x: Tensor, a: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, 0] = a + x[:, 0]
    out[:, 1:] = x[:, 1:]
    out[:, 0] = a + x[:, 0]
    out[:, 0] = x[:, 0]
    return out[:, 0] * 2


def overwritten_all_over(x: Tensor, a: Tensor) -> Tensor:
    out = torch.zeros(2, 2, 3, dtype=x.dtype)
    for t in range(2):
        out[:, t] = a
    for t in range(2):
        out[:, t] = x[:, t]
    return out[:, 0] * out[:, 1]


def overwritten_and_detached(x: Tensor, a: Tensor) -> Tensor:
    out = torch.empty(2, 1, 3, dtype=x.dtype)
    out[:, 0] = a.exp()
    other = out[:, 0].sin().detach()
    out[:, 0] = x[:, 0]
    return out[:, 0] * other


@pytest.mark.parametrize("program", [overwritten, overwritten_all_over, overwritten_and_detached])
def test_what_was_overwritten_keeps_its_gradient_of_zeros(program: Program) -> None:
    x, a = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    backend = Rewriting()
    got = torch.compile(program, backend=backend, fullgraph=True)(x, a)
    gradients = torch.autograd.grad(got.sum(), (x, a), allow_unused=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(program(x, a).sum(), (x, a), allow_unused=True))
    assert gradients[1] is not None
    assert not gradients[1].any()
    assert not backend.report.events


def test_a_write_through_an_input_that_overlaps_is_a_write_to_what_is_filled() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for t in range(1, 12):
            x[:, t] = x[:, t - 1] * 0.5 + y[:, t]
            y.add_(x[:, t - 1 : t])
        return x, y

    def overlapping() -> tuple[Tensor, Tensor]:
        whole = torch.arange(72.0).sin().view(3, 24)
        return whole[:, :12], whole[:, 6:18]

    torch._dynamo.reset()
    backend = Rewriting(loops="roll")
    got = torch.compile(program, backend=backend, fullgraph=True)(*overlapping())
    torch.testing.assert_close(got, program(*overlapping()))
    assert not backend.report.events, backend.why_not()  # nothing that its proof had to refute


def test_a_cache_that_is_filled_from_its_beginning_is_read_as_what_was_put_there() -> None:
    """Keys as heads lie in a projection, with strides of their own: a cache that holds them too sees none of those."""

    def prefill(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query, key, value = (x * 2).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        keys[:, :, :5], values[:, :, :5] = key, value
        weights = (query @ keys[:, :, :5].transpose(-1, -2)).softmax(-1)
        return (weights @ values[:, :, :5]).transpose(1, 2).flatten(2)

    x, backend = torch.randn(2, 5, 48), Rewriting()
    caches = [[torch.zeros(2, 2, 16, 8) for _ in range(2)] for _ in range(2)]
    result = torch.compile(prefill, backend=backend, fullgraph=True)(x, *caches[0])
    torch.testing.assert_close(result, prefill(x, *caches[1]))
    torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0)
    assert "EDIT_REFUTED" not in [event.code for event in backend.report.events], backend.why_not()
    (graph,) = (each.graph for each in backend.graphs)
    stored = {node.args[0] for node in graph.nodes if node.target is operator.setitem}
    assert len(stored) == 2
    assert not [node for node in graph.nodes if node.target is operator.getitem and node.args[0] in stored]
