"""What latency is expected of a kernel: the nearest measurements that were made together, else the shipped table."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import kernel, measured, problem_context

from lz_compile.runtime.measure.estimate import ELSEWHERE, PRIOR_NOISE, estimates, fixed_part, workload
from lz_compile.runtime.measure.perf_record import canonical
from lz_compile.runtime.problem.context import SymbolicDim

pytestmark = pytest.mark.usefixtures("by_priors")

SPECS = [kernel("inductor"), kernel("torch.sdpa", 0.5), kernel("lz.blocked")]


def expected(records, *, sizes=None, context=None, specs=SPECS, **options):
    context = context or problem_context()
    return estimates(context, specs, {**context.hints(), **(sizes or {})}, records, **options)


def relative(found):
    return {kernel_id: round(each.relative_latency, 6) for kernel_id, each in found.items()}


# ---- without measurements ----------------------------------------------------------------------------------------------


def test_without_measurements_the_tables_count_and_an_unknown_kernel_is_as_fast_as_inductor():
    found = expected([])
    assert relative(found) == {"inductor": 1.0, "torch.sdpa": 0.5, "lz.blocked": 1.0}
    assert [each.origin for each in found.values()] == ["assumed", "prior", "assumed"]
    assert {each.noise for each in found.values()} == {PRIOR_NOISE}
    assert found["torch.sdpa"].to_dict() == {"relative_latency": 0.5, "origin": "prior"}


def test_of_a_source_that_calls_a_kernel_leaving_it_alone_is_to_run_that_kernel():
    specs = [kernel("inductor"), kernel("torch.sdpa", 0.5), kernel("lz.blocked", 0.4)]
    found = expected([], specs=specs, source_kernel="torch.sdpa")
    assert relative(found) == {"inductor": 1.0, "torch.sdpa": 1.0, "lz.blocked": 0.8}


# ---- with measurements -------------------------------------------------------------------------------------------------


def test_measurements_win_over_tables_and_say_where_they_were_made():
    context = problem_context()
    records = [measured("inductor", context, 200.0, noise=0.02), measured("torch.sdpa", context, 300.0, noise=0.05)]
    found = expected(records)
    assert relative(found) == {"inductor": 1.0, "torch.sdpa": 1.5, "lz.blocked": 1.0}
    assert found["lz.blocked"].origin == "assumed"
    assert found["torch.sdpa"].to_dict() == {
        "relative_latency": 1.5,
        "origin": "measured",
        "median_us": 300.0,
        "noise": 0.05,
        "samples": 25,
        "measured_at": context.hints(),
    }


def test_measurements_without_inductor_among_them_compare_with_nothing():
    assert relative(expected([measured("torch.sdpa", problem_context(), 1.0)]))["torch.sdpa"] == 0.5


def test_measurements_of_different_groups_are_never_mixed():
    context = problem_context()
    near = [measured("inductor", context, 100.0)]
    far = [measured(name, context, 50.0, sizes={"seq_len_q": 100}) for name in ("inductor", "torch.sdpa")]
    found = expected([*near, *far])
    assert found["inductor"].median_us == 100.0
    assert found["torch.sdpa"].origin == "assumed"


def test_a_kernel_that_was_not_measured_does_not_compete_by_its_prior_with_those_that_were():
    context = problem_context()
    specs = [kernel("inductor"), kernel("torch.sdpa", 0.5), kernel("lz.blocked", 0.4)]
    records = [measured("inductor", context, 100.0, source="torch.sdpa")]
    found = expected(records, specs=specs, source_kernel="torch.sdpa")
    assert relative(found) == {"inductor": 1.0, "torch.sdpa": 1.0, "lz.blocked": 1.0}
    assert found["torch.sdpa"] == found["inductor"]


@pytest.mark.parametrize("alone", ["source_kernel", "left_as"])
def test_what_was_measured_spelled_out_counts_where_one_of_the_kernels_runs_anyway(alone):
    context, runs = problem_context(), {alone: "torch.sdpa"}
    spelled_out = [measured("inductor", context, 400.0), measured("torch.sdpa", context, 100.0)]
    spelled_out += [measured("lz.blocked", context, 150.0)]
    found = expected([], spelled_out=spelled_out, **runs)
    assert relative(found) == {"inductor": 1.0, "torch.sdpa": 1.0, "lz.blocked": 1.5}
    own = [measured("inductor", context, 100.0, source="torch.sdpa")]
    own += [measured("lz.blocked", context, 90.0, source="torch.sdpa")]
    assert relative(expected(own, spelled_out=spelled_out, **runs))["lz.blocked"] == 0.9
    without = spelled_out[:1] + spelled_out[2:]
    assert expected([], spelled_out=without, **runs)["lz.blocked"].origin == "assumed"


@pytest.mark.parametrize(
    ("sizes", "is_near"),
    [
        ({"seq_len_q": 65}, True),
        ({"seq_len_q": 64}, False),
        ({"seq_len_k": 255}, True),
        ({"seq_len_k": 256}, False),
        ({"seq_len_q": 65, "seq_len_k": 255, "batch_size": 3}, True),
        ({"batch_size": 4}, False),
        ({"batch_size": 4, "num_heads": 4, "num_kv_heads": 4}, True),
        ({"batch_size": 8, "num_heads": 4, "num_kv_heads": 4}, False),
    ],
)
def test_near_is_less_than_an_octave_away_in_every_bucketed_size(sizes, is_near):
    context = problem_context(128, batch=2, heads=8)
    records = [measured(name, context, us, sizes=sizes) for name, us in (("inductor", 10.0), ("torch.sdpa", 7.0))]
    assert (expected(records)["torch.sdpa"].origin == "measured") == is_near


def test_a_size_of_zero_has_a_distance():
    context = problem_context(0)
    records = [measured("inductor", context, 10.0), measured("torch.sdpa", context, 7.0)]
    assert expected(records, context=context)["torch.sdpa"].relative_latency == pytest.approx(0.7)


def test_of_measurements_at_the_same_distance_those_in_these_surroundings_count():
    context = problem_context()

    def group(around, us):
        return [
            measured(name, context, median, surroundings=around)
            for name, median in (("inductor", 100.0), ("torch.sdpa", us))
        ]

    records = [*group("", 80.0), *group("chain", 70.0), *group("other", 60.0)]
    assert expected(records, surroundings="chain")["torch.sdpa"].median_us == 70.0
    assert expected(records, surroundings="other")["torch.sdpa"].median_us == 60.0
    assert expected(records)["torch.sdpa"].median_us == 80.0
    assert expected(records, surroundings="unknown")["torch.sdpa"].origin == "measured"


def test_of_measurements_at_the_same_distance_those_of_the_very_sizes_count():
    context = problem_context(heads=8, kv_heads=4)
    records = []
    for kv_heads, us in ((1, 90.0), (2, 85.0), (4, 80.0)):
        records += [
            measured(name, context, median, sizes={"num_kv_heads": kv_heads})
            for name, median in (("inductor", 100.0), ("torch.sdpa", us))
        ]
    assert expected(records, context=context)["torch.sdpa"].median_us == 80.0


def test_a_measurement_of_another_version_of_a_library_is_not_used():
    context = problem_context()
    records = [measured("inductor", context, 100.0), measured("torch.sdpa", context, 10.0, kernel_version="0.0.1")]
    specs = [kernel("inductor"), kernel("torch.sdpa", 0.5, package="torch")]
    assert expected(records, specs=specs)["torch.sdpa"].origin == "assumed"
    records[1] = replace(records[1], kernel_version=specs[1].version)
    assert expected(records, specs=specs)["torch.sdpa"].relative_latency == pytest.approx(0.1)


# ---- noise -------------------------------------------------------------------------------------------------------------


def test_noise_is_twice_the_standard_error_of_the_median():
    context = problem_context()
    record = measured("inductor", context, 100.0, variance_us=16.0, samples=16)
    # the median's standard error is 1.25 times the mean's, which is sqrt(16 / 16) here
    assert expected([record])["inductor"].noise == pytest.approx(2 * 1.25 * 1.0 / 100.0)


@pytest.mark.parametrize("changes", [{"samples": 1}, {"variance_us": None}, {"samples": 0, "variance_us": 0.0}])
def test_what_tells_nothing_of_its_spread_is_trusted_like_a_table(changes):
    record = replace(measured("inductor", problem_context(), 100.0), **changes)
    assert expected([record])["inductor"].noise == PRIOR_NOISE


def test_equal_samples_have_no_noise():
    assert expected([measured("inductor", problem_context(), 100.0)])["inductor"].noise == 0.0


# ---- against a model ---------------------------------------------------------------------------------------------------

LENGTHS = st.sampled_from([1, 16, 17, 24, 31, 32, 33, 48, 63, 64, 128])
POINTS = st.fixed_dictionaries({
    "seq_len_q": LENGTHS,
    "seq_len_k": LENGTHS,
    "batch_size": st.sampled_from([1, 2, 3, 4]),
    "num_heads": st.sampled_from([1, 2, 8]),
})  # fmt: skip
GROUPS = st.tuples(
    POINTS, st.sampled_from(["", "chain", "other"]), st.sets(st.sampled_from([s.kernel_id for s in SPECS]))
)


def model(sizes, groups, surroundings):
    """The latencies of the nearest group, by looking at all of them."""

    def octaves(there):
        pairs = [(sizes[name], there[name]) for name in ("seq_len_q", "seq_len_k")]
        pairs.append((sizes["batch_size"] * sizes["num_heads"], there["batch_size"] * there["num_heads"]))
        return [abs(math.log2(ours / theirs)) for ours, theirs in pairs]

    fitting = [each for each in groups if "inductor" in each[2] and all(one < 1 for one in octaves(each[0]))]
    costs = [sum(octaves(there)) + (0 if around == surroundings else ELSEWHERE) for there, around, _ in fitting]
    least = min(costs, default=None)
    return [each[2] for each, cost in zip(fitting, costs, strict=True) if cost <= least + 1e-9]


@given(sizes=POINTS, groups=st.lists(GROUPS, max_size=6), surroundings=st.sampled_from(["", "chain"]))
def test_the_nearest_group_is_the_one_that_looking_at_all_of_them_finds(sizes, groups, surroundings):
    groups = list({(canonical(there), around): (there, around, ids) for there, around, ids in groups}.values())
    context = problem_context()
    timed = [
        (there, around, {name: 10.0 + index + place * 10 for place, name in enumerate(sorted(ids))})
        for index, (there, around, ids) in enumerate(groups)
    ]
    records = [
        measured(name, context, us, sizes=there, surroundings=around)
        for there, around, latencies in timed
        for name, us in latencies.items()
    ]
    found = expected(records, sizes=sizes, context=context, surroundings=surroundings)
    latencies = {name: each.median_us for name, each in found.items() if each.origin == "measured"}
    nearest = model(sizes, timed, surroundings)
    assert latencies in nearest if nearest else latencies == {}
    for name, us in latencies.items():
        assert found[name].relative_latency == pytest.approx(us / latencies["inductor"])


# ---- the key -----------------------------------------------------------------------------------------------------------


def test_the_key_of_a_measurement_holds_what_decides_a_latency():
    context = problem_context(64, 128, batch=3, heads=8, kv_heads=2, is_causal=True, training=True, nan_is_open=True)
    found = workload(context, "torch.sdpa", context.hints())
    assert found == {
        "config": "",
        "dims": {
            "batch_size": 3, "head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "seq_len_k": 128, "seq_len_q": 64,
            "value_dim": 64,
        },
        "features": ["causal", "causal_rectangular", "gqa", "training"],
        "source": "torch.sdpa",
        "symbolic": [],
    }  # fmt: skip
    assert fixed_part(context, None) == {
        "config": "",
        "dims": {"head_dim": 64, "value_dim": 64},
        "features": ["causal", "causal_rectangular", "gqa", "training"],
        "source": "",
        "symbolic": [],
    }


def test_symbolic_sizes_are_part_of_the_key_by_name_and_stand_in_it_with_the_measured_size():
    context = problem_context(64)
    dims = {**context.dims, "seq_len_q": SymbolicDim(64, name="s7"), "head_dim": SymbolicDim(64, name="s8")}
    context = replace(context, dims=dims)
    found = workload(context, None, {**context.hints(), "seq_len_q": 256})
    assert (found["symbolic"], found["dims"]["seq_len_q"]) == (["head_dim", "seq_len_q"], 256)
    assert fixed_part(context, None)["dims"] == {"value_dim": 64}


def test_the_key_is_the_same_text_whatever_the_order_and_the_name_of_symbols():
    context = problem_context(64, is_causal=True, training=True)
    other = replace(
        context,
        dims=dict(reversed(context.dims.items())),
        features=dict(reversed(context.features.items())),
    )
    keys = {canonical(workload(each, None, each.hints())) for each in (context, other)}
    renamed = [
        replace(context, dims={**context.dims, "seq_len_q": SymbolicDim(64, name=name)}) for name in ("s1", "s9")
    ]
    assert len(keys) == 1
    assert len({canonical(workload(each, None, each.hints())) for each in renamed}) == 1
    assert json.loads(keys.pop()) == workload(context, None, context.hints())
