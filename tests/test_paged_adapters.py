"""Libraries' attention over blocks, run on the CPU against fakes with their recorded signatures that compute the definition."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lz_compile.errors import ArgumentError
from lz_compile.ground import health
from lz_compile.ground.hardware import Hardware
from lz_compile.lowering.kernels.paged_attention import flash_attn_paged, flashinfer_paged
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs
from lz_compile.runtime.kernels import capabilities
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import of_facts
from tests.library_fakes import Library, installed, with_signature
from tests.test_paged_attention import Problem, assert_near, attributes, truth


class FlashAttention(Library):
    """``flash_attn``: rows of a ragged batch behind the last request are what memory was."""

    copies = True

    def modules(self) -> dict[str, ModuleType]:
        module = ModuleType("flash_attn")
        for name, body in (("flash_attn_with_kvcache", self._decode), ("flash_attn_varlen_func", self._ragged)):
            setattr(module, name, with_signature("flash_attn", name, body))
        return {"flash_attn": module}

    def _decode(self, given: Mapping[str, Any]) -> Tensor:
        query, lengths = given["q"], given["cache_seqlens"]
        self.ran("flash_attn_with_kvcache", query, given["k_cache"], given["v_cache"])
        assert query.dim() == 4
        return self._attend(query[:, 0], given["k_cache"], given["v_cache"], lengths, None, given)[:, None]

    def _ragged(self, given: Mapping[str, Any]) -> Tensor:
        query, starts, key_starts = given["q"], given["cu_seqlens_q"], given["cu_seqlens_k"]
        self.ran("flash_attn_varlen_func", query, given["k"], given["v"])
        assert given["dropout_p"] == 0
        assert given["causal"]
        assert given["max_seqlen_q"] > 1, "it would take every request for one of one query"
        assert given["max_seqlen_q"] >= starts.diff().max()
        assert starts.dtype == key_starts.dtype == torch.int32
        lengths = key_starts.diff().to(torch.int32)
        assert given["max_seqlen_k"] >= lengths.max()
        out = self._attend(query, given["k"], given["v"], lengths, starts, given)
        out[starts[-1] :] = torch.nan
        return out

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        starts: Tensor | None,
        given: Mapping[str, Any],
    ) -> Tensor:
        table = given["block_table"]
        assert query.dtype == key.dtype == value.dtype
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert key.shape == value.shape
        assert key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert key.shape[3] % 8 == 0
        assert key.shape[3] <= 256
        assert table.dtype == lengths.dtype == torch.int32
        assert table.stride(-1) == 1
        assert lengths.is_contiguous()
        assert given["window_size"] == (-1, -1)
        return _defined(
            query, key, value, table, lengths, starts, given["softmax_scale"], given["softcap"] or None, None
        )


class FlashInfer(Library):
    """``flashinfer``: requests in compressed rows, each with queries, and with no fewer keys."""

    def modules(self) -> dict[str, ModuleType]:
        library, name = self, "BatchPrefillWithPagedKVCacheWrapper"

        class Wrapper:
            __init__ = with_signature("flashinfer", f"{name}.__init__", library._init)
            plan = with_signature("flashinfer", f"{name}.plan", library._plan)
            run = with_signature("flashinfer", f"{name}.run", library._run)

        module = ModuleType("flashinfer")
        module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
        return {"flashinfer": module}

    def _init(self, given: Mapping[str, Any]) -> None:
        assert given["kv_layout"] == "NHD"
        assert given["backend"] == "fa2"
        assert given["float_workspace_buffer"].dtype == torch.uint8

    def _plan(self, given: Mapping[str, Any]) -> None:
        self.calls.append("plan")
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        assert all(given[name].dtype == torch.int32 for name in names)
        starts, pages, ids, last = (given[name] for name in names)
        assert pages[-1] == len(ids)
        assert starts[0] == pages[0] == 0
        assert last.min() >= 1
        assert last.max() <= given["page_size"]
        lengths = (pages.diff() - 1) * given["page_size"] + last
        assert (starts.diff() > 0).all()
        assert (starts.diff() <= lengths).all(), "nothing would be masked"
        given["self"].planned = (given, starts, pages, lengths.to(torch.int32))

    def _run(self, given: Mapping[str, Any]) -> Tensor:
        told, starts, pages, lengths = given["self"].planned
        query, (key, value) = given["q"], given["paged_kv_cache"]
        self.ran("run", query, key, value)
        assert query.dtype == told["q_data_type"] == key.dtype
        assert query.shape == (starts[-1], told["num_qo_heads"], told["head_dim_qk"])
        assert key.shape[1:] == (told["page_size"], told["num_kv_heads"], told["head_dim_qk"])
        assert told["causal"]
        table = torch.full((len(lengths), int(pages.diff().max())), -1, dtype=torch.int32)
        for row, first, end in zip(table, pages.tolist(), pages[1:].tolist(), strict=False):
            row[: end - first] = told["paged_kv_indices"][first:end]
        window = None if told["window_left"] < 0 else told["window_left"] + 1
        capped, scale = told["logits_soft_cap"], told["sm_scale"]
        return _defined(query, key, value, table, lengths, starts, scale, capped, window)


def _defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    x = Operands(query.double(), key, value, table, lengths, starts)
    told = {"scale": scale, "softcap": softcap, "window": window, "is_ragged": starts is not None}
    return op.reference(x, PagedAttentionAttrs(**told, out_dtype=query.dtype))


ADAPTERS = {
    "flash_attn.paged": (
        flash_attn_paged.paged_attention,
        FlashAttention,
        {"slots": 256, "dims": 40, "value_dims": 40},
    ),
    "flashinfer.paged": (flashinfer_paged.paged_attention, FlashInfer, {"slots": 5, "dims": 64, "value_dims": 64}),
}
for_every_adapter = pytest.mark.parametrize("name", ADAPTERS)


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    flashinfer_paged._wrapper.cache_clear()
    yield
    flashinfer_paged._wrapper.cache_clear()
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


def problem(name: str, lengths: list[int], counts: list[int] | None = None, **changes: Any) -> Operands:
    sizes = {**ADAPTERS[name][2], "dtype": torch.bfloat16, "stored": torch.bfloat16, **changes}
    return Problem(lengths, counts, **sizes).operands()


@pytest.mark.sampled
@for_every_adapter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("told", [{}, {"softcap": 2.0, "scale": 0.3}], ids=["plain", "told"])
@pytest.mark.parametrize("counts", [None, [2, 0, 5, 1, 3], [0, 0, 0, 0, 1]], ids=["decode", "ragged", "one"])
@pytest.mark.parametrize("is_hnd", [False, True])
def test_an_adapter_gives_what_the_definition_says(name, is_hnd, counts, told, dtype):
    adapter, library, _ = ADAPTERS[name]
    padding = 0 if counts is None else 2
    x = problem(name, [40, 3, 7, 0, 1], counts, dtype=dtype, stored=dtype, is_hnd=is_hnd, padding=padding)
    attrs = attributes(x, **told)
    with installed(library()) as fake:
        found = adapter(x, attrs)
    assert fake.calls
    assert not health.retirements()
    assert found.is_contiguous()
    assert found.dtype == dtype
    assert_near(found, truth(x, attrs), dtype)


@pytest.mark.parametrize("counts", [None, [3, 2, 9]], ids=["decode", "ragged"])
def test_windows_are_flashinfers_own(counts):
    name = "flashinfer.paged"
    x = problem(name, [40, 3, 17], counts)
    x.block_table[0, 0] = -7  # given away
    for window in (1, 6):
        with installed(FlashInfer()):
            found = flashinfer_paged.paged_attention(x, attributes(x, window=window))
        assert not health.retirements()
        clean = replace(x, block_table=x.block_table.clamp(min=0))
        assert_near(found, truth(clean, attributes(x, window=window)), torch.bfloat16)


@for_every_adapter
@pytest.mark.parametrize("counts", [None, [0, 0]], ids=["decode", "ragged"])
def test_a_batch_of_padding_is_zero(name, counts):
    adapter, library, _ = ADAPTERS[name]
    x = problem(name, [0, 0], counts, padding=0 if counts is None else 3)
    with installed(library()):
        assert not adapter(x, attributes(x)).any()
    assert not health.retirements()


def test_flash_attention_is_given_no_numbers_that_cannot_be():
    """It would read there. What it gives then is not defined."""
    x = problem("flash_attn.paged", [300, 40], [2, 1])
    wild = replace(
        x,
        block_table=torch.full_like(x.block_table, 2**31 - 1),
        lengths=torch.tensor([-3, 2**31 - 1], dtype=torch.int32),
        query_starts=torch.tensor([0, 9, 2], dtype=torch.int32),
    )
    with installed(FlashAttention()) as fake:
        flash_attn_paged.paged_attention(wild, attributes(wild))
    assert fake.calls
    assert not health.retirements()


def test_flashinfer_is_given_no_tables_that_lie():
    x = problem("flashinfer.paged", [40, 3])
    x.block_table[1, 0] = len(x.key_cache)
    with installed(FlashInfer()) as fake, pytest.raises(ArgumentError, match="block_table of blocks from 0 to"):
        flashinfer_paged.paged_attention(x, attributes(x))
    assert not fake.calls


@for_every_adapter
def test_a_call_that_fails_is_completed_and_the_kernel_retired(name):
    adapter, library, _ = ADAPTERS[name]
    x = problem(name, [40, 3], [2, 1])
    broken = library()
    broken.fails = True
    with installed(broken):
        found = adapter(x, attributes(x))
    assert health.retired(name)
    assert_near(found, truth(x, attributes(x)), torch.bfloat16)


# ---- what is said of them --------------------------------------------------------------------------------------------

H100 = Hardware("cuda", "NVIDIA H100", 90, "hopper", 4, frozenset(), 0)


def refusals(name: str, x: Operands, **told: Any) -> list[str]:
    sizes: dict[str, int] = {}
    for operand, each in x.given().items():
        sizes |= dict(zip((dim.removesuffix("|1") for dim in op.SHAPES[operand].split()), each.shape, strict=True))
    attrs, facts = op.from_operands(x, {**sizes, "Hk": x.key_cache.shape[2]}, **told)
    context = replace(of_facts("paged_attention", attrs, facts), hardware=H100)
    found = (str(each) for each in kernels("paged_attention")[name].check(context))
    return [each for each in found if "is not installed" not in each and "BACKEND" not in each]


@for_every_adapter
def test_what_a_library_takes_is_not_refused(name):
    assert not refusals(name, problem(name, [40, 3]))
    assert not refusals(name, problem(name, [40, 3], [2, 1]), softcap=2.0)


@pytest.mark.parametrize(("name", "changes", "told", "reasons"), [
    ("flash_attn.paged", {"slots": 16}, {}, ["[SIZE_ALIGNMENT] block_size 16, flash_attn.paged takes multiples of 256"]),
    ("flash_attn.paged", {}, {"window": 7}, ["[WINDOW_UNSUPPORTED] flash_attn.paged does not take a window of 7 keys"]),
    ("flash_attn.paged", {"dims": 20, "value_dims": 20}, {},
     ["[HEAD_DIM_ALIGNMENT] head_dim 20, flash_attn.paged takes multiples of 8"]),
    ("flashinfer.paged", {"dims": 80, "value_dims": 80}, {},
     ["[HEAD_DIM_ALIGNMENT] head_dim 80, flashinfer.paged takes multiples of 64"]),
    ("flashinfer.paged", {"has_sinks": True}, {},
     ["[SINKS_UNSUPPORTED] flashinfer.paged does not take an attention sink in the softmax"]),
    ("flashinfer.paged", {"stored": torch.int8}, {},
     ["[SCALES_UNSUPPORTED] flashinfer.paged does not take stored keys or values with a scale",
      "[INT8_CACHE_UNSUPPORTED] flashinfer.paged does not take a cache in int8"]),
    ("flashinfer.paged", {"dtype": torch.float32, "stored": torch.float32}, {},
     ["[DTYPE_UNSUPPORTED] flashinfer.paged takes bfloat16, float16, not float32"]),
])  # fmt: skip
def test_what_it_does_not_take_is_refused_with_a_reason(name, changes, told, reasons):
    assert refusals(name, problem(name, [40, 3], **changes), **told) == reasons


@for_every_adapter
def test_a_library_that_is_not_installed_is_the_reason_why_its_kernel_is_not_used(name):
    spec = kernels("paged_attention")[name]
    reason = spec.availability()
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        assert reason.code == "NOT_INSTALLED"
    else:
        assert reason is None or reason.code == "BACKEND_VERSION_UNSUPPORTED"
    assert not spec.prior
    assert spec.prior_source.startswith("none")


def test_multiples_are_of_sizes_that_the_op_has():
    kernel = {"kernel_id": "new.kernel", "platforms": ["cuda"], "dtypes": ["float16"], "requires_layouts": ["NHD"]}
    values = {"backend": "new", "source": "a test of this file"}
    kernel["multiples"] = {"block_sise": 16}
    with pytest.raises(ValueError, match=r"multiples: no size 'block_sise' \(did you mean 'block_size'\?\)"):
        capabilities.build({**values, "ops": {"paged_attention": [kernel]}})
