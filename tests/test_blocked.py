"""Blocks of ``lz.blocked``: small where they are alike, and few kinds of them, each of which is code to compile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile import reports
from lz_compile.lowering import dropping
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.kernels.attention import blocked, capping
from lz_compile.lowering.ops.attention import Operands, reference


class Exponentials(TorchDispatchMode):
    """The shapes of all blocks of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.exp.default:
            self.shapes.append(tuple(args[0].shape[-2:]))
        return function(*args, **(kwargs or {}))


ATTRIBUTES = {
    "full": AttentionAttrs(),
    "causal": AttentionAttrs(is_causal=True),
    "causal at the end": AttentionAttrs(band=Band(upper=0, at_end=True)),
    "window": AttentionAttrs(band=Band(-400, 0)),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 700), (513, 513), (1000, 1000), (2048, 2048), (5000, 5000), (900, 2500)]
)
def test_blocks_have_few_kinds_at_any_length(kind, queries, keys):
    x = Operands(*(torch.empty(1, 2, length, 8, device="meta") for length in (queries, keys, keys)))
    with Exponentials() as seen:
        blocked.attention(x, ATTRIBUTES[kind])
    assert sum(rows for rows, _ in seen.shapes) == queries
    assert len(set(seen.shapes)) <= blocked.MAX_KINDS + 1  # the last block of equal ones may be shorter
    if queries > 2 * blocked.BLOCK:
        assert max(rows for rows, _ in seen.shapes) <= max(blocked.BLOCK, -(-queries // blocked.MAX_KINDS))
    if kind == "full":
        assert max(rows for rows, _ in seen.shapes) <= max(2 * blocked.BLOCK, -(-queries // blocked.MAX_BLOCKS))
    if kind == "window" and queries == keys == 5000:
        assert max(columns for _, columns in seen.shapes) <= 400 + 2 * blocked.BLOCK


@pytest.mark.parametrize("kind", ATTRIBUTES)
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (41, 41), (30, 57)])
def test_blocks_of_any_size_give_the_reference(kind, queries, keys):
    generator = torch.Generator().manual_seed(0)
    x = Operands(*(torch.randn(2, 2, n, 8, generator=generator, dtype=torch.float64) for n in (queries, keys, keys)))
    attrs = AttentionAttrs(**{**vars(ATTRIBUTES[kind]), "score_dtype": torch.float64})
    for block in (3, 8, 16, 64):
        torch.testing.assert_close(blocked.attention(x, attrs, block), reference(x, attrs))


def test_the_tanh_of_a_soft_cap_is_one_by_other_means() -> None:
    few = torch.tensor([math.inf, -math.inf, 1e-40, 1e-6, 9.01, -9.03, 100.0])
    x = torch.cat([torch.linspace(-12, 12, 4001), few]).requires_grad_()
    found, expected = capping.tanh(x), torch.tanh(x.double())
    torch.testing.assert_close(found.double(), expected, rtol=4e-7, atol=0)
    assert (found.detach() - expected).mul(1 / 2**-24).div(expected.abs()).square().nanmean().sqrt() < 2, (
        "one unit or two"
    )
    assert found.abs().max() == 1
    assert (found == torch.tanh(x)).double().mean() < 0.9, "it is PyTorch's own"
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient.double(), (1 - expected.square()).detach(), rtol=0, atol=2e-6)
    assert capping.tanh(torch.tensor(math.nan)).isnan()
    double = torch.linspace(-3, 3, 101, dtype=torch.float64)
    assert torch.equal(capping.tanh(double), torch.tanh(double))


def over_numbers(attrs: AttentionAttrs) -> Any:
    return lambda *given: blocked.attention(Operands(*given[:3], mask=given[3] if given[3:] else None), attrs)


@pytest.mark.parametrize("over", ["keys", "scores", "heads"])
def test_a_mask_is_read_as_numbers_and_selects_what_it_selected(over: str) -> None:
    shape = {"keys": (2, 1, 1, 128), "scores": (1, 1, 128, 128), "heads": (2, 8, 128, 128)}[over]
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 2, 8, 128, 8, generator=generator).unbind()
    mask = torch.rand(shape, generator=generator) > 0.3
    mask[..., -1] = False
    if over != "keys":
        mask[..., 5, :] = False  # a row without keys
    key[:, :, -1] = math.nan
    x = Operands(query, key, value, mask=mask)
    attrs = AttentionAttrs(has_mask=True, selects_masked=True, masks_keys=over == "keys", masked_rows="zero")
    graph = make_fx(over_numbers(attrs))(query, key, value, mask)
    torch.testing.assert_close(graph(query, key, value, mask), reference(x, attrs), rtol=1e-5, atol=1e-6)
    assert sum(node.target is torch.ops.layerzero.mask_numbers.default for node in graph.graph.nodes) == 1
    compiled = torch.compile(over_numbers(attrs))(query, key, value, mask)
    torch.testing.assert_close(compiled, reference(x, attrs), rtol=1e-5, atol=1e-6)
    few = over_numbers(attrs)(*(each[:1, :1] for each in (query, key, value, mask)))
    torch.testing.assert_close(few, reference(x, attrs)[:1, :1], rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("band", [Band(upper=0), Band(upper=0, at_end=True), Band(-9, 3), Band(-40, None)])
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (128, 150)])
def test_a_band_is_read_as_numbers(band: Band, queries: int, keys: int) -> None:
    generator = torch.Generator().manual_seed(1)
    given = tuple(torch.randn(2, 8, length, 8, generator=generator) for length in (queries, keys, keys))
    attrs = AttentionAttrs(band=band)
    graph = make_fx(over_numbers(attrs))(*given)
    assert any(node.target is torch.ops.layerzero.band_numbers.default for node in graph.graph.nodes)
    wanted = reference(Operands(*given), attrs)
    torch.testing.assert_close(graph(*given), wanted, rtol=1e-5, atol=1e-6)
    lengths = torch.compile(over_numbers(attrs), dynamic=True)(*given)
    torch.testing.assert_close(lengths, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", ["nan", "zero"])
def test_a_query_of_nan_whose_probabilities_are_zeros_leaves_the_gradients_of_values_alone(rows: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(2, 3, 9, 4, generator=generator) for _ in range(3)]
    given[0][:, :, 2] = math.nan
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    mask[..., 4, :] = rows == "nan"
    attrs = AttentionAttrs(has_mask=True, masked_rows=rows, zeroes_nan=True)
    results = []
    for attention in (blocked.attention, reference):
        query, key, value = (each.clone().requires_grad_() for each in given)
        found = attention(Operands(query, key, value, mask=mask), attrs)
        results.append((found, *torch.autograd.grad(found.square().sum(), (query, key, value))))
    assert results[1][3].isfinite().all()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "queries", "is_copied"),
    [(torch.bfloat16, 40, True), (torch.float32, 40, False), (torch.bfloat16, 1, False)],
)
def test_products_in_16_bits_read_keys_and_values_in_one_piece(
    dtype: torch.dtype, queries: int, is_copied: bool
) -> None:
    x = Operands(*(torch.randn(1, length, 2, 8, dtype=dtype).transpose(1, 2) for length in (queries, 40, 40)))
    graph = make_fx(lambda *tensors: blocked.attention(Operands(*tensors), AttentionAttrs(score_dtype=dtype)))(
        *x.flat()[:3]
    )
    copies = [node for node in graph.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert len(copies) == 2 * is_copied


@pytest.mark.parametrize(
    ("dtype", "is_training"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_weights_are_summed_as_they_are_multiplied_so_that_none_lie_in_memory_twice(
    dtype: torch.dtype, is_training: bool
) -> None:
    """But where they are divided first: gradients through the sum and the product cancel in float32 alone."""
    x = Operands(*(torch.randn(1, 2, 40, 8, dtype=dtype) for _ in range(3)))
    with torch.set_grad_enabled(is_training):
        graph = make_fx(lambda *tensors: blocked.attention(Operands(*tensors), AttentionAttrs(score_dtype=dtype)))(
            *x.flat()[:3]
        )
        found = blocked.attention(x, AttentionAttrs(score_dtype=dtype))
    (total,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.sum.dim_IntList)
    is_narrow = dtype == torch.bfloat16 and not is_training
    assert (total.args[0].meta["val"].dtype, total.meta["val"].dtype) == (
        dtype if is_narrow else torch.float32,
        torch.float32,
    )
    wide = reference(Operands(*(each.double() for each in x.flat()[:3])), AttentionAttrs(score_dtype=torch.float64))
    torch.testing.assert_close(found.double(), wide, rtol=0, atol=2 * torch.finfo(dtype).eps)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def kept(sizes: tuple[int, int, int, int], dropout_p: float = 0.1) -> torch.Tensor:
    return dropping.dropped(torch.ones(sizes), *dropping.words(torch.empty(0), sizes), dropout_p)


def normal(*factors: torch.Tensor) -> float:
    """How many standard deviations the mean of a product of standardised numbers is from zero."""
    product = math.prod(factors[1:], start=factors[0])
    return abs(product.mean().item()) * product.numel() ** 0.5


@pytest.mark.parametrize("dropout_p", [0.0, 1e-3, 0.1, 0.5, 0.999, 1.0])
def test_dropout_drops_its_share_and_keeps_the_mean(dropout_p: float) -> None:
    noise = kept((2, 3, 50, 700), dropout_p).double()
    deviation = math.sqrt(dropout_p * (1 - dropout_p) / noise.numel())
    assert abs((noise == 0).double().mean().item() - dropout_p) <= 5 * deviation + 2**-16
    assert abs(noise.mean().item() - (dropout_p < 1)) <= 5 * deviation / max(1 - dropout_p, 0.5**16) + 1e-6


def test_what_is_dropped_has_no_pattern() -> None:
    """Neither along keys, queries, heads and sequences, nor in two rows and two columns, nor in counts of either."""
    torch.manual_seed(0)
    noise = (kept((2, 4, 256, 512)) > 0).double()
    noise = (noise - noise.mean()) / noise.std()
    for dim, steps in enumerate(((1,), (1, 2), (1, 2, 16, 100), (1, 2, 8, 64, 300))):
        for step in steps:
            assert (
                normal(noise.narrow(dim, step, noise.shape[dim] - step), noise.narrow(dim, 0, noise.shape[dim] - step))
                < 5
            )
    rows, columns = torch.randperm(256), torch.randperm(512)
    corners = [
        noise[:, :, rows[half]][..., columns[other]]
        for half in (slice(128), slice(128, 256))
        for other in (slice(256), slice(256, 512))
    ]
    assert normal(*corners[:3]) < 5
    assert normal(*corners) < 5
    assert noise.sum(-1).var().item() / 512 == pytest.approx(1, abs=0.2)
    assert noise.flatten(0, 2).sum(0).var().item() / 2048 == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("over", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_a_weight_is_dropped_by_its_place_whatever_the_blocks_are(over: dict[str, bool]) -> None:
    attrs = AttentionAttrs(dropout_p=0.25, **over)
    x = Operands(torch.randn(2, 4, 40, 8), *torch.randn(2, 2, 2 if over.get("enable_gqa") else 4, 40, 8).unbind())
    outcomes = []
    for block in (256, 16, 7):
        torch.manual_seed(1)
        outcomes.append(blocked.attention(x, attrs, block))
    assert not torch.allclose(outcomes[0], blocked.attention(x, attrs))
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0])


def test_what_an_undefined_weight_drops_to_is_undefined() -> None:
    x = Operands(*torch.randn(3, 1, 1, 8, 4).unbind())
    x.query[0, 0, 3] = math.nan
    found = blocked.attention(x, AttentionAttrs(dropout_p=0.999))
    assert found[0, 0, 3].isnan().all()
    assert found.isnan().sum() == 4


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_compiled_backward_drops_what_the_forward_dropped(is_dynamic: bool) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((q @ k.mT * 0.25).softmax(-1), 0.3, training=True) @ v

    query, key = torch.randn(2, 1, 2, 24, 16, dtype=torch.float64, requires_grad=True).unbind()
    identity = torch.eye(24, dtype=torch.float64).expand(1, 2, -1, -1).clone().requires_grad_()
    options = {"layerzero.lock": {"attention": "lz.blocked"}}
    compiled = torch.compile(attention, backend="layerzero", dynamic=is_dynamic, options=options)
    weights = compiled(query, key, identity)  # each value stands for its key
    (match,) = reports()[-1].matches
    assert (match.kernel, match.rewritten) == ("lz.blocked", True)
    plain = (query @ key.mT * 0.25).softmax(-1)
    noise = (weights / plain).detach()
    assert sorted(noise.round(decimals=6).unique().tolist()) == pytest.approx([0, 1 / 0.7], abs=1e-4)
    tangent = torch.randn_like(weights)
    expected = torch.autograd.grad((plain * noise) @ identity, (query, key, identity), tangent)
    found = torch.autograd.grad(weights, (query, key, identity), tangent)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
