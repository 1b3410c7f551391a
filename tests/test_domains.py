"""Fusing the opinions of constraint domains about a token: sets, distributions, relaxation, refusals."""

from __future__ import annotations

import logging
import math
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lz_compile as lz
from lz_compile.domains import (
    Domain,
    DomainMask,
    DomainScore,
    FusionConfig,
    GenerationPhase,
    IntensityLevel,
    active_domains,
    fuse,
    intersect,
    mask,
    parse_config_json,
    serialize_config_json,
    soft_adjustments,
)
from lz_compile.domains.mask import ids_of, pack, unpack
from lz_compile.errors import ConfigError, ConstraintError
from lz_compile.ground import events

HARD = (Domain.SYNTAX, Domain.TYPES, Domain.IMPORTS)
FLAT = DomainScore(Domain.SEMANTICS, torch.zeros(4))
WORD = torch.tensor([5], dtype=torch.int32)
SOFT = (Domain.CONTROL_FLOW, Domain.SEMANTICS)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FULL = FusionConfig(intensity=IntensityLevel.FULL)


@st.composite
def vocabularies(draw, domains=HARD):
    """A vocabulary's size and a set of allowed tokens for each domain."""
    size = draw(st.integers(1, 300))
    tokens = st.sets(st.integers(0, size - 1), max_size=size)
    return size, {domain: draw(tokens) for domain in domains}


def masks_of(size, allowed):
    return [DomainMask.from_ids(domain, sorted(ids), size) for domain, ids in allowed.items()]


@given(vocabularies())
def test_an_intersection_is_that_of_the_sets_in_every_order(problem):
    size, allowed = problem
    wanted = set.intersection(*allowed.values())
    for masks in permutations(masks_of(size, allowed)):
        assert set(ids_of(intersect(masks), size).tolist()) == wanted


@given(st.integers(1, 400).flatmap(lambda size: st.lists(st.booleans(), min_size=size, max_size=size)))
def test_ids_bits_and_booleans_are_the_same_mask(allowed):
    flags = torch.tensor(allowed)
    own = DomainMask.from_bools(Domain.SYNTAX, flags)
    wanted = [token for token, is_allowed in enumerate(allowed) if is_allowed]
    assert own.ids.tolist() == wanted
    assert [token for token in range(-1, len(allowed) + 1) if token in own] == wanted
    assert torch.equal(DomainMask.from_ids(Domain.SYNTAX, wanted, len(allowed)).words, own.words)
    assert torch.equal(unpack(pack(flags), len(allowed)), flags)
    assert own.count == len(wanted)


@pytest.fixture(params=["compiler", "none"])
def compiler(request, monkeypatch):
    """With C++, and with PyTorch's operations in its place."""

    def fails(*_):
        raise RuntimeError("no compiler")

    mask.has_compiler.cache_clear()
    with monkeypatch.context() as patched:
        if request.param == "none":
            patched.setattr("lz_compile.lowering.cpp.bits._library", fails)
        yield request.param
    mask.has_compiler.cache_clear()


def test_what_runs_without_a_compiler_says_so(compiler):
    words = pack(torch.arange(70) % 3 == 0)
    with events.collect() as found:
        assert ids_of(words, 70).tolist() == list(range(0, 70, 3))
    assert [event.code for event in found] == ([] if compiler == "compiler" else ["NO_COMPILER"])


