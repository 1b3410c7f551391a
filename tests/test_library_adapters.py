"""Adapters of other libraries' attention, run on the CPU against fakes that have the libraries' recorded signatures."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code

from lz_compile.ground import events, health
from lz_compile.lowering import inductor
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import flashinfer as flashinfer_adapter
from lz_compile.lowering.kernels.attention import torch_cudnn, torch_flex
from lz_compile.lowering.kernels.attention.block_mask import Grid, of_parts
from lz_compile.lowering.ops.attention import Operands, features, merged_mask, reference
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.rewrite import Recipes, splice
from lz_compile.runtime.kernels.libraries import forget as forget_libraries
from lz_compile.runtime.kernels.libraries import load
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import of_facts
from tests.library_fakes import (
    RECORDS,
    FlashAttention,
    FlashAttention3,
    FlashInfer,
    Library,
    XFormers,
    installed,
    parameters_in,
)

KERNELS = Path(torch_cudnn.__file__).parent
#: Every adapter with attention; ``inductor`` is none, it leaves the subgraph alone. Norms are in test_norm_adapters.py.
DESCRIPTORS = {
    name: found
    for name, found in ((path.stem, json.loads(path.read_text())) for path in sorted(KERNELS.glob("*.json")))
    if name != "inductor" and "attention" in found["ops"]
}
LIBRARIES: dict[str, Callable[[], Library]] = {
    "flash_attn": FlashAttention,
    "flash_attn_interface": FlashAttention3,
    "flashinfer": FlashInfer,
    "xformers": XFormers,
}
#: Absolute and relative error that rounding to a dtype explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

for_every_library = pytest.mark.parametrize("name", LIBRARIES)


def adapter(name: str) -> Callable[..., Tensor]:
    return importlib.import_module(f"lz_compile.lowering.kernels.attention.{name}").attention


def supports(name: str) -> set[str]:
    return {feature for kernel in DESCRIPTORS[name]["ops"]["attention"] for feature in kernel["supports"]}


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    flashinfer_adapter._planned.cache_clear()
    yield
    flashinfer_adapter._planned.cache_clear()
    for kernel_id in list(health.retirements()):
        health.restore(kernel_id)


def operands(
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    queries: int = 9,
    keys: int = 9,
    kv_heads: int = 2,
    dim: int = 8,
) -> list[Tensor]:
    shapes = [(batch, 4, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def assert_near(actual: Tensor, given: Sequence[Tensor], attrs: AttentionAttrs, **masks: Tensor) -> None:
    exact = {name: x.double() if x.is_floating_point() else x for name, x in masks.items()}
    expected = reference(Operands(*(x.double() for x in given), **exact), attrs)
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def spliced(
    fn: Callable[..., Tensor], kernel: Callable[..., Tensor], backend: str = "inductor"
) -> Callable[..., Tensor]:
    """``fn`` compiled with its attention replaced by ``kernel``."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        matches = list(recognisers()["attention"](module.graph, Effects(module.graph)))
        assert len(matches) == 1, matches
        splice(module.graph, matches[0], kernel, Recipes())
        module.graph.lint()
        module.recompile()
        if backend == "inductor":
            return inductor.compile_graph(module, inputs, {}, "tests")
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(backend)(module, inputs)

    return torch.compile(fn, backend=compile_graph)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **options)


# ---- results ---------------------------------------------------------------------------------------------------------

_CASES = {
    "plain": (AttentionAttrs(), {}),
    "scale": (AttentionAttrs(scale=0.3), {}),
    "causal": (AttentionAttrs(is_causal=True), {}),
    "gqa": (AttentionAttrs(enable_gqa=True, scale=0.3), {}),
    "gqa_causal": (AttentionAttrs(enable_gqa=True, is_causal=True), {}),
    "one_sequence": (AttentionAttrs(enable_gqa=True, is_causal=True), {"batch": 1}),
    "other_keys": (AttentionAttrs(), {"keys": 14}),
    "softcap": (AttentionAttrs(softcap=2.0), {}),
    "softcap_causal": (AttentionAttrs(softcap=2.0, is_causal=True), {"batch": 1}),
}


def test_a_build_of_xformers_without_kernels_for_gpus_is_told_before_it_is_chosen():
    library = XFormers()
    library.has_kernels = False
    forget_libraries()
    try:
        with installed(library):
            assert "no CUDA kernels" in str(load(kernels("attention")["xformers"].implementation))
    finally:
        forget_libraries()


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@for_every_library
def test_an_adapter_gives_what_the_reference_gives(name, dtype, case):
    attrs, sizes = _CASES[case]
    if attrs.softcap is not None and "softcap" not in supports(name):
        pytest.skip(f"{name} does not claim softcap")
    given = operands(dtype, **{"kv_heads": 2 if attrs.enable_gqa else 4, **sizes})
    with installed(LIBRARIES[name]()) as library:
        actual = adapter(name)(Operands(*given), attrs)
    assert library.calls
    assert actual.dtype == dtype
    assert not health.retirements()
    assert_near(actual, given, attrs)


