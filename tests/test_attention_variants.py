"""What models do to an attention beside scaling and masking: read in every spelling, or told with what stands in the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import attention_variants as variants
import pytest
import torch
from attention_variants import Family, Variant, normal, qkv, some
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


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 1e4, 1e25])
@pytest.mark.parametrize("name", ["causal", "last", "first"])
def test_distances_show_nothing_of_keys_that_a_mask_hides(name: str, hidden: float) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = -(q[..., None, :] - k[..., None, :, :]).square().sum(-1)
        keys, queries = torch.arange(k.shape[2]), torch.arange(q.shape[2])[:, None]
        seen = {"causal": keys <= queries, "last": keys <= k.shape[2] - 2, "first": keys > 0}[name]
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v

    q, k, v = qkv()
    k[:, :, 0 if name == "first" else -1] = hidden
    backend = Rewriting(lock={"attention": "lz.blocked"})
    torch._dynamo.reset()
    found = torch.compile(attention, backend=backend)(q, k, v)
    assert attentions(backend) == [True], backend.why_not()
    assert not backend.report.events
    torch.testing.assert_close(found[:, :, :-1], attention(q, k, v)[:, :, :-1])


@pytest.mark.parametrize("is_detached", [False, True])
def test_distances_to_a_codebook_are_read_without_its_leading_dimensions(is_detached: bool) -> None:
    """Its rows meet those of a batch by broadcasting alone; without gradients, a detached tensor is what it is of."""

    def attention(x: Tensor, codes: Tensor) -> Tensor:
        scores = -0.5 * (x.unsqueeze(-2) - codes).pow(2).sum(-1)
        return (scores.detach().softmax(-1).detach() if is_detached else scores.softmax(-1)) @ codes

    q, k, _ = qkv()
    backend = compiled(Variant(attention, (q[0], k[0, 0])), is_trained=not is_detached)
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


@pytest.mark.parametrize("squares", ["opened_baddbmm", "pow_sum", "cdist_pow"])
def test_products_beside_distances_are_read_with_one_of_them_as_a_bias(squares: str) -> None:
    """Invariant point attention; what a call adds to its product is no part of the product."""
    backend = compiled(DISTANCES[f"{squares}-beside_products-softmax"], is_trained=True)
    assert attentions(backend) == [True], backend.why_not()


def test_keys_that_attract_the_farther_they_are_have_the_other_sign() -> None:
    backend = compiled(Variant(lambda q, k, v: (torch.cdist(q, k) ** 2 * 0.1).softmax(-1) @ v, qkv()))
    assert attentions(backend) == [True], backend.why_not()


def test_exponentials_of_distances_that_may_all_vanish_are_told() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (-(torch.cdist(q, k) ** 2)).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    backend = compiled(Variant(attention, qkv()))
    assert codes(backend) == {"SCORES_ARE_DISTANCES"}, backend.why_not()


WINDOWS = variants.windows()
#: The band of keys that queries see, by where the padding is, and by whether it is masked: then it is left out.
BANDS = {
    "centred-zeros": (0, 4),
    "causal-zeros": (0, 4),
    "ahead-zeros": (0, 4),
    "centred-masked": (-2, 2),
    "causal-masked": (-4, 0),
    "ahead-masked": (0, 4),
}


def band(backend: Rewriting) -> tuple[int, int] | None:
    """That of the only attention."""
    (match,) = (match for match in backend.report.matches if match.op == "attention")
    found = match.attributes.get("band")
    return None if found is None else (found["lower"], found["upper"])


@pytest.mark.sampled
@pytest.mark.parametrize("name", some(WINDOWS, 14, lambda name: not name.startswith("products")))
@pytest.mark.parametrize("is_trained", [False, True])
def test_windows_of_keys_are_a_band_of_them(name: str, is_trained: bool) -> None:
    backend = compiled(WINDOWS[name], is_trained=is_trained)
    assert attentions(backend) == [True], backend.why_not()
    assert band(backend) == BANDS[name.split("-", 1)[1]]


@pytest.mark.parametrize("name", ["unfold-centred-masked", "slices-causal-masked", "index-ahead-zeros"])
def test_windows_are_a_band_where_the_batch_has_a_symbolic_size(name: str) -> None:
    backend = compiled(WINDOWS[name], is_dynamic=True)
    assert band(backend) == BANDS[name.split("-", 1)[1]]


def test_a_window_whose_places_are_weighed_one_by_one_is_told() -> None:
    backend = compiled(WINDOWS["products-centred-masked"])
    assert codes(backend) == {"WINDOW_BY_HAND"}, backend.why_not()


def _around(x: Tensor, width: int = 5, pad: tuple[int, int] = (2, 2)) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, *pad)).unfold(2, width, 1).transpose(-1, -2)


def _attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = torch.einsum("bhsd,bhswd->bhsw", q, keys) + bias
    return torch.einsum("bhsw,bhswd->bhsd", scores.softmax(-1), values)


PLACES = torch.randn(4, 1, 5, generator=torch.Generator().manual_seed(0))
GIVEN = torch.rand(2, 1, 24, 5, generator=torch.Generator().manual_seed(0)) < 0.6
GIVEN[..., 2] = True


def _without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (torch.nn.functional.pad(x[:, 0], (0, 0, 2, 2)).unfold(1, 5, 1) for x in (k, v))
    return torch.einsum("bsw,bsdw->bsd", torch.einsum("bsd,bsdw->bsw", q[:, 0], keys).softmax(-1), values)


def _projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads that are taken apart after the windows were taken."""
    rows = (x.transpose(1, 2).flatten(2) for x in (k, v))
    keys, values = (
        torch.stack([x[:, i : i + 20] for i in range(5)], 2).unflatten(-1, (4, 8)).permute(0, 3, 1, 2, 4) for x in rows
    )
    return _attend(q[:, :, :20], keys, values)


