"""Fusing the opinions of constraint domains about a token: sets, distributions, relaxation, refusals."""

from __future__ import annotations

import logging
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from lz_compile.domains.mask import ids_of, pack, unpack
from lz_compile.errors import ConfigError, ConstraintError
from lz_compile.runtime import events

HARD = (Domain.SYNTAX, Domain.TYPES, Domain.IMPORTS)
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


def test_tokens_are_listed_without_a_compiler(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler")

    words = pack(torch.arange(70) % 3 == 0)
    monkeypatch.setattr("lz_compile.lowering.cpp.bits.set_bits", fails)
    mask._has_compiler.cache_clear()
    with events.collect() as found:
        assert ids_of(words, 70).tolist() == list(range(0, 70, 3))
    assert [event.code for event in found] == ["NO_COMPILER"]
    mask._has_compiler.cache_clear()


def test_bits_beyond_the_vocabulary_are_ignored_and_the_callers_tensor_is_not_written():
    words = torch.tensor([-1, -1], dtype=torch.int32)
    own = DomainMask.from_bitmask(Domain.SYNTAX, words, 40)
    assert own.ids.tolist() == list(range(40))
    assert words.tolist() == [-1, -1]
    whole = torch.tensor([-1, 255], dtype=torch.int32)
    assert DomainMask.from_bitmask(Domain.SYNTAX, whole, 40).words is whole


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
        (lambda: DomainMask.from_ids(Domain.SEMANTICS, [1], 4), "it is a soft domain"),
        (lambda: DomainMask.from_bitmask(Domain.TYPES, torch.zeros(2), 40), "int32 words of shape"),
        (lambda: DomainMask.from_bitmask(Domain.TYPES, torch.zeros(1, dtype=torch.int32), 40), "int32 words of shape"),
        (lambda: DomainMask.from_bools(Domain.TYPES, torch.zeros(3)), "a flat boolean tensor"),
        (lambda: DomainScore(Domain.TYPES, torch.zeros(3)), "it is a hard domain"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.tensor([0.0, 1.5])), "scores from -1 to 1, got 0 to 1.5"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.tensor([0.0, float("nan")])), "scores from -1 to 1, got nan"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.zeros(0)), "expected floating-point scores"),
        (lambda: DomainScore(Domain.SEMANTICS, torch.zeros(2), weight=float("inf")), "expected a finite weight"),
        (lambda: FusionConfig(control_flow_weight=float("nan")), "finite control_flow_weight"),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}}) * 2), "two of SYNTAX"),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}}), vocab_size=5), "SYNTAX mask 4, vocab_size 5"),
        (lambda: fuse(()), "nothing that says its size"),
        (lambda: intersect(()), "expected at least one"),
        (
            lambda: intersect([*masks_of(4, {Domain.SYNTAX: {1}}), *masks_of(5, {Domain.TYPES: {1}})]),
            "SYNTAX 4, TYPES 5",
        ),
        (lambda: fuse(masks_of(4, {Domain.SYNTAX: {1}})).apply(torch.zeros(3)), "expected 4 tokens"),
    ],
)
def test_what_contradicts_itself_is_refused(build, message):
    with pytest.raises((ConstraintError, ConfigError), match=message):
        build()