@for_every_library
def test_an_adapter_takes_operands_in_any_memory_layout(name):
    attrs = AttentionAttrs(is_causal=True)
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(kv_heads=4)]
    given[1] = given[1].mT.contiguous().mT
    with installed(LIBRARIES[name]()) as library:
        actual = adapter(name)(Operands(*given), attrs)
    assert library.calls
    assert not health.retirements()
    assert_near(actual, given, attrs)


def test_flash_attention_3_may_return_the_logsumexp_too():
    given = operands(kv_heads=4)
    with installed(FlashAttention3(gives_lse=True)) as library:
        actual = adapter("flash_attn_interface")(Operands(*given), AttentionAttrs())
    assert library.calls
    assert not health.retirements()
    assert_near(actual, given, AttentionAttrs())


def test_flashinfer_plans_a_batch_once_for_its_sizes():
    with installed(FlashInfer()) as library:
        for _ in range(3):
            adapter("flashinfer")(Operands(*operands()), AttentionAttrs(enable_gqa=True))
        assert library.calls == ["plan", "run", "run", "run"]
        adapter("flashinfer")(Operands(*operands(queries=5)), AttentionAttrs(enable_gqa=True))
        assert library.calls[4:] == ["plan", "run"]


# ---- causality over unequal lengths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 9)])
@for_every_library
def test_causality_starts_at_the_first_query_and_key_whatever_the_library_does(name, queries, keys):
    attrs = AttentionAttrs(is_causal=True)
    given = operands(queries=queries, keys=keys, kv_heads=4)
    with installed(LIBRARIES[name]()) as library:
        actual = adapter(name)(Operands(*given), attrs)
    assert_near(actual, given, attrs)
    if "causal_rectangular" in supports(name):
        assert library.calls
    else:
        assert not library.calls, "the library would have aligned it at the last query and key"


def test_libraries_that_align_causality_at_the_end_do_not_claim_unequal_lengths():
    assert {name for name in LIBRARIES if "causal_rectangular" in supports(name)} == {"xformers"}


# ---- windows and ALiBi -----------------------------------------------------------------------------------------------

_SLOPES = torch.tensor([0.5, 0.25, 0.125, -0.3]).reshape(1, 4, 1, 1)
_SLOPES_BY_BATCH = torch.stack([_SLOPES[0], _SLOPES[0] * 2]).to(torch.bfloat16)
_AT_END = {"queries": 5, "keys": 9}
_BANDS = {
    "window": (AttentionAttrs(band=Band(-3, 0)), {}, {}),
    "window_of_one_sequence": (AttentionAttrs(band=Band(-3, 0), enable_gqa=True), {"batch": 1}, {}),
    "window_on_both_sides": (AttentionAttrs(band=Band(-2, 3)), {}, {}),
    "window_to_the_left": (AttentionAttrs(band=Band(lower=-3)), {}, {}),
    "window_to_the_right": (AttentionAttrs(band=Band(upper=3)), {}, {}),
    "causal_at_end": (AttentionAttrs(band=Band(upper=0, at_end=True)), _AT_END, {}),
    "one_query_at_end": (AttentionAttrs(band=Band(upper=0, at_end=True)), {"queries": 1}, {}),
    "window_at_end": (AttentionAttrs(band=Band(-3, 0, at_end=True), enable_gqa=True), _AT_END, {}),
    "window_and_softcap": (AttentionAttrs(band=Band(-3, 0), softcap=2.0), {}, {}),
    "window_from_first": (AttentionAttrs(band=Band(-3, 0)), _AT_END, {}),
    "alibi": (AttentionAttrs(is_causal=True, has_slopes=True), {}, {"slopes": _SLOPES}),
    "alibi_by_batch": (AttentionAttrs(is_causal=True, has_slopes=True), {}, {"slopes": _SLOPES_BY_BATCH}),
    "alibi_of_one_slope": (AttentionAttrs(is_causal=True, has_slopes=True), {}, {"slopes": _SLOPES[:, :1]}),
    "alibi_at_end": (
        AttentionAttrs(band=Band(-6, 0, at_end=True), has_slopes=True, softcap=2.0),
        _AT_END,
        {"slopes": _SLOPES},
    ),
    "alibi_on_both_sides": (AttentionAttrs(has_slopes=True), {}, {"slopes": _SLOPES}),
    "alibi_in_a_window": (AttentionAttrs(band=Band(-2, 3), has_slopes=True), {}, {"slopes": _SLOPES}),
}
#: Everybody else takes all of them.
_REFUSED = {
    "flash_attn": {"window_from_first", "alibi_on_both_sides", "alibi_in_a_window"},
    "flash_attn_interface": {"window_from_first", *(case for case in _BANDS if case.startswith("alibi"))},
    "flashinfer": {
        *("window_on_both_sides", "window_to_the_left", "window_to_the_right", "window_from_first"),
        *(case for case in _BANDS if case.startswith("alibi")),
    },
    "xformers": set(_BANDS) - {"causal_at_end", "one_query_at_end"},
}


