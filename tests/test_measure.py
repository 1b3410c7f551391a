"""Timing in turns. The clock is the test's own: a call takes as long as the test says, and nothing depends on this machine."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lz_compile.runtime.measure import timing as module
from lz_compile.runtime.measure.timing import Quartiles, Timing, measure

CPU = torch.device("cpu")


class Clock:
    """Stands for ``time``; only calls let it go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def call(self, name: str, *durations_s: float) -> Callable[[], None]:
        """A call that takes as long as is given, the last duration from then on."""
        left = list(durations_s)

        def run() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def blocks(self) -> list[str]:
        """Who ran, runs of the same one joined."""
        return [name for place, name in enumerate(self.log) if place == 0 or self.log[place - 1] != name]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_every_round_gives_every_call_a_block_and_the_order_rotates(clock):
    calls = {name: clock.call(name, 0.010) for name in "abc"}
    measure(calls, CPU, rounds=4, block_ms=10.0)
    warm_up, rounds = clock.blocks()[:3], clock.blocks()[3:]
    assert warm_up == ["a", "b", "c"]
    assert "".join(rounds) == "abcbcacababc"


def test_a_block_holds_as_many_calls_as_fill_it(clock):
    timings = measure(
        {"fast": clock.call("fast", 0.001), "slow": clock.call("slow", 0.004)}, CPU, rounds=3, block_ms=20.0
    )
    assert (clock.log.count("fast"), clock.log.count("slow")) == (4 + 3 * 20, 4 + 3 * 5)
    assert timings["fast"].rounds_us == pytest.approx([1000.0] * 3)
    assert timings["slow"].rounds_us == pytest.approx([4000.0] * 3)


def test_a_block_has_a_thousand_calls_at_most_even_where_the_clock_sees_none(clock):
    measure({"nothing": clock.call("nothing", 0.0)}, CPU, rounds=1, block_ms=20.0)
    assert len(clock.log) == 4 + 1000


def test_a_slow_call_is_warmed_up_once_and_is_a_block_by_itself(clock):
    timings = measure({"slow": clock.call("slow", 3.0)}, CPU, rounds=3, block_ms=20.0)
    assert len(clock.log) == 1 + 3
    assert timings["slow"].warmup_s == pytest.approx(3.0)


def test_the_warm_up_is_not_part_of_the_rounds(clock):
    timings = measure({"lazy": clock.call("lazy", 0.05, 0.02)}, CPU, rounds=3, block_ms=20.0)
    assert timings["lazy"].rounds_us == pytest.approx([20_000.0] * 3)
    assert timings["lazy"].warmup_s == pytest.approx(0.05 + 3 * 0.02)


def test_the_budget_stops_before_a_round_that_would_exceed_it(clock):
    timings = measure({"a": clock.call("a", 0.02)}, CPU, rounds=100, block_ms=20.0, budget_s=0.25)
    assert len(timings["a"].rounds_us) == 8  # 4 calls of warm-up: 0.08 s; the ninth would end at 0.26 s
    assert clock.now <= 0.25


def test_a_budget_that_is_used_up_still_gives_three_rounds(clock):
    timings = measure(
        {"a": clock.call("a", 5.0), "b": clock.call("b", 1.0)}, CPU, rounds=10, block_ms=20.0, budget_s=0.1
    )
    assert [len(timing.rounds_us) for timing in timings.values()] == [3, 3]


def test_fewer_rounds_than_three_are_kept_to(clock):
    assert len(measure({"a": clock.call("a", 0.02)}, CPU, rounds=2, budget_s=0.0)["a"].rounds_us) == 2


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_of_garbage_rests_meanwhile_and_is_then_as_before(clock, was_enabled):
    seen = []

    def call():
        seen.append(gc.isenabled())
        clock.now += 0.02

    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        measure({"a": call}, CPU, rounds=2)
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen[-2:] == [False, False]


def test_the_collector_goes_on_after_a_call_that_raises(clock):
    def broken():
        clock.now += 0.02
        if clock.now > 0.1:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        measure({"a": broken}, CPU, rounds=10)
    assert gc.isenabled()


def test_the_device_is_waited_for_before_and_after_every_block(clock, monkeypatch):
    monkeypatch.setattr(module, "synchronise", lambda device: clock.log.append(device.type))
    measure({"a": clock.call("a", 0.02)}, torch.device("cuda"), rounds=1, block_ms=20.0)
    assert clock.log == ["cuda", "a", "cuda", "cuda", "a", "cuda", "cuda", "a", "a", "cuda", "cuda", "a", "cuda"]


# ---- figures -----------------------------------------------------------------------------------------------------------

LATENCIES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60)


@given(LATENCIES)
def test_median_and_quartiles_are_those_of_the_rounds(rounds):
    timing = Timing(tuple(rounds))
    assert timing.latency_us.median == pytest.approx(statistics.median(rounds))
    assert min(rounds) <= timing.latency_us.low * (1 + 1e-9)
    assert timing.latency_us.low <= timing.latency_us.median * (1 + 1e-9)
    assert timing.latency_us.median <= timing.latency_us.high * (1 + 1e-9)
    assert timing.variance_us == pytest.approx(statistics.pvariance(rounds))


@given(LATENCIES)
def test_the_95th_percentile_is_the_least_that_95_percent_of_the_rounds_do_not_exceed(rounds):
    p95 = Timing(tuple(rounds)).p95_us
    share = sum(each <= p95 for each in rounds) / len(rounds)
    below = sum(each < p95 for each in rounds) / len(rounds)
    assert p95 in rounds
    assert share >= 0.95 > below


def test_one_outlier_in_twenty_is_no_95th_percentile():
    assert Timing((*[10.0] * 19, 1000.0)).p95_us == 10.0


def test_a_ratio_is_taken_within_rounds_so_that_a_slow_spell_cancels():
    base, other = Timing((10.0, 100.0, 12.0)), Timing((5.0, 50.0, 6.0))
    assert other.relative_to(base) == Quartiles(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        base.relative_to(Timing((1.0,)))


def test_quartiles_of_one_value_are_that_value():
    assert Quartiles.of([3.0]) == Quartiles(3.0, 3.0, 3.0)
    assert Quartiles(2.0, 4.0, 6.0) / 2 == Quartiles(1.0, 2.0, 3.0)
