"""The attention recogniser: equivalent spellings, lookalikes, attributes, and what users have reported of Inductor."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_near_misses import near_misses
from attention_spellings import TOLERANCES, Spelling, spellings
from backends import Rewriting, rewritten
from graphs import capture
from hypothesis import HealthCheck, Phase, given, settings
from tiers import examples
from torch import Tensor

import lz_compile
from lz_compile.backend import layerzero
from lz_compile.lowering.ops import attention as op
from lz_compile.passes.attention import roles

many = settings(
    max_examples=examples(8, 80),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
some = settings(many, max_examples=examples(4, 40))
few = settings(many, max_examples=examples(2, 12))  # Dynamo alone takes seconds where every size is symbolic


def check(spelling: Spelling, got: Tensor, inputs: tuple[Tensor, ...]) -> None:
    tolerance = TOLERANCES[spelling.dtype]
    want = spelling.reference(*inputs)
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@given(spelling=spellings())
@many
def test_every_spelling_is_rewritten_and_gives_the_same(spelling: Spelling) -> None:
    inputs = spelling.inputs(0)
    check(spelling, rewritten(spelling.build(), *inputs), inputs)


@given(spelling=spellings())
@some
def test_every_spelling_runs_on_the_blocked_kernel(spelling: Spelling) -> None:
    inputs = spelling.inputs(1)
    check(spelling, rewritten(spelling.build(), *inputs, lock={"attention": "lz.blocked"}), inputs)


@pytest.mark.slow
@given(spelling=spellings(flat_mask="none"))
@few
def test_every_spelling_is_rewritten_with_symbolic_sizes(spelling: Spelling) -> None:
    inputs = spelling.inputs(2)
    check(spelling, rewritten(spelling.build(), *inputs, dynamic=True), inputs)


@given(spelling=spellings(dtype=torch.float64, rows_fully_masked=False))
@some
def test_gradients_of_every_spelling_are_those_of_the_reference(spelling: Spelling) -> None:
    def leaves() -> tuple[Tensor, ...]:
        return tuple(x.requires_grad_() if x.is_floating_point() else x for x in spelling.inputs(3))

    ours, theirs = leaves(), leaves()
    got, want = rewritten(spelling.build(), *ours), spelling.reference(*theirs)
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).reshape(want.shape)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", near_misses())
def test_lookalikes_are_left_alone_with_their_reason(name: str) -> None:
    function, inputs, reason = near_misses()[name]
    backend = Rewriting()
    got = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, function(*near_misses()[name].inputs))
    assert not any(match.rewritten for match in backend.report.matches)
    refusals = [str(miss.reason) for miss in backend.report.near_misses]
    assert any(reason in refusal for refusal in refusals), refusals
    assert all(miss.edit and miss.where for miss in backend.report.near_misses)


def test_who_asks_weights_for_their_dtype_only_reads_none() -> None:
    """ESM-2 casts the weights to the dtype of what they were cast to."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / 3
        weights = scores.softmax(-1, dtype=torch.float64)
        cast = weights.type_as(scores)
        return weights.type_as(cast) @ v

    _is_read(attention)


EXPONENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "float_power": lambda s: torch.float_power(math.e, s).to(s.dtype),
    "float_power of a tensor": lambda s: torch.float_power(torch.tensor(1.7), s).to(s.dtype),
    "ldexp": lambda s: torch.ldexp(torch.ones(()), s),
    "expm1": lambda s: s.expm1() + 1,
    "special.expm1": lambda s: 1 + torch.special.expm1(s),
}


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_are_read_by_any_name(name: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = EXPONENTIALS[name](q @ k.mT / 4)
        return weights @ v / weights.sum(-1, keepdim=True)

    _is_read(attention)


def _is_read(attention: Callable[..., Tensor]) -> None:
    """Rewritten, and right."""
    inputs = [heads(2, 3, each, 8) for each in (5, 7, 7)]
    backend = Rewriting(lock={"attention": "lz.blocked"})
    got = torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    assert [(match.op, match.rewritten) for match in backend.report.matches] == [("attention", True)], backend.why_not()
    torch.testing.assert_close(got.double(), attention(*(each.double() for each in inputs)), rtol=1e-5, atol=1e-5)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmin": lambda q, k, v: F.softmin(-(q @ k.mT), -1) @ v,
    "softmin, cast": lambda q, k, v: F.softmin(q @ k.mT * -0.3, dim=-1, dtype=torch.float64).to(q.dtype) @ v,
    "added to zeros": lambda q, k, v: torch.baddbmm(
        torch.zeros(1, 1, 1, dtype=q.dtype), (q @ k.mT).softmax(-1).flatten(0, 1), v.flatten(0, 1)
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_smallest_and_sums_with_zeros_are_read(name: str) -> None:
    _is_read(PRODUCTS[name])


def test_zeros_that_were_written_to_through_a_view_are_none() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.zeros(6, 5, 7, dtype=q.dtype)
        bias[:, :, :1].add_(2.0)
        scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT)
        return scores.softmax(-1).view(2, 3, 5, 7) @ v

    _is_read(biased)


# ---- what users have reported of Inductor, written anew -------------------------------------------------------------


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def through_inductor(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    lz_compile.clear_reports()
    got: Tensor = torch.compile(function, backend=layerzero, fullgraph=True)(*inputs)
    (report,) = lz_compile.reports()
    assert [match.rewritten for match in report.matches] == [True], report.to_dict()
    return got


def test_pytorch_195782_mask_added_from_the_left() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(mask + torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(16), dim=-1) @ v

    inputs = heads(2, 4, 19, 16), heads(2, 4, 23, 16), heads(2, 4, 23, 16), heads(2, 1, 19, 23)
    torch.testing.assert_close(through_inductor(attention, *inputs), attention(*inputs))


def test_pytorch_195412_scale_multiplied_instead_of_divided() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.25
        return F.softmax(scores + mask, dim=-1) @ v

    inputs = heads(2, 4, 19, 16), heads(2, 4, 23, 16), heads(2, 4, 23, 16), heads(2, 1, 19, 23)
    torch.testing.assert_close(through_inductor(attention, *inputs), attention(*inputs))


def test_pytorch_195784_half_operands_with_a_float32_mask() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / 4.0 + mask
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    q, k, v = (heads(2, 4, length, 16, dtype=torch.float16) for length in (19, 23, 23))
    mask = torch.zeros(2, 1, 19, 23).masked_fill(heads(2, 1, 19, 23) > 1, torch.finfo(torch.float32).min)
    got, want = through_inductor(attention, q, k, v, mask), attention(q, k, v, mask)
    torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-3)


def test_pytorch_119760_gpt2_mask_sliced_from_a_buffer() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.tril(torch.ones(64, 64, dtype=torch.bool)).view(1, 1, 64, 64))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
            causal = self.bias[:, :, k.size(-2) - q.size(-2) : k.size(-2), : k.size(-2)]
            fill = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
            return F.softmax(torch.where(causal, scores, fill), dim=-1) @ v

    model, inputs = Attention(), (heads(2, 4, 19, 16), heads(2, 4, 23, 16), heads(2, 4, 23, 16))
    torch.testing.assert_close(through_inductor(model, *inputs), model(*inputs))


