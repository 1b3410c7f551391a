"""Kernels that also give what they compute along: a residual's sum before its norm, and the rotations of query and key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

from lz_compile.ground import events
from lz_compile.lowering.fused import SIBLING, Fused, Siblings
from lz_compile.lowering.ops import norm as norm_op
from lz_compile.lowering.ops import rope as rope_op
from lz_compile.passes.fusion import fusion as planner
from lz_compile.runtime.kernels import registry

BATCH, TOKENS, HIDDEN, DIM = 2, 7, 12, 8
RESIDUAL, PAIR = "test.residual_norm", "test.rope_pair"


@pytest.fixture
def seen() -> Iterator[list[dict[str, Fused]]]:
    """Kernels for the CPU that compute along; what they were called with."""
    found: list[dict[str, Fused]] = []

    def residual_norm(x: norm_op.Operands, attrs: Any) -> Any:
        found.append({"input": x.input})
        total = x.input.reference()
        return norm_op.reference(replace(x, input=total), attrs), total

    def pair(x: Siblings, attrs: Any) -> Any:
        found.append({SIBLING: x.other})
        return rope_op.reference(x.own, attrs), x.other.reference()

    for op, kernel_id, call, along in (("norm", RESIDUAL, residual_norm, "residual"), ("rope", PAIR, pair, SIBLING)):
        given = registry.kernels(op)[f"torch.{op}"]
        registry.register(replace(given, kernel_id=kernel_id, implementation=call, fuses_ops=(along,), prior=()))
    yield found
    for op, kernel_id in (("norm", RESIDUAL), ("rope", PAIR)):
        if kernel_id in registry.kernels(op):
            registry.unregister_kernel(kernel_id)


pytestmark = pytest.mark.usefixtures("seen")


def draw(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_(grad)


def results(out: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a sum that weighs their elements differently."""
    outputs = out if isinstance(out, tuple) else (out,)
    total = sum((each.double() * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in outputs)
    return [*outputs, *torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad])]


