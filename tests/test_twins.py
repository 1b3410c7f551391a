"""Equal layers are recognised once, and layers that only look equal are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from backends import Rewriting
from graphs import capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor, nn

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.recognisers import recognisers
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.twins import Twins

Layer = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """One self-attention layer; every choice changes what a match must say of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.heads = 2 if kind == "two heads" else 4
        self.project = nn.Linear(32, 96, bias=kind != "no bias")
        self.scale = {"other scale": 0.3, "scale of one": 1.0}.get(kind, 8**-0.5)
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part.view(2, 12, self.heads, -1).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1)
        )
        if self.kind == "swapped":
            query, key = key, query
        if self.kind == "shared key":
            value = key
        scores = query @ key.transpose(-2, -1) * self.scale
        if self.kind == "no mask":
            pass
        elif self.kind == "float mask":
            scores = scores + torch.where(mask, 0.0, -1e4)
        elif self.kind == "other fill":
            scores = scores.masked_fill(~mask, -1e4)
        else:
            scores = scores.masked_fill(~mask, -math.inf)
        weights = scores.softmax(-1)
        if self.kind == "doubled":
            weights = weights * 2
        out = (weights @ value).transpose(1, 2).reshape(2, 12, -1)
        if self.kind == "weights used":
            out = out + weights.sum()
        return x + out


KINDS = [
    "plain", "two heads", "no bias", "other scale", "scale of one", "frozen", "swapped", "shared key", "no mask",
    "float mask", "other fill", "doubled", "weights used",
]  # fmt: skip


def model(kinds: list[str]) -> nn.Module:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention(kind) for kind in kinds)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, mask)
            return x

    torch.manual_seed(0)
    return Stack()


def inputs() -> tuple[Tensor, Tensor]:
    mask = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[..., 0] = True
    return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2)), mask


def matches_of(kinds: list[str]) -> list[Match]:
    graph = capture(model(kinds), *inputs()).graph
    return [found for found in recognisers()["attention"](graph, Effects(graph)) if isinstance(found, Match)]


def test_layers_after_the_first_are_its_twins() -> None:
    first, *others = matches_of(["plain"] * 4)
    assert first.prototype is None
    assert [match.prototype for match in others] == [first] * 3
    assert len({match.site.output for match in (first, *others)}) == 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", "no bias", "frozen", "weights used")])
def test_a_layer_that_differs_is_read_by_itself(kind: str) -> None:
    first, second, third = matches_of(["plain", kind, "plain"])
    assert second.prototype is None
    assert third.prototype is first


def test_a_layer_whose_weights_are_used_is_a_near_miss_among_twins() -> None:
    assert len(matches_of(["plain", "weights used", "plain"])) == 2


@settings(max_examples=examples(4, 12), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5), train=st.booleans())
def test_any_stack_is_rewritten_as_if_there_were_no_twins(kinds: list[str], train: bool) -> None:
    stack = model(kinds)
    x, mask = inputs()

    def run(find: bool) -> tuple[Tensor, list[dict[str, object]], list[str]]:
        torch._dynamo.reset()
        backend = Rewriting()
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(train):
            if not find:
                patch.setattr(Twins, "find", lambda self, anchor: None)
            got = torch.compile(stack, backend=backend, fullgraph=True)(x, mask)
        entries = [
            match.to_dict() | {"validation": None, "before": [], "after": []} for match in backend.report.matches
        ]
        targets = [f"{node.op} {node.target}" for node in backend.graphs[0].graph.nodes]
        return got, entries, targets

    ours, entries, targets = run(find=True)
    alone, expected, same = run(find=False)
    assert entries == expected
    assert targets == same
    torch.testing.assert_close(ours, alone, rtol=0, atol=0)
    torch.testing.assert_close(ours, stack(x, mask), rtol=1e-5, atol=1e-4)


def test_twins_keep_their_own_place_and_gradients() -> None:
    stack = model(["plain", "plain", "plain"])
    x, mask = inputs()
    backend = Rewriting()
    compiled = torch.compile(stack, backend=backend, fullgraph=True)
    compiled(x, mask).square().sum().backward()
    ours = [parameter.grad.clone() for parameter in stack.parameters()]
    stack.zero_grad()
    stack(x, mask).square().sum().backward()
    assert sum(match.rewritten for match in backend.report.matches) == 3
    for got, parameter in zip(ours, stack.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


@pytest.mark.parametrize("is_trained", [True, False])
def test_layers_under_different_modes_are_no_twins(is_trained: bool) -> None:
    """Nor where nothing has a gradient, so that the tensors look alike."""
    layers = [Attention("plain").requires_grad_(is_trained) for _ in range(2)]

    def forward(x: Tensor, mask: Tensor) -> Tensor:
        x = layers[0](x, mask)
        with torch.no_grad():
            return layers[1](x, mask)

    graph = capture(forward, *inputs()).graph
    found = [each for each in recognisers()["attention"](graph, Effects(graph)) if isinstance(each, Match)]
    assert [match.prototype for match in found] == [None, None]


def test_symbolic_sizes_have_twins_too() -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (x @ weight).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4)
        out = (query @ key.mT * 8**-0.5).softmax(-1) @ value
        return x + out.transpose(1, 2).reshape(x.shape)

    def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return layer(layer(x, first), second)

    torch._dynamo.reset()
    x, weights = torch.randn(2, 12, 32), [torch.randn(32, 96) * 0.2 for _ in range(2)]
    backend = Rewriting()
    got = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)(x, *weights)
    assert sum(match.rewritten for match in backend.report.matches) == 2, backend.why_not()
    torch.testing.assert_close(got, forward(x, *weights))


class LocalAndGlobal(torch.nn.Module):
    """Layers with masks in buffers of their own: equal shapes, and other values (GPT-Neo)."""

    def __init__(self) -> None:
        super().__init__()
        tril = torch.tril(torch.ones(24, 24, dtype=torch.bool))
        self.register_buffer("everything", tril)
        self.register_buffer("window", torch.logical_xor(tril, torch.tril(tril, -5)))
        self.register_buffer("again", tril.clone())

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for mask in (self.everything, self.window, self.again):
            scores = (query @ key.mT * 0.25).masked_fill(~mask[:19, :19], -torch.inf)
            query = scores.softmax(-1) @ value
        return query


def test_buffers_of_other_values_make_no_twins() -> None:
    model, inputs = LocalAndGlobal(), [torch.randn(2, 3, 19, 8) for _ in range(3)]
    backend = Rewriting(strict=True)
    got = torch.compile(model, backend=backend)(*inputs)
    torch.testing.assert_close(got, model(*inputs))
    assert [match.mask for match in backend.report.matches] == ["causal", "sliding window", "causal"]
    assert all(match.rewritten for match in backend.report.matches), backend.why_not()
