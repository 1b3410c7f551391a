"""Kernels that compute an op together with the ops directly before it: chosen together, proven together, explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

import lz_compile as lz
from lz_compile.lowering.fused import Fused
from lz_compile.lowering.ops.attention import Operands
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.policy import policy

BATCH, HEADS, TOKENS, DIM = 2, 3, 11, 8
ID, WRONG = "test.turning", "test.turning_wrongly"


def tensors(*, grad: bool = False, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, HEADS, TOKENS, DIM)
    found = [torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(count)]
    angles = torch.randn(TOKENS, DIM // 2, generator=generator)
    return [*found, angles.cos(), angles.sin()]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * DIM**-0.5).softmax(-1) @ v


def turned_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return attention(lz.rope(q, cos, sin), lz.rope(k, cos, sin), v)


@pytest.fixture
def fusing() -> Iterator[Callable[..., list[dict[str, Fused]]]]:
    """Registers an attention kernel that computes other ops along, and prefers it; gives what it was called with."""
    given = registry.kernels("attention")["torch.sdpa"]

    def register(*ops: str, wrong: bool = False) -> list[dict[str, Fused]]:
        seen: list[dict[str, Fused]] = []

        def call(x: Operands, attrs: Any) -> Any:
            operands, shape = x.given(), x.value.shape
            fused = {name: each for name, each in operands.items() if isinstance(each, Fused)}
            seen.append(fused)
            for name, each in fused.items():
                value = each.reference().reshape(*shape[:2], -1, shape[-1])
                operands[name] = value * 1.01 if wrong else value
            return F.scaled_dot_product_attention(*(operands[n] for n in ("query", "key", "value")), scale=attrs.scale)

        kernel_id = WRONG if wrong else ID
        registry.register(replace(given, kernel_id=kernel_id, implementation=call, fuses_ops=ops, prior=()))
        registered.append(kernel_id)
        policy.prefer(kernel_id)
        return seen

    registered: list[str] = []
    yield register
    for kernel_id in registered:
        registry.unregister_kernel(kernel_id)


def check(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Rewriting, Any]:
    torch._dynamo.reset()
    backend = Rewriting()
    got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, function(*inputs), rtol=1e-4, atol=1e-5)
    (match,) = (each for each in backend.report.matches if each.op == "attention")
    return backend, match


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_computes_the_rotation_of_query_and_key_along(fusing: Any, dynamic: bool) -> None:
    seen, inputs = fusing("rope"), tensors()
    if dynamic:
        for each in inputs:
            torch._dynamo.mark_dynamic(each, each.dim() - 2)
    backend, match = check(turned_attention, *inputs)
    assert (match.kernel, match.rewritten) == (ID, True), backend.why_not()
    assert match.context["fusable"] == ["rope"]
    assert [str(each) for each in match.reasons if each.code == "FUSED"] == [
        f"[FUSED] {ID} computes the rope before key, query along"
    ]
    for other in backend.report.matches:
        if other.op == "rope":
            assert [each.code for each in other.reasons] == ["PART_OF_ANOTHER"]
            assert not other.rewritten
    assert {name: each.op for name, each in seen[-1].items()} == {"query": "rope", "key": "rope"}


def test_gradients_flow_through_both(fusing: Any) -> None:
    fusing("rope")
    inputs = tensors(grad=True)
    backend = Rewriting()
    got = torch.compile(turned_attention, backend=backend, fullgraph=True)(*inputs)
    want = turned_attention(*inputs)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    assert any(match.kernel == ID and match.rewritten for match in backend.report.matches), backend.why_not()
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs[:3], weight), torch.autograd.grad(want, inputs[:3], weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_layouts_in_between_do_not_matter(fusing: Any) -> None:
    fusing("rope")

    def by_tokens(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (lz.rope(x.transpose(1, 2), cos[:, None], sin[:, None]).transpose(1, 2) for x in (q, k))
        return attention(q, k, v)

    backend, match = check(by_tokens, *tensors())
    assert (match.kernel, match.rewritten) == (ID, True), backend.why_not()


def test_equal_layers_are_fused_each(fusing: Any) -> None:
    fusing("rope")

    def layers(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(3):
            q = q + turned_attention(q, k, v, cos, sin)
        return q

    torch._dynamo.reset()
    backend = Rewriting()
    inputs = tensors()
    torch.testing.assert_close(
        torch.compile(layers, backend=backend, fullgraph=True)(*inputs), layers(*inputs), rtol=1e-4, atol=1e-5
    )
    kernels = [match.kernel for match in backend.report.matches if match.op == "attention"]
    assert kernels[0] == ID, backend.why_not()


def test_what_others_read_too_is_not_fused(fusing: Any) -> None:
    """As where turned keys go into a cache: the query's rotation is computed along, the key's is not."""
    seen = fusing("rope")

    def cached(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = lz.rope(k, cos, sin)
        return attention(lz.rope(q, cos, sin), k, v), k

    torch._dynamo.reset()
    backend = Rewriting()
    inputs = tensors()
    got = torch.compile(cached, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, cached(*inputs), rtol=1e-4, atol=1e-5)
    (match,) = (each for each in backend.report.matches if each.op == "attention")
    assert match.kernel == ID, backend.why_not()
    assert list(seen[-1]) == ["query"]
    (refused,) = (each.message for each in match.reasons if each.code == "NOT_FUSED")
    assert refused.startswith("the rope before key (")
    assert "is also read by output" in refused


def test_where_nothing_comes_before_a_fusing_kernel_is_no_candidate(fusing: Any) -> None:
    fusing("rope")
    _, match = check(attention, *tensors()[:3])
    assert match.kernel != ID
    against = {each["kernel"]: each["against"] for each in match.candidates}
    assert [each["code"] for each in against[ID]] == ["NOTHING_TO_FUSE"]
    assert "computes rope along, which does not come directly before or beside" in against[ID][0]["message"]


def test_a_scaled_operand_is_not_fused(fusing: Any) -> None:
    fusing("rope")

    def scaled(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return attention(lz.rope(q, cos, sin) * torch.linspace(1, 2, TOKENS)[:, None], k, v)

    _, match = check(scaled, *tensors())
    assert match.kernel != ID


def test_a_kernel_that_is_wrong_together_is_quarantined(fusing: Any) -> None:
    fusing("rope", wrong=True)
    backend, match = check(turned_attention, *tensors())
    assert match.kernel != WRONG
    assert any(each.code == "VALIDATION_FAILED" and WRONG in each.message for each in match.reasons), backend.why_not()
    assert all(other.kernel != WRONG for other in backend.report.matches)


def test_without_a_fusing_kernel_nothing_is_said_of_it() -> None:
    _, match = check(turned_attention, *tensors())
    assert "fusable" not in match.context
    assert not [each for each in match.reasons if each.code in ("FUSED", "NOT_FUSED")]
