"""Masks in whole attentions: what is proven becomes an attribute, results stay, and no mask is left in the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

from lz_compile.lowering.bands import Band
from lz_compile.runtime.policy import policy

KERNELS = ("lz.blocked", "torch.sdpa")
LOWEST = torch.finfo(torch.float32).min
BATCH, HEADS, TOKENS, DIM = 3, 4, 37, 16


def operands(queries: int = TOKENS, keys: int = TOKENS, *, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((BATCH, HEADS, queries, DIM), (BATCH, HEADS, keys, DIM), (BATCH, HEADS, keys, DIM))
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes]


def additive(make: Callable[..., Tensor], fill: float = LOWEST) -> Callable[..., Tensor]:
    """Attention that adds ``fill`` where ``make(rows, columns, *rest)`` is False."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * DIM**-0.5
        rows, columns = (torch.arange(n, device=query.device) for n in (query.shape[2], key.shape[2]))
        mask = torch.where(make(rows[:, None], columns[None], *rest), 0.0, fill)
        return (scores + mask).softmax(-1) @ value

    return attention


def selecting(make: Callable[..., Tensor], fill: float = -math.inf) -> Callable[..., Tensor]:
    """Attention that puts ``fill`` where ``make(rows, columns, *rest)`` is False."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * DIM**-0.5
        rows, columns = (torch.arange(n, device=query.device) for n in (query.shape[2], key.shape[2]))
        scores = scores.masked_fill(~make(rows[:, None], columns[None], *rest), fill)
        return scores.softmax(-1) @ value

    return attention


def fused(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDPA with a boolean mask."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        rows, columns = (torch.arange(n, device=query.device) for n in (query.shape[2], key.shape[2]))
        mask = make(rows[:, None], columns[None], *rest)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return attention


def compile_and_compare(
    function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool | None = None, digits: float = 1e-5
) -> tuple[Rewriting, Any]:
    """Rewrite, compare with float64 (and gradients where inputs want them), and give the only match's report."""
    torch._dynamo.reset()
    backend = Rewriting(strict=True)
    got = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    want = function(*exact)
    (match,) = backend.report.matches
    assert not backend.report.events, backend.why_not()
    assert match.rewritten, backend.why_not()
    torch.testing.assert_close(got.double(), want, rtol=10 * digits, atol=digits, equal_nan=True)
    wanted = [x for x in inputs if x.requires_grad]
    if wanted:
        weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
        ours = torch.autograd.grad(got, wanted, weight)
        theirs = torch.autograd.grad(want, [x for x in exact if x.requires_grad], weight.double())
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=10 * digits, atol=digits)
    return backend, match


def rounding(fill: float) -> float:
    """What a score of about one loses in float32 when ``fill`` is added to it, which the source itself does."""
    return 1e-3 if fill == -1e4 else 1e-5


def code(backend: Rewriting) -> str:
    return "\n".join(graph.code for graph in backend.graphs)


CAUSAL = lambda q, k: k <= q  # noqa: E731
WINDOW = lambda q, k: (k <= q) & (k > q - 7)  # noqa: E731


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spell", [additive, selecting, fused])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_causal_mask_of_positions_is_causality_and_costs_nothing(kernel: str, spell: Any, dynamic: bool) -> None:
    policy.lock("attention", kernel)
    backend, match = compile_and_compare(spell(CAUSAL), *operands(grad=True), dynamic=dynamic)
    assert match.mask == "causal"
    assert match.attributes["is_causal"] is True
    assert "has_mask" not in match.attributes
    assert "has_bias" not in match.attributes
    assert match.context["operation"] == "attention.causal"
    assert "arange" not in code(backend), "the mask is still made"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spell", [additive, selecting, fused])
def test_a_sliding_window_is_a_band(kernel: str, spell: Any) -> None:
    policy.lock("attention", kernel)
    backend, match = compile_and_compare(spell(WINDOW), *operands(grad=True))
    assert match.mask == "sliding window"
    assert match.attributes["band"] == {"lower": -6, "upper": 0, "at_end": False}
    assert "arange" not in code(backend)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spell", [additive, selecting, fused])
