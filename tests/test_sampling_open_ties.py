"""Limits that cut between equal scores behind a sort that says nothing of these: what is kept is what eager code keeps."""

from __future__ import annotations

import math

import pytest
import torch
from backends import Rewriting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_spellings import DROPS, MIN_P, TOP_K, TOP_P
from transformers.generation import logits_process as processors

import lz_compile as lz
from lz_compile.ground import health
from lz_compile.lowering.kernels.sampling import open_ties
from lz_compile.lowering.spelled import function
from lz_compile.lowering.spelled import spelled as text_of

INF = math.inf
KERNELS = ("torch.sampling", "lz.cpp_sampling")
VOCAB = 257


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    yield
    assert not health.retirements()


def tied(*shape, dtype=torch.float32, steps=1.0, seed=0):
    """Few different scores."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(*shape, generator=generator) * 2 / steps).round() * steps).to(dtype)


def compiled(function, kernel, *, dynamic=None):
    """The function with a kernel in it, and a check that it is."""
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": kernel})
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)

    def checked(*inputs):
        found = run(*inputs)
        own = [match for match in backend.report.matches if match.op == "sampling"]
        assert own, backend.why_not()
        assert all(match.rewritten for match in own), backend.why_not()
        return found

    return checked


def kept(scores):
    return scores > (-INF if scores.isneginf().any() else 0)


def assert_same(found, expected):
    assert torch.equal(kept(found), kept(expected))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---- spellings -------------------------------------------------------------------------------------------------------


def one_sort(x, k=40, p=0.8):
    """As serving engines do: top-k and top-p by one sort."""
    ordered, places = x.sort(dim=-1, descending=False)
    ordered = ordered.masked_fill(ordered < ordered[..., -k].unsqueeze(-1), -INF)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p
    dropped[..., -1] = False
    return ordered.masked_fill(dropped, -INF).scatter(-1, places, ordered.masked_fill(dropped, -INF))


def of_probabilities(x, p=0.7):
    probs = torch.softmax(x / 0.9, dim=-1)
    ordered, places = torch.sort(probs, dim=-1, descending=True)
    ordered[torch.cumsum(ordered, dim=-1) - ordered > p] = 0.0
    ordered.div_(ordered.sum(dim=-1, keepdim=True))
    return torch.zeros_like(ordered).scatter_(-1, places, ordered)


def by_transformers(x):
    chain = [
        processors.TemperatureLogitsWarper(0.7),
        processors.TopKLogitsWarper(60),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.01),
    ]
    rows = x.reshape(-1, x.shape[-1])
    for each in chain:
        rows = each(None, rows)
    return rows.view_as(x).softmax(-1)


def put_back(x, k=12):
    values, places = torch.topk(x, k)
    return torch.full_like(x, -INF).scatter_(-1, places, values)


def put_back_in_half(x, k=15):
    values, places = x.bfloat16().topk(k)
    return torch.full_like(x, -INF, dtype=torch.bfloat16).scatter(-1, places, values)


def among_the_first(x, k=50, p=0.75):
    """Top-p of what a selection gives."""
    values, places = torch.topk(x, k)
    values = values.masked_fill(values.softmax(-1).cumsum(-1) - values.softmax(-1) >= p, -INF)
    return torch.full_like(x, -INF).scatter(-1, places, values).softmax(-1)


def across(x, k=9):
    """Tokens along the first dimension."""
    x = x.t()
    ordered, places = x.sort(0, descending=True)
    return torch.full_like(x, -INF).scatter(0, places[:k], ordered[:k])


def uneven(x):
    """Two filters that are no chain of the op, and so are two of them."""
    x = x.masked_fill(x < x.amax(-1, keepdim=True) + math.log(0.002), -INF)
    return x.masked_fill(TOP_P["before"](x, 0.83), -INF).softmax(-1)


def masked_before(x):
    x = x.masked_fill(torch.arange(x.shape[-1]) % 3 == 0, -INF)
    return x.masked_fill(TOP_P["upwards"](x, 0.6), -INF)


def ranks(x, k=20):
    return x.masked_fill(x.argsort(-1, descending=True).argsort(-1) >= k, -INF)


WRITTEN = (
    one_sort,
    of_probabilities,
    by_transformers,
    put_back,
    put_back_in_half,
    among_the_first,
    masked_before,
    ranks,
    across,
    uneven,
)


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("function", WRITTEN)
def test_what_is_kept_of_equal_scores_is_what_eager_code_keeps(function, kernel):
    run = compiled(function, kernel)
    for seed in range(12):
        x = tied(5, VOCAB, seed=seed, steps=(0.25, 0.5, 1.0)[seed % 3])
        assert_same(run(x), function(x))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("function", [put_back, by_transformers, ranks])
def test_rows_that_are_no_distribution_are_filtered_as_eager_code_filters_them(function, kernel):
    x = tied(5, VOCAB, seed=3, steps=0.5)
    x[1, 7], x[2, 5], x[3, :] = INF, math.nan, -INF
    torch.testing.assert_close(compiled(function, kernel)(x), function(x), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_before_a_filter_may_have_a_vocabulary_of_any_size(kernel):
    def function(x, mask):
        x = x.masked_fill(mask, -INF)
        return x.masked_fill(x < x.topk(9)[0][..., -1:], -INF)

    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": kernel})
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for vocab in (300, 257):
        x, mask = torch.randn(4, vocab), torch.rand(4, vocab) < 0.3
        assert_same(run(x, mask), function(x, mask))
    assert any(match.rewritten for match in backend.report.matches), backend.why_not()


@st.composite
def chains(draw):
    """Filters in any spelling, one or several, each with how it drops and what its limit is."""
    every = (
        (TOP_K, st.integers(2, 60)),
        (TOP_P, st.sampled_from((0.37, 0.613, 0.851))),
        (MIN_P, st.sampled_from((0.013, 0.07))),
    )
    chosen = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    found = []
    for kind in sorted(chosen):
        spellings, limits = every[kind]
        name = draw(st.sampled_from(sorted(spellings)))
        found.append((spellings[name], draw(limits), DROPS[draw(st.sampled_from(sorted(DROPS)))]))
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    shape=st.sampled_from(((4, 70), (2, 3, VOCAB), (1, 1031))),
    steps=st.sampled_from((0.25, 1.0)),
)
def test_any_chain_keeps_of_equal_scores_what_eager_code_keeps(kernel, chain, dtype, shape, steps):
    if kernel == "lz.cpp_sampling" and dtype == torch.float64:
        dtype = torch.float32

    def function(x):
        x = x if x.dtype == torch.float64 else x.float()
        for spelled, limit, drop in chain:
            x = drop(x, spelled(x, limit))
        return x.softmax(-1)

    run = compiled(function, kernel)
    for seed in range(4):
        x = tied(*shape, dtype=dtype, steps=steps, seed=seed)
        assert_same(run(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_code_keeps_the_same(dynamic):
    def function(x, k, p):
        x = x.masked_fill(x < x.topk(k).values[..., -1:], -INF)
        return x.masked_fill(TOP_P["upwards"](x, p), -INF).softmax(-1)

    torch._dynamo.reset()
    options = {"layerzero.lock": {"sampling": "lz.cpp_sampling"}}
    run = torch.compile(function, backend="layerzero", dynamic=dynamic, options=options)
    for rows, k, p in ((3, 90, 0.9), (5, 90, 0.9), (2, 120, 0.6)):
        x = tied(rows, VOCAB, seed=rows)
        assert_same(run(x, k, p), function(x, k, p))
    assert all(match.rewritten for match in lz.reports()[-1].matches)


# ---- what is and what is not done ------------------------------------------------------------------------------------


def test_the_source_is_run_for_rows_that_are_cut_between_equals_and_for_no_others(monkeypatch):
    seen = []
    own = open_ties.function
    monkeypatch.setattr(open_ties, "function", lambda text: lambda *given: seen.append(text) or own(text)(*given))
    run = compiled(one_sort, "lz.cpp_sampling")
    x = torch.randn(3, VOCAB)
    assert_same(run(x), one_sort(x))
    assert not seen
    x[1] = x[1].round()
    found = run(x)
    assert len(seen) == 1
    assert torch.equal(found[1], one_sort(x)[1])


def test_an_order_that_is_said_is_a_rule_and_nothing_is_run_again():
    def function(x):
        ordered, places = torch.sort(x, descending=True, stable=True)
        dropped = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > 0.6
        return x.masked_fill(dropped.scatter(-1, places, dropped), -INF)

    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": "torch.sampling"})
    run = torch.compile(function, backend=backend, fullgraph=True)
    x = tied(4, VOCAB)
    assert_same(run(x), function(x))
    assert [match.attributes["top_p_ties"] for match in backend.report.matches] == ["first"], backend.why_not()
    assert "fill_open_ties" not in str(backend.graphs[0].graph)


def test_a_filter_that_learns_is_left_to_its_source():
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": "torch.sampling"})
    x = tied(3, VOCAB).requires_grad_()
    found = torch.compile(one_sort, backend=backend, fullgraph=True)(x)
    assert torch.equal(found, one_sort(x))
    assert "TIES_UNSPECIFIED" in {miss.reason.code for miss in backend.report.near_misses}, backend.why_not()
    assert "gradients flow through what is kept" in backend.why_not()


def test_a_filter_before_a_draw_that_nobody_differentiates_is_told_so():
    torch._dynamo.reset()
    backend = Rewriting(lock={"sampling": "torch.sampling"})
    x = tied(3, VOCAB).requires_grad_()
    torch.compile(lambda x: one_sort(x).argmax(-1), backend=backend, fullgraph=True)(x)
    (miss,) = backend.report.near_misses
    assert "its scores have a gradient, which nothing asks for" in str(miss.reason)
    assert miss.edit == "draw under torch.no_grad()"


def test_every_text_is_a_function_of_names_that_every_process_has():
    graph = torch.fx.symbolic_trace(lambda x: torch.nn.functional.pad(x, (1, 0), value=INF)[..., 1:].to("cpu")).graph
    x = tied(2, 5)
    text = text_of(graph)
    assert torch.equal(function(text)(None, x), x)
    torch.library.opcheck(open_ties.fill, (x.masked_fill(x > 0, torch.nan), [x], 1, text))
