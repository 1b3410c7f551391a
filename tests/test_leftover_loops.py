"""Loops that no kernel runs (their steps are not affine) as one compiled step: results and gradients are the loop's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting, Traced
from torch import Tensor
from torch._inductor import config as inductor_config

from lz_compile import reports
from lz_compile.ground.events import collect
from lz_compile.lowering import inductor

B, T, D = 2, 9, 3

#: States, this step's input and the weights, to the states after the step and what it gives.
Step = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[list[Tensor], Tensor]]


def elman(states: Sequence[Tensor], x: Tensor, w: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    h = torch.tanh(F.linear(x, w[0][:D]) + F.linear(states[0], w[1][:D], w[2][:D]))
    return [h], h


def gru(states: Sequence[Tensor], x: Tensor, w: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    given, held = (
        F.linear(x, w[0][: 3 * D], w[2][: 3 * D]).chunk(3, -1),
        F.linear(states[0], w[1][: 3 * D]).chunk(3, -1),
    )
    reset, update = torch.sigmoid(given[0] + held[0]), torch.sigmoid(given[1] + held[1])
    new = torch.tanh(given[2] + reset * held[2])
    h = (1 - update) * new + update * states[0]
    return [h], h


def lstm(states: Sequence[Tensor], x: Tensor, w: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    h, c = states
    i, f, g, o = (F.linear(x, w[0], w[2]) + F.linear(h, w[1])).split(D, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return [h, c], h


def slstm(states: Sequence[Tensor], x: Tensor, w: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    h, c, n, m = states
    i, f, z, o = (F.linear(x, w[0], w[2]) + F.linear(h, w[1])).chunk(4, dim=-1)
    most = torch.maximum(F.logsigmoid(f) + m, i)
    keep, write = torch.exp(F.logsigmoid(f) + m - most), torch.exp(i - most)
    c = keep * c + write * torch.tanh(z)
    n = keep * n + write
    h = torch.sigmoid(o) * c / n.clamp(min=0.1)
    return [h, c, n, most], h


def cell_in_half(states: Sequence[Tensor], x: Tensor, w: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """One state that holds two, of which one squashes the other."""
    h, c = states[0].chunk(2, -1)
    c = torch.sigmoid(F.linear(x, w[0][:D]) + h) * c + x
    h = torch.tanh(c)
    return [torch.cat([h, c], -1)], h


@dataclass(frozen=True)
class Case:
    """A loop in one spelling."""

    loop: Callable[..., tuple[Tensor, ...]]
    notes: str


STEPS: dict[str, tuple[Step, tuple[int, ...]]] = {
    "elman": (elman, (D,)),
    "gru": (gru, (D,)),
    "lstm": (lstm, (D, D)),
    "slstm": (slstm, (D, D, D, D)),
    "cell_in_half": (cell_in_half, (2 * D,)),
}
OUTPUTS = ("all", "last", "several", "chosen")


def spelled(seed: int) -> Case:
    """The loop that a seed stands for."""
    rng = random.Random(seed)
    name = list(STEPS)[seed % len(STEPS)]
    step, widths = STEPS[name]
    output = OUTPUTS[(seed // len(STEPS)) % len(OUTPUTS)]
    order = rng.choice((range(T), range(T - 1, -1, -1)))
    is_zero = rng.random() < 0.3

    def loop(x: Tensor, first: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        states = [first.new_zeros(B, width) if is_zero else first[:, :width].tanh() for width in widths]
        kept, held = [], []
        for t in order:
            states, y = step(states, x[:, t], weights)
            kept.append(y)
            held.append(states[-1] * 0.5)
        if output == "last":
            return (kept[-1],)
        if output == "chosen":
            return kept[2] + held[4][:, :D], *states
        joined = torch.stack(kept, 1)
        return (joined, torch.stack(held), *states) if output == "several" else (joined,)

    return Case(loop, f"{name} {output} {order} {is_zero}")


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, T, D), (B, 2 * D), (4 * D, D), (4 * D, D), (4 * D,))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5 for shape in shapes]
    return [each.requires_grad_() for each in found]


def check(case: Case, got: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Compare results, and gradients of inputs, of the first state and of weights."""
    want = case.loop(*given)
    torch.testing.assert_close(tuple(got), want, rtol=1e-9, atol=1e-9)
    weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in want]
    gradients = [
        torch.autograd.grad(results, given, weights, allow_unused=True, materialize_grads=True)
        for results in (tuple(got), want)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(5, 20))]
)
def test_a_loop_of_one_compiled_step_has_the_gradients_of_the_loop(seed: int) -> None:
    case, given = spelled(seed), inputs()
    torch._dynamo.reset()
    backend = Rewriting(loops="roll")
    got = torch.compile(case.loop, backend=backend, fullgraph=True)(*given)
    assert [loop.rolled for loop in backend.report.loops] == [True], (case.notes, backend.why_not())
    assert not any(match.rewritten for match in backend.report.matches), case.notes
    assert any(miss.reason.code == "NOT_AFFINE" for miss in backend.report.near_misses), backend.why_not()
    check(case, got, given)


