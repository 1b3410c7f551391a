"""One anchor that cannot be read, by a fault of ours, costs no other one; one proof is as strict as the op deserves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from torch import Tensor

from lz_compile.errors import RewriteFailedError
from lz_compile.lowering.ops import norm as norm_op
from lz_compile.passes.attention import matching as attention
from lz_compile.passes.mlp import recogniser as mlp
from lz_compile.passes.norm import recogniser as norm
from lz_compile.passes.rope import recogniser as rope
from lz_compile.runtime.kernels import registry


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


TABLES = {width: (draw(8, width, seed=1), draw(8, width, seed=2)) for width in (4, 8)}


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = TABLES[x.shape[-1]]
    return x * cos + torch.cat((-second, first), -1) * sin


def attended(x: Tensor) -> Tensor:
    return (x @ x.mT * 0.3).softmax(-1) @ x


def activated(x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, x[0]))


#: By op, a function that has one of it, and what its recogniser reads an anchor by.
READERS: dict[str, tuple[Callable[[Tensor], Tensor], Any, str]] = {
    "norm": (rms, norm, "recognise"),
    "rope": (turned, rope, "recognise"),
    "attention": (attended, attention, "_read"),
    "mlp": (activated, mlp, "recognise"),
}


def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """One after the other, so different that the second is no twin of the first."""
    return lambda x: function(function(x)[..., :4].sin()).cos()


@pytest.fixture
def breaks_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """Makes a reader raise the first time."""

    def plant(module: Any, name: str) -> None:
        read, calls = getattr(module, name), []

        def broken(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 1:
                raise ZeroDivisionError("planted")
            return read(*given)

        monkeypatch.setattr(module, name, broken)

    return plant


@pytest.mark.parametrize("op", READERS)
def test_an_anchor_that_fails_costs_no_other_one(breaks_once: Any, op: str) -> None:
    function, module, name = READERS[op]
    x = draw(2, 8, 8)
    torch._dynamo.reset()
    whole = Rewriting()
    torch.compile(twice(function), backend=whole, fullgraph=True)(x)
    there_are = sum(match.op == op for match in whole.report.matches)
    assert there_are > 1, whole.why_not()
    breaks_once(module, name)
    torch._dynamo.reset()
    backend = Rewriting()
    got = torch.compile(twice(function), backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, twice(function)(x), rtol=1e-4, atol=1e-5)
    (event,) = backend.report.events
    assert event.code == "RECOGNISER_FAILED"
    assert event.message.startswith(f"recognising {op} at ")
    assert "planted" in event.message
    assert sum(match.op == op for match in backend.report.matches) >= there_are - 1, backend.why_not()


def test_strict_mode_raises_at_the_first_anchor_that_fails(breaks_once: Any) -> None:
    breaks_once(norm, "recognise")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"recognising norm at .*planted") as failure:
        torch.compile(twice(rms), backend=Rewriting(strict=True), fullgraph=True)(draw(2, 8, 8))
    assert isinstance(getattr(failure.value, "inner_exception", failure.value), RewriteFailedError)


def test_a_norm_that_is_wrong_for_large_rows_is_quarantined() -> None:
    """Scores of attention grow with the square of their operands and may err so; a normalised row does not grow."""

    def wrong(x: norm_op.Operands, attrs: Any) -> Tensor:
        out = norm_op.reference(x, attrs)
        return out * 1.0005 if x.input.abs().max() > 10 else out

    given = registry.kernels("norm")["torch.norm"]
    registry.register(replace(given, kernel_id="test.wrong_norm", implementation=wrong, prior=()))
    try:
        torch._dynamo.reset()
        backend = Rewriting(lock={"norm": "test.wrong_norm"})
        torch.compile(lambda x: rms(x).cos(), backend=backend, fullgraph=True)(draw(3, 8))
        (match,) = backend.report.matches
        assert not match.rewritten
        (reason,) = (each.message for each in match.reasons if each.code == "VALIDATION_FAILED")
        assert reason.startswith("test.wrong_norm: output with large: off by")
    finally:
        registry.unregister_kernel("test.wrong_norm")
