"""Softmaxes that were not read: what looks like attention is told with its reason, routers and classifiers are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ORDER = torch.randperm(23, generator=torch.Generator().manual_seed(0))
FILTERS = torch.ones(4, 4, 3, 3)
EDGES = torch.randn(2, 19, 23, 4, generator=torch.Generator().manual_seed(1))
MIXER = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))


class Doubled(torch.autograd.Function):
    """A function that Dynamo keeps whole where gradients are on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Masked(torch.autograd.Function):
    """A softmax that keeps its result only, as older models have it (SEW-D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor) -> Tensor:
        found = x.masked_fill(dropped, torch.finfo(x.dtype).min).softmax(-1).masked_fill_(dropped, 0)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (found,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, found, -1, found.dtype), None


def scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT * 0.25


def _index_select(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).index_select(-1, ORDER.repeat(2)).softmax(-1) @ v.repeat(1, 1, 2, 1)


def _gather(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).gather(-1, ORDER.expand(2, 4, 19, 23)).softmax(-1) @ v


def _function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights: Tensor = Doubled.apply(scores(q, k)).softmax(-1)
    return weights @ v


def _convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(scores(q, k), FILTERS, padding=1).softmax(-1) @ v


def _sorted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).sort(-1).values.softmax(-1) @ v


def _largest_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    largest = scores(q, k).topk(7).values
    return (largest.softmax(-1)[..., None] * v[:, :, None, :7]).sum(-2)


def _relative_shift(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shifted = F.pad(scores(q, k), (1, 0)).view(2, 4, 24, 19)[:, :, 1:].reshape(2, 4, 19, 23)
    return shifted.softmax(-1) @ v


def _exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.conv2d(scores(q, k), FILTERS, padding=1).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(scores(q, k), FILTERS, padding=1).log_softmax(-1).exp() @ v


def _over_the_first_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = scores(q, k)[0, 0].T.index_select(0, ORDER)
    return turned.softmax(0).T @ v[0, 0]


def _probabilities_gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).gather(-1, ORDER.expand(2, 4, 19, 23)) @ v


def _probabilities_through_a_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights: Tensor = Doubled.apply(scores(q, k).softmax(-1))
    return weights @ v


def _scores_mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", scores(q, k), MIXER).softmax(-1) @ v


def _scores_mixed_by_a_linear_map(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(scores(q, k).permute(0, 2, 3, 1), MIXER).permute(0, 3, 1, 2).softmax(-1) @ v


def _both_mixed_by_linear_maps_with_biases(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = F.linear(scores(q, k).permute(0, 2, 3, 1), MIXER, MIXER[0]).permute(0, 3, 1, 2).softmax(-1)
    return F.linear(mixed.permute(0, 2, 3, 1), MIXER, MIXER[1]).permute(0, 3, 1, 2) @ v


def _probabilities_mixed_by_a_linear_map_with_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(scores(q, k).softmax(-1).permute(0, 2, 3, 1), MIXER, MIXER[1]).permute(0, 3, 1, 2) @ v


def _scores_mixed_by_a_convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(scores(q, k), MIXER[:, :, None, None]).softmax(-1) @ v


def _heads_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = scores(q, k).softmax(-1).chunk(2, 1)
    return torch.cat([one @ v[:, :2], other @ v[:, 2:].sin()], 1)


def _heads_taken_one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = scores(q, k).softmax(-1).unbind(1)
    return torch.stack([each @ v[:, head] for head, each in enumerate(heads)], 1)


def _queries_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = scores(q, k).softmax(-1)
    return torch.cat([found[:, :, :4] @ v, found[:, :, 4:] @ v.sin()], 2)


def _keys_split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1)[..., :8] @ v[:, :, :8]


def _probabilities_mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = torch.einsum("hg,bhij->bgij", MIXER, F.dropout(scores(q, k).softmax(-1), 0.1, training=False))
    return F.layer_norm(mixed.transpose(1, -1), (4,)).transpose(1, -1) @ v


def _probabilities_mixed_by_a_convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(scores(q, k).softmax(-1), MIXER[:, :, None, None]) @ v


def _both_mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = torch.einsum("bhij,hg->bgij", scores(q, k), MIXER).softmax(-1)
    return torch.einsum("bhij,hg->bgij", mixed, MIXER) @ v


def _norms_of_differences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[..., None, :] - k[..., None, :, :]).norm(dim=-1).neg().softmax(-1) @ v


def _scores_of_another_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = scores(q, k)
    torch._dynamo.graph_break()
    return (found * 2).softmax(-1) @ v


def _keys_normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.softmax(-2).mT @ v)


def _clamped_beside_a_projected_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The bias is a product with a weight, the scores are not read: no router."""
    bias = F.linear(EDGES, MIXER).movedim(-1, 1)
    return (scores(q, k).clamp(-1, 1) + bias).softmax(-1) * bias.sigmoid() @ v


