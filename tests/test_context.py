"""Contexts: what is known of a device and of a problem, from Dynamo's graphs and from real tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import from_tensors
from torch import fx

from lz_compile.compile.problems import of_match
from lz_compile.ground import hardware as hardware_module
from lz_compile.ground.hardware import GENERATIONS, Hardware, generation_of, hardware
from lz_compile.ground.sizes import SymbolicSize, range_of
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match
from lz_compile.runtime.problem.context import (
    SelectionContext,
    SymbolicDim,
    dim_names,
    hint,
    of_facts,
    operations,
)

DIMS = ["batch_size", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k", "head_dim", "value_dim"]


@pytest.fixture(autouse=True)
def _ask_torch_again():
    hardware_module.forget()
    yield
    hardware_module.forget()


def contexts(function: Any, *inputs: Any, dynamic: bool | None = None, **settings: Any) -> list[SelectionContext]:
    """The context of every attention of every graph that Dynamo makes."""
    found = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        matches = recognisers()["attention"](module.graph, Effects(module.graph))
        found.extend(of_match(match, **settings) for match in matches if isinstance(match, Match))
        return module.forward

    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found


def attention(query, key, value):
    return (query @ key.transpose(-2, -1) * 0.25).softmax(-1) @ value


def operands(queries=5, keys=7, heads=3, **options):
    return [torch.randn(2, heads, length, 16, **options) for length in (queries, keys, keys)]


# ---- from a match ----------------------------------------------------------------------------------------------------


def test_static_sizes_are_numbers_by_the_names_of_the_spec():
    (context,) = contexts(attention, *operands(), dynamic=False)
    assert context.dims == dict(zip(DIMS, (2, 3, 3, 5, 7, 16, 16), strict=True))
    assert (context.operation, context.op, context.dtype) == ("attention.full", "attention", torch.float32)
    assert context.hardware == hardware(torch.device("cpu"))
    assert (set(context.features), context.layout, context.attn_mask_type) == ({"nan_in_few_keys"}, "BHSD", "none")
    assert not context.is_training
    assert not context.has_custom_scale  # 0.25 is 16 ** -0.5


def test_symbolic_sizes_have_the_hint_of_the_trace_and_the_range_that_guards_leave():
    (context,) = contexts(attention, *operands(queries=5, keys=70), dynamic=True)
    queries, keys = context.dims["seq_len_q"], context.dims["seq_len_k"]
    assert isinstance(queries, SymbolicDim)
    assert isinstance(keys, SymbolicDim)
    assert (queries.hint, queries.lower, queries.upper) == (5, 2, None)
    assert (keys.hint, keys.lower, keys.upper) == (70, 2, None)
    assert queries.name != keys.name
    assert context.sizes()["seq_len_k"] == 70


def test_a_declared_range_is_known():
    inputs = operands(queries=64, keys=70)
    torch._dynamo.mark_dynamic(inputs[0], 2, min=16, max=4096)
    (context,) = contexts(attention, *inputs)
    queries = context.dims["seq_len_q"]
    assert isinstance(queries, SymbolicDim)
    assert (queries.hint, queries.lower, queries.upper) == (64, 16, 4096)
    assert context.dims["seq_len_k"] == 70
    assert context.sizes()["seq_len_q"] == 4096
    assert context.hints()["seq_len_q"] == 64


def test_a_branch_that_dynamo_took_narrows_the_range():
    def branching(query, key, value):
        return attention(query, key, value) if query.shape[2] <= 32 else query

    (context,) = contexts(branching, *operands(), dynamic=True)
    queries = context.dims["seq_len_q"]
    assert isinstance(queries, SymbolicDim)
    assert (queries.lower, queries.upper) == (2, 32)


def test_asking_adds_no_guard_and_so_no_recompile():
    compiles = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        (match,) = recognisers()["attention"](module.graph, Effects(module.graph))
        compiles.append(of_match(match).to_dict())
        return module.forward

    compiled = torch.compile(attention, backend=backend, dynamic=True)
    for length in (5, 70, 700, 11):
        compiled(*operands(queries=length, keys=length + 1))
    assert len(compiles) == 1


def test_a_multiple_of_a_symbol_has_its_known_divisor_and_range():
    found = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
        (tensor,) = [value for value in values if isinstance(value, torch.Tensor)]
        size = tensor.shape[0]
        facts = _facts(head_dim=8 * size.node.expr, query_len=size.node.expr)
        found.append(of_facts("attention", AttentionAttrs(), facts, tensors=[tensor]))
        assert range_of(size) == SymbolicSize(hint=6, lower=2, upper=None)
        return module.forward

    torch.compile(lambda x: x * 2, backend=backend, dynamic=True)(torch.randn(6, 4))
    head_dim = found[0].dims["head_dim"]
    assert isinstance(head_dim, SymbolicDim)
    assert (head_dim.hint, head_dim.lower, head_dim.upper, head_dim.divisor) == (48, 16, None, 8)


@pytest.mark.parametrize(
    ("spell", "expected"),
    [
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ("attention.causal", "none")),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, k.new_ones(1, 1, 5, 7)), ("attention.full", "float")),
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, k[:, :1, :5, :1] > q[:, :1, :, :1]),
            ("attention.full", "bool"),
        ),
    ],
    ids=["causal", "float", "bool"],
)
def test_variant_and_mask_are_those_of_the_call(spell, expected):
    (context,) = contexts(spell, *operands())
    assert (context.operation, context.attn_mask_type) == expected


def test_training_scale_determinism_and_capture_are_noted():
    (context,) = contexts(lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v, *operands(requires_grad=True))
    assert context.is_training
    assert context.has_custom_scale
    assert "training" in context.features
    assert not context.requires_deterministic
    torch._dynamo.reset()
    (context,) = contexts(attention, *operands(), deterministic=True, is_cuda_graph_capturing=True)
    assert context.requires_deterministic
    assert context.is_cuda_graph_capturing


def test_torch_set_to_be_deterministic_asks_for_it():
    torch.use_deterministic_algorithms(True)
    try:
        assert contexts(attention, *operands())[0].requires_deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_features_apart_in_memory_are_seen_in_the_strides_of_the_operands():
    def transposed(query, key_t, value):
        return (query @ key_t * 0.25).softmax(-1) @ value

    query, key, value = operands()
    assert contexts(attention, query, key, value)[0].is_last_dim_contiguous
    torch._dynamo.reset()
    assert not contexts(transposed, query, key.mT.contiguous(), value)[0].is_last_dim_contiguous
    torch._dynamo.reset()
    assert contexts(transposed, query, key.contiguous().mT, value)[0].is_last_dim_contiguous


def _facts(**changes: Any) -> AttentionFacts:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "query_len": 64, "key_len": 64, "head_dim": 16, "value_dim": 16}
    return AttentionFacts(**{**sizes, "dtype": torch.float32, "device": "cpu", **changes})


def test_a_symbol_of_which_nothing_is_known_has_a_long_hint_and_no_limits():
    import sympy

    context = of_facts("attention", AttentionAttrs(), _facts(query_len=sympy.Symbol("u0", integer=True, positive=True)))
    queries = context.dims["seq_len_q"]
    assert isinstance(queries, SymbolicDim)
    assert (queries.hint, queries.lower, queries.upper, queries.name) == (8192, 0, None, "u0")


def test_a_device_that_torch_does_not_know_has_its_name_and_nothing_else():
    found = SimpleNamespace(attributes=AttentionAttrs(), facts=_facts(device="tpu"), operands={})
    assert of_match(SimpleNamespace(op="attention", found=found)).hardware == Hardware("tpu", "unknown")


# ---- from tensors ----------------------------------------------------------------------------------------------------


def test_tensors_in_both_layouts_give_the_same_sizes():
    query, key, value = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 8)
    context = from_tensors(query, key, value)
    assert context.dims == dict(zip(DIMS, (2, 6, 3, 5, 7, 16, 8), strict=True))
    turned = from_tensors(*(x.transpose(1, 2) for x in (query, key, value)), layout="BSHD")
    assert turned == replace(context, layout="BSHD")
    assert set(context.features) == {"gqa", "value_dim"}


def test_tensors_say_what_a_match_says():
    inputs = operands()
    (traced,) = contexts(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *inputs)
    assert from_tensors(*inputs, causal=True) == traced


def test_arguments_become_features():
    query, key, value = operands(requires_grad=True)
    context = from_tensors(query, key, value, mask=torch.zeros(5, 7), scale=1.0, dropout_p=0.1)
    assert {"float_mask", "dropout", "training"} <= set(context.features)
    assert context.has_custom_scale
    assert context.is_training
    with torch.no_grad():
        context = from_tensors(query, key, value, mask=torch.ones(5, 7) > 0, scale=0.25)
    assert set(context.features) == {"bool_mask"}
    assert not context.has_custom_scale


def test_a_transposed_tensor_is_not_contiguous_in_its_last_dimension():
    query, key, value = operands()
    assert not from_tensors(query, key.mT.contiguous().mT, value).is_last_dim_contiguous


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layout": "SBHD"}, "expected layout as one of BHSD, BSHD, received .SBHD."),
        (
            {"query": torch.randn(3, 5, 16)},
            r"expected query \[B, Hq, Sq, D\], received \(3, 5, 16\)",
        ),
        (
            {"key": torch.randn(2, 2, 7, 16), "value": torch.randn(2, 2, 7, 16)},
            "multiple of the key heads, 2, received 3",
        ),
    ],
)
def test_tensors_that_are_no_attentions_are_refused(change, text):
    given = {**dict(zip(("query", "key", "value"), operands(), strict=True)), **change}
    with pytest.raises(ValueError, match=text):
        from_tensors(**given)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_a_context_prints_as_the_same_json_every_time(batch, kv_heads, groups, queries, keys, causal, dtype):
    query = torch.empty(batch, kv_heads * groups, queries, 8, dtype=dtype)
    key = torch.empty(batch, kv_heads, keys, 8, dtype=dtype)
    context = from_tensors(query, key, key, causal=causal)
    text = json.dumps(context.to_dict())
    assert text == json.dumps(from_tensors(query.clone(), key.clone(), key.clone(), causal=causal).to_dict())
    assert json.loads(text)["dims"]["num_heads"] == kv_heads * groups
    assert json.loads(text)["dtype"] in str(dtype)


def test_a_symbolic_size_prints_with_its_range():
    context = replace(from_tensors(*operands()), dims={"seq_len_q": SymbolicDim(5, 2, None, "s77")})
    assert context.to_dict()["dims"] == {"seq_len_q": {"hint": 5, "lower": 2, "upper": None, "name": "s77"}}
    assert str(context.dims["seq_len_q"]) == "s77 (2 to any)"
    assert (hint(7), hint(SymbolicDim(5))) == (7, 5)


def test_the_names_of_sizes_and_operations_follow_the_spec():
    assert list(dim_names("attention")) == DIMS
    assert {"attention", "attention.causal", "attention.full"} <= set(operations())


# ---- devices ---------------------------------------------------------------------------------------------------------


def _pretend(monkeypatch, major: int, minor: int, **properties: Any) -> None:
    device = SimpleNamespace(name="a GPU", major=major, minor=minor, **properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    hardware_module.forget()


#: Of the SM versions that there are: the generation and the tensor cores (layerzero_spec J.1), and the matrix instructions.
SM_VERSIONS = {
    75: ("turing", 2, {"mma.sync"}),
    80: ("ampere", 3, {"mma.sync"}),
    86: ("ampere", 3, {"mma.sync"}),
    87: ("ampere", 3, {"mma.sync"}),
    89: ("ada", 3, {"mma.sync"}),
    90: ("hopper", 4, {"mma.sync", "wgmma"}),
    100: ("blackwell", 5, {"mma.sync", "tcgen05.mma"}),
    101: ("blackwell", 5, {"mma.sync", "tcgen05.mma"}),
    103: ("blackwell", 5, {"mma.sync", "tcgen05.mma"}),
    110: ("blackwell", 5, {"mma.sync", "tcgen05.mma"}),
    120: ("blackwell", 5, {"mma.sync"}),
    121: ("blackwell", 5, {"mma.sync"}),
    70: (None, None, set()),
    61: (None, None, set()),
    200: (None, None, set()),
}


@pytest.mark.parametrize("sm_version", SM_VERSIONS)
def test_a_gpu_has_the_generation_of_its_sm_version(monkeypatch, sm_version):
    generation, tensor_cores, instructions = SM_VERSIONS[sm_version]
    _pretend(monkeypatch, sm_version // 10, sm_version % 10)
    device = hardware(torch.device("cuda", 0))
    assert device == Hardware("cuda", "a GPU", sm_version, generation, tensor_cores)
    assert device.instruction_sets == instructions
    assert device.signature() == f"cuda_sm{sm_version}_cu128"


@pytest.mark.parametrize("sm_version", range(75, 121))
def test_every_sm_version_of_the_map_has_a_generation(sm_version):
    first, name, tensor_cores = next(row for row in GENERATIONS if row[0] <= sm_version)
    assert generation_of(sm_version) == (name, tensor_cores)
    expected = {range(75, 80): "turing", range(80, 89): "ampere", range(89, 90): "ada", range(90, 100): "hopper"}
    assert name == next((each for versions, each in expected.items() if sm_version in versions), "blackwell")
    assert first <= sm_version


def test_rocm_has_an_architecture_and_no_sm_version(monkeypatch):
    _pretend(monkeypatch, 9, 4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.2.41133-dd7f95766")
    device = hardware("cuda")
    assert device == Hardware("rocm", "a GPU", generation="gfx942")
    assert device.signature() == "rocm_gfx942_hip6.2"
    context = replace(from_tensors(*operands()), hardware=device)
    assert context.device_type == "cuda"


def test_a_gpu_that_is_not_there_is_unknown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware("cuda") == Hardware("cuda", "unknown")


def _pretend_cpu(monkeypatch, level: str, capabilities: dict[str, bool] | None, **functions: bool) -> frozenset[str]:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    monkeypatch.setattr(hardware_module.platform, "machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
        if name in functions:
            monkeypatch.setattr(torch.cpu, name, lambda answer=functions[name]: answer, raising=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    if capabilities is not None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    hardware_module.forget()
    return hardware("cpu").isa


def test_a_cpu_has_what_torch_reports(monkeypatch):
    everything = {"avx512_bf16": True, "avx512_vnni": True, "amx_tile": True, "amx_bf16": True}
    found = _pretend_cpu(monkeypatch, "AVX512", everything)
    assert found == {"avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx", "amx_bf16"}
    assert hardware("cpu").signature() == f"cpu_amx_{torch.get_num_threads()}threads"


def test_what_an_older_torch_does_not_report_counts_as_absent(monkeypatch):
    assert _pretend_cpu(monkeypatch, "AVX512", None) == {"avx2", "avx512"}
    found = _pretend_cpu(monkeypatch, "AVX512", None, _is_avx512_bf16_supported=True, _is_amx_tile_supported=False)
    assert found == {"avx2", "avx512", "avx512_bf16"}
    assert _pretend_cpu(monkeypatch, "DEFAULT", None) == frozenset()
    assert hardware("cpu").signature().startswith("cpu_default_")


def test_a_cpu_that_torch_uses_as_a_lesser_one_has_no_more_than_that(monkeypatch):
    assert _pretend_cpu(monkeypatch, "AVX2", {"avx512_bf16": True, "amx_tile": True}) == {"avx2"}


def test_this_cpu_is_as_torch_reports():
    device = hardware(torch.device("cpu"))
    level = torch.backends.cpu.get_cpu_capability().lower()
    assert device.platform == "cpu"
    assert device.device_name
    assert (device.sm_version, device.generation) == (None, None)
    if level in ("avx2", "avx512"):
        assert level in device.isa


def test_threads_are_read_again():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert hardware("cpu").threads == 1
        torch.set_num_threads(2)
        assert hardware("cpu").threads == 2
        assert hardware("cpu").signature().endswith("_2threads")
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_known():
    device = hardware(torch.device("cuda"))
    major, minor = torch.cuda.get_device_capability()
    assert device.device_name == torch.cuda.get_device_name()
    assert torch.version.hip or device.sm_version == major * 10 + minor
    assert from_tensors(*operands(device="cuda")).hardware == device
