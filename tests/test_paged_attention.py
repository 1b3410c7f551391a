"""Attention over a cache in blocks: kernels against the definition, the definition against SDPA, writing, bad tables."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import lz_compile as lz
from lz_compile.errors import ArgumentError
from lz_compile.ground import events
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.kernels.paged_attention import cpp_paged_attention, torch_paged_attention
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import NARROW, Operands
from lz_compile.passes.proof.agreement import TOLERANCE
from lz_compile.runtime.kernels.registry import kernels
from tests.backends import Rewriting

pytestmark = pytest.mark.usefixtures("no_preference")
KERNELS = {
    "lz.cpp_paged_attention": cpp_paged_attention.paged_attention,
    "torch.paged_attention": torch_paged_attention.paged_attention,
}
STORED = (torch.float32, torch.bfloat16, *NARROW)


@dataclasses.dataclass
class Problem:
    """Requests of a batch in blocks that lie anywhere; slots that no request has filled hold NaN where they can."""

    lengths: list[int]
    counts: list[int] | None = None
    slots: int = 16
    heads: int = 4
    kv_heads: int = 2
    dims: int = 16
    value_dims: int = 16
    stored: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    padding: int = 0
    has_sinks: bool = False
    is_hnd: bool = False
    seed: int = 0

    def operands(self):
        generator = torch.Generator().manual_seed(self.seed)
        columns = max(-(-max([*self.lengths, 1]) // self.slots), 1) + 1
        blocks = len(self.lengths) * columns + 2
        table = torch.randperm(blocks, generator=generator)[: len(self.lengths) * columns].reshape(-1, columns)
        caches = []
        for dims in (self.dims, self.value_dims):
            cache = torch.randn(blocks, self.slots, self.kv_heads, dims, generator=generator)
            unused = torch.ones(blocks, self.slots, dtype=torch.bool)
            for row, length in zip(table, self.lengths, strict=True):
                for place in range(length):
                    unused[row[place // self.slots], place % self.slots] = False
            if self.stored == torch.int8:
                caches.append((cache * 30).round().clamp(-128, 127).to(torch.int8))
            else:
                caches.append(cache.masked_fill(unused[..., None, None], math.nan).to(self.stored))
        if self.is_hnd:
            caches = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in caches]
        for row, length in zip(table, self.lengths, strict=True):
            row[-(-length // self.slots) :] = -7  # nobody looks there
        tokens = len(self.lengths) if self.counts is None else sum(self.counts) + self.padding
        others = {}
        if self.counts is not None:
            starts = torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32)
            others["query_starts"] = starts
        if self.has_sinks:
            others["sinks"] = torch.randn(self.heads, generator=generator)
        if self.stored in NARROW:
            others["key_scale"] = torch.rand(self.kv_heads, generator=generator) * 0.04 + 0.01
            others["value_scale"] = torch.rand(1, generator=generator) * 0.04 + 0.01
        query = torch.randn(tokens, self.heads, self.dims, generator=generator).to(self.dtype)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return Operands(query, *caches, table.to(torch.int32), lengths, **others)


def attributes(x, **given_):
    sizes = {}
    for name, each in x.given().items():
        sizes |= dict(zip((dim.removesuffix("|1") for dim in op.SHAPES[name].split()), each.shape, strict=True))
    return op.from_operands(x, {**sizes, "Hk": x.key_cache.shape[2]}, **given_)[0]


def truth(x, attrs):
    """In float64, request by request, by PyTorch's function or written out: another text than the definition's."""
    wide = torch.float64
    out = torch.zeros(*x.query.shape[:2], x.value_cache.shape[-1], dtype=wide)
    starts = list(range(len(x.lengths) + 1)) if x.query_starts is None else x.query_starts.tolist()
    for request, length in enumerate(x.lengths.tolist()):
        first, last = starts[request : request + 2]
        places = range(length)
        rows = x.block_table[request].tolist()
        key, value = (
            torch.stack([cache[rows[each // cache.shape[1]], each % cache.shape[1]].to(wide) for each in places])
            if length
            else cache.new_zeros(0, *cache.shape[2:], dtype=wide)
            for cache in (x.key_cache, x.value_cache)
        )
        key = key if x.key_scale is None else key * x.key_scale[:, None].to(wide)
        value = value if x.value_scale is None else value * x.value_scale[:, None].to(wide)
        for token in range(first, last):
            end = length - (last - 1 - token)
            low = 0 if attrs.window is None else max(end - attrs.window, 0)
            low = low if x.first_keys is None else max(low, int(x.first_keys[request]))
            if end <= low:
                continue
            query = x.query[token].to(wide)
            group = query.shape[0] // key.shape[1]
            for head in range(query.shape[0]):
                keys, values = key[low:end, head // group], value[low:end, head // group]
                scores = keys @ query[head] * (query.shape[1] ** -0.5 if attrs.scale is None else attrs.scale)
                if attrs.softcap is not None:
                    scores = attrs.softcap * torch.tanh(scores / attrs.softcap)
                if x.sinks is not None:
                    scores = torch.cat([scores, x.sinks[head : head + 1].to(wide)])
                out[token, head] = scores.softmax(0)[: len(keys)] @ values
    return out


def assert_near(found, exact, dtype):
    tolerance = max(TOLERANCE[dtype] * 4, 1e-5)
    assert found.shape == exact.shape
    torch.testing.assert_close(found.to(torch.float64), exact, atol=tolerance, rtol=tolerance)


@st.composite
def problems(draw):
    requests = draw(st.integers(1, 4))
    slots = draw(st.sampled_from((1, 3, 16, 256)))
    lengths = draw(
        st.lists(st.sampled_from((0, 1, 2, 15, 16, 17, 63, 64, 65, 300)), min_size=requests, max_size=requests)
    )
    counts = None
    if draw(st.booleans()):
        counts = draw(st.lists(st.sampled_from((0, 1, 2, 5, 18)), min_size=requests, max_size=requests))
    heads, kv_heads = draw(st.sampled_from(((4, 4), (4, 2), (3, 1), (6, 2))))
    dims, value_dims = draw(st.sampled_from(((16, 16), (20, 12), (64, 64), (5, 80))))
    return Problem(
        lengths,
        counts,
        slots,
        heads,
        kv_heads,
        dims,
        value_dims,
        draw(st.sampled_from(STORED)),
        draw(st.sampled_from((torch.float32, torch.bfloat16))),
        draw(st.integers(0, 2)) if counts is not None else 0,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=examples(6, 40), deadline=None)
@given(
    problem=problems(),
    window=st.sampled_from((None, 1, 7, 64)),
    softcap=st.sampled_from((None, 2.0)),
    scale=st.sampled_from((None, 0.3)),
    begin=st.sampled_from((None, None, -3, 1, 15, 70)),
)
def test_kernels_give_what_the_definition_says(kernel, problem, window, softcap, scale, begin):
    x = problem.operands()
    if begin is not None:  # every request somewhere else
        firsts = begin * (torch.arange(len(x.lengths), dtype=torch.int32) + 1)
        x = dataclasses.replace(x, first_keys=firsts)
    if problem.stored == torch.bfloat16 and problem.dtype == torch.float32:
        x = dataclasses.replace(x, query=x.query.to(torch.bfloat16))
    attrs = attributes(x, window=window, softcap=softcap, scale=scale)
    exact = truth(x, attrs)
    assert_near(op.reference(x, attrs), exact, x.query.dtype)
    with events.collect() as happened:
        found = KERNELS[kernel](x, attrs)
    assert not happened
    assert found.dtype == x.query.dtype
    assert_near(found, exact, x.query.dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "is_hnd"), [(8, 8, False), (24, 8, False), (16, 4, False), (16, 4, True)]
)
def test_keys_of_any_width_are_read_in_steps_that_leave_none_out(stored, heads, kv_heads, is_hnd):
    """Few wide rows are read at a time, more narrow ones; of groups of three or one, never less than a register's lanes."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "dims": 128, "value_dims": 128, "is_hnd": is_hnd, "stored": stored}
    x = Problem([67, 130, 3], [1, 1, 3], slots=16, dtype=stored, **sizes).operands()
    for window in (None, 50):
        attrs = attributes(x, window=window)
        assert_near(KERNELS["lz.cpp_paged_attention"](x, attrs), truth(x, attrs), stored)


