"""Scans that stay in a graph compile, and the steps of those that went are gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Rewriting, Traced
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan


def last(x: Tensor, state: Tensor) -> Tensor:
    for t in range(x.shape[1]):
        state = (0.5 * state + x[:, t]).tanh()
    return state


def average(x: Tensor, state: Tensor) -> Tensor:
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
    return state


def written(x: Tensor, state: Tensor) -> Tensor:
    def step(carry: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        new = (carry + now).tanh()
        return new, new * 2

    final, results = scan(step, state, x.movedim(1, 0))
    return final + results[-1]


def run(function: object, x: Tensor, state: Tensor) -> Rewriting:
    torch._dynamo.reset()
    backend = Rewriting(loops="roll")
    with torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True)(x, state)  # type: ignore[call-overload]
        torch.testing.assert_close(got, function(x, state))  # type: ignore[operator]
    return backend


def steps(backend: Rewriting) -> list[list[int]]:
    """For each scan that is left, how many outputs its step has and how many values the scan."""
    (module,) = backend.graphs
    found = []
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body = getattr(module, str(node.args[0].target))
        (output,) = body.graph.find_nodes(op="output")
        found.append([len(output.args[0]), len(node.meta["example_value"])])
    return found


def test_a_scan_of_which_the_last_state_is_read_gives_something() -> None:
    assert steps(run(last, torch.randn(2, 20, 3), torch.randn(2, 3))) == [[2, 2]]


def test_a_scan_that_gives_something_stays_as_it_is() -> None:
    assert steps(run(written, torch.randn(2, 20, 3), torch.randn(2, 3))) == [[2, 2]]


def test_steps_that_nobody_runs_are_dropped() -> None:
    backend = run(average, torch.randn(2, 20, 3), torch.randn(2, 3))
    assert [match.kernel for match in backend.report.matches] == ["lz.rolled_scan"], backend.why_not()
    (module,) = backend.graphs
    assert not [child for child in module.children() if isinstance(child, fx.GraphModule)]


def gated(x: Tensor, state: Tensor) -> Tensor:
    gates, given = (x * 2).chunk(2, -1)
    for t in range(x.shape[1]):
        state = torch.tanh(gates[:, t] * state + given[:, t])
    return state


def test_parts_of_a_tensor_are_gathered_before_a_loop_goes_over_them() -> None:
    for function, gathered in ((gated, 2), (last, 0)):
        x = torch.randn(2, 20, 6) if gathered else torch.randn(2, 20, 3)
        (module,) = run(function, x, torch.randn(2, 3)).graphs
        (scan_,) = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
        assert sum(each.target == "clone" for each in scan_.args[2]) == gathered
        assert all(each.meta["example_value"].is_contiguous() for each in scan_.args[2] if each.target == "clone")


def transposed_start(x: Tensor, state: Tensor) -> Tensor:
    state = state.t().contiguous().t()
    for t in range(x.shape[1]):
        state = x[:, t].t().contiguous().t() + state @ x[0, :3].sin()
    return state


def transposed_step(x: Tensor, state: Tensor) -> Tensor:
    weight = x[0, :3]
    for t in range(x.shape[1]):
        state = torch.tanh(weight @ state.t()).t() + x[:, t]
    return state.sin()


def transposed_reader(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    for t in range(x.shape[1]):
        state = x[:, t] + torch.sin(state) * state.mean(0)
    return state.t().contiguous(), state


def test_gradients_reach_a_scan_that_stays_however_they_lie() -> None:
    """PyTorch's own backward of a scan wants them contiguous."""
    for function in (transposed_start, transposed_step, transposed_reader):
        torch._dynamo.reset()
        backend = Traced(loops="roll")
        given = [torch.randn(2, 16, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)]
        found = [torch.compile(function, backend=backend)(*given), function(*given)]
        both = [each if isinstance(each, tuple) else (each,) for each in found]
        assert [loop.rolled for loop in backend.report.loops] == [True], backend.why_not()
        assert not backend.report.events, backend.why_not()
        assert [each.stride() for each in both[0]] == [each.stride() for each in both[1]]
        gradients = [torch.autograd.grad(sum(each.square().sum() for each in one), given) for one in both]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("same", [lambda o, x: o.to(x), lambda o, _: o.contiguous(), lambda o, _: o.float()])
def test_a_store_that_was_cast_to_what_it_is_is_the_tensor_itself(same: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As in the reference of gated delta rules, whose results are kept in `torch.zeros(...).to(v)`; either name reads them."""

    def kept(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.zeros(2, 20, 3)
        found = same(made, x)
        for t in range(x.shape[1]):
            state = 0.5 * state + x[:, t]
            found[:, t] = state
        return found * 2, made

    backend = run(kept, torch.randn(2, 20, 3), torch.randn(2, 3))
    assert [match.kernel for match in backend.report.matches] == ["lz.rolled_scan"], backend.why_not()
