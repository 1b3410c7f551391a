"""``lz.attention``: what it computes, which kernel it runs, what happens when that fails, and that it is found again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting, rewritten
from hypothesis import given
from hypothesis import strategies as st
from problems import from_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import lz_compile as lz
from lz_compile.api import eager
from lz_compile.api.attention_arguments import Call
from lz_compile.errors import (
    ArgumentError,
    ConfigError,
    KernelExecutionError,
    NoKernelFoundError,
    TrialError,
    UnknownOperationError,
)
from lz_compile.ground import events, health
from lz_compile.ground.machine import environment
from lz_compile.lowering import ops
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.runtime.choose import select
from lz_compile.runtime.choose.calls import DISPATCH, SDPA
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.kernels.capabilities import Prior
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure.estimate import workload
from lz_compile.runtime.measure.perf_record import PerfRecord, canonical
from lz_compile.runtime.measure.perfdb import database
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem import context

ID = "tests.fused"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    policy.reset()
    eager.forget()
    yield
    policy.reset()
    if ID in registry.kernels("attention"):
        registry.unregister_kernel(ID)
    health.restore(ID)
    eager.forget()


class Fused:
    """A kernel of one call: remembers its calls, and can be told to raise."""

    def __init__(self) -> None:
        self.calls: list[AttentionAttrs] = []
        self.error: Exception | None = None

    def __call__(self, x: Operands, attrs: AttentionAttrs) -> Tensor:
        self.calls.append(attrs)
        if self.error is not None:
            raise self.error
        return reference(x, attrs)


@pytest.fixture
def fused() -> Fused:
    """A kernel that promises a tenth of SDPA's latency."""
    kernel = Fused()
    registry.register(spec(kernel))
    return kernel


def spec(kernel: Callable[..., Any], **changes: Any) -> KernelSpec:
    given = {
        "kernel_id": ID,
        "operation": "attention",
        "source": "tests",
        "platforms": frozenset({"cpu"}),
        "dtypes": frozenset({"float32", "float64"}),
        "requires_layouts": frozenset({"BHSD"}),
        "supports": frozenset({"causal", "causal_rectangular", "gqa", "bool_mask", "float_mask", "value_dim"}),
        "implementation": kernel,
        "prior": (Prior("*", frozenset({"*"}), 0.1),),
        **changes,
    }
    return KernelSpec(**given)


def operands(queries: int = 6, keys: int = 9, heads: int = 4, kv_heads: int = 4, **options: Any) -> list[Tensor]:
    return [
        torch.randn(2, count, length, 16, **options)
        for count, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]