def rewritten(function: Callable[..., Any], *inputs: Tensor) -> Rewriting:
    """The function compiled with both kernels locked: results and gradients are those of eager."""
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": RESIDUAL, "rope": PAIR})
    got = results(torch.compile(function, backend=backend, fullgraph=True)(*inputs), inputs)
    for ours, theirs in zip(got, results(function(*inputs), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return backend


def reasons(backend: Rewriting, code: str) -> list[str]:
    return [each.message for match in backend.report.matches for each in match.reasons if each.code == code]


def kernels(backend: Rewriting, op: str) -> list[str]:
    return [match.kernel for match in backend.report.matches if match.op == op and match.rewritten]


def sums_of_two(backend: Rewriting) -> list[str]:
    """The nodes that add two tensors."""
    nodes = [node for node in backend.graphs[0].graph.nodes if getattr(node.target, "__name__", "") in ("add", "sub")]
    return [node.name for node in nodes if len(node.all_input_nodes) == 2]


# ---- residual and norm -----------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    row = x.float()
    return (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return draw(BATCH, TOKENS, HIDDEN), draw(BATCH, TOKENS, HIDDEN, seed=1), draw(HIDDEN)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda x, r: x + r,
    "function": lambda x, r: torch.add(r, x),
    "alpha_of_one": lambda x, r: x.add(r, alpha=1),
    "of_a_negative": lambda x, r: x.sub(r, alpha=-1),
    "dropout_in_evaluation": lambda x, r: F.dropout(F.dropout(x, 0.1, training=False) + r, 0.0),
    "cast_to_itself": lambda x, r: (x + r).to(torch.float32),
    "moved_before": lambda x, r: x.transpose(0, 1).add(r.transpose(0, 1)).transpose(0, 1),
    "rows_of_a_matrix": lambda x, r: (x + r).view(-1, HIDDEN),
    "of_rows": lambda x, r: x.reshape(-1, HIDDEN) + r.reshape(-1, HIDDEN),
}


@pytest.mark.parametrize("sums", SUMS)
def test_a_norm_and_the_sum_that_others_read_are_one_kernel(seen: Any, sums: str) -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = SUMS[sums](x, r)
        return rms(h, weight).cos(), h * 2

    backend = rewritten(model, *operands())
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()
    assert reasons(backend, "FUSED") == [f"{RESIDUAL} computes the residual before input along"]
    (match,) = backend.report.matches
    assert match.context["fusable"] == ["residual"]
    fused = seen[-1]["input"]
    assert {name: tuple(each.shape) for name, each in fused.operands.items()} == dict.fromkeys(
        ("input", "residual"), (BATCH * TOKENS, HIDDEN)
    )
    assert len(sums_of_two(backend)) == 1, "the kernel's own"


def test_a_sum_that_nobody_else_reads_is_not_given() -> None:
    backend = rewritten(lambda x, r, w: rms(x + r, w).cos(), *operands())
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()


def test_a_residual_stream_is_fused_in_every_layer() -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(4):
            r = x + r
            x = (rms(r, weight) @ weight.diag()).sin()
        return x, r

    backend = rewritten(model, *operands())
    assert kernels(backend, "norm") == [RESIDUAL] * 4, backend.why_not()


def test_two_norms_of_one_sum_are_fused_with_it_once() -> None:
    """As where attention and MLP stand side by side: the first norm gives the sum, the second one reads it."""

    def model(x: Tensor, r: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        h = x + r
        return rms(h, first).cos(), rms(h, second).sin(), h * 2

    backend = rewritten(model, *operands(), draw(HIDDEN, seed=5))
    assert [match.kernel for match in backend.report.matches] == [RESIDUAL, "inductor"], backend.why_not()
    (refused,) = reasons(backend, "NOT_FUSED")
    assert "is computed along with the norm at" in refused


def test_what_reads_the_sum_before_the_norm_reads_the_kernels() -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
        h = x + r
        gate = h.sigmoid()
        return rms(h, weight) * gate

    backend = rewritten(model, *operands())
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()


@pytest.mark.parametrize("training", [False, True])
def test_layer_norm_after_dropout_as_in_encoders(training: bool) -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x, 0.5 if training else 0.0, training) * 0 + x + r, (HIDDEN,), weight).cos()

    backend = rewritten(model, *operands())
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_sum_is_rounded_as_in_the_source(dtype: torch.dtype) -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return rms(h, weight), h

    inputs = [each.detach().to(dtype) for each in operands()]
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": RESIDUAL})
    got, total = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()
    want = model(*inputs)
    assert torch.equal(total, want[1])
    torch.testing.assert_close(got, want[0])


@pytest.mark.parametrize("dim", [0, 1])
def test_sizes_may_be_symbols(dim: int) -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return rms(h, weight).cos(), h * 2

    inputs = operands()
    for each in inputs[:2]:
        torch._dynamo.mark_dynamic(each, dim)
    backend = rewritten(model, *inputs)
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()


NO_RESIDUALS: dict[str, tuple[Callable[..., Tensor], str | None]] = {
    "scaled": (lambda x, r, w: rms(torch.add(x, r, alpha=2), w), "scales what it adds"),
    "of_two_dtypes": (lambda x, r, w: rms(x + r.bfloat16(), w), "is of tensors of several dtypes"),
    "in_place": (lambda x, r, w: rms(x.add_(r), w), None),
    "a_bias": (lambda x, r, w: rms(x + w, w), None),
    "a_product": (lambda x, r, w: rms(torch.addcmul(x, r, r), w), None),
    "twice": (lambda x, r, w: rms(x + x, w), None),
}


@pytest.mark.parametrize("name", NO_RESIDUALS)
def test_what_is_no_plain_sum_is_left_with_the_reason(name: str) -> None:
    function, text = NO_RESIDUALS[name]
    torch._dynamo.reset()
    inputs, backend = [each.detach() for each in operands()], Rewriting(lock={"norm": RESIDUAL})
    got = torch.compile(function, backend=backend, fullgraph=True)(*map(torch.clone, inputs))
    torch.testing.assert_close(got, function(*map(torch.clone, inputs)), rtol=1e-4, atol=1e-4)
    assert any(match.op == "norm" for match in backend.report.matches), backend.why_not()
    assert not kernels(backend, "norm")
    refused = reasons(backend, "NOT_FUSED")
    assert ([] if text is None else [text]) == [each.rpartition(") ")[2] for each in refused]


def test_what_overwrites_a_sum_after_its_norm_overwrites_the_kernels() -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        out = rms(h, weight)
        h.mul_(2)
        return out, h

    inputs = [each.detach() for each in operands()]
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": RESIDUAL})
    got = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, model(*inputs))
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()


