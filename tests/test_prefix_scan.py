"""Recurrences in logarithmic depth: whoever combines neighbours, in whatever order, computes ``h[t] = a[t] h[t-1] + b[t]``."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

from lz_compile.passes.loops.recurrence import prefix_scan

Scan = Callable[[Tensor, Tensor], Tensor]


def reference(a: Tensor, b: Tensor, dim: int) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    states = [b.select(dim, 0)]
    for t in range(1, b.shape[dim]):
        states.append(a.select(dim, t) * states[-1] + b.select(dim, t))
    return torch.stack(states, dim)


def combined(dim: int) -> Scan:
    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lambda a, b: associative_scan(combine, (a, b), dim=dim, combine_mode="generic")[1]


def padded(dim: int) -> Scan:
    """Doubling over shifted copies, padded with what changes nothing."""

    def scan(a: Tensor, b: Tensor) -> Tensor:
        steps, shift = b.shape[dim], 1
        while shift < steps:
            pad = [0, 0] * (b.dim() - 1 - dim) + [shift, 0]
            before_a = F.pad(a, pad, value=1.0).narrow(dim, 0, steps)
            before_b = F.pad(b, pad).narrow(dim, 0, steps)
            a, b = a * before_a, b + a * before_b
            shift *= 2
        return b

    return scan


def joined(dim: int) -> Scan:
    """Doubling by slices that are joined again."""

    def scan(a: Tensor, b: Tensor) -> Tensor:
        steps, shift = b.shape[dim], 1
        while shift < steps:
            rest = steps - shift
            later, earlier = a.narrow(dim, shift, rest), b.narrow(dim, 0, rest)
            new = torch.addcmul(b.narrow(dim, shift, rest), later, earlier)
            b = torch.cat([b.narrow(dim, 0, shift), new], dim)
            a = torch.cat([a.narrow(dim, 0, shift), later * a.narrow(dim, 0, rest)], dim)
            shift *= 2
        return b

    return scan


def halved(dim: int) -> Scan:
    """Pairs are combined, their scan is spread again."""

    def scan(a: Tensor, b: Tensor) -> Tensor:
        steps = b.shape[dim]
        if steps == 1:
            return b
        index = (slice(None),) * dim
        even, odd = (*index, slice(0, None, 2)), (*index, slice(1, None, 2))
        pairs = scan(a[even] * a[odd], a[odd] * b[even] + b[odd])
        shifted = torch.cat([torch.zeros_like(pairs.narrow(dim, 0, 1)), pairs.narrow(dim, 0, steps // 2 - 1)], dim)
        return torch.stack([a[even] * shifted + b[even], pairs], dim + 1).flatten(dim, dim + 1)

    return scan


FORMS: dict[str, Callable[[int], Scan]] = {"combined": combined, "padded": padded, "joined": joined, "halved": halved}


def compiled(function: Callable[..., Tensor], *inputs: Tensor, **options: object) -> tuple[Tensor, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(**options)
    return torch.compile(function, backend=backend, fullgraph=True)(*inputs), backend


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int, narrow: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    thin = tuple(1 if dim == narrow else size for dim, size in enumerate(shape))
    a = 2 * torch.rand(thin, generator=generator, dtype=dtype) - 1
    return a.requires_grad_(), torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.sampled
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("seed", range(3))
def test_every_form_is_one_recurrence_with_its_gradients(form: str, seed: int) -> None:
    rng = random.Random(seed)
    dim = rng.randrange(3)
    sizes = [rng.choice([1, 2, 3]), rng.choice([2, 5]), rng.choice([1, 4])]
    sizes[dim] = 16 if form == "halved" else rng.choice([16, 19, 24])
    a, b = inputs(tuple(sizes), torch.float64, seed)
    scan = FORMS[form](dim)
    got, backend = compiled(lambda a, b: scan(a, b).tanh(), a, b)
    (match,) = backend.report.matches
    assert match.op == "scan", backend.why_not()
    assert match.rewritten, backend.why_not()
    assert match.formula == "h[t] = a[t] * h[t-1] + b[t]"
    assert [str(miss.reason) for miss in backend.report.near_misses] == []  # of its pieces
    want = reference(a, b, dim).tanh()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    wanted = torch.autograd.grad(want.square().sum(), (a, b))
    for one, two in zip(torch.autograd.grad(got.square().sum(), (a, b)), wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_a_factor_that_broadcasts_is_spread() -> None:
    a, b = inputs((2, 16, 5), torch.float32, 0, narrow=2)
    got, backend = compiled(combined(1), a.expand(2, 16, 5), b)
    assert backend.report.matches[0].rewritten, backend.why_not()
    torch.testing.assert_close(got, reference(a, b, 1), rtol=1e-5, atol=1e-5)


def test_a_sum_by_doubling_needs_no_factor() -> None:
    def scan(b: Tensor) -> Tensor:
        shift = 1
        while shift < b.shape[0]:
            b = torch.cat([b[:shift], b[shift:] + b[:-shift]])
            shift *= 2
        return b

    _, b = inputs((17, 3), torch.float64, 0)
    got, backend = compiled(scan, b)
    assert backend.report.matches[0].formula == "h[t] = h[t-1] + b[t]", backend.why_not()
    torch.testing.assert_close(got, b.cumsum(0))


@pytest.mark.parametrize("fault", ["sign", "shift", "swapped", "of two features"])
def test_what_computes_something_else_stays_as_it_is(fault: str) -> None:
    def scan(a: Tensor, b: Tensor) -> Tensor:
        steps, shift = b.shape[0], 1
        while shift < steps:
            new = b[shift:] + a[shift:] * b[:-shift]
            if shift == 2:
                new = {
                    "sign": b[shift:] - a[shift:] * b[:-shift],
                    "shift": b[shift:] + a[shift:] * b[shift:],
                    "swapped": b[shift:] + a[:-shift] * b[:-shift],
                    "of two features": torch.cat([new[:, :2], -new[:, 2:]], 1),
                }[fault]
            b = torch.cat([b[:shift], new])
            a = torch.cat([a[:shift], a[shift:] * a[:-shift]])
            shift *= 2
        return b

    a, b = inputs((16, 3), torch.float64, 0)
    got, backend = compiled(scan, a, b)
    assert not backend.report.matches
    assert any("something else than h[t]" in str(miss.reason) for miss in backend.report.near_misses), backend.why_not()
    torch.testing.assert_close(got, scan(a, b))


def test_recurrences_of_other_widths_that_are_joined_are_none() -> None:
    def scans(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([joined(0)(torch.ones_like(each), each) for each in (a, b)], 1)

    a, b = torch.randn(16, 3), torch.randn(16, 2)
    got, backend = compiled(scans, a, b)
    assert not backend.report.events, backend.why_not()
    assert not backend.report.matches, backend.why_not()
    torch.testing.assert_close(got, scans(a, b))


def test_a_size_that_turned_out_to_be_a_number_is_one() -> None:
    """The loop makes the symbol a number, which what was made before it has as a symbol still."""

    def shifted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found, steps = x * 1.5, torch.zeros_like(x)
        for step in range(1, x.shape[1]):
            steps[:, step] = steps[:, step - 1] * 0.5 + x[:, step]
        given = torch.empty_like(found)
        given[:, :1] = found[:, :1]
        given[:, 1:] = y[:, 1:]
        found[:, 1:] = given[:, :-1]
        return found, steps

    torch._dynamo.reset()
    x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    backend = Rewriting(strict=True)
    got = torch.compile(shifted, backend=backend, dynamic=True)(x, y)
    torch.testing.assert_close(got, shifted(x, y))


def test_a_step_that_someone_else_reads_is_kept() -> None:
    def scan(a: Tensor, b: Tensor) -> Tensor:
        found, shift = b, 1
        while shift < b.shape[0]:
            found = torch.cat([found[:shift], found[shift:] + a[shift:] * found[:-shift]])
            a = torch.cat([a[:shift], a[shift:] * a[:-shift]])
            kept = found if shift == 2 else kept if shift > 2 else None  # noqa: F821
            shift *= 2
        return found @ kept.T

    a, b = inputs((16, 3), torch.float64, 0)
    got, backend = compiled(scan, a, b)
    assert not backend.report.matches
    assert any("is also used by" in str(miss.reason) for miss in backend.report.near_misses), backend.why_not()
    torch.testing.assert_close(got, scan(a, b))


@pytest.mark.parametrize(("steps", "codes"), [(8, ["SCAN_SHORT"]), (3, [])])
def test_few_steps_are_left_to_inductor_and_told_unless_they_are_next_to_none(steps: int, codes: list[str]) -> None:
    a, b = inputs((2, steps, 3), torch.float64, 0)
    got, backend = compiled(joined(1), a, b)
    assert not backend.report.matches
    assert [miss.reason.code for miss in backend.report.near_misses] == codes, backend.why_not()
    torch.testing.assert_close(got, reference(a, b, 1))


def test_a_short_loop_moves_nothing_along_its_features() -> None:
    def loop(a: Tensor, b: Tensor) -> Tensor:
        state, states = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            state = a[:, t] * state + (1 - a[:, t]) * b[:, t]
            states.append(state)
        return torch.stack(states, 1)

    _, backend = compiled(loop, *inputs((2, 8, 24), torch.float64, 0))
    (left,) = backend.report.loops
    assert left.steps == 8
    assert not backend.report.near_misses, "it is a recurrence, and no pieces over its 24 features"


def test_elementwise_arithmetic_under_vmap_is_spelled_out_and_other_is_not() -> None:
    def mapped(x: Tensor, y: Tensor) -> Tensor:
        first = y[0]
        return torch.vmap(lambda one, two: one * two + first)(x, y) + torch.vmap(lambda one: one.sum())(x)[:, None]

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    got, backend = compiled(mapped, x, y)
    torch.testing.assert_close(got, mapped(x, y))
    names = [getattr(node.target, "__name__", "") for graph in backend.graphs for node in graph.graph.nodes]
    assert names.count("_vmap_increment_nesting") == 1


def test_recurrences_in_chunks_are_named() -> None:
    def chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        total = g.cumsum(-1)
        decays = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        return ((q @ k.transpose(-1, -2)) * decays) @ v

    q, k, v = torch.randn(3, 2, 6, 4)
    g = -torch.rand(2, 6)
    got, backend = compiled(chunks, q, k, v, g)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["CHUNKED_ALREADY"]
    torch.testing.assert_close(got, chunks(q, k, v, g))


@pytest.mark.parametrize(
    "weighs",
    [
        "by decays",
        "by decays of some",
        "by truth values",
        "after truth values",
        "by a third tensor",
        "by a quotient",
        "not at all",
    ],
)
def test_recurrences_as_products_with_all_earlier_keys_are_named(weighs: str) -> None:
    """As RetNet's parallel form, causal cosFormer, and linear attention."""

    def parallel(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        scores = torch.einsum("bqd,bkd->bqk", q * 0.5, k * 2)
        if weighs == "by decays":
            steps = torch.arange(6)[:, None] - torch.arange(6)
            return (scores * (decay[:, None, None] ** steps).tril()) @ v
        places = torch.arange(6)
        if weighs == "by decays of some":
            steps = places[:, None] - places
            return (scores * torch.where(steps >= 0, decay[:, None, None] ** steps.clamp(min=0), 0)) @ v
        if weighs == "by a third tensor":
            third = (places[:, None] >= places) * 0.9 ** (places[:, None] - places)
            return torch.einsum("bqd,bkd,qk->bqk", q * 0.5, k * 2, third) @ v
        if weighs == "by truth values":
            return (scores * (places[:, None] >= places).float()) @ v
        if weighs == "after truth values":
            return scores.masked_fill(places > places[:, None], 0) @ v
        scores = scores.masked_fill(torch.ones(6, 6).triu(1) == 1, 0)
        return (scores / scores.sum(-1, keepdim=True).clamp(min=1) if weighs == "by a quotient" else scores) @ v

    q, k, v = torch.randn(3, 2, 6, 4)
    given = q, k, v, torch.rand(2)
    got, backend = compiled(parallel, *given)
    also = ["LINEAR_ATTENTION"] if weighs == "by a quotient" else []  # that is what such a quotient is, too
    assert [miss.reason.code for miss in backend.report.near_misses] == [*also, "PARALLEL_FORM"]
    torch.testing.assert_close(got, parallel(*given))


@pytest.mark.parametrize("kind", ["normalised", "gated", "a share beside a sink"])
def test_what_is_weighted_by_masked_attentions_is_no_recurrence(kind: str) -> None:
    """A norm or a gate of what an attention gives knows of the mask, too: it lies behind a product, or a sum over the keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        masked = (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1) == 1, -torch.inf)
        out = (masked.softmax(-1) * q.shape[-1]) @ (v * 2)
        if kind == "a share beside a sink":
            return (out * (masked.logsumexp(-1, keepdim=True) - 1).sigmoid()) @ (weight.mT @ weight)
        scale = out.square().mean(-1, keepdim=True).rsqrt() if kind == "normalised" else out.sum(-1, True).sigmoid()
        return (q * 2) @ (out * scale).mT @ weight

    q, k, v = torch.randn(3, 2, 6, 4)
    _, backend = compiled(attend, q, k, v, torch.randn(6, 4))
    assert "PARALLEL_FORM" not in [miss.reason.code for miss in backend.report.near_misses]


def test_masked_products_that_are_no_recurrence_are_not() -> None:
    def others(q: Tensor, weight: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scores, mask = q @ (v * 2).mT, torch.ones(6, 6).tril() == 0
        attention = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        near, short = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2, torch.arange(6) < 4
        windows = (scores * near) @ v, (scores.masked_fill(~short, 0)) @ v
        return attention, (q @ weight.tril() * v) @ weight, (scores.relu().square() * mask) @ v, *windows

    _, backend = compiled(others, torch.randn(2, 6, 4), torch.randn(4, 4), torch.randn(2, 6, 4))
    assert not [miss for miss in backend.report.near_misses if miss.op == "scan"], backend.why_not()


def test_other_cumulative_sums_are_not() -> None:
    def top_p(logits: Tensor, values: Tensor) -> Tensor:
        probabilities = logits.softmax(-1).sort(descending=True).values
        return (probabilities.cumsum(-1) < 0.9).float() @ values

    _, backend = compiled(top_p, torch.randn(2, 7), torch.randn(7, 3))
    assert not [miss for miss in backend.report.near_misses if miss.op == "scan"]


def test_pieces_of_tensors_that_do_not_broadcast_are_none_over_time() -> None:
    def turned(
        x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:  # its last dimension looks like four steps of three tensors
        pairs = x[..., :4].unflatten(-1, (2, 2))
        real, imaginary = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin
        pairs = torch.stack([real, imaginary], -1)
        return torch.cat((pairs.flatten(-2), x[..., 4:]), -1)

    given = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 1, 2), torch.randn(1, 5, 1, 2)
    got, backend = compiled(turned, *given, strict=True)
    assert [match.op for match in backend.report.matches] == ["rope"], backend.why_not()
    assert not backend.report.near_misses
    torch.testing.assert_close(got, turned(*given))


@pytest.mark.thorough
def test_pieces_of_a_long_recurrence_that_was_recognised_are_no_near_misses() -> None:
    a, b = inputs((2, 100, 3), torch.float64, 0)
    for form in ("combined", "joined"):
        _, backend = compiled(FORMS[form](1), a, b)
        assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
        assert [str(miss.reason) for miss in backend.report.near_misses] == []


def test_more_calls_than_are_read_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_scan, "_MOST_CALLS", 20)
    a, b = inputs((2, 32, 3), torch.float64, 0)
    got, backend = compiled(joined(1), a, b)
    torch.testing.assert_close(got, reference(a, b, 1), rtol=1e-10, atol=1e-10)
    assert not backend.report.matches
    codes = [miss.reason.code for miss in backend.report.near_misses]
    assert "PREFIX_SCAN_LONG" in codes, backend.why_not()


def test_what_does_not_run_at_the_sizes_of_a_probe_is_an_event() -> None:
    def scan(a: Tensor, b: Tensor) -> Tensor:
        shift = 1
        while shift < 32:
            before = F.pad(b, [0, 0, shift, 0])[:, :32].reshape(3, 32, 8)
            a, b = a * F.pad(a, [0, 0, shift, 0], value=1.0)[:, :32], b + a * before
            shift *= 2
        return b

    a, b = inputs((3, 32, 8), torch.float64, 0)
    got, backend = compiled(scan, a, b)
    torch.testing.assert_close(got, reference(a, b, 1))
    assert [event.code for event in backend.report.events] == ["PROBE_FAILED"], backend.report.events
