"""Packed sequences: attention per document, its gradients, and that what documents exclude is not computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import packed, token_major
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import of_facts

#: Absolute and relative error against float64.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DOCUMENTS = AttentionAttrs(has_documents=True)
CAUSAL = replace(DOCUMENTS, is_causal=True)
WINDOW = replace(DOCUMENTS, band=Band(-3, 0))

for_every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def ids(*rows: Sequence[int]) -> Tensor:
    """Document ids, from how long the documents of each row are."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def operands(
    queries: int, keys: int | None = None, *, batch: int = 2, heads: int = 4, kv_heads: int = 4, value_dim: int = 8
) -> list[Tensor]:
    length = queries if keys is None else keys
    generator = torch.Generator().manual_seed(queries)
    shapes = [(batch, queries, heads, 8), (batch, length, kv_heads, 8), (batch, length, kv_heads, value_dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes]


def expected(tensors: Sequence[Tensor], own: Tensor, theirs: Tensor, attrs: AttentionAttrs) -> Tensor:
    return reference(Operands(*tensors, query_documents=own, key_documents=theirs), attrs)


def run(tensors: Sequence[Tensor], own: Tensor, theirs: Tensor, attrs: AttentionAttrs) -> Tensor:
    return packed.attention(Operands(*tensors, query_documents=own, key_documents=theirs), attrs)


def gradients(call: Any, tensors: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = call(leaves, *rest)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return torch.autograd.grad(out, leaves, weight)


def assert_right(
    tensors: Sequence[Tensor], own: Tensor, attrs: AttentionAttrs, theirs: Tensor | None = None, slack: float = 1.0
) -> None:
    """Result and gradients are those of the reference in float64."""
    theirs = own if theirs is None else theirs
    exact = [tensor.double() for tensor in tensors]
    tolerance = slack * TOLERANCE[tensors[0].dtype]
    actual = run(tensors, own, theirs, attrs)
    assert actual.dtype == tensors[0].dtype
    assert actual.transpose(1, 2).is_contiguous()
    want = expected(exact, own, theirs, attrs)
    torch.testing.assert_close(actual.double(), want, atol=tolerance, rtol=tolerance, equal_nan=True)
    if want.isnan().any():
        return
    found = gradients(run, tensors, own, theirs, attrs)
    for one, other in zip(found, gradients(expected, exact, own, theirs, attrs), strict=True):
        torch.testing.assert_close(one.double(), other, atol=4 * tolerance, rtol=4 * tolerance)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What PyTorch's attention is called for: batch, queries, keys, and how it is masked."""
    seen: list[str] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *, attn_mask=None, is_causal=False, **options: Any) -> Tensor:
        how = " masked" if attn_mask is not None else " causal" if is_causal else ""
        seen.append(f"{query.shape[0]} x {query.shape[2]} of {key.shape[2]}{how}")
        return sdpa(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return seen


# ---- results and gradients -------------------------------------------------------------------------------------------

_BANDS = {
    "documents": None,
    "causal": Band(upper=0),
    "window": Band(-3, 0),
    "window_on_both_sides": Band(-5, 20),
    "window_to_the_right": Band(upper=4),
    "window_to_the_left": Band(lower=-2),
}


@pytest.mark.parametrize("band", _BANDS.values(), ids=_BANDS)
@for_every_dtype
def test_each_document_attends_to_itself(dtype, band):
    attrs = CAUSAL if band == Band(upper=0) else replace(DOCUMENTS, band=band)
    tensors = [tensor.to(dtype) for tensor in operands(45)]
    assert_right(tensors, ids([5, 20, 1, 19], [45]), attrs)
    assert_right(tensors, ids([15, 15, 15]), attrs)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_may_be_zero_or_negative(scale):
    assert_right(operands(30), ids([20, 10]), replace(CAUSAL, scale=scale))


@pytest.mark.parametrize("attrs", [CAUSAL, WINDOW, DOCUMENTS], ids=["causal", "window", "documents"])
def test_query_heads_may_share_keys_and_values_may_have_a_size_of_their_own(attrs):
    grouped = replace(attrs, enable_gqa=True, scale=0.3)
    assert_right(operands(30, kv_heads=2, value_dim=6), ids([10, 3, 17]), grouped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_gradients_of_16_bits_are_right_in_short_and_in_long_documents(dtype):
    lengths = [packed.FEW_QUERIES, packed.FEW_QUERIES + 1]
    assert_right([tensor.to(dtype) for tensor in operands(sum(lengths))], ids(lengths), CAUSAL)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("band", [Band(upper=0), Band(-6, 0), Band(-2, 5), None], ids=str)
def test_queries_may_be_the_last_of_more_keys(band, at_end):
    attrs = replace(DOCUMENTS, band=None if band is None else replace(band, at_end=at_end), masked_rows="zero")
    theirs = ids([10, 12, 8], [4, 4, 22])
    assert_right(operands(11, 30), theirs[:, -11:], attrs, theirs)


def test_a_window_is_cut_into_blocks_of_queries(monkeypatch, calls):
    monkeypatch.setattr(packed, "BLOCK", 8)
    assert_right(operands(40), ids([20, 2, 18]), WINDOW)
    blocks = ["2 x 8 of 8 masked", "2 x 8 of 11 masked", "2 x 4 of 7 masked", "2 x 2 of 2 masked"]
    assert calls[:4] == blocks
    assert calls[4:7] == ["2 x 8 of 8 masked", "2 x 8 of 11 masked", "2 x 2 of 5 masked"]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_ids_and_bands_give_what_the_reference_gives(data):
    batch = data.draw(st.integers(1, 3))
    is_self = data.draw(st.booleans())
    keys = data.draw(st.integers(1, 24))
    queries = keys if is_self else data.draw(st.integers(1, keys))
    rows = data.draw(st.sampled_from([1, batch]))
    row = st.lists(st.integers(0, 3), min_size=keys, max_size=keys)
    theirs = torch.tensor([data.draw(row.map(sorted) | row) for _ in range(rows)])
    own = theirs if is_self else theirs[:, -queries:]
    lower, upper = data.draw(st.tuples(st.none() | st.integers(-9, 0), st.none() | st.integers(0, 9)))
    attrs = AttentionAttrs(
        band=None if lower is upper is None else Band(lower, upper, data.draw(st.booleans()) and queries != keys),
        masked_rows=data.draw(st.sampled_from(["nan", "zero", "mean"])),
        has_documents=True,
        score_dtype=torch.float64,
    )
    assert_right(operands(queries, keys, batch=batch, heads=2, kv_heads=2), own, attrs, theirs)


# ---- what is computed ------------------------------------------------------------------------------------------------


def test_what_documents_exclude_is_not_computed(calls):
    run(operands(100), ids([30, 50, 20], [60, 20, 20]), ids([30, 50, 20], [60, 20, 20]), CAUSAL)
    first = ["1 x 30 of 30 causal", "1 x 50 of 50 causal", "1 x 20 of 20 causal"]
    assert calls == [*first, "1 x 60 of 60 causal", "2 x 20 of 20 causal"]


def test_rows_with_the_same_documents_are_computed_together(calls):
    own = ids([30, 30, 40])
    run(operands(100, batch=3), own, own, DOCUMENTS)
    run(operands(100, batch=3), own.expand(3, -1), own.expand(3, -1), DOCUMENTS)
    assert calls == ["6 x 30 of 30", "3 x 40 of 40"] * 2


def test_a_single_document_is_one_plain_call(calls):
    own = torch.zeros(1, 64, dtype=torch.int64)
    run(operands(64), own, own, CAUSAL)
    assert calls == ["2 x 64 of 64 causal"]


def test_causality_is_counted_from_the_start_of_each_document(calls):
    theirs = ids([40, 20])
    own = ids([10, 20])
    at_end = replace(DOCUMENTS, band=Band(upper=0, at_end=True))
    run(operands(30, 60), own, theirs, at_end)
    assert calls == ["2 x 10 of 40 masked", "2 x 20 of 20 causal"]


def test_ids_that_come_back_are_computed_under_one_mask(calls):
    own = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2]])
    assert_right(operands(8), own, CAUSAL)
    assert calls[0] == "2 x 8 of 8 masked"