def test_queries_after_a_cache_are_counted_from_the_end(kernel: str, spell: Any) -> None:
    policy.lock("attention", kernel)
    _, match = compile_and_compare(spell(lambda q, k: k <= q + 20), *operands(17, 37, grad=True))
    assert match.attributes["band"] == {"lower": None, "upper": 0, "at_end": True}


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_new_tokens_after_a_cache_of_any_length_see_it_all(kernel: str, dynamic: bool) -> None:
    policy.lock("attention", kernel)

    def attention(query: Tensor, key: Tensor, value: Tensor, old_key: Tensor, old_value: Tensor) -> Tensor:
        keys, values = torch.cat((old_key, key), 2), torch.cat((old_value, value), 2)
        past = old_key.shape[2]
        positions = torch.arange(past, past + query.shape[2])
        mask = torch.arange(keys.shape[2])[None] <= positions[:, None]
        scores = (query @ keys.mT * DIM**-0.5).masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ values

    _, old_key, old_value = operands(5, 23)
    _, match = compile_and_compare(attention, *operands(11, 11), old_key, old_value, dynamic=dynamic)
    assert match.mask == "causal"
    assert match.attributes["band"] == {"lower": None, "upper": 0, "at_end": True}


@pytest.mark.parametrize("spell", [additive, selecting, fused])
def test_one_query_that_sees_the_whole_cache_has_no_mask(spell: Any) -> None:
    _, match = compile_and_compare(spell(lambda q, k: k <= q + 36), *operands(1, 37, grad=True))
    assert match.mask == "none"
    assert not {"is_causal", "band", "has_mask", "has_bias"} & match.attributes.keys()


