"""Phases of a generation by the markers in its text: examples, independence of pieces, an oracle, what is refused."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lz_compile.domains import (
    THINKING,
    Domain,
    DomainMask,
    FusionConfig,
    GenerationPhase,
    IntensityLevel,
    PhaseDetector,
    PhaseMarkers,
    fuse,
)
from lz_compile.errors import ConfigError

REASONING, STRUCTURED, TRANSITION = (
    GenerationPhase.REASONING,
    GenerationPhase.STRUCTURED_OUTPUT,
    GenerationPhase.TRANSITION,
)
ANSWER = PhaseMarkers("<<", ">>", STRUCTURED)
#: Letters that make up markers, fences and what looks like them.
PARTS = ("<think>", "</think>", "<thi", "nk>", "<", "/", ">>", "<<", "`", "``", "```", "````", "\n", " ", "json", "a")
texts = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)
detectors = st.builds(
    PhaseDetector,
    st.sampled_from([(), (THINKING,), (ANSWER,), (PhaseMarkers("[", "]", REASONING), ANSWER)]),
    fences=st.booleans(),
    outside=st.sampled_from([REASONING, STRUCTURED]),
)


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("", STRUCTURED),
        ("plain text", STRUCTURED),
        ("<thin", TRANSITION),
        ("<thin air", STRUCTURED),
        ("<think>", REASONING),
        ("<think>a < b", REASONING),
        ("<think>a <", TRANSITION),
        ("<think>so</thi", TRANSITION),
        ("<think>so</think>", STRUCTURED),
        ("<think>`x` and ``y``", TRANSITION),
        ("<think>`x` and ``y`` ", REASONING),
        ("<think>use ```json", TRANSITION),
        ("<think>use ```json\n{", STRUCTURED),
        ("<think>use ```json\n{}\n```", TRANSITION),
        ("<think>use ```json\n{}\n```\n", REASONING),
        ("<think>use ```json\n{}\n```</think>", STRUCTURED),
        ("<think>use ```x``` inline", REASONING),
        ("<think>````md\n```\nstill code\n```\n", STRUCTURED),
        ("<think>````md\n```\n`````  \n", REASONING),
        ('<think>```py\ns = "```"\n', STRUCTURED),
        ("<think>```py\n    ```\n", STRUCTURED),
        ("<think>```py\n   ```\n", REASONING),
        ("<think>```py\n``` x\n", STRUCTURED),
        ("<think>```py\r\nx\r\n```\r\n", REASONING),
        ("<think>```py\n<think>\n", STRUCTURED),
        ("```py\n<think>\n```\n", STRUCTURED),
        ("<think>```never closed\n</think>", STRUCTURED),
        ("<think>one<think>two</think>", STRUCTURED),
    ],
)
def test_a_text_ends_in_its_phase(text, phase):
    assert PhaseDetector().feed(text) is phase


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("let me see", REASONING),
        ("so <", TRANSITION),
        ("so <<", STRUCTURED),
        ("so <<4 > 3", STRUCTURED),
        ("so <<4>", TRANSITION),
        ("so <<4>> ", REASONING),
        ("so <<`", STRUCTURED),
        ("```json\n", STRUCTURED),
        ("```json\n<<\n```\n", REASONING),
    ],
)
def test_models_that_think_aloud_are_constrained_within_markers(text, phase):
    assert PhaseDetector([ANSWER], outside=REASONING).feed(text) is phase


@given(detectors, texts, st.lists(st.integers(0, 60), max_size=8))
def test_the_phase_after_a_text_does_not_depend_on_its_pieces(detector, text, cuts):
    ends = sorted(min(cut, len(text)) for cut in cuts)
    found = [detector.feed(text[start:end]) for start, end in pairwise([0, *ends])]
    for end, phase in zip(ends, found, strict=True):
        detector.reset()
        assert detector.feed(text[:end]) is phase
        assert detector.phase is phase


def read_at_once(text, markers, outside):
    """The phase after a whole text without fences, by a regular expression, and whether a marker may be under way."""
    stack, place = [], 0
    while True:
        may_begin = not stack or stack[-1].phase is REASONING
        wanted = {each.end: number for number, each in reversed(list(enumerate(stack)))}
        begins = {each.begin: each for each in markers} if may_begin else {}
        found = re.compile("|".join(map(re.escape, [*wanted, *begins])) or "(?!)").search(text, place)
        if found is None:
            rest = text[place:]
            under_way = any(rest.endswith(each[:k]) for each in [*wanted, *begins] for k in range(1, len(each)))
            return TRANSITION if under_way else stack[-1].phase if stack else outside
        place = found.end()
        if found[0] in wanted:
            del stack[wanted[found[0]] :]
        else:
            stack.append(begins[found[0]])


@given(texts, st.sampled_from([(THINKING,), (ANSWER,)]), st.sampled_from([REASONING, STRUCTURED]))
def test_markers_are_read_as_a_regular_expression_finds_them(text, markers, outside):
    found = PhaseDetector(markers, fences=False, outside=outside).feed(text)
    assert found is read_at_once(text, markers, outside)


@given(texts.filter(lambda text: "<think>" not in text))
def test_nothing_is_reasoning_before_a_marker_says_so(text):
    assert PhaseDetector().feed(text) is not REASONING


@given(texts.filter(lambda text: "</think>" not in text), texts)
def test_the_end_of_reasoning_is_never_overlooked(thoughts, rest):
    detector = PhaseDetector()
    detector.feed("<think>" + thoughts + "</think>")
    assert detector.phase is STRUCTURED
    fresh = PhaseDetector()
    assert detector.feed(rest) is fresh.feed(rest)


def test_a_phase_decides_which_domains_are_asked():
    masks = [DomainMask.from_ids(Domain.SYNTAX, [0, 1], 4), DomainMask.from_ids(Domain.TYPES, [1, 2], 4)]
    detector, config = PhaseDetector(), FusionConfig(IntensityLevel.STANDARD)
    found = [
        fuse(masks, config=config, phase=detector.feed(piece)).feasible_tokens.tolist()
        for piece in ("<thi", "nk>", "a thought", "</think", ">")
    ]
    assert found == [[1], [0, 1], [0, 1], [1], [1]]
    assert torch.equal(fuse(masks, config=config).feasible_tokens, torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PhaseMarkers("", "x", REASONING), "markers that are not empty, got '' and 'x'"),
        (lambda: PhaseMarkers("<", ">", TRANSITION), "expected REASONING or STRUCTURED_OUTPUT between '<' and '>'"),
        (lambda: PhaseDetector(outside=TRANSITION), "expected REASONING or STRUCTURED_OUTPUT outside of markers"),
        (lambda: PhaseDetector([THINKING, THINKING]), "markers none of which begins another, got '<think>'"),
        (lambda: PhaseDetector([PhaseMarkers("``", "``", STRUCTURED)]), "got '`' among"),
        (lambda: PhaseDetector([ANSWER, PhaseMarkers("<<<", ">", REASONING)]), "got '<<' among"),
    ],
)
def test_markers_that_cannot_be_told_apart_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
