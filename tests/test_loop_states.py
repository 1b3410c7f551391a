"""Loops whose states are not what kernels run: halves of one tensor, pairs that depend on each other, complex numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from backends import Rewriting
from torch import Tensor

B, T, D = 2, 18, 3

Loop = Callable[..., tuple[Tensor, Tensor]]
#: The parts of a state and this step's inputs, to the parts after the step.
Update = Callable[[Sequence[Tensor], Tensor, Tensor], list[Tensor]]


def averages(parts: Sequence[Tensor], x: Tensor, a: Tensor) -> list[Tensor]:
    return [a * part + (1 + i) * x for i, part in enumerate(parts)]


def cascade(parts: Sequence[Tensor], x: Tensor, a: Tensor) -> list[Tensor]:
    """Every part smooths the one before it: no two depend on each other."""
    found = [a * parts[0] + x]
    for part in parts[1:]:
        found.append(0.5 * part + found[-1])
    return found


def rotation(parts: Sequence[Tensor], x: Tensor, a: Tensor) -> list[Tensor]:
    re, im = parts[:2]
    return [0.9 * (a.cos() * re - a.sin() * im) + x, 0.9 * (a.cos() * im + a.sin() * re), *parts[2:]]


def second_order(parts: Sequence[Tensor], x: Tensor, a: Tensor) -> list[Tensor]:
    new = 0.5 * a * parts[0] - 0.3 * parts[1] + x
    return [new, parts[0], *parts[2:]]


def oscillator(parts: Sequence[Tensor], x: Tensor, a: Tensor) -> list[Tensor]:
    """Momentum with a spring: the velocity reads where the position is, and the other way round."""
    velocity = 0.8 * parts[1] + x - 0.1 * a * parts[0]
    return [parts[0] + 0.1 * velocity, velocity, *parts[2:]]


def exchange(parts: Sequence[Tensor], x: Tensor, a: Tensor) -> list[Tensor]:
    return [parts[1] * a, 0.7 * parts[0] + 0.1 * parts[1] + x, *parts[2:]]


@dataclass(frozen=True)
class Case:
    """A loop in one spelling, how many scans it is, and what was drawn."""

    loop: Loop
    scans: int
    notes: str


#: How many scans a step of two parts, and of three, is.
UPDATES: dict[str, tuple[Update, int, int]] = {
    "averages": (averages, 2, 3),
    "cascade": (cascade, 2, 3),
    "rotation": (rotation, 1, 1),
    "second_order": (second_order, 1, 1),
    "oscillator": (oscillator, 1, 1),
    "exchange": (exchange, 1, 1),
}
JOINS = ("cat", "stack", "apart")
CUTS = ("chunk", "split", "slices", "unbind", "select")


def _cut(state: Tensor, how: str, dim: int, count: int, *, stacked: bool) -> list[Tensor]:
    if how == "unbind" and stacked:
        return list(state.unbind(dim))
    if how in ("select", "unbind") and stacked:
        return [state.select(dim, i) for i in range(count)]
    size = state.shape[dim] // count
    if how == "chunk":
        found = list(state.chunk(count, dim))
    elif how == "split":
        found = list(state.split(size, dim))
    else:
        found = [state.narrow(dim, i * size, size) for i in range(count)]
    return [each.squeeze(dim) for each in found] if stacked else found


def spelled(seed: int) -> Case:
    """The loop that a seed stands for."""
    rng = random.Random(seed)
    name = list(UPDATES)[seed % len(UPDATES)]
    update, two, _ = UPDATES[name]
    count = rng.choice((2, 3)) if name in ("averages", "cascade") else 2
    join, cut, dim = rng.choice(JOINS), rng.choice(CUTS), rng.choice((0, 1, -1))
    keeps_whole = join != "apart" and rng.random() < 0.5
    stacked = join == "stack"
    if stacked:
        dim = rng.choice((0, 1, 2))

    def loop(x: Tensor, a: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        parts = [first * (1 + i) for i in range(count)]
        join_parts = torch.stack if stacked else torch.cat
        state = join_parts(parts, dim)
        kept = []
        for t in range(T):
            if join != "apart":
                parts = _cut(state, cut, dim, count, stacked=stacked)
            parts = update(parts, x[:, t], a[:, t])
            if join != "apart":
                state = join_parts(parts, dim)
            kept.append(state if keeps_whole else parts[0] - parts[1])
        return torch.stack(kept, 1), state if join != "apart" else join_parts(parts, dim)

    return Case(loop, two if count == 2 else UPDATES[name][2], f"{name} x{count} {join} {cut} at {dim} {keeps_whole}")


def inputs(dtype: torch.dtype = torch.float64, *, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, a = (torch.rand(B, T, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    first = torch.randn(B, D, generator=generator, dtype=torch.float64).to(dtype)
    return [each.requires_grad_(grad) for each in (x, a, first)]


def compiled(loop: Loop, given: Sequence[Tensor], **options: object) -> tuple[tuple[Tensor, ...], Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(**options)
    return torch.compile(loop, backend=backend, fullgraph=True)(*given), backend


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(5, 24))]
)
def test_parts_of_a_state_and_states_of_a_pair_are_run_with_their_gradients(seed: int) -> None:
    case, given = spelled(seed), inputs(grad=True)
    got, backend = compiled(case.loop, given)
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"] * case.scans, (
        case.notes,
        backend.why_not(),
    )
    want = case.loop(*given)
    for one, other in zip(got, want, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in want]
    gradients = [torch.autograd.grad(results, given, weights) for results in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_states_of_a_pair_round_no_more_than_the_loop_may(dtype: torch.dtype, tolerance: float) -> None:
    case = next(each for each in map(spelled, range(2, 200, 6)) if "apart" in each.notes)
    given = inputs(dtype)
    with torch.no_grad():
        got, backend = compiled(case.loop, given)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    for one, other in zip(got, case.loop(*[each.double() for each in given]), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def complex_state(x: Tensor, a: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    h, kept, turn = first + 0j, [], torch.polar(a[:, 0], x[:, 0])
    for t in range(T):
        h = turn * h + x[:, t]
        kept.append(h.real)
    return torch.stack(kept, 1), h


def squashed_half(x: Tensor, a: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    state, kept = torch.cat([first, first], -1), []
    for t in range(T):
        h, c = state.chunk(2, -1)
        c = a[:, t] * c + h.sigmoid()
        state = torch.cat([c.tanh(), c], -1)
        kept.append(c)
    return torch.stack(kept, 1), state


def four_in_a_ring(x: Tensor, a: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    parts, kept = [first * i for i in range(4)], []
    for t in range(T):
        parts = [0.5 * parts[i] + a[:, t] * parts[i - 1] + i * x[:, t] for i in range(4)]
        kept.append(parts[0])
    return torch.stack(kept, 1), parts[3]


def shifted(x: Tensor, a: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    window, kept = first, []
    for t in range(T):
        window = torch.cat([window[:, 1:], x[:, t, :1]], -1)
        kept.append((window * a[:, t]).sum(-1))
    return torch.stack(kept, 1), window


REFUSED = [
    (complex_state, "[COMPLEX_STATE] the state"),
    (squashed_half, "sigmoid of the state"),
    (four_in_a_ring, "depend on each other"),
]


@pytest.mark.parametrize(("loop", "text"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_stays_one_loop_has_a_true_reason_and_the_same_results(loop: Loop, text: str) -> None:
    given = inputs()
    got, backend = compiled(loop, given)
    assert not any(match.rewritten for match in backend.report.matches)
    assert text in "\n".join(str(miss.reason) for miss in backend.report.near_misses)
    torch.testing.assert_close(got, loop(*given), rtol=1e-9, atol=1e-9)


def test_a_window_that_moves_on_fails_nowhere() -> None:
    given = inputs()
    got, backend = compiled(shifted, given, loops="roll")
    assert [(loop.steps, loop.rolled) for loop in backend.report.loops] == [(T, True)]
    assert not backend.report.events
    torch.testing.assert_close(got, shifted(*given), rtol=1e-9, atol=1e-9)
