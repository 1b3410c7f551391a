"""The cache of decisions: bounds, age, one computation per key under concurrency, and what clearing reaches."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lz_compile.runtime.choose.decision_cache import DecisionCache
from lz_compile.runtime.policy.settings import CacheSettings

PATIENCE_S = 30  # a deadlock fails the test instead of hanging it


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Observed(DecisionCache[str]):
    """Counts the lookups that have found another thread's computation to wait for."""

    waiters = 0

    def _join(self, key, flight):
        found = super()._join(key, flight)
        self.waiters += found is not flight
        return found

    def wait_with(self, threads: int, go_on: threading.Event, compute: Callable[[], str]) -> list[object]:
        """What threads get that are all waiting when `go_on` is set."""
        release = threading.Thread(target=lambda: wait_until(lambda: self.waiters == threads) or go_on.set())
        release.start()
        found = in_threads(threads, lambda _: self.get_or_compute("key", compute))
        release.join(PATIENCE_S)
        return found


def bounded(entries: int, **more) -> DecisionCache:
    return DecisionCache(CacheSettings(max_size=entries, **more.pop("settings", {})), **more)


def in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    """What `work(i)` returned or raised, in as many threads."""
    found: list[object] = [None] * count

    def run(index: int) -> None:
        try:
            found[index] = work(index)
        except BaseException as error:  # noqa: BLE001 the test looks at it
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(PATIENCE_S * 1000):
        if holds():
            return
        threading.Event().wait(0.001)
    raise AssertionError("waited in vain")


def start_held(cache: DecisionCache[str], key: str, end: Callable[[], str]) -> tuple[threading.Thread, threading.Event]:
    """A thread that is inside the computation of `key` when this returns; it ends as `end` says once the event is set."""
    inside, go_on = threading.Event(), threading.Event()

    def compute() -> str:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        return end()

    def run() -> None:
        with contextlib.suppress(Exception, KeyboardInterrupt):  # what waiters see is what is tested
            cache.get_or_compute(key, compute)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert inside.wait(PATIENCE_S)
    return thread, go_on


def raising(error: BaseException) -> Callable[[], str]:
    def end() -> str:
        raise error

    return end


def put(cache: DecisionCache[int], key: str, value: int = 1) -> None:
    """Store a value that there is not yet."""
    cache.get_or_compute(key, lambda: value)


def never() -> str:
    raise AssertionError("computed although there is a value")


def test_a_value_is_computed_once_and_then_found():
    cache: DecisionCache[str] = DecisionCache()
    assert cache.get("key") is None
    assert cache.get_or_compute("key", lambda: "sdpa") == "sdpa"
    assert cache.get_or_compute("key", never) == "sdpa"
    assert cache.get("key") == "sdpa"
    assert cache.statistics().to_dict() == {
        "hits": 2,
        "misses": 2,
        "computations": 1,
        "evictions": 0,
        "expirations": 0,
        "entries": 1,
    }


def test_the_default_holds_ten_thousand_entries_for_a_minute():
    cache: DecisionCache[str] = DecisionCache()
    assert cache.settings.max_size == 10_000
    assert cache.settings.ttl_seconds == 60


def test_an_entry_lives_as_long_as_configured_and_not_longer():
    clock = Clock()
    cache: DecisionCache[str] = bounded(4, settings={"ttl_seconds": 10.0}, clock=clock)
    put(cache, "key")
    clock.now = 9.9
    assert cache.get("key") == 1
    clock.now = 10.0
    assert cache.get("key") is None
    statistics = cache.statistics()
    assert (statistics.expirations, statistics.entries, statistics.evictions) == (1, 0, 0)


def test_an_entry_that_is_too_old_is_computed_again():
    clock = Clock()
    cache: DecisionCache[str] = bounded(4, settings={"ttl_seconds": 10.0}, clock=clock)
    cache.get_or_compute("key", lambda: "old")
    clock.now = 11
    assert cache.get_or_compute("key", lambda: "new") == "new"
    assert cache.get("key") == "new"
    assert cache.statistics().expirations == 1


def test_a_full_cache_evicts_the_oldest_entry_that_was_not_used():
    cache: DecisionCache[int] = bounded(3)
    for key in ("a", "b", "c"):
        put(cache, key)
    cache.get("a")
    put(cache, "d")
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    assert cache.statistics().evictions == 1


