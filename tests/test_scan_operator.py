"""What is left of loops is run by PyTorch's own operator once, gradients included: where those are others, the loop stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Traced
from torch import Tensor

from lz_compile.lowering.checkpointed_scan import checkpointed_scan
from lz_compile.passes.loops.roll import scan_outputs as checkpoints
from lz_compile.passes.loops.roll.scan_outputs import is_graded
from lz_compile.passes.proof import trial_run
from lz_compile.passes.proof.running import NotRunnableError, run_steps

B, T, D = 2, 16, 3


def opaque(x: Tensor, w: Tensor, state: Tensor | None = None) -> Tensor:
    h, found = x.new_zeros(x.shape[0], D) if state is None else state, []
    for t in range(T):
        h = torch.tanh(h @ w + x[:, t])
        found.append(h)
    return torch.stack(found, 1)


def affine(x: Tensor, w: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(T):
        h = torch.sigmoid(x[:, t]) * h + w[0]
        found.append(h)
    return torch.stack(found, 1)


def compiled(function: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> Traced:
    """The backend, after values and gradients were compared."""
    backend = Traced(loops="roll", **options)
    torch._dynamo.reset()
    found, expected = torch.compile(function, backend=backend, fullgraph=True)(*inputs), function(*inputs)
    torch.testing.assert_close(found, expected)
    leaves = [each for each in inputs if each.requires_grad]
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)))
    assert not backend.report.events, backend.why_not()
    return backend


def inputs(*graded: str) -> list[Tensor]:
    torch.manual_seed(0)
    made = {"x": torch.randn(B, T, D), "w": torch.randn(D, D), "state": torch.randn(B, D)}
    return [each.double().requires_grad_(name in graded) for name, each in made.items()]


def with_cut_gradients(step: Any, init: Any, *others: Any) -> tuple[Tensor, ...]:
    """What PyTorch 2.11 makes of states that begin without a gradient."""

    def cut(*operands: Any) -> Any:
        return step.forward(*(each.detach() for each in operands[: len(init)]), *operands[len(init) :])

    return run_steps(cut, init, *others)


def raising(*_: Any) -> tuple[Tensor, ...]:
    raise RuntimeError("scan might be aliasing the input or the output!")


@pytest.mark.sampled
@pytest.mark.parametrize("graded", [("x", "w"), ("w",), ("x", "w", "state"), ("x",)])
@pytest.mark.parametrize("is_given", [False, True])
def test_gradients_go_through_all_steps_of_a_loop_that_stays(graded: tuple[str, ...], is_given: bool) -> None:
    backend = compiled(opaque, inputs(*graded)[: 3 if is_given else 2])
    assert [loop.rolled for loop in backend.report.loops] == [True], backend.report.loops
    (graph,) = backend.graphs
    (scan,) = graph.graph.find_nodes(op="call_function", target=checkpointed_scan)
    assert is_graded(scan)
    assert all(state.meta["example_value"].requires_grad for state in scan.args[1])


def test_a_state_that_is_written_to_later_is_none_that_required_a_gradient() -> None:
    def stored(x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        h = out[:, 0]
        for t in range(1, T):
            h = torch.tanh(0.5 * h + w[0] + x[:, t])
            out[:, t] = h
        return out

    backend = compiled(stored, inputs("x", "w")[:2])
    assert [loop.rolled for loop in backend.report.loops] == [True], backend.report.loops


def _not_tried(*_: Any) -> None:
    raise NotRunnableError("a step cannot be tried")


@pytest.mark.parametrize("operator", [with_cut_gradients, raising])
def test_a_loop_that_the_operator_computes_otherwise_stays(
    monkeypatch: pytest.MonkeyPatch, operator: Callable[..., tuple[Tensor, ...]]
) -> None:
    monkeypatch.setattr(trial_run, "run_operator", operator)
    monkeypatch.setattr(checkpoints, "_try", _not_tried)
    (loop,) = compiled(opaque, inputs("x", "w")[:2]).report.loops
    assert (loop.rolled, loop.reason.code) == (False, "SCAN_GRADIENTS")


def test_a_loop_whose_steps_are_computed_again_asks_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "run_operator", raising)
    (loop,) = compiled(opaque, inputs("x", "w")[:2]).report.loops
    assert loop.rolled


def test_without_gradients_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "run_operator", raising)
    backend = Traced(loops="roll")
    torch._dynamo.reset()
    given = inputs()[:2]
    torch.testing.assert_close(torch.compile(opaque, backend=backend, fullgraph=True)(*given), opaque(*given))
    assert [loop.rolled for loop in backend.report.loops] == [True]


def test_a_kernel_takes_the_place_of_a_loop_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "run_operator", raising)
    monkeypatch.setattr(checkpoints, "_try", _not_tried)

    def both(x: Tensor, w: Tensor) -> Tensor:
        return opaque(x, w) + affine(x, w)

    backend = compiled(both, inputs("x", "w")[:2], lock={"scan": "lz.rolled_scan"})
    assert sorted(loop.rolled for loop in backend.report.loops) == [False, True]
    assert [match.kernel for match in backend.report.matches if match.rewritten] == ["lz.rolled_scan"]
