"""Routed adapters in user code: every spelling is read, what only looks like one is not, and the rewrite is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from tests.backends import Rewriting
from tests.routing_spellings import TOLERANCES, Spelling, allows, spellings

LOCK = {"routing": "torch.routing"}

many = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


def run(function: Callable[..., Any], inputs: Mapping[str, Tensor], **options: Any) -> tuple[Any, Rewriting]:
    """What a function gives when it is rewritten, and what the rewriting says of it."""
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    return torch.compile(function, backend=backend, fullgraph=True, **options)(**inputs), backend


def check(spelling: Spelling, **options: Any) -> Rewriting:
    """A spelling is rewritten, and its value and all of its gradients are those of the mathematics."""
    inputs = spelling.inputs(0)
    result, backend = run(spelling.build(), inputs, **options)
    matches = [match for match in backend.report.matches if match.op == "routing"]
    assert [match.rewritten for match in matches] == [True], f"{spelling}\n{backend.why_not()}"
    wanted = spelling.attributes()
    assert {name: matches[0].attributes[name] for name in wanted} == wanted
    slack = TOLERANCES[spelling.dtype]
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(spelling.dtype)
    value, gradients = spelling.reference(inputs, upstream)
    torch.testing.assert_close(result.double(), value, rtol=slack, atol=slack)
    found = torch.autograd.grad(result, [inputs[name] for name in gradients], upstream)
    for (name, expected), mine in zip(gradients.items(), found, strict=True):
        torch.testing.assert_close(
            mine.double(), expected, rtol=slack, atol=slack * 4, msg=f"the gradient of {name} of {spelling}"
        )
    return backend


@pytest.mark.parametrize("name", [each.name for each in fields(Spelling)])
def test_every_choice_is_recognised(name: str) -> None:
    plain = Spelling()
    options = next(each for each in fields(Spelling) if each.name == name).metadata["options"]
    tried = [replace(plain, **{name: option}) for option in options]
    if name == "stopped":
        tried = [replace(each, mask="cosine") for each in tried]
    tried = [each for each in tried if allows(each)]
    assert len(tried) == len(options)
    for spelling in tried:
        check(spelling)


@settings(many, max_examples=12)
@given(spelling=spellings())
def test_any_spelling_is_recognised_and_right(spelling: Spelling) -> None:
    check(spelling)


@pytest.mark.slow
@many
@given(spelling=spellings())
def test_many_spellings_are_recognised_and_right(spelling: Spelling) -> None:
    check(spelling)
