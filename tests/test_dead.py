"""What nobody reads is no use of anything, unless computing it does something else as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import Rewriting
from graphs import calls, capture
from torch import Tensor, nn

from lz_compile.passes.editing.dead import drop_dead, drop_dead_of_loops

UNREAD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "averaged": lambda scores, weights: weights.float().mean(0),
    "transposed_and_averaged": lambda scores, weights: weights.view(2, 3, 11, 13).transpose(1, 0).mean(dim=0),
    "entropy": lambda scores, weights: -(weights * (weights + 1e-9).log()).sum(-1).mean(),
    "strongest_key": lambda scores, weights: weights.detach().cpu().argmax(-1),
    "joined": lambda scores, weights: torch.stack([weights, scores.softmax(-1)]).amax((0, 1)),
    "kept_apart": lambda scores, weights: weights[:, 0].clone().topk(3)[1] + 1,
    "dropped_out_in_evaluation": lambda scores, weights: F.dropout(weights, 0.5, training=False).sum(),
}


def attention_that(use: Callable[[Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    """An attention whose scores and probabilities ``use`` looks at, for nothing."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * 0.3
        weights = scores.softmax(-1)
        use(scores, weights)
        return weights @ value

    return attention


def qkv() -> list[Tensor]:
    return [torch.randn(2, 3, length, 8) for length in (11, 13, 13)]


@pytest.mark.parametrize("name", UNREAD)
def test_an_attention_whose_weights_are_looked_at_for_nothing_is_rewritten(name: str) -> None:
    attention, backend = attention_that(UNREAD[name]), Rewriting(strict=True)
    inputs = qkv()
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*inputs), attention(*inputs))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def test_weights_that_a_caller_drops_are_no_use_of_them() -> None:
    class Block(nn.Module):
        """Returns its weights, averaged over heads, which only some callers want."""

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            weights = F.softmax(torch.einsum("bhid,bhjd->bhij", query, key), dim=-1)
            return torch.einsum("bhij,bhjd->bhid", weights, value), weights.sum(1) / 3

    backend, inputs = Rewriting(strict=True), qkv()
    got = torch.compile(lambda *args: Block()(*args)[0], backend=backend)(*inputs)
    torch.testing.assert_close(got, Block()(*inputs)[0])
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def _mean(value: Tensor) -> Tensor:
    return value.mean(0)


def _overwrite(x: Tensor) -> None:
    x.view(-1).mul_(2).sum()


def _draw(x: Tensor) -> None:
    (F.dropout(x, 0.5) + torch.rand(4)).mean()


def _write_out(x: Tensor) -> None:
    torch.sum(x, 0, out=torch.empty(4))


def _index_by_data(x: Tensor) -> None:
    x[x > 0].sum()


@pytest.mark.parametrize(
    ("effect", "stays"),
    [(_overwrite, {"mul"}), (_draw, {"dropout", "rand"}), (_write_out, {"sum"}), (_index_by_data, {"getitem"})],
)
def test_calls_that_do_more_than_give_a_result_stay(effect: Callable[[Tensor], None], stays: set[str]) -> None:
    def function(x: Tensor) -> Tensor:
        effect(x)
        return x + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        module = capture(function, torch.randn(3, 4))
    drop_dead(module.graph)
    module.graph.lint()
    assert stays <= {call.name for call in calls(module)}
    assert "mean" not in {call.name for call in calls(module)}


def test_a_function_of_others_with_a_name_of_torch_stays() -> None:
    torch.compiler.allow_in_graph(_mean)

    def function(x: Tensor) -> Tensor:
        _mean(x)
        return x + 1

    module = capture(function, torch.randn(3, 4))
    assert drop_dead(module.graph) == 0
    assert len(calls(module)) == 2


def test_random_numbers_after_an_unread_dropout_are_those_of_eager() -> None:
    def function(x: Tensor) -> Tensor:
        F.dropout(x, 0.5).sum()
        return x + torch.rand(3, 4)

    x, backend = torch.randn(3, 4), Rewriting()
    torch.manual_seed(1)
    want = function(x)
    torch.manual_seed(1)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), want)


def test_what_most_steps_compute_for_nobody_is_computed_where_it_is_read() -> None:
    """A head whose last result is read: no product for the other steps, whose NaN takes no part in its gradient either."""

    def function(x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h, found = torch.zeros_like(x[:, 0]), []
        for t in range(16):
            h = torch.sigmoid(a[:, t]) * h + x[:, t]
            found.append(F.linear(a[:, t] * 2, w).relu())
        return found[-1], h

    backend = Rewriting(loops="roll")
    x, a, w = torch.randn(2, 16, 4), torch.randn(2, 16, 4), torch.randn(3, 4, requires_grad=True)
    a[0, 3] = torch.nan
    got = torch.compile(function, backend=backend)(x, a, w)
    for found, wanted in zip(got, function(x, a, w), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert torch.autograd.grad(got[0].sum(), w)[0].isfinite().all()
    assert [match.op for match in backend.report.matches if match.rewritten] == ["scan"], backend.why_not()
    (product,) = [node for node in backend.graphs[0].graph.nodes if "linear" in str(node.target)]
    assert tuple(product.meta["example_value"].shape) == (2, 3)


def test_the_last_update_of_a_state_stays_though_nobody_reads_it() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        h, found = torch.ones_like(x[:, 0]), []
        for t in range(16):
            found.append(h + 1)
            h = torch.sigmoid(a[:, t]) * h + x[:, t]
        return torch.stack(found, 1)

    module = capture(function, torch.randn(2, 16, 4), torch.randn(2, 16, 4))
    assert drop_dead_of_loops(module.graph) == 0


def test_what_a_step_in_the_middle_is_read_of_stays_in_all() -> None:
    """Without it the steps before and behind that one would be two loops."""

    def function(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        h, found = torch.ones_like(x[:, 0]), []
        for t in range(16):
            h = torch.tanh(a[:, t] * h + x[:, t])
            found.append(h * 0.5)
        return found[7], h

    backend, inputs = Rewriting(loops="roll"), (torch.randn(2, 16, 4), torch.randn(2, 16, 4))
    torch.testing.assert_close(torch.compile(function, backend=backend)(*inputs), function(*inputs))
    assert [loop.steps for loop in backend.report.loops] == [16]