def expected(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    kind = {} if mask is None else {"mask" if mask.dtype == torch.bool else "bias": mask}
    attrs = AttentionAttrs(is_causal=options.pop("causal", True), masked_rows="zero", **options)
    return reference(Operands(query, key, value, **kind), attrs)


def masks(queries: int = 6, keys: int = 9) -> dict[str, Tensor | None]:
    keep = torch.rand(2, 1, queries, keys) > 0.3
    keep[..., 0] = True
    return {"none": None, "bool": keep, "float": torch.randn(queries, keys)}


# ---- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_computes_its_definition(is_fused, mask, causal, kv_heads, request):
    kernel = request.getfixturevalue("fused") if is_fused else None
    given, chosen = operands(kv_heads=kv_heads), masks()[mask]
    result = lz.attention(*given, causal=causal, mask=chosen)
    torch.testing.assert_close(result, expected(*given, causal=causal, mask=chosen), rtol=1e-4, atol=1e-5)
    assert kernel is None or len(kernel.calls) == 1


def test_attention_is_causal_unless_told_otherwise():
    given = operands(queries=7, keys=7)
    torch.testing.assert_close(lz.attention(*given), F.scaled_dot_product_attention(*given, is_causal=True))


@pytest.mark.parametrize("way", [lambda call: call, torch.vmap, partial(torch.compile, backend="eager")])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_may_be_zero_or_negative(scale, layout, way):
    given = operands()
    call = lambda *each: lz.attention(*each, scale=scale, layout=layout)  # noqa: E731  # which is causal
    turned = [each.transpose(1, 2) if layout == "BSHD" else each for each in given]
    if way is torch.vmap:
        result = way(call)(*(each[None] for each in turned))[0]
    else:
        result = way(call)(*turned)
    want = expected(*given, scale=scale)
    torch.testing.assert_close(result, want.transpose(1, 2) if layout == "BSHD" else want, rtol=1e-4, atol=1e-5)


def test_scale_and_value_dim_are_taken_as_given(fused):
    query, key, _ = operands()
    value = torch.randn(2, 4, 9, 24)
    for scale in (0.0, 0.3, None):
        result = lz.attention(query, key, value, scale=scale)
        torch.testing.assert_close(result, expected(query, key, value, scale=scale), rtol=1e-4, atol=1e-5)
    assert [attrs.scale for attrs in fused.calls] == [0.0, 0.3, None]
    registry.unregister_kernel(ID)
    result = lz.attention(query, key, value, scale=0.0)
    torch.testing.assert_close(result, expected(query, key, value, scale=0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_fused", [False, True])
def test_tokens_may_come_before_heads(is_fused, request):
    if is_fused:
        request.getfixturevalue("fused")
    given = operands(kv_heads=2)
    swapped = [each.transpose(1, 2).contiguous() for each in given]
    result = lz.attention(*swapped, layout="BSHD")
    torch.testing.assert_close(result.transpose(1, 2), expected(*given), rtol=1e-4, atol=1e-5)


def test_a_layout_is_never_guessed():
    square = torch.randn(1, 4, 4, 8)
    first, second = lz.attention(square, square, square), lz.attention(square, square, square, layout="BSHD")
    assert not torch.allclose(first, second)
    with pytest.raises(ValueError, match="expected layout as one of BHSD, BSHD, received 'BSDH'"):
        lz.attention(square, square, square, layout="BSDH")


def test_a_row_without_keys_is_zero_as_in_pytorch():
    query, key, value = operands()
    mask = torch.zeros(6, 9, dtype=torch.bool)
    assert (lz.attention(query, key, value, causal=False, mask=mask) == 0).all()


def test_few_keys_are_attention_too():
    given = operands(queries=1, keys=3)
    torch.testing.assert_close(lz.attention(*given, causal=False), expected(*given, causal=False))


def test_dropout_drops():
    torch.manual_seed(0)
    query, key, _ = operands(queries=64, keys=64)
    out = lz.attention(query, key, torch.ones_like(key), causal=False, dropout_p=0.5)
    assert out.std() > 0.01


def test_gradients_flow_through_a_kernel_that_supports_them(fused):
    given = operands(dtype=torch.float64, requires_grad=True)
    lz.attention(*given).square().sum().backward()
    assert fused.calls == []  # it does not say that it can train
    registry.register(replace(spec(fused), supports=spec(fused).supports | {"training"}))
    twins = [each.detach().clone().requires_grad_() for each in given]
    lz.attention(*twins).square().sum().backward()
    assert len(fused.calls) == 1
    for one, other in zip(given, twins, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_tensor_that_wants_no_gradient_is_not_confused_with_one_that_does(fused):
    given = operands()
    lz.attention(*given)
    assert len(fused.calls) == 1
    given[1].requires_grad_()
    assert lz.attention(*given).requires_grad
    assert len(fused.calls) == 1
    with torch.no_grad():
        lz.attention(*given)
    assert len(fused.calls) == 2


def test_autocast_casts_for_every_kernel(fused):
    given = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert lz.attention(*given).dtype == torch.bfloat16
        assert lz.attention(*(each.double() for each in given)).dtype == torch.float64
    assert len(fused.calls) == 1  # it takes no bfloat16
    assert lz.attention(*given).dtype == torch.float32


def test_forward_derivatives_and_vmap_and_other_kinds_of_tensors_are_those_of_pytorch(fused):
    query, key, value = operands()

    def call(x: Tensor) -> Tensor:
        return lz.attention(x, key, value, causal=False)

    with sdpa_kernel(SDPBackend.MATH):
        _, tangent = torch.func.jvp(call, (query,), (torch.ones_like(query),))
    _, wanted = torch.func.jvp(lambda x: expected(x, key, value, causal=False), (query,), (torch.ones_like(query),))
    torch.testing.assert_close(tangent, wanted, rtol=1e-3, atol=1e-5)
    assert fused.calls == []
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(mode.from_tensor(query)).shape == query.shape
    assert fused.calls == []


@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    swapped=st.booleans(),
    strided=st.booleans(),
)
def test_any_shapes_and_strides_give_what_the_definition_gives(queries, keys, kv_heads, causal, swapped, strided):
    given = operands(queries, keys, 4, kv_heads)
    if strided:
        given = [torch.stack([each, each], -1)[..., 0] for each in given]
    passed = [each.transpose(1, 2) for each in given] if swapped else given
    result = lz.attention(*passed, causal=causal, layout="BSHD" if swapped else "BHSD")
    result = result.transpose(1, 2) if swapped else result
    torch.testing.assert_close(result, expected(*given, causal=causal), rtol=1e-3, atol=1e-5)


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q[0], k, v), r"expected query \[B, Hq, Sq, D\], received \("),
        (lambda q, k, v: (q, k[:, :3], v), r"expected value \[B, Hk, Sk, E\] of shape \(2, 3, "),
        (
            lambda q, k, v: (q, k.double(), v),
            "expected key in the dtype of query, torch.float32, received torch.float64",
        ),
        (lambda q, k, v: (q, k, v.to("meta")), "expected value on cpu as query is, received meta"),
    ],
)
def test_what_is_no_attention_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        lz.attention(*change(*operands()))


