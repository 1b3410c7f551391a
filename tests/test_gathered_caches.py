"""Attention over keys gathered from blocks, as people write it: read where it lies, or left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from lz_compile.passes.paged_attention import gathered
from tests.backends import Rewriting

pytestmark = pytest.mark.usefixtures("no_preference")
REQUESTS, COLUMNS, HEADS, KV_HEADS, DIM, BLOCKS = 3, 4, 4, 2, 16, 12
OP = "paged_attention"

Function = Callable[..., Tensor]


def problem(
    slots: int = 4, *, queries: int = 1, hnd: bool = False, lengths: tuple[int, ...] = (3, 16, 9)
) -> list[Tensor]:
    cache = torch.randn(2, BLOCKS, KV_HEADS, slots, DIM) if hnd else torch.randn(2, BLOCKS, slots, KV_HEADS, DIM)
    table = torch.randperm(BLOCKS)[: REQUESTS * COLUMNS].reshape(REQUESTS, COLUMNS)
    return [torch.randn(REQUESTS, queries, HEADS, DIM), *cache.unbind(), table, torch.tensor(lengths)]


# ---- spellings -------------------------------------------------------------------------------------------------------


def _indexed(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table]


def _selected(cache: Tensor, table: Tensor) -> Tensor:
    return cache.index_select(0, table.reshape(-1)).view(*table.shape, *cache.shape[1:])


def _embedded(cache: Tensor, table: Tensor) -> Tensor:
    return F.embedding(table, cache.flatten(1)).unflatten(-1, cache.shape[1:])


def _cast(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table.to(torch.int64).contiguous(), :]


GATHERS = (_indexed, _selected, _embedded, _cast)


def _keys(taken: Tensor, *, hnd: bool) -> Tensor:
    """``[R, keys, heads, features]``."""
    return (taken.transpose(2, 3) if hnd else taken).reshape(taken.shape[0], -1, KV_HEADS, DIM)


def _by_slots(cache: Tensor, table: Tensor) -> Tensor:
    slots = cache.shape[1]
    places = (table[:, :, None] * slots + torch.arange(slots)).flatten(1)
    return cache.view(-1, *cache.shape[2:])[places]


def _places(table: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(table.shape[1] * slots)
    return table.gather(1, (place // slots).expand(table.shape[0], -1).to(table.dtype)), place % slots


def _blocks_and_slots(table: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    return table[:, :, None], torch.arange(slots)[None, None]


#: Of a table: blocks, and the slots within these.
INDICES = (_places, _blocks_and_slots)


def _sees(lengths: Tensor, keys: int, queries: int, window: int | None, form: str) -> Tensor:
    """``[R, S, keys]``."""
    place = torch.arange(keys)
    last = lengths[:, None] - queries + torch.arange(queries) if form != "newest" else (lengths - 1)[:, None]
    sees = {
        "ends": lambda: place < (last + 1)[..., None],
        "positions": lambda: place[None, None, :] <= last[:, :, None],
        "dropped": lambda: torch.logical_not(last.unsqueeze(-1) - place < 0),
        "newest": lambda: lengths[:, None, None] > place,
    }[form]()
    return sees if window is None else sees & (place > last[..., None] - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, form: str) -> Tensor:
    """Of ``[R, S, Hq, D]`` and ``[R, keys, Hk, D]``."""
    if form == "sdpa":
        given = [each.transpose(1, 2) for each in (q, k, v)]
        return F.scaled_dot_product_attention(*given, attn_mask=sees[:, None], enable_gqa=True).transpose(1, 2)
    if form == "sdpa added":
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        bias = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
    if form == "einsum":
        grouped = q.unflatten(2, (KV_HEADS, -1))
        scores = torch.einsum("rshgd,rkhd->rshgk", grouped, k) * DIM**-0.5
        scores = torch.where(sees[:, :, None, None], scores, -torch.inf)
        return torch.einsum("rshgk,rkhd->rshgd", scores.softmax(-1), v).flatten(2, 3)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 2) for each in (k, v))
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / DIM**0.5
    scores = scores + torch.where(sees[:, None], 0.0, torch.finfo(torch.float32).min)
    return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def spelling(gather: Any, sees: str, attention: str, *, queries: int, window: int | None, hnd: bool) -> Function:
    def attend(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        if gather in INDICES:
            index = gather(table, key_cache.shape[1])
            k, v = (_keys(each[index], hnd=False) for each in (key_cache, value_cache))
        elif gather is _by_slots:
            k, v = gather(key_cache, table), gather(value_cache, table)
        else:
            k, v = (_keys(gather(each, table), hnd=hnd) for each in (key_cache, value_cache))
        return _attend(q, k, v, _sees(lengths, k.shape[1], queries, window, sees), attention)

    return attend


def run(function: Function, inputs: list[Tensor]) -> tuple[Tensor, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting()
    with torch.no_grad():
        return torch.compile(function, backend=backend, fullgraph=True)(*inputs), backend


@settings(
    max_examples=examples(12, 60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(
    gather=st.sampled_from((*GATHERS, _by_slots, *INDICES)),
    sees=st.sampled_from(("ends", "positions", "dropped", "newest")),
    attention=st.sampled_from(("sdpa", "sdpa added", "einsum", "by hand")),
    queries=st.sampled_from((1, 1, 3)),
    window=st.sampled_from((None, None, 5)),
    hnd=st.booleans(),
    slots=st.sampled_from((1, 4, 16)),
)
def test_generated_spellings_read_the_cache_where_it_lies(gather, sees, attention, queries, window, hnd, slots):
    hnd = hnd and gather in GATHERS
    if sees == "newest":
        queries = 1
    if (
        queries > 1 or window is not None
    ) and attention == "by hand":  # a row that sees no key is the mean of all values
        attention = "einsum"
    function = spelling(gather, sees, attention, queries=queries, window=window, hnd=hnd)
    most = COLUMNS * slots
    inputs = problem(slots, queries=queries, hnd=hnd, lengths=(most, max(1, most // 2), min(most, 3)))
    found, backend = run(function, inputs)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [(OP, True)], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("attention", ["sdpa", "sdpa added", "einsum", "by hand"])
@pytest.mark.parametrize("lengths", [(0, 1, 16), (-3, 400, 5)], ids=["none", "beyond"])
def test_requests_without_keys_and_beyond_their_table_are_as_in_the_source(attention, lengths):
    function = spelling(_indexed, "newest", attention, queries=1, window=None, hnd=False)
    inputs = problem(lengths=lengths)
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_block_may_be_counted_from_the_end():
    function = spelling(_indexed, "ends", "sdpa", queries=1, window=None, hnd=False)
    inputs = problem()
    inputs[3] = inputs[3] - BLOCKS
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", INDICES)
def test_blocks_and_slots_may_be_counted_from_the_end(index):
    def function(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        blocks, slots = index(table, key_cache.shape[1])
        k, v = (
            _keys(each[blocks - BLOCKS, slots - key_cache.shape[1]], hnd=False) for each in (key_cache, value_cache)
        )
        return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")

    inputs = problem()
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)


def test_blocks_that_do_not_lie_in_one_piece_are_copied():
    def function(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        index = _places(table, key_cache.shape[1])
        k, v = (_keys(each[index], hnd=False) for each in (key_cache, value_cache))
        return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")

    inputs = problem(hnd=True)  # slots behind heads, seen as if they lay before them
    inputs[1:3] = [each.transpose(1, 2) for each in inputs[1:3]]
    found, backend = run(function, inputs)
    assert OP not in [match.op for match in backend.report.matches]
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)


def test_all_keys_of_a_table_may_be_seen():
    def function(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        k, v = (_keys(each[table], hnd=False).transpose(1, 2) for each in (key_cache, value_cache))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True)

    inputs = problem()
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)


def test_softcap_sinks_and_scales_come_along():
    def function(
        q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor
    ) -> Tensor:
        k, v = (_keys(each[table], hnd=False).repeat_interleave(2, 2) for each in (key_cache, value_cache))
        scores = torch.einsum("rshd,rkhd->rhsk", q, k) * 0.3
        scores = 20.0 * torch.tanh(scores / 20.0)
        scores = scores.masked_fill(torch.arange(k.shape[1]) >= lengths[:, None, None, None], -torch.inf)
        extra = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        return torch.einsum("rhsk,rkhd->rshd", weights, v)

    inputs = [*problem(), torch.randn(HEADS)]
    found, backend = run(function, inputs)
    (match,) = [match for match in backend.report.matches if match.rewritten]
    assert (match.op, match.attributes["softcap"], match.attributes["scale"]) == (OP, 20.0, 0.3)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)


def test_a_step_that_writes_its_token_first_reads_it():
    def step(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        slots = key_cache.shape[1]
        block = table.gather(1, ((lengths - 1) // slots)[:, None])[:, 0]
        key_cache[block, (lengths - 1) % slots] = q[:, 0, :KV_HEADS]
        value_cache.index_put_((block, (lengths - 1) % slots), q[:, 0, :KV_HEADS] * 2)
        return spelling(_indexed, "ends", "sdpa", queries=1, window=None, hnd=False)(
            q, key_cache, value_cache, table, lengths
        )

    inputs = problem()
    copies = [each.clone() for each in inputs]
    found, backend = run(step, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, step(*copies), rtol=1e-4, atol=1e-5)
    for one, other in zip(inputs, copies, strict=True):
        torch.testing.assert_close(one, other)


def test_how_many_requests_there_are_may_be_a_symbol():
    function = spelling(_indexed, "ends", "sdpa", queries=1, window=None, hnd=False)
    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for requests in (3, 2):
        q, key_cache, value_cache, table, lengths = problem()
        q, table, lengths = (each[:requests] for each in (q, table, lengths))
        for each in (q, table, lengths):
            torch._dynamo.mark_dynamic(each, 0)
        with torch.no_grad():
            found = compiled(q, key_cache, value_cache, table, lengths)
        expected = function(q, key_cache, value_cache, table, lengths)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()


def test_every_size_but_that_of_a_head_may_be_a_symbol():
    function = spelling(_indexed, "ends", "sdpa", queries=1, window=None, hnd=False)
    torch._dynamo.reset()
    backend = Rewriting()
    inputs = problem()
    with torch.no_grad():
        found = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(*inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)
    assert not backend.report.events, backend.why_not()


def test_a_slot_below_a_symbolic_size_keeps_the_copy():
    def attend(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        index = _places(table, keys.shape[1])
        k, v = (each[index] for each in (keys, values))
        sees = torch.arange(k.shape[1]) < lengths[:, None]
        return _attend(q, k, v, sees[:, None], "einsum")

    torch._dynamo.reset()
    backend, inputs = Rewriting(), problem()
    for each in inputs[1:3]:
        torch._dynamo.mark_dynamic(each, 1)
    with torch.no_grad():
        found = torch.compile(attend, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, attend(*inputs), rtol=1e-4, atol=1e-5)
    assert not any(match.op == OP for match in backend.report.matches)
    assert not backend.report.events, backend.why_not()


class _Tabled(torch.nn.Module):
    """Keys and values by slots that are buffers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_keys", torch.arange(16) % 4)
        self.register_buffer("of_values", torch.arange(16) % 4)

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        blocks = table[:, torch.arange(16) // 4]
        sees = torch.arange(16) < lengths[:, None]
        return _attend(q, keys[blocks, self.of_keys], values[blocks, self.of_values], sees[:, None], "einsum")


def test_tables_that_are_equal_by_the_values_of_buffers_are_so_as_long_as_these_are():
    module, backend = _Tabled(), Rewriting()
    function, inputs = torch.compile(module, backend=backend, fullgraph=True), problem()
    for slots in (torch.arange(16) % 4, 3 - torch.arange(16) % 4):
        module.of_values.copy_(slots)
        with torch.no_grad():
            torch.testing.assert_close(function(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)
    assert not backend.report.events, backend.why_not()


def test_what_is_overwritten_behind_an_attention_keeps_no_cache_from_being_read():
    plain = spelling(_indexed, "ends", "by hand", queries=1, window=None, hnd=False)

    def attend(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        found = plain(q, keys, values, table, lengths)
        keys.zero_()
        return found

    inputs = problem()
    want = attend(*map(torch.clone, inputs))
    found, backend = run(attend, list(map(torch.clone, inputs)))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    assert not backend.report.events, backend.why_not()


# ---- what only looks like it -----------------------------------------------------------------------------------------


def _other_table(q, key_cache, value_cache, table, lengths):
    k, v = _keys(key_cache[table], hnd=False), _keys(value_cache[table.flip(1)], hnd=False)
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _future(q, key_cache, value_cache, table, lengths):
    """Several queries that all see the same keys, and one that sees keys from a number on."""
    k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
    return _attend(q, k, v, torch.arange(k.shape[1]) >= lengths[:, None, None] - 1, "sdpa")


def _by_data(q, key_cache, value_cache, table, lengths):
    k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
    return _attend(q, k, v, (k[..., 0, 0] > 0)[:, None], "sdpa")


def _written_between(q, key_cache, value_cache, table, lengths):
    k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
    key_cache.mul_(0.5)
    value_cache.zero_()
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _table_written(q, key_cache, value_cache, table, lengths):
    index = table + 0
    k, v = (_keys(each[index], hnd=False) for each in (key_cache, value_cache))
    index.zero_()
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _slots_outside(q, key_cache, value_cache, table, lengths):
    k, v = (each[table].transpose(1, 2).reshape(REQUESTS, -1, KV_HEADS, DIM) for each in (key_cache, value_cache))
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _computed_keys(q, key_cache, value_cache, table, lengths):
    k, v = _keys(key_cache[table].tanh(), hnd=False), _keys(value_cache[table], hnd=False)
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _other_lengths(q, key_cache, value_cache, table, lengths):
    k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
    return _attend(
        q, k, v, torch.arange(k.shape[1]) < (lengths * lengths)[:, None, None] + torch.arange(HEADS)[0], "sdpa"
    )


def _two_ends(q, key_cache, value_cache, table, lengths):
    k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
    place = torch.arange(k.shape[1])
    sees = (place < lengths[:, None, None]) & (place < table[:, :1, None] + 2)
    return _attend(q, k, v, sees, "sdpa")


def _values_of_more_heads(q, key_cache, value_cache, table, lengths):
    """Keys that all heads share, values that half of them do."""
    k, v = key_cache[table][:, :, :, :1].flatten(1, 2), value_cache[table].flatten(1, 2)
    k, v = k.expand(-1, -1, HEADS, -1), v.repeat(1, 1, HEADS // KV_HEADS, 1)
    return _attend(q, k[:, :, :KV_HEADS], v[:, :, :KV_HEADS], _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _written_between_gathers(q, key_cache, value_cache, table, lengths):
    index = table.clone()
    k = _keys(key_cache[index], hnd=False)
    index[:] = 0
    v = _keys(value_cache[index], hnd=False)
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


def _around_the_newest(q, key_cache, value_cache, table, lengths):
    k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
    return _attend(q, k, v, (torch.arange(k.shape[1]) - lengths[:, None, None]).abs() < 3, "sdpa")


def _scaled_in_place(q, key_cache, value_cache, table, lengths):
    k = key_cache[table]
    k.mul_(2)
    k, v = _keys(k, hnd=False), _keys(value_cache[table], hnd=False)
    return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")


LOOKALIKES = [
    _values_of_more_heads, _written_between_gathers, _around_the_newest, _scaled_in_place,
    _other_table, _future, _by_data, _written_between, _table_written, _slots_outside, _computed_keys, _two_ends,
]  # fmt: skip


@pytest.mark.parametrize("function", LOOKALIKES, ids=lambda each: each.__name__)
def test_what_only_looks_like_it_stays_an_attention(function):
    inputs = problem()
    copies = [each.clone() for each in inputs]
    found, backend = run(function, inputs)
    assert OP not in [match.op for match in backend.report.matches]
    torch.testing.assert_close(found, function(*copies), rtol=1e-4, atol=1e-5)
    for one, other in zip(inputs, copies, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_other_table, "values are not gathered by the same table"),
        (_around_the_newest, "the mask does not say that a request sees all keys before a number of its own"),
        (_slots_outside, "what is gathered is no blocks of keys"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_why_keys_are_copied_is_told(function, reason):
    _, backend = run(function, problem())
    told = [each for match in backend.report.matches for each in match.mask_reasons]
    assert [each.code for each in told if reason in each.message] == ["KEYS_COPIED"], told
    assert reason in " ".join(str(backend.report).split()) or reason in backend.why_not()


@pytest.mark.parametrize("form", ["clone", "cast", "narrow", "narrowed"])
def test_a_table_that_was_made_and_written_is_read_as_it_is_then(form):
    def function(q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        if form == "clone":
            table = table.clone()
            table[:, 0] = 7
        elif form == "narrowed":
            table = (table + 257).to(torch.uint8).long()
        else:
            table = table.long()
            table.clamp_(min=0)
        k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
        return _attend(q, k, v, _sees(lengths, k.shape[1], 1, None, "ends"), "sdpa")

    inputs = problem()
    inputs[3] = inputs[3] - 1
    inputs[3] = inputs[3].to({"cast": torch.int32, "narrow": torch.int8}.get(form, torch.int64))
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5)


def test_queries_that_are_no_numbers_stay_so_where_no_key_is_seen():
    function = spelling(_indexed, "newest", "by hand", queries=1, window=None, hnd=False)
    inputs = problem(lengths=(0, 5, 9))
    inputs[0][0, 0, 0, 0] = torch.nan
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_a_request_sees_may_be_computed():
    inputs = problem(lengths=(1, 4, 2))
    found, backend = run(_other_lengths, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, _other_lengths(*inputs), rtol=1e-4, atol=1e-5)


def test_training_keeps_the_gathered_keys():
    function = spelling(_indexed, "ends", "sdpa", queries=1, window=None, hnd=False)
    inputs = problem()
    inputs[0].requires_grad_()
    torch._dynamo.reset()
    backend = Rewriting()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    assert OP not in [match.op for match in backend.report.matches]


# ---- caches that are not gathered, and not full ----------------------------------------------------------------------

KEYS = 256


@pytest.fixture
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "LEAST_NUMBERS", 1)


def _filled(form: str) -> Function:
    def step(q: Tensor, key_cache: Tensor, value_cache: Tensor, place: Tensor) -> Tensor:
        """Of heads before keys; what is new is written first, where it is said so."""
        sees = torch.arange(KEYS) <= place
        if form == "written":
            key_cache.index_copy_(2, place, q[:, :KV_HEADS])
            value_cache[:, :, place] = q[:, :KV_HEADS]
            return F.scaled_dot_product_attention(q, key_cache, value_cache, sees[None], enable_gqa=True)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key_cache, value_cache))
        if form == "added":
            bias = torch.zeros(KEYS).masked_fill(~sees, -torch.inf)
            return F.scaled_dot_product_attention(q, key, value, attn_mask=bias[None])
        scores = (q @ key.transpose(-1, -2)) * DIM**-0.5
        return scores.masked_fill(torch.logical_not(sees), -torch.inf).softmax(-1) @ value

    return step


@pytest.mark.usefixtures("_small_caches")
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("form", ["written", "added", "by hand"])
def test_of_a_cache_that_is_not_full_only_that_is_read_which_is_seen(form, requests):
    function, backend = _filled(form), Rewriting()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for place in (0, 40, KEYS - 4):
        torch.manual_seed(place)
        inputs = [
            torch.randn(requests, HEADS, 1, DIM),
            *torch.randn(2, requests, KV_HEADS, KEYS, DIM),
            torch.tensor([place]),
        ]
        copies = [each.clone() for each in inputs]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), function(*copies), rtol=1e-4, atol=1e-5)
        for one, other in zip(inputs, copies, strict=True):
            torch.testing.assert_close(one, other)
    (match,) = [match for match in backend.report.matches if match.rewritten]
    assert match.op == OP, backend.why_not()
    assert "block_table" not in match.formula


def test_a_small_cache_is_read_whole():
    inputs = [torch.randn(1, HEADS, 1, DIM), *torch.randn(2, 1, KV_HEADS, KEYS, DIM), torch.tensor([40])]
    _, backend = run(_filled("by hand"), inputs)
    assert [match.op for match in backend.report.matches] == ["attention"]


@pytest.mark.usefixtures("_small_caches")
def test_two_layers_that_share_a_mask_and_write_before_they_read():
    def layers(q: Tensor, key_cache: Tensor, value_cache: Tensor, place: Tensor) -> Tensor:
        sees = (torch.arange(KEYS)[None] <= place[:, None])[None, None]
        for layer in range(2):
            key_cache[layer, :, :, place] = q[:, :KV_HEADS]
            value_cache[layer, :, :, place] = q[:, :KV_HEADS] + layer
            q = F.scaled_dot_product_attention(q, key_cache[layer], value_cache[layer], attn_mask=sees, enable_gqa=True)
        return q

    inputs = [torch.randn(2, HEADS, 1, DIM), *torch.randn(2, 2, 2, KV_HEADS, KEYS, DIM), torch.tensor([70])]
    copies = [each.clone() for each in inputs]
    found, backend = run(layers, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP, OP], backend.why_not()
    torch.testing.assert_close(found, layers(*copies), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs[1], copies[1])


@pytest.mark.parametrize("form", ["place is changed", "cache is changed", "heads differ", "several queries"])
def test_what_is_overwritten_or_seen_otherwise_stays_an_attention(form):
    def step(q: Tensor, key_cache: Tensor, value_cache: Tensor, place: Tensor) -> Tensor:
        sees = torch.arange(KEYS) <= place
        scores = torch.einsum("bhsd,bhkd->bhsk", q, key_cache)
        if form == "place is changed":
            place.zero_()
        if form == "cache is changed":
            value_cache.mul_(2.0)
            key_cache.zero_()
        if form == "heads differ":
            sees = torch.arange(KEYS) <= (place + torch.arange(KV_HEADS)[:, None, None])
        if form == "several queries":  # of which the last ones may look beyond the cache
            scores = scores.expand(-1, -1, 3, -1)
            sees = torch.arange(KEYS) <= (place + torch.arange(3))[:, None]
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value_cache

    inputs = [torch.randn(2, KV_HEADS, 1, DIM), *torch.randn(2, 2, KV_HEADS, KEYS, DIM), torch.tensor([70])]
    copies = [each.clone() for each in inputs]
    found, backend = run(step, inputs)
    torch.testing.assert_close(found, step(*copies), rtol=1e-4, atol=1e-5)
    if form != "place is changed":  # how many keys there are is counted then
        assert OP not in [match.op for match in backend.report.matches if match.rewritten]


# ---- caches of which requests see no key before one of their own -----------------------------------------------------


def _begun(form: str, attention: str) -> Function:
    def step(q: Tensor, key_cache: Tensor, value_cache: Tensor, place: Tensor, start: Tensor) -> Tensor:
        """Prompts are padded on the left; the newest key is in the same place, or each request has its own."""
        at = torch.arange(KEYS)
        sees = at <= (place[:, None] if form == "own ends" else place[:1])
        if form != "a window":
            sees = sees & (at >= start[:, None])
        if form in ("a window", "both"):
            sees = sees & (at > (place[:1] - 9))
        if form == "two starts":
            sees = sees & (at - 2 >= start[:, None] // 2)
        sees = sees.expand(q.shape[0], KEYS)[:, None, None]
        if attention == "sdpa":
            return F.scaled_dot_product_attention(q, key_cache, value_cache, sees, enable_gqa=True)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key_cache, value_cache))
        scores = (q @ key.transpose(-1, -2)) * DIM**-0.5
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value

    return step