def test_bits_beyond_the_vocabulary_are_ignored_and_the_callers_tensor_is_not_written(compiler):
    words = torch.tensor([-1, -1], dtype=torch.int32)
    own = DomainMask.from_bitmask(Domain.SYNTAX, words, 40)
    assert own.words is words
    assert own.ids.tolist() == list(range(40))
    assert own.count == 40
    result = fuse([own])
    assert result.words.tolist() == [-1, 255]
    assert (result.feasible_tokens.tolist(), result.count) == (list(range(40)), 40)
    words[0], words[1] = 0, -256  # the engine fills its tensor again, with nothing but bits beyond the vocabulary
    assert fuse([own], may_relax=False).required_relaxation
    assert (own.ids.tolist(), own.count) == ([], 0)
    assert result.feasible_tokens.tolist() == list(range(40))
    assert words.tolist() == [0, -256]


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000])
def test_words_are_intersected_and_counted_alike_with_and_without_a_compiler(compiler, number, size):
    generator = torch.Generator().manual_seed(number)
    columns = torch.randint(-(2**31), 2**31, (-(-size // 32), 3), generator=generator, dtype=torch.int32)
    columns = [columns[:, i % 3] | (1 << i) for i in range(number)]  # not contiguous
    masks = [DomainMask(domain, size, words) for domain, words in zip(HARD * 2, columns, strict=False)]
    wanted = torch.stack([unpack(words, size) for words in columns]).all(0)
    words, count = mask.feasible(masks)
    assert torch.equal(words, pack(wanted))
    assert count == int(wanted.sum())
    assert torch.equal(intersect(masks), words)
    if number == 1:
        assert torch.equal(masks[0].ids, wanted.nonzero().flatten().int())


@settings(max_examples=60)
@given(vocabularies(), st.randoms(use_true_random=False))
def test_the_distribution_is_the_conditional_one_and_scores_shift_log_odds(problem, random):
    size, allowed = problem
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    feasible = set.intersection(*allowed.values())
    if not feasible:
        return
    logits = torch.randn(size, dtype=torch.float64, generator=generator) * 5
    scores = [
        DomainScore(domain, torch.rand(size, generator=generator) * 2 - 1, weight=weight)
        for domain, weight in ((Domain.CONTROL_FLOW, 0.5), (Domain.SEMANTICS, 2.0))
    ]
    config = FusionConfig(IntensityLevel.FULL, control_flow_weight=3.0, semantics_weight=0.25, soft_temperature=0.7)
    for given_masks in permutations(masks_of(size, allowed)):
        result = fuse(given_masks, scores, config)
        assert not result.required_relaxation
        found = torch.softmax(result.apply(logits), -1)
        shift = (3.0 * 0.5 * scores[0].scores.double() + 0.25 * 2.0 * scores[1].scores.double()) / 0.7
        weights = torch.softmax(logits + shift, -1)
        inside = torch.tensor([token in feasible for token in range(size)])
        wanted = torch.where(inside, weights, 0.0) / weights[inside].sum()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert set(result.feasible_tokens.tolist()) == feasible


def test_masks_are_not_applied_one_after_another():
    """With scores in between, masking and renormalising in turn gives another distribution; one intersection does not."""
    size = 6
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 3.0], dtype=torch.float64)
    allowed = {Domain.SYNTAX: {0, 1, 2, 3}, Domain.TYPES: {1, 2, 3, 4}}
    scores = DomainScore(Domain.SEMANTICS, torch.tensor([0.5, -1.0, 1.0, 0.0, 1.0, 1.0]))
    result = fuse(masks_of(size, allowed), [scores], FULL)
    found = torch.softmax(result.apply(logits), -1)
    in_turn = torch.softmax(logits, -1)
    for ids in allowed.values():  # what the source warns of: every step renormalises and multiplies by the scores again
        kept = torch.tensor([token in ids for token in range(size)])
        in_turn = torch.where(kept, in_turn * scores.scores.double().exp(), 0.0)
        in_turn = in_turn / in_turn.sum()
    exact = torch.tensor([0, 1, 1, 1, 0, 0]) * torch.softmax(logits + scores.scores.double(), -1)
    torch.testing.assert_close(found, exact / exact.sum(), rtol=1e-12, atol=0)
    assert (in_turn - found).abs().max() > 0.05


def test_a_score_never_brings_a_token_back():
    masks = masks_of(4, {Domain.SYNTAX: {0, 1}})
    result = fuse(masks, [DomainScore(Domain.SEMANTICS, torch.tensor([-1.0, 0.0, 1.0, 1.0]), weight=1e6)], FULL)
    assert torch.softmax(result.apply(torch.zeros(4)), -1)[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("syntax", "types", "imports", "relaxed", "tokens"),
    [
        ({0, 1}, {1, 2}, {1, 3}, (), {1}),
        ({0, 1}, {1, 2}, {3}, (Domain.IMPORTS,), {1}),
        ({0, 1}, {2}, {3}, (Domain.IMPORTS, Domain.TYPES), {0, 1}),
        (set(), {2}, {2}, (Domain.IMPORTS, Domain.TYPES, Domain.SYNTAX), {0, 1, 2, 3}),
    ],
)
def test_empty_sets_walk_the_cascade(syntax, types, imports, relaxed, tokens):
    masks = masks_of(4, {Domain.SYNTAX: syntax, Domain.TYPES: types, Domain.IMPORTS: imports})
    with events.collect() as found:
        result = fuse(masks, config=FULL)
    assert (result.relaxed, set(result.feasible_tokens.tolist())) == (relaxed, tokens)
    assert result.required_relaxation == bool(relaxed)
    codes = [event.code for event in found]
    assert codes == ([] if not relaxed else ["GRAMMAR_BUG" if Domain.SYNTAX in relaxed else "DOMAINS_RELAXED"])


def test_a_grammar_that_allows_nothing_is_critical(caplog):
    with caplog.at_level(logging.CRITICAL, "lz_compile"):
        fuse(masks_of(4, {Domain.SYNTAX: set()}))
    assert "no token passes SYNTAX alone: the grammar (or its parser) has a bug" in caplog.text


def test_a_declined_relaxation_is_an_empty_result_that_cannot_be_applied():
    result = fuse(masks_of(4, {Domain.SYNTAX: {0}, Domain.TYPES: {1}}), may_relax=False)
    assert (result.required_relaxation, result.relaxed, result.feasible_tokens.numel()) == (True, (), 0)
    with pytest.raises(ConstraintError, match="no token is feasible"):
        result.apply(torch.zeros(4))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("soft", [False, True])
def test_logits_without_a_distribution_are_refused_by_their_row(number, soft, compiler):
    scores = [DomainScore(Domain.SEMANTICS, torch.zeros(4))] if soft else []
    result = fuse(masks_of(4, {Domain.SYNTAX: {0, 1}}), scores, FULL)
    logits = torch.tensor([[0.0, 1.0, number, 0.0], [number, 0.0, 0.0, 0.0], [-math.inf, -math.inf, 0.0, 0.0]])
    assert torch.softmax(result.apply(logits[:1]), -1).isfinite().all()  # what is masked may be anything
    with pytest.raises(ConstraintError, match="NaN, plus infinity or nothing else than minus infinity in row 1, 2"):
        result.apply(logits)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("size", [1, 31, 32, 70])
def test_logits_of_any_shape_are_kept_and_adjusted(dtype, soft, compiler, size):
    allowed = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    allowed[-1] = True
    scores = torch.linspace(-1, 1, size).to(torch.bfloat16)
    own = [DomainMask.from_bools(Domain.SYNTAX, allowed)]
    result = fuse(own, [DomainScore(Domain.SEMANTICS, scores, 3.0)] if soft else [], FULL)
    for logits in (torch.randn(size), torch.randn(2, 3, size), torch.randn(size, 4).T, torch.randn(3, size)[::2]):
        given = (logits * 5).to(dtype)
        kept = given.clone()
        exact = (given.double() + 3 * scores.double() * soft).masked_fill(~allowed, -math.inf)
        torch.testing.assert_close(result.apply(given), exact.to(dtype), rtol=1e-6, atol=1e-6)  # rounded once
        assert torch.equal(given, kept)


@pytest.mark.parametrize("dtypes", [(each,) for each in FLOATS] + [(FLOATS[0], FLOATS[1]), (FLOATS[2], FLOATS[3])])
def test_scores_of_all_dtypes_are_summed_in_float64(dtypes, compiler):
    generator = torch.Generator().manual_seed(0)
    columns = [(torch.rand(90, 2, generator=generator) * 2 - 1).to(dtype)[:, 0] for dtype in dtypes]  # not contiguous
    soft = [DomainScore(domain, scores, 1e4) for domain, scores in zip(SOFT, columns, strict=False)]
    tokens = torch.randperm(90, generator=generator)[:33]
    config = FusionConfig(IntensityLevel.FULL, control_flow_weight=-1.0, semantics_weight=1.0001, soft_temperature=0.5)
    exact = sum(f * each[tokens].double() for f, each in zip((-1.0, 1.0001), columns, strict=False)) * 1e4 / 0.5
    for ids in (tokens, tokens.int()):
        torch.testing.assert_close(soft_adjustments(ids, soft, config), exact.float(), rtol=2e-7, atol=1e-9)
    assert soft_adjustments(tokens, [], config).tolist() == [0.0] * 33


@pytest.mark.parametrize("soft", [False, True])
def test_gradients_flow_to_feasible_logits_alone(soft):
    scores = [DomainScore(Domain.SEMANTICS, torch.ones(4))] if soft else []
    result = fuse(masks_of(4, {Domain.SYNTAX: {0, 2}}), scores, FULL)
    logits = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.softmax(result.apply(logits), -1)[:, 0].sum(), logits)
    assert (gradient != 0).tolist() == [[True, False, True, False]] * 3