def test_a_mask_of_integers_is_refused_with_the_conversion_to_write():
    query, key, value = operands()
    mask = torch.ones(query.shape[0], 1, 1, key.shape[2], dtype=torch.int64)
    calls = [lz.attention, torch.compile(lz.attention, backend="eager", fullgraph=False)]
    # Dynamo (2.11) raises an error of its own where one is made before a graph break and raised behind it
    for call in calls[:1] if torch.__version__.startswith("2.11.") else calls:
        with pytest.raises(
            ArgumentError, match=r"expected mask of booleans \(True keeps\), .*int64. Give mask.bool\(\)"
        ):
            call(query, key, value, mask=mask)
        call(query, key, value, mask=mask.bool())


def test_wrong_shapes_are_refused_and_retire_nothing(fused):
    query, key, value = operands()
    with pytest.raises(ArgumentError, match="expected key"):
        lz.attention(query, key[..., :8], value)
    assert health.retired(ID) is None
    lz.attention(query, key, value)
    assert len(fused.calls) == 1


# ---- which kernel it runs --------------------------------------------------------------------------------------------


def against(decision: select.Decision) -> dict[str, list[str]]:
    return {each.kernel.kernel_id: [reason.code for reason in each.against] for each in decision.candidates}


def test_code_for_a_compiler_is_out_of_reach():
    decision = select.select(Problem(from_tensors(*operands()), SDPA, is_eager=True), policy.current())
    refused = against(decision)
    for kernel_id in ("inductor", "lz.blocked", "torch.flex", DISPATCH):
        assert "NEEDS_COMPILE" in refused[kernel_id]
    assert refused[SDPA] == []
    assert decision.kernel.kernel_id == SDPA


def test_a_lock_is_followed_and_one_that_cannot_be_is_an_event(fused):
    given = operands()
    with lz.lock("attention", SDPA):
        lz.attention(*given)
    assert fused.calls == []
    with lz.lock("attention", "lz.blocked"), events.collect() as happened:
        lz.attention(*given)
    assert [event.code for event in happened] == ["LOCK_NOT_POSSIBLE"]
    assert "code for a compiler to fuse" in happened[0].message


def test_a_change_of_policy_is_noticed_by_the_next_call(fused):
    given = operands()
    lz.attention(*given)
    with lz.disabled():
        lz.attention(*given)
    with lz.avoid(ID):
        lz.attention(*given)
    assert len(fused.calls) == 2  # avoided, it is still far ahead
    lz.configure(rules=[{"match": {"operation": "attention"}, "forbid": [ID]}])
    lz.attention(*given)
    assert len(fused.calls) == 2