@pytest.mark.usefixtures("_small_caches")
@pytest.mark.parametrize("attention", ["sdpa", "by hand"])
@pytest.mark.parametrize("form", ["a start", "own ends", "a window", "both", "two starts"])
def test_of_a_cache_only_what_lies_between_a_start_and_an_end_is_read(form, attention):
    function, backend = _begun(form, attention), Rewriting()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for ends, starts in (([40, 33, 250], [0, 7, 31]), ([255, 255, 3], [254, 256, 4]), ([300, 2, 0], [9, -5, 0])):
        inputs = [torch.randn(3, HEADS, 1, DIM), *torch.randn(2, 3, KV_HEADS, KEYS, DIM)]
        inputs += [torch.tensor(ends), torch.tensor(starts)]
        with torch.no_grad():
            expected = function(*inputs)
            torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    (match,) = [match for match in backend.report.matches if match.rewritten]
    assert match.op == OP, backend.why_not()
    assert match.attributes["has_first_keys"]
    assert match.attributes["window"] is None


@pytest.mark.usefixtures("_small_caches")
def test_keys_before_a_start_are_not_read():
    function, inputs = (
        _begun("a start", "sdpa"),
        [torch.randn(3, HEADS, 1, DIM), *torch.randn(2, 3, KV_HEADS, KEYS, DIM)],
    )
    inputs += [torch.tensor([90, 0, 0]), torch.tensor([3, 40, 80])]
    expected = function(*inputs)
    for cache in inputs[1:3]:
        cache[:, :, :3], cache[1, :, :40], cache[2, :, :80], cache[:, :, 91:] = (torch.nan,) * 4
    found, backend = run(function, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_small_caches")
@pytest.mark.parametrize("form", ["a start of each head", "a start that is changed"])
def test_starts_that_are_none_stay_what_they_are(form):
    def step(q: Tensor, key_cache: Tensor, value_cache: Tensor, place: Tensor, start: Tensor) -> Tensor:
        at = torch.arange(KEYS)
        sees = (at <= place) & (at >= start[:, None])
        sees = sees[:, None, None]
        if form == "a start of each head":
            sees = sees & (at >= torch.arange(HEADS)[:, None, None])
        if form == "a start that is changed":
            start.zero_()
        return F.scaled_dot_product_attention(q, key_cache, value_cache, sees, enable_gqa=True)

    inputs = [torch.randn(3, HEADS, 1, DIM), *torch.randn(2, 3, KV_HEADS, KEYS, DIM)]
    inputs += [torch.tensor([90]), torch.tensor([3, 40, 80])]
    copies = [each.clone() for each in inputs]
    found, backend = run(step, inputs)
    torch.testing.assert_close(found, step(*copies), rtol=1e-4, atol=1e-5)
    assert OP not in [match.op for match in backend.report.matches if match.rewritten]


@pytest.mark.parametrize("window", [None, 5])
def test_gathered_caches_may_begin_anywhere(window):
    def step(q, key_cache, value_cache, table, lengths, start):
        k, v = (_keys(each[table], hnd=False) for each in (key_cache, value_cache))
        at = torch.arange(k.shape[1])
        sees = (at < lengths[:, None]) & (at >= start[:, None])
        if window is not None:
            sees = sees & (at >= lengths[:, None] - window)
        return _attend(q, k, v, sees[:, None], "sdpa")

    inputs = [*problem(), torch.tensor([1, 12, 0])]
    found, backend = run(step, inputs)
    assert [match.op for match in backend.report.matches if match.rewritten] == [OP], backend.why_not()
    torch.testing.assert_close(found, step(*inputs), rtol=1e-4, atol=1e-5)