def _no_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) * v.sum()


def _softmax_in_a_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Masked.apply(scores(q, k), ORDER < 3) @ v


def _checkpointed_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(F.softmax, scores(q, k), -1, use_reentrant=False) @ v


UNREAD: dict[Callable[..., Tensor], str] = {
    _index_select: "[SCORES_NOT_READ] the scores pass through index_select, which",
    _gather: "[SCORES_NOT_READ] the scores pass through gather, which",
    _function: "[SCORES_NOT_READ] the scores pass through autograd_function_apply, which",
    _convolution: "[SCORES_NOT_READ] the scores pass through conv2d, which",
    _sorted: "[SCORES_NOT_READ] the scores pass through sort, which",
    _largest_only: "[SCORES_NOT_READ] the scores pass through topk, which",
    _relative_shift: "[SCORES_NOT_READ] the scores pass through pad, which",
    _exponentials: "[SCORES_NOT_READ] the scores pass through conv2d, which",
    _logarithms: "[SCORES_NOT_READ] the scores pass through conv2d, which",
    _over_the_first_dimension: "[SCORES_NOT_READ] the scores pass through index_select, which",
    _probabilities_gathered: "[PROBABILITIES_NOT_READ] the probabilities pass through gather, which",
    _probabilities_through_a_function: "[PROBABILITIES_NOT_READ] the probabilities pass through autograd_function",
    _heads_split: "[PROBABILITIES_SPLIT] the probabilities are split by chunk",
    _heads_taken_one_by_one: "[PROBABILITIES_SPLIT] the probabilities are split by unbind",
    _queries_split: "[PROBABILITIES_SPLIT] the probabilities are split by getitem",
    _keys_split: "[PROBABILITIES_NOT_READ] the probabilities pass through getitem, which",
    _scores_mixed: "[HEADS_MIXED] the scores of different heads",
    _scores_mixed_by_a_linear_map: "[HEADS_MIXED] the scores of different heads",
    _both_mixed_by_linear_maps_with_biases: "[HEADS_MIXED] the scores of different heads",
    _probabilities_mixed_by_a_linear_map_with_a_bias: "[HEADS_MIXED] the probabilities of different heads",
    _scores_mixed_by_a_convolution: "[HEADS_MIXED] the scores of different heads",
    _probabilities_mixed: "[HEADS_MIXED] the probabilities of different heads",
    _probabilities_mixed_by_a_convolution: "[HEADS_MIXED] the probabilities of different heads",
    _both_mixed: "[HEADS_MIXED] the scores of different heads",
    _norms_of_differences: "[SCORES_ARE_DISTANCES] the scores are distances between queries and keys",
    _scores_of_another_graph: "[SCORES_FROM_OUTSIDE] the scores are an input of this graph",
    _keys_normalised: "[FEATURES_NORMALISED] the softmax is of features themselves",
    _clamped_beside_a_projected_bias: "[SCORES_NOT_READ] the scores pass through clamp",
    _no_values: "[NO_VALUES] the probabilities meet no values",
    _softmax_in_a_function: "[SOFTMAX_APART] the softmax is in a graph of its own, which autograd_function_apply runs",
    _checkpointed_softmax: "[SOFTMAX_APART] the softmax is in a graph of its own, which tag_activation_checkpoint runs",
}


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, n, 16, generator=generator, requires_grad=True) for n in (19, 23, 23)]