def test_a_kernel_that_is_registered_or_removed_is_noticed_by_the_next_call(fused):
    given = operands()
    lz.attention(*given)
    registry.unregister_kernel(ID)
    lz.attention(*given)
    assert len(fused.calls) == 1


@pytest.mark.parametrize("source", [SDPA, None])
def test_measurements_decide(fused, tmp_path, source):
    policy.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    context = from_tensors(*operands(), causal=True)
    names = {"inductor": 10.0, ID: 20.0} if source == SDPA else {"inductor": 100.0, SDPA: 10.0, ID: 20.0}
    database(policy.current().settings.perfdb.path).put(
        PerfRecord(
            kernel_id=kernel_id,
            operation=context.operation,
            device_id=context.hardware.device_name,
            dtype=context.dtype_name,
            environment=environment("cpu"),
            workload=canonical(workload(context, source, context.hints())),
            median_us=latency_us,
            p95_us=latency_us,
            samples=20,
            variance_us=0.0,
        )
        for kernel_id, latency_us in names.items()
    )
    decision = select.select(Problem(context, SDPA, is_eager=True), policy.current())
    assert decision.kernel.kernel_id == SDPA
    expectation = {each.kernel.kernel_id: each.estimate for each in decision.candidates}
    assert expectation[ID].relative_latency == pytest.approx(2.0)
    assert expectation[ID].origin == "measured"


def test_a_library_that_does_not_import_gives_way_to_the_next_kernel():
    from lz_compile.runtime.kernels.libraries import LazyFunction

    registry.register(spec(LazyFunction("no_such_module", "attention")))
    given = operands()
    with events.collect() as happened:
        torch.testing.assert_close(lz.attention(*given), expected(*given), rtol=1e-4, atol=1e-5)
    assert "BACKEND_IMPORT_FAILED" in [event.code for event in happened]


# ---- what happens when a kernel fails --------------------------------------------------------------------------------


def test_a_kernel_that_fails_is_completed_by_pytorch_retired_and_forgotten(fused):
    given = operands()
    lz.attention(*given)  # it is proven
    fused.error = ValueError("broken")
    with events.collect() as happened:
        for _ in range(3):
            torch.testing.assert_close(lz.attention(*given), expected(*given), rtol=1e-4, atol=1e-5)
    assert [event.code for event in happened] == ["KERNEL_FAILED", "KERNEL_RETIRED"]
    assert len(fused.calls) == 2
    fused.error = None
    health.restore(ID)
    lz.attention(*given)
    assert len(fused.calls) == 3


def test_without_fallback_the_failure_is_the_callers(fused):
    given = operands()
    lz.attention(*given)  # it is proven
    policy.configure(fallback_enabled=False)
    fused.error = ValueError("broken")
    with pytest.raises(KernelExecutionError, match=f"running {ID}: expected a result, received ValueError: broken"):
        lz.attention(*given)


def test_without_fallback_a_failing_function_of_somebody_elses_is_the_callers_too():
    @lz.register_kernel(operation="attention", kernel_id=ID, platform="cpu", supported_dtypes=[torch.float32])
    def broken(q, k, v, scale=None, causal=True):
        raise ValueError("broken")

    given = operands(queries=6, keys=6)
    with lz.lock("attention", ID):
        policy.configure(fallback_enabled=False)
        with pytest.raises(KernelExecutionError, match=f"running {ID}.*ValueError: broken") as caught:
            lz.attention(*given)
        assert isinstance(caught.value.__cause__, TrialError)
        policy.configure(fallback_enabled=True)
        torch.testing.assert_close(lz.attention(*given), expected(*given), rtol=1e-4, atol=1e-5)
    assert health.retired(ID) is not None