@pytest.mark.parametrize("masked_rows", ["nan", "zero", "mean"])
def test_queries_without_any_key_give_what_the_source_would_give(masked_rows):
    attrs = replace(DOCUMENTS, masked_rows=masked_rows, score_dtype=torch.float64)
    tensors = operands(9)
    own = torch.tensor([[0, 0, 0, 7, 7, 1, 1, 1, 1]])
    theirs = ids([3, 6])
    assert_right(tensors, own, attrs, theirs)
    row = run(tensors, own, theirs, attrs)[0, 0, 3]
    if masked_rows == "mean":
        torch.testing.assert_close(row, tensors[2][0, 0].mean(0))
    else:
        assert (row.isnan() if masked_rows == "nan" else row == 0).all()


@pytest.mark.parametrize("attrs", [CAUSAL, DOCUMENTS], ids=["causal", "documents"])
def test_nan_in_a_query_stays_in_its_row_however_short_its_document_is(attrs):
    tensors = [tensor.float() for tensor in operands(40)]
    own = ids([3, 9, 1, 27])
    clean = run(tensors, own, own, attrs)
    for position in (1, 7, 12, 20):
        tensors[0][0, 0, position] = math.nan
        clean[0, 0, position] = math.nan
    torch.testing.assert_close(run(tensors, own, own, attrs), clean, equal_nan=True)