def test_a_result_is_what_the_masks_and_scores_were_when_they_were_fused():
    words, scores = torch.tensor([7], dtype=torch.int32), torch.ones(4)
    plain = fuse([DomainMask(Domain.SYNTAX, 4, words)])
    scored = fuse([DomainMask(Domain.SYNTAX, 4, words)], [DomainScore(Domain.SEMANTICS, scores)], FULL)
    words.fill_(8)
    scores.fill_(-1)
    assert plain.feasible_tokens.tolist() == scored.feasible_tokens.tolist() == [0, 1, 2]
    assert (plain.logit_adjustments.tolist(), scored.logit_adjustments.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert plain.logit_adjustments.dtype == scored.logit_adjustments.dtype == torch.float32


@given(vocabularies(), st.sampled_from([IntensityLevel.FULL, IntensityLevel.EXHAUSTIVE]))
def test_arrays_are_parallel_and_exhaustive_is_full_with_another_budget(problem, level):
    size, allowed = problem
    scores = [DomainScore(domain, torch.linspace(-1, 1, size)) for domain in SOFT]
    config = FusionConfig(level, control_flow_weight=0.5, semantics_weight=-2.0, soft_temperature=0.25)
    result = fuse(masks_of(size, allowed), scores, config)
    assert result.feasible_tokens.shape == result.logit_adjustments.shape == (result.count,)
    wanted = (0.5 - 2.0) / 0.25 * torch.linspace(-1, 1, size)[result.feasible_tokens.long()]
    torch.testing.assert_close(result.logit_adjustments, wanted, rtol=1e-6, atol=1e-6)
    assert result.active_domains == frozenset(Domain)
    assert result.budget_us == {IntensityLevel.FULL: 2_000, IntensityLevel.EXHAUSTIVE: 5_000}[level]


@given(vocabularies(), st.permutations(HARD), st.randoms(use_true_random=False))
def test_the_order_of_domains_changes_nothing_at_all(problem, order, random):
    size, allowed = problem
    masks = dict(zip(allowed, masks_of(size, allowed), strict=True))
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    scores = [DomainScore(each, torch.rand(size, generator=generator)) for each in SOFT]
    first = fuse(list(masks.values()), scores, FULL)
    other = fuse([masks[domain] for domain in order], scores[::-1], FULL)
    assert torch.equal(first.words, other.words)
    assert torch.equal(first.logit_adjustments, other.logit_adjustments)
    assert first.relaxed == other.relaxed


def test_a_fused_draw_is_distributed_as_the_conditional_distribution():
    """Two masks and two scores at once, drawn: chi-square against p(x | x in G), beside which masking in turn fails."""
    generator = torch.Generator().manual_seed(5)
    size, rows = 40, 20_000
    logits = torch.randn(size, generator=generator, dtype=torch.float64) * 2
    allowed = {domain: set(torch.randperm(size, generator=generator)[:25].tolist()) for domain in HARD[:2]}
    scores = [DomainScore(each, torch.rand(size, generator=generator) * 2 - 1) for each in SOFT]
    result = fuse(masks_of(size, allowed), scores, FULL)
    tokens = lz.sample(result.apply(logits).expand(rows, -1), seeds=99)
    inside = torch.tensor([token in set.intersection(*allowed.values()) for token in range(size)])
    total = scores[0].scores.double() + scores[1].scores.double()
    exact = torch.where(inside, (logits + total).exp(), 0.0)
    exact = exact / exact.sum()
    in_turn = torch.where(inside, (logits + 2 * total).exp(), 0.0)  # scores applied once for each mask
    in_turn = in_turn / in_turn.sum()
    assert chi_square(tokens, exact) < 6
    assert chi_square(tokens, in_turn) > 20


def chi_square(tokens, probabilities):
    """How many standard deviations the counts are off, over tokens that are expected five times."""
    counts = torch.bincount(tokens.long(), minlength=probabilities.numel()).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    usual = expected >= 5
    freedom = int(usual.sum()) - 1
    return float((((counts - expected)[usual] ** 2 / expected[usual]).sum() - freedom) / math.sqrt(2 * freedom))


def test_whole_batches_are_fused_as_single_rows_are():
    """``lz.domain_fusion`` with a configuration's weights is ``fuse`` and ``apply``."""
    size, generator = 70, torch.Generator().manual_seed(0)
    masks = [DomainMask.from_bools(domain, torch.rand(size, generator=generator) < 0.8) for domain in HARD]
    scores = [
        DomainScore(Domain.CONTROL_FLOW, torch.rand(size, generator=generator).to(torch.bfloat16), 0.3),
        DomainScore(Domain.SEMANTICS, -torch.rand(size, generator=generator), 7.0),
    ]
    config = FusionConfig(IntensityLevel.FULL, control_flow_weight=3.0, semantics_weight=0.2, soft_temperature=0.6)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, size, generator=generator).to(dtype)
        found = lz.domain_fusion(logits, masks, scores, [3.0, 0.2], temperature=0.6)
        wanted = fuse(masks, scores, config).apply(logits)
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(found.isinf(), wanted.isinf())


