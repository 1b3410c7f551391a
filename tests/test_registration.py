"""`lz.register_kernel`: functions of both forms run, eagerly and compiled; what they cannot do is refused by its text."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import from_tensors
from torch import Tensor

import lz_compile as lz
from lz_compile.errors import RegistrationError, UnknownOperationError
from lz_compile.ground import events, health
from lz_compile.ground.records import Reason
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.ops.attention import Operands, features, reference
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.convention import FEATURES
from lz_compile.runtime.kernels.registry import KernelSpec, kernels

ID = "new.kernel"
LOCK = {"attention": ID}


@pytest.fixture(autouse=True)
def _cleared(tmp_path, monkeypatch):
    """No kernel of a test and no verdict about it is left for another one."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    yield
    if ID in kernels("attention"):
        lz.unregister_kernel(ID)
    health.restore(ID)


def register(function: Any, **changes: Any) -> KernelSpec:
    """Registers a function for all of attention on this CPU; what is given is declared on top of that."""
    given = {
        "operation": "attention",
        "kernel_id": ID,
        "platform": "cpu",
        "supported_dtypes": [torch.float32],
        **changes,
    }
    assert lz.register_kernel(**given)(function) is function
    return kernels("attention")[ID]


def sdpa(q, k, v, scale=None, causal=True, attn_mask=None, dropout_p=0.0, enable_gqa=False):
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=enable_gqa
    )


def native(x, attrs):
    return reference(Operands(x.query, x.key, x.value, mask=x.mask, bias=x.bias, fill=x.fill, sinks=x.sinks), attrs)


MASKS = ["bool_mask", "float_mask"]


def operands(queries=5, keys=7, heads=4, kv_heads=4, **options):
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, count, length, 16, **options) for count, length in sizes]


# ---- what a function is taken to be able to do -----------------------------------------------------------------------


def test_the_example_of_the_spec_registers_as_it_stands():
    @lz.register_kernel(
        operation="attention.causal",
        kernel_id="new.kernel",
        platform="cuda",
        min_sm=80,
        supported_dtypes=[torch.float16, torch.bfloat16],
        max_head_dim=128,
        priority=95,
    )
    def my_custom_attention(q, k, v, scale=None, causal=True):
        return v

    spec = kernels("attention.causal")[ID]
    assert (spec.operation, spec.source, spec.min_sm, spec.max_head_dim, spec.priority) == (
        "attention.causal", "new", 80, 128, 95,
    )  # fmt: skip
    assert (spec.platforms, spec.dtypes) == ({"cuda"}, {"float16", "bfloat16"})
    assert spec.supports == {"causal", "dynamic_causal"}
    assert spec.is_opaque
    assert not spec.is_cuda_graph_safe
    assert not spec.deterministic
    assert spec.provenance.endswith("my_custom_attention, registered")
    assert ID not in kernels("attention.full")


@pytest.mark.parametrize(
    ("function", "operation", "supports"),
    [
        (lambda q, k, v: v, "attention", set()),
        (lambda q, k, v: v, "attention.causal", {"causal", "dynamic_causal"}),
        (lambda q, k, v, causal=True: v, "attention", {"causal", "dynamic_causal"}),
        (lambda q, k, v, is_causal=True: v, "attention", {"causal", "dynamic_causal"}),
        (lambda q, k, v, causal=True: v, "attention.full", set()),
        (lambda q, k, v, attn_mask=None, dropout_p=0.0, enable_gqa=False: v, "attention", set()),
        (native, "attention", set()),
        (native, "attention.causal", {"causal", "dynamic_causal"}),
    ],
)
def test_what_is_neither_declared_nor_the_variant_itself_is_not_supported(function, operation, supports):
    assert register(function, operation=operation).supports == supports


def test_a_scale_needs_a_parameter_for_it():
    query, key, value = operands()
    given, default = (from_tensors(query, key, value, scale=scale) for scale in (0.3, 0.25))
    assert register(lambda q, k, v: v).check(default) == []
    assert [reason.code for reason in register(lambda q, k, v: v).check(given)] == ["SCALE_UNSUPPORTED"]
    assert register(lambda q, k, v, scale=None: v).check(given) == []
    assert register(native).check(given) == []


def test_every_feature_of_the_op_is_known():
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query_len": 5, "key_len": 7, "head_dim": 16, "value_dim": 8}
    facts = AttentionFacts(**sizes, dtype=torch.float32, device="cpu", needs_grad=True, bias_needs_grad=True)
    attrs = AttentionAttrs(
        is_causal=True, enable_gqa=True, has_mask=True, has_bias=True, dropout_p=0.1, softcap=1.0, has_sinks=True,
        masked_rows="fill", bias_can_mask=True,
    )  # fmt: skip
    assert set(features(attrs, replace(facts, query_len=_symbol()))) <= set(FEATURES)