def test_nothing_of_another_document_is_read():
    tensors = [tensor.float() for tensor in operands(40)]
    own = ids([10, 30])
    clean = run(tensors, own, own, CAUSAL)[:, :, 10:]
    for tensor in tensors:
        tensor[:, :, :10] = math.nan
    torch.testing.assert_close(run(tensors, own, own, CAUSAL)[:, :, 10:], clean)


# ---- in compiled code ------------------------------------------------------------------------------------------------


def test_the_operator_passes_pytorchs_checks():
    tensors = [tensor.transpose(1, 2).requires_grad_() for tensor in operands(20)]
    own = ids([5, 15])
    given = token_major.Operands(*tensors, query_documents=own, key_documents=own)
    arguments = (*given.flat(), encode(CAUSAL))
    results = torch.library.opcheck(torch.ops.layerzero.packed.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("attrs", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_compiled_code_runs_it_forward_and_backward_for_any_documents(attrs):
    counter = CompileCounterWithBackend("inductor")

    def model(query: Tensor, key: Tensor, value: Tensor, own: Tensor) -> Tensor:
        return run((query * 2, key, value), own, own, attrs).cos()

    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def called(leaves: Sequence[Tensor], own: Tensor) -> Tensor:
        for leaf in leaves:
            torch._dynamo.mark_dynamic(leaf, 2)
        torch._dynamo.mark_dynamic(own, 1)
        return compiled(*leaves, own)

    for lengths in ([6, 14], [9, 2, 4, 16], [31]):
        tensors = [tensor.float() for tensor in operands(sum(lengths), kv_heads=2)]
        actual = gradients(called, tensors, ids(lengths))
        want = gradients(lambda leaves, own: model(*leaves, own), tensors, ids(lengths))
        for one, other in zip(actual, want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


def test_activation_checkpointing_recomputes_it():
    tensors = operands(20)
    own = ids([5, 15])

    def checkpointed(leaves: Sequence[Tensor]) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda *x: run(x, own, own, CAUSAL), *leaves, use_reentrant=False)

    for one, other in zip(
        gradients(checkpointed, tensors), gradients(expected, tensors, own, own, CAUSAL), strict=True
    ):
        torch.testing.assert_close(one, other)


# ---- what is said of it ----------------------------------------------------------------------------------------------


def _against(attrs: AttentionAttrs, device: str = "cpu") -> list[str]:
    facts = AttentionFacts(2, 4, 4, 64, 64, 32, 32, torch.float32, device, needs_grad=True)
    return [str(reason) for reason in kernels("attention")["lz.packed"].check(of_facts("attention", attrs, facts))]


def test_it_is_for_documents():
    assert _against(CAUSAL) == []
    assert _against(replace(WINDOW, masked_rows="mean")) == []
    assert _against(AttentionAttrs(is_causal=True)) == ["[FEATURE_MISSING] lz.packed is for documents"]
    capped = _against(replace(CAUSAL, softcap=2.0))
    assert capped == ["[SOFTCAP_UNSUPPORTED] lz.packed does not take scores capped at 2.0"]