def test_the_truth_of_these_tests_is_pytorchs_attention():
    x = Problem([33], [5], heads=4, kv_heads=2).operands()
    rows = x.block_table[0, :3].long()
    key, value = (each[rows].flatten(0, 1)[:33].transpose(0, 1) for each in (x.key_cache, x.value_cache))
    mask = torch.ones(5, 33, dtype=torch.bool).tril(28)
    expected = F.scaled_dot_product_attention(x.query.transpose(0, 1), key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(truth(x, attributes(x)).float(), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gives_the_same_bits_in_any_batch(dtype):
    """Which requests are beside it, how many threads there are and which blocks it has changes nothing."""
    x = Problem([700, 3, 290], stored=dtype, dtype=dtype, heads=8, kv_heads=2, dims=64, value_dims=64).operands()
    found = lz.paged_attention(*x.flat()[:5])
    alone = lz.paged_attention(x.query[2:], x.key_cache, x.value_cache, x.block_table[2:], x.lengths[2:])
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        others = lz.paged_attention(*x.flat()[:5])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[2:], alone)
    assert torch.equal(found, others)
    order = torch.randperm(len(x.key_cache))
    moved = order.argsort()[x.block_table.long().clamp(min=0)].to(torch.int32)
    shuffled = lz.paged_attention(x.query, x.key_cache[order], x.value_cache[order], moved, x.lengths)
    assert torch.equal(found, shuffled)


def test_scores_that_are_no_numbers_come_out_as_in_the_definition():
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 40, 69):
            x = Problem([70, 70], heads=2, kv_heads=2).operands()
            x.key_cache[x.block_table[0, place // 16], place % 16] = value
            attrs = attributes(x)
            exact = op.reference(x, attrs)
            for call in KERNELS.values():
                torch.testing.assert_close(call(x, attrs), exact, equal_nan=True)
    x = Problem([20], heads=2, kv_heads=1, has_sinks=True).operands()
    x.query[:] = 1.0
    x.key_cache[:] = -math.inf  # every score is minus infinity: only the sink has weight
    for call in KERNELS.values():
        assert not call(x, attributes(x)).any()


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_the_kernel_of_a_cpu_reads_blocks_in_place_and_runs():
    x = Problem([40, 9]).operands()
    assert lz.which("paged_attention", *x.flat()[:5])["kernel_id"] == "lz.cpp_paged_attention"
    report = lz.explain("paged_attention.decode", **x.given(), print_report=False).to_dict()
    assert {each["kernel"] for each in report["candidates"]} >= {"inductor", *KERNELS}
    for kernel in KERNELS:
        assert lz.validate(kernel, **x.given()) == (True, [])
        with lz.lock("paged_attention", kernel):
            assert_near(lz.paged_attention(*x.flat()[:5]), truth(x, attributes(x)), torch.float32)


@pytest.mark.parametrize("is_hnd", [False, True])
def test_even_requests_have_four_dimensions(is_hnd):
    x = Problem([40, 9, 21], [4, 4, 4], is_hnd=is_hnd).operands()
    caches = [each.transpose(1, 2) if is_hnd else each for each in (x.key_cache, x.value_cache)]
    query = x.query.unflatten(0, (3, 4))
    found = lz.paged_attention(query, *caches, x.block_table, x.lengths, layout="HND" if is_hnd else "NHD")
    assert_near(found, truth(x, attributes(x)).unflatten(0, (3, 4)), torch.float32)
    assert lz.which("paged_attention", **{**x.given(), "key_cache": caches[0], "value_cache": caches[1]},
                    layout="HND" if is_hnd else "NHD")["operation"] == "paged_attention.ragged"  # fmt: skip
    single = lz.paged_attention(query[:, -1:], *caches, x.block_table, x.lengths, layout="HND" if is_hnd else "NHD")
    torch.testing.assert_close(single, found[:, -1:])


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "layerzero"])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_compiled_step_writes_and_looks(backend, is_ragged):
    x = Problem([40, 9, 1], [3, 2, 1] if is_ragged else None).operands()
    tokens = x.query.shape[0]
    key, value = torch.randn(2, tokens, 2, 16).unbind()

    def step(query, key, value, key_cache, value_cache, table, lengths, starts):
        lz.write_to_cache(key, value, key_cache, value_cache, table, lengths, query_starts=starts)
        return lz.paged_attention(query, key_cache, value_cache, table, lengths, query_starts=starts)

    def run(function):
        caches = x.key_cache.clone(), x.value_cache.clone()
        given_ = (x.query, key, value, *caches, x.block_table, x.lengths, x.query_starts)
        with torch.no_grad():
            return function(*given_), *caches

    eager = run(step)
    compiled = run(torch.compile(step, backend=backend, fullgraph=True))
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    written = dataclasses.replace(x, key_cache=eager[1], value_cache=eager[2])
    assert_near(eager[0], truth(written, attributes(written)), torch.float32)