def test_without_any_kernel_pytorch_runs_with_an_event_or_nothing_does():
    given = operands()
    lz.configure(rules=[{"match": {"operation": "attention"}, "forbid": [SDPA, "lz.*"]}])
    with events.collect() as happened:
        torch.testing.assert_close(lz.attention(*given), expected(*given), rtol=1e-4, atol=1e-5)
    assert [event.code for event in happened] == ["NO_KERNEL"]
    lz.configure(fallback_enabled=False)
    with pytest.raises(NoKernelFoundError, match=r"torch.sdpa:\n    - \[POLICY_EXCLUDED\]"):
        lz.attention(*given)


DISPATCHES = {
    "attention": lambda: lz.attention(*operands()),
    "attention that is locked": lambda: _locked("attention", "lz.tiled", lambda: lz.attention(*operands())),
    "sampling": lambda: lz.sample_topk(torch.randn(2, 50), 3, seeds=torch.arange(2)),
    "scan": lambda: lz.linear_scan(torch.rand(2, 6, 4), torch.randn(2, 6, 4), dim=1),
    "an operator in a graph": lambda: rewritten(
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *operands(), lock={"attention": "lz.tiled"}
    ),
}


def _locked(operation: str, kernel_id: str, call: Any) -> Any:
    with lz.lock(operation, kernel_id):
        return call()


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_debug_waits_for_the_device_after_every_dispatch(monkeypatch, dispatch):
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(health, "_accelerators", lambda _values: [torch.device("cuda", 0)])
    DISPATCHES[dispatch]()
    assert waited == []
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    policy.refresh()
    DISPATCHES[dispatch]()
    assert waited
    assert set(waited) == {torch.device("cuda", 0)}


@pytest.mark.parametrize("op", ["norm", "scan", "sampling", "blend", "routing"])
def test_debugging_makes_pytorchs_own_a_dispatch_on_an_accelerator(monkeypatch, op):
    device = torch.device("cuda")
    sizes = dict.fromkeys(context.dim_names(op), 8)
    sample = ops.module(op).sample(sizes, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(eager, "_chosen", lambda *_: (None,))
    assert eager.kernel_for(op, sample.attrs, sample.facts, device) is None
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    policy.refresh()
    kernel = eager.kernel_for(op, sample.attrs, sample.facts, device)
    assert kernel is not None
    assert kernel.kernel_id == ops.module(op).EAGER_KERNEL
    assert kernel.call is not None
    assert eager.has_choice(op, "cuda")


def test_waiting_asks_for_accelerators_alone(monkeypatch):
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    with FakeTensorMode():
        fake = torch.empty(2, device="cuda")
    health.wait((torch.ones(2), [torch.empty(2, device="meta"), fake]), {"scale": 2.0})
    assert waited == []


# ---- that it is found again ------------------------------------------------------------------------------------------


@pytest.fixture
def selections(monkeypatch) -> list[Problem]:
    seen: list[Problem] = []

    def spy(problem: Problem, *args: Any, **_: Any) -> select.Decision:
        seen.append(problem)
        return select.select(problem, *args)

    monkeypatch.setattr(eager, "decide", spy)
    return seen


def test_the_same_call_selects_once(selections):
    given = operands()
    for _ in range(5):
        lz.attention(*given)
    assert len(selections) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda given: (operands(queries=7), {}),
        lambda given: ([each.double() for each in given], {}),
        lambda given: (given, {"causal": False}),
        lambda given: (given, {"scale": 0.5}),
        lambda given: (given, {"mask": torch.ones(6, 9, dtype=torch.bool)}),
        lambda given: ([each.transpose(2, 3).contiguous().transpose(2, 3) for each in given], {}),
        lambda given: ([each.requires_grad_() for each in given], {}),
    ],
    ids=["shape", "dtype", "causal", "scale", "mask", "strides", "gradients"],
)
def test_what_a_decision_depends_on_selects_anew(selections, change):
    given = operands()
    lz.attention(*given)
    other, options = change(given)
    lz.attention(*other, **options)
    assert len(selections) == 2