@pytest.mark.sampled("8")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 8, 13, 9])
def test_the_same_through_inductor(seed: int) -> None:
    case, given = spelled(seed), inputs()
    torch._dynamo.reset()
    got = torch.compile(case.loop, backend="layerzero", options={"layerzero.loops": "roll"}, fullgraph=True)(*given)
    assert [loop.rolled for loop in reports()[-1].loops] == [True], case.notes
    assert not reports()[-1].events
    check(case, got, given)


#: A state, a slice and a matrix, to the state after the step and what it gives, which its backward keeps as well.
KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a squashed state that is multiplied": lambda h, x, w: _given(
        torch.tanh(h @ w + x), lambda y: torch.sigmoid(y @ w)
    ),
    "a product that is multiplied": lambda h, x, w: _given((h @ w + x) @ w, lambda y: torch.softmax(y * x, -1)),
    "the next state": lambda h, x, w: (torch.exp(-(h @ w + x).square()),) * 2,
    "the next state, and its product": lambda h, x, w: (y := torch.exp(-(h @ w + x).square()), y @ w),
    "a maximum beside an affine state": lambda h, x, w: _given(torch.maximum(h, w), lambda y: torch.sigmoid(x) * y),
    "a state that was selected": lambda h, x, w: _given(torch.where(x > 0, h, w), lambda y: torch.tanh(y) * y),
}


def _given(y: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return after(y), y


@pytest.mark.sampled
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_step_gives_may_be_what_its_backward_keeps(name: str, is_apart: bool) -> None:
    def loop(x: Tensor, first: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h, affine, kept = first, first, []
        for t in range(T):
            h, y = KEPT[name](h, x[:, t], w)
            affine = torch.sigmoid(x[:, t]) * affine + y if is_apart else y
            kept.append(affine)
        return h, torch.stack(kept, 1)

    generator = torch.Generator().manual_seed(0)
    shapes = ((D, T, D), (D, D), (D, D))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    torch._dynamo.reset()
    backend = Traced(loops="roll", lock={"scan": "lz.rolled_scan"})
    got = torch.compile(loop, backend=backend, fullgraph=True)(*given)
    assert [each.rolled for each in backend.report.loops] == [True], backend.why_not()
    assert [match.rewritten for match in backend.report.matches] == [True] * is_apart, backend.why_not()
    assert not backend.report.events, backend.why_not()
    check(Case(loop, name), got, given)


def squashed(x: Tensor, w: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.tanh(h @ w + x[:, t])
    return h


@pytest.mark.parametrize("is_affine", [False, True])
def test_loops_whose_backward_compiled_autograd_compiles_are_no_scans(is_affine: bool) -> None:
    def decayed(x: Tensor, w: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.sigmoid(x[:, t]) * h + x[:, t] @ w
        return h

    loop, backend = decayed if is_affine else squashed, Traced(loops="roll", lock={"scan": "lz.rolled_scan"})
    x, w = torch.randn(2, 14, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loop(x, w).sin().sum().backward(), backend=backend)()
    (first, *_) = backend.report.loops
    assert (first.rolled, first.reason and first.reason.code) == (is_affine, None if is_affine else "COMPILED_AUTOGRAD")
    assert [match.rewritten for match in backend.report.matches] == [True] * is_affine, backend.why_not()
    torch.testing.assert_close((x.grad, w.grad), torch.autograd.grad(loop(x, w).sin().sum(), (x, w)))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch 2.11's wrapper hands a loop too few inputs")
@pytest.mark.parametrize("fails", [False, True])
def test_loops_on_a_cpu_call_their_kernels_from_c(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_inner, wrapped = inductor.compile_fx_inner, []

    def compiling(module: torch.fx.GraphModule, inputs: Sequence[object], **given: object) -> object:
        wrapped.append(bool(given.get("cpp_wrapper")))
        if fails and wrapped[-1]:
            module.graph = torch.fx.Graph()
            raise RuntimeError("no such wrapper")
        return compile_inner(module, inputs, **given)

    monkeypatch.setattr(inductor, "compile_fx_inner", compiling)
    x, w = torch.randn(2, 40, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True), collect() as events:
        found = torch.compile(squashed, backend="layerzero", options={"layerzero.loops": "roll"})(x, w)
        grads = torch.autograd.grad(found.sin().sum(), (x, w))
    assert wrapped == ([True, False, True, False] if fails else [True, True])
    assert [event.code for event in events] == ["LOOP_WRAPPER_FAILED"] * 2 * fails
    assert "no such wrapper" in "".join(map(str, events)) or not fails
    expected = squashed(x, w)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sin().sum(), (x, w)))


def test_what_has_no_loop_is_called_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_inner, wrapped = inductor.compile_fx_inner, []

    def compiling(*given: object, **named: object) -> object:
        wrapped.append(bool(named.get("cpp_wrapper")))
        return compile_inner(*given, **named)

    monkeypatch.setattr(inductor, "compile_fx_inner", compiling)
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1, backend="layerzero")(torch.randn(4))
    assert wrapped == [False]