@pytest.mark.parametrize("attention", UNREAD)
def test_what_looks_like_attention_is_told_with_its_reason(attention: Callable[..., Tensor]) -> None:
    backend = Rewriting(strict=True)
    got = torch.compile(attention, backend=backend)(*operands())
    torch.testing.assert_close(got, attention(*operands()))
    assert not [match for match in backend.report.matches if match.op == "attention"]
    (miss,) = backend.report.near_misses
    assert str(miss.reason).startswith(UNREAD[attention])
    assert miss.edit
    assert miss.where.startswith(__file__)


def test_routers_whose_softmax_is_in_a_function_are_not_told() -> None:
    def routed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = Masked.apply(F.linear(scores(q, k).softmax(-1) @ v, gate), dropped)
        return weights @ gate

    gate, dropped, backend = nn.Parameter(torch.randn(5, 16)), torch.zeros(5, dtype=torch.bool), Rewriting(strict=True)
    torch.testing.assert_close(torch.compile(routed, backend=backend)(*operands()), routed(*operands()))
    assert [match.op for match in backend.report.matches] == ["attention"], backend.why_not()
    assert not backend.report.near_misses


def test_rows_that_are_mixed_before_they_meet_values_are_told() -> None:
    def agents(q: Tensor, few: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores(q, few).softmax(-1) @ scores(few, k).softmax(-1)) @ v

    few, backend = torch.randn(2, 4, 5, 8), Rewriting(strict=True)
    q, k, v = (torch.randn(2, 4, rows, 8) for rows in (19, 23, 23))
    torch.testing.assert_close(torch.compile(agents, backend=backend)(q, few, k, v), agents(q, few, k, v))
    assert len(backend.report.matches) == 1, "the first product is an attention whose values are probabilities"
    assert [miss.reason.code for miss in backend.report.near_misses] == ["PROBABILITIES_MULTIPLIED"]


@pytest.mark.parametrize("rows", [1, 19])
def test_a_softmax_over_one_key_is_told_and_one_over_one_expert_is_not(rows: int) -> None:
    def weighed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return scores(q, k).softmax(-1) @ v, F.linear(q, gate).softmax(-1) @ v

    gate, backend = nn.Parameter(torch.randn(1, 8)), Rewriting(strict=True)
    q, k, v = (torch.randn(2, 4, size, 8) for size in (rows, 1, 1))
    torch.testing.assert_close(torch.compile(weighed, backend=backend)(q, k, v), weighed(q, k, v))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["ONE_KEY"]


@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("is_first", [False, True])
def test_one_key_beside_a_sink_is_told(rows: int, is_first: bool) -> None:
    def weighed(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        columns = [scores(q, k), sink.view(1, 4, 1, 1).expand(2, 4, rows, 1)]
        weights = torch.cat(columns[::-1] if is_first else columns, -1).softmax(-1)
        return (weights[..., 1:] if is_first else weights[..., :-1]) @ v

    q, k, v, backend = *(torch.randn(2, 4, size, 8) for size in (rows, 1, 1)), Rewriting(strict=True)
    torch.compile(weighed, backend=backend)(q, k, v, torch.randn(4))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["ONE_KEY"]
    assert "sigmoid" in backend.why_not()


@pytest.mark.parametrize(
    "weigh",
    [
        lambda s: s.log_softmax(-1),
        lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
        lambda s: s.softmax(-1) * (s > 0),
        lambda s: F.dropout(s.softmax(-1), 0.5),
    ],
)
def test_what_is_no_softmax_of_one_key_is_not_told_to_be_one(weigh: Callable[[Tensor], Tensor]) -> None:
    backend = Rewriting(strict=True)
    q, k, v = (torch.randn(2, 4, size, 8) for size in (19, 1, 1))
    torch.compile(lambda q, k, v: weigh(scores(q, k)) @ v, backend=backend)(q, k, v)
    assert "ONE_KEY" not in [miss.reason.code for miss in backend.report.near_misses]


def test_queries_and_keys_that_are_normalised_are_no_scores() -> None:
    """As in efficient attention."""
    backend, (q, k, v) = Rewriting(strict=True), operands()
    torch.compile(lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v), backend=backend)(q, k, v)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["FEATURES_NORMALISED"] * 2


