"""Decision trees: walking one asks only what is needed, and making one smaller never changes what it chooses."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lz_compile.runtime.problem.decision_tree import (
    Leaf,
    Node,
    Split,
    choose,
    contains,
    edges,
    evaluate,
    from_dict,
    leaves,
    outcomes,
    restrict,
    simplify,
    splits,
    to_dict,
)

DIMS = ("tokens", "batch")
KERNELS = ("inductor", "sdpa", "flex", None)

leaf = st.builds(Leaf, st.sampled_from(KERNELS), st.text(max_size=3))
trees = st.recursive(
    leaf, lambda node: st.builds(Split, st.sampled_from(DIMS), st.integers(1, 12), node, node), max_leaves=16
)
sizes = st.fixed_dictionaries({dim: st.integers(0, 14) for dim in DIMS})
bounds = st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12)).map(
    lambda pair: (pair[0], None if pair[1] is None else max(pair))
)
ranges = st.dictionaries(st.sampled_from(DIMS), bounds)

SDPA, INDUCTOR, FLEX = Leaf("sdpa"), Leaf("inductor"), Leaf("flex")
EXAMPLE = Split("tokens", 128, INDUCTOR, Split("batch", 4, SDPA, Split("tokens", 4097, FLEX, Leaf(None, "beyond"))))


def everywhere() -> list[dict[str, int]]:
    return [{"tokens": tokens, "batch": batch} for tokens in range(15) for batch in range(15)]


def test_below_an_edge_and_on_it_lead_to_different_sides():
    assert choose(EXAMPLE, {"tokens": 127, "batch": 9}) == INDUCTOR
    assert choose(EXAMPLE, {"tokens": 128, "batch": 3}) == SDPA
    assert choose(EXAMPLE, {"tokens": 4096, "batch": 4}) == FLEX
    assert choose(EXAMPLE, {"tokens": 4097, "batch": 4}).kernel is None


def test_a_size_that_is_asked_for_and_not_given_is_an_error_by_name():
    with pytest.raises(ValueError, match="expected the size of batch, received sizes of tokens"):
        choose(EXAMPLE, {"tokens": 128})
    assert choose(EXAMPLE, {"tokens": 5}) == INDUCTOR


def test_leaves_splits_edges_and_outcomes_are_listed_in_order():
    assert [found.kernel for found in leaves(EXAMPLE)] == ["inductor", "sdpa", "flex", None]
    assert [(found.dim, found.at) for found in splits(EXAMPLE)] == [("tokens", 128), ("batch", 4), ("tokens", 4097)]
    assert edges(EXAMPLE) == {"tokens": [128, 4097], "batch": [4]}
    assert outcomes(Split("tokens", 2, SDPA, Split("tokens", 4, FLEX, SDPA))) == ["sdpa", "flex"]


def test_leaves_are_equal_by_kernel_whatever_led_to_them():
    assert Leaf("sdpa", "measured") == Leaf("sdpa", "a prior")


@given(trees, sizes)
def test_walking_asks_each_question_once_only_on_the_path_and_nothing_that_is_known(node, dims):
    asked: list[tuple[str, int]] = []

    def is_below(dim: str, at: int) -> bool:
        for other, known in asked:
            if other == dim:
                assert not (dims[dim] < known <= at), "follows from an earlier yes"
                assert not (dims[dim] >= known >= at), "follows from an earlier no"
        asked.append((dim, at))
        return dims[dim] < at

    found = evaluate(node, is_below)
    path, here = [], node
    while isinstance(here, Split):
        path.append((here.dim, here.at))
        here = here.below if dims[here.dim] < here.at else here.above
    assert found == here == choose(node, dims)
    assert len(asked) == len(set(asked))
    assert set(asked) <= set(path)


@given(trees)
def test_simplifying_never_changes_a_choice_and_never_adds_a_leaf(node):
    simple = simplify(node)
    assert all(choose(simple, dims) == choose(node, dims) for dims in everywhere())
    assert len(list(leaves(simple))) <= len(list(leaves(node)))


@given(trees)
def test_simplifying_twice_changes_nothing_more(node):
    simple = simplify(node)
    assert simplify(simple) == simple


@given(trees)
def test_after_simplifying_no_split_has_equal_sides_or_a_known_answer(node):
    simple = simplify(node)
    assert all(split.below != split.above for split in splits(simple))
    assert restrict(simple, {}) == simple


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from(KERNELS)), min_size=1, max_size=8))
def test_along_one_dim_simplifying_leaves_one_leaf_per_run_of_equal_choices(parts):
    node: Node = Leaf("inductor")
    for at, kernel in parts:
        node = Split("tokens", at, Leaf(kernel), node)
    chosen = [choose(node, {"tokens": size}).kernel for size in range(15)]
    changes = sum(before != after for before, after in itertools.pairwise(chosen))
    assert len(list(leaves(simplify(node)))) == changes + 1


def test_neighbours_that_are_not_siblings_are_joined():
    node = Split("tokens", 4, SDPA, Split("tokens", 8, Leaf("sdpa", "elsewhere"), FLEX))
    assert simplify(node) == Split("tokens", 8, SDPA, FLEX)


@given(trees, ranges)
def test_restricting_keeps_every_choice_inside_the_ranges(node, allowed):
    restricted = restrict(node, allowed)
    for dims in everywhere():
        if contains(allowed, dims):
            assert choose(restricted, dims) == choose(node, dims)


@given(trees, ranges)
def test_a_restricted_tree_asks_nothing_that_the_ranges_answer(node, allowed):
    for split in splits(restrict(node, allowed)):
        low, high = allowed.get(split.dim, (0, None))
        assert low < split.at
        assert high is None or split.at <= high


def test_a_size_that_is_known_is_not_asked_about():
    assert restrict(EXAMPLE, {"batch": (1, 1)}) == Split("tokens", 128, INDUCTOR, SDPA)
    assert restrict(EXAMPLE, {"tokens": (200, None), "batch": (8, 8)}) == Split("tokens", 4097, FLEX, Leaf(None))


@given(trees)
def test_a_tree_survives_json(node):
    record = to_dict(node)
    assert to_dict(from_dict(json.loads(json.dumps(record)))) == record
    assert from_dict(record) == node


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {"kernel": "sdpa"},
        {"kernel": 3, "why": ""},
        {"kernel": "sdpa", "why": "", "more": 1},
        {"dim": "tokens", "at": "4", "below": {"kernel": None, "why": ""}, "above": {"kernel": None, "why": ""}},
        {"dim": "tokens", "at": True, "below": {"kernel": None, "why": ""}, "above": {"kernel": None, "why": ""}},
        {"dim": "tokens", "at": 4, "below": {"kernel": None, "why": ""}},
        {"dim": "tokens", "at": 4, "below": {"kernel": None, "why": ""}, "above": {"kernel": "x"}},
    ],
)
def test_what_is_not_a_tree_is_refused(record):
    with pytest.raises(ValueError, match="reading a decision tree: expected a leaf"):
        from_dict(record)