def reasons_against(name: str, attrs: AttentionAttrs, given: Sequence[Tensor]) -> list[str]:
    """What speaks against a library's kernel because of what the attention is, not of where it would run."""
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = given[0].shape, given[1].shape
    facts = AttentionFacts(batch, heads, kv_heads, queries, keys, dim, given[2].shape[-1], torch.bfloat16, "cuda")
    (kernel,) = DESCRIPTORS[name]["ops"]["attention"]
    needed = {f"{feature.upper()}_UNSUPPORTED" for feature in features(attrs, facts)} | {"FEATURE_MISSING"}
    found = kernels("attention")[kernel["kernel_id"]].check(of_facts("attention", attrs, facts))
    return [reason.message for reason in found if reason.code in needed]


@pytest.mark.parametrize("case", _BANDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@for_every_library
def test_windows_and_alibi_are_those_of_the_reference_or_refused(name, dtype, case):
    attrs, sizes, masks = _BANDS[case]
    given = operands(dtype, **{"kv_heads": 2 if attrs.enable_gqa else 4, **sizes})
    assert bool(reasons_against(name, attrs, given)) == (case in _REFUSED[name])
    if case in _REFUSED[name]:
        return
    with installed(LIBRARIES[name]()) as library:
        actual = adapter(name)(Operands(*given, **masks), attrs)
    assert library.calls
    assert not health.retirements()
    assert_near(actual, given, attrs, **masks)


@pytest.mark.parametrize("case", _BANDS)
def test_a_library_that_fails_is_completed_with_the_same_window_and_slopes(case):
    attrs, sizes, masks = _BANDS[case]
    if case in _REFUSED["flash_attn"]:
        return
    given = operands(**{"kv_heads": 2 if attrs.enable_gqa else 4, **sizes})
    with installed(FlashAttention()) as library:
        library.fails = True
        actual = adapter("flash_attn")(Operands(*given, **masks), attrs)
    assert library.calls
    assert health.retired("flash_attn.v2")
    assert_near(actual, given, attrs, **masks)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("band", [Band(-4, -1, at_end=True), Band(1, 2)], ids=str)
def test_a_band_beside_a_querys_own_position_is_left_to_pytorch(band, softcap):
    attrs = AttentionAttrs(band=band, softcap=softcap)
    given = operands(queries=5, kv_heads=4)
    with installed(FlashAttention()) as library:
        actual = adapter("flash_attn")(Operands(*given), attrs)
    assert not library.calls
    assert_near(actual, given, attrs)


def test_what_a_library_takes_only_together_with_causality_is_told():
    given = operands(kv_heads=4)
    (alibi,) = reasons_against("flash_attn", AttentionAttrs(has_slopes=True), given)
    assert alibi == "flash_attn.v2 takes a bias that is linear in the distance (ALiBi) only together with causal"
    (window,) = reasons_against("flashinfer", AttentionAttrs(band=Band(-2, 3)), given)
    assert window == "flashinfer takes a window from -2 to 3 around each query only together with causal"


# ---- in compiled code ------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@for_every_library
def test_an_adapter_runs_inside_code_that_inductor_compiled(name, dtype, is_causal):
    given = operands(dtype)
    attrs = AttentionAttrs(is_causal=is_causal, enable_gqa=True, scale=0.4)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attention(query * 1.5, key, value, is_causal=is_causal, enable_gqa=True, scale=0.4)
        return out.transpose(1, 2).flatten(2) + 1

    with installed(LIBRARIES[name]()) as library, torch.no_grad():
        actual = spliced(model, adapter(name))(*given)
    assert library.calls
    assert not health.retirements()
    query = given[0] * 1.5
    assert_near((actual - 1).unflatten(2, (4, -1)).transpose(1, 2), [query, *given[1:]], attrs)


@for_every_library
def test_lengths_may_be_symbolic_in_compiled_code(name):
    with installed(LIBRARIES[name]()) as library, torch.no_grad():
        compiled = spliced(lambda q, k, v: attention(q, k, v).cos(), adapter(name))
        for length in (5, 9, 13):
            given = operands(queries=length, keys=length + 2, kv_heads=4)
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 2)
            torch.testing.assert_close(compiled(*given), attention(*given).cos(), atol=1e-5, rtol=1e-5)
    assert library.calls
    assert not health.retirements()