def test_lengths_change_without_a_new_compile():
    x = Problem([40, 9, 21]).operands()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lz.paged_attention, backend=count, fullgraph=True)
    with torch.no_grad():
        for less in (0, 1, 8):
            y = dataclasses.replace(x, lengths=x.lengths - less)
            assert_near(step(*y.flat()[:5]), truth(y, attributes(y)), torch.float32)
    assert count.frame_count == 1


def test_gradients_are_refused_or_computed():
    x = Problem([5, 9]).operands()
    query = x.query.requires_grad_()
    filled = [each.nan_to_num() for each in (x.key_cache, x.value_cache)]
    found = lz.paged_attention(query, *filled, x.block_table, x.lengths)  # by PyTorch's operations
    (gradient,) = torch.autograd.grad(found.square().sum(), query)
    wide = query.detach().double().requires_grad_()
    y = Operands(wide, *[each.double() for each in filled], x.block_table, x.lengths)
    (expected,) = torch.autograd.grad(op.reference(y, attributes(y)).square().sum(), wide)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-4)


# ---- writing ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_what_is_written_is_what_is_read(problem):
    x = problem.operands()
    starts = list(range(len(x.lengths) + 1)) if x.query_starts is None else x.query_starts.tolist()
    lengths = torch.tensor(
        [max(length, b - a) if length else 0 for length, a, b in zip(problem.lengths, starts, starts[1:], strict=False)]
    )
    columns = x.block_table.shape[1]
    lengths = lengths.clamp(max=columns * problem.slots).to(torch.int32)
    table = torch.randperm(len(x.key_cache))[: x.block_table.numel()].reshape(x.block_table.shape).to(torch.int32)
    key, value = (torch.randn(x.query.shape[0], problem.kv_heads, dims) for dims in (problem.dims, problem.value_dims))
    before = [each.clone() for each in (x.key_cache, x.value_cache)]
    scales = {"key_scale": x.key_scale, "value_scale": x.value_scale}
    lz.write_to_cache(key, value, x.key_cache, x.value_cache, table, lengths, query_starts=x.query_starts, **scales)
    places = [each.clone() for each in before]
    for request, length in enumerate(lengths.tolist()):
        first, last = starts[request : request + 2]
        for token in range(first, last):
            place = length - (last - token)
            if place < 0:
                continue
            at = int(table[request, place // problem.slots]), place % problem.slots
            for cache, rows, scale in zip(places, (key, value), scales.values(), strict=True):
                row = rows[token] if scale is None else rows[token] / scale[:, None]
                if cache.dtype == torch.int8:
                    row = row.round().clamp(-128, 127)
                elif cache.dtype in NARROW:
                    most = torch.finfo(cache.dtype).max
                    row = row.clamp(-most, most)
                cache[at] = row.to(cache.dtype)
    for found, expected in zip((x.key_cache, x.value_cache), places, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_keys_and_values_are_of_the_same_tokens():
    x = Problem([40, 9, 21]).operands()
    with pytest.raises(ArgumentError, match=re.escape("expected value of as many tokens and heads as key, (3, 1, 2)")):
        lz.write_to_cache(torch.ones(3, 1, 2, 16), torch.ones(3, 2, 16), *x.flat()[1:5])


def test_a_batch_of_padding_writes_nothing():
    x = Problem([0, 0]).operands()
    before = [each.clone() for each in (x.key_cache, x.value_cache)]
    lz.write_to_cache(torch.ones(2, 2, 16), torch.ones(2, 2, 16), *x.flat()[1:5])
    for found, expected in zip((x.key_cache, x.value_cache), before, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


# ---- what does not fit -----------------------------------------------------------------------------------------------

BAD = {
    "block_table of blocks from 0 to 7, received 8 in row 1": {"block_table": [[0, 1, 2], [3, 8, 5]]},
    "block_table of blocks from 0 to 7, received -1 in row 0": {"block_table": [[0, 1, -1], [3, 4, 5]]},
    "lengths from 0 to 48, the slots of 3 blocks in a row of the table, received 49": {"lengths": [40, 49]},
    "lengths from 0 to 48, the slots of 3 blocks in a row of the table, received -1": {"lengths": [-1, 9]},
    "query_starts to rise from 0 to 2 at most, the number of queries, received [0, 1, 3]": {"query_starts": [0, 1, 3]},
    "query_starts to rise from 0 to 2 at most, the number of queries, received [1, 1, 2]": {"query_starts": [1, 1, 2]},
    "query_starts to rise from 0 to 2 at most, the number of queries, received [0, 2, 1]": {"query_starts": [0, 2, 1]},
    "query_starts of 3 numbers, one more than there are requests, received 2": {"query_starts": [0, 2]},
}


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("kernel", [*KERNELS, "writing"])
def test_tables_that_lie_are_errors_that_name_the_operand(text, kernel):
    cache = torch.randn(8, 16, 2, 16)
    named = {"block_table": [[0, 1, 2], [3, 4, 5]], "lengths": [40, 20], **BAD[text]}
    tables = {name: torch.tensor(each, dtype=torch.int32) for name, each in named.items()}

    def call() -> None:
        if kernel == "writing":
            lz.write_to_cache(torch.ones(2, 2, 16), torch.ones(2, 2, 16), cache, cache.clone(), **tables)
        else:
            lz.paged_attention(torch.randn(2, 4, 16), cache, cache, **tables)

    with (
        lz.lock("paged_attention", "lz.cpp_paged_attention" if kernel == "writing" else kernel),
        pytest.raises(ArgumentError, match=re.escape(f"expected {text}")),
    ):
        call()


@pytest.mark.parametrize("wide", [2**32, -(2**32), 2**31])
def test_numbers_beyond_int32_are_no_blocks(wide):
    cache = torch.randn(8, 16, 2, 16)
    table = torch.tensor([[0, wide, 2]])
    with pytest.raises(ArgumentError, match=f"block_table of blocks from 0 to 7, received {wide} in row 0"):
        lz.paged_attention(torch.randn(1, 4, 16), cache, cache, table, torch.tensor([40]))
    with pytest.raises(ArgumentError, match=f"received {abs(wide)}"):
        lz.paged_attention(torch.randn(1, 4, 16), cache, cache, torch.tensor([[0, 1, 2]]), torch.tensor([abs(wide)]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout": "NDH"}, "expected layout as one of NHD, HND, received 'NDH'"),
        ({"layout": "HND"}, "expected query with heads in a multiple of the cache's, 16, received 4. Caches are HND"),
        ({"window": 0}, "expected window as a whole number, 1 or more"),
        ({"softcap": 0.0}, "expected softcap as a finite number above 0"),
        ({"lengths": torch.ones(2)}, r"expected lengths [R] in int64 or int32, received torch.float32"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "expected block_table [R, M] of shape (3, 3), received (2, 3)"),
        ({"query": torch.ones(3, 4, 16)}, "expected query with one token for each of 2 requests, received 3. Give query_starts"),
        ({"query": torch.ones(2, 4, 8)}, "expected key_cache [N, P, Hk, D] of shape (8, 16, 2, 8)"),
        ({"value_cache": torch.ones(8, 16, 1, 16)}, "expected value_cache [N, P, Hk, E] of shape (8, 16, 2, 16)"),
        ({"value_cache": torch.ones(8, 16, 2, 16).half()}, "expected value_cache in the dtype of key_cache"),
        ({"sinks": torch.ones(2)}, "expected sinks [Hq] of shape (4,)"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32, device="meta")}, "expected block_table on cpu"),
        ({"key_cache": torch.ones(8, 16, 2, 16).to(torch.int8), "value_cache": torch.ones(8, 16, 2, 16).to(torch.int8)},
         "expected key_scale for a cache in int8"),
        ({"lengths": torch.ones(2, dtype=torch.uint16)}, "expected lengths [R] in int64 or int32"),
        ({"query": torch.ones(2, 1, 4, 16), "query_starts": torch.tensor([0, 1, 2])}, "expected query_starts for query of three"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_named(changes, text):
    cache = torch.ones(8, 16, 2, 16)
    named = {"query": torch.ones(2, 4, 16), "key_cache": cache, "value_cache": cache,
             "block_table": torch.zeros(2, 3, dtype=torch.int32), "lengths": torch.ones(2, dtype=torch.int32)}  # fmt: skip
    with pytest.raises(ArgumentError, match=re.escape(text)):
        lz.paged_attention(**{**named, **changes})


def test_numbers_of_numpy_are_those_of_python_and_equal_ones_after_them():
    """In text, by which attributes come to an operator: equal ones are found again."""
    x = Problem([3, 8], counts=[1, 1], dtype=torch.float64, stored=torch.float64, has_sinks=True).operands()
    given = (x.query, x.key_cache, x.value_cache, x.block_table, x.lengths)
    named = {"query_starts": x.query_starts, "sinks": x.sinks}
    for number in (np.float32(0.75), np.int64(3)):
        expected = op.reference(x, attributes(x, scale=float(number), softcap=float(number)))
        for each in (number, float(number)):
            found = lz.paged_attention(*given, **named, scale=each, softcap=each)
            torch.testing.assert_close(found, expected)


def test_a_truth_value_of_numpy_is_none_of_its_words():
    attrs = op.PagedAttentionAttrs(scale=0.376, window=np.bool_(True))  # a scale that nothing else has
    assert decode(op.PagedAttentionAttrs, encode(attrs)).window is True


def test_nothing_is_read_or_written_around_the_operands():
    """Caches are the middle of larger memory whose ends are NaN or a mark."""
    memory = torch.full((3, 8, 16, 2, 16), math.nan)
    memory[1] = torch.randn(8, 16, 2, 16)
    marks = memory.clone()
    table, lengths = torch.tensor([[0, 7, 3], [7, 0, 1]], dtype=torch.int32), torch.tensor([48, 33])
    for kernel in KERNELS:
        with lz.lock("paged_attention", kernel):
            found = lz.paged_attention(torch.randn(2, 4, 16), memory[1], memory[1], table, lengths)
        assert found.isfinite().all()
    lz.write_to_cache(torch.ones(2, 2, 16), torch.ones(2, 2, 16), memory[1], memory[1].clone(), table, lengths)
    assert torch.equal(memory[0].isnan(), marks[0].isnan())
    assert torch.equal(memory[2].isnan(), marks[2].isnan())
    assert int((memory[1] != marks[1]).any(-1).any(-1).sum()) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_defaults_of_the_program_change_nothing(dtype):
    x = Problem([40, 9]).operands()
    exact = truth(x, attributes(x))
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            found = lz.paged_attention(*x.flat()[:5])
    finally:
        torch.set_default_dtype(torch.float32)
    assert_near(found, exact, torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
def test_caches_without_slots_and_batches_without_requests(kernel):
    empty, table, none = (
        torch.zeros(8, 0, 2, 16),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    with lz.lock("paged_attention", kernel):
        assert not lz.paged_attention(torch.randn(2, 4, 16), empty, empty, table, none).any()
        full = torch.randn(8, 4, 2, 16)
        assert lz.paged_attention(torch.randn(0, 4, 16), full, full, table[:0], none[:0]).shape == (0, 4, 16)
    for cache in (empty, torch.zeros(0, 4, 2, 16)):
        lz.write_to_cache(torch.ones(2, 2, 16), torch.ones(2, 2, 16), cache, cache.clone(), table, none)
    lz.write_to_cache(torch.ones(2, 2, 16), torch.ones(2, 2, 16), full, full.clone(), table[:, :0], none)


def test_a_compiled_write_to_a_place_that_there_is_not_is_left_out():
    """Where nobody looks at tables, nobody else's block is written to."""
    cache = torch.zeros(4, 2, 1, 4)
    table = torch.tensor([[-1, 0], [9, 0], [1, 2], [3, 0]], dtype=torch.int32)
    lengths = torch.tensor([1, 2, 9, 1], dtype=torch.int32)
    key = torch.ones(4, 1, 4)

    def write(key, key_cache, value_cache, table, lengths):
        lz.write_to_cache(key, key, key_cache, value_cache, table, lengths)

    values = cache.clone()
    with torch.no_grad():
        torch.compile(write, backend="aot_eager", fullgraph=True)(key, cache, values, table, lengths)
    assert cache.nonzero()[:, :2].unique(dim=0).tolist() == [[3, 0]]
    assert torch.equal(cache, values)


def test_blocks_that_there_are_not_give_nan_where_nobody_looks_at_tables():
    cache = torch.randn(4, 2, 1, 4)
    table, lengths = torch.tensor([[0, 9], [1, 2]], dtype=torch.int32), torch.tensor([4, 3], dtype=torch.int32)
    x = Operands(torch.randn(2, 1, 4), cache, cache, table, lengths)
    for call in (op.reference, torch_paged_attention._decode):
        found = call(x, attributes(x))
        assert bool(found[0].isnan().all())
        assert bool(found[1].isfinite().all())


def test_heads_that_are_symbols_leave_the_call_as_it_is():
    x = Problem([40, 9]).operands()
    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(lz.paged_attention, backend=backend, dynamic=True)
    with torch.no_grad():
        assert_near(compiled(*x.flat()[:5]), truth(x, attributes(x)), torch.float32)
    assert not backend.report.events


def test_a_kernel_without_a_compiler_leaves_the_call_to_pytorch(monkeypatch):
    from lz_compile.ground import health
    from lz_compile.lowering.kernels.paged_attention import cpp_source

    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_source, "_function", broken)
    x = Problem([40, 9]).operands()
    try:
        with events.collect() as happened:
            found = lz.paged_attention(*x.flat()[:5])
        assert_near(found, truth(x, attributes(x)), torch.float32)
        assert {event.code for event in happened} == {"KERNEL_FAILED", "KERNEL_RETIRED"}
        assert health.retired("lz.cpp_paged_attention") is not None
    finally:
        health.restore("lz.cpp_paged_attention")


def test_every_kernel_is_described():
    assert {*KERNELS, "inductor"} <= {*kernels("paged_attention")}
