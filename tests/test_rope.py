"""The rope recogniser: equivalent spellings, lookalikes, attributes, and real models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from backends import Rewriting
from graphs import capture
from hypothesis import HealthCheck, Phase, given, settings
from rope_near_misses import inputs as lookalike_inputs
from rope_near_misses import near_misses
from rope_spellings import TOLERANCES, Spelling, spellings
from tiers import examples
from torch import Tensor, nn

import lz_compile
from lz_compile.backend import layerzero
from lz_compile.lowering.kernels.rope import torch_rope
from lz_compile.lowering.ops import rope as op
from lz_compile.lowering.ops.rope import RopeAttrs, RopeFacts
from lz_compile.passes.formula.parts import Parts
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.proof import validate
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rope.matching import matches
from lz_compile.report.report import MatchReport

many = settings(
    max_examples=examples(18, 60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
some = settings(many, max_examples=examples(6, 25))
few = settings(many, max_examples=examples(3, 10))
LOCK = {"rope": "torch.rope"}


def compiled(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> tuple[Any, Rewriting]:
    """The function's result with every rotary embedding on PyTorch's kernel, and what was done."""
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs), backend


def ropes(backend: Rewriting) -> list[MatchReport]:
    return [match for match in backend.report.matches if match.op == "rope"]


def only(backend: Rewriting) -> MatchReport:
    """The one rotary embedding that was found."""
    found = ropes(backend)
    assert len(found) == 1, backend.why_not()
    return found[0]


def check(spelling: Spelling, got: Tensor, want: Tensor, backend: Rewriting) -> None:
    """Rewritten with the right attributes, and close."""
    tolerance = TOLERANCES[spelling.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    match, said = only(backend), spelling.attributes()
    assert match.rewritten, backend.why_not()
    assert {name: match.attributes[name] for name in said} == said


# ---- every spelling --------------------------------------------------------------------------------------------------


@given(spelling=spellings())
@many
def test_every_spelling_is_found_and_gives_the_same(spelling: Spelling) -> None:
    inputs = spelling.inputs(0)
    got, backend = compiled(spelling.build(), *inputs)
    check(spelling, got, spelling.reference(*inputs), backend)


@pytest.mark.thorough
@given(spelling=spellings())
@settings(many, max_examples=examples(50, 100), derandomize=False)
def test_many_more_spellings_are_found(spelling: Spelling) -> None:
    inputs = spelling.inputs(1)
    got, backend = compiled(spelling.build(), *inputs)
    check(spelling, got, spelling.reference(*inputs), backend)


@given(spelling=spellings(dtype=torch.float64))
@some
def test_gradients_of_every_spelling_are_those_of_the_reference(spelling: Spelling) -> None:
    ours, theirs = (spelling.inputs(2) for _ in range(2))
    for inputs in (ours, theirs):
        for each in inputs[: 1 if spelling.form == "complex" else 3]:
            each.requires_grad_()
    got, backend = compiled(spelling.build(), *ours)
    want = spelling.reference(*theirs)
    check(spelling, got, want, backend)
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).reshape(want.shape)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-6)


@given(spelling=spellings(layout="bhsd_view"))
@few
def test_every_spelling_is_found_where_tokens_have_symbolic_sizes(spelling: Spelling) -> None:
    inputs = spelling.inputs(3)
    rows = (inputs[0].dim() - 1, *(each.dim() - 1 for each in inputs[1:3]), inputs[3].dim())
    for each, count in zip(inputs, rows, strict=True):
        torch._dynamo.maybe_mark_dynamic(each, list(range(count)))
    got, backend = compiled(spelling.build(), *inputs)
    check(spelling, got, spelling.reference(*inputs), backend)


def _half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


def _llama(x: Tensor, angles: Tensor) -> Tensor:
    angles = torch.cat((angles, angles), -1)
    return x * angles.cos() + _half(x) * angles.sin()


def test_tokens_of_symbolic_number_run_at_other_sizes_without_another_compile() -> None:
    torch._dynamo.reset()
    backend = Rewriting(lock=LOCK)
    run = torch.compile(_llama, backend=backend, fullgraph=True)
    for length in (7, 11, 64):
        x, angles = torch.randn(2, 3, length, 16), torch.randn(length, 8)
        torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(angles, 0)
        torch.testing.assert_close(run(x, angles), _llama(x, angles))
    assert only(backend).rewritten
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("form", ["rotated", "complex"])
def test_what_was_emitted_is_not_read_again(form: str) -> None:
    is_complex = form == "complex"
    width = {"width": "half", "complex_by": "given", "is_interleaved": True} if is_complex else {}
    spelling = Spelling(form=form, **width)
    graph = compiled(spelling.build(), *spelling.inputs(4))[1].graphs[0].graph
    assert list(matches(graph, Effects(graph))) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def test_embeddings_compile_through_inductor(dtype: torch.dtype) -> None:
    x, angles = torch.randn(2, 3, 7, 16).to(dtype), torch.randn(7, 8)
    lz_compile.clear_reports()
    got = torch.compile(_llama, backend=layerzero, fullgraph=True, options={"layerzero.lock": LOCK})(x, angles)
    (report,) = lz_compile.reports()
    assert [match.rewritten for match in report.matches] == [True], report.to_dict()
    torch.testing.assert_close(got, _llama(x, angles))


# ---- what is an embedding, and what is not ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", near_misses())
def test_lookalikes_are_left_alone_with_their_reason(name: str) -> None:
    function, reason = near_misses()[name]
    got, backend = compiled(function, *lookalike_inputs())
    torch.testing.assert_close(got, function(*lookalike_inputs()))
    assert not any(match.rewritten for match in backend.report.matches)
    misses = [miss for miss in backend.report.near_misses if miss.op == "rope"]
    assert [reason in str(miss.reason) for miss in misses] == [True] if reason else not misses, misses
    assert all(miss.edit and miss.where for miss in misses)


def test_query_and_key_are_one_each_and_share_their_tables() -> None:
    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + _half(q) * sin, k * cos + _half(k) * sin

    inputs = torch.randn(2, 4, 7, 16), torch.randn(2, 1, 7, 16), torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    got, backend = compiled(both, *inputs)
    torch.testing.assert_close(got, both(*inputs))
    assert [match.rewritten for match in ropes(backend)] == [True, True]


def test_halves_of_the_features_with_tables_of_their_own_are_two() -> None:
    """Rows and columns of an image."""

    def image(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((_llama(first, rows), _llama(second, columns)), -1)

    inputs = torch.randn(2, 4, 9, 16), torch.randn(9, 4), torch.randn(9, 4)
    got, backend = compiled(image, *inputs)
    torch.testing.assert_close(got, image(*inputs))
    assert [(match.rewritten, match.attributes["rotary_dim"]) for match in ropes(backend)] == [(True, 8)] * 2


def test_pairs_that_are_brought_together_first_stay_halves() -> None:
    """As DeepSeek stores them: neighbours, rotated as halves."""

    def apart(x: Tensor, angles: Tensor) -> Tensor:
        x = x.view(2, 4, 7, 8, 2).transpose(4, 3).reshape(2, 4, 7, 16)
        return _llama(x, angles)

    inputs = torch.randn(2, 4, 7, 16), torch.randn(7, 8)
    got, backend = compiled(apart, *inputs)
    torch.testing.assert_close(got, apart(*inputs))
    assert only(backend).rewritten
    assert not only(backend).attributes["is_interleaved"]


def test_neighbours_that_are_joined_as_halves_are_brought_together() -> None:
    def mixed(x: Tensor, angles: Tensor) -> Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    inputs = torch.randn(2, 4, 7, 16), torch.randn(7, 8)
    got, backend = compiled(mixed, *inputs)
    torch.testing.assert_close(got, mixed(*inputs))
    assert only(backend).rewritten


@pytest.mark.parametrize("cast", [lambda angles, x: angles.to(x), lambda angles, x: angles.type_as(x)])
@pytest.mark.parametrize("kept", [0, 4])
def test_tables_in_the_precision_of_what_they_turn_are_not_made_of_it(cast: Callable[..., Tensor], kept: int) -> None:
    """``angles.to(x)`` asks `x` for its dtype, not for its values."""

    def turned(x: Tensor, angles: Tensor) -> Tensor:
        angles = cast(angles, x)
        first, second, rest = x.split((8, 8, kept), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    inputs = torch.randn(2, 4, 7, 16 + kept), torch.randn(7, 8, dtype=torch.float64)
    got, backend = compiled(turned, *inputs)
    torch.testing.assert_close(got, turned(*inputs))
    assert only(backend).rewritten, backend.why_not()


def _matrices(angles: Tensor) -> Tensor:
    """[.., pairs, 2, 2]"""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).view(*angles.shape, 2, 2)


def _summed(x: Tensor, angles: Tensor) -> Tensor:
    return (x.reshape(*x.shape[:-1], -1, 1, 2) * _matrices(angles)).sum(-1).flatten(-2)


def _by_columns(x: Tensor, angles: Tensor) -> Tensor:
    pairs, turn = x.float().reshape(*x.shape[:-1], -1, 1, 2), _matrices(angles)
    return (turn[..., 0] * pairs[..., 0] + turn[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


@pytest.mark.parametrize("function", [_summed, _by_columns])
def test_rotation_matrices_are_read(function: Callable[..., Tensor]) -> None:
    x, angles = torch.randn(2, 4, 7, 16), torch.randn(7, 8)
    got, backend = compiled(function, x, angles)
    torch.testing.assert_close(got, function(x, angles))
    assert only(backend).rewritten
    assert only(backend).attributes["is_interleaved"]


def _copied_to(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.narrow(-1, 0, 8).copy_(first)
    out.narrow(-1, 8, 8).copy_(second)
    return out


def _stored_in_turn(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    out = x.transpose(1, 2).clone()  # of other strides: no join lies in memory as it does
    out[..., ::2], out[..., 1::2] = first.transpose(1, 2), second.transpose(1, 2)
    return out.transpose(1, 2)


#: How the two parts of a result come together.
STORED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "copied": _copied_to,
    "in turn": _stored_in_turn,
    "slice_scatter": lambda x, first, second: x.slice_scatter(first, -1, 0, 8).slice_scatter(second, -1, 8, 16),
    "select_scatter": lambda x, first, second: torch.select_scatter(
        x.unflatten(-1, (8, 2)).select_scatter(first, -1, 0), second, -1, 1
    ).flatten(-2),
}


@pytest.mark.parametrize("stored", STORED)
def test_the_parts_of_a_rotation_may_be_stored(stored: str) -> None:
    is_interleaved = stored in ("in turn", "select_scatter")

    def turned(x: Tensor, angles: Tensor) -> Tensor:
        x, cos, sin = x * 1, angles.cos(), angles.sin()
        a, b = (x[..., ::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
        return STORED[stored](x, a * cos - b * sin, b * cos + a * sin)

    inputs = torch.randn(2, 4, 7, 16, requires_grad=True), torch.randn(7, 8)
    got, backend = compiled(turned, *inputs)
    assert only(backend).rewritten, backend.why_not()
    assert only(backend).attributes["is_interleaved"] == is_interleaved
    pairs = [(each, *torch.autograd.grad(each.square().sum(), inputs[0])) for each in (got, turned(*inputs))]
    torch.testing.assert_close(*pairs)


#: The other feature of each pair, by the places that it has.
LISTED: dict[str, Callable[[Tensor], Tensor]] = {
    "listed halves": lambda x: x[..., [4, 5, 6, 7, 0, 1, 2, 3]],
    "listed neighbours": lambda x: x[..., [1, 0, 3, 2, 5, 4, 7, 6]],
    "computed": lambda x: x[..., torch.arange(8) ^ 1],
    "index_select": lambda x: x.index_select(-1, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])),
    "halves from the end": lambda x: x[..., [-4, -3, -2, -1, 0, 1, 2, 3]],
    "halves computed from the end": lambda x: x[..., torch.arange(8) - 4],
    "gathered halves": lambda x: x.gather(-1, ((torch.arange(8) + 4) % 8).expand(x.shape)),
    "gathered neighbours": lambda x: torch.take_along_dim(x, (torch.arange(8) ^ 1)[None, None, None], -1),
    "copied halves": lambda x: (
        torch.empty_like(x)
        .index_copy(-1, torch.arange(4), x[..., 4:])
        .index_copy(-1, torch.tensor([4, 5, 6, 7]), x[..., :4])
    ),
    "copied neighbours": lambda x: x.index_copy(-1, torch.arange(0, 8, 2), x[..., 1::2]).index_copy(
        -1, torch.arange(1, 8, 2), x[..., ::2]
    ),
    "not in pairs": lambda x: x[..., [1, 0, 3, 2, 4, 5, 6, 7]],
    "backwards": lambda x: x[..., [7, 6, 5, 4, 3, 2, 1, 0]],
}


@pytest.mark.parametrize("name", LISTED)
def test_the_other_of_a_pair_may_be_listed(name: str) -> None:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if "halves" in name or name == "index_select":
            return x * cos.repeat(1, 2) + LISTED[name](x) * torch.tensor([-1.0] * 4 + [1.0] * 4) * sin.repeat(1, 2)
        signs = torch.tensor([-1.0, 1.0] * 4)
        return x * cos.repeat_interleave(2, -1) + LISTED[name](x) * signs * sin.repeat_interleave(2, -1)

    inputs = torch.randn(2, 3, 7, 8), torch.randn(7, 4), torch.randn(7, 4)
    got, backend = compiled(turned, *inputs)
    assert bool(ropes(backend)) == (name not in ("not in pairs", "backwards")), backend.why_not()
    assert all(match.rewritten for match in ropes(backend)), backend.why_not()
    torch.testing.assert_close(got, turned(*inputs))


@pytest.mark.parametrize("moved", ["movedim", "permute"])
def test_halves_may_be_stacked_ahead_and_moved_later(moved: str) -> None:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin))
        return (pairs.movedim(0, -1) if moved == "movedim" else pairs.permute(1, 2, 3, 4, 0)).flatten(-2)

    inputs = torch.randn(2, 3, 7, 8, requires_grad=True), torch.randn(7, 4), torch.randn(7, 4)
    got, backend = compiled(turned, *inputs)
    assert only(backend).rewritten, backend.why_not()
    pairs = [(each, *torch.autograd.grad(each.square().sum(), inputs[0])) for each in (got, turned(*inputs))]
    torch.testing.assert_close(*pairs)


def test_a_copy_that_is_stored_over_is_no_other_tensor() -> None:
    def turned(x: Tensor, angles: Tensor) -> Tensor:
        out, (a, b) = x.transpose(1, 2).contiguous(), x.transpose(1, 2).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        out[..., :8], out[..., 8:] = a * cos - b * sin, b * cos + a * sin
        return out

    inputs = torch.randn(2, 7, 4, 16, requires_grad=True), torch.randn(7, 8)
    got, backend = compiled(turned, *inputs)
    assert only(backend).rewritten, backend.why_not()
    pairs = [(each, *torch.autograd.grad(each.square().sum(), inputs[0])) for each in (got, turned(*inputs))]
    torch.testing.assert_close(*pairs)


def test_complex_numbers_are_put_together_by_hand() -> None:
    def turned(x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        both = (first + 1j * second) * (angles.cos() + 1j * angles.sin())
        return torch.cat((both.real, both.imag), -1)

    inputs = torch.randn(2, 4, 7, 16), torch.randn(7, 8)
    got, backend = compiled(turned, *inputs)
    assert only(backend).rewritten, backend.why_not()
    torch.testing.assert_close(got, turned(*inputs))


def test_rotation_matrices_that_are_given_are_four_tables() -> None:
    def turned(x: Tensor, matrices: Tensor) -> Tensor:
        return (x.reshape(*x.shape[:-1], -1, 1, 2) * matrices).sum(-1).flatten(-2)

    inputs = torch.randn(2, 4, 7, 16), torch.randn(7, 8, 2, 2)
    got, backend = compiled(turned, *inputs)
    torch.testing.assert_close(got, turned(*inputs))
    assert only(backend).rewritten
    assert not only(backend).attributes["has_half_tables"]


def test_features_in_three_groups_are_three() -> None:
    """As of videos: time, rows and columns, each with angles of its own, and features that are kept."""

    def video(x: Tensor, angles: Tensor) -> Tensor:
        parts = [_llama(x[..., start : start + 4], angles[..., start // 2 : start // 2 + 2]) for start in (0, 4, 8)]
        return torch.cat((*parts, x[..., 12:]), -1)

    inputs = torch.randn(2, 4, 9, 16), torch.randn(9, 6)
    got, backend = compiled(video, *inputs)
    torch.testing.assert_close(got, video(*inputs))
    assert [match.rewritten for match in ropes(backend)] == [True] * 3


@pytest.mark.parametrize("width", [16, 24])
def test_tables_that_repeat_along_the_pairs_are_read(width: int) -> None:
    """As V-JEPA 2 has them: neighbours are turned, by tables that are doubled as for halves."""

    def doubled(x: Tensor, angles: Tensor) -> Tensor:
        turned, kept = x[..., :16], x[..., 16:]
        cos, sin = (each.repeat(1, 2) for each in (angles.cos(), angles.sin()))
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
        turned = turned * cos + torch.stack((-second, first), -1).flatten(-2) * sin
        return torch.cat((turned, kept), -1)

    inputs = torch.randn(2, 4, 7, width), torch.randn(7, 8)
    got, backend = compiled(doubled, *inputs)
    torch.testing.assert_close(got, doubled(*inputs))
    assert only(backend).rewritten
    assert only(backend).attributes["rotary_dim"] == 16


def test_empty_rests_do_not_matter() -> None:
    def whole(x: Tensor, angles: Tensor) -> Tensor:
        return torch.cat((_llama(x[..., :16], angles), x[..., 16:]), -1)

    inputs = torch.randn(2, 4, 7, 16), torch.randn(7, 8)
    got, backend = compiled(whole, *inputs)
    torch.testing.assert_close(got, whole(*inputs))
    assert only(backend).rewritten


def test_only_the_tokens_after_the_first_are_turned() -> None:
    def vision(x: Tensor, angles: Tensor) -> Tensor:
        first, others = x.split((2, 9), dim=-2)
        return torch.cat((first, _llama(others, angles)), -2)

    inputs = torch.randn(2, 4, 11, 16), torch.randn(9, 8)
    got, backend = compiled(vision, *inputs)
    torch.testing.assert_close(got, vision(*inputs))
    assert only(backend).rewritten


def test_learned_tables_have_their_gradients() -> None:
    x, angles = torch.randn(2, 4, 7, 16), torch.randn(7, 8)
    grads = []
    for run in (_llama, lambda x, angles: compiled(_llama, x, angles)[0]):
        leaf = angles.clone().requires_grad_()
        run(x, leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_complex_tables_that_are_learned_are_a_near_miss() -> None:
    spelling = Spelling(form="complex", is_interleaved=True, width="half", complex_by="given")
    x, table, *others = spelling.inputs(5)
    _, backend = compiled(spelling.build(), x, table.requires_grad_(), *others)
    assert not ropes(backend)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["COMPLEX_GRADIENT"]


def test_an_attention_behind_it_is_found_as_well() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
        q, k = _llama(q, angles), _llama(k, angles)
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v

    inputs = *(torch.randn(2, 4, 7, 16) for _ in range(3)), torch.randn(7, 8)
    torch._dynamo.reset()
    backend = Rewriting(lock={**LOCK, "attention": "torch.sdpa"})
    got = torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, attention(*inputs))
    assert sorted((match.op, match.rewritten) for match in backend.report.matches) == [
        ("attention", True),
        ("rope", True),
        ("rope", True),
    ]


def test_a_norm_before_it_keeps_its_kernel() -> None:
    def normalised(x: Tensor, angles: Tensor) -> Tensor:
        wide = x.float()
        x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return _llama(x.transpose(1, 2).float(), angles).to(x.dtype)

    inputs = torch.randn(2, 7, 4, 16).to(torch.bfloat16), torch.randn(7, 8)
    torch._dynamo.reset()
    backend = Rewriting(lock={**LOCK, "norm": "torch.norm"})
    got = torch.compile(normalised, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, normalised(*inputs), rtol=2e-2, atol=2e-2)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [("norm", True), ("rope", True)]


def test_the_narrower_of_two_precisions_is_read() -> None:
    def upcast(x: Tensor, angles: Tensor) -> Tensor:
        return _llama(x.float().transpose(1, 2), angles).to(x.dtype)

    graph = capture(upcast, torch.randn(2, 7, 4, 16).to(torch.bfloat16), torch.randn(7, 8)).graph
    (match,) = [found for found in matches(graph, Effects(graph)) if isinstance(found, Match)]
    assert match.found.facts.dtype == torch.bfloat16
    assert match.found.operands["input"].op == "placeholder"


# ---- rounding --------------------------------------------------------------------------------------------------------


def _in_half(x: Tensor, angles: Tensor) -> Tensor:
    return _llama_with(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def _llama_with(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    return x * cos + _half(x) * sin


def _rounded_last(x: Tensor, angles: Tensor) -> Tensor:
    return _llama(x.float(), angles).to(x.dtype)


def _promoted(x: Tensor, angles: Tensor) -> Tensor:
    return _llama(x, angles)


@pytest.mark.parametrize(
    ("function", "compute_dtype", "out_dtype"),
    [(_in_half, "bfloat16", "bfloat16"), (_rounded_last, "float32", "bfloat16"), (_promoted, "float32", "float32")],
)
def test_spellings_that_round_differently_have_other_attributes(
    function: Callable[[Tensor, Tensor], Tensor], compute_dtype: str, out_dtype: str
) -> None:
    x, angles = torch.randn(2, 3, 7, 16).to(torch.bfloat16), torch.randn(7, 8)
    got, backend = compiled(function, x, angles)
    torch.testing.assert_close(got.float(), function(x, angles).float(), rtol=2e-2, atol=2e-2)
    match = only(backend)
    assert match.rewritten
    assert match.attributes["compute_dtype"] == f"torch.{compute_dtype}"
    assert match.attributes["out_dtype"] == f"torch.{out_dtype}"


@pytest.mark.parametrize("wrong", ["sign", "layout", "cos"])
def test_a_kernel_that_turns_otherwise_is_quarantined(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: op.Operands, attrs: RopeAttrs) -> Tensor:
        input, cos, sin = x.flat()
        if wrong == "sign":
            return op.reference(op.Operands(input, cos, -sin), attrs)
        if wrong == "layout":
            return op.reference(op.Operands(input, cos, sin), replace(attrs, is_interleaved=not attrs.is_interleaved))
        return op.reference(op.Operands(input, cos[:, :, :1].expand_as(cos), sin), attrs)

    monkeypatch.setattr(torch_rope, "rope", other)
    validate.forget()
    x, angles = torch.randn(2, 3, 9, 20), torch.randn(9, 10)  # sizes of its own: verdicts are kept for everyone
    got, backend = compiled(_llama, x, angles)
    torch.testing.assert_close(got, _llama(x, angles))
    assert [reason.code for reason in only(backend).reasons] == ["VALIDATION_FAILED"]
    validate.forget()


# ---- equal layers ----------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.width = width

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = self.project(x).view(2, 7, 4, 16).transpose(1, 2)
        turned, kept = heads[..., : self.width], heads[..., self.width :]
        out = _llama(turned, angles[:, : self.width // 2])
        return torch.cat((out, kept), -1).transpose(1, 2).reshape(2, 7, 64)


class Stack(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turned(width) for width in widths)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, angles)
        return x


def matches_of(*widths: int) -> list[Match]:
    graph = capture(Stack(*widths), torch.randn(2, 7, 64).requires_grad_(), torch.randn(7, 8)).graph
    return [found for found in matches(graph, Effects(graph)) if isinstance(found, Match)]


def test_layers_are_twins_of_one() -> None:
    first, *others = matches_of(8, 8, 8)
    assert first.prototype is None
    assert [match.prototype for match in others] == [first] * 2
    assert len({match.site.output for match in (first, *others)}) == 3


def test_a_layer_that_differs_is_read_by_itself() -> None:
    first, second, third = matches_of(8, 4, 8)
    assert second.prototype is None
    assert third.prototype is first
    assert [match.found.attributes.rotary_dim for match in (first, second, third)] == [8, 4, 8]  # type: ignore[attr-defined]


def test_twins_are_rewritten_each_with_its_own_input() -> None:
    stack, x, angles = Stack(8, 8, 8), torch.randn(2, 7, 64), torch.randn(7, 8)
    got, backend = compiled(stack, x, angles)
    torch.testing.assert_close(got, stack(x, angles))
    assert [match.rewritten for match in ropes(backend)] == [True] * 3


# ---- the op and its kernel -------------------------------------------------------------------------------------------

ATTRIBUTES = [
    RopeAttrs(is_interleaved=is_interleaved, rotary_dim=width, rotary_start=start, has_half_tables=has_half_tables)
    for is_interleaved in (False, True)
    for has_half_tables in (False, True)
    for width, start in ((20, 0), (8, 0), (12, 8), (6, 5))
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("attrs", ATTRIBUTES, ids=str)
def test_the_kernel_computes_the_reference(attrs: RopeAttrs, dtype: torch.dtype) -> None:
    width = attrs.rotary_dim // 2 if attrs.has_half_tables else attrs.rotary_dim
    given = {"input": torch.randn(3, 4, 7, 20), "cos": torch.randn(1, 1, 7, width), "sin": torch.randn(3, 1, 7, width)}
    given = {name: each.to(dtype) for name, each in given.items()}
    for out_dtype in {dtype, torch.promote_types(dtype, torch.float32)}:
        attrs = replace(attrs, out_dtype=out_dtype)
        exact = replace(attrs, out_dtype=torch.float64)
        want = op.reference(op.Operands(**{name: each.double() for name, each in given.items()}), exact)
        for got in (torch_rope.rope(op.Operands(**given), attrs), op.reference(op.Operands(**given), attrs)):
            assert got.dtype == out_dtype
            tolerance = TOLERANCES[dtype] / 4
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_the_reference_is_a_product_of_complex_numbers(is_interleaved: bool) -> None:
    x, angles = torch.randn(2, 3, 7, 16, dtype=torch.float64), torch.randn(1, 1, 7, 8, dtype=torch.float64)
    numbers = torch.complex(*op.pairs(x, is_interleaved)) * torch.polar(torch.ones_like(angles), angles)
    attrs = RopeAttrs(is_interleaved, 16, has_half_tables=True, out_dtype=torch.float64)
    want = op.joined(numbers.real, numbers.imag, is_interleaved)
    torch.testing.assert_close(op.reference(op.Operands(x, angles.cos(), angles.sin()), attrs), want)


def test_features_say_what_a_kernel_must_support() -> None:
    facts = RopeFacts(2, 4, 7, 16, 16, torch.float32, "cpu")
    assert op.features(RopeAttrs(rotary_dim=16), facts) == {}
    attrs = RopeAttrs(True, 8, 8, True)
    partial = replace(facts, rotary_dim=8, dtype=torch.bfloat16, needs_grad=True, tables_need_grad=True)
    assert set(op.features(attrs, partial)) == {
        "interleaved", "half_tables", "partial", "rotary_start", "mixed_dtypes", "wide_result", "training", "table_gradients",
    }  # fmt: skip


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_samples_are_recognised_as_what_they_are(rotary_dim: int) -> None:
    sizes = {"batch_size": 2, "num_heads": 3, "seq_len_q": 7, "head_dim": 16, "rotary_dim": rotary_dim}
    sample = op.sample(sizes, torch.float32, torch.device("cpu"))
    got, backend = compiled(sample.as_written(), *sample.inputs)
    torch.testing.assert_close(got, sample.with_kernel(op.reference)(*sample.inputs))
    found = only(backend).attributes
    assert found == sample.attrs.to_dict()


# ---- real models -----------------------------------------------------------------------------------------------------

#: Two layers each, with a query and a key.
FAMILIES = (
    "llama", "llama_decode", "gptj", "gpt_neox", "codegen", "cohere", "deepseek_v3", "dinov3", "esm", "gpt_oss", "llama4",
    "phi", "roformer", "stablelm",
)  # fmt: skip


@contextmanager
def counted() -> Iterator[list[str]]:
    """Every tensor that a function of ``transformers`` turns, by the function's name."""
    found: list[str] = []
    depth = [0]

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                out = function(*args, **kwargs)
            finally:
                depth[0] -= 1
            found.extend([name] * (0 if depth[0] else len(out) if isinstance(out, (tuple, list)) else 1))
            return out

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module in [m for name, m in sys.modules.items() if name.startswith("transformers.models.")]:
            for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
                for name, value in list(vars(owner).items()):
                    function = value.__func__ if isinstance(value, staticmethod) else value
                    if "apply_rotary" in name and callable(function):
                        wrapped = counting(name, function)
                        patch.setattr(
                            owner, name, staticmethod(wrapped) if isinstance(value, staticmethod) else wrapped
                        )
        yield found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_embedding_of_a_model_is_found(name: str) -> None:
    model, inputs = zoo.family(name).build("eager")
    with torch.no_grad():
        with counted() as calls:
            want = zoo.tensors(model(**inputs))
        torch._dynamo.reset()
        backend = Rewriting(lock=LOCK)
        got = zoo.tensors(torch.compile(model, backend=backend)(**inputs))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert len(calls) == 4
    assert [match.rewritten for match in ropes(backend)] == [True] * 4, backend.why_not()