def padding(side: str) -> Tensor:
    kept = torch.arange(TOKENS) < (TOKENS - 3 * torch.arange(BATCH))[:, None]
    return kept if side == "right" else kept.flip(-1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spell", [additive, selecting, fused])
def test_causality_and_padding_are_told_apart(kernel: str, side: str, spell: Any) -> None:
    """Left padding: the first rows of a padded sequence see no key at all."""
    policy.lock("attention", kernel)
    make = lambda q, k, kept: (k <= q) & kept[:, None, None, :]  # noqa: E731
    with torch.no_grad():
        _, match = compile_and_compare(spell(make), *operands(), padding(side))
    assert match.mask == "causal and key padding"
    assert match.attributes["is_causal"] is True
    assert match.attributes["has_mask"] is True
    assert match.attributes["masks_keys"] is True


@pytest.mark.parametrize("spell", [additive, selecting])
def test_padding_of_queries_and_of_keys_is_one_tensor(spell: Any) -> None:
    """In a proof where there is one query, there is one key."""
    policy.lock("attention", "lz.blocked")
    make = lambda q, k, kept: kept[:, None, None, :] & kept[:, None, :, None]  # noqa: E731
    with torch.no_grad():
        _, match = compile_and_compare(spell(make, LOWEST), *operands(), padding("right"))
    assert set(match.mask.split(" and ")) == {"query padding", "key padding"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fill", [LOWEST, -1e4])
def test_gradients_of_rows_without_a_key_stay_those_of_an_additive_mask(side: str, fill: float) -> None:
    make = lambda q, k, kept: (k <= q) & kept[:, None, None, :]  # noqa: E731
    compile_and_compare(additive(make, fill), *operands(grad=True), padding(side), digits=rounding(fill))


@pytest.mark.parametrize("fill", [-math.inf, LOWEST, -1e4])
def test_rows_without_a_key_give_what_the_source_gives(fill: float) -> None:
    """Every query before the fifth sees nothing."""
    make = lambda q, k: k <= q - 5  # noqa: E731
    with torch.no_grad():
        compile_and_compare(selecting(make, fill), *operands())
        compile_and_compare(additive(make, fill), *operands(), digits=rounding(fill))


@pytest.mark.parametrize("kernel", KERNELS)
def test_documents_given_at_run_time_become_operands(kernel: str) -> None:
    policy.lock("attention", kernel)
    ids = torch.tensor([[0] * 10 + [1] * 20 + [2] * 7, [0] * 37, [0] * 36 + [1]])
    make = lambda q, k, ids: (k <= q) & (ids[:, None, :, None] == ids[:, None, None, :])  # noqa: E731
    _, match = compile_and_compare(additive(make), *operands(grad=True), ids)
    assert match.mask in ("causal and document", "document and causal")
    assert match.attributes["has_documents"] is True


@pytest.mark.parametrize("is_subtracted", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_alibi_is_slopes(kernel: str, learned: bool, is_subtracted: bool) -> None:
    policy.lock("attention", kernel)

    def attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * DIM**-0.5
        rows, columns = (torch.arange(n) for n in (query.shape[2], key.shape[2]))
        bias = slopes[:, None, None] * (columns[None] - rows[:, None])
        away = slopes[:, None, None] * (rows[:, None] - columns[None])
        scores = (scores - away if is_subtracted else scores + bias).masked_fill(
            columns[None] > rows[:, None], -math.inf
        )
        return scores.softmax(-1) @ value

    slopes = (0.5 ** torch.arange(1, HEADS + 1)).requires_grad_(learned)
    _, match = compile_and_compare(attention, *operands(grad=True), slopes)
    assert match.attributes["has_slopes"] is True
    assert match.attributes["is_causal"] is True


CONSTANT = {
    "prefix": lambda q, k: (k <= q) | (k < 5),
    "block": lambda q, k: q // 50 == k // 50,
    "causal and block": lambda q, k: (q // 50 == k // 50) & (k <= q),
}


@pytest.mark.parametrize("spell", [additive, selecting, fused])
@pytest.mark.parametrize("name", CONSTANT)
def test_of_constants_it_is_known_how_far_they_reach(name: str, spell: Any) -> None:
    policy.lock("attention", "lz.blocked")
    _, match = compile_and_compare(spell(CONSTANT[name]), *operands(150, 150, grad=True))
    assert match.mask == name
    assert match.attributes["reach"] == "3 tiles of 64 queries"
    assert "masked_rows" not in match.attributes, "every query sees a key"


def test_of_constants_that_hold_flags_a_proof_leaves_queries_without_a_key() -> None:
    """Chunks of queries see the chunk itself, and the ones beside it where these exist; in a proof, flags are random."""
    chunk, chunks = 4, 6

    def beside(x: Tensor) -> Tensor:
        padded = F.pad(x.unflatten(2, (chunks, chunk)), (0, 0, 0, 0, 1, 1))
        return torch.cat([padded[:, :, :-2], padded[:, :, 1:-1], padded[:, :, 2:]], 3)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = torch.arange(chunks * chunk).view(chunks, chunk, 1)
        columns = torch.arange(-chunk, (chunks + 1) * chunk).unfold(0, 3 * chunk, chunk)[:, None]
        keep = ((rows - columns).abs() <= chunk) & (columns >= 0) & (columns < chunks * chunk)
        scores = query.unflatten(2, (chunks, chunk)) @ beside(key).transpose(-2, -1) * DIM**-0.5
        return (scores.masked_fill(~keep, -1e9).softmax(-1) @ beside(value)).flatten(2, 3)

    policy.lock("attention", "lz.blocked")
    _, match = compile_and_compare(attention, *operands(24, 24, grad=True))
    assert match.mask.startswith("sliding window"), match.mask
    assert match.attributes["masked_rows"] == "mean"


def test_a_mask_that_two_layers_share_is_made_once_for_kernels_that_need_it() -> None:
    policy.lock("attention", "torch.sdpa")

    def two(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = additive(WINDOW)
        return layer(layer(query, key, value), key, value)

    torch._dynamo.reset()
    backend = Rewriting(strict=True)
    got = torch.compile(two, backend=backend, fullgraph=True)(*operands())
    torch.testing.assert_close(got, two(*operands()), rtol=1e-4, atol=1e-5)
    assert [match.rewritten for match in backend.report.matches] == [True, True]
    assert code(backend).count(".triu(") == 1


def test_layers_with_other_masks_are_told_apart() -> None:
    def two(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return additive(CAUSAL)(additive(WINDOW)(additive(CAUSAL)(query, key, value), key, value), key, value)

    torch._dynamo.reset()
    backend = Rewriting(strict=True)
    got = torch.compile(two, backend=backend, fullgraph=True)(*operands())
    torch.testing.assert_close(got, two(*operands()), rtol=1e-4, atol=1e-5)
    assert [bool(match.attributes.get("is_causal")) for match in backend.report.matches] == [True, False, True]


def test_a_general_mask_says_why_it_is_one() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return (query @ key.transpose(-2, -1) * DIM**-0.5 + mask).softmax(-1) @ value

    _, match = compile_and_compare(attention, *operands(), torch.randn(TOKENS, TOKENS))
    assert match.mask == "bias"
    assert match.mask_reasons


def test_bands_intersect_where_that_is_a_band_again() -> None:
    from lz_compile.passes.attention.proven_masks import intersection

    assert intersection(Band(upper=0), Band(lower=-3), 8, 8) == Band(-3, 0)
    assert intersection(Band(upper=2), Band(upper=0, at_end=True), 4, 9) == Band(None, -3, at_end=True)
    assert intersection(Band(lower=2), Band(upper=0), 8, 8) is None


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (37, 70)])
def test_sdpas_own_causality_counts_from_the_first_key(queries: int, keys: int) -> None:
    policy.lock("attention", "lz.blocked")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    _, match = compile_and_compare(attention, *operands(queries, keys, grad=True))
    assert match.attributes["is_causal"] is True


def test_equal_constants_of_other_layers_are_told_apart() -> None:
    """The layers differ only in what makes a constant that is evaluated, of which two share one in another shape."""

    def layer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return (query @ key.mT * 0.25).masked_fill(~mask, -math.inf).softmax(-1) @ value

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = torch.arange(TOKENS)
        distance = rows[:, None] - rows[None]
        near = torch.sqrt((distance >= 0).float()) > 0.5
        wide = torch.sqrt((distance >= -3).float()) > 0.5
        query = layer(layer(query, key, value, near[None, None]), key, value, near)
        return layer(query, key, value, wide)

    torch._dynamo.reset()
    backend = Rewriting(strict=True)
    got = torch.compile(model, backend=backend, fullgraph=True)(*operands())
    torch.testing.assert_close(got, model(*operands()), rtol=1e-4, atol=1e-5)
    assert [match.mask for match in backend.report.matches] == ["causal", "causal", "sliding window"]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8])
def test_documents_that_were_cut_to_few_bits_are_not_those_before(kind: torch.dtype) -> None:
    ids = torch.tensor([1, 257, 513])[torch.arange(TOKENS) // 10 % 3].repeat(BATCH, 1)
    make = lambda q, k, ids: ids.to(kind)[:, None, :, None] == ids.to(kind)[:, None, None, :]  # noqa: E731
    compile_and_compare(additive(make), *operands(), ids)


def test_jumps_that_are_counted_in_few_bits_are_not_read_as_documents() -> None:
    def make(_rows: Tensor, _columns: Tensor, given: Tensor) -> Tensor:
        jumps = torch.diff(given, prepend=given[:, :1] - 1) != 1
        ids = torch.cumsum(jumps, -1, dtype=torch.uint8)
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return same & (given[:, None, None, :] <= given[:, None, :, None])

    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, 1, 600, DIM, generator=generator) for _ in range(3)]
    compile_and_compare(additive(make), *inputs, torch.zeros(1, 600, dtype=torch.int64))


@pytest.mark.parametrize("parts", [("padding",), ("document",), ("alibi",), ("padding", "alibi")])
def test_masks_hold_where_values_alone_are_shared_by_heads(parts: tuple[str, ...]) -> None:
    """Keys were rotated per head after they were repeated, so that a group of heads becomes an axis of the batch."""
    policy.lock("attention", "lz.blocked")

    def attention(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, documents: Tensor, slopes: Tensor) -> Tensor:
        rows, columns = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
        value = value[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(value.shape)
        keep = columns <= rows
        keep = keep & kept[:, None, None, :] if "padding" in parts else keep
        keep = keep & (documents[:, None, :, None] == documents[:, None, None, :]) if "document" in parts else keep
        scores = query @ key.transpose(-2, -1) * DIM**-0.5
        scores = scores + slopes[:, None, None] * (columns - rows) if "alibi" in parts else scores
        return (scores + torch.where(keep, 0.0, LOWEST)).softmax(-1) @ value

    kept = torch.arange(TOKENS) < torch.tensor([TOKENS, 30, 9])[:, None]
    documents = torch.arange(TOKENS) // 9 + torch.arange(BATCH)[:, None]
    _, match = compile_and_compare(attention, *operands(), kept, documents, torch.tensor([0.5, 0.25, 0.125, 0.1]))
    assert all(part in match.mask for part in parts), match.mask


def test_two_lowest_numbers_of_float64_add_up_to_minus_infinity() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lowest, columns = torch.finfo(torch.float64).min, torch.arange(TOKENS)
        first, second = columns[:, None] < columns, columns[:, None] < columns - 3
        mask = (first.double() * lowest + second.double() * lowest).clamp(min=lowest)
        return (query @ key.mT + mask).softmax(-1) @ value

    inputs, backend = [each.double() for each in operands()], Rewriting(strict=True, lock={"attention": "lz.blocked"})
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*inputs), attention(*inputs))
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()
    assert match.attributes["is_causal"]