def _symbol() -> Any:
    import sympy

    return sympy.Symbol("s0", integer=True, positive=True)


@pytest.mark.usefixtures("no_preference", "by_priors")
@pytest.mark.parametrize("priority", [95, 50, 20])
def test_a_priority_says_what_to_expect_of_a_kernel_that_was_never_measured(priority):
    register(sdpa, supports=["training"], is_traceable=True, priority=priority)
    query = torch.randn(1, 2, 16, 8)
    told = lz.explain("attention.full", query, query, query, print_report=False)
    (candidate,) = [each for each in told.decision.candidates if each.kernel.kernel_id == ID]
    assert candidate.estimate.relative_latency == pytest.approx(50 / priority)
    assert (told.kernel_id == ID) is (priority > 50)
    if priority > 50:
        assert told.decision.why == "expected at 0.526 of Inductor's latency"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prioritty": 3}, r"no argument 'prioritty' \(did you mean 'priority'\?\)$"),
        ({"supports": ["bool_masks"]}, r"no feature 'bool_masks' \(did you mean 'bool_mask'\?\)$"),
        ({"supported_dtypes": ["flaot32"]}, r"no dtype 'flaot32' \(did you mean 'float32'\?\); valid are float64,"),
        ({"supported_dtypes": [torch.complex64]}, r"no dtype 'complex64'"),
        ({"supported_dtypes": []}, "length >= 1"),
        ({"platform": "gpu"}, r"no platform 'gpu'.*; valid are cpu, cuda, rocm, xpu, mps, \*"),
        ({"requires_layouts": ["BSDH"]}, r"no layout 'BSDH' \(did you mean 'BSHD'\?\)"),
        (
            {"platform": "cuda", "supported_generations": ["hoper"]},
            r"no generation 'hoper' \(did you mean 'hopper'\?\)",
        ),
        ({"platform": "cuda", "instruction_set": "wmma"}, r"no instruction set 'wmma' \(did you mean 'wgmma'\?\)"),
        ({"min_sm": 80}, "min_sm needs the platform cuda or rocm"),
        ({"priority": 200}, "Expected `int` <= 100 for the argument 'priority'$"),
        ({"transform_cost_hint": 3}, "'transform_cost_hint' has no meaning here: what another layout costs is part of"),
        ({"produces_layout": "BSDH"}, r"no layout 'BSDH' \(did you mean 'BSHD'\?\)"),
        ({"kernel_id": "my.kernel\n"}, "regex"),
        ({"kernel_id": "k" * 5000}, "length <= 100"),
        ({"workspace": "batch * 4"}, r"no size 'batch' \(did you mean 'batch_size'\?\)"),
        ({"kernel_id": "Not An Id"}, "regex"),
        ({"kernel_id": "inductor"}, "that name leaves an operation to Inductor"),
        ({"max_head_dim": "many"}, "Expected `int | null`, got `str`"),
        ({"limits": {"head_dims": (1, 8)}}, "limits: no size 'head_dims'"),
        ({"limits": {"head_dim": (8, 1)}}, "limits: the least head_dim 8 is above the most 1"),
        ({"multiples": {"seq_len_k": 0}}, "Expected `int` >= 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_nearest_valid_one(changes, text):
    with pytest.raises(RegistrationError, match=text) as failure:
        register(lambda q, k, v: v, **changes)
    assert str(failure.value).startswith(f"registering kernel '{changes.get('kernel_id', ID)}': ")
    assert ID not in kernels("attention")


def test_an_unknown_operation_names_the_nearest():
    with pytest.raises(
        UnknownOperationError, match=r"no operation 'attention\.casual' \(did you mean 'attention\.causal'"
    ):
        register(lambda q, k, v: v, operation="attention.casual")


@pytest.mark.parametrize(
    ("function", "supports", "text"),
    [
        (lambda q, k, v: v, ["bool_mask"], "'bool_mask' is declared, but the function has no parameter 'attn_mask'"),
        (lambda q, k, v: v, ["dropout"], "no parameter 'dropout_p'"),
        (lambda q, k, v: v, ["softcap"], "no parameter 'softcap'"),
        (lambda q, k, v: v, ["causal"], "no parameter 'causal' or 'is_causal'"),
        (sdpa, ["masked_row_fill"], "no parameter 'attrs'"),
        (sdpa, ["alibi"], "no parameter 'attrs'"),
        (lambda x, attrs: x.value, ["sink"], r"no feature 'sink' \(did you mean 'sinks'"),
        (lambda x, attrs: x.value, ["training"], "'training' needs is_traceable=True"),
        (sdpa, ["training"], "'training' needs is_traceable=True: a function that runs as one call has no gradient"),
        (sdpa, ["*"], r"no feature '\*'"),
        (
            lambda q, k: k,
            [],
            "expected a function that begins with query, key and value, or 'def kernel\\(x, attrs\\)'",
        ),
        (
            lambda *tensors: tensors[2],
            [],
            "expected a function that begins with query, key and value, or 'def kernel\\(x, attrs\\)'",
        ),
        (
            lambda q, k, v, window: v,
            [],
            "nothing is known to give for its parameter 'window'; known are scale, causal,",
        ),
        (lambda q, k, v, atn_mask: v, [], r"its parameter 'atn_mask' \(did you mean 'attn_mask'\?\)"),
    ],
)
def test_a_function_that_cannot_do_what_is_declared_is_refused(function, supports, text):
    with pytest.raises(RegistrationError, match=text):
        register(function, supports=supports)


def test_a_function_with_attrs_takes_the_canonical_layout():
    with pytest.raises(RegistrationError, match="takes and gives the op's canonical layout BHSD"):
        register(native, requires_layouts=["BSHD"])


def test_parameters_with_defaults_that_nobody_knows_keep_them():
    seen = []

    def function(q, k, v, window=(-1, -1), **more):
        seen.append((window, more))
        return v.clone()

    register(function).call(Operands(*operands(keys=5)), AttentionAttrs())
    assert seen == [((-1, -1), {})]


# ---- calls -----------------------------------------------------------------------------------------------------------


CASES = [
    AttentionAttrs(),
    AttentionAttrs(scale=0.3, is_causal=True),
    AttentionAttrs(has_mask=True),
    AttentionAttrs(has_mask=True, is_causal=True, scale=0.1),
    AttentionAttrs(has_mask=True, masked_rows="zero"),
    AttentionAttrs(has_mask=True, masked_rows="mean"),
    AttentionAttrs(has_bias=True, bias_can_mask=True),
    AttentionAttrs(has_bias=True, bias_can_mask=True, masked_rows="zero", is_causal=True),
    AttentionAttrs(has_bias=True, has_mask=True, bias_can_mask=True),
    AttentionAttrs(has_bias=True, has_mask=True, bias_can_mask=True, masked_rows="mean", bias_is_finite=True),
    AttentionAttrs(enable_gqa=True, is_causal=True),
]


def _operands(attrs: AttentionAttrs) -> dict[str, Tensor]:
    """Masks with a row that masks every key."""
    query, key, value = operands(kv_heads=2 if attrs.enable_gqa else 4)
    found = {"query": query, "key": key, "value": value}
    keep = torch.rand(2, 1, 5, 7) < 0.6
    keep[..., 0] = True
    keep[:, :, 3] = False
    if attrs.has_mask:
        found["mask"] = keep
    if attrs.has_bias:
        dropped = torch.finfo(torch.float32).min if attrs.bias_is_finite else -math.inf
        masks = torch.rand(2, 1, 5, 7) < 0.2 if attrs.has_mask else ~keep
        found["bias"] = torch.randn(2, 1, 5, 7).masked_fill(masks, dropped)
    return found


@pytest.mark.parametrize("attrs", CASES, ids=lambda attrs: "-".join(attrs.to_dict()))
@pytest.mark.parametrize("is_traceable", [False, True], ids=["opaque", "traceable"])
@pytest.mark.parametrize("form", ["BHSD", "BSHD", "BSHD_to_BHSD", "native"])
def test_a_function_of_either_form_computes_the_op(form, is_traceable, attrs):
    def turned(q, k, v, **given):
        out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), **given)
        return out.transpose(1, 2) if form == "BSHD" else out

    def token_major(q, k, v, scale=None, causal=True, attn_mask=None, enable_gqa=False):
        assert q.shape[1:3] == (5, 4)
        return turned(q, k, v, scale=scale, causal=causal, attn_mask=attn_mask, enable_gqa=enable_gqa)

    function = {"BHSD": sdpa, "native": native}.get(form, token_major)
    layout: dict[str, Any] = {}
    if "BSHD" in form:
        layout = {"requires_layouts": "BSHD", "produces_layout": form[-4:]}
    declared = [*MASKS, "gqa", "causal_rectangular", *(["causal"] if form == "native" else [])]
    spec = register(function, supports=declared, is_traceable=is_traceable, **layout)
    given = _operands(attrs)
    expected = reference(Operands(**given), attrs)
    actual = spec.call(Operands(**given), attrs)
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_a_function_for_causal_attention_needs_no_parameter_for_it():
    def function(q, k, v, scale=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    spec = register(function, operation="attention.causal")
    given, attrs = _operands(AttentionAttrs()), AttentionAttrs(is_causal=True)
    torch.testing.assert_close(spec.call(Operands(**given), attrs), reference(Operands(**given), attrs))


def test_softcap_sinks_and_dropout_reach_a_function_that_takes_them():
    seen = {}

    def function(q, k, v, softcap=None, sinks=None, dropout_p=0.0):
        seen.update(softcap=softcap, sinks=sinks, dropout_p=dropout_p)
        return torch.zeros_like(q)

    spec = register(function, supports=["softcap", "sinks", "dropout"])
    sinks = torch.randn(1, 4, 1, 1)
    spec.call(Operands(*operands(), sinks=sinks), AttentionAttrs(softcap=3.0, has_sinks=True, dropout_p=0.5))
    assert (seen["softcap"], seen["dropout_p"]) == (3.0, 0.5)
    assert torch.equal(seen["sinks"], sinks)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            lambda q: q[:, :, :1],
            r"expected torch.float32 \(2, 4, 5, 16\), received torch.float32 \(2, 4, 1, 16\)",
        ),
        (lambda q: q.double(), r"received torch.float64 \(2, 4, 5, 16\)"),
        (lambda q: (q, q), "received tuple"),
    ],
)
def test_a_result_of_another_shape_or_dtype_retires_the_kernel_and_the_call_completes(result, text):
    spec = register(lambda q, k, v: result(q))
    given = _operands(AttentionAttrs())
    with events.collect() as happened:
        actual = spec.call(Operands(**given), AttentionAttrs())
    torch.testing.assert_close(actual, reference(Operands(**given), AttentionAttrs()))
    assert re.search(text, happened[0].message)
    assert health.retired(ID) is not None
    register(sdpa)
    assert health.retired(ID) is None


