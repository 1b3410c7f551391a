"""Scores of which a piece is overwritten, in any spelling: the attention is read, and lookalikes are left alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Rewriting
from torch import Tensor

Write = Callable[[Tensor, Tensor], Any]
_PIECE = (..., slice(1, None), slice(1, None))


def added(scores: Tensor, bias: Tensor) -> None:
    """``+=`` reads the piece, adds in place, and stores."""
    scores[..., 1:, 1:] += bias


def added_by_method(scores: Tensor, bias: Tensor) -> None:
    """Through a view."""
    scores[..., 1:, 1:].add_(bias)


def assigned(scores: Tensor, bias: Tensor) -> None:
    """A sum is stored."""
    scores[:, :, 1:, 1:] = scores[:, :, 1:, 1:] + bias


def copied(scores: Tensor, bias: Tensor) -> None:
    """A sum is copied into a view."""
    scores[..., 1:, 1:].copy_(bias + scores[..., 1:, 1:])


def by_rows_and_columns(scores: Tensor, bias: Tensor) -> None:
    """As MViTv2 in timm: by rows and columns of an image, in a shape of its own."""
    batch, heads = scores.shape[:2]
    rows, columns = bias[..., :4].view(batch, heads, 2, 4, 4), bias[..., 4:6].view(batch, heads, 2, 4, 2)
    scores[:, :, 1:, 1:] = (
        scores[:, :, 1:, 1:].view(batch, -1, 2, 4, 4, 2) + rows.unsqueeze(-1) + columns.unsqueeze(-2)
    ).view(batch, -1, 8, 8)


def twice(scores: Tensor, bias: Tensor) -> None:
    """Two pieces, one in the other."""
    scores[..., 1:, 1:] += bias
    scores[..., :5, 0] -= bias[..., :5, 1]


def masked(scores: Tensor, bias: Tensor) -> None:
    """A piece is masked out."""
    scores[..., 1:, 1:] += bias
    scores[..., 7:] = -torch.inf


def test_a_piece_that_is_read_by_its_own_name_stays_a_piece():
    """As Funnel's positions, cut out of more and scaled in place: a store into the whole would be read by nobody."""

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, factor: Tensor) -> Tensor:
        bias = (q @ positions)[:, :, :, :8]
        bias *= factor
        return (q @ k.mT + bias).softmax(-1) @ v

    given = (*torch.randn(3, 2, 2, 8, 4).unbind(), torch.randn(2, 2, 4, 11), torch.rand(8, 8))
    backend = Rewriting(lock={"attention": "torch.sdpa"})
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(attend, backend=backend)(*given), attend(*given))
    assert [match.rewritten for match in backend.report.matches if match.op == "attention"] == [True]


WRITES = (added, added_by_method, assigned, copied, by_rows_and_columns, twice, masked)