def test_pytorch_195320_key_permuted_to_batch_head_dim_time() -> None:
    def attention(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        q, v = x.permute(0, 2, 1, 3), z.permute(0, 2, 1, 3)
        k = y.permute(0, 2, 3, 1)
        return (torch.matmul(q, k) * 0.25).softmax(-1).matmul(v)

    inputs = heads(2, 16, 4, 16), heads(2, 16, 4, 16), heads(2, 16, 4, 16)  # square, so that a wrong reading fits
    torch.testing.assert_close(through_inductor(attention, *inputs), attention(*inputs))


# ---- values that are overwritten --------------------------------------------------------------------------------------


def _mask_written_by_index(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = torch.zeros(19, 23)
    mask[:, 3:] = -math.inf
    mask[2] = -math.inf
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def _mask_written_through_eval_dropout(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = m * 1
    alias = F.dropout(mask, 0.5, training=False)
    alias.add_(5)
    alias[:, 3:] -= 7
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def _products_written_before_they_are_summed(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    products = q[:, :, :, None] * k[:, :, None]
    products[..., 0] = 0
    return (products.sum(-1) * 0.25 + m).softmax(-1) @ v


def _bias_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    bias = m.sin()
    bias.mul_(2)
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def _mask_as_a_factor_in_place(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    keep = (m > -1).float()
    scores = q @ k.mT * 0.25
    scores *= keep
    scores += (1 - keep) * -1e9
    keep.zero_()
    return scores.softmax(-1) @ v


def _exponentials_written_over_scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + m
    scores -= scores.amax(-1, keepdim=True)
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores @ v


def _eval_dropout_by_its_old_name(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return torch.dropout((q @ k.mT * 0.25 + m).softmax(-1), 0.5, train=False) @ v


def _query_overwritten_after_the_output(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    query = q * 1
    out = (query @ k.mT * 0.25 + m).softmax(-1) @ v
    query.zero_()
    return out + query.sum()


def _an_attention_that_reads_another(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    first = (q @ k.mT * 0.25 + m).softmax(-1) @ v
    return (first @ k.mT * 0.25 + m).softmax(-1) @ v


@pytest.mark.parametrize("lock", ["torch.sdpa", "lz.blocked"])
@pytest.mark.parametrize(
    "attention",
    [
        _mask_written_by_index,
        _mask_written_through_eval_dropout,
        _products_written_before_they_are_summed,
        _bias_scaled_in_place,
        _mask_as_a_factor_in_place,
        _eval_dropout_by_its_old_name,
        _query_overwritten_after_the_output,
        _an_attention_that_reads_another,
    ],
)
def test_overwritten_values_give_what_eager_gives(attention: Callable[..., Tensor], lock: str) -> None:
    inputs = (*qkv(), heads(19, 23))
    backend = Rewriting(lock={"attention": lock})
    got = torch.compile(attention, backend=backend, fullgraph=True)(*(x.clone() for x in inputs))
    torch.testing.assert_close(got, attention(*(x.clone() for x in inputs)), equal_nan=True)
    assert not backend.report.events, backend.why_not()


def test_exponentials_written_over_scores_are_read() -> None:
    inputs = (*qkv(), heads(19, 23))
    got = rewritten(_exponentials_written_over_scores, *inputs, lock={"attention": "lz.blocked"})
    torch.testing.assert_close(got, _exponentials_written_over_scores(*inputs))


class _Positions(torch.nn.Module):
    """Scores of projected positions beside those of contents, and probabilities that are masked again, as in ESPnet."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Linear(16, 16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor) -> Tensor:
        scores = (q @ k.mT + self.positions(q) @ self.positions(k).mT) / 4
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(padded, lowest).softmax(-1).masked_fill(padded, 0.0) @ v


@pytest.mark.parametrize("lock", ["torch.sdpa", "lz.blocked"])
def test_a_bias_of_projected_positions_is_no_mask_of_its_own(lock: str) -> None:
    q, k, v = qkv()
    model, padded = _Positions(), torch.arange(k.shape[-2]) >= torch.tensor([9, 0])[: q.shape[0], None, None, None]
    with torch.no_grad():
        got = rewritten(model, q, k, v, padded, lock={"attention": lock})
        torch.testing.assert_close(got, model(q, k, v, padded))


# ---- shapes that are changed in place -----------------------------------------------------------------------------------


def _key_of_the_graph_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1
    k.transpose_(-2, -1)
    return (q @ k * 0.25).softmax(-1) @ v


def _input_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k.swapaxes_(-2, -1)
    return (q @ k * 0.25).softmax(-1) @ v


def _value_squeezed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v[None] * 1
    v.squeeze_(0)
    return (q @ k.mT * 0.25).softmax(-1) @ v


def _matrices_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k[0, 0] * 1
    k.t_()
    return (q[0, 0] @ k * 0.25).softmax(-1) @ v[0, 0]


def _key_transposed_after_it_was_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k = k * 1
    scores = q @ k.mT * 0.25
    k.transpose_(-2, -1)
    return scores.softmax(-1) @ v, k * 2


def _key_unsqueezed_after_it_was_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k = k * 1
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    k.unsqueeze_(0)
    return scores.softmax(-1) @ v, k * 2


def _scores_transposed_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    scores.transpose_(-2, -1)
    scores.transpose_(-2, -1)
    return scores.softmax(-1) @ v


def _output_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = (q @ k.mT * 0.25).softmax(-1) @ v
    out.transpose_(1, 2)
    return out


def _call_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v)
    out.transpose_(1, 2)
    return out


def _quotient_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = weights @ v / weights.sum(-1, keepdim=True)
    out.transpose_(1, 2)
    return out


RESHAPED: dict[Callable[..., Any], str | None] = {
    _key_of_the_graph_transposed: None,
    _input_transposed: None,
    _value_squeezed: None,
    _matrices_transposed: None,
    _key_transposed_after_it_was_read: "OPERAND_RESHAPED",
    _key_unsqueezed_after_it_was_read: "OPERAND_RESHAPED",
    _scores_transposed_twice: "SCORES_NOT_AFFINE",
    _output_transposed: "OPERAND_RESHAPED",
    _call_transposed: "OPERAND_RESHAPED",
    _quotient_transposed: "OPERAND_RESHAPED",
}


@pytest.mark.parametrize("attention", RESHAPED)
def test_shapes_changed_in_place_are_read_or_refused(attention: Callable[..., Any]) -> None:
    backend = Rewriting(strict=True, lock={"attention": "lz.blocked"})
    got = torch.compile(attention, backend=backend)(*(x.clone() for x in qkv()))
    torch.testing.assert_close(got, attention(*(x.clone() for x in qkv())))
    refusals = [miss.reason.code for miss in backend.report.near_misses]
    if RESHAPED[attention] is None:
        assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
        assert not refusals
    else:
        assert not backend.report.matches
        assert refusals == [RESHAPED[attention]]


# ---- attributes -----------------------------------------------------------------------------------------------------


def attributes(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Any]:
    backend = Rewriting()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (match,) = backend.report.matches
    return match.attributes


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return heads(2, 4, 19, 16), heads(2, 4, 23, 16), heads(2, 4, 23, 16)


@pytest.mark.parametrize("inner", ["divided", "multiplied", "by a tensor for each query"])
def test_a_cap_of_scores_may_have_a_scale_that_is_no_number(inner: str) -> None:
    """As that of a symbolic head size is."""

    def capped(query: Tensor, key: Tensor, value: Tensor, temperature: Tensor) -> Tensor:
        scores = query @ key.mT
        if inner == "divided":
            scores = scores / query.shape[-1] ** 0.5
        else:
            scores = scores * (query.size(-1) ** -0.5 if inner == "multiplied" else temperature)
        return (torch.tanh(scores / 30.0) * 30.0).softmax(-1) @ value

    torch._dynamo.reset()
    backend = Rewriting()
    compiled = torch.compile(capped, backend=backend, fullgraph=True, dynamic=True)
    for width, length in ((16, 20), (24, 7)):
        given = [torch.randn(2, 3, length, size, requires_grad=True) for size in (width, width, 8)]
        temperature = torch.rand(2, 3, length, 1)
        got, want = compiled(*given, temperature), capped(*given, temperature)
        torch.testing.assert_close(got, want)
        ours, eager = (torch.autograd.grad(each.square().sum(), given) for each in (got, want))
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()
    assert backend.report.matches[0].attributes["softcap"] == pytest.approx(30.0)


def test_softcap_is_an_attribute() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh((q @ k.mT) * 0.25 / 30.0) * 30.0
        return scores.softmax(-1) @ v

    found = attributes(attention, *qkv())
    assert found["softcap"] == pytest.approx(30.0)
    assert found["scale"] == pytest.approx(0.25)
    torch.testing.assert_close(rewritten(attention, *qkv()), attention(*qkv()))


def test_sinks_are_reported_as_attention() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = torch.cat([(q @ k.mT) * 0.25, sink.reshape(1, -1, 1, 1).expand(2, -1, 19, 1)], dim=-1)
        return scores.softmax(-1)[..., :-1] @ v

    inputs = (*qkv(), heads(4))
    assert attributes(attention, *inputs)["has_sinks"]
    torch.testing.assert_close(rewritten(attention, *inputs), attention(*inputs))


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "to_the_last": lambda p: p[..., :-1],
    "to_a_number": lambda p: p[..., :23],
    "from_zero": lambda p: p[..., 0:23:1],
    "every_extent": lambda p: p[:2, :4, :19, :23],
    "to_a_size": lambda p: p[..., : p.shape[-1] - 1],
    "narrow": lambda p: p.narrow(-1, 0, 23),
}


def _with_sink(cut: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = torch.cat([(q @ k.mT) * 0.25, sink.reshape(1, -1, 1, 1).expand(2, -1, q.shape[2], 1)], dim=-1)
        return cut(scores.softmax(-1)) @ v

    return attention


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_sink_is_cut_off_in_any_way(cut: str, dynamic: bool | None) -> None:
    if cut == "every_extent" and dynamic:
        pytest.skip("under symbolic sizes these numbers select")
    attention, inputs = _with_sink(CUTS[cut]), (*qkv(), heads(4))
    got = rewritten(attention, *inputs, dynamic=dynamic, strict=True)
    torch.testing.assert_close(got, attention(*inputs))


@pytest.mark.parametrize("cut", [lambda p: p[..., 1:], lambda p: p.narrow(-1, 1, 23)], ids=["slice", "narrow"])
def test_a_first_key_that_is_cut_off_is_no_sink(cut: Callable[[Tensor], Tensor]) -> None:
    backend, inputs = Rewriting(strict=True), (*qkv(), heads(4))
    got = torch.compile(_with_sink(cut), backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, _with_sink(cut)(*inputs))
    assert not backend.report.matches


def test_dropout_in_training_is_an_attribute_and_has_the_right_mean() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.25, training=True) @ v

    inputs = heads(1, 1, 1, 16), heads(1, 1, 4096, 16) * 0, torch.ones(1, 1, 4096, 4)
    assert attributes(attention, *inputs)["dropout_p"] == 0.25
    mean = rewritten(attention, *inputs, lock={"attention": "torch.sdpa"}).mean()
    assert abs(mean - 1) < 0.05
    assert abs(rewritten(attention, *inputs, lock={"attention": "lz.blocked"}).mean() - 1) < 0.05


@pytest.mark.parametrize("is_call", [False, True])
def test_what_is_to_draw_as_uncompiled_code_does_is_left_as_it_is(is_call: bool) -> None:
    """Inductor's ``fallback_random``, by which compiled training is compared with eager's."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_call:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
        return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.25, training=True) @ v

    options = {"fallback_random": True, "layerzero.lock": {"attention": "lz.blocked"}}
    outcomes = []
    for function in (attention, torch.compile(attention, backend="layerzero", options=options)):
        torch.manual_seed(0)
        outcomes.append(function(*heads(3, 1, 2, 40, 16)))
    torch.testing.assert_close(*outcomes)
    (match,) = lz_compile.reports()[-1].matches
    assert "lz.blocked does not take uncompiled random numbers (fallback_random)" in " ".join(map(str, match.reasons))


def test_a_mask_that_is_only_ever_added_is_used_as_it_is() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.25 + mask).softmax(-1) @ v

    backend = Rewriting(lock={"attention": "torch.sdpa"})
    torch.compile(attention, backend=backend)(*qkv(), torch.zeros(2, 1, 19, 23))
    (call,) = [n for n in backend.graphs[0].graph.nodes if n.target is F.scaled_dot_product_attention]
    assert call.kwargs["attn_mask"].op == "placeholder"


def test_rows_that_mask_everything_stay_nan_with_an_infinite_fill() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v

    keep = torch.ones(2, 1, 19, 23, dtype=torch.bool)
    keep[:, :, 3] = False
    got = rewritten(attention, *qkv(), keep, lock={"attention": "torch.sdpa"})
    assert got[:, :, 3].isnan().all()
    assert not got[:, :, 4].isnan().any()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_masks_may_drop_beside_one_that_keeps(count: int) -> None:
    """Their product is factored, and of an odd number -1 is a factor that is no mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *drops: Tensor) -> Tensor:
        scores = torch.where(keep, q @ k.mT * 0.25, FLOAT32_MIN)
        for drop in drops:
            scores = scores.masked_fill(drop, FLOAT32_MIN)
        return scores.softmax(-1) @ v

    drops = [torch.rand(shape) < 0.2 for shape in ((2, 1, 19, 23), (2, 1, 1, 23), (1, 1, 19, 23))[:count]]
    inputs = *qkv(), torch.rand(2, 1, 19, 23) < 0.8, *drops
    got = rewritten(attention, *inputs, lock={"attention": "lz.blocked"})
    torch.testing.assert_close(got, attention(*inputs), atol=1e-5, rtol=1e-5)


KEPT = torch.rand(2, 1, 19, 23, generator=torch.Generator().manual_seed(0)) < 0.6
KEPT[..., 0] = True
KEPT[:, :, 3] = False
FLOAT32_MIN = torch.finfo(torch.float32).min
ADDITIVE = torch.zeros(2, 1, 19, 23).masked_fill(~KEPT, -1e9)


def _filled(fill: float, dtype: torch.dtype) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.25).masked_fill(~KEPT, fill).to(dtype)
        return scores.float().softmax(-1).to(dtype) @ v.to(dtype)

    return attention


def _half_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(KEPT, (q @ k.mT * 0.25).half(), -1e9).softmax(-1) @ v.half()


def _half_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(2, 1, 19, 23).masked_fill(~KEPT, -1e9).half()
    return ((q @ k.mT * 0.25).half() + mask).softmax(-1) @ v.half()


def _two_fills(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(~KEPT[:1], -1e4).masked_fill(~KEPT, -1e9)
    return scores.half().softmax(-1) @ v.half()


def _added_before_the_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + ADDITIVE).half().softmax(-1) @ v.half()


def _floored_before_the_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(~KEPT, -math.inf).clamp(min=FLOAT32_MIN)
    return scores.half().softmax(-1) @ v.half()


def _cast_by_the_softmax(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: change(q @ k.mT * 0.25).softmax(-1, dtype=torch.float16) @ v.half()


#: What a row of masked keys gives in eager mode, or the refusal.
OVERFLOWING: dict[str, tuple[Callable[..., Tensor], str]] = {
    "-1e9 in float16": (_filled(-1e9, torch.float16), "nan"),
    "-1e4 in float16": (_filled(-1e4, torch.float16), "mean"),
    "-1e9 in bfloat16": (_filled(-1e9, torch.bfloat16), "mean"),
    "float32's least number in bfloat16": (_filled(FLOAT32_MIN, torch.bfloat16), "nan"),
    "where": (_half_where, "nan"),
    "a mask of its own": (_half_mask, "nan"),
    "two fills": (_two_fills, "fill"),
    "added": (_added_before_the_cast, "MASK_MAY_OVERFLOW"),
    "a floor": (_floored_before_the_cast, "SCORES_NOT_READ"),
    "by the softmax": (_cast_by_the_softmax(lambda s: s.masked_fill(~KEPT, -1e9)), "nan"),
    "by the softmax, added": (_cast_by_the_softmax(lambda s: s + ADDITIVE), "MASK_MAY_OVERFLOW"),
    "by the softmax, a floor": (
        _cast_by_the_softmax(lambda s: s.masked_fill(~KEPT, -math.inf).clamp(min=FLOAT32_MIN)),
        "SCORES_NOT_READ",
    ),
}


@pytest.mark.parametrize("kernel", ["torch.sdpa", "lz.blocked"])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_fill_that_a_cast_makes_infinite_gives_what_it_gives_in_eager(name: str, kernel: str) -> None:
    attention, expected = OVERFLOWING[name]
    backend = Rewriting(lock={"attention": kernel})
    got, want = torch.compile(attention, backend=backend)(*qkv()), attention(*qkv())
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert want[:, :, 3].isnan().any() == (expected != "mean")
    if expected in ("nan", "mean", "fill"):
        (match,) = backend.report.matches
        assert match.attributes.get("masked_rows", "nan") == expected
        assert match.rewritten, backend.why_not()
    else:
        assert [miss.reason.code for miss in backend.report.near_misses] == [expected]


def test_a_direct_sdpa_call_is_recognised_and_can_be_given_another_kernel() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = attributes(attention, *qkv())
    assert found["is_causal"]
    got = rewritten(attention, *qkv(), lock={"attention": "lz.blocked"})
    torch.testing.assert_close(got, attention(*qkv()))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_direct_sdpa_call_inside_of_a_transform_is_told(transform: Callable[..., Any]) -> None:
    def attention(x: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(x, x, x)
        return found.sum() if transform is torch.func.grad else found

    torch._dynamo.reset()
    backend, x = Rewriting(lock={"attention": "lz.blocked"}), torch.randn(2, 3, 9, 16)
    got = torch.compile(transform(attention), backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, transform(attention)(x))
    assert [miss.reason.code for miss in backend.report.near_misses] == ["FUNCTION_TRANSFORM"]
    assert not [event for event in backend.report.events if "FAILED" in event.code], backend.why_not()


@pytest.mark.parametrize("symbolic", ["query", "key", "both"])
def test_heads_of_a_call_that_share_keys_may_be_symbolic(symbolic: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    backend, counts = Rewriting(lock={"attention": "lz.blocked"}), [(8, 4), (12, 3), (6, 2)]
    run = torch.compile(attention, backend=backend, fullgraph=True)
    for many, few in counts:
        heads, shared = 12 if symbolic == "key" else many, 2 if symbolic == "query" else few
        q, k, v = torch.randn(2, heads, 9, 16), *torch.randn(2, 2, shared, 9, 16)
        for each in {"query": (q,), "key": (k, v), "both": (q, k, v)}[symbolic]:
            torch._dynamo.mark_dynamic(each, 1)
        torch.testing.assert_close(run(q, k, v), attention(q, k, v))
    assert [match.rewritten for match in backend.report.matches] == [True], backend.why_not()


def test_heads_of_a_call_without_a_batch_may_share_keys() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = torch.randn(6, 9, 16), *torch.randn(2, 3, 9, 16)
    got = rewritten(attention, q, k, v, lock={"attention": "lz.blocked"})
    torch.testing.assert_close(got, attention(q, k, v))


def test_rewriting_twice_changes_nothing() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25).softmax(-1) @ v

    first, second = Rewriting(lock={"attention": "torch.sdpa"}), Rewriting(lock={"attention": "torch.sdpa"})
    torch.compile(attention, backend=first)(*qkv())
    before = str(first.graphs[0].graph)
    second(first.graphs[0], qkv())
    assert str(first.graphs[0].graph) == before
    assert not second.report.matches


# ---- numbers at the edge ----------------------------------------------------------------------------------------------


def test_rows_that_give_zero_leave_the_gradient_of_the_values_finite() -> None:
    keep = torch.rand(2, 1, 19, 23, generator=torch.Generator().manual_seed(0)) > 0.5
    keep[:, :, 3] = False

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0.0) @ v

    ours = [x.requires_grad_() for x in qkv()]
    rewritten(attention, *ours).sum().backward()
    assert not ours[2].grad.isnan().any()


@pytest.mark.parametrize("kernel", ["torch.sdpa", "lz.blocked"])
def test_float16_does_not_overflow_where_the_source_does_not(kernel: str) -> None:
    q, k = heads(1, 2, 64, 16, dtype=torch.float16), heads(1, 2, 8192, 16, dtype=torch.float16) * 0.1
    v = torch.full((1, 2, 8192, 16), 10.0, dtype=torch.float16)
    got = rewritten(lambda q, k, v: (q @ k.mT * 0.25).softmax(-1) @ v, q, k, v, lock={"attention": kernel})
    torch.testing.assert_close(got, torch.full_like(got, 10.0), rtol=1e-2, atol=1e-2)
    q, k, v = (heads(1, 2, 64, 64, dtype=torch.float16) for _ in range(3))
    q[..., 0], k[..., 0] = 600, 300
    got = rewritten(lambda q, k, v: (q * 0.125 @ k.mT).softmax(-1) @ v, q, k, v, lock={"attention": kernel})
    assert not got.isnan().any()


def test_nan_in_a_query_stays_nan_when_sdpa_is_replaced() -> None:
    q, k, v = qkv()
    q[0, 0, 3] = math.nan
    got = rewritten(F.scaled_dot_product_attention, q, k, v, lock={"attention": "lz.blocked"})
    assert got[0, 0, 3].isnan().all()


def _poisoned() -> tuple[Tensor, Tensor, Tensor]:
    """One query is NaN; of the last five keys, which every mask below drops, four are NaN and one is infinite."""
    q, k, v = qkv()
    q[0, 0, 3] = math.nan
    k[:, :, -5:] = math.nan
    k[:, :, -4] = math.inf
    return q, k, v


KEYS = torch.arange(23) < 18
SOME = torch.rand(2, 1, 19, 23, generator=torch.Generator().manual_seed(1)) < 0.6
SOME[..., 0] = True
SELECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda s: s.masked_fill(~KEYS, -math.inf).softmax(-1),
    "a finite fill": lambda s: s.masked_fill(~KEYS, -1e9).softmax(-1),
    "where": lambda s: torch.where(SOME & KEYS, s, -math.inf).softmax(-1),
    "two masks": lambda s: torch.where(KEYS, torch.where(SOME, s, -1e4), -1e9).softmax(-1),
    "before the scale": lambda s: (s.masked_fill(~KEYS, -math.inf) * 0.5).softmax(-1),
    "zeros for NaN": lambda s: s.masked_fill(~KEYS, -math.inf).softmax(-1).nan_to_num(0.0),
}
#: Keys that no query sees can be set to zero for SDPA; a mask of some queries only cannot be kept from NaN there.
AGAINST_SDPA = {
    "where": ["MASKED_NAN_UNSUPPORTED"],
    "two masks": ["MASKED_ROW_FILL_UNSUPPORTED", "MASKED_NAN_UNSUPPORTED"],
    "zeros for NaN": ["NAN_ROWS_UNSUPPORTED"],
}


@pytest.mark.parametrize("mask", SELECTED)
def test_nan_in_masked_keys_is_ignored_where_the_source_ignores_it(mask: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SELECTED[mask](q @ k.mT * 0.25) @ v

    backend = Rewriting()
    got = torch.compile(attention, backend=backend, fullgraph=True)(*_poisoned())
    torch.testing.assert_close(got, attention(*_poisoned()), equal_nan=True)
    assert got[0, 0, 4].isfinite().all()
    (match,) = backend.report.matches
    assert match.rewritten, backend.why_not()
    assert match.attributes["selects_masked"]
    against = {candidate["kernel"]: candidate["against"] for candidate in match.candidates}
    codes = [reason["code"] for reason in against["torch.sdpa"]]
    assert codes == AGAINST_SDPA.get(mask, [])
    assert match.kernel == ("lz.blocked" if codes else "torch.sdpa")


@pytest.mark.parametrize("mask", SELECTED)
def test_a_promise_of_finite_operands_lets_sdpa_take_selecting_masks(mask: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SELECTED[mask](q @ k.mT * 0.25) @ v

    backend = Rewriting(lock={"attention": "torch.sdpa"}, assume_finite=True)
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*qkv()), attention(*qkv()))
    (match,) = backend.report.matches
    assert match.rewritten
    assert match.kernel == ("torch.sdpa" if mask != "two masks" else "lz.blocked")


@pytest.mark.parametrize("kernel", ["torch.sdpa", "lz.blocked"])
def test_nan_in_masked_keys_is_passed_on_where_the_source_passes_it_on(kernel: str) -> None:
    mask = torch.zeros(23).masked_fill(~KEYS, -math.inf)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25 + mask).softmax(-1) @ v

    got = rewritten(attention, *_poisoned(), lock={"attention": kernel}, strict=True)
    torch.testing.assert_close(got, attention(*_poisoned()), equal_nan=True)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [7, 15, 16, 23])
def test_a_query_of_nan_gives_nan_in_its_row_only(keys: int, dtype: torch.dtype) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25).softmax(-1) @ v

    q, k, v = (heads(2, 4, n, 16, dtype=dtype) for n in (19, keys, keys))
    q[0, 0, 3] = math.nan
    for kernel in ("torch.sdpa", "lz.blocked"):  # the first cannot where there are fewer keys than a register holds
        torch._dynamo.reset()
        backend = Rewriting(lock={"attention": kernel})
        got = torch.compile(attention, backend=backend, fullgraph=True)(q, k, v)
        (match,) = backend.report.matches
        assert match.rewritten or (kernel, keys < 16) == ("torch.sdpa", True), backend.why_not()
        torch.testing.assert_close(got, attention(q, k, v), equal_nan=True, rtol=2e-2, atol=2e-2)


def test_inputs_that_alias_each_other_are_not_read_too_late() -> None:
    def attention(q: Tensor, k: Tensor, b: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) * 0.25
        b.mul_(2)
        return scores.softmax(-1) @ v

    q, k, v = qkv()
    ours, theirs = k.clone(), k.clone()
    got = torch.compile(attention, backend=Rewriting())(q, ours, ours.view(8, 23, 16), v)
    torch.testing.assert_close(got, attention(q, theirs, theirs.view(8, 23, 16), v))


def test_a_product_written_into_a_given_tensor_is_left_alone() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros(2, 4, 19, 16)
        shown = out.view(8, 19, 16)
        torch.matmul((q @ k.mT * 0.25).softmax(-1), v, out=out)
        return shown + 1

    got = torch.compile(attention, backend=Rewriting())(*qkv())
    torch.testing.assert_close(got, attention(*qkv()))


def test_strides_that_show_behind_other_operations_stay() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (((q @ k.mT) * 0.25).softmax(-1) @ v * 2).view(-1, 16)

    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]
    torch.testing.assert_close(rewritten(attention, *inputs, lock={"attention": "torch.sdpa"}), attention(*inputs))


def test_the_same_tensor_may_be_query_key_and_value() -> None:
    def attention(x: Tensor) -> Tensor:
        return (x @ x.mT * 0.25).softmax(-1) @ x

    torch.testing.assert_close(rewritten(attention, heads(2, 4, 19, 16)), attention(heads(2, 4, 19, 16)))


def test_the_same_tensor_may_be_added_to_the_scores_as_well() -> None:
    """No mask: where it is infinite, nothing finite is left of queries and keys."""

    def attention(x: Tensor) -> Tensor:
        return (x @ x.mT * 0.25 + x).softmax(-1) @ x

    torch.testing.assert_close(rewritten(attention, heads(2, 4, 16, 16)), attention(heads(2, 4, 16, 16)))


def test_a_lock_that_cannot_be_followed_says_so() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh((q @ k.mT) * 0.25 / 30.0) * 30.0).softmax(-1) @ v

    backend = Rewriting(lock={"attention": "torch.sdpa"})
    torch.compile(attention, backend=backend)(*qkv())
    (match,) = backend.report.matches
    assert match.reasons[0].code == "LOCK_NOT_POSSIBLE"
    assert "softcap" in match.reasons[0].message or "capped" in match.reasons[0].message


def test_what_is_added_after_a_clamp_is_not_clamped() -> None:
    """A row that a later mask covers with infinities is NaN in the source, whatever was clamped before."""

    def clamped_first(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = (query @ key.transpose(-2, -1) * 0.25).clamp(min=torch.finfo(torch.float32).min)
        return (scores + mask).softmax(-1) @ value

    query, key, value = (torch.randn(2, 3, 20, 16) for _ in range(3))
    mask = torch.zeros(20, 20)
    mask[3] = -math.inf
    got = rewritten(clamped_first, query, key, value, mask)
    torch.testing.assert_close(got, clamped_first(query, key, value, mask), equal_nan=True)
    assert got[:, :, 3].isnan().all()


@pytest.mark.parametrize(
    "bound", [lambda x, least: x.clamp(min=least), lambda x, least: torch.max(x, torch.tensor(least))]
)
def test_a_clamp_after_masks_is_refused_where_gradients_end_at_it(bound: Callable[..., Tensor]) -> None:
    """As OPT is spelled: two lowest numbers add up to an infinity, of which the clamp makes a number without a gradient."""

    def attention(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        causal = torch.full((6, 6), FLOAT32_MIN).triu(1)
        return bound(query @ key.mT * 0.25 + causal + padding, FLOAT32_MIN).softmax(-1) @ value

    padding = torch.where(torch.arange(6) < 2, FLOAT32_MIN, 0.0)
    inputs = *torch.randn(3, 2, 3, 6, 16).unbind(), padding
    torch.testing.assert_close(rewritten(attention, *inputs), attention(*inputs))
    torch._dynamo.reset()
    trained, backend = [each.requires_grad_() for each in inputs[:3]], Rewriting()
    got = torch.compile(attention, backend=backend, fullgraph=True)(*trained, padding)
    assert [miss.reason.code for miss in backend.report.near_misses] == ["FLOORED_GRADIENT"], backend.why_not()
    gradients = (torch.autograd.grad(each.square().sum(), trained) for each in (got, attention(*trained, padding)))
    for ours, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spelling", ["clamp", "max", "maximum"])
def test_a_clamp_at_the_least_number_of_its_dtype_bounds_nothing(dtype: torch.dtype, spelling: str) -> None:
    """But infinities, of which it makes that number."""
    least = torch.finfo(dtype).min

    def bounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = query @ key.mT * 0.25 + mask
        if spelling == "clamp":
            return scores.clamp(min=least).softmax(-1) @ value
        bound = torch.tensor(least) if spelling == "max" else torch.full([], least, dtype=dtype)
        return getattr(torch, spelling)(scores, bound).softmax(-1) @ value

    mask = torch.zeros(20, 20, dtype=dtype)
    mask[3], mask[4, 3:], mask[5, :7], mask[6] = -math.inf, -math.inf, least, -math.inf
    mask[7, :7], mask[7, 7:] = -math.inf, least  # of two masks that are added, as OPT's
    inputs = [torch.randn(2, 3, 20, 16).to(dtype) for _ in range(3)]
    got, want = rewritten(bounded, *inputs, mask), bounded(*inputs, mask)
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, -math.inf), (torch.bfloat16, torch.finfo(torch.float32).min)]
)
def test_a_bound_that_is_infinite_in_the_dtype_of_scores_keeps_rows_of_nan(dtype: torch.dtype, least: float) -> None:
    def bounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return torch.max(query @ key.mT * 0.25 + mask, torch.tensor(least)).softmax(-1) @ value

    mask = torch.zeros(20, 20, dtype=dtype)
    mask[3], mask[4, 3:] = -math.inf, -math.inf
    inputs = [torch.randn(2, 3, 20, 16).to(dtype) for _ in range(3)]
    got, want = rewritten(bounded, *inputs, mask), bounded(*inputs, mask)
    assert want[:, :, 3].isnan().all()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("bound", [-65504.0, -100.0])
def test_a_clamp_that_scores_may_reach_is_named(bound: float) -> None:
    def bounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return (query @ key.mT * 0.25 + mask).clamp(min=bound).softmax(-1) @ value

    backend = Rewriting()
    torch._dynamo.reset()
    inputs = [torch.randn(2, 3, 20, 16) for _ in range(3)]
    torch.compile(bounded, backend=backend, fullgraph=True)(*inputs, torch.zeros(20, 20))
    (miss,) = backend.report.near_misses
    assert miss.reason.message == "the scores pass through clamp, which has no reading here"


def test_a_clamp_between_two_masks_is_refused() -> None:
    def between(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = (query @ key.transpose(-2, -1) * 0.25 + mask).clamp(min=torch.finfo(torch.float32).min)
        return (scores + mask).softmax(-1) @ value

    backend = Rewriting()
    inputs = (*(torch.randn(2, 3, 20, 16) for _ in range(3)), torch.zeros(20, 20))
    torch.compile(between, backend=backend, fullgraph=True)(*inputs)
    assert not backend.report.matches
    assert "clamped before a mask is added" in str(backend.report.near_misses[0].reason)


def test_nan_to_num_of_a_gate_is_not_that_of_the_probabilities() -> None:
    def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        weights = (query @ key.transpose(-2, -1) * 0.25).softmax(-1)
        return (weights * torch.nan_to_num(gate)) @ value

    backend = Rewriting()
    query, key, value = (torch.randn(2, 3, 20, 16) for _ in range(3))
    gate = torch.randn(2, 3, 20, 1)
    gate[0, 0, 0] = math.nan
    got = torch.compile(gated, backend=backend, fullgraph=True)(query, key, value, gate)
    torch.testing.assert_close(got, gated(query, key, value, gate))


def test_a_whole_number_is_a_dropout_probability_too() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0)

    backend = Rewriting()
    torch.compile(call, backend=backend, fullgraph=True)(*(torch.randn(2, 3, 20, 16) for _ in range(3)))
    assert [match.attributes.get("dropout_p", 0.0) for match in backend.report.matches] == [0.0]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_dropout_probability_that_is_symbolic_is_the_number_that_it_is(scale: float | None) -> None:
    """As diffusers passes it: a default of a function, which ``dynamic=True`` makes an input of the graph."""

    def call(query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale)

    backend = Rewriting(lock={"attention": "lz.blocked"})
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for length in (19, 23):
        inputs = tuple(torch.randn(2, 3, length, 16) for _ in range(3))
        torch.testing.assert_close(compiled(*inputs, scale, 0.0), call(*inputs, scale, 0.0))
    (graph,) = backend.report.graphs
    assert [match.rewritten for match in graph.matches] == [True], backend.why_not()
    query = torch.ones(2, 3, 19, 16)
    assert (compiled(query, query, query, scale, 1.0) == 0).all(), "another number is another graph"
    assert len(backend.report.graphs) == 2


ADDED: dict[str, tuple[Callable[..., Any], bool | None]] = {
    "number": (lambda scores, _: scores + 1.5, None),
    "number_behind_a_cap": (lambda scores, _: torch.tanh(scores) + 1.5, None),
    "symbolic_number": (lambda scores, given: scores + given, True),
    "number_of_a_size": (lambda scores, _: scores + math.log(scores.shape[-1]), True),
    "tensor_of_no_dimensions": (lambda scores, _: scores + torch.full((), 1.5).sin(), None),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", ["torch.sdpa", "lz.tiled"])
@pytest.mark.parametrize("name", ADDED)
def test_one_number_added_to_all_scores_fits_every_kernel(name: str, kernel: str) -> None:
    add, dynamic = ADDED[name]

    def attention(q: Tensor, k: Tensor, v: Tensor, given: float) -> Tensor:
        return add(q @ k.transpose(-2, -1) * 0.3, given).softmax(-1) @ v

    inputs = (*(torch.randn(2, 3, size, 8) for size in (11, 19, 19)), 0.7)
    if kernel == "torch.sdpa" and "cap" in name:
        pytest.skip("SDPA caps no scores")
    got = rewritten(attention, *inputs, dynamic=dynamic, lock={"attention": kernel}, strict=True)
    torch.testing.assert_close(got, attention(*inputs))


def test_a_number_beside_a_sink_counts() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * 0.3 + 1.5
        return torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v

    inputs = (*(torch.randn(2, 3, size, 8) for size in (11, 19, 19)), torch.randn(1))
    torch.testing.assert_close(rewritten(attention, *inputs), attention(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 7, 6), (2, 4, 8, 16)])
@pytest.mark.parametrize("operands", ["xxx", "xyx", "xyy", "xxy"])
def test_one_tensor_may_be_several_operands_of_a_call(
    operands: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        given = {"x": x, "y": x + 1}
        return F.scaled_dot_product_attention(*(given[name] for name in operands))

    torch._dynamo.reset()
    backend = Rewriting(lock={"attention": "lz.blocked"})
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(torch.compile(attention, backend=backend, fullgraph=True)(x), attention(x))
    assert [match.kernel for match in backend.report.matches if match.rewritten] == ["lz.blocked"], backend.why_not()


@pytest.mark.parametrize(
    ("added", "is_wide"),
    [
        (lambda scores, bias: scores + bias + bias.mT, False),
        (lambda scores, bias: scores.float() + bias, False),
        (lambda scores, bias: scores.float() + bias.float() * 0.5, True),
        (lambda scores, bias: scores.float() + bias + bias.mT, True),
        (lambda scores, bias: scores.float() + torch.cos(bias.float()), True),
    ],
)
def test_a_bias_is_wide_where_the_source_adds_it_in_float32_to_narrower_operands(monkeypatch, added, is_wide):
    """SDPA would make the operands as wide beside the CPU, where that is a tenth as fast."""
    seen = []
    monkeypatch.setattr(
        op, "features", lambda attrs, facts, known=op.features: seen.append(facts) or known(attrs, facts)
    )

    def function(query, key, value, bias):
        shares = torch.softmax(added(query @ key.mT * 0.25, bias), -1).to(value.dtype)
        return shares @ value

    inputs = [torch.randn(2, 3, 8, 8, dtype=torch.bfloat16) for _ in range(4)]
    backend = Rewriting()
    torch.compile(function, backend=backend)(*inputs)
    assert {facts.bias_is_wide for facts in seen} == {is_wide}


def test_scores_that_go_into_what_gives_several_tensors_are_not_taken_for_rounded() -> None:
    def function(query: Tensor, key: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = query @ key
        return scores + bias, torch.broadcast_tensors(scores, bias)[0]

    graph = capture(function, *(torch.randn(4, 4) for _ in range(3))).graph
    (product,) = graph.find_nodes(op="call_function", target=operator.matmul)
    assert not roles._rounds_joined(product, torch.float32)


def test_no_bias_of_float32_operands_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are given it in float32, whatever the source adds it in."""
    seen = []
    monkeypatch.setattr(
        op, "features", lambda attrs, facts, known=op.features: seen.append(facts) or known(attrs, facts)
    )

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = (query @ key.mT * 0.25).double() + bias + bias.mT
        return torch.softmax(scores, -1).float() @ value

    torch.compile(function, backend=Rewriting())(*(torch.randn(2, 3, 8, 8) for _ in range(4)))
    assert seen
    assert not any(facts.bias_is_wide for facts in seen)


def test_a_mask_of_a_call_of_sdpa_is_rounded_as_its_operands_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        op, "features", lambda attrs, facts, known=op.features: seen.append(attrs) or known(attrs, facts)
    )

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    inputs = [torch.randn(2, 3, 8, 8, dtype=torch.bfloat16) for _ in range(4)]
    torch.compile(function, backend=Rewriting())(*inputs)
    assert {attrs.rounds_bias for attrs in seen} == {True}