@pytest.mark.parametrize("intensity", IntensityLevel)
@pytest.mark.parametrize("phase", [*GenerationPhase, None])
def test_reasoning_is_left_to_syntax_and_what_is_uncertain_is_structured(intensity, phase):
    active = active_domains(intensity, phase)
    if phase is GenerationPhase.REASONING:
        assert active == intensity.active & {Domain.SYNTAX}
    else:
        assert active == intensity.active
    assert active_domains(intensity, phase, is_adaptive=False) == intensity.active


def test_levels_ask_ever_more_domains_within_ever_larger_budgets():
    levels = list(IntensityLevel)
    assert [level.budget_us for level in levels] == [0, 50, 200, 500, 2_000, 5_000]
    assert [len(level.active) for level in levels] == [0, 1, 2, 3, 5, 5]
    for fewer, more in pairwise(levels):
        assert fewer.active <= more.active


def test_domains_that_are_not_active_are_not_asked():
    masks = masks_of(4, {Domain.SYNTAX: {0, 1}, Domain.TYPES: {1}, Domain.IMPORTS: set()})
    result = fuse(masks, [DomainScore(Domain.SEMANTICS, torch.ones(4))])
    assert result.feasible_tokens.tolist() == [1]
    assert result.logit_adjustments.tolist() == [0.0]
    reasoning = fuse(masks, phase=GenerationPhase.REASONING)
    assert (reasoning.feasible_tokens.tolist(), reasoning.active_domains) == ([0, 1], {Domain.SYNTAX})
    nothing = fuse((), config=FusionConfig(IntensityLevel.NONE), vocab_size=3)
    assert (nothing.feasible_tokens.tolist(), nothing.required_relaxation) == ([0, 1, 2], False)
    assert fuse(masks).budget_us == 200
    assert fuse(masks).elapsed_us > 0