def attention(write: Write) -> Callable[..., Tensor]:
    """Whose scores ``write`` changes in place."""

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = (query * 0.3) @ key.transpose(-2, -1)
        write(scores, bias)
        return scores.softmax(-1) @ value

    return function


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of nine tokens, and a bias for eight of them."""
    torch.manual_seed(0)
    return [torch.randn(2, 3, 9, 8, dtype=dtype) for _ in range(3)] + [torch.randn(2, 3, 8, 8, dtype=dtype)]


def compiled(function: Callable[..., Any], *given: Tensor, **options: Any) -> tuple[Rewriting, Any]:
    """The backend, and what it gives, which is what eager gives."""
    torch._dynamo.reset()
    backend = Rewriting(**options)
    got = torch.compile(function, backend=backend, fullgraph=True)(*(each.clone() for each in given))
    torch.testing.assert_close(got, function(*(each.clone() for each in given)), equal_nan=True)
    return backend, got


@pytest.mark.parametrize("write", WRITES, ids=operator.attrgetter("__name__"))
def test_scores_with_a_piece_overwritten_are_an_attention(write: Write) -> None:
    backend, _ = compiled(attention(write), *inputs(), lock={"attention": "lz.blocked"})
    assert [match.op for match in backend.report.matches] == ["attention"], backend.why_not()
    assert "lz.blocked" in str(backend.report.matches[0].kernel), backend.why_not()
    assert not backend.report.near_misses
    assert not backend.report.events


@pytest.mark.parametrize("write", [added, by_rows_and_columns, twice], ids=operator.attrgetter("__name__"))
def test_gradients_and_symbolic_batches_are_those_of_the_source(write: Write) -> None:
    given = [each.requires_grad_() for each in inputs(torch.float64)]
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "lz.blocked"})
    for batch in (2, 4):
        mine = [each[:1].expand(batch, -1, -1, -1) for each in given]
        for each in mine:
            torch._dynamo.mark_dynamic(each, 0)
        got = torch.compile(attention(write), backend=backend, fullgraph=True)(*mine)
        want = attention(write)(*mine)
        torch.testing.assert_close(got, want)
        weight = torch.randn_like(want)
        found, expected = (torch.autograd.grad((each * weight).sum(), given) for each in (got, want))
        torch.testing.assert_close(found, expected)
    assert len(backend.graphs) == 1, "a new size was compiled again"
    assert backend.report.matches[0].rewritten, backend.why_not()


@pytest.mark.parametrize(
    ("shape", "dynamic"),
    [((8, 8), True), ((1, 3, 8, 8), True), ((3, 1, 8), False), ((2, 1, 1, 8), False)],
    ids=str,
)
def test_a_bias_that_broadcasts_stays_as_small_as_it_is(shape: tuple[int, ...], dynamic: bool) -> None:
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "lz.blocked"})
    function = torch.compile(attention(added), backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens in (11, 7)[: 1 + dynamic]:
        given = [torch.randn(2, 3, tokens, 8) for _ in range(3)]
        bias = torch.randn([tokens - 1 if size == 8 else size for size in shape])
        torch.testing.assert_close(function(*given, bias), attention(added)(*given, bias))
    assert len(backend.graphs) == 1
    assert backend.report.matches[0].rewritten, backend.why_not()
    padded = [node for node in backend.graphs[0].graph.nodes if getattr(node.target, "__name__", "") == "pad"]
    assert all(each.meta["example_value"].numel() < 2 * 3 * 11 * 11 for each in padded)


def shifted(scores: Tensor, bias: Tensor) -> None:
    """What is stored was at other places."""
    scores[..., 1:, 1:] = scores[..., :-1, :-1] + bias


def turned(scores: Tensor, bias: Tensor) -> None:
    """What is stored was at other places of the piece."""
    scores[..., 1:, 1:] = scores[..., 1:, 1:].mT + bias


def scaled_in_between(scores: Tensor, bias: Tensor) -> None:
    """The whole is overwritten between the reading and the store, which does not see it."""
    piece = scores[..., 1:, 1:] + bias
    scores.mul_(2)
    scores[..., 1:, 1:] = piece


def another_overwritten_in_between(scores: Tensor, bias: Tensor) -> None:
    """What is added is another one by the time of the store."""
    bias = bias * 2
    piece = scores[..., 1:, 1:] + bias
    bias.zero_()
    scores[..., 1:, 1:] = piece


def subtracted_from(scores: Tensor, bias: Tensor) -> None:
    """The other way round."""
    scores[..., 1:, 1:] = bias - scores[..., 1:, 1:]


def of_another_dtype(scores: Tensor, bias: Tensor) -> None:
    """What is added has more digits than the scores, which round the sum."""
    scores[..., 1:, 1:] += bias.double()


def every_other(scores: Tensor, bias: Tensor) -> None:
    """A piece with gaps."""
    scores[..., ::2, 1:] += bias[..., :5, :]


def by_a_view_of_a_view(scores: Tensor, bias: Tensor) -> None:
    """No store into the scores themselves."""
    scores[..., 1:, :][..., 1:].add_(bias)


LOOKALIKES = (shifted, turned, scaled_in_between, another_overwritten_in_between, subtracted_from, of_another_dtype)
LOOKALIKES += (every_other, by_a_view_of_a_view)


@pytest.mark.parametrize("write", LOOKALIKES, ids=operator.attrgetter("__name__"))
def test_what_is_stored_otherwise_stays_as_it_is(write: Write) -> None:
    backend, _ = compiled(attention(write), *inputs())
    assert not backend.report.matches
    assert not [event for event in backend.report.events if event.code != "EDIT_UNPROVEN"], backend.why_not()


def test_a_piece_that_is_seen_by_another_name_stays_overwritten() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = query @ key.mT
        corner = scores[..., :4, :4]
        scores[..., 1:, 1:] += bias
        return scores.softmax(-1) @ value, corner

    compiled(function, *inputs())


def test_scores_that_are_given_stay_overwritten() -> None:
    def function(scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores[..., 1:, 1:] += bias
        return scores.softmax(-1), scores * 1

    torch._dynamo.reset()
    given = [torch.randn(2, 3, 9, 9), torch.randn(2, 3, 8, 8)]
    mine, theirs = ([each.clone() for each in given] for _ in range(2))
    got, want = torch.compile(function, backend=Rewriting(), fullgraph=True)(*mine), function(*theirs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("write", [added, by_rows_and_columns, twice, masked], ids=operator.attrgetter("__name__"))
def test_every_bit_stays_where_inductor_computes_it(write: Write) -> None:
    given = inputs()
    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "inductor"})
    got = torch.compile(attention(write), backend=backend, fullgraph=True)(*given)
    assert torch.equal(got, attention(write)(*given))
    assert "pad" in str(backend.graphs[0].graph)
