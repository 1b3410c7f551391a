"""What a condition drops of a state stays dropped, NaN included; what is multiplied by zero does not. As eager code has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

STEPS = 16
B, H, K, V = 2, 2, 4, 3

#: A step of ``h`` by a factor, an input and a condition; under it the state is dropped, or multiplied by zero.
DROPPING: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "where on the state": lambda h, a, x, d: torch.where(d, 0.0, h) * a + x,
    "where on the product": lambda h, a, x, d: torch.where(d, torch.zeros_like(h), h * a) + x,
    "where on everything": lambda h, a, x, d: torch.where(d, x, h * a + x),
    "masked_fill": lambda h, a, x, d: h.masked_fill(d, 0.0) * a + x,
    "a number as factor": lambda h, a, x, d: torch.where(~d, h, 0.0) * 0.9 + x,
    "two conditions": lambda h, a, x, d: torch.where(d, 0.0, h).masked_fill(x > 1, 0.0) * a + x,
}
MULTIPLYING: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "where on the factor": lambda h, a, x, d: h * torch.where(d, 0.0, a) + x,
    "a mask as factor": lambda h, a, x, d: h * (~d).to(h.dtype) * a + x,
    "one condition drops, one multiplies": lambda h, a, x, d: torch.where(d, 0.0, h) * (x < 1).to(h.dtype) * a + x,
}


def averages(step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, a: Tensor, h: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for t in range(x.shape[1]):
            h = step(h, a[:, t], x[:, t], d[:, t])
            found.append(h)
        return torch.stack(found, 1), h

    return run


def given(place: int) -> tuple[Tensor, ...]:
    """Random operands with NaN in one step, infinity in another, a factor that is zero, and what drops at every other step."""
    torch.manual_seed(place)
    x, a = torch.randn(B, STEPS, V).double(), torch.rand(B, STEPS, 1).double()
    x[0, place, 1], x[1, STEPS - 1 - place, 0] = torch.nan, torch.inf
    a[:, (place + 1) % STEPS] = 0
    dropped = torch.rand(B, STEPS, 1) < 0.3
    dropped[:, (place + 3) % STEPS] = True
    return x, a, torch.randn(B, V).double(), dropped


def observed(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results, and the gradients of a sum that weighs them differently."""
    leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    results = function(*leaves)
    weights = (torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape) for each in results)
    total = sum((each * weight).sum() for each, weight in zip(results, weights, strict=True))
    wanted = [each for each in leaves if each.requires_grad]
    return [*results, *torch.autograd.grad(total, wanted, materialize_grads=True)]


def assert_as_eager(function: Callable[..., Sequence[Tensor]], kernel: str, inputs: Sequence[Sequence[Tensor]]) -> None:
    torch._dynamo.reset()
    backend = Rewriting(loops="roll", lock={"scan": kernel})
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for each in inputs:
        for place, (found, wanted) in enumerate(zip(observed(compiled, each), observed(function, each), strict=True)):
            # Eager code multiplies the gradient of what a condition drops by zero, kernels leave it out.
            is_left_out = wanted.isnan() if place > 1 else torch.zeros_like(wanted, dtype=torch.bool)
            torch.testing.assert_close(found.masked_fill(is_left_out, torch.nan), wanted, equal_nan=True)
    assert [match.kernel for match in backend.report.matches if match.rewritten] == [kernel], backend.why_not()


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", ["lz.rolled_scan", "lz.associative_scan"])
@pytest.mark.parametrize("spelling", [*DROPPING, *MULTIPLYING])
def test_what_a_dropped_state_is_multiplied_by_keeps_its_nan(spelling: str, kernel: str):
    """Zero times NaN, where the state is dropped before it is multiplied; gradients of earlier states are NaN as well then."""
    function = averages({**DROPPING, **MULTIPLYING}[spelling])
    backend = Rewriting(loops="roll", lock={"scan": kernel})
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for place in (0, 7):
        x, a, h, d = given(place)
        a[0, place + 1], a[1, place + 4] = torch.nan, -torch.inf
        d[:, [place + 1, place + 4]] = True
        for found, wanted in zip(compiled(x, a, h, d), function(x, a, h, d), strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)
    assert [match.kernel for match in backend.report.matches if match.rewritten] == [kernel], backend.why_not()


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", ["lz.rolled_scan", "lz.associative_scan"])
@pytest.mark.parametrize("spelling", [*DROPPING, *MULTIPLYING])
def test_nan_stays_exactly_where_it_does_eagerly(spelling: str, kernel: str):
    function = averages({**DROPPING, **MULTIPLYING}[spelling])
    assert_as_eager(function, kernel, [given(place) for place in (0, 5, STEPS - 1)])


