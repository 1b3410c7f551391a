"""`lz.register_kernel` for every op: a function of operands and attributes runs as one call and as part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

import lz_compile as lz
from lz_compile.errors import RegistrationError
from lz_compile.ground import events, health
from lz_compile.lowering import ops
from lz_compile.runtime.kernels.registry import KernelSpec, kernels
from lz_compile.runtime.problem import context

ID = "new.kernel"
OPS = ops.names()
#: Sizes at which every op's sample is one that a graph's recogniser takes.
SIZES = {"num_kv_heads": 2, "num_heads": 4, "rotary_dim": 8}

for_every_op = pytest.mark.parametrize("op", OPS)
in_both_ways = pytest.mark.parametrize("is_traceable", [False, True], ids=["opaque", "traceable"])


@pytest.fixture(autouse=True)
def _cleared(tmp_path, monkeypatch):
    """No kernel of a test and no verdict about it is left for another one."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    yield
    if any(ID in kernels(op) for op in OPS):
        lz.unregister_kernel(ID)
    health.restore(ID)


def register(op: str, function: Callable[..., Any], **changes: Any) -> KernelSpec:
    given = {"platform": "cpu", "supported_dtypes": ["float32"], "supports": supported(op), **changes}
    lz.register_kernel(operation=op, kernel_id=ID, **given)(function)
    return kernels(op)[ID]


def supported(op: str) -> list[str]:
    """What the op's sample and shipped kernels ask for, without gradients."""
    given = problem(op)
    found = {feature for spec in kernels(op).values() if spec.is_shipped for feature in spec.supports}
    found |= ops.module(op).features(given.attrs, given.facts).keys()
    return sorted(each for each in found if each not in {"*", "training"} and "gradient" not in each)


def problem(op: str) -> Any:
    """The op's own sample."""
    sizes = {name: SIZES.get(name, 8) for name in context.dim_names(op)}
    return ops.module(op).sample(sizes, torch.float32, torch.device("cpu"))


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An MLP is known by its projections, which are none of the op's."""
    return (F.silu(x @ gate) * (x @ up)) @ down


def moving(decay: Tensor, drive: Tensor) -> Tensor:
    state, found = torch.zeros_like(drive[:, 0]), []
    for t in range(drive.shape[1]):
        state = decay[:, t].sigmoid() * state + drive[:, t]
        found.append(state)
    return torch.stack(found, 1)


def likeliest(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(5).values[..., -1:], -torch.inf).softmax(-1)