def test_gradients_of_a_model_stay() -> None:
    model, inputs = zoo.family("llama").build("eager")
    grads = []
    for run in (model, torch.compile(model, backend=Rewriting(lock=LOCK))):
        torch._dynamo.reset()
        model.zero_grad()
        run(**inputs).last_hidden_state.square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in grads[0].items():
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-3, atol=1e-4)


def test_a_rotation_in_an_autocast_region_of_another_device_is_read_with_what_is_around_it() -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        with torch.autocast("cuda", enabled=False):
            turned = torch.cat((-second, first), -1)
            left = x * cos
        return left + turned * sin

    inputs = (torch.randn(2, 3, 7, 16), *(torch.randn(7, 8).repeat(1, 2) for _ in range(2)))
    got, backend = compiled(rotated, *inputs)
    assert only(backend).rewritten, backend.why_not()
    torch.testing.assert_close(got, rotated(*inputs))


def test_tables_that_are_cut_from_the_end_by_the_number_of_tokens_are_proven() -> None:
    """As xpos cuts its scales, which hold as many positions as there are tokens."""

    def rotated(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        scale = scale[:, -23:, :].reshape(1, 1, 23, 6)
        turning, still = x[..., :6], x[..., 6:]
        first, second = turning.reshape(2, 4, 23, 3, 2).unbind(-1)
        turned = torch.stack((-second, first), -1).reshape(2, 4, 23, 6)
        return torch.cat((turning * cos * scale + turned * sin * scale, still), -1)

    tables = [torch.rand(shape).repeat_interleave(2, -1) + 0.5 for shape in (*2 * [(1, 1, 23, 3)], (1, 23, 3))]
    inputs = (torch.randn(2, 4, 23, 12), *tables)
    got, backend = compiled(rotated, *inputs)
    assert only(backend).rewritten, backend.why_not()
    torch.testing.assert_close(got, rotated(*inputs))


def test_a_loop_of_products_is_not_multiplied_out_in_search_of_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(c: Tensor, h: Tensor, y: Tensor) -> Tensor:
        for t in range(8):
            c = c + h[0].expand(4, 4)
            h = h + c * y[:, t]
        return h

    parts: list[int] = []
    express = Parts.express

    def counted(region: Parts, node: Any, dims: Any, reader: Any = None) -> Any:
        found = express(region, node, dims, reader)
        parts.append(region.facts(found).parts)
        return found

    monkeypatch.setattr(Parts, "express", counted)
    compiled_loop = torch.compile(looped, backend=Rewriting(), fullgraph=True)
    compiled_loop(torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 8, 4))
    assert max(parts) <= 64
    assert sum(parts) < 150_000  # a read of both halves, however large, takes 400,000