def test_a_hit_saves_an_entry_once_and_not_for_ever():
    cache: DecisionCache[int] = bounded(2)
    put(cache, "a")
    put(cache, "b")
    cache.get("a")
    put(cache, "c")  # evicts b, passes over a
    put(cache, "d")  # a was not used since, but stands behind c now
    put(cache, "e")
    assert cache.get("a") is None


def test_where_every_entry_was_used_the_oldest_goes():
    cache: DecisionCache[int] = bounded(3)
    for key in "abc":
        put(cache, key)
        cache.get(key)
    put(cache, "d")
    assert [key for key in "abcd" if cache.get(key)] == ["b", "c", "d"]


def test_what_is_too_old_makes_room_before_anything_is_evicted():
    clock = Clock()
    cache: DecisionCache[int] = bounded(2, settings={"ttl_seconds": 10.0}, clock=clock)
    put(cache, "old")
    clock.now = 5
    put(cache, "young")
    cache.get("old")
    clock.now = 12
    put(cache, "new")
    statistics = cache.statistics()
    assert (cache.get("young"), cache.get("new")) == (1, 1)
    assert (statistics.expirations, statistics.evictions) == (1, 0)


operations = st.lists(st.tuples(st.sampled_from(["get", "compute", "age", "clear"]), st.integers(0, 7)), max_size=80)


@given(operations, st.integers(1, 6))
def test_the_cache_agrees_with_a_dict_that_may_forget_and_stays_within_its_bounds(steps, room):
    clock = Clock()
    settings = CacheSettings(max_size=room, ttl_seconds=5.0)
    cache: DecisionCache[int] = DecisionCache(settings, clock=clock)
    stored: dict[int, tuple[int, float]] = {}
    lookups = 0
    for number, (what, key) in enumerate(steps):
        if what == "age":
            clock.now += key
        elif what == "clear":
            cache.clear()
            stored = {}
        else:
            lookups += 1
            found = cache.get(key) if what == "get" else cache.get_or_compute(key, lambda number=number: number)
            if found == number and what == "compute":
                stored[key] = (number, clock.now)
            elif found is not None:
                assert found == stored[key][0]
                assert clock.now - stored[key][1] < 5
        statistics = cache.statistics()
        assert statistics.entries <= room
        assert statistics.hits + statistics.misses == lookups
        assert len(cache._live) == statistics.entries


def test_many_threads_compute_every_key_once():
    cache: DecisionCache[int] = DecisionCache()
    computed: Counter[int] = Counter()
    start = threading.Barrier(16)

    def work(index: int) -> int:
        def compute(key: int) -> int:
            computed[key] += 1
            threading.Event().wait(0.002)  # others arrive meanwhile
            return key * 2

        start.wait(PATIENCE_S)
        for turn in range(400):
            key = (turn + 7 * index) % 50
            assert cache.get_or_compute(key, lambda key=key: compute(key)) == key * 2
        return index

    assert in_threads(16, work) == list(range(16))
    statistics = cache.statistics()
    assert set(computed.values()) == {1}
    assert len(computed) == statistics.computations == statistics.entries == 50
    assert statistics.hits + statistics.misses <= 16 * 400


def test_waiters_get_the_result_of_the_one_that_computed():
    cache = Observed()
    _, go_on = start_held(cache, "key", lambda: "value")
    assert cache.wait_with(3, go_on, never) == ["value"] * 3
    assert cache.statistics().computations == 1


def test_waiters_get_the_exception_of_the_one_that_computed_and_the_next_caller_computes():
    cache = Observed()
    error = ValueError("no kernel")
    thread, go_on = start_held(cache, "key", raising(error))
    assert all(raised is error for raised in cache.wait_with(3, go_on, never))
    thread.join(PATIENCE_S)
    assert cache.statistics().entries == 0
    assert cache.get_or_compute("key", lambda: "value") == "value"


def test_an_interrupt_leaves_no_waiter_hanging_and_one_of_them_computes():
    cache = Observed()
    _, go_on = start_held(cache, "key", raising(KeyboardInterrupt()))
    computed = []

    def compute() -> str:
        computed.append(1)
        return "value"

    assert cache.wait_with(3, go_on, compute) == ["value"] * 3
    assert computed == [1]
    assert cache.statistics().computations == 2


def test_an_interrupt_between_the_end_of_a_computation_and_its_notice_leaves_no_waiter_hanging():
    cache = Observed()
    interrupted = []

    def interrupt(frame, _event, _argument):
        if frame.f_code is not Future.set_result.__code__ or interrupted or not frame.f_locals["self"].done():
            return interrupt
        interrupted.append(1)
        raise KeyboardInterrupt

    def end() -> str:
        sys.settrace(interrupt)
        return "value"

    _, go_on = start_held(cache, "key", end)
    assert cache.wait_with(3, go_on, never) == ["value"] * 3
    assert interrupted == [1]


