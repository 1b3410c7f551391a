"""From measurements to trees: who wins, where the edges lie, and what fewer questions cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lz_compile.runtime.problem import buckets
from lz_compile.runtime.problem.bucket_limits import MAX_OUTCOMES, limit, within
from lz_compile.runtime.problem.buckets import Sample, log_regret, tree, winner
from lz_compile.runtime.problem.decision_tree import (
    Leaf,
    Node,
    Split,
    choose,
    edges,
    from_intervals,
    leaves,
    restrict,
    simplify,
    splits,
)

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
KERNELS = ("inductor", "sdpa", "flex")

Curve = Callable[[Mapping[str, int]], float]


def measured(curves: Mapping[str, Curve], **sizes: tuple[int, ...]) -> list[Sample]:
    """A sample at every point of a grid."""
    points = [dict(zip(sizes, point, strict=True)) for point in itertools.product(*sizes.values())]
    return [Sample(point, {kernel: curve(point) for kernel, curve in curves.items()}) for point in points]


def power(factor: float, exponent: float, fixed: float = 0.0) -> Curve:
    return lambda dims: fixed + factor * dims["tokens"] ** exponent


def line(**latencies: tuple[float, ...]) -> list[Sample]:
    """Samples at growing lengths, by kernel."""
    count = len(next(iter(latencies.values())))
    return [
        Sample({"tokens": LENGTHS[i]}, {kernel: values[i] for kernel, values in latencies.items()})
        for i in range(count)
    ]


def regret(node: Node, samples: list[Sample]) -> float:
    """The mean log regret of a tree's choices, by the samples' weight."""
    total = sum(sample.weight for sample in samples)
    return sum(sample.weight * log_regret(sample, choose(node, sample.dims).kernel) for sample in samples) / total


latency = st.floats(1.0, 1000.0)


@st.composite
def grids(draw, dims: int = 2, most: int = 4) -> list[Sample]:
    """Any latencies at all on a small grid of one or two dims."""
    sizes = {"tokens": LENGTHS[: draw(st.integers(1, most))]}
    if dims > 1:
        sizes["batch"] = (1, 4, 16)[: draw(st.integers(1, 3))]
    points = itertools.product(*sizes.values())
    return [
        Sample(dict(zip(sizes, point, strict=True)), {kernel: draw(latency) for kernel in KERNELS}) for point in points
    ]


curves = st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 2.5)).map(lambda pair: power(*pair))


class TestWinner:
    def test_the_fastest_wins_where_it_beats_the_incumbent_by_more_than_the_margin(self):
        assert winner(Sample({}, {"inductor": 100, "sdpa": 50, "flex": 40})) == "flex"

    @pytest.mark.parametrize(
        ("sdpa", "expected"), [(96.9, "sdpa"), (97.1, "inductor"), (100, "inductor"), (200, "inductor")]
    )
    def test_the_margin_is_the_incumbents(self, sdpa, expected):
        assert winner(Sample({}, {"inductor": 100, "sdpa": sdpa})) == expected

    def test_a_difference_inside_the_noise_goes_to_the_incumbent(self):
        latencies = {"inductor": 100, "sdpa": 90}
        assert winner(Sample({}, latencies, {"inductor": 0.06, "sdpa": 0.06})) == "sdpa"
        assert winner(Sample({}, latencies, {"inductor": 0.08, "sdpa": 0.08})) == "inductor"

    def test_a_tie_of_others_goes_to_the_preferred_one(self):
        sample = Sample({}, {"inductor": 100, "sdpa": 51, "flex": 50}, {"sdpa": 0.02, "flex": 0.02})
        assert winner(sample) == "sdpa"
        assert winner(sample, preference=("flex", "sdpa")) == "flex"
        assert winner(Sample({}, {"inductor": 100, "sdpa": 51, "flex": 50}), preference=("sdpa",)) == "flex"

    def test_what_is_further_away_than_the_margin_is_no_tie_whatever_the_noise(self):
        sample = Sample({}, {"inductor": 100, "sdpa": 57, "flex": 50}, {"sdpa": 0.15, "flex": 0.15})
        assert winner(sample, preference=("sdpa", "flex")) == "flex"

    def test_without_a_measured_incumbent_the_fastest_wins(self):
        assert winner(Sample({}, {"sdpa": 2, "flex": 1})) == "flex"

    def test_an_incumbent_that_is_alone_wins(self):
        assert winner(Sample({}, {"inductor": 5})) == "inductor"

    @pytest.mark.parametrize("us", [0.0, -1.0, math.inf, math.nan])
    def test_a_latency_that_is_none_is_refused(self, us):
        with pytest.raises(ValueError, match=r"expected positive latencies in us.*Leave out a kernel that cannot run"):
            Sample({"tokens": 1}, {"sdpa": us})


class TestTree:
    def test_one_winner_everywhere_is_one_leaf_within_reach(self):
        node = tree(line(inductor=(9.0, 9.0, 9.0), sdpa=(1.0, 1.0, 1.0)), ["tokens"], reach=math.inf)
        assert node == Leaf("sdpa")

    def test_beyond_twice_the_measured_sizes_the_leaf_has_no_kernel(self):
        node = tree(line(inductor=(9.0, 9.0), sdpa=(1.0, 1.0)), ["tokens"])
        assert edges(node) == {"tokens": [32, 257]}
        assert [choose(node, {"tokens": size}).kernel for size in (31, 32, 256, 257)] == [None, "sdpa", "sdpa", None]
        assert choose(node, {"tokens": 300}).why == "tokens above 256, the largest measured is 128"
        assert choose(node, {"tokens": 3}).why == "tokens below 32, the smallest measured is 64"

    def test_nothing_measured_is_no_kernel(self):
        assert tree([], ["tokens"]) == Leaf(None)

    def test_the_edge_lies_where_the_curves_cross(self):
        # 8000 * n^0 and n^2 meet at sqrt(8000) = 89.4
        samples = measured({"inductor": power(8000, 0), "sdpa": power(1, 2)}, tokens=(16, 64, 128, 512))
        assert edges(tree(samples, ["tokens"], margin=0.0, reach=math.inf)) == {"tokens": [89]}

    def test_the_margin_moves_the_edge_in_favour_of_the_incumbent(self):
        samples = measured({"inductor": power(1, 2), "sdpa": power(8000, 0)}, tokens=(16, 64, 128, 512))
        (edge,) = edges(tree(samples, ["tokens"], margin=0.2, reach=math.inf))["tokens"]
        assert edge == 100  # sdpa takes 0.8 of inductor's time at sqrt(8000 / 0.8)

    def test_a_kernel_that_does_not_run_on_one_side_is_not_trusted_between(self):
        low, high = {"inductor": 10.0, "sdpa": 5.0}, {"inductor": 10.0}
        samples = [Sample({"tokens": 100}, low), Sample({"tokens": 200}, high)]
        assert edges(tree(samples, ["tokens"], reach=math.inf)) == {"tokens": [101]}
        samples = [Sample({"tokens": 100}, high), Sample({"tokens": 200}, low)]
        assert edges(tree(samples, ["tokens"], reach=math.inf)) == {"tokens": [200]}

    def test_a_difference_inside_the_noise_makes_no_edge(self):
        noise = {"inductor": 0.03, "sdpa": 0.03}
        ratios = (0.5, 0.5, 1.02, 0.5)
        samples = [
            Sample({"tokens": length}, {"inductor": 100, "sdpa": 100 * ratio}, noise)
            for length, ratio in zip(LENGTHS, ratios, strict=False)
        ]
        assert tree(samples, ["tokens"], reach=math.inf) == Leaf("sdpa")
        exact = [Sample(sample.dims, sample.latency_us) for sample in samples]
        assert [leaf.kernel for leaf in leaves(tree(exact, ["tokens"], reach=math.inf))] == ["sdpa", "inductor", "sdpa"]

    def test_a_dim_that_is_left_out_counts_by_the_geometric_mean(self):
        samples = measured(
            {"inductor": lambda d: 4.0, "sdpa": lambda d: 1.0 if d["batch"] == 1 else 9.0}, tokens=(64,), batch=(1, 4)
        )
        assert tree(samples, ["tokens"], reach=math.inf) == Leaf("sdpa")  # 3 against 4; the arithmetic mean is 5
        assert edges(tree(samples, ["batch"], reach=math.inf)) == {"batch": [2]}

    def test_a_sample_without_one_of_the_dims_is_refused(self):
        with pytest.raises(ValueError, match="expected samples with batch, received"):
            tree(line(inductor=(1.0,)), ["tokens", "batch"])

    def test_a_margin_of_everything_is_refused(self):
        with pytest.raises(ValueError, match=r"expected a margin in \[0, 1\), received 1"):
            tree(line(inductor=(1.0,)), ["tokens"], margin=1)

    def test_a_checkerboard_needs_as_many_leaves_as_fields(self):
        def sdpa(dims: Mapping[str, int]) -> float:
            return 1.0 if (dims["tokens"] == 64) == (dims["batch"] == 1) else 9.0

        samples = measured({"inductor": lambda d: 3.0, "sdpa": sdpa}, tokens=(64, 128), batch=(1, 4))
        node = tree(samples, ["tokens", "batch"], reach=math.inf)
        assert len(list(leaves(node))) == 4
        assert regret(node, samples) == 0

    def test_a_product_of_dims_is_followed_by_edges_on_both(self):
        samples = measured(
            {"inductor": lambda d: 1e4, "sdpa": lambda d: d["tokens"] * d["batch"]},
            tokens=LENGTHS,
            batch=(1, 4, 16, 64),
        )
        node = tree(samples, ["tokens", "batch"], margin=0.0)
        assert regret(node, samples) == 0
        assert set(edges(node)) == {"tokens", "batch"}

    @given(grids())
    def test_without_noise_and_margin_every_sample_gets_its_fastest_kernel(self, samples):
        dims = list(samples[0].dims)
        node = tree(samples, dims, margin=0.0)
        assert regret(node, samples) == 0
        for sample in samples:
            assert choose(node, sample.dims).kernel is not None

    @given(grids(), st.floats(0, 0.5))
    def test_no_sample_gets_anything_slower_than_its_winner(self, samples, margin):
        node = tree(samples, list(samples[0].dims), margin=margin)
        for sample in samples:
            kernel, best = choose(node, sample.dims).kernel, winner(sample, margin=margin)
            assert sample.latency_us[kernel] <= sample.latency_us[best]

    @given(grids())
    def test_the_greedy_tree_costs_nothing_either_and_is_no_smaller(self, samples):
        dims = list(samples[0].dims)
        exact = tree(samples, dims, margin=0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buckets, "EXACT_BOXES", 0)
            greedy = tree(samples, dims, margin=0.0)
        assert regret(greedy, samples) == 0
        assert len(list(leaves(greedy))) >= len(list(leaves(exact)))

    @given(grids(dims=1, most=7))
    def test_along_one_dim_there_is_a_leaf_per_change_of_winner(self, samples):
        assume(all(len(set(sample.latency_us.values())) == len(KERNELS) for sample in samples))
        node = tree(samples, ["tokens"], margin=0.0, reach=math.inf)
        winners = [winner(sample, margin=0.0) for sample in samples]
        assert len(list(leaves(node))) == 1 + sum(a != b for a, b in itertools.pairwise(winners))

    @given(st.lists(curves, min_size=3, max_size=3), st.sampled_from([0.0, 0.03]))
    def test_every_edge_lies_between_neighbours_with_different_winners(self, three, margin):
        samples = measured(dict(zip(KERNELS, three, strict=True)), tokens=LENGTHS)
        node = tree(samples, ["tokens"], margin=margin, reach=math.inf)
        winners = [winner(sample, margin=margin) for sample in samples]
        ats = edges(node).get("tokens", [])
        gaps = [(a, b) for a, b in itertools.pairwise(LENGTHS) if any(a < at < b for at in ats)]
        assert len(gaps) == len(ats)
        changes = {(LENGTHS[i], LENGTHS[i + 1]) for i in range(len(LENGTHS) - 1) if winners[i] != winners[i + 1]}
        assert set(gaps) <= changes

    @given(curves, curves)
    def test_between_two_powers_the_edge_is_their_crossing(self, first, second):
        samples = measured({"inductor": first, "sdpa": second}, tokens=LENGTHS)
        node = tree(samples, ["tokens"], margin=0.0, reach=math.inf)
        for (at,) in edges(node).values():
            before, after = choose(node, {"tokens": at - 1}).kernel, choose(node, {"tokens": at}).kernel
            by_kernel = {"inductor": first, "sdpa": second}
            # rounding may move the edge by less than one size from where the curves meet
            assert by_kernel[before]({"tokens": at - 1}) <= by_kernel[after]({"tokens": at - 1}) * (1 + 1e-9)
            assert by_kernel[after]({"tokens": at + 1}) <= by_kernel[before]({"tokens": at + 1}) * (1 + 1e-9)


class TestLimit:
    @given(grids(most=4), st.integers(1, 8))
    def test_there_are_at_most_so_many_leaves(self, samples, count):
        node = tree(samples, list(samples[0].dims), margin=0.0)
        assert len(list(leaves(limit(node, samples, count)))) <= count

    @given(grids(most=4))
    def test_more_leaves_never_cost_more(self, samples):
        node = tree(samples, list(samples[0].dims), margin=0.0, reach=math.inf)
        regrets = [regret(limit(node, samples, count), samples) for count in range(1, 14)]
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(regrets))
        assert regrets[-1] == 0

    @given(grids(dims=1, most=5), st.integers(1, 4))
    def test_along_one_dim_nothing_that_joins_neighbours_costs_less(self, samples, count):
        node = tree(samples, ["tokens"], margin=0.0, reach=math.inf)
        ats = edges(node).get("tokens", [])
        best = math.inf
        for kernels in itertools.product(KERNELS, repeat=len(ats) + 1):
            if sum(a != b for a, b in itertools.pairwise(kernels)) < count:
                best = min(best, regret(from_intervals("tokens", ats, [Leaf(kernel) for kernel in kernels]), samples))
        assert regret(limit(node, samples, count), samples) == pytest.approx(best, abs=1e-12)

    def test_a_tree_that_is_small_enough_stays_as_it_is(self):
        node = tree(line(inductor=(9.0, 1.0), sdpa=(1.0, 9.0)), ["tokens"])
        assert limit(node, []) is node

    def test_the_cheapest_edges_go_first(self):
        samples = line(inductor=(9.0, 1.0, 1.05, 1.0), sdpa=(1.0, 9.0, 1.0, 1.05))
        node = tree(samples, ["tokens"], reach=math.inf)
        assert [leaf.kernel for leaf in leaves(node)] == ["sdpa", "inductor", "sdpa", "inductor"]
        pruned = limit(node, samples, 2)
        assert [leaf.kernel for leaf in leaves(pruned)] == ["sdpa", "inductor"]

    def test_the_edge_of_the_measurements_outlives_a_split_that_is_worth_less(self):
        samples = line(inductor=(1.0, 1.0, 1.0), sdpa=(9.0, 0.99, 9.0))
        node = tree(samples, ["tokens"], margin=0.0)
        assert len(list(leaves(node))) == 5
        assert [leaf.kernel for leaf in leaves(limit(node, samples, 3))] == [None, "inductor", None]

    def test_the_edge_of_the_measurements_gives_way_to_a_split_that_is_worth_more(self):
        samples = line(inductor=(1.0, 1.0), sdpa=(9.0, 0.1))
        node = tree(samples, ["tokens"])
        assert len(list(leaves(node))) == 4
        assert [leaf.kernel for leaf in leaves(limit(node, samples, 2))] == ["inductor", "sdpa"]

    def test_a_subtree_on_another_dim_can_outlive_the_edges_of_the_measurements(self):
        samples = measured(
            {"inductor": lambda d: 1.0, "sdpa": lambda d: 9.0 if d["batch"] == 1 else 0.1},
            tokens=(64, 128),
            batch=(1, 4),
        )
        node = tree(samples, ["tokens", "batch"])
        assert {dim: len(ats) for dim, ats in edges(node).items()} == {"tokens": 2, "batch": 2}
        pruned = limit(node, samples, 3)
        assert [leaf.kernel for leaf in leaves(pruned)] == ["inductor", "sdpa", None]
        assert set(edges(limit(node, samples, 2))) == {"batch"}
        assert regret(limit(node, samples, 2), samples) == 0

    def test_what_no_kernel_can_run_is_left_to_dispatch(self):
        samples = [Sample({"tokens": 64}, {"sdpa": 1.0}), Sample({"tokens": 128}, {"flex": 1.0})]
        node = tree(samples, ["tokens"], reach=math.inf)
        (leaf,) = leaves(limit(node, samples, 1))
        assert leaf.kernel is None
        assert leaf.why == "no kernel runs at all of 2 measured points"

    def test_no_leaf_at_all_is_refused(self):
        with pytest.raises(ValueError, match="expected at least 1 outcome, received 0"):
            limit(Leaf("sdpa"), [], 0)

    def test_six_is_the_default(self):
        assert MAX_OUTCOMES == 6


class TestWithin:
    @given(grids(most=4), st.sampled_from(["tokens", "batch"]), st.integers(1, 600), st.none() | st.integers(0, 600))
    def test_nothing_is_asked_about_a_declared_dim(self, samples, dim, low, width):
        assume("batch" in samples[0].dims)
        node = tree(samples, ["tokens", "batch"])
        declared = {dim: (low, None if width is None else low + width)}
        result = within(node, declared, {dim: low}, samples)
        assert all(split.dim != dim for split in splits(result))

    @given(grids(most=4), st.integers(1, 600), st.integers(0, 600))
    def test_where_the_range_leaves_one_kernel_it_is_that_one(self, samples, low, width):
        node = tree(samples, list(samples[0].dims))
        declared = {"tokens": (low, low + width)}
        restricted = simplify(restrict(node, declared))
        if all(split.dim != "tokens" for split in splits(restricted)):
            assert within(node, declared, {"tokens": low}, samples) == restricted

    @given(grids(dims=1, most=7))
    def test_the_kernel_for_a_range_never_loses_more_than_the_margin_where_the_incumbent_loses_less(self, samples):
        node = tree(samples, ["tokens"], margin=0.03)
        (leaf,) = leaves(within(node, {"tokens": (64, 4096)}, {"tokens": 64}, samples, margin=0.03))
        losses = [sample.log_ratio(leaf.kernel, "inductor") for sample in samples]
        assert max(losses) <= math.log(1.03) or max(losses) <= -min(losses)

    def test_the_least_mean_log_regret_decides(self):
        samples = line(inductor=(10.0, 10.0, 10.0), sdpa=(1.0, 10.1, 10.2), flex=(20.0, 2.0, 20.0))
        node = tree(samples, ["tokens"])
        (leaf,) = leaves(within(node, {"tokens": (64, 256)}, {"tokens": 64}, samples))
        assert leaf.kernel == "sdpa"

    def test_a_kernel_that_loses_too_much_somewhere_gives_way_to_the_incumbent(self):
        samples = line(inductor=(10.0, 10.0, 10.0), sdpa=(6.0, 6.0, 20.0))
        node = tree(samples, ["tokens"])
        assert regret(Leaf("sdpa"), samples) < regret(Leaf("inductor"), samples)
        assert within(node, {"tokens": (64, 256)}, {"tokens": 64}, samples) == Leaf("inductor")

    def test_only_the_samples_in_the_range_count(self):
        samples = line(inductor=(10.0, 10.0, 10.0, 10.0), sdpa=(90.0, 1.0, 12.0, 90.0))
        node = tree(samples, ["tokens"])
        assert within(node, {"tokens": (100, 300)}, {"tokens": 128}, samples) == Leaf("sdpa")

    def test_other_dims_are_still_asked_about(self):
        def sdpa(dims: Mapping[str, int]) -> float:
            return 5.0 if dims["batch"] > 1 else 20.0 * (dims["tokens"] < 100) + 9.9

        samples = measured({"inductor": lambda d: 10.0, "sdpa": sdpa}, tokens=(64, 128), batch=(1, 4))
        node = tree(samples, ["tokens", "batch"], margin=0.0, reach=math.inf)
        assert set(edges(node)) == {"tokens", "batch"}
        result = within(node, {"tokens": (1, None)}, {"tokens": 64}, samples)
        assert result == Split("batch", 2, Leaf("inductor"), Leaf("sdpa"))

    def test_without_a_sample_in_the_range_the_hint_decides(self):
        samples = line(inductor=(1.0, 9.0), sdpa=(9.0, 1.0))
        node = tree(samples, ["tokens"])
        (edge,) = edges(restrict(node, {"tokens": (65, 127)}))["tokens"]
        for hint, expected in ((edge - 1, "inductor"), (edge, "sdpa")):
            assert within(node, {"tokens": (65, 127)}, {"tokens": hint}, samples) == Leaf(expected)
