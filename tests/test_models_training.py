"""Training whole models: losses, gradients and weights follow eager through many steps, in every way of training.

Inductor's code is trained twice, in either dtype; graphs of the other tests are differentiated by AOTAutograd and run as they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Traced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lz_compile import reports
from lz_compile.backend import layerzero
from lz_compile.report.report import MatchReport

pytestmark = pytest.mark.usefixtures("sdpa_first")

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 29, 24, 3, 2, 10, 4


class Block(nn.Module):
    """Normalised, spelled-out attention with a residual; nothing else, since every other kernel is only compile time."""

    def __init__(self, dropout: float, kv_heads: int) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.kv_heads = kv_heads
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, kv_heads * dim), nn.Linear(WIDTH, kv_heads * dim)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), keep)

    def attention(self, x: Tensor, keep: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (f(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for f in (self.key, self.value))
        key, value = (h.repeat_interleave(HEADS // self.kv_heads, 1) for h in (key, value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = self.dropout(scores.masked_fill(~keep, -math.inf).softmax(-1))
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A small causal language model; its mask is a buffer."""

    def __init__(self, *, dropout: float = 0.0, kv_heads: int = HEADS, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH * 2, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout, kv_heads) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("keep", torch.ones(LENGTH * 2, LENGTH * 2, dtype=torch.bool).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:length]
        for block in self.blocks:
            arguments = x, self.keep[:length, :length]
            x = checkpoint(block, *arguments, use_reentrant=False) if self.checkpointed else block(*arguments)
        return self.head(x)


def batches(count: int, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (BATCH, length), generator=generator) for _ in range(count)]