def test_who_waited_for_a_value_finds_it_stored():
    looked = threading.Event()

    def clock() -> float:
        if threading.current_thread() is thread:  # it stores
            looked.wait(0.3)
        return 0.0

    cache = Observed(clock=clock)
    thread, go_on = start_held(cache, "key", lambda: "value")

    def asks(_: int) -> list[object]:
        found = [cache.get_or_compute("key", never), cache.get("key")]
        looked.set()
        return found

    release = threading.Thread(target=lambda: wait_until(lambda: cache.waiters == 1) or go_on.set())
    release.start()
    assert in_threads(1, asks) == [["value", "value"]]
    release.join(PATIENCE_S)


def test_who_waited_when_the_cache_was_cleared_gets_what_it_waited_for():
    cache = Observed()
    thread, go_on = start_held(cache, "key", lambda: "old")
    release = threading.Event()

    def clear() -> None:
        assert release.wait(PATIENCE_S)
        cache.clear()
        go_on.set()

    threading.Thread(target=clear).start()
    assert cache.wait_with(2, release, never) == ["old"] * 2
    thread.join(PATIENCE_S)
    assert cache.get("key") is None


def test_an_interrupt_reaches_its_own_caller():
    cache: DecisionCache[str] = DecisionCache()
    with pytest.raises(KeyboardInterrupt):
        cache.get_or_compute("key", raising(KeyboardInterrupt()))
    assert cache.get_or_compute("key", lambda: "value") == "value"


def test_a_computation_may_ask_for_its_own_key():
    cache: DecisionCache[str] = DecisionCache()

    def outer() -> str:
        return "outer of " + cache.get_or_compute("key", lambda: "inner")

    (found,) = in_threads(1, lambda _: cache.get_or_compute("key", outer))
    assert found == "outer of inner"
    assert cache.get("key") == "outer of inner"


def test_two_computations_that_need_each_others_keys_do_not_wait_for_each_other():
    first: DecisionCache[str] = DecisionCache()
    second: DecisionCache[str] = DecisionCache()
    together = threading.Barrier(2)

    def crossing(own: DecisionCache[str], other: DecisionCache[str]) -> str:
        def compute() -> str:
            together.wait(PATIENCE_S)
            return "through " + other.get_or_compute("key", lambda: "the other")

        return own.get_or_compute("key", compute)

    found = in_threads(2, lambda index: crossing(first, second) if index else crossing(second, first))
    assert all(str(value).startswith("through ") for value in found), found


def test_clearing_forgets_everything_and_keeps_the_statistics():
    cache: DecisionCache[int] = DecisionCache()
    put(cache, "key")
    cache.get("key")
    cache.clear()
    assert cache.get("key") is None
    assert cache.statistics().hits == 1


def test_what_was_being_computed_when_the_cache_was_cleared_is_not_stored():
    cache: DecisionCache[str] = DecisionCache()
    thread, go_on = start_held(cache, "key", lambda: "old")
    cache.clear()
    go_on.set()
    thread.join(PATIENCE_S)
    assert cache.get("key") is None


def test_who_asks_after_a_clearing_does_not_get_what_began_before():
    cache: DecisionCache[str] = DecisionCache()
    thread, go_on = start_held(cache, "key", lambda: "old")
    cache.clear()
    assert in_threads(1, lambda _: cache.get_or_compute("key", lambda: "new")) == ["new"]
    go_on.set()
    thread.join(PATIENCE_S)
    assert cache.get("key") == "new"


def test_concurrent_clearings_never_leave_an_older_version():
    cache: DecisionCache[int] = DecisionCache()
    version = [0]
    stop = threading.Event()

    def change() -> None:
        for _ in range(300):
            version[0] += 1
            cache.clear()
        stop.set()

    def read(_: int) -> None:
        while not stop.is_set():
            before = version[0]
            # between the two lines of `change` the entry of the version before is still right
            assert cache.get_or_compute("key", lambda: version[0]) >= before - 1

    changing = threading.Thread(target=change)
    changing.start()
    assert in_threads(4, read) == [None] * 4
    changing.join(PATIENCE_S)
    assert cache.get_or_compute("key", lambda: version[0]) == 300