@pytest.mark.parametrize("softmaxes", [1, 2])
def test_features_of_one_projection_that_are_normalised_are_no_scores(softmaxes: int) -> None:
    """As in CoaT and in the U-Nets of diffusion models; a softmax that weighs values for good is none of them."""

    def linear(x: Tensor) -> Tensor:
        q, k, v = F.linear(x, weight).view(2, 19, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return (q.softmax(-1) if softmaxes == 2 else q) @ (k.softmax(-2).mT @ v)

    def pooled(x: Tensor) -> Tensor:
        _, k, v = F.linear(x, weight).view(2, 19, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.linear(k.softmax(-2).mT @ v, weight[:, :8])

    def mixed(x: Tensor) -> Tensor:
        _, k, v = F.linear(x, weight).view(2, 19, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return weight[:5, :8] @ (k.softmax(-2).mT @ v)

    weight, x = nn.Parameter(torch.randn(96, 32)), torch.randn(2, 19, 32)
    for function, told in ((linear, ["FEATURES_NORMALISED"] * softmaxes), (pooled, []), (mixed, [])):
        backend = Rewriting(strict=True)
        torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
        assert [miss.reason.code for miss in backend.report.near_misses] == told


@pytest.mark.parametrize("is_pooled", [False, True])
def test_an_expectation_over_classes_is_no_attention(is_pooled: bool) -> None:
    """As of ESMFold's errors and scores, and of boxes' sides: there is one number for each class, and no values."""

    def expected(logits: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
        mean = (logits.softmax(-1) * ((edges[1:] + edges[:-1]) / 2)).sum(-1)
        return (mean * (weights / weights.sum())).sum(-1) if is_pooled else mean

    backend, inputs = Rewriting(strict=True), (torch.randn(2, 7, 7, 10), torch.rand(11), torch.rand(7))
    torch.testing.assert_close(torch.compile(expected, backend=backend)(*inputs), expected(*inputs))
    assert not backend.report.near_misses, backend.why_not()


def _positive(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.elu(q) + 1, F.elu(k) + 1


def _of_a_context(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _positive(q, k)
    return q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


def _by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _positive(q, k)
    scale = 1 / (torch.einsum("bhld,bhd->bhl", q, k.sum(2)) + 1e-6)
    return torch.einsum("bhld,bhdm,bhl->bhlm", q, torch.einsum("bhnd,bhnm->bhdm", k, v), scale)


def _beside_a_column_of_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = q.relu() @ (k.relu().mT @ F.pad(v, (0, 1), value=1.0))
    return out[..., :-1] / (out[..., -1:] + 1e-5)


def _of_all_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = _positive(q, k)
    return (q @ k.mT) / (q @ k.mT).sum(-1, keepdim=True) @ v


def _not_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q / q.norm(dim=-1, keepdim=True) @ (k.mT @ v)


@pytest.mark.parametrize("weigh", [_of_a_context, _by_einsum, _beside_a_column_of_ones, _of_all_pairs])
def test_linear_attention_is_told(weigh: Callable[..., Tensor]) -> None:
    for function, told in ((weigh, ["LINEAR_ATTENTION"]), (_not_divided, [])):
        torch._dynamo.reset()
        backend = Rewriting(strict=True)
        torch.testing.assert_close(torch.compile(function, backend=backend)(*operands()), function(*operands()))
        assert [miss.reason.code for miss in backend.report.near_misses if miss.op == "attention"] == told


def test_probabilities_of_learned_queries_that_are_mixed_are_told() -> None:
    """As of agents that gather tokens; the softmax runs over tokens, so that it is no router's."""

    def agents(k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhqk,gh->bgqk", (learned @ k.mT).softmax(-1), mixer) @ v

    learned, mixer = nn.Parameter(torch.randn(4, 5, 8)), nn.Parameter(torch.randn(4, 4))
    backend = Rewriting(strict=True)
    k, v = torch.randn(2, 2, 4, 23, 8)
    torch.testing.assert_close(torch.compile(agents, backend=backend)(k, v), agents(k, v))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["HEADS_MIXED"]


class Router(nn.Module):
    """A softmax over experts, of which the largest are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 24))
        self.down = nn.Parameter(torch.randn(4, 24, 16))

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.gate(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        weights = self.logits(x).softmax(-1, dtype=torch.float)
        best, chosen = weights.topk(2, -1)
        weights = torch.zeros_like(weights).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        hidden = torch.einsum("td,edf->tef", x, self.up).relu()
        return torch.einsum("te,tef,efd->td", weights, hidden, self.down)


class CosineRouter(Router):
    """The same with logits between normalised tokens and normalised weights."""

    def logits(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) @ F.normalize(self.gate.weight, dim=-1).T * 5


class AdaptedRouter(Router):
    """The same with a weight that a low-rank adapter is added to."""

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gate.weight + self.up[0, :4, :2] @ self.up[1, :2, :16])


class ClassHeads(nn.Module):
    """Class probabilities of object queries, contracted with their masks (MaskFormer, DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.masks = nn.Linear(16, 6), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        classes = self.classes(x).softmax(-1)[..., :-1]
        masks = (self.masks(x) @ x.T).sigmoid()
        return torch.einsum("qc,qn->cn", classes, masks)


class Codebook(nn.Module):
    """Tokens replaced by a weighted sum of the words of a codebook, by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(6, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (-torch.cdist(x, self.words)).softmax(-1) @ self.words


class Loss(nn.Module):
    """A classifier with its loss, accuracy and entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.classes(x)
        found, surprise = logits.softmax(-1), logits.log_softmax(-1)
        return F.nll_loss(surprise, found.argmax(-1)) + (found * surprise).sum(-1).mean()


class Swish(nn.Module):
    """A gate whose exponential only divides, before a product with something computed."""

    def forward(self, x: Tensor) -> Tensor:
        row = x @ x.T
        return (row / (1 + torch.exp(-row))) @ x


class Functional(nn.Module):
    """Layers whose weights are given as tensors, one adapter among them: they are no keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        down, up = x.T[:, :4], x.T.reshape(4, -1)
        return torch.tanh(x.expand(3, *x.shape) @ down) @ up


class Branches(nn.Module):
    """Two blocks that weigh their branches by a softmax over them (ResNeSt, SKNet): the first is features for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Conv2d(4, 8, 3, padding=1) for _ in range(2))
        self.gates = nn.ModuleList(nn.Conv2d(4, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(1, 4, 2, 2)[..., :1, :].expand(1, 4, 3, 2)
        for features, gate in zip(self.features, self.gates, strict=True):
            branches = features(x).relu().unflatten(1, (2, 4))
            weights = gate(branches.sum(1).mean((2, 3), keepdim=True)).unflatten(1, (2, 4)).softmax(1)
            x = (branches * weights).sum(1)
        return x


class Places(nn.Module):
    """Two blocks that pool by a softmax of one score for each place (MobileViTv2), behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.projected = nn.ModuleList(nn.Conv2d(4, 9, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(1, 4, 2, 2)
        for projection in self.projected:
            score, key, value = projection(F.group_norm(x, 1)).split([1, 4, 4], 1)
            x = x + value.relu() * (key * score.softmax(-1)).sum(-1, keepdim=True)
        return x


def test_scores_that_a_layer_makes_are_attention_whose_probabilities_are_returned() -> None:
    """As for pooling, or for sampled values of a deformable attention: without the probabilities it is a match."""

    def pooled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.linear(x, weight).softmax(-1)
        return weights @ x, weights

    x, weight, backend = torch.randn(3, 7, 16), nn.Parameter(torch.randn(7, 16)), Rewriting(strict=True)
    torch.testing.assert_close(torch.compile(pooled, backend=backend, fullgraph=True)(x, weight), pooled(x, weight))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["INTERIOR_USED"], backend.why_not()


@pytest.mark.parametrize(
    "module", [Router, CosineRouter, AdaptedRouter, ClassHeads, Codebook, Loss, Swish, Functional, Branches, Places]
)
def test_routers_and_classifiers_are_no_near_misses(module: type[nn.Module]) -> None:
    model, x, backend = module(), torch.randn(1 if module in (Branches, Places) else 7, 16), Rewriting(strict=True)
    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    assert not backend.report.near_misses, backend.why_not()
    assert not [match for match in backend.report.matches if match.op == "attention"]