@given(
    st.builds(
        FusionConfig,
        st.sampled_from(IntensityLevel),
        st.floats(-10, 10),
        st.floats(-10, 10),
        st.booleans(),
        st.floats(0.01, 10),
    )
)
def test_a_configuration_survives_json(config):
    assert parse_config_json(serialize_config_json(config)) == config


def test_json_names_fields_as_the_source_does():
    wanted = (
        '{"intensity":"standard","control_flow_weight":1.0,"semantics_weight":1.0,'
        '"adaptive_switching":true,"soft_temperature":1.0}'
    )
    assert serialize_config_json(FusionConfig()) == wanted
    assert parse_config_json("{}") == FusionConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "reading a fusion configuration"),
        ("[]", "reading a fusion configuration"),
        ("null", "Expected `object`, got `null`"),
        (b"\xff", "JSON is malformed"),
        ("\ud800", "surrogates not allowed"),
        ('{"soft_temperature": 1e400}', "Number out of range"),
        ('{"adaptive_switching": 1}', "Expected `bool`, got `int`"),
        ('{"intensty": "full"}', "unknown field intensty"),
        ('{"intensity": "huge"}', "Invalid enum value 'huge'"),
        ('{"soft_temperature": 0}', "soft_temperature above 0"),
        ('{"semantics_weight": "1"}', "Expected `float`"),
    ],
)
def test_json_that_is_wrong_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_config_json(text)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [2, 1], 4), "ascending token ids"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [1, 1], 4), "ascending token ids"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [4], 4), r"token ids within 0\.\.3"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [-1], 4), r"token ids within 0\.\.3"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [1, 9, 2], 4), "ascending token ids"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [], 0), "a vocabulary of at least one token"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [1], 2**31), "at most 2147483647, got 2147483648"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [2**31 + 1], 4), r"token ids within 0\.\.3, got 2147483649"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [2**64], 4), "what is none"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, ["a"], 4), "what is none"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [1.5], 4), "integer token ids, got torch.float32"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [False, True], 4), "for booleans there is from_bools"),
        (lambda: DomainMask.from_ids(Domain.SYNTAX, [[1]], 4), "a flat list of token ids"),
        (lambda: DomainMask.from_ids(Domain.SEMANTICS, [1], 4), "it is a soft domain"),
        (lambda: DomainMask(Domain.SEMANTICS, 4, WORD), "it is a soft domain"),
        (lambda: DomainMask(Domain.SYNTAX, 4, WORD.long()), "int32 words of shape"),
        (lambda: DomainMask(Domain.SYNTAX, 4, [1]), "int32 words of shape .* got list"),
        (lambda: DomainMask(Domain.SYNTAX, 64, WORD), "int32 words of shape"),
        (lambda: DomainMask.from_bitmask(Domain.TYPES, torch.zeros(2), 40), "int32 words of shape"),
        (lambda: DomainMask.from_bitmask(Domain.TYPES, torch.zeros(1, dtype=torch.int32), 40), "int32 words of shape"),
        (lambda: DomainMask.from_bools(Domain.TYPES, torch.zeros(3)), "a flat boolean tensor"),
        (lambda: DomainScore(Domain.TYPES, torch.zeros(3)), "it is a hard domain"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.tensor([0.0, 1.5])), "scores from -1 to 1, got 0 to 1.5"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.tensor([0.0, float("nan")])), "scores from -1 to 1, got nan"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.zeros(0)), "expected floating-point scores"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.zeros(2), weight=float("inf")), "expected a finite weight"),
        (lambda: DomainScore(Domain.SEMANTICS, [0.0]), "expected a tensor of scores, got list"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.zeros(2).long()), "expected floating-point scores"),
        (lambda: FusionConfig("full"), "expected one of IntensityLevel.NONE"),
        (lambda: FusionConfig(control_flow_weight=float("nan")), "finite control_flow_weight"),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}}) * 2), "two of SYNTAX"),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}}), vocab_size=5), "SYNTAX mask 4, vocab_size 5"),
        (lambda: fuse((), config=FusionConfig(IntensityLevel.NONE), vocab_size=0), "vocab_size 0"),
        (lambda: fuse([DomainScore(Domain.SEMANTICS, torch.zeros(4))]), "expected a DomainMask, got DomainScore"),
        (lambda: fuse([], masks_of(4, {Domain.SYNTAX: {1}})), "expected a DomainScore, got DomainMask"),
        (lambda: fuse([WORD]), "expected a DomainMask, got Tensor"),
        (
            lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}}), phase="reasoning"),
            "a GenerationPhase or None, got 'reasoning'",
        ),
        (
            lambda: fuse([], [DomainScore(Domain.SEMANTICS, torch.zeros(4), 1e300)], FULL),
            "finite in float32, got SEMANTICS 1e\\+300",
        ),
        (
            lambda: intersect([DomainMask(Domain.SYNTAX, 4, WORD), DomainMask(Domain.TYPES, 4, WORD.to("meta"))]),
            "expected one device, got SYNTAX on cpu, TYPES on meta",
        ),
        (lambda: soft_adjustments(torch.tensor([3, 4]), [FLAT], FULL), r"4 scores, tokens 3\.\.4"),
        (lambda: soft_adjustments(torch.tensor([-1, 2]), [FLAT], FULL), r"4 scores, tokens -1\.\.2"),
        (lambda: fuse(()), "nothing that says its size"),
        (lambda: intersect(()), "expected at least one"),
        (
            lambda: intersect([*masks_of(4, {Domain.SYNTAX: {1}}), *masks_of(5, {Domain.TYPES: {1}})]),
            "SYNTAX 4, TYPES 5",
        ),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}})).apply(torch.zeros(4).long()), "got torch.int64"),
        (lambda: fuse(masks_of(1, {Domain.SYNTAX: {0}})).apply(torch.tensor(1.0)), r"of shape \[\]"),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}})).apply(torch.zeros(3)), "floating-point logits of 4 tokens"),
    ],
)
def test_what_contradicts_itself_is_refused(build, message):
    with pytest.raises((ConstraintError, ConfigError), match=message):
        build()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m, s: lz.domain_fusion(x[:, :30], [m]), "a mask of 30 tokens, received one of 31 for SYNTAX"),
        (lambda x, m, s: lz.domain_fusion(x, [s]), "a tensor or a DomainMask, received DomainScore"),
        (lambda x, m, s: lz.domain_fusion(x, [], [m]), "a tensor or a DomainScore, received DomainMask"),
        (lambda x, m, s: lz.domain_fusion(x, [[1]]), "a tensor or a DomainMask, received list"),
        (lambda x, m, s: lz.domain_fusion(x, [m, m]), "one opinion of each domain, received two of SYNTAX"),
        (lambda x, m, s: lz.domain_fusion(x, [m], [s, s]), "one opinion of each domain, received two of SEMANTICS"),
        (lambda x, m, s: lz.domain_fusion(x, [], [s], [math.nan]), "weights as a finite number .*, received nan"),
        (
            lambda x, m, s: lz.domain_fusion(x, [], [s], torch.ones(1, 31)),
            r"weights \[S\], received \(1, 31\)",
        ),
        (
            lambda x, m, s: lz.domain_fusion(x, [], [s], temperature=torch.ones(31)),
            "expected temperature as a number, received a tensor of shape",
        ),
        (
            lambda x, m, s: lz.domain_fusion(x, [], [s], temperature=torch.tensor(-1.0)),
            "temperature as a finite number above 0, .*received",
        ),
        (
            lambda x, m, s: lz.domain_fusion(x, [], [s], [1e30], 1e-30),
            "weights / temperature as a finite number from -3.4",
        ),
        (lambda x, m, s: lz.domain_fusion(x, [], [s.scores[:30]]), r"soft with scores of 31 tokens, received \[30\]"),
    ],
)
def test_a_fusion_of_whole_batches_that_contradicts_itself_is_refused(call, message):
    mask, scores = DomainMask.from_ids(Domain.SYNTAX, [1], 31), DomainScore(Domain.SEMANTICS, torch.zeros(31))
    with pytest.raises(ConstraintError, match=message):
        call(torch.randn(2, 31), mask, scores)


def test_a_fusion_compiles_with_domains_as_arguments():
    size = 70
    own = [DomainMask.from_bools(domain, torch.arange(size) % k > 0) for domain, k in zip(HARD, (2, 3, 5), strict=True)]
    scores = [DomainScore(Domain.SEMANTICS, torch.linspace(-1, 1, size), 2.0)]

    def step(logits, weight, temperature):
        return lz.domain_fusion(logits, own, scores, [weight], temperature)

    logits, compiled = torch.randn(4, size), torch.compile(step, backend="aot_eager", fullgraph=True)
    for weight, temperature in ((0.5, 0.7), (0.25, 1.5), (torch.tensor(2.0), torch.tensor(0.5))):
        found = compiled(logits, weight, temperature)
        torch.testing.assert_close(found, step(logits, weight, temperature))