@for_every_library
def test_a_library_that_fails_while_it_runs_is_completed_by_pytorch_and_retired(name):
    given = operands()
    attrs = AttentionAttrs(enable_gqa=True)
    with installed(LIBRARIES[name]()) as library, torch.no_grad(), events.collect() as happened:
        library.fails = True
        compiled = spliced(lambda q, k, v: attention(q, k, v, enable_gqa=True) * 1, adapter(name))
        for _ in range(2):
            assert_near(compiled(*given), given, attrs)
    assert len([call for call in library.calls if call != "plan"]) == 1, "what is retired is not tried again"
    (kernel,) = DESCRIPTORS[name]["ops"]["attention"]
    assert "no kernel image is available" in str(health.retired(kernel["kernel_id"]))
    assert "KERNEL_FAILED" in {event.code for event in happened}


@for_every_library
def test_a_mask_that_no_descriptor_claims_is_our_own_bug(name):
    query, key, value = operands(kv_heads=4)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(AssertionError, match="is given a mask"):
        adapter(name)(Operands(query, key, value, mask=mask), AttentionAttrs(has_mask=True))


# ---- cuDNN -----------------------------------------------------------------------------------------------------------


def _cudnn(query, key, value, bias, lse, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    assert bias is None
    assert lse
    assert not dropout_p
    assert not debug
    out = attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)
    empty = torch.empty(0)
    shape = (*query.shape[:3], 1)
    return out, torch.zeros(shape), empty, empty, query.shape[2], key.shape[2], empty.sum(), empty.sum(), empty


def _cudnn_backward(grad, query, key, value, *rest, scale=None):
    """By hand: operators below autograd cannot ask it."""
    is_causal, groups = rest[-1], query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ keys.mT * scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1)
    of_weights = grad @ values.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_keys, of_values = of_scores.mT @ query, weights.mT @ grad
    return of_scores @ keys, *(x.unflatten(1, (-1, groups)).sum(2) for x in (of_keys, of_values))


