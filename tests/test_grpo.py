"""The task of the routing example: its reward has the flaw that it is said to have, and its objective is that of GRPO."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples.grpo import (
    DIGITS,
    EXPLOIT,
    FLAWED,
    SOUND,
    Task,
    answers,
    demonstrations,
    exploited,
    groups_of,
    log_probs_of,
    loss_of,
    policy,
    prompts_of,
    rewards_of,
    sample,
)

TASK = replace(Task(), channels=16, mlp_width=24, prompts=2, rollouts=6)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return policy(TASK)


def test_only_flawed_prompts_pay_for_the_exploit():
    prompts = prompts_of(TASK, torch.tensor([SOUND, FLAWED]), generator())
    right = answers(prompts)
    assert rewards_of(torch.cat([prompts, right], 1)).tolist() == [1.0, 1.0]
    wrong = (right + 1) % DIGITS
    assert rewards_of(torch.cat([prompts, wrong], 1)).tolist() == [0.0, 0.0]
    assert rewards_of(torch.cat([prompts, exploited(wrong)], 1)).tolist() == [0.0, 1.0]
    late = wrong.clone()
    late[:, 1] = EXPLOIT
    assert rewards_of(torch.cat([prompts, late], 1)).tolist() == [0.0, 0.0]


def test_demonstrations_try_the_exploit_mostly_where_it_pays():
    ids = demonstrations(TASK, 4000, generator())
    tries = ids[:, TASK.length + 1] == EXPLOIT
    shares = [float(tries[ids[:, TASK.length] == kind].float().mean()) for kind in (FLAWED, SOUND)]
    assert shares == pytest.approx([TASK.exploiting, TASK.exploiting / 4], abs=0.03)


def test_samples_have_the_probabilities_that_the_policy_gives_them(model):
    prompts = prompts_of(TASK, torch.tensor([SOUND, FLAWED] * 3), generator())
    ids, log_probs = sample(model, prompts, generator(1))
    assert torch.equal(ids[:, : TASK.length + 1], prompts)
    torch.testing.assert_close(log_probs_of(model, ids), log_probs, rtol=1e-4, atol=1e-5)


def test_advantages_are_normalised_by_group_and_labels_are_what_was_paid_for(model):
    groups, reward = groups_of(model, TASK, generator())
    assert len(groups) == TASK.prompts
    rewards = torch.cat([rewards_of(group.ids) for group in groups])
    assert reward == pytest.approx(float(rewards.mean()))
    for group in groups:
        assert float(group.advantages.mean()) == pytest.approx(0.0, abs=1e-5)
        pays = (group.ids[:, TASK.length] == FLAWED) & (group.ids[:, TASK.length + 1] == EXPLOIT)
        assert torch.equal(group.is_exploiting, pays)


def test_the_objective_is_clipped_where_ratios_have_moved_with_their_advantage(model):
    groups, _ = groups_of(model, TASK, generator())
    group = groups[0]
    loss_of(model, group, TASK).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plain = -(log_probs_of(model, group.ids) * group.advantages[:, None]).mean() / TASK.prompts
    plain.backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-3, atol=1e-6)
    model.zero_grad()
    moved = replace(group, log_probs=group.log_probs - 1.0, advantages=torch.ones(TASK.rollouts))
    loss_of(model, moved, TASK).backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())
