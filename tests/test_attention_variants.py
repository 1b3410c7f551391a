"""What models do to an attention beside scaling and masking: read in every spelling, or told with what stands in the way."""

from __future__ import annotations

from collections.abc import Callable

import attention_variants as variants
import pytest
import torch
from attention_variants import Variant, qkv, some
from backends import Rewriting
from torch import Tensor

LOCK = {"attention": "lz.blocked"}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def compiled(variant: Variant, *, is_trained: bool = False, is_dynamic: bool = False) -> Rewriting:
    """The backend after a compile whose result, and gradients, are those of eager mode."""
    torch._dynamo.reset()
    inputs = [each.detach().clone().requires_grad_(is_trained and each.is_floating_point()) for each in variant.inputs]
    if is_dynamic:
        for each in inputs[:3]:
            torch._dynamo.mark_dynamic(each, 0)
    backend, results = Rewriting(lock=LOCK, strict=True), []
    for function in (torch.compile(variant.function, backend=backend, fullgraph=True), variant.function):
        found = function(*inputs)
        wanted = [each for each in inputs if each.requires_grad]
        grads = torch.autograd.grad(found.square().sum(), wanted, allow_unused=True) if wanted else ()
        results.append([found.detach(), *(each for each in grads if each is not None)])
    torch.testing.assert_close(*results, **TOLERANCE)
    return backend


def attentions(backend: Rewriting) -> list[bool]:
    """Of every attention, whether it was rewritten."""
    return [match.rewritten for match in backend.report.matches if match.op == "attention"]


def codes(backend: Rewriting) -> set[str]:
    """Of near misses of attention."""
    return {miss.reason.code for miss in backend.report.near_misses if miss.op == "attention"}


MIXED = variants.mixed_heads()
DISTANCES = variants.distances()
BLOCKS = variants.blocks()
RELATIVE = variants.relative_positions()
DISENTANGLED = variants.disentangled()
PACKED = variants.packed()


def _is_squared(name: str) -> bool:
    return name.endswith("softmax") and not name.startswith(("cdist_times", "opened")) and "beside" not in name


READ = {
    **{f"distances-{name}": DISTANCES[name] for name in some(DISTANCES, 12, _is_squared)},
    **{f"blocks-{name}": BLOCKS[name] for name in some(BLOCKS, 3)},
    **{f"relative-{name}": RELATIVE[name] for name in some(RELATIVE, 5, lambda name: "only" not in name)},
    **{f"disentangled-{name}": DISENTANGLED[name] for name in some(DISENTANGLED, 5)},
    **{f"packed-{name}": PACKED[name] for name in some(PACKED, 8)},
}


@pytest.mark.parametrize("name", READ)
def test_every_spelling_is_an_attention_with_its_gradients(name: str) -> None:
    backend = compiled(READ[name], is_trained=True)
    assert attentions(backend) == [True], backend.why_not()


@pytest.mark.parametrize("name", [name for name in READ if name.startswith("distances")][::3])
def test_distances_are_read_where_the_batch_has_a_symbolic_size(name: str) -> None:
    backend = compiled(READ[name], is_dynamic=True)
    assert attentions(backend) == [True], backend.why_not()


def test_distances_of_heads_that_share_keys_and_are_far_from_zero_are_as_in_the_source() -> None:
    """The squares are large, their differences are not; one key head for two query heads."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return (-(q[..., None, :] - k[..., None, :, :]).square().sum(-1)).softmax(-1) @ v

    q, k, v = qkv()
    far = Variant(attention, (q / 4 + 100, k[:, :2] / 4 + 100, v[:, :2]))
    backend = compiled(far)
    assert attentions(backend) == [True], backend.why_not()


@pytest.mark.parametrize("name", [*some(MIXED, 6), "tensordot-before"])
def test_mixed_heads_are_told(name: str) -> None:
    backend = compiled(MIXED[name])
    assert not attentions(backend)
    assert codes(backend) == {"HEADS_MIXED"}, backend.why_not()


def _apart(q: Tensor, k: Tensor) -> Tensor:
    return q[..., None, :] - k[..., None, :, :]


#: Lookalikes of squared distances, and why they are none.
NEAR: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "not_squared": (torch.cdist, "SCORES_ARE_DISTANCES"),
    "by_the_first_power": (lambda q, k: _apart(q, k).abs().sum(-1), "SCORES_ARE_DISTANCES"),
    "another_norm": (lambda q, k: torch.cdist(q, k, p=1.0).square(), "SCORES_ARE_DISTANCES"),
    "cubed": (lambda q, k: _apart(q, k).abs().pow(3).sum(-1), "SCORES_ARE_DISTANCES"),
    "of_the_sum": (lambda q, k: (q[..., None, :] + k[..., None, :, :]).square().sum(-1), "SCORES_NOT_READ"),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_squared_distance_is_left_alone(name: str) -> None:
    distance, code = NEAR[name]
    backend = compiled(Variant(lambda q, k, v: (-distance(q, k)).softmax(-1) @ v, qkv()))
    assert not attentions(backend)
    assert codes(backend) <= {code}, backend.why_not()


def test_keys_that_attract_the_farther_they_are_have_the_other_sign() -> None:
    backend = compiled(Variant(lambda q, k, v: (torch.cdist(q, k) ** 2 * 0.1).softmax(-1) @ v, qkv()))
    assert attentions(backend) == [True], backend.why_not()


def test_exponentials_of_distances_that_may_all_vanish_are_told() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (-(torch.cdist(q, k) ** 2)).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    backend = compiled(Variant(attention, qkv()))
    assert codes(backend) == {"SCORES_ARE_DISTANCES"}, backend.why_not()