@pytest.mark.parametrize("spelling", ["where on the factor", "a mask as factor"])
def test_chunks_multiply_where_the_source_does(spelling: str):
    inputs = [given(place) for place in (0, STEPS - 1)]
    for x, *_ in inputs:  # where infinity meets a factor of zero, chunks keep it
        x.masked_fill_(x.isinf(), 1.0)
    assert_as_eager(averages(MULTIPLYING[spelling]), "lz.chunked_scan", inputs)


@pytest.mark.parametrize("spelling", ["where on the state", "masked_fill"])
def test_chunks_take_no_state_that_is_dropped(spelling: str):
    torch._dynamo.reset()
    backend = Rewriting(loops="roll", lock={"scan": "lz.chunked_scan"})
    torch.compile(averages(DROPPING[spelling]), backend=backend, fullgraph=True)(*given(5))
    assert "lz.chunked_scan does not take states that a condition drops, NaN included" in backend.why_not()


# ---- what conditions leave out of operands ---------------------------------------------------------------------------

#: A step of ``h`` by a factor, a condition, an input and something that is NaN, or infinite, now and then.
SELECTING: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "a product with what is selected": lambda h, a, c, x, s: a * h + torch.where(c, x, 0.0) * s,
    "a selected factor of an input": lambda h, a, c, x, s: a * h + torch.where(c, s, 0.0) * x,
    "a mask as factor": lambda h, a, c, x, s: a * h + c.to(s.dtype) * s,
    "a mask of the whole": lambda h, a, c, x, s: (a * h + s) * c.to(s.dtype),
    "two selections": lambda h, a, c, x, s: a * h + torch.where(c, torch.where(x > 0, x, 0.0), x) * s,
    "selections that are multiplied": lambda h, a, c, x, s: a * h + torch.where(c, s, x) * torch.where(x > 0, x, s),
    "the state or an input, times a factor": lambda h, a, c, x, s: torch.where(c, h, x) * s,
    "a dropped state, times a factor": lambda h, a, c, x, s: h.masked_fill(c, 0.0) * s + x,
    "a kept state": lambda h, a, c, x, s: torch.where(c, a * h + s * x, h),
    "a selected decay": lambda h, a, c, x, s: torch.where(c, s, a) * h + torch.where(c, s, x),
    "a sum that is selected, times a factor": lambda h, a, c, x, s: s * torch.where(c, h + x, 0.0),
    "what is selected, and a mask as factor": lambda h, a, c, x, s: (
        a * h + torch.where(c, x, s) + (x > 0).to(s.dtype) * s
    ),
    "a selected product with a mask": lambda h, a, c, x, s: torch.where(x > 0, c.to(s.dtype) * s, 0.0) * h + s,
    "a mask and its complement": lambda h, a, c, x, s: c.to(s.dtype) * (a * h + s) + (1 - c.to(s.dtype)) * h,
}
#: Of these, a factor that is infinite meets every summand by itself: what infinities add up to is open.
OF_SUMS = {"a sum that is selected, times a factor", "a mask and its complement"}