def source(op: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """What a model's source computes, and its inputs."""
    written = {
        "mlp": (gated, torch.randn(4, 8, 8).unbind()),
        "scan": (moving, torch.randn(2, 2, 12, 4).unbind()),
        "sampling": (likeliest, (torch.randn(3, 96),)),
        "paged_attention": (lz.paged_attention, problem("paged_attention").inputs),
    }
    given = problem(op)
    return written.get(op, (given.as_written(), given.inputs))


def noting(op: str, seen: list[Any]) -> Callable[..., Any]:
    def kernel(x, attrs):
        seen.append((x, attrs))
        return ops.module(op).reference(x, attrs)

    return kernel


@for_every_op
@in_both_ways
def test_a_function_is_given_the_ops_operands_and_attributes(op, is_traceable):
    given, seen = problem(op), []
    spec = register(op, noting(op, seen), is_traceable=is_traceable)
    with torch.no_grad():
        actual = given.with_kernel(spec.call)(*given.inputs)
        expected = given.with_kernel(ops.module(op).reference)(*given.inputs)
    torch.testing.assert_close(actual, expected)
    ((x, attrs),) = seen
    assert type(x) is ops.module(op).Operands
    assert attrs == given.attrs
    assert health.retired(ID) is None


@pytest.mark.sampled
@for_every_op
@in_both_ways
def test_a_function_is_proven_and_put_into_a_graph(op, is_traceable):
    function, inputs = source(op)
    # A routed adapter's definition branches on tensors; of the others, it can be traced.
    kernel = kernels(op)["torch.routing"].call if op == "routing" else ops.module(op).reference
    register(op, kernel, is_traceable=is_traceable)
    backend = Rewriting(lock={op: ID}, loops="roll")
    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(function, backend=backend)(*inputs)
        torch.testing.assert_close(actual, function(*inputs), atol=1e-4, rtol=1e-4)
    assert [match.kernel for match in backend.report.matches] == [ID], backend.why_not()
    calls = [node for graph in backend.graphs for node in graph.graph.nodes if "registered" in str(node.target)]
    assert len(calls) == (0 if is_traceable else 1)


@for_every_op
@in_both_ways
def test_a_function_of_operands_one_by_one_is_refused_with_the_form_that_it_should_have(op, is_traceable):
    names = ops.module(op).Operands.names
    scope: dict[str, Any] = {}
    exec(f"def kernel({', '.join(names)}, *, attrs): return {names[0]}", scope)
    with pytest.raises(RegistrationError) as failure:
        register(op, scope["kernel"], is_traceable=is_traceable)
    text = str(failure.value)
    assert "expected 'def kernel(x, attrs)' with the op's operands in one object" in text
    assert f"received 'def kernel({', '.join(names)}, *, attrs)'" in text
    assert f"Read the operands from x: {', '.join(f'x.{name}' for name in names)}" in text


@for_every_op
def test_what_runs_as_one_call_has_no_gradient_and_computes_nothing_along(op):
    with pytest.raises(RegistrationError, match="'training' needs is_traceable=True"):
        register(op, noting(op, []), supports=["training"])
    with pytest.raises(RegistrationError, match="fuses_ops needs is_traceable=True"):
        register(op, noting(op, []), fuses_ops=["residual"])


@for_every_op
def test_a_result_of_another_shape_retires_the_function_and_the_ops_definition_completes_the_call(op):
    def shortened(x, attrs):
        found = ops.module(op).reference(x, attrs)
        return found[:1] if isinstance(found, Tensor) else tuple(each[:1] for each in found)

    given = problem(op)
    spec = register(op, shortened)
    with torch.no_grad(), events.collect() as happened:
        actual = given.with_kernel(spec.call)(*given.inputs)
        torch.testing.assert_close(actual, given.with_kernel(ops.module(op).reference)(*given.inputs))
    assert [event.code for event in happened] == ["KERNEL_FAILED", "KERNEL_RETIRED"]
    assert "expected torch." in happened[0].message


def test_a_result_in_another_memory_order_is_put_into_the_ops():
    spec = register("norm", lambda x, attrs: ops.module("norm").reference(x, attrs).t().contiguous().t())
    given = problem("norm")
    with torch.no_grad():
        found: Tensor = given.with_kernel(spec.call)(*given.inputs)
    assert found.is_contiguous()


def test_a_number_among_operands_may_be_a_number_or_a_tensor():
    seen: list[Any] = []
    spec = register("blend", noting("blend", seen))
    module = ops.module("blend")
    host, seed = torch.randn(2, 3, 4, 5).unbind()
    for alpha in (0.1, torch.tensor(0.1)):
        given = (module.Operands(host, seed, alpha), module.BlendAttrs())
        torch.testing.assert_close(spec.call(*given), module.reference(*given))
    assert [each.alpha.dtype for each, _ in seen] == [torch.float64, torch.float32]


def row(x: Any, attrs: Any, each: Any) -> Any:
    return each * torch.rsqrt(each.square().mean(-1, keepdim=True) + attrs.eps) * x.weight


#: Norms that go through their rows in Python.
BY_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "by place": lambda x, attrs: torch.stack([row(x, attrs, x.input[i]) for i in range(x.input.shape[0])]),
    "one by one": lambda x, attrs: torch.stack([row(x, attrs, each) for each in x.input]),
    "as many as there are": lambda x, attrs: torch.stack([row(x, attrs, x.input[i]) for i in range(len(x.input))]),
    "unbound": lambda x, attrs: torch.stack([row(x, attrs, each) for each in x.input.unbind(0)]),
    "in pieces": lambda x, attrs: torch.cat([row(x, attrs, each) for each in x.input.split(2)]),
}


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", BY_ROWS)
def test_a_function_may_go_through_its_rows_where_every_call_has_as_many(name, is_symbolic):
    register("norm", BY_ROWS[name], is_traceable=True)
    x, weight = torch.randn(6, 16), torch.randn(16)
    if is_symbolic:
        torch._dynamo.mark_dynamic(x, 0)  # a guard on one size would be an error

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    backend = Rewriting(lock={"norm": ID})
    torch.testing.assert_close(torch.compile(norm, backend=backend)(x, weight), norm(x, weight))
    (match,) = backend.report.matches
    assert match.rewritten == (not is_symbolic or name == "in pieces")
    if not match.rewritten:
        assert "differs from call to call: only kernels without is_traceable count over it" in str(match.reasons[0])
