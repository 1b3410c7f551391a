"""Loops in C++ over the kernels of a step: every way in which states, slices and results share memory, against Python's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import lz_compile as lz
from lz_compile.ground import events
from lz_compile.lowering import step_loop
from lz_compile.lowering.step_source import NotKernelsError

N, D = 3, 20
Step = Callable[..., Sequence[Tensor]]


def told(step: Step, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any]) -> str:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        states, slices = ([mode.from_tensor(each, static_shapes=True) for each in part] for part in (init, xs))
        fixed = [mode.from_tensor(each, static_shapes=True) if isinstance(each, Tensor) else each for each in others]
        given = [*states, *(each.select(0, 0) for each in slices), *fixed]
        body = make_fx(lambda *args: [each.clone() for each in step(*args)], select_decomp_table())(*given)
        made = body(*given)[len(init) :]
        results = [*states, *(each.new_empty((slices[0].shape[0], *each.shape)) for each in made)]
    return step_loop._step(body, states, slices, fixed, results)


def looped(text: str, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any] = ()) -> list[Tensor]:
    tensors = [each for each in others if isinstance(each, Tensor)]
    numbers = [each for each in others if not isinstance(each, Tensor)]
    found: list[Tensor] = torch.ops.layerzero.step_loop_kernel([*init, *xs, *tensors], numbers, text)
    return found


def expected(step: Step, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence[Any] = ()) -> list[Tensor]:
    carry, ys = list(init), []
    for now in zip(*xs, strict=True):
        found = step(*carry, *now, *others)
        carry = list(found[: len(init)])
        ys.append(found[len(init) :])
    return [*carry, *(torch.stack(each) for each in zip(*ys, strict=True))]


def spiking(h: Tensor, x: Tensor) -> Sequence[Tensor]:
    h = 0.9 * h + x
    spike = (h > 0.5).to(x.dtype)
    return h * (1 - spike), spike


def shared(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, x: Tensor) -> Sequence[Tensor]:
    """Twins, a delay, a state that is kept, two that change places; results that are states, slices and each other."""
    h = torch.relu(a - b + x)
    return h, h, a, d, torch.maximum(e, x), g, f, h, h, x, c, a + d, f


def normalised(h: Tensor, x: Tensor) -> Sequence[Tensor]:
    h = torch.softmax(h + x, -1)
    return h, h.sum(-1), torch.logsumexp(x, -1)


def window(h: Tensor, x: Tensor) -> Sequence[Tensor]:
    h = torch.cat([h[:, 1:], torch.tanh(x)[:, :1]], 1)
    return h, h.flip(1)


def counted(h: Tensor, n: Tensor, x: Tensor) -> Sequence[Tensor]:
    h = torch.where(x > 1, 0.0, torch.tanh(h) + x)
    n = torch.where(h > 0, n + 1, 0)
    return h, n, h * n, n > 1


def rounded(h: Tensor, x: Tensor) -> Sequence[Tensor]:
    h = (h.float() * 0.5 + x).bfloat16()
    return h, h


FLOAT, WHOLE = torch.float64, torch.int64
STEPS: dict[str, tuple[Step, Sequence[torch.dtype]]] = {
    "spiking": (spiking, [FLOAT]),
    "shared": (shared, [FLOAT] * 7),
    "normalised": (normalised, [FLOAT]),
    "window": (window, [FLOAT]),
    "counted": (counted, [FLOAT, WHOLE]),
    "rounded": (rounded, [torch.bfloat16]),
}


@pytest.mark.parametrize("name", STEPS)
def test_any_length_gives_what_the_steps_give_one_after_the_other(name: str) -> None:
    torch.manual_seed(0)
    step, kinds = STEPS[name]
    init = [torch.randn(N, D).to(each) for each in kinds]
    text = told(step, init, [torch.randn(8, N, D, dtype=torch.float64)], ())
    for steps in (1, 2, 3, 40):
        xs = [torch.randn(steps, N, D, dtype=torch.float64)]
        before = [each.clone() for each in (*init, *xs)]
        for found, wanted in zip(looped(text, init, xs), expected(step, init, xs), strict=True):
            torch.testing.assert_close(found, wanted)
        assert all(map(torch.equal, (*init, *xs), before))


def test_slices_lie_anywhere_and_what_stays_is_spread() -> None:
    def step(h: Tensor, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, times: int) -> Sequence[Tensor]:
        h = torch.tanh(h * scale + x * times) + shift
        return h, h * y[:, None]

    torch.manual_seed(0)
    init = [torch.randn(N, D)]
    others = [torch.rand(D), torch.tensor(0.5), 3]
    for steps in (5, 9):
        xs = [torch.randn(D, N, steps).permute(2, 1, 0), torch.randn(N, 2 * steps)[:, ::2].t()]
        text = told(step, init, xs, others)
        for found, wanted in zip(looped(text, init, xs, others), expected(step, init, xs, others), strict=True):
            torch.testing.assert_close(found, wanted)


def test_two_operands_may_be_one_tensor() -> None:
    def step(h: Tensor, x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
        h = torch.tanh(h + x * y - z)
        return h, h

    x = torch.randn(6, N, D)
    operands = ([x[0]], [x, x], [x[1]])
    for found, wanted in zip(looped(told(step, *operands), *operands), expected(step, *operands), strict=True):
        torch.testing.assert_close(found, wanted)


def test_states_that_several_threads_share() -> None:
    init, xs = [torch.randn(64, 700)], [torch.randn(12, 64, 700)]
    for found, wanted in zip(looped(told(spiking, init, xs, ()), init, xs), expected(spiking, init, xs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_steps_that_are_not_finite_stay_where_they_are() -> None:
    xs = [torch.randn(9, N, D, dtype=torch.float64)]
    xs[0][3, 1], xs[0][4, 2, 0], xs[0][5, 1] = torch.nan, torch.inf, 2.0  # above one: the state is dropped
    init = [torch.zeros(N, D, dtype=torch.float64), torch.zeros(N, D, dtype=torch.int64)]
    found, wanted = looped(told(counted, init, xs, ()), init, xs), expected(counted, init, xs)
    assert wanted[2].isnan().any()
    assert not wanted[0].isnan().any()
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other, equal_nan=True)


def test_what_a_kernel_raises_is_an_error() -> None:
    def step(h: Tensor, x: Tensor, place: Tensor) -> Sequence[Tensor]:
        h = h + x[:, place]
        return h, h

    init, xs = [torch.zeros(N, D)], [torch.randn(4, N, D)]
    text = told(step, init, xs, [torch.arange(D)])
    torch.testing.assert_close(looped(text, init, xs, [torch.arange(D)])[0], xs[0].sum(0))
    with pytest.raises(RuntimeError, match="out of bounds"):
        looped(text, init, xs, [torch.full((D,), D + 5)])


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda h, x: (torch.tanh(h @ x.t() @ x),) * 2, "products"),
        (lambda h, x: (torch.sort(h + x)[0],) * 2, "calls an operator"),
        (lambda h, x: (h + torch.rand_like(x),) * 2, "random"),
    ],
)
def test_steps_that_are_more_than_kernels_are_left_to_inductor(step: Step, why: str) -> None:
    init = [torch.randn(N, N)]
    with pytest.raises(NotKernelsError, match=why):
        told(step, init, [torch.randn(4, N, N)], ())


class Leaky(nn.Module):
    """Neurons with a leak each, and a soft reset."""

    def __init__(self) -> None:
        super().__init__()
        self.leak = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h, found = x.new_zeros(x.shape[0], D), []
        for t in range(x.shape[1]):
            h = torch.where(mask[:, t, None], torch.tanh(self.leak * h + x[:, t]) * torch.sigmoid(h), 0.0)
            found.append(h)
        return torch.stack(found, 1), h


def given(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, steps, D, requires_grad=True), torch.rand(batch, steps) > 0.1


def test_a_rolled_model_calls_them_forwards_and_backwards_for_all_lengths() -> None:
    torch._dynamo.reset()
    lz.clear_reports()
    model = Leaky()
    rolled = lz.roll_loops(Leaky(), *given(2, 6))
    rolled.load_state_dict(model.state_dict())
    compiled = torch.compile(rolled, backend="layerzero", dynamic=True)

    def trained(run: Any, x: Tensor, mask: Tensor) -> list[Tensor]:
        found, last = run(x, mask)
        leaves = [x, *(rolled if run is compiled else model).parameters()]
        return [found, last, *torch.autograd.grad(found.sin().sum() + last.sum(), leaves)]

    with events.collect() as happened:
        _, code = run_and_get_code(lambda: trained(compiled, *given(3, 11)))
        for batch, steps in ((3, 64), (4, 7), (2, 130)):
            inputs = given(batch, steps)
            for found, wanted in zip(trained(compiled, *inputs), trained(model, *inputs), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not happened
    assert sum("step_loop_kernel" in each for each in code) == 2  # a forward and a backward
    assert not any("while" in each for each in code)
    assert len(lz.reports()) == 1


def test_slices_and_tensors_that_are_spread_over_a_batch() -> None:
    torch._dynamo.reset()

    def loop(x: Tensor, scale: Tensor) -> Tensor:
        scale, x = torch.exp(scale).expand(x.shape[0], D), x.sin().unsqueeze(-1).expand(*x.shape, D)
        h, found = x.new_zeros(x.shape[0], D), []
        for t in range(x.shape[1]):
            h = torch.tanh(scale * h + x[:, t])
            found.append(h)
        return torch.stack(found, 1)

    inputs = torch.randn(3, 12), torch.randn(D)
    with events.collect() as happened, torch.no_grad():
        compiled = torch.compile(lz.roll_loops(loop, *inputs), backend="layerzero", dynamic=False)
        found, code = run_and_get_code(compiled, *inputs)
    assert not happened
    assert "step_loop_kernel" in code[0]
    torch.testing.assert_close(found, loop(*inputs))