def loss_of(model: Callable[..., Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


#: The decoder selects by its mask, which SDPA takes where operands are promised to be finite.
OPTIONS = {"strict": True, "assume_finite": True}


def twins(
    dtype: torch.dtype = torch.float32, generates_code: bool = False, **options: Any
) -> tuple[nn.Module, nn.Module, Callable[..., Tensor]]:
    """A model, one with the same weights, and the latter compiled."""
    eager = Decoder(**options).to(dtype)
    ours = copy.deepcopy(eager)
    if generates_code:
        given = {f"layerzero.{name}": value for name, value in OPTIONS.items()}
        return eager, ours, torch.compile(ours, backend=layerzero, options=given)
    return eager, ours, torch.compile(ours, backend=Traced(**OPTIONS))


def trained(model: nn.Module, function: Callable[..., Tensor], steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for tokens in batches(3) * steps:
        optimizer.zero_grad()
        loss = loss_of(function, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def matches() -> list[MatchReport]:
    return [match for report in reports() for match in report.matches if match.op == "attention"]


def assert_fired(count: int = LAYERS) -> None:
    assert [match.rewritten for match in matches()] == [True] * count, reports()


def assert_same_gradients(ours: nn.Module, eager: nn.Module, **tolerance: float) -> None:
    for (name, one), other in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("kv_heads", [HEADS, 1], ids=["heads", "shared_heads"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_every_gradient_of_a_model_is_eagers(dtype, kv_heads):
    eager, ours, compiled = twins(dtype, kv_heads=kv_heads)
    (tokens,) = batches(1)
    loss_of(eager, tokens).backward()
    loss_of(compiled, tokens).backward()
    assert_fired()
    origins = [match.validation["origin"] for match in matches()]
    assert origins.count("memory") >= LAYERS - 1
    assert all(match.validation["grad_error"] is not None for match in matches())
    assert_same_gradients(ours, eager)


def test_a_training_run_in_float64_ends_at_the_same_weights():
    eager, ours, compiled = twins(torch.float64, generates_code=True)
    expected, actual = trained(eager, eager, 4), trained(ours, compiled, 4)
    assert_fired()
    assert len(reports()) == 1
    assert actual == pytest.approx(expected, rel=1e-9)
    assert actual[-1] < actual[0] / 1.3
    for one, other in zip(ours.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-7)


@pytest.mark.thorough  # what that in float64 shows, and less of it
def test_a_training_run_in_float32_follows_eager():
    eager, ours, compiled = twins(generates_code=True)
    expected, actual = trained(eager, eager, 4), trained(ours, compiled, 4)
    assert_fired()
    assert len(reports()) == 1
    assert actual == pytest.approx(expected, rel=1e-3)


def test_training_under_autocast_follows_eager():
    eager, ours, compiled = twins()

    def cast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(tokens).float()

        return call

    expected, actual = trained(eager, cast(eager), 4), trained(ours, cast(compiled), 4)
    assert len(matches()) == LAYERS
    assert actual == pytest.approx(expected, rel=0.1)
    assert actual[-1] < actual[0] / 1.3


def test_a_model_in_bfloat16_trains_as_well_as_eager():
    eager, ours, compiled = twins(torch.bfloat16)
    expected, actual = trained(eager, eager, 4), trained(ours, compiled, 4)
    assert_fired()
    assert actual == pytest.approx(expected, rel=0.15)


def test_checkpointed_blocks_are_rewritten_and_train():
    eager, ours, compiled = twins(torch.float64, checkpointed=True)
    (tokens,) = batches(1)
    loss_of(eager, tokens).backward()
    loss_of(compiled, tokens).backward()
    assert_fired()
    assert {match.graph for match in matches()} == {f"wrap_body_{index}" for index in range(LAYERS)}
    assert_same_gradients(ours, eager)


def test_gradients_accumulate_over_batches():
    eager, ours, compiled = twins(torch.float64)
    for tokens in batches(3):
        loss_of(eager, tokens).backward()
        loss_of(compiled, tokens).backward()
    assert_fired()
    assert_same_gradients(ours, eager)


def test_frozen_layers_get_no_gradient_and_the_others_do():
    eager, ours, compiled = twins(torch.float64)
    for model in (eager, ours):
        model.blocks[0].requires_grad_(False)
        model.embedding.requires_grad_(False)
        model.position.requires_grad_(False)
    (tokens,) = batches(1)
    loss_of(eager, tokens).backward()
    loss_of(compiled, tokens).backward()
    assert_fired()
    assert_same_gradients(ours, eager)
    assert all(parameter.grad is None for parameter in ours.blocks[0].parameters())


def test_each_block_may_be_compiled_on_its_own():
    eager, ours, _ = twins(torch.float64)
    for block in ours.blocks:
        block.compile(backend=Traced(**OPTIONS))
    (tokens,) = batches(1)
    loss_of(eager, tokens).backward()
    loss_of(ours, tokens).backward()
    assert all(match.rewritten for match in matches())
    assert len(matches()) >= 1
    assert_same_gradients(ours, eager)


def test_the_loss_may_be_compiled_with_the_model():
    eager, ours, _ = twins(torch.float64)
    step = torch.compile(lambda tokens: loss_of(ours, tokens), backend=Traced(**OPTIONS))
    (tokens,) = batches(1)
    loss_of(eager, tokens).backward()
    step(tokens).backward()
    assert_fired()
    assert_same_gradients(ours, eager)


@pytest.mark.slow
def test_sequences_of_several_lengths_train_with_few_compiles():
    eager, ours, compiled = twins(torch.float64)
    for length in (6, 9, 13, 20):
        (tokens,) = batches(1, length)
        loss_of(eager, tokens).backward()
        loss_of(compiled, tokens).backward()
    assert_fired(2 * LAYERS)
    assert_same_gradients(ours, eager)


def test_evaluation_after_training_uses_the_new_weights():
    eager, ours, compiled = twins(torch.float64)
    trained(ours, compiled, 1)
    eager.load_state_dict(ours.state_dict())
    (tokens,) = batches(1)
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), eager(tokens))
    assert all(match.rewritten for match in matches())


def test_dropout_is_active_in_training_and_gone_in_evaluation():
    eager, ours, compiled = twins(torch.float64, dropout=0.3)
    (tokens,) = batches(1)
    first, second = compiled(tokens), compiled(tokens)
    assert len(matches()) == LAYERS
    assert not torch.equal(first, second)
    mean = torch.stack([compiled(tokens) for _ in range(60)]).mean(0)
    eager.eval()
    assert (mean - eager(tokens)).abs().mean() < 0.5 * (first - eager(tokens)).abs().mean()
    ours.eval()
    torch.testing.assert_close(compiled(tokens), eager(tokens))
