"""Decisions by key, for selection on the hot path of eager calls: read without a lock, computed once.

A hit is one lookup in one dict, which is atomic on builds with and without the GIL. What changes that dict holds a lock, for
much less time than a decision takes.

*Bounds*: a full cache drops what is too old, else evicts by second chance. The oldest entry goes; one that was hit since it
was last passed over moves to the back instead. That approximates LRU without changing an order on a hit.

*Single flight*: while a key is computed, other threads wait for that result. Where the computation raises, the waiters raise
the same exception; where it is interrupted (``KeyboardInterrupt``, ``SystemExit``), one waiter computes in its place. A
thread that is itself computing never waits, it computes: neither re-entry nor two computations that need each other's keys
can deadlock, at the price of computing such a key twice.

*Clearing* puts an empty cache in the place of the full one. What began to be computed before is returned to those who asked
before, and is not stored.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as LateError  # Python's own from 3.11 on
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from lz_compile.ground.records import Record
from lz_compile.runtime.policy.settings import CacheSettings

V = TypeVar("V")
#: How often who waits looks whether the end of a computation was told: an interrupt may come between the two.
_LOOK_S = 0.5


@dataclass(frozen=True)
class CacheStatistics(Record):
    """What a cache did since it was made.

    ``hits`` and ``misses`` are counted without a lock: exact under the GIL (but for a hit on an entry in the moment of its
    removal), lower bounds on builds without it. The others are exact. A lookup that waits for another thread's computation
    is a miss. ``expirations`` counts entries removed because of their age, when they are found or make room.
    """

    hits: int
    misses: int
    computations: int
    evictions: int
    expirations: int
    entries: int


class _Entry(Generic[V]):
    """``hits`` serves the statistics; against ``passed_hits`` it says whether the entry was used since it was passed over."""

    __slots__ = ("expires", "hits", "passed_hits", "value")

    def __init__(self, value: V, expires: float) -> None:
        self.value = value
        self.expires = expires
        self.hits = 0
        self.passed_hits = 0


class _Thread(threading.local):
    """Whether this thread is computing, for any cache: two caches can wait for each other too."""

    is_computing = False


_thread = _Thread()


class DecisionCache(Generic[V]):
    """Decisions by key. A key must hold everything that a decision depends on, versions included.

    Most of a hit is the key's hash: tuples of strings and numbers are quick, a frozen dataclass's own hash is not. None is
    not a value, it says that there is none.

    Args:
        settings: how many entries, and how long one lives.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: CacheSettings | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._clock = settings or CacheSettings(), clock
        self._lock = threading.Lock()
        self._live: dict[Hashable, _Entry[V]] = {}  # oldest first
        # By process: a forked one waits for none of its parent's.
        self._flights: dict[tuple[int, Hashable], Future[V]] = {}
        self._misses = self._computations = self._evictions = self._expirations = self._past_hits = 0

    def get(self, key: Hashable) -> V | None:
        """The value, None where there is none or it is too old."""
        entry = self._live.get(key)
        if entry is not None:
            now = self._clock()
            if entry.expires > now:
                entry.hits += 1
                return entry.value
            with self._lock:
                self._remove(key, entry, now)
        self._misses += 1
        return None

    def get_or_compute(self, key: Hashable, compute: Callable[[], V]) -> V:
        """The value; where there is none, ``compute`` is called by one thread and the others wait for its result.

        Raises:
            Exception: what ``compute`` raised, here or in the thread that computed; nothing is stored then.
        """
        entry = self._live.get(key)
        if entry is not None and entry.expires > self._clock():
            entry.hits += 1
            return entry.value
        self._misses += 1
        name = os.getpid(), key
        while True:
            flight: Future[V] = Future()
            try:
                found = self._join(name, flight)
                if isinstance(found, _Entry):
                    return found.value
                if found is flight:
                    return self._fly(key, flight, compute)
            finally:
                flight.cancel()  # one that has ended stays as it is; whoever waits for an interrupted one goes on
                with self._lock:
                    if self._flights.get(name) is flight:
                        del self._flights[name]
            with suppress(CancelledError):
                while not found.done():
                    with suppress(LateError):
                        found.exception(_LOOK_S)
                return found.result()

    def clear(self) -> None:
        """Forget everything. The statistics go on."""
        with self._lock:
            self._past_hits += sum(entry.hits for entry in self._live.values())
            self._live, self._flights = {}, {}

    def statistics(self) -> CacheStatistics:
        """What happened so far."""
        with self._lock:
            hits = self._past_hits + sum(entry.hits for entry in self._live.values())
            counts = self._computations, self._evictions, self._expirations, len(self._live)
        return CacheStatistics(hits, self._misses, *counts)

    def _join(self, name: tuple[int, Hashable], flight: Future[V]) -> _Entry[V] | Future[V]:
        """The entry where there is one by now, else the computation to wait for, else ``flight``: compute."""
        with self._lock:
            entry = self._live.get(name[1])
            if entry is not None and entry.expires > self._clock():
                return entry
            other = self._flights.get(name)
            if other is None or other.done():  # done: its thread was interrupted twice
                self._flights[name] = flight
            elif not _thread.is_computing:
                return other
            self._computations += 1
            return flight

    def _fly(self, key: Hashable, flight: Future[V], compute: Callable[[], V]) -> V:
        live, was_computing = self._live, _thread.is_computing
        try:
            _thread.is_computing = True
            value = compute()
            with self._lock:
                if live is self._live:  # it was not cleared meanwhile
                    self._store(key, value)
            flight.set_result(value)  # only now: who finds a computation that has ended, and no entry, computes again
        except Exception as error:
            flight.set_exception(error)
            raise
        finally:
            _thread.is_computing = was_computing
        return value

    # ---- what changes the entries, under the lock ------------------------------------------------------------------

    def _store(self, key: Hashable, value: V) -> None:
        now = self._clock()
        if key in self._live:
            self._remove(key, self._live[key], now)
        if len(self._live) >= self.settings.max_size:
            self._make_room(now)
        self._live[key] = _Entry(value, now + self.settings.ttl_seconds)

    def _make_room(self, now: float) -> None:
        """Take out the first entry that is too old, or had no hit since it was passed over; else the first."""
        for _ in range(len(self._live)):
            key, entry = next(iter(self._live.items()))
            if entry.expires <= now or entry.hits == entry.passed_hits:
                break
            entry.passed_hits = entry.hits
            self._live[key] = self._live.pop(key)
        key, entry = next(iter(self._live.items()))
        self._evictions += entry.expires > now
        self._remove(key, entry, now)

    def _remove(self, key: Hashable, entry: _Entry[V], now: float) -> None:
        """Take an entry out where it is still there."""
        if self._live.get(key) is entry:
            del self._live[key]
            self._past_hits += entry.hits
            self._expirations += entry.expires <= now