def test_determinism_is_part_of_the_key(selections):
    given = operands()
    lz.attention(*given)
    torch.use_deterministic_algorithms(True)
    try:
        lz.attention(*given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [problem.context.requires_deterministic for problem in selections] == [False, True]


def test_the_policys_cache_settings_are_followed(selections):
    given = operands()
    policy.configure(cache={"enabled": False})
    lz.attention(*given)
    lz.attention(*given)
    assert len(selections) == 2
    assert eager.statistics() == {}
    policy.configure(cache={"enabled": True, "max_size": 3, "ttl_seconds": 5.0})
    lz.attention(*given)
    cache = eager._decisions.cache
    assert (cache.settings.max_size, cache.settings.ttl_seconds) == (3, 5.0)


def test_a_variable_of_the_environment_is_noticed_when_an_entry_is_too_old(fused, monkeypatch):
    given = operands()
    lz.attention(*given)
    monkeypatch.setenv("LAYERZERO_DISABLED", "1")
    lz.attention(*given)
    assert len(fused.calls) == 2
    eager.forget()
    lz.attention(*given)
    assert len(fused.calls) == 2


def test_a_wrong_variable_is_the_callers_error(monkeypatch):
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "no.such.kernel")
    with pytest.raises(ConfigError):
        lz.attention(*operands())


def test_many_threads_select_once_for_each_key(selections):
    given = [operands(queries=length, keys=length) for length in range(2, 22)]
    ready = threading.Barrier(16)

    def work() -> None:
        ready.wait()
        for each in given * 5:
            eager.plan(Call(*each, None, True, None, 0.0, "BHSD"))

    workers = [threading.Thread(target=work) for _ in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(selections) == len(given)


# ---- compiled, and before --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_a_compiled_function_holds_an_attention_that_we_recognise(layout, mask):
    given, chosen = operands(kv_heads=2), masks()[mask]
    passed = [each.transpose(1, 2) for each in given] if layout == "BSHD" else given
    backend = Rewriting()

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return lz.attention(query, key, value, mask=chosen, layout=layout)

    result = torch.compile(function, backend=backend, fullgraph=True)(*passed)
    result = result.transpose(1, 2) if layout == "BSHD" else result
    torch.testing.assert_close(result, expected(*given, mask=chosen), rtol=1e-4, atol=1e-5)
    assert [match.op for match in backend.report.matches] == ["attention"], backend.why_not()


def test_the_dispatching_kernel_runs_what_an_eager_call_runs(fused):
    given = operands(kv_heads=2)
    backend = Rewriting(lock={"attention": DISPATCH}, assume_finite=True)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.repeat_interleave(2, 1).mT * 0.25
        keep = torch.ones(6, 9, dtype=torch.bool).tril()
        return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)

    with torch.no_grad():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compiled(*given)
        fused.calls.clear()
        result = compiled(*given)
    torch.testing.assert_close(result, function(*given), rtol=1e-4, atol=1e-5)
    (match,) = backend.report.matches
    assert match.kernel == DISPATCH, backend.why_not()
    assert len(fused.calls) == 1


def test_warming_up_selects_and_runs(fused):
    lz.warmup("attention.causal", shapes=[(1, 2, 8, 16), (1, 2, 16, 16)], device="cpu")
    assert [attrs.is_causal for attrs in fused.calls] == [True, True]
    lz.warmup(shapes=[(1, 2, 8, 16)], device="cpu", layout="BSHD")
    assert [attrs.is_causal for attrs in fused.calls[2:]] == [True, False]
    with pytest.raises(UnknownOperationError, match="warming up: no operation 'attentoin' \\(did you mean 'attention'"):
        lz.warmup("attentoin", shapes=[])


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("shape", [(5, 1), (1, 7), (5, 7), (3, 5, 7), (1, 1, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_a_mask_of_any_shape_that_broadcasts_runs_on_every_kernel(shape: tuple[int, ...], is_bool: bool) -> None:
    query, key, value = (torch.randn(2, 3, size, 8) for size in (5, 7, 7))
    keep = torch.rand(shape) < 0.7
    keep[..., 0] = True
    mask = keep if is_bool else torch.where(keep, torch.randn(shape), -torch.inf)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with events.collect() as happened:
        for kernel in ("torch.sdpa", "lz.tiled"):
            with lz.lock("attention", kernel):
                torch.testing.assert_close(lz.attention(query, key, value, mask=mask, causal=False), expected)
    assert not happened