# ---- in a compiled graph ---------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def compiled(function: Any, *inputs: Tensor, dynamic: bool | None = None) -> Rewriting:
    """The function, run through a graph that the registered kernel must have been put into."""
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    actual = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    torch.testing.assert_close(actual, function(*inputs), atol=1e-5, rtol=1e-5)
    assert [(match.kernel, match.rewritten) for match in backend.report.matches] == [(ID, True)], backend.why_not()
    return backend


def test_an_opaque_function_is_one_node_of_a_graph():
    register(sdpa)
    (graph,) = compiled(attention, *operands()).graphs
    assert [str(node.target) for node in graph.graph.nodes if "registered_new_kernel" in str(node.target)]
    assert not any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)


def test_a_traceable_function_becomes_part_of_the_graph():
    register(sdpa, is_traceable=True)
    (graph,) = compiled(attention, *operands()).graphs
    assert any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_traceable_function_may_make_tensors_of_numbers(is_dynamic):
    def positions(x, attrs):
        query, key = (torch.arange(each.shape[2], device=each.device) for each in (x.query, x.key))
        shifted = x.query @ x.key.mT * attrs.scale + query[:, None].float()  # a shift of all scores of a row
        return (
            shifted.masked_fill(key < torch.zeros((x.key.shape[2], 1))[:, 0], torch.tensor(-math.inf)).softmax(-1)
            @ x.value
        )

    register(positions, is_traceable=True)
    (graph,) = compiled(attention, *operands(), dynamic=is_dynamic).graphs
    assert sum(node.target is torch.arange for node in graph.graph.nodes) >= 2