LIKE = {
    "with a bias for each place": lambda q, k, v: _attend(q, _around(k), _around(v), PLACES),
    "with a mask that is given": lambda q, k, v: _attend(
        q, _around(k), _around(v), torch.zeros(2, 1, 24, 5).masked_fill(~GIVEN, -torch.inf)
    ),
    "without padding": lambda q, k, v: _attend(
        q[:, :, 2:-2], *(x.unfold(2, 5, 1).transpose(-1, -2) for x in (k, v))
    ),
    "with more padding than a window": lambda q, k, v: _attend(
        q, *(_around(x, 5, (9, 6))[:, :, 4:28] for x in (k, v))
    ),
    "without heads": _without_heads,
    "with projections": _projected,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", LIKE)
@pytest.mark.parametrize("is_trained", [False, True])
def test_windows_with_more_to_them_are_bands_too(name: str, is_trained: bool) -> None:
    backend = compiled(Variant(LIKE[name], qkv(24, 24)), is_trained=is_trained)
    assert attentions(backend) == [True], backend.why_not()
    assert band(backend) is not None


class _Indexed(torch.nn.Module):
    """Windows by an index that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(20)[:, None] + torch.arange(5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q[:, :, :20], k[:, :, self.index], v[:, :, self.index])


def test_windows_by_an_index_that_changes_are_compiled_again() -> None:
    module, backend = _Indexed(), Rewriting(lock=LOCK, strict=True)
    function = torch.compile(module, backend=backend, fullgraph=True)
    inputs = qkv(24, 24)
    for index in (module.index.clone(), module.index.flip(0)):
        module.index.copy_(index)
        torch.testing.assert_close(function(*inputs), module(*inputs), **TOLERANCE)
    bands = [match.attributes.get("band") for match in backend.report.matches if match.op == "attention"]
    assert [band is not None for band in bands] == [True, False], backend.why_not()


@pytest.mark.parametrize("fill", [-torch.inf, -1e4])
def test_a_query_that_sees_nothing_of_its_window_has_nothing_to_do_with_other_keys(fill: float) -> None:
    """Its gradients are no numbers there, and its result is the mean of the window, padding included."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (_around(x, 5, (5, 0)) for x in (k, v))
        is_padding = torch.arange(25)[:, None] + torch.arange(5) < 5
        scores = torch.einsum("bhsd,bhswd->bhsw", q, keys).masked_fill(is_padding, fill)
        return torch.einsum("bhsw,bhswd->bhsd", scores.softmax(-1), values)

    torch._dynamo.reset()
    inputs = [each.detach().requires_grad_() for each in qkv(25, 24)]
    backend, results = Rewriting(lock=LOCK), []
    for function in (torch.compile(attention, backend=backend, fullgraph=True), attention):
        found = function(*inputs)
        grads = torch.autograd.grad(found, inputs, torch.ones_like(found))
        results.append([found.detach(), *grads])
    torch.testing.assert_close(*results, **TOLERANCE, equal_nan=True)
    assert not backend.report.events, backend.why_not()


PADDED = torch.arange(16) < torch.tensor([5, 0])[:, None, None, None]


@pytest.mark.parametrize("fill", [-torch.inf, float(torch.finfo(torch.float32).min), -1e4])
@pytest.mark.parametrize("again", ["filled", "multiplied"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_probabilities_that_the_same_mask_drops_again_are_zeros_where_it_drops_all(fill, again, is_trained) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = (q @ k.mT / 3).masked_fill(~mask, fill).softmax(-1)
        return (weights.masked_fill(~mask, 0.0) if again == "filled" else weights * mask) @ v

    torch._dynamo.reset()
    inputs = [each.detach().requires_grad_(is_trained) for each in qkv(16, 16)]
    backend, results = Rewriting(lock=LOCK), []
    for function in (torch.compile(attention, backend=backend, fullgraph=True), attention):
        found = function(*inputs, PADDED)
        grads = torch.autograd.grad(found.sum(), inputs) if is_trained else ()
        results.append([found.detach(), *grads])
    torch.testing.assert_close(*results, **TOLERANCE, equal_nan=True)
    assert attentions(backend) == [True], backend.why_not()
    assert not backend.report.events, backend.why_not()


SCORED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: k @ q,
    "matmul_first": lambda q, k: q @ k.T,
    "mv": lambda q, k: torch.mv(k, q),
    "inner": lambda q, k: torch.inner(k, q),
    "vecdot": lambda q, k: torch.linalg.vecdot(k, q),
    "column": lambda q, k: (k @ q[:, None]).squeeze(-1),
}
WEIGHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda p, v: p @ v,
    "mv": lambda p, v: torch.mv(v.T, p),
    "numbers": lambda p, v: v[:, 0] @ p,
    "dot": lambda p, v: torch.dot(p, v[:, 0]),
    "vdot": lambda p, v: torch.vdot(p, v[:, 0]),
    "vecdot": lambda p, v: torch.linalg.vecdot(p[:, None], v, dim=0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("weighed", WEIGHED)
@pytest.mark.parametrize("scored", SCORED)
def test_queries_and_values_may_be_vectors(scored: str, weighed: str, is_trained: bool) -> None:
    """Pooling by a learned query: it is as much an attention by ``k @ q`` as by ``k @ q[:, None]``."""

    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return WEIGHED[weighed]((SCORED[scored](q, k) * 0.3).softmax(-1), v)

    inputs = normal(8, seed=3), normal(7, 8, seed=4), normal(7, 5, seed=5)
    backend = compiled(Variant(pooled, inputs), is_trained=is_trained)
    assert attentions(backend) == [True], backend.why_not()


def test_a_vector_scores_the_keys_of_a_batch() -> None:
    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((k @ q * 0.3).softmax(-1)[..., None] * v).sum(-2)

    inputs = normal(8, seed=3), normal(2, 3, 7, 8, seed=4), normal(2, 3, 7, 5, seed=5)
    backend = compiled(Variant(pooled, inputs), is_trained=True)
    assert attentions(backend) == [True], backend.why_not()


def _additive(q: Tensor, k: Tensor, v: Tensor, by: Tensor, *, masks: bool, spelled: str) -> Tensor:
    """Bahdanau's: a number for each pair by a weight that all have, of features by a function of their own."""
    features = torch.tanh(q[..., :, None, :] + k[..., None, :, :])
    scores = {"matmul": lambda: features @ by, "sum": lambda: (features * by).sum(-1)}[spelled]()
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if masks else scores
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("spelled", ["matmul", "sum"])
def test_additive_attention_is_one_query_whose_keys_are_features_of_both(spelled: str, masks: bool) -> None:
    q, k, v = qkv(5, 7)
    backend = compiled(
        Variant(partial(_additive, masks=masks, spelled=spelled), (q, k, v, normal(q.shape[-1]))), is_trained=True
    )
    assert not backend.report.near_misses, backend.why_not()
    assert attentions(backend) == [True], backend.why_not()


def test_scores_that_are_overwritten_by_a_number_are_told_of_nowhere() -> None:
    def hidden_block(query: Tensor, key: Tensor, value: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        scores = (query @ key.transpose(-1, -2)).fill_(-1e30)  # all of these keys come later than all queries
        weights = torch.exp(scores - torch.maximum(scores.amax(-1, keepdim=True), largest))
        return weights @ value, weights.sum(-1)

    inputs = (
        *torch.randn(2, 3, 2, 11, 8).unbind(0)[:1],
        *torch.randn(2, 3, 2, 13, 8).unbind(0),
        torch.randn(3, 2, 11, 1),
    )
    backend = Rewriting()
    got = torch.compile(hidden_block, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, hidden_block(*inputs))
    assert not backend.report.near_misses, backend.why_not()


DROPPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": lambda s, c: torch.cat([s, c], -1).softmax(-1)[..., :-1],
    "first": lambda s, c: torch.cat([c, s], -1).softmax(-1)[..., 1:],
    "first_by_narrow": lambda s, c: torch.cat([c, s], -1).softmax(-1).narrow(-1, 1, s.shape[-1]),
    "first_shifted": lambda s, c: (x := torch.cat([c, s], -1)).sub(x.amax(-1, True)).softmax(-1)[..., 1:],
    "a key": lambda s, c: torch.cat([c, s], -1).softmax(-1)[..., :-1],
    "the first key": lambda s, c: torch.cat([s, c], -1).softmax(-1)[..., 1:],
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_column_that_is_dropped_is_a_sink_on_whichever_side(name: str) -> None:
    q, k, v = qkv(5, 7)

    def sunk(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks[:, None, None].expand(*q.shape[:-1], 1)
        scores = (q @ k.mT).masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(3), -torch.inf)
        return DROPPED[name](scores, column) @ v

    backend = compiled(Variant(sunk, (q, k, v, normal(q.shape[1]))), is_trained=True)
    if "key" in name:
        assert not attentions(backend)
        assert codes(backend) == {"SINK_NOT_UNDERSTOOD"}, backend.why_not()
    else:
        assert attentions(backend) == [True], backend.why_not()


def _shifted(places: Tensor) -> Tensor:
    """Transformer-XL's relative shift: key ``j`` of query ``i`` is place ``j - i + Q``, and of later ones who knows what."""
    padded = torch.cat([torch.zeros_like(places[..., :1]), places], -1)
    return padded.view(*places.shape[:-2], places.shape[-1] + 1, -1)[..., 1:, :].view_as(places)


@pytest.mark.parametrize("fill", [-torch.inf, -1e9])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("memory", [6, 12])
def test_keys_that_a_bias_takes_apart_are_the_keys_that_a_mask_and_a_weight_have(
    memory: int, is_weighted: bool, fill: float
) -> None:
    """Of so many keys, a bias is read over pairs of axes; the mask and the weight were met before they were two."""
    q, k, v = (normal(2, 3, rows, 8, seed=rows + at) for at, rows in enumerate((6, 6 + memory, 6 + memory)))
    later, weight = torch.ones(6, 6 + memory, dtype=torch.bool).triu(memory + 1), normal(6 + memory, seed=9).abs()

    def attend(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        scores = (q @ k.mT + _shifted(q @ places.mT)) * 8**-0.5
        weights = scores.masked_fill(later, fill).softmax(-1)
        return (weights * weight if is_weighted else weights) @ v

    backend = compiled(Variant(attend, (q, k, v, normal(3, 6 + memory, 8, seed=8))))
    assert attentions(backend) == [True], backend.why_not()
    assert not codes(backend), backend.why_not()


@pytest.mark.parametrize("again", [PADDED.roll(1, -1), ~PADDED], ids=["another", "its complement"])
def test_probabilities_that_another_mask_drops_drop_values(again: Tensor) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~other, 0.0) @ v

    backend = compiled(Variant(attention, (*qkv(16, 16), PADDED[:1], again[:1])))
    assert attentions(backend) == [True], backend.why_not()


WEIGHTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "numbers of keys": lambda p, v, w: (p * w[0, 0]) @ v,
    "numbers of heads and keys": lambda p, v, w: (p * w[0, :, None]) @ v,
    "numbers of batches and keys": lambda p, v, w: (p * w[:, :1, None]) @ v,
    "numbers of queries, and of keys": lambda p, v, w: (p * (w[0, 0] * w[0, 0, : p.shape[-2], None])) @ v,
    "truth values": lambda p, v, w: (p * (w > 0)[:, :, None]) @ v,
    "numbers of 8 bits": lambda p, v, w: (p * w[:, :, None]) @ (v * 9).to(torch.int8).to(v.dtype),
}
COMPUTED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "normalised again": (
        lambda p, v, w: ((x := p * w[0, 0]) / x.sum(-1, keepdim=True)) @ v,
        "INTERIOR_USED NOT_AN_EXPONENTIAL",
    ),
    "a number for each": (lambda p, v, w: (p * (w[0, 0] + w[0, 0, : p.shape[-2], None])) @ v, "PROBABILITIES_CHANGED"),
    "heads that share values": (lambda p, v, w: (p * w[0, :, None]) @ v[:, :1], "PROBABILITIES_CHANGED"),
}


@pytest.mark.parametrize("name", [*WEIGHTED, *COMPUTED])
def test_weights_of_keys_after_the_softmax_are_those_of_values(name: str) -> None:
    """As scales of a cache of few bits: where they are of keys alone. What is made of probabilities is another matter."""
    weighted, code = COMPUTED.get(name) or (WEIGHTED[name], "")

    def attention(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        return weighted((q @ k.mT).softmax(-1), v, weights)

    q, k, v = qkv(5, 7)
    is_trained = "bits" not in name
    backend = compiled(Variant(attention, (q, k, v, normal(*k.shape[:3]))), is_trained=is_trained)
    assert attentions(backend) == ([] if code else [True]), backend.why_not()
    assert codes(backend) == {*code.split()}, backend.why_not()


def test_of_no_keys_nothing_is_read_and_nothing_fails() -> None:
    for queries, keys in ((5, 0), (0, 5), (0, 0)):
        backend = compiled(Variant(lambda q, k, v: (q @ k.mT).tril().softmax(-1) @ v, qkv(queries, keys)))
        assert attentions(backend) == [], backend.why_not()
        assert not backend.report.events, backend.why_not()


UNLIKE = {
    "values of the next place": lambda q, k, v: _attend(
        q, *(torch.stack([torch.nn.functional.pad(x, (0, 0, 2, 3))[:, :, i + at : i + at + 24] for i in range(5)], 3)
             for at, x in enumerate((k, v)))
    ),
    "every second key": lambda q, k, v: _attend(
        q, *(torch.stack([torch.nn.functional.pad(x, (0, 0, 4, 4))[:, :, i : i + 24] for i in range(0, 9, 2)], 3)
             for x in (k, v))
    ),
    "one place twice": lambda q, k, v: _attend(
        q, *(torch.stack([torch.nn.functional.pad(x, (0, 0, 2, 2))[:, :, i : i + 24] for i in (0, 1, 1, 2, 3)], 3)
             for x in (k, v))
    ),
    "backwards": lambda q, k, v: _attend(q, *(_around(x).flip(2) for x in (k, v))),
    "values in another order": lambda q, k, v: _attend(q, _around(k), _around(v).flip(3)),
    "two strides": lambda q, k, v: _attend(
        q[:, :, :12], *(torch.nn.functional.pad(x, (0, 0, 2, 1)).unfold(2, 5, 2).transpose(-1, -2) for x in (k, v))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_windows_that_are_no_band_stay_a_query_each(name: str) -> None:
    function = UNLIKE[name]
    backend = compiled(Variant(function, qkv(24, 24)))
    found = [match for match in backend.report.matches if match.op == "attention"]
    assert found, backend.why_not()
    assert all(match.attributes.get("band") is None for match in found)


@pytest.mark.parametrize(
    ("family", "name"),
    [(WINDOWS, "unfold-centred-masked"), (WINDOWS, "slices-causal-zeros"), (DISTANCES, "cdist_pow-scaled-softmax")],
)
def test_layers_are_each_rewritten_with_their_own_keys(family: Family, name: str) -> None:
    function, (q, k, v) = family[name]
    backend = compiled(Variant(lambda q, k, v: function(function(q, k, v), k * 2, v), (q, k, v)), is_trained=True)
    assert attentions(backend) == [True, True], backend.why_not()


def test_windows_are_a_band_at_every_length() -> None:
    function, inputs = WINDOWS["unfold-centred-masked"]
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK, strict=True)
    run = torch.compile(function, backend=backend, fullgraph=True)
    copies = [each.clone() for each in inputs]
    for each in copies:
        torch._dynamo.mark_dynamic(each, 2)
    torch.testing.assert_close(run(*copies), function(*copies), **TOLERANCE)
    assert band(backend) == (-2, 2)
    for length in (7, 40):
        longer = [normal(2, 4, length, 8, seed=i) for i in range(3)]
        torch.testing.assert_close(run(*longer), function(*longer), **TOLERANCE)
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("spelled", ["unfold", "slices", "as_strided"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_wide_windows_over_more_tokens_than_a_proof_takes_are_bands(
    spelled: str, is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many places as two thirds of the tokens: a query in the middle sees no padding, one in a proof would see little else."""
    monkeypatch.setattr(variants, "WINDOW", 33)
    inputs = tuple(normal(3, 5, 50, 12, seed=i) for i in range(3))
    function = partial(variants._by_window, variants.WINDOWED[spelled], (16, 16), is_masked)
    backend = compiled(Variant(function, inputs))
    assert attentions(backend) == [True], backend.why_not()
    assert band(backend) == ((-16, 16) if is_masked else (0, 32))


def test_decayed_keys_times_a_matrix_that_was_solved_in_place_are_told_of_nowhere() -> None:
    def decayed(key: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """The keys that a delta rule takes off its state: no weight of them is an exponential of a score."""
        scaled, total = key * beta, decay.cumsum(-2)
        between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later, float("-inf")).exp()
        solved = -(scaled.unsqueeze(-2) * key.unsqueeze(-3) * between).sum(-1).masked_fill(seen, 0)
        for i in range(1, 5):
            row = solved[..., i, :i].clone()
            solved[..., i, :i] = row + (row.unsqueeze(-1) * solved[..., :i, :i].clone()).sum(-2)
        return (solved + torch.eye(5)) @ (scaled * total.exp())

    later, seen = torch.ones(5, 5).triu(1).bool()[..., None], torch.ones(5, 5).triu().bool()
    inputs = normal(2, 3, 5, 8), normal(2, 3, 5, 1), -normal(2, 3, 5, 8).abs()
    backend = Rewriting()
    got = torch.compile(decayed, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, decayed(*inputs))
    assert [miss for miss in backend.report.near_misses if miss.op == "attention"] == [], backend.why_not()


DIVIDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum_over_each": lambda s, sink: (s.exp().sum(-1, keepdim=True) / s.exp()).reciprocal(),
    "sink_over_each": lambda s, sink: 1 / (s.exp().sum(-1, keepdim=True) * (-s).exp() + (sink - s).exp()),
    "rest_over_each": lambda s, sink: 1 / (1 + (s.exp().sum(-1, keepdim=True) - s.exp()) / s.exp()),
    "logarithm": lambda s, sink: 1 / ((s.logsumexp(-1, True) - s).exp() + (sink - s).exp()),
}


@pytest.mark.parametrize("name", DIVIDING)
def test_exponentials_that_only_divide_are_a_softmax_where_each_summand_has_one(name: str) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        return DIVIDING[name](query @ key.mT / 4, sink) @ value

    inputs = normal(2, 4, 9, 16), normal(2, 4, 13, 16), normal(2, 4, 13, 16), normal(4, 1, 1)
    backend = compiled(Variant(attention, inputs))
    assert attentions(backend) == [True], backend.why_not()


@pytest.mark.usefixtures("no_preference")
@pytest.mark.parametrize("shape", [(16,), (12, 12)], ids=["a_head_a_feature", "heads_of_12"])
def test_keys_whose_features_are_the_heads_of_values_have_one_size_in_a_proof(shape: tuple[int, ...]) -> None:
    """Pooling by channels, whose keys are its values: the features of keys are limited by kernels, heads are not."""
    width = math.prod(shape)

    def pooled(tokens: Tensor, weight: Tensor) -> Tensor:
        return ((tokens @ weight).softmax(1).unflatten(-1, shape) * tokens.unflatten(-1, shape)).sum(1)

    backend = compiled(Variant(pooled, (normal(2, 7, width), normal(width, width))))
    assert attentions(backend) == [True], backend.why_not()
    assert not backend.report.events, backend.why_not()


@pytest.mark.parametrize(
    "attention",
    [
        lambda x, q, other: (q @ x).softmax(-1) @ x,
        lambda x, q, other: (x @ x).softmax(-1) @ other,
        lambda x, q, other: ((x @ x).softmax(2) * x).sum(2),
        lambda x, q, other: (x @ other.mT + x.mT.tanh()).softmax(-1) @ x,
    ],
    ids=["keys_transposed", "queries_transposed", "pooled", "transposed_in_a_bias"],
)
@pytest.mark.usefixtures("no_preference")
def test_what_is_read_along_queries_keys_and_features_is_square_in_a_proof(attention: Callable[..., Tensor]) -> None:
    backend = compiled(Variant(attention, (normal(2, 3, 16, 16), normal(2, 3, 7, 16), normal(2, 3, 16, 16))))
    assert attentions(backend) == [True], backend.why_not()
    assert not backend.report.events, backend.why_not()


@pytest.mark.usefixtures("no_preference")
def test_sizes_that_are_quotients_are_chosen_for_where_a_divisor_is_zero() -> None:
    def attention(x: Tensor, parts: int) -> Tensor:
        cut = x.reshape(3, 35 // parts, -1)  # in rows of numel // 3 // (35 // parts)
        return (cut @ cut.mT).softmax(-1) @ cut

    torch._dynamo.reset()
    backend, x = Rewriting(), normal(3, 5, 7, 8)
    torch.testing.assert_close(torch.compile(attention, backend=backend, dynamic=True)(x, 5), attention(x, 5))
    assert len(attentions(backend)) == 1, backend.why_not()
    assert not backend.report.events, backend.why_not()