def test_what_a_dropped_state_is_multiplied_by_is_seen_in_what_is_read_of_it():
    def alone(x: Tensor, u: Tensor, h: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for t in range(STEPS):
            h = h.masked_fill(d[:, t], 0.0) * u[:, t]
            found.append(h)
        return torch.stack(found, 1), h

    def looked(q: Tensor, k: Tensor, v: Tensor, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        state, found = torch.zeros(B, H, K, V, dtype=q.dtype), []
        for t in range(STEPS):
            state = state * 0.9 + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            seen = state.masked_fill(d[:, t, None, None, None], 0.0)
            found.append(torch.einsum("bhk,bhkv->bhv", q[:, t], seen))
        return torch.stack(found, 1), state

    x, u, h, d = given(3)
    u[0, 4], d[0, 4] = torch.nan, True
    q, k, v, a, dropped = (each.nan_to_num(0.3, 0.3) for each in matrix_operands())
    q[0, 7, 1, 2], q[1, 12, 0, 0] = torch.nan, torch.inf
    assert_as_eager(looked, "lz.rolled_scan", [(q, k, v, a, dropped)])
    torch._dynamo.reset()
    backend = Rewriting(loops="roll", lock={"scan": "lz.rolled_scan"})
    for found, wanted in zip(torch.compile(alone, backend=backend)(x, u, h, d), alone(x, u, h, d), strict=True):
        torch.testing.assert_close(
            found, wanted, equal_nan=True
        )  # nothing is added: gradients of earlier states are NaN
    assert [match.kernel for match in backend.report.matches] == ["lz.rolled_scan"], backend.why_not()


@pytest.mark.sampled
@pytest.mark.parametrize("special", [torch.nan, torch.inf], ids=["nan", "infinite"])
@pytest.mark.parametrize("spelling", SELECTING)
def test_what_conditions_leave_out_of_operands_is_there_as_it_is_eagerly(spelling: str, special: float):
    """Values, and gradients that eager code has: neither a NaN that it does not have, nor a number where it has NaN."""
    if spelling in OF_SUMS and special == torch.inf:
        pytest.skip("what infinities add up to depends on the order of a sum")

    def run(a: Tensor, c: Tensor, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        h, found = torch.zeros_like(x[:, 0]), []
        for t in range(STEPS):
            h = SELECTING[spelling](h, a[:, t], c[:, t], x[:, t], s[:, t])
            found.append(h)
        return torch.stack(found, 1), h

    torch.manual_seed(0)
    a, x, s = torch.rand(3, B, STEPS, 4).double()
    s[0, 5], s[1, 10] = special, special
    assert_as_eager(run, "lz.rolled_scan", [(a, torch.rand(B, STEPS, 4) > 0.5, x - 0.5, s)])


# ---- states of keys and values ---------------------------------------------------------------------------------------


def matrices(
    dropped: Callable[[Tensor, Tensor], Tensor], *, erases: bool, reads: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Gated linear attention, or the gated delta rule; a condition drops the state, or (``reads``) what is read of it."""

    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        state, found = torch.zeros(B, H, K, V, dtype=q.dtype), []
        for t in range(STEPS):
            ends = d[:, t, None, None, None]
            state = (state if reads else dropped(state, ends)) * a[:, t].unsqueeze(-1)
            written = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state) if erases else v[:, t]
            state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
            found.append(torch.einsum("bhk,bhkv->bhv", q[:, t], dropped(state, ends) if reads else state))
        return torch.stack(found, 1), state

    return run


def matrix_operands() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k = torch.randn(2, B, STEPS, H, K).double()
    v, a = torch.randn(B, STEPS, H, V).double(), torch.rand(B, STEPS, H, K).double()
    v[0, 3, 0, 1], v[1, 9, 1, 2] = torch.nan, torch.inf
    k = F.normalize(k, dim=-1)
    k[1, 5, 1, 2] = torch.nan
    dropped = torch.rand(B, STEPS) < 0.2
    dropped[:, 7] = dropped[:, 12] = True
    return q, k, v, a, dropped


@pytest.mark.sampled
@pytest.mark.parametrize("erases", [False, True], ids=["linear attention", "delta rule"])
@pytest.mark.parametrize("reads", [False, True], ids=["of the state", "of what is read"])
def test_matrices_of_fast_weights_are_dropped_with_their_nan(reads: bool, erases: bool):
    def dropped(state: Tensor, ends: Tensor) -> Tensor:
        return state.masked_fill(ends, 0.0)

    assert_as_eager(matrices(dropped, erases=erases, reads=reads), "lz.rolled_scan", [matrix_operands()])


def test_a_matrix_that_is_multiplied_by_a_mask_keeps_its_nan():
    def multiplied(state: Tensor, ends: Tensor) -> Tensor:
        return state * (~ends).to(state.dtype)

    assert_as_eager(matrices(multiplied, erases=True), "lz.rolled_scan", [matrix_operands()])


Matrix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _written(s: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return s * 0.9 + k[:, :, None] * v[:, None]


def _looked(k: Tensor, s: Tensor) -> Tensor:
    return torch.einsum("bk,bkv->bv", k, s)


def _then(s: Tensor, read: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    return s, read(s)


#: Steps of matrix states that write and read with the same tensors, and leave out one of both under a condition.
MATRICES: dict[str, Matrix] = {
    "a read of the old state by its key, multiplied": lambda s, q, k, v, c: (
        torch.where(c, _written(s, k, v), s),
        _looked(k, s * c.double()),
    ),
    "a product of the old state by its key": lambda s, q, k, v, c: (
        torch.where(c, k[:, :, None] * s, 0.0) + q[:, :, None] * v[:, None],
        (k[:, :, None] * s * c.double()).sum(1),
    ),
    "one query, chosen and multiplied": lambda s, q, k, v, c: _then(
        _written(s, k, v),
        lambda s: torch.cat(
            [torch.where(c, q[:, :, None] * s, 0.0).sum(1), (q[:, :, None] * s * c.double()).sum(1)], -1
        ),
    ),
    "the same of the old state": lambda s, q, k, v, c: (
        _written(s, k, v),
        torch.cat([torch.where(c, q[:, :, None] * s, 0.0).sum(1), (q[:, :, None] * s * c.double()).sum(1)], -1),
    ),
    "a state that is dropped where it is read by its key": lambda s, q, k, v, c: _then(
        _written(s, k, v), lambda s: _looked(k, s.masked_fill(c, 0.0))
    ),
    "a write that is left out, read by its key": lambda s, q, k, v, c: _then(
        torch.where(c, _written(s, k, v), s), lambda s: _looked(k, s * c.double())
    ),
    "a factor that is left out, read by itself": lambda s, q, k, v, c: _then(
        torch.where(c, k[:, :, None] * s, 0.0) + q[:, :, None] * v[:, None],
        lambda s: (k[:, :, None] * s * c.double()).sum(1),
    ),
    "a summand of a read that is multiplied": lambda s, q, k, v, c: _then(
        torch.where(c, _written(s, k, v), s), lambda s: ((s + k[:, :, None]) * c.double()).sum(1)
    ),
    "a chosen product": lambda s, q, k, v, c: _then(
        torch.where(c, _written(s, k, v), s), lambda s: torch.where(c, k[:, :, None] * s, 0.0).sum(1)
    ),
    "a state that is multiplied": lambda s, q, k, v, c: _then(_written(s, k, v) * c.double(), lambda s: _looked(q, s)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("poisoned_one", ["query", "key", "value"])
def test_what_one_operand_leaves_out_is_nan_there_and_nowhere_else(name: str, poisoned_one: str) -> None:
    """Two operands may be the same sum, one of which leaves out what the other one multiplies by zero."""
    given = {"query": torch.randn(2, 12, 3), "key": torch.randn(2, 12, 3), "value": torch.randn(2, 12, 5)}
    given = {each: tensor.double() for each, tensor in given.items()}
    c = torch.rand(2, 12) > 0.5
    given[poisoned_one][0, 4, 1], c[0, 4] = torch.nan, False
    given[poisoned_one][1, 9, 0], c[1, 9] = torch.nan, True

    def function(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        s, found = q.new_zeros(2, 3, 5), []
        for t in range(12):
            s, y = MATRICES[name](s, q[:, t], k[:, t], v[:, t], c[:, t, None, None])
            found.append(y)
        return torch.stack(found, 1), s

    backend = Rewriting(loops="roll", lock={"scan": "lz.rolled_scan"})
    got = torch.compile(function, backend=backend, fullgraph=True)(*given.values(), c)
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()
    torch.testing.assert_close(got, function(*given.values(), c), equal_nan=True)
