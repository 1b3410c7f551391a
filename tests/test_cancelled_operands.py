"""What cancels out of a result still counts: NaN in it and its gradient do not cancel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

LENGTH, WIDTH = 6, 64
GATE, UP = torch.randn(2, WIDTH, WIDTH) / 8

#: By name, each a way to bring a tensor in that makes no difference unless it is NaN.
IDLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight one": lambda x, y: torch.lerp(y, x, 1),
    "weight zero": lambda x, y: torch.lerp(x, y, 0.0),
    "added and taken off": lambda x, y: x + y - y,
    "times zero": lambda x, y: x + 0 * y,
    "in a product with zero": lambda x, y: torch.addcmul(x, y, y, value=0),
    "in a polynomial": lambda x, y: x + y * (y + 1) - y * y - y,
    "chosen or not": lambda x, y: torch.where(y > 0, x, x),
}
#: Where it comes in: functions of a tensor, another one of the same shape, and a way.
PLACES: dict[str, tuple[Callable[[Tensor, Tensor, Callable[..., Tensor]], Tensor], dict[str, str]]] = {
    "scores": (
        lambda x, y, idle: idle(x @ x.mT * 0.3, y[..., :LENGTH]).softmax(-1) @ x,
        {"attention": "lz.blocked"},
    ),
    "values": (
        lambda x, y, idle: idle((x @ x.mT * 0.3).softmax(-1) @ x, y),
        {"attention": "lz.blocked"},
    ),
    "a norm": (
        lambda x, y, idle: idle(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), y),
        {"norm": "torch.norm"},
    ),
    "before a norm": (
        lambda x, y, idle: F.rms_norm(idle(x * 2, y), (WIDTH,)) * 3,
        {"norm": "torch.norm"},
    ),
    "a gate": (lambda x, y, idle: F.silu(idle(x @ GATE, y)) * (x @ UP), {"mlp": "torch.mlp"}),
    "a gated product": (lambda x, y, idle: idle(F.silu(x @ GATE) * (x @ UP), y), {"mlp": "torch.mlp"}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", IDLE)
@pytest.mark.parametrize("place", PLACES)
def test_what_cancels_out_keeps_its_nan_and_its_gradient(place: str, way: str):
    function, lock = PLACES[place]
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    y = torch.randn(2, LENGTH, WIDTH).index_fill_(1, torch.tensor(2), torch.nan).requires_grad_()
    torch._dynamo.reset()
    backend = Rewriting(lock=lock)
    compiled = torch.compile(lambda x, y: function(x, y, IDLE[way]), backend=backend, fullgraph=True)
    found, expected = compiled(x, y), function(x, y, IDLE[way])
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(each.nansum(), (x, y), allow_unused=True) for each in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert not backend.report.events, backend.why_not()
    # What is recognised ends before it, unless only the whole expression shows that it cancels out.
    is_seen = way in ("in a polynomial", "chosen or not") or place not in ("values", "a norm", "a gated product")
    assert is_seen or any(match.rewritten for match in backend.report.matches), backend.why_not()


#: Functions of a tensor that ask another one for its dtype only.
LENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda x, y: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).to(y)).to(y) * 2,
    "mlp": lambda x, y: F.silu((x @ GATE.to(x)).to(y)) * (x @ UP.to(x)).type_as(y),
    "attention": lambda x, y: (x @ x.mT * 0.3).to(y).softmax(-1) @ x,
    "attention's probabilities": lambda x, _: (p := (x @ x.mT * 0.3).softmax(-1)) @ F.gelu(x.to(p)).to(p),
}


@pytest.mark.parametrize("name", LENT)
def test_what_only_lends_its_dtype_is_no_operand(name: str):
    function = LENT[name]
    x, y = torch.randn(2, LENGTH, WIDTH), torch.full((3,), torch.nan)
    torch._dynamo.reset()
    backend = Rewriting(lock={"norm": "torch.norm", "mlp": "torch.mlp"})
    found = torch.compile(function, backend=backend, fullgraph=True)(x, y)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [(name.partition("'")[0], True)], (
        backend.why_not()
    )
    exact = function(x.double(), y.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
