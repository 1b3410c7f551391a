"""Recurrences in logarithmic depth whose states are read by a product: one scan, or the states as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Rewriting
from test_prefix_scan import combined, padded, reference
from torch import Tensor

B, T, D, N = 2, 16, 6, 3
Reading = Callable[[Tensor, Tensor], Any]


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    a, b = torch.rand(B, D, T, N, dtype=torch.float64), torch.randn(B, D, T, N, dtype=torch.float64)
    return tuple(each.requires_grad_() for each in (a, b, torch.randn(B, T, N, dtype=torch.float64)))


READ: dict[str, Reading] = {
    "matmul": lambda h, c: torch.matmul(h.transpose(1, 2), c.unsqueeze(-1)).squeeze(-1).transpose(1, 2),
    "einsum": lambda h, c: torch.einsum("bdtn,btn->btd", h, c),
    "multiplied and summed": lambda h, c: (h * c[:, None]).sum(-1),
    "by what is reshaped": lambda h, c: torch.matmul(h.transpose(1, 2), c.reshape(B, T, N, 1)),
    "with the last state": lambda h, c: (torch.einsum("bdtn,btn->bdt", h, c), h[:, :, -1]),
    "with the last state in another order": lambda h, c: (
        h.permute(2, 0, 3, 1).select(0, T - 1),
        torch.matmul(h.transpose(1, 2).to(h.dtype), c[..., None]),
    ),
}


def run(read: Reading, scan: Callable[[Tensor, Tensor], Tensor], given: tuple[Tensor, ...]) -> tuple[Any, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting()
    return torch.compile(lambda a, b, c: read(scan(a, b), c), backend=backend, fullgraph=True)(*given), backend


#: Dynamo traces ``associative_scan`` for seconds: the first tier asks for it once, and everything of what is padded.
@pytest.mark.sampled("combined-einsum", *(f"padded-{name}" for name in READ if name != "einsum"))
@pytest.mark.parametrize("name", sorted(READ))
@pytest.mark.parametrize("form", [combined, padded])
def test_what_is_read_of_the_states_is_read_by_the_scan_with_its_gradients(form: Any, name: str) -> None:
    given = inputs()
    found, backend = run(READ[name], form(2), given)
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()
    assert match.formula == "h[t] = a[t] * h[t-1] + b[t]; y[t] = sum of c[t] * h[t]"
    wanted = READ[name](reference(*given[:2], 2), given[2])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    pairs = [each if isinstance(each, tuple) else (each,) for each in (found, wanted)]
    gradients = [torch.autograd.grad(sum(part.sin().sum() for part in each), given) for each in pairs]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    states = {node.name for node in backend.graphs[0].graph.nodes if node.target is torch.ops.layerzero.rolled_scan}
    assert not any("getitem" in each for each in states)


LEFT: dict[str, Reading] = {
    "the states are a result": lambda h, c: (torch.einsum("bdtn,btn->bdt", h, c), h),
    "read twice": lambda h, c: torch.einsum("bdtn,btn->bdt", h, c) + torch.einsum("bdtn,btn->bdt", h, c + 1),
    "a step in the middle": lambda h, c: (torch.einsum("bdtn,btn->bdt", h, c), h[:, :, -2]),
    "a piece": lambda h, c: (torch.einsum("bdtn,btn->bdt", h, c), h[:, :, -1:]),
    "the last of another dimension": lambda h, c: (torch.einsum("bdtn,btn->bdt", h, c), h[:, :, :, -1]),
    "summed over time": lambda h, c: torch.einsum("bdtn,btn->bdn", h, c),
    "by themselves": lambda h, c: torch.einsum("bdtn,bdtn->bdt", h, h * c.sum()),
    "a projection": lambda h, c: h.transpose(1, 2) @ c[0, :N].T,
    "joined dimensions": lambda h, c: torch.bmm(h.transpose(1, 2).reshape(B * T, D, N), c.reshape(B * T, N, 1)),
    "rounded": lambda h, c: torch.einsum("bdtn,btn->bdt", h.float(), c.float()),
    "a number for each": lambda h, c: torch.einsum(
        "bdtn,bdtn->bdt", h, c[:, None].expand(B, D, T, N) + h.detach()[:1, :, :1]
    ),
    "more rows than columns": lambda h, c: torch.einsum("bdtn,btd->btn", h, torch.cat([c, c], -1)),
    "after something else": lambda h, c: torch.einsum("bdtn,btn->bdt", torch.relu(h), c),
}


@pytest.mark.parametrize("name", sorted(LEFT))
def test_other_readings_are_of_states_that_are_there(name: str) -> None:
    given = inputs()
    found, backend = run(LEFT[name], padded(2), given)
    (match,) = [each for each in backend.report.matches if each.op == "scan"]
    assert match.rewritten, backend.why_not()
    assert match.formula == "h[t] = a[t] * h[t-1] + b[t]"
    wanted = LEFT[name](reference(*given[:2], 2), given[2])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_factor_for_each_row_or_step_alone_broadcasts() -> None:
    a, b, c = inputs()
    for thin in (a[:, :1], a[:1, :, :, :1], a[:1, :1, :, :1]):
        found, backend = run(READ["einsum"], lambda a, b: padded(2)(a.expand(B, D, T, N), b), (thin, b, c))
        (match,) = backend.report.matches
        assert match.rewritten, backend.why_not()
        assert "c[t]" in match.formula
        torch.testing.assert_close(found, READ["einsum"](reference(thin, b, 2), c), rtol=1e-9, atol=1e-9)