def test_a_sum_in_place_of_what_the_graph_made_is_a_value_and_the_kernels() -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        h += r
        return rms(h, weight), h

    inputs = [each.detach() for each in operands()]
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": RESIDUAL})
    got = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, model(*inputs))
    assert kernels(backend, "norm") == [RESIDUAL], backend.why_not()


def test_what_is_overwritten_between_the_sum_and_the_norm_is_read_afterwards() -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        shown = h.cos()
        weight.mul_(2)
        return F.rms_norm(h, (HIDDEN,), weight), shown

    inputs = [each.detach() for each in operands()]
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": RESIDUAL})
    got = torch.compile(model, backend=backend, fullgraph=True)(*(each.clone() for each in inputs))
    torch.testing.assert_close(got, model(*inputs))
    assert not kernels(backend, "norm")


# ---- query and key ---------------------------------------------------------------------------------------------------


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotations(heads: int = 3, kv_heads: int = 3) -> list[Tensor]:
    angles = draw(BATCH, 1, TOKENS, DIM // 2, grad=False).repeat(1, 1, 1, 2)
    sizes = (heads, kv_heads, heads)
    tensors = [draw(BATCH, count, TOKENS, DIM, seed=seed) for seed, count in enumerate(sizes)]
    return [*tensors, angles.cos(), angles.sin()]


def both(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    return q.tanh() @ k.mT @ v, k


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_query_and_key_are_turned_by_one_kernel(seen: Any, kv_heads: int, dynamic: bool) -> None:
    inputs = rotations(kv_heads=kv_heads)
    if dynamic:
        for each in inputs:
            torch._dynamo.mark_dynamic(each, 2)
    backend = rewritten(both, *inputs)
    assert kernels(backend, "rope") == [PAIR], backend.why_not()
    (fused,) = reasons(backend, "FUSED")
    assert fused.startswith(f"{PAIR} computes the rope at ")
    codes = [[each.code for each in match.reasons] for match in backend.report.matches]
    assert codes == [["PART_OF_ANOTHER"], ["FUSED"]]
    assert seen[-1][SIBLING].op == "rope"


def test_every_layer_is_a_pair_of_its_own() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(3):
            q = both(q, k, v, cos, sin)[0]
        return q

    backend = rewritten(model, *rotations())
    assert kernels(backend, "rope") == [PAIR] * 3, backend.why_not()


@pytest.mark.parametrize("is_normalised", [False, True])
def test_what_the_key_is_made_of_is_computed_before_both(is_normalised: bool) -> None:
    """A query that is turned and moved, and only then a key that is projected."""

    def model(x: Tensor, q_weight: Tensor, k_weight: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        found = []
        for weight in (q_weight, k_weight):
            heads = (x @ weight).view(BATCH, TOKENS, -1, DIM)
            heads = rms(heads, scale) if is_normalised else heads
            found.append(turned(heads.transpose(1, 2), cos, sin).transpose(1, 2).contiguous())
        return found[0] * found[1].tanh() * scale

    cos, sin = rotations()[3:]
    backend = rewritten(
        model, draw(BATCH, TOKENS, HIDDEN), draw(HIDDEN, 3 * DIM), draw(HIDDEN, DIM), draw(DIM), cos, sin
    )
    assert kernels(backend, "rope") == [PAIR], backend.why_not()


def needs_the_query(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = turned(q, cos, sin)
    return q.tanh() @ turned(k + q.mean(1, keepdim=True), cos, sin).mT @ v


def of_another_dtype(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(q, cos, sin).tanh() @ turned(k.double(), cos, sin).mT.float() @ v


def of_other_pairs(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = torch.stack((-k[..., 1::2], k[..., ::2]), -1).flatten(-2)
    return turned(q, cos, sin).tanh() @ (k * cos + swapped * sin).mT @ v


def of_parts_of_the_tables(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    early = turned(q[:, :, :4], cos[:, :, :4], sin[:, :, :4])
    return early.tanh() @ turned(k[:, :, 3:], cos[:, :, 3:], sin[:, :, 3:]).mT @ v[:, :, 3:]


def drawn_in_between(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = turned(q, cos, sin)
    return q.tanh() @ turned(F.dropout(k, 0.5, training=True), cos, sin).mT @ v


NO_PAIRS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "needs_the_query": (needs_the_query, "is needed for the rest of what the kernel reads"),
    "of_another_dtype": (of_another_dtype, "has other attributes"),
    "of_other_pairs": (of_other_pairs, "has other attributes"),
    "drawn_in_between": (drawn_in_between, "which is not computed earlier"),
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_pair_is_left_with_the_reason(name: str) -> None:
    function, text = NO_PAIRS[name]
    torch._dynamo.reset()
    inputs, backend = rotations(), Rewriting(lock={"rope": PAIR})
    torch.manual_seed(3)
    got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(got, function(*inputs), rtol=1e-4, atol=1e-4)
    assert not kernels(backend, "rope")
    (refused,) = reasons(backend, "NOT_FUSED")
    assert refused.startswith("the rope at ")
    assert refused.endswith(text)


def test_rotations_by_other_parts_of_the_tables_are_no_pair() -> None:
    backend = rewritten(of_parts_of_the_tables, *rotations())
    assert not kernels(backend, "rope")


# ---- planning --------------------------------------------------------------------------------------------------------


def test_kernels_for_other_devices_are_planned_for_on_these_alone(seen: Any) -> None:
    """Nothing is said of what no kernel could do here: this package's own fusing kernels are for GPUs."""
    for kernel_id in (RESIDUAL, PAIR):
        registry.unregister_kernel(kernel_id)
    torch._dynamo.reset()
    backend = Rewriting()
    torch.compile(both, backend=backend, fullgraph=True)(*rotations())
    assert not any("fusable" in match.context for match in backend.report.matches if match.context)
    assert not reasons(backend, "NOT_FUSED")


def test_a_fault_in_planning_costs_the_fusion_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(planner, "sum_before", fails)
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": "torch.norm"})
    inputs = operands()
    got = torch.compile(lambda x, r, w: rms(x + r, w), backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, rms(inputs[0] + inputs[1], inputs[2]))
    assert kernels(backend, "norm") == ["torch.norm"]
    assert [event.code for event in backend.report.events] == ["FUSION_FAILED"]


def test_a_kernel_that_gives_a_wrong_sum_is_quarantined() -> None:
    def wrong(x: norm_op.Operands, attrs: Any) -> Any:
        total = x.input.reference()
        return norm_op.reference(replace(x, input=total), attrs), total * 1.01

    given = registry.kernels("norm")["torch.norm"]
    registry.register(replace(given, kernel_id="test.wrong", implementation=wrong, fuses_ops=("residual",), prior=()))
    try:
        torch._dynamo.reset()
        backend = Rewriting(lock={"norm": "test.wrong"})
        inputs = operands()

        def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            h = x + r
            return rms(h, weight), h * 2

        got = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(got, model(*inputs))
        (reason,) = reasons(backend, "VALIDATION_FAILED")
        assert reason.startswith("test.wrong: output ")
    finally:
        registry.unregister_kernel("test.wrong")


@pytest.mark.parametrize("op", ["norm", pytest.param("rope", marks=pytest.mark.thorough)])
def test_fusing_kernels_are_measured_on_all_that_they_compute(op: str) -> None:
    def model(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return rms(h, weight), h * 2

    kernel_id = RESIDUAL if op == "norm" else PAIR
    registry.register(replace(registry.kernels(op)[kernel_id], is_opaque=True))
    function, inputs = (model, operands()) if op == "norm" else (both, rotations())
    given = [each.detach() for each in inputs]
    torch._dynamo.reset()
    backend = Rewriting(tune="on-miss", tune_budget_s=60.0)
    with events.collect() as happened:
        torch.compile(function, backend=backend, fullgraph=True)(*given)
    assert "MEASUREMENT_FAILED" not in [event.code for event in happened]
    match = backend.report.matches[-1]
    origins = {each["kernel"]: each["origin"] for each in match.candidates if not each["against"]}
    assert origins[kernel_id] == origins["inductor"] == "measured", match.candidates
