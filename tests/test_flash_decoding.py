"""Attention of few queries in C++: parts and tiles of long caches, what masks hide of them, and who chooses it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from backends import rewritten

from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import cost, flash_decoding
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import of_facts

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_ID = "lz.flash_decoding"


def _laid_out(chosen: random.Random, batch: int, heads: int, length: int, size: int) -> torch.Tensor:
    """Heads or tokens first, features apart from each other, or a part of something larger."""
    make = chosen.choice((
        lambda: torch.randn(batch, heads, length, size),
        lambda: torch.randn(batch, length, heads, size).transpose(1, 2),
        lambda: torch.randn(batch, heads, size, length).transpose(2, 3),
        lambda: torch.randn(batch, heads, length + 3, size + 5)[:, :, 2 : length + 2, 3 : size + 3],
    ))  # fmt: skip
    return make()


def _case(seed: int) -> tuple[Operands, AttentionAttrs]:
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    size, value_size = chosen.choice(((32, 32), (24, 32), (27, 20)))
    batch, kv_heads, groups = chosen.randint(1, 3), chosen.randint(1, 3), chosen.choice((1, 1, 2, 3, 4))
    queries, keys, heads = chosen.choice((1, 1, 2, 5, 16)), chosen.choice((17, 64, 65, 300, 700)), kv_heads * groups
    dtype = chosen.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    sizes = ((heads, queries, size), (kv_heads, keys, size), (kv_heads, keys, value_size))
    attrs = AttentionAttrs(enable_gqa=groups > 1, nan_is_open=True, scale=chosen.choice((None, 0.3)))
    attrs = replace(attrs, softcap=chosen.choice((None, None, 5.0)), score_dtype=dtype)
    given = {}

    def over(last: int) -> list[int]:
        return [chosen.choice((1, batch)), chosen.choice((1, 1, heads)), chosen.choice((1, queries)), last]

    def hidden(extents: list[int]) -> torch.Tensor:
        """Some keys here and there, and all from somewhere on, as of a cache that is not full, elsewhere for each head."""
        return (torch.rand(extents) > chosen.choice((0.2, 0.97))) | (
            torch.arange(keys) >= torch.randint(keys, (*extents[:3], 1))
        )

    if chosen.random() < 0.5:
        given["mask"] = ~hidden(over(keys))
        attrs = replace(attrs, has_mask=True, selects_masked=True, masked_rows=chosen.choice(("nan", "mean", "zero")))
    if chosen.random() < 0.5:
        if attrs.masked_rows == "mean":  # the lowest number of which dtype, else
            dtype, attrs = torch.float32, replace(attrs, score_dtype=torch.float32)
        extents = over(keys)
        least = [torch.finfo(dtype).min, *([-math.inf] if attrs.masked_rows != "mean" else [])]
        bias = torch.randn(extents).masked_fill(hidden(extents), chosen.choice(least))
        given["bias"] = bias.to(dtype)
        attrs = replace(attrs, has_bias=True, bias_can_mask=True, bias_is_finite=bool(given["bias"].isfinite().all()))
    if chosen.random() < 0.3:
        given["slopes"], attrs = torch.rand(1, heads, 1, 1) / 4, replace(attrs, has_slopes=True)
    if chosen.random() < 0.3 and attrs.masked_rows != "mean":
        given["sinks"], attrs = torch.randn(*over(1)[:3], 1), replace(attrs, has_sinks=True)
    band = chosen.choice(
        (None, None, Band(upper=0, at_end=True), Band(lower=-chosen.randint(1, 90), upper=0, at_end=True))
    )
    if band is not None and queries <= keys:
        attrs = replace(attrs, band=band)
    heads_of = (_laid_out(chosen, batch, *each).to(dtype) for each in sizes)
    return Operands(*heads_of, **given), attrs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(60))
def test_long_caches_are_read_in_parts_as_the_reference_reads_them_whole(seed):
    x, attrs = _case(seed)
    actual = flash_decoding._attention(x, attrs)
    # In float32: what is added to scores rounds them there, and a row that sees nothing but finite fills shows it.
    wide = Operands(**{name: each.float() if each.is_floating_point() else each for name, each in x.given().items()})
    expected = reference(wide, replace(attrs, score_dtype=torch.float32))
    tolerance = TOLERANCE[x.query.dtype]
    assert actual.dtype == x.query.dtype
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("is_added", [False, True])
def test_what_a_mask_hides_is_not_read(is_added):
    # NaN would show: an additive mask passes it on, where it is read.
    query, key, value = (torch.randn(2, 2, length, 32) for length in (1, 700, 700))
    keep = (torch.arange(700) < 100).view(1, 1, 1, -1)
    key[:, :, 192:], value[:, :, 192:] = math.nan, math.nan
    if is_added:
        given = {"bias": torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)}
        attrs = AttentionAttrs(has_bias=True, bias_is_finite=True, bias_can_mask=True, masked_rows="mean")
    else:
        given, attrs = {"mask": keep}, AttentionAttrs(has_mask=True)
    actual = flash_decoding._attention(Operands(query, key, value, **given), attrs)
    expected = reference(Operands(query, key[:, :, :100], value[:, :, :100]), AttentionAttrs())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked_rows", ["nan", "mean", "zero"])
def test_a_query_of_nan_gives_nan_in_its_row_and_a_row_without_keys_what_it_is_said_to(masked_rows):
    query, key, value = (torch.randn(1, 2, length, 32) for length in (3, 70, 70))
    query[0, 0, 1] = math.nan
    keep = torch.arange(70) < torch.tensor([70, 30, 0]).view(1, 1, 3, 1)
    for sinks in (None, torch.full((1, 1, 1, 1), -math.inf)):
        attrs = AttentionAttrs(has_mask=True, selects_masked=True, masked_rows=masked_rows, has_sinks=sinks is not None)
        x = Operands(query, key, value, mask=keep, sinks=sinks)
        torch.testing.assert_close(flash_decoding._attention(x, attrs), reference(x, attrs), equal_nan=True)
        nothing = Operands(query, *(each[:, :, :0] for each in (key, value)), mask=keep[..., :0], sinks=sinks)
        assert torch.equal(flash_decoding._attention(nothing, attrs), torch.zeros(1, 2, 3, 32))


def test_masks_that_fill_scores_with_the_lowest_number_are_proven_with_nan_in_queries():
    def function(query, key, value, keep):
        scores = query @ key.transpose(-1, -2) / 4
        return scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1) @ value

    inputs = (*(torch.randn(1, 2, length, 16) for length in (3, 40, 40)), torch.rand(1, 1, 3, 40) > 0.5)
    torch.testing.assert_close(rewritten(function, *inputs, lock={"attention": _ID}), function(*inputs))


def test_the_bits_depend_neither_on_threads_nor_on_other_rows():
    x = Operands(*(torch.randn(3, 4, length, 64) for length in (1, 2100, 2100)))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(flash_decoding._attention(x, AttentionAttrs()))
    finally:
        torch.set_num_threads(before)
    alone = flash_decoding._attention(Operands(*(each[1:2] for each in x.flat()[:3])), AttentionAttrs())
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(found))
    assert torch.equal(found[0][1:2], alone)


def test_it_is_for_few_queries():
    facts = AttentionFacts(1, 4, 4, 16, 300, 64, 64, torch.float32, "cpu")
    many = replace(facts, query_len=17)
    spec = kernels("attention")[_ID]
    assert spec.check(of_facts("attention", AttentionAttrs(), facts)) == []
    assert [str(each) for each in spec.check(of_facts("attention", AttentionAttrs(), many))] == [
        "[SIZE_INVALID] seq_len_q 17, lz.flash_decoding takes 1..16"
    ]


def test_shared_keys_cost_what_they_are_and_not_what_copies_of_them_would():
    sizes = {"batch_size": 1, "num_heads": 32, "num_kv_heads": 8, "seq_len_q": 1, "seq_len_k": 2048}
    sizes |= {"head_dim": 128, "value_dim": 128}
    shared = cost.work(_ID, torch.float32, frozenset({"gqa"}), sizes)
    alone = cost.work(_ID, torch.float32, frozenset(), {**sizes, "num_kv_heads": 32})
    assert shared.amounts["row"] < alone.amounts["row"] / 2