WRITING = {
    "method": lambda scores, scale: scores.mul_(scale),
    "view": lambda scores, scale: scores.view(-1).mul_(scale),
    "out": lambda scores, scale: torch.mul(scores, scale, out=scores),
    "foreach": lambda scores, scale: torch._foreach_mul_([scores], scale),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_traceable_function_may_write_into_what_it_made(name):
    def writing(x, attrs):
        scores, out = x.query @ x.key.mT, torch.empty(x.query.shape)
        WRITING[name](scores, attrs.scale)
        out.copy_(scores.softmax(-1) @ x.value)
        return out

    register(writing, is_traceable=True)
    compiled(attention, *operands())


def test_a_traceable_function_may_have_gradients():
    register(sdpa, is_traceable=True, supports=["training"])
    backend = compiled(attention, *operands(requires_grad=True))
    assert backend.report.matches[0].validation["grad_error"] is not None


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"limits": {"seq_len_k": (8, None)}}, f"seq_len_k 7, {ID} takes 8..any"),
        ({"multiples": {"seq_len_k": 4}}, f"seq_len_k 7, {ID} takes multiples of 4"),
    ],
)
def test_any_size_may_be_limited(limit, text):
    register(sdpa, **limit)
    backend = Rewriting(lock=LOCK)
    torch.compile(attention, backend=backend)(*operands())
    assert any(text in reason.message for reason in backend.report.matches[0].reasons)
    compiled(attention, *operands(keys=8))


