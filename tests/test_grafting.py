"""A seed grows through every stage of its life, is isolated in each of them, and is recognised where it is compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.grafting import Grafting, GraftingConfig, Host, Stage, loss
from tests.backends import Rewriting

SHORT = GraftingConfig(channels=4, batches=dict.fromkeys(list(Stage)[:-1], 4))


@pytest.fixture
def model() -> Grafting:
    return Grafting(Host(SHORT), SHORT)


def _at(model: Grafting, stage: Stage) -> Grafting:
    while model.stage is not stage:
        model.advance()
    if stage is Stage.BLENDING:
        model.advance()
    return model


def test_a_seed_passes_through_every_stage_in_order(model: Grafting) -> None:
    seen, alphas = [model.stage], []
    for _ in range(20):
        seen.append(model.advance())
        alphas.append(float(model.alpha))
    assert list(dict.fromkeys(seen)) == list(Stage)
    assert alphas[3:7] == [0.0, 0.25, 0.5, 0.75]
    assert alphas[-1] == 1.0


@pytest.mark.parametrize("stage", Stage)
def test_a_host_gets_no_gradient_in_any_stage(model: Grafting, stage: Stage) -> None:
    found = _at(model, stage)(torch.randn(5, 1, 8, 8))
    loss(found, torch.randint(0, 10, (5,)), stage).backward()
    for part in (model.host.stem, model.host.block):
        assert all(parameter.grad is None for parameter in part.parameters())
    assert all(parameter.grad is not None for parameter in model.seed.wide.parameters())


def test_the_host_alone_speaks_while_the_seed_learns_and_shadows(model: Grafting) -> None:
    images = torch.randn(5, 1, 8, 8)
    for stage in (Stage.TRAINING, Stage.SHADOWING):
        torch.testing.assert_close(_at(model, stage)(images).logits_BK, model.host(images))
    after = _at(model, Stage.FOSSILIZED)(images)
    seed_BCHW, _ = model.seed(model.host.features(images))
    torch.testing.assert_close(after.logits_BK, model.host.classify(seed_BCHW))


def test_a_rejected_seed_begins_again(model: Grafting) -> None:
    _at(model, Stage.PROBATIONARY).reject()
    assert (model.stage, float(model.alpha)) == (Stage.TRAINING, 0.0)


def test_blending_is_recognised_with_its_gate(model: Grafting) -> None:
    images, backend = torch.randn(5, 1, 8, 8), Rewriting(lock={"blend": "torch.blend"})
    _at(model, Stage.BLENDING)
    found = torch.compile(model, backend=backend, fullgraph=True)(images)
    blends = [match for match in backend.report.matches if match.op == "blend"]
    assert [match.attributes["mode"] for match in blends if match.rewritten] == ["margin", "confidence"], (
        backend.why_not()
    )
    torch.testing.assert_close(found.logits_BK, model(images).logits_BK, rtol=1e-4, atol=1e-5)


def test_a_seed_learns_what_its_host_cannot() -> None:
    torch.manual_seed(0)
    labels = torch.arange(10).repeat(6)
    images = torch.randn(10, 1, 8, 8)[labels] + 0.1 * torch.randn(60, 1, 8, 8)
    model = Grafting(Host(SHORT), SHORT)
    optimizer = torch.optim.AdamW(model.seed.parameters(), lr=1e-2)
    first = F.cross_entropy(model.host(images), labels)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(images), labels, model.stage).backward()
        optimizer.step()
    assert F.cross_entropy(model(images).seed_logits_BK, labels) < 0.5 * first