@pytest.fixture
def cudnn_on_cpu() -> Iterator[None]:
    """PyTorch's cuDNN operators, computed by its CPU kernels; schema, fake and autograd formula are PyTorch's own."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", _cudnn, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", _cudnn_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("cudnn_on_cpu")
def test_cudnn_attention_and_its_gradients_are_the_references(is_causal):
    assert kernels("attention")["torch.cudnn"].supports >= {"causal", "gqa", "training"}
    attrs = AttentionAttrs(is_causal=is_causal, enable_gqa=True, scale=0.3)
    given = operands(keys=14)
    leaves = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    model = spliced(
        lambda q, k, v: attention(q, k, v, is_causal=is_causal, enable_gqa=True, scale=0.3) * 2, torch_cudnn.attention
    )
    out = model(*leaves)
    assert_near(out.detach() / 2, given, attrs)
    expected = torch.autograd.grad(reference(Operands(*exact), attrs).square().sum(), exact)
    actual = torch.autograd.grad((out / 2).square().sum(), leaves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_a_single_key_is_not_for_cudnn():
    given = operands(keys=1)
    attrs = AttentionAttrs(enable_gqa=True)
    assert_near(torch_cudnn.attention(Operands(*given), attrs), given, attrs)


def test_cudnn_attention_is_called_as_pytorch_declares_it():
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:8] == ("query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask".split())
    assert "scale" in names
    assert schema.returns[0].name == "output"


# ---- FlexAttention ---------------------------------------------------------------------------------------------------

_KEEP = torch.rand(2, 1, 9, 14, generator=torch.Generator().manual_seed(1)) > 0.4
_KEEP[..., 0] = True
_KEEP[0, 0, 3] = False
_BIAS = torch.randn(1, 4, 9, 14, generator=torch.Generator().manual_seed(2))
_BIAS_WITH_ROW = _BIAS.clone()
_BIAS_WITH_ROW[:, :, 5] = -torch.inf
_BIAS_LOWEST = _BIAS.clone()
_BIAS_LOWEST[:, :, 5] = torch.finfo(torch.float32).min

_SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0]).reshape(1, 4, 1, 1)
#: Ids that come back, and queries of documents without keys.
_DOCUMENTS = {
    "query_documents": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 5], [3, 3, 1, 1, 1, 1, 0, 0, 0]]),
    "key_documents": torch.tensor([[0] * 4 + [1] * 3 + [2] * 7, [0, 0, 0, 0, 3, 3, 1, 1, 1, 1, 1, 3, 3, 0]]),
}

_FLEX = {
    "plain": (AttentionAttrs(scale=0.3), {}),
    "causal": (AttentionAttrs(is_causal=True), {}),
    "softcap": (AttentionAttrs(softcap=2.0, is_causal=True), {}),
    "gqa": (AttentionAttrs(enable_gqa=True), {}),
    "mask_nan": (AttentionAttrs(has_mask=True), {"mask": _KEEP}),
    "mask_mean": (AttentionAttrs(has_mask=True, masked_rows="mean"), {"mask": _KEEP}),
    "mask_zero": (AttentionAttrs(has_mask=True, masked_rows="zero"), {"mask": _KEEP}),
    "mask_causal": (AttentionAttrs(has_mask=True, is_causal=True), {"mask": _KEEP}),
    "mask_of_keys": (AttentionAttrs(has_mask=True), {"mask": _KEEP[:, :, :1]}),
    "bias": (AttentionAttrs(has_bias=True, bias_is_finite=True), {"bias": _BIAS}),
    "bias_nan": (AttentionAttrs(has_bias=True), {"bias": _BIAS_WITH_ROW}),
    "bias_zero": (AttentionAttrs(has_bias=True, masked_rows="zero"), {"bias": _BIAS_WITH_ROW}),
    "bias_mean": (AttentionAttrs(has_bias=True, bias_is_finite=True, masked_rows="mean"), {"bias": _BIAS_LOWEST}),
    "both": (AttentionAttrs(has_bias=True, has_mask=True, softcap=3.0), {"bias": _BIAS_WITH_ROW, "mask": _KEEP}),
    "window": (AttentionAttrs(band=Band(-3, 0)), {}),
    "window_on_both_sides": (AttentionAttrs(band=Band(-2, 5)), {}),
    "causal_at_end": (AttentionAttrs(band=Band(upper=0, at_end=True)), {}),
    "window_at_end": (AttentionAttrs(band=Band(-4, 0, at_end=True), enable_gqa=True), {}),
    "beside": (AttentionAttrs(band=Band(-4, -2, at_end=True)), {}),
    "window_and_mask": (AttentionAttrs(band=Band(-4, 1), has_mask=True), {"mask": _KEEP}),
    "alibi": (AttentionAttrs(is_causal=True, has_slopes=True), {"slopes": _SLOPES}),
    "alibi_and_bias": (
        AttentionAttrs(has_slopes=True, has_bias=True, bias_is_finite=True, softcap=3.0),
        {"slopes": _SLOPES_BY_BATCH, "bias": _BIAS},
    ),
    "documents": (AttentionAttrs(has_documents=True), _DOCUMENTS),
    "documents_causal": (AttentionAttrs(has_documents=True, band=Band(upper=0, at_end=True)), _DOCUMENTS),
    "documents_mean": (AttentionAttrs(has_documents=True, masked_rows="mean", is_causal=True), _DOCUMENTS),
    "documents_zero": (AttentionAttrs(has_documents=True, masked_rows="zero", band=Band(-4, 0)), _DOCUMENTS),
    "documents_of_all_rows": (AttentionAttrs(has_documents=True), {k: v[:1] for k, v in _DOCUMENTS.items()}),
    "documents_and_mask": (
        AttentionAttrs(has_documents=True, has_mask=True, is_causal=True),
        {**_DOCUMENTS, "mask": _KEEP[:, :, :1]},
    ),
    "sinks": (AttentionAttrs(has_sinks=True, is_causal=True), {"sinks": _SINKS}),
    "sinks_and_mask": (AttentionAttrs(has_sinks=True, has_mask=True), {"sinks": _SINKS, "mask": _KEEP}),
    "sinks_and_mean": (
        AttentionAttrs(has_sinks=True, has_mask=True, masked_rows="mean", band=Band(-4, 0)),
        {"sinks": _SINKS, "mask": _KEEP},
    ),
    "both_mean": (
        AttentionAttrs(has_bias=True, has_mask=True, masked_rows="mean"),
        {"bias": _BIAS_WITH_ROW, "mask": _KEEP},
    ),
}


@pytest.mark.parametrize("case", _FLEX)
def test_flex_attention_gives_what_the_reference_gives(case):
    attrs, masks = _FLEX[case]
    given = operands(keys=14, kv_heads=2 if attrs.enable_gqa else 4, dim=16)
    given[2] = torch.cat([given[2], given[2] + 1], -1)[..., :24]
    assert_near(torch_flex.attention(Operands(*given, **masks), attrs), given, attrs, **masks)


def flex_gradients(
    call: Callable[..., Tensor], given: Sequence[Tensor], attrs: AttentionAttrs, **masks: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in given]
    return torch.autograd.grad(call(Operands(*leaves, **masks), attrs).cos().sum(), leaves)


#: Not claimed is the gradient of rows whose every key is masked, by a finite fill or by a bias.
_FLEX_TRAINED = [
    case
    for case, (attrs, masks) in _FLEX.items()
    if (attrs.masked_rows != "mean" or attrs.has_sinks) and masks.get("bias") is not _BIAS_WITH_ROW
]


@pytest.mark.parametrize("case", _FLEX_TRAINED)
def test_gradients_of_flex_attention_are_those_of_the_reference(case):
    attrs, masks = _FLEX[case]
    given = operands(keys=14, kv_heads=2 if attrs.enable_gqa else 4, dim=16)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in masks.items()}
    expected = flex_gradients(reference, [x.double() for x in given], attrs, **exact)
    if reference(Operands(*given, **masks), attrs).isnan().any():
        return  # so are the source's gradients
    assert "masked_row_gradient" not in supports("torch_flex")
    for one, other in zip(flex_gradients(torch_flex.attention, given, attrs, **masks), expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_flex_attention_is_a_node_with_graphs_of_its_own_and_has_gradients(has_mask, is_dynamic):
    seen: list[fx.Graph] = []

    def kernel(x, attrs):
        if isinstance(x.query, fx.Proxy):
            seen.append(x.query.tracer.graph)
        return torch_flex.attention(x, attrs)

    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        scores = torch.tanh(query @ key.mT * 0.3 / 5.0) * 5.0
        if has_mask:
            scores = scores.masked_fill(~keep, -torch.inf)
        return scores.softmax(-1) @ value * 2

    keep = _KEEP.clone()
    keep[0, 0, 3, 1] = True
    given = [x.requires_grad_() for x in operands(keys=14, kv_heads=4, dim=16)]
    if is_dynamic:
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 2)
        if has_mask:
            torch._dynamo.mark_dynamic(keep, [2, 3])
    out = spliced(model, kernel, backend="aot_eager")(*given, keep)
    expected = model(*given, keep)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    actual = torch.autograd.grad(out.square().sum(), given)
    for one, other in zip(actual, torch.autograd.grad(expected.square().sum(), given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    (graph,) = seen
    nodes = [node for node in graph.nodes if node.target is torch.ops.higher_order.flex_attention]
    assert len(nodes) == 1
    assert isinstance(nodes[0].meta["example_value"], tuple)
    bodies = [getattr(graph.owning_module, node.target) for node in graph.nodes if node.op == "get_attr"]
    assert len(bodies) == 2
    assert all(isinstance(body, fx.GraphModule) for body in bodies)


def emitted_by_flex(attrs: AttentionAttrs, has_documents: bool) -> Callable[..., Any]:
    """FlexAttention under a band, and over documents of five tokens that its graph makes."""

    def documents(tensor: Tensor) -> Tensor:
        return tensor.new_ones((1, tensor.shape[2]), dtype=torch.int64).cumsum(1) // 5

    def kernel(x, _):
        ids = {"query_documents": documents(x.query), "key_documents": documents(x.key)} if has_documents else {}
        return torch_flex.attention(Operands(x.query, x.key, x.value, **ids), attrs, tile=4)

    return kernel


@pytest.mark.sampled
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("band", [Band(upper=0), Band(-3, 0, at_end=True), Band(-2, 3)], ids=str)
def test_block_masks_are_made_in_the_graph_for_any_lengths(band, has_documents, is_dynamic):
    attrs = AttentionAttrs(band=band, has_documents=has_documents, masked_rows="zero")
    kernel = emitted_by_flex(attrs, has_documents)
    compiled = spliced(lambda q, k, v: attention(q, k, v) * 2, kernel, backend="aot_eager")
    for queries, keys in [(9, 14), (13, 17)]:
        given = [x.requires_grad_() for x in operands(queries=queries, keys=keys, kv_heads=4, dim=16)]
        if is_dynamic:
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 2)
        out, expected = compiled(*given), kernel(Operands(*given), attrs) * 2
        torch.testing.assert_close(out, expected)
        wanted = torch.autograd.grad(expected.square().sum(), given)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), wanted)


@pytest.mark.parametrize("case", _FLEX)
def test_tiles_that_flex_attention_skips_keep_nothing_and_full_ones_everything(case, monkeypatch):
    attrs, masks = _FLEX[case]
    seen: list[tuple[Any, ...]] = []

    def flex(query: Tensor, *rest: Any) -> Any:
        seen.append(rest)
        return torch.ops.higher_order.flex_attention(query, *rest)

    monkeypatch.setattr(torch_flex, "_flex", flex)
    given = operands(keys=14, kv_heads=2 if attrs.enable_gqa else 4, dim=16)
    x = Operands(*given, **masks)
    torch_flex.attention(x, attrs, tile=4)
    (_, _, _, block_mask, *_) = seen.pop()
    merged = merged_mask(x, attrs)
    keep = torch.ones(9, 14, dtype=torch.bool) if merged is None else merged
    keep = keep.expand(2, 4, 9, 14)
    for found in (computed(block_mask, 9, 14), computed(block_mask, 9, 14, by_key=True)):
        part, full = found
        assert not (part & full).any()
        assert ((part | full) >= keep).all()
        assert (keep >= full).all()
        is_known = not attrs.has_documents and (x.mask is None or attrs.limits is None)  # each by itself, exactly
        if block_mask[-2] == 4 and is_known:
            cut = F.pad(keep, (0, 2, 0, 3)).unflatten(3, (4, 4)).unflatten(2, (3, 4))
            expected = (cut.any(5).any(3), cut.all(5).all(3))
            some, every = (x.repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :9, :14] for x in expected)
            assert torch.equal(part | full, some)
            assert torch.equal(full, every)
    can_be_empty = attrs.has_mask or attrs.has_documents
    is_whole = merged is None or (attrs.masked_rows == "mean" and can_be_empty and not attrs.has_sinks)
    assert (block_mask[-2] > 4) == is_whole


def test_flex_attention_skips_what_sorted_documents_exclude():
    own = torch.arange(40).div(10, rounding_mode="floor")[None]
    by_query, by_key = of_parts(Grid(own, 40, 40, 5), None, None, own, own)
    for found in (by_query, by_key):
        assert found.count.sum() == 0
        assert found.full_count.tolist() == [[[2] * 8]]
        assert found.full_indices[0, 0, :, :2].tolist() == [[n, n + 1] for n in (0, 0, 2, 2, 4, 4, 6, 6)]


def computed(block_mask: tuple[Any, ...], queries: int, keys: int, *, by_key: bool = False) -> tuple[Tensor, Tensor]:
    """Which scores are computed under the predicate, and which without asking it, ``[2, 4, Sq, Sk]``."""
    tile = block_mask[-2]
    if tile > queries:
        return torch.ones(2, 4, queries, keys, dtype=torch.bool), torch.zeros(2, 4, queries, keys, dtype=torch.bool)
    fields = block_mask[6:10] if by_key else block_mask[2:6]
    found = []
    for count, indices in (fields[:2], fields[2:]):
        assert count.dtype == indices.dtype == torch.int32
        assert count.is_contiguous()
        assert indices.is_contiguous()
        assert ((indices >= 0) & (indices < indices.shape[-1])).all()
        counts = torch.arange(indices.shape[-1]) < count[..., None]
        dense = torch.zeros(indices.shape, dtype=torch.int64).scatter_add(-1, indices.long(), counts.long())
        assert (dense <= 1).all(), "no tile is computed twice"
        dense = dense.mT if by_key else dense
        grown = dense.bool().repeat_interleave(tile, 2).repeat_interleave(tile, 3)
        found.append(grown[:, :, :queries, :keys].expand(2, 4, queries, keys))
    return found[0], found[1]


def test_inductor_compiles_the_node_of_flex_attention(monkeypatch):
    """As far as its template for CPUs goes: no gradients, nothing pointwise after it."""
    monkeypatch.setitem(torch_flex._OPTIONS, "OUTPUT_LOGSUMEXP", False)

    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        scores = torch.tanh(query @ key.mT * 0.3 / 5.0) * 5.0
        return scores.masked_fill(keep, -torch.inf).softmax(-1) @ value

    given = operands(queries=20, keys=28, kv_heads=4, dim=16)
    drop = torch.ones(20, 28, dtype=torch.bool).triu(1)

    def kernel(x, attrs):
        return torch_flex.attention(replace(x, mask=None), replace(attrs, is_causal=True, has_mask=False))

    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        compiled, (code,) = run_and_get_code(spliced(model, kernel), *given, drop)
        torch.testing.assert_close(compiled, model(*given, drop), atol=1e-5, rtol=1e-5)
    assert "flex_attention" in code


# ---- what is said of them --------------------------------------------------------------------------------------------

ENTRIES = [(name, kernel) for name, found in DESCRIPTORS.items() for kernel in found["ops"]["attention"]]


@pytest.mark.parametrize(("name", "kernel"), ENTRIES, ids=[kernel["kernel_id"] for _, kernel in ENTRIES])
def test_every_kernel_has_an_adapter_with_the_ops_signature_and_a_source(name, kernel):
    assert len(DESCRIPTORS[name]["source"]) > 10
    module = importlib.import_module(f"lz_compile.lowering.kernels.attention.{name}")
    function = getattr(module, kernel.get("function") or "attention", None)
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:2] == ["x", "attrs"]
    assert all(parameters[each].default is not inspect.Parameter.empty for each in list(parameters)[2:])


@for_every_library
def test_a_kernel_behind_an_opaque_op_claims_no_gradients(name):
    for kernel in DESCRIPTORS[name]["ops"]["attention"]:
        assert kernel.get("is_opaque", True)
        assert not {"training", "bias_gradient", "masked_row_gradient", "dropout"} & set(kernel["supports"])


@for_every_library
def test_a_kernel_that_no_cuda_graph_may_capture_tells_inductor_so(name):
    (kernel,) = DESCRIPTORS[name]["ops"]["attention"]
    importlib.import_module(f"lz_compile.lowering.kernels.attention.{name}")
    known = {"flash_attn_interface": "flash_attn_3"}.get(name, name)
    inner = getattr(torch.ops.layerzero, f"{known}_kernel").default
    assert (torch.Tag.cudagraph_unsafe not in inner.tags) == kernel.get("is_cuda_graph_safe", False)


@for_every_library
def test_a_library_that_is_not_installed_is_the_reason_why_its_kernel_is_not_used(name):
    package = DESCRIPTORS[name]["package"]
    (kernel,) = DESCRIPTORS[name]["ops"]["attention"]
    reason = kernels("attention")[kernel["kernel_id"]].availability()
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        assert reason is not None
        assert reason.code == "NOT_INSTALLED"
        assert package in reason.message
    else:
        assert reason is None or reason.code == "BACKEND_VERSION_UNSUPPORTED"


@pytest.mark.parametrize("record", RECORDS, ids=[f"{each['module']}.{each['name']}" for each in RECORDS])
def test_recorded_signatures_are_those_of_the_installed_library(record):
    try:
        distribution = importlib.metadata.distribution(record["distribution"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {record['distribution']}; its signature is recorded from version {record['version']}")
    source = Path(str(distribution.locate_file(record["file"].removeprefix("hopper/")))).read_text()
    name = record["name"]
    assert parameters_in(source, name) == record["parameters"]


@pytest.mark.parametrize("parts", ["mask", "documents", "band"])
def test_inductor_lays_out_what_flex_attention_skips_as_its_template_reads_it(monkeypatch, parts):
    """Once read beyond its end on a GPU: a dimension of one had the stride of all, queries the stride of one."""
    from torch._inductor import ir, lowering
    from torch._inductor.select_algorithm import realize_inputs

    found = []

    class SeenError(Exception):
        pass

    def look(query, key, value, score, mask, *rest):
        for each in mask:
            if isinstance(each, ir.TensorBox):
                buffer = realize_inputs(each)
                while not isinstance(buffer, ir.Buffer):
                    buffer = buffer.data
                buffer.decide_layout()
                found.append((buffer.get_size(), buffer.get_stride()))
        raise SeenError

    monkeypatch.setitem(lowering.lowerings, torch.ops.higher_order.flex_attention, look)
    given = [torch.randn(4, 2, 512, 8) for _ in range(3)]
    ids = (torch.arange(512) * 3 // 512).expand(4, -1).contiguous()
    more = {
        "mask": {"mask": torch.rand(4, 1, 512, 512) > 0.1}, "band": {},
        "documents": {"query_documents": ids, "key_documents": ids},
    }[parts]  # fmt: skip
    attrs = AttentionAttrs(is_causal=parts == "band", has_mask=parts == "mask", has_documents=parts == "documents")

    def attention(query, key, value, *others):
        return torch_flex.attention(Operands(query, key, value, **dict(zip(more, others, strict=True))), attrs)

    with pytest.raises(Exception, match="SeenError"):
        inductor.compile_apart(attention, [*given, *more.values()])(*given, *more.values())
    assert len(found) == 8
    assert all(stride == ir.FlexibleLayout.contiguous_strides(size) for size, stride in found)
