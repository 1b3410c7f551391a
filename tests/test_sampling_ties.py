"""Sampling where scores are equal: which of them limits keep, in every kernel; rows of NaN, minus infinity and float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lz_compile.ground import health
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.kernels.sampling import cpp_sampling, torch_sampling
from lz_compile.lowering.ops import sampling as op
from lz_compile.runtime.kernels import registry

KERNELS = {"lz.cpp_sampling": cpp_sampling.sampling, "torch.sampling": torch_sampling.sampling}
VOCABS = (1, 2, 5, 31, 64, 100, 333)


@pytest.fixture(autouse=True)
def _nothing_fell_back():
    yield
    assert not health.retirements()


def wide(operands):
    return {name: each.double() if each.is_floating_point() else each for name, each in operands.items()}


def problem(rows, vocab, names, ties, *, dtype=torch.float32, seed=0):
    """Operands by name and attributes: few different scores, rows of few finite ones, rows in which a limit is off.

    A ``top_p`` is half-way between two sums of probabilities, so that it does not depend on rounding what is kept.
    """
    generator = torch.Generator().manual_seed(seed)

    def steps(*shape):
        return ((torch.randn(*shape, generator=generator) * 3).round() / 2).to(dtype)

    def number(low, high):
        return torch.rand(rows, generator=generator) * (high - low) + low

    operands = {
        "logits": steps(rows, vocab).masked_fill(torch.rand(rows, vocab, generator=generator) < 0.1, -math.inf),
        "bitmask": torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator, dtype=torch.int32),
        "bias": steps(1, vocab),
        "temperature": number(0.3, 2.0),
        "top_k": torch.randint(1, vocab // 2 + 2, (rows,), generator=generator, dtype=torch.int32),
        "min_p": number(0.0, 0.3),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
    }
    operands["logits"][0, 2:] = -math.inf
    operands["top_k"][0] = vocab
    operands["logits"][:, 0] = 0.5
    operands["bitmask"][:, 0] |= 1
    operands["temperature"][1] = 0
    operands["top_k"][2] = 0
    operands = {name: each for name, each in operands.items() if name in ("logits", *names)}
    attrs = replace(op.SamplingAttrs.of(operands, "probs", torch.float64), top_k_ties=ties[0], top_p_ties=ties[1])
    if "top_p" in names:
        left = {name: each for name, each in operands.items() if name not in ("top_p", "min_p", "seeds")}
        top_k_ties = "first" if ties[0] == "open" else ties[0]
        p = op.reference(
            op.Operands(**wide(left)), replace(attrs, has_min_p=False, is_random=False, top_k_ties=top_k_ties)
        )
        ordered = p.sort(-1, descending=True).values
        place = (torch.rand(rows, generator=generator) * (ordered > 1e-4).sum(-1)).long()[:, None]
        operands["top_p"] = (ordered.cumsum(-1) - ordered / 2).gather(-1, place)[:, 0].float()
        operands["top_p"][3] = 1
        attrs = replace(attrs, has_top_p=True)
    return operands, attrs


def assert_is_the_definitions(kernel, operands, attrs, results=op.VARIANT_ATTRIBUTES):
    """What is kept, what is drawn, and how likely it was."""
    for result in results:
        expected = op.reference(op.Operands(**wide(operands)), replace(attrs, result=result))
        found = kernel(op.Operands(**operands), replace(attrs, result=result, out_dtype=torch.float32))
        if result == "ids":
            assert found.tolist() == expected.tolist()
        elif result == "scores":
            assert torch.equal(found > -math.inf, expected > -math.inf)
        else:
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=40, deadline=None)
@given(
    limits=st.lists(st.sampled_from(("temperature", "top_k", "top_p", "min_p", "seeds")), unique=True),
    constraints=st.sampled_from(((), ("bitmask", "bias"))),  # C++ is compiled for each
    ties=st.tuples(st.sampled_from(op.TIES), st.sampled_from(op.TIES)),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    result=st.sampled_from(("ids", "scores")),
    seed=st.integers(0, 2**20),
)
def test_kernels_keep_what_the_definition_keeps(kernel, limits, constraints, ties, vocab, dtype, result, seed):
    operands, attrs = problem(12, vocab, (*constraints, *limits), ties, dtype=dtype, seed=seed)
    assert_is_the_definitions(KERNELS[kernel], operands, attrs, [result])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("top_p_ties", op.TIES)
@pytest.mark.parametrize("top_k_ties", op.TIES)
def test_kernels_keep_what_the_definition_keeps_of_many(kernel, top_k_ties, top_p_ties):
    """As many scores as there are groups of registers to look at, for C++."""
    operands, attrs = problem(8, 3001, ("top_k", "top_p", "seeds"), (top_k_ties, top_p_ties), dtype=torch.bfloat16)
    operands["top_k"][4:] = torch.tensor([1, 7, 20, 100])
    operands["top_p"] = torch.tensor([0.013, 0.13, 0.9, 1.0, 0.013, 0.51, 0.51, 0.777])
    assert_is_the_definitions(KERNELS[kernel], operands, attrs)


# ---- the definition --------------------------------------------------------------------------------------------------


def spelled(z, top_k, top_p, min_p, ties):
    """What is kept, as sources spell it: sort, cut, scatter."""
    rows = []
    for row, k, p, share in zip(z, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        if k > 0:
            row = cut(row, lambda ordered, k=k: torch.arange(len(ordered)) < k, ties[0])  # noqa: PLW2901 step by step
        if p < 1:
            row = cut(row, lambda ordered, p=p: kept_by_mass(ordered.softmax(-1), p), ties[1])  # noqa: PLW2901
        likely = row.softmax(-1)
        rows.append(row.masked_fill(likely < share * likely.max(), -math.inf))
    return torch.stack(rows) > -math.inf


def cut(row, kept, ties):
    if ties == "last":  # as transformers does
        ordered, tokens = row.sort(dim=0, stable=True)
        removed = ~kept(ordered.flip(0)).flip(0)
        return row.masked_fill(torch.zeros_like(removed).scatter(0, tokens, removed), -math.inf)
    ordered, tokens = row.sort(dim=0, descending=True, stable=True)
    removed = ~kept(ordered)
    if ties == "all":
        return row.masked_fill(row < ordered[~removed].min(), -math.inf)
    return torch.full_like(row, -math.inf).scatter(0, tokens, ordered.masked_fill(removed, -math.inf))


def kept_by_mass(likely, p):
    kept = likely.cumsum(-1) - likely < p
    kept[0] = True
    return kept


@settings(max_examples=100, deadline=None)
@given(
    ties=st.tuples(st.sampled_from(op.TIES[:3]), st.sampled_from(op.TIES[:3])),
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 2**20),
)
def test_the_definition_keeps_what_a_source_that_sorts_keeps(ties, vocab, seed):
    names = ("top_k", "top_p", "min_p")
    operands, attrs = problem(6, vocab, names, ties, dtype=torch.float64, seed=seed)
    found = op.reference(op.Operands(**wide(operands)), replace(attrs, result="scores"))
    limits = wide({name: operands[name] for name in names}).values()
    assert torch.equal(found > -math.inf, spelled(operands["logits"], *limits, ties))


def kept_by(kernel, logits, **given):
    """The tokens of one row, or of each, that are kept under ``top_k``, ``top_p`` and their ties."""
    ties = {name: given.pop(name) for name in list(given) if name.endswith("_ties")}
    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "temperature": torch.float32}
    operands = {name: torch.tensor([value], dtype=dtypes[name]) for name, value in given.items()}
    attrs = replace(op.SamplingAttrs.of({"logits": logits, **operands}, "scores", torch.float32), **ties)
    scores = kernel(op.Operands(logits=torch.atleast_2d(logits), **operands), attrs)
    kept = [row.nonzero().flatten().tolist() for row in scores > -math.inf]
    return kept if logits.dim() > 1 else kept[0]


EVERY = {"reference": op.reference, **KERNELS}


@pytest.mark.parametrize("kernel", EVERY)
def test_as_many_equal_scores_are_kept_as_a_limit_needs(kernel):
    def kept(**given):
        return kept_by(EVERY[kernel], torch.tensor([1.0, 0.0, 1.0, 0.0, -0.0, 1.0]), **given)

    assert kept(top_k=2) == kept(top_k=3) == [0, 2, 5]
    assert kept(top_k=2, top_k_ties="first") == [0, 2]
    assert kept(top_k=2, top_k_ties="last") == [2, 5]
    assert kept(top_k=4, top_k_ties="first") == [0, 1, 2, 5]
    assert kept(top_k=4, top_k_ties="last") == [0, 2, 4, 5]
    assert kept(top_p=0.3, top_p_ties="first") == [0, 2]
    assert kept(top_p=0.3, top_p_ties="last") == [2, 5]
    assert kept(top_p=0.8, top_p_ties="first") == [0, 1, 2, 5]
    assert kept(top_p=0.8, top_p_ties="last") == [0, 2, 4, 5]


@pytest.mark.parametrize("kernel", EVERY)
def test_a_sum_that_is_reached_exactly_is_reached(kernel):
    for ties, expected in {"first": [0, 1, 2, 3], "last": [4, 5, 6, 7], "all": list(range(8))}.items():
        assert kept_by(EVERY[kernel], torch.ones(8), top_p=0.5, top_p_ties=ties) == expected


@pytest.mark.parametrize("kernel", EVERY)
def test_limits_that_meet_at_one_score_are_applied_one_after_the_other(kernel):
    logits = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])

    def kept(*ties, top_p=0.95):
        return kept_by(EVERY[kernel], logits, top_k=5, top_p=top_p, top_k_ties=ties[0], top_p_ties=ties[1])

    # Of four that the first limit leaves beside the likeliest, the second keeps three; of six, five.
    assert kept("first", "first") == [0, 1, 2, 3]
    assert kept("first", "last") == [1, 2, 3, 4]
    assert kept("last", "first") == [2, 3, 4, 5]
    assert kept("last", "last") == [2, 4, 5, 6]
    assert kept("first", "all") == [0, 1, 2, 3, 4]
    assert kept("all", "last") == [1, 2, 3, 4, 5, 6]
    assert kept("first", "last", top_p=0.5) == [2]


@pytest.mark.parametrize("ties", op.TIES)
@pytest.mark.parametrize("kernel", EVERY)
def test_limits_that_are_off_keep_everything_and_no_limit_keeps_nothing(kernel, ties):
    logits = torch.tensor([1.0, 1.0, 0.0, 0.0])
    likeliest = {"all": [0, 1], "first": [0], "last": [1], "open": []}[ties]
    both = {"top_k_ties": ties, "top_p_ties": ties}
    assert kept_by(EVERY[kernel], logits, top_k=0, top_p=1.0, **both) == [0, 1, 2, 3]
    assert kept_by(EVERY[kernel], logits, top_k=9, top_p=1.0, **both) == [0, 1, 2, 3]
    assert kept_by(EVERY[kernel], logits, top_p=0.0, top_p_ties=ties) == likeliest
    assert kept_by(EVERY[kernel], logits, top_k=1, top_k_ties=ties) == likeliest


@pytest.mark.parametrize("kernel", EVERY)
def test_temperature_zero_keeps_all_of_the_largest_and_takes_the_first(kernel):
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    operands = {
        "logits": logits,
        "temperature": torch.zeros(1),
        "top_k": torch.ones(1, dtype=torch.int32),
        "top_p": torch.full((1,), 0.1),
    }
    for random in ({}, {"seeds": torch.ones(1, dtype=torch.int64)}):
        given = {**operands, **random}
        attrs = replace(op.SamplingAttrs.of(given, "ids", torch.float32), top_k_ties="last", top_p_ties="last")
        assert EVERY[kernel](op.Operands(**given), attrs).tolist() == [1]
        found = EVERY[kernel](op.Operands(**given), replace(attrs, result="probs"))
        assert found.tolist() == [[0.0, 0.5, 0.0, 0.5]]


@pytest.mark.parametrize("kernel", EVERY)
def test_without_a_draw_the_first_is_taken_of_what_is_kept(kernel):
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0]])
    for ties, expected in {"all": 1, "first": 1, "last": 3}.items():
        given = {"logits": logits, "top_k": torch.full((1,), 2, dtype=torch.int32)}
        attrs = replace(op.SamplingAttrs.of(given, "ids", torch.float32), top_k_ties=ties)
        assert EVERY[kernel](op.Operands(**given), attrs).tolist() == [expected]
        given = {"logits": logits, "top_p": torch.full((1,), 0.4)}
        attrs = replace(op.SamplingAttrs.of(given, "ids", torch.float32), top_p_ties=ties)
        assert EVERY[kernel](op.Operands(**given), attrs).tolist() == [expected]


@pytest.mark.parametrize("kernel", EVERY)
def test_a_row_is_nan_where_an_open_limit_drops_one_of_several_equals(kernel):
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0], [2.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])

    def rows(**given):
        operands = {"logits": logits, **given}
        attrs = op.SamplingAttrs.of(operands, "scores", torch.float32)
        attrs = replace(attrs, top_k_ties="open", top_p_ties="open" if "top_p" in given else "all")
        found = {
            each: EVERY[kernel](op.Operands(**operands), replace(attrs, result=each)) for each in op.VARIANT_ATTRIBUTES
        }
        is_open = found["ids"] == -1
        for each in ("scores", "probs"):
            assert torch.equal(found[each].isnan(), is_open[:, None].expand(4, 4))
        return is_open.tolist()

    two = torch.tensor([2], dtype=torch.int32)
    assert rows(top_k=two) == [False, True, False, True]
    # The second limit is above the scores that the first one cuts between; and so is the third.
    assert rows(top_k=two, top_p=torch.tensor([0.1])) == [False, False, True, True]
    assert rows(top_k=two, min_p=torch.tensor([0.9])) == [False, False, False, True]


@pytest.mark.slow
def test_a_compiled_kernel_keeps_the_same():
    operands, attrs = problem(6, 100, ("top_p",), ("all", "last"), dtype=torch.bfloat16)

    @torch.compile(fullgraph=True)
    def run(operands):
        return torch_sampling.sampling(op.Operands(**operands), replace(attrs, result="scores"))

    expected = op.reference(op.Operands(**wide(operands)), replace(attrs, result="scores"))
    assert torch.equal(run(operands) > -math.inf, expected > -math.inf)


# ---- rows that are unlike others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(), ("top_k", "top_p", "min_p")], ids=["whole", "limited"])
@pytest.mark.parametrize("kernel", EVERY)
def test_a_temperature_that_is_no_number_makes_no_distribution_of_its_row(kernel, limits):
    names = ("bitmask", "temperature", *limits, "seeds")
    operands, attrs = problem(5, 40, names, ("first", "last"))
    operands["temperature"][3] = math.nan
    probabilities = EVERY[kernel](op.Operands(**operands), replace(attrs, out_dtype=torch.float32))
    assert probabilities.isnan().all(-1).tolist() == [False] * 3 + [True, False]
    tokens = EVERY[kernel](op.Operands(**operands), replace(attrs, result="ids"))
    assert (tokens < 0).tolist() == [False] * 3 + [True, False]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_negative_temperature_turns_the_order_round(kernel, is_masked):
    """Minus infinity becomes plus infinity, of which there is no distribution, unless the mask forbids the token."""
    names = (*(("bitmask",) if is_masked else ()), "temperature", "top_k", "min_p", "seeds")
    operands, attrs = problem(6, 40, names, ("first", "all"), seed=3)
    operands["temperature"] = -operands["temperature"].clamp(min=0.5)
    operands["logits"][4] = (torch.randn(40) * 3).round()
    assert_is_the_definitions(KERNELS[kernel], operands, attrs)
    assert (KERNELS[kernel](op.Operands(**operands), replace(attrs, result="ids")) < 0).any()


@pytest.mark.parametrize("ties", op.TIES)
@pytest.mark.parametrize("kernel", EVERY)
def test_scores_of_minus_infinity_are_neither_kept_nor_counted(kernel, ties):
    logits = torch.full((3, 50), -math.inf)
    logits[0, [3, 20]] = torch.tensor([1.0, 2.0])
    logits[1, [3, 20, 49]] = 0.25
    logits[2, 30:] = torch.arange(20.0)
    for dtype in (torch.float32, torch.bfloat16):
        found = kept_by(EVERY[kernel], logits.to(dtype), top_k=5, top_k_ties=ties)
        assert found == [[3, 20], [3, 20, 49], [45, 46, 47, 48, 49]]
        found = kept_by(EVERY[kernel], logits.to(dtype), top_k=5, top_p=0.9999, top_k_ties=ties, top_p_ties=ties)
        assert found == [[3, 20], [3, 20, 49], [45, 46, 47, 48, 49]]


def test_float64_is_sampled_in_float64():
    logits = torch.ones(1, 9, dtype=torch.float64)
    logits[0, 4] += 1e-14
    logits[0, 6] += 2e-14
    for top_k, expected in ((1, [6]), (2, [4, 6]), (3, [0, 4, 6])):
        assert kept_by(torch_sampling.sampling, logits[0], top_k=top_k, top_k_ties="first") == expected
    given = {"logits": logits, "temperature": torch.full((1,), 0.5), "top_p": torch.full((1,), 0.9999)}
    attrs = replace(op.SamplingAttrs.of(given, "probs", torch.float64), top_p_ties="first")
    found = torch_sampling.sampling(op.Operands(**given), attrs)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, (logits * 2).softmax(-1), rtol=1e-14, atol=0)
    spec = registry.kernels("sampling")["lz.cpp_sampling"]
    assert "float64" not in {str(dtype).removeprefix("torch.") for dtype in spec.dtypes}


# ---- for selection ---------------------------------------------------------------------------------------------------


def test_ties_are_asked_of_a_kernel_where_a_limit_breaks_them():
    facts = op.SamplingFacts(4, 100, torch.float32, "cpu")

    def asked(**given):
        return "ties" in op.features(op.SamplingAttrs(**given), facts)

    assert not asked(has_top_k=True, has_top_p=True)
    assert not asked(top_k_ties="first", top_p_ties="last")
    assert not asked(has_top_k=True, top_p_ties="last")
    assert asked(has_top_k=True, top_k_ties="first")
    assert asked(has_top_k=True, has_top_p=True, top_p_ties="last")


def test_kernels_of_our_own_say_that_they_break_ties():
    kernels = registry.kernels("sampling")
    assert all({"ties", "*"} & set(kernels[name].supports) for name in (*KERNELS, "lz.triton_sampling"))


def test_ties_go_to_operators_with_the_other_attributes():
    attrs = op.SamplingAttrs(has_top_k=True, top_k_ties="first", top_p_ties="last")
    assert decode(op.SamplingAttrs, encode(attrs)) == attrs