def test_an_opaque_function_is_not_taken_where_gradients_are_wanted():
    register(sdpa)
    backend = Rewriting(lock=LOCK)
    torch.compile(attention, backend=backend)(*operands(requires_grad=True))
    assert backend.report.matches[0].kernel != ID
    assert any("does not take gradients" in reason.message for reason in backend.report.matches[0].reasons)


def test_an_opaque_function_takes_symbolic_sizes():
    register(sdpa)
    compiled(attention, *operands(queries=5, keys=70), dynamic=True)


@pytest.mark.slow
def test_inductor_compiles_an_opaque_function_in_either_layout():
    from lz_compile.backend import layerzero

    def token_major(q, k, v, scale=None):
        return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale, causal=False).transpose(1, 2)

    for function, layout in ((sdpa, "BHSD"), (token_major, "BSHD")):
        register(function, requires_layouts=layout)
        torch._dynamo.reset()
        inputs = operands()
        run = torch.compile(lambda *x: attention(*x).relu() + 1, backend=layerzero, options={"layerzero.lock": LOCK})
        torch.testing.assert_close(run(*inputs), attention(*inputs).relu() + 1, atol=1e-5, rtol=1e-5)
        assert lz.reports()[-1].matches[0].kernel == ID
        lz.unregister_kernel(ID)


def test_a_function_that_computes_something_else_is_not_taken():
    register(lambda q, k, v, scale=None: v[:, :, : q.shape[2]] * 1.01)
    backend = Rewriting(lock=LOCK)
    inputs = operands()
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*inputs), attention(*inputs))
    (match,) = backend.report.matches
    assert match.kernel != ID
    assert "VALIDATION_FAILED" in [reason.code for reason in match.reasons]


# ---- again and again -------------------------------------------------------------------------------------------------


def test_registering_again_replaces_and_is_an_event_and_another_proof():
    first = register(lambda q, k, v, scale=None: v[:, :, : q.shape[2]] * 1.01)
    with events.collect() as happened:
        second = register(sdpa)
    assert [event.code for event in happened] == ["KERNEL_REPLACED"]
    assert first.identity != second.identity
    compiled(attention, *operands())


def test_a_function_of_another_op_is_another_kernel_when_it_is_registered_again():
    def registered(gain: float) -> str:
        def rms_norm(x, attrs):
            return x.input * gain

        arguments = {"kernel_id": ID, "platform": "cpu", "supported_dtypes": ["float32"], "is_traceable": True}
        lz.register_kernel(operation="norm", **arguments)(rms_norm)
        return registry.kernels("norm")[ID].identity

    assert registered(1.0) != registered(2.0)


def test_the_same_function_may_be_registered_twice():
    given, attrs = _operands(AttentionAttrs()), AttentionAttrs()
    for _ in range(2):

        def function(q, k, v):
            return sdpa(q, k, v, causal=False)

        torch.testing.assert_close(
            register(function).call(Operands(**given), attrs), reference(Operands(**given), attrs)
        )


def test_a_check_of_ones_own_is_asked():
    late = Reason("CONSTRAINT_FAILED", "too many heads")
    spec = register(sdpa, check=lambda context: [late] if context.dims["num_heads"] > 4 else [])
    assert spec.check(from_tensors(*operands())) == []
    assert spec.check(from_tensors(*operands(heads=8, kv_heads=8))) == [late]


@settings(max_examples=30, deadline=None)
@given(st.sets(st.sampled_from(sorted(FEATURES))), st.booleans())
def test_what_is_declared_is_supported_or_refused_and_nothing_else_is_added(declared, is_traceable):
    try:
        spec = register(sdpa, supports=declared, is_traceable=is_traceable)
    except RegistrationError:
        return
    finally:
        if ID in kernels("attention"):
            lz.unregister_kernel(ID)
    assert declared <= spec.supports <= declared | {"causal", "dynamic_causal"}
    assert "registered" in spec.provenance
    assert registry.version() > 0
