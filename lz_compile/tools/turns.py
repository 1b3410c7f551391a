"""A thread that stands still while others work: calls that are answered go before a compile in the background.

Python runs one thread at a time, and may switch at each of the hundreds of operators of a model, for milliseconds. So a
compile beside it makes a call many times slower. Here the compiling thread asks at every call of a Python function whether
somebody is answering, and waits until nobody is.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lz_compile.lowering import frames

#: How long a compile stands still at least before it looks whether it should: see :meth:`Turns._wait`.
PATIENCE_S = 0.3
#: Of that time, what it has where calls of many threads leave none between them.
DUTY = 1 / 6
#: The share of a call's own time that a compile is left before it, and the most of it.
SHARE, MOST_S = 0.5, 0.05
#: How soon a call gets at Python that a compile has.
SWITCH_S = 0.001
#: A number of collections that there never are.
NEVER = 1 << 30
_SETS_RANDOM_NUMBERS = frozenset({"set_state", "manual_seed", "seed", "set_offset", "graphsafe_set_state"})


class StoppedError(BaseException):
    """Raised inside of a compile that nobody waits for any more."""


class Turns:
    """Whose turn it is: calls of any thread first, one compile otherwise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._calls = 0
        self._ended = self._until = self._longest_s = 0.0
        self._is_compiling = False
        self._is_stopped = False
        self._kept: tuple[torch.Generator, torch.Tensor] | None = None

    @contextmanager
    def call(self, usual_s: float) -> Iterator[None]:
        """Answer a call that takes about ``usual_s``: a compile stands still, after its share of the time."""
        with self._lock:
            is_first = not self._calls
            self._calls += 1
            self._idle.clear()
            share_s = min(SHARE * usual_s, MOST_S) - (time.perf_counter() - self._ended)
            if is_first:
                self._until = time.perf_counter() + share_s
        try:
            if self._is_compiling and is_first and share_s > 0:
                time.sleep(share_s)  # the compile stops by itself then, so that nobody has Python on waking up
            start = time.perf_counter()
            yield
            self._longest_s = max(self._longest_s, time.perf_counter() - start)
        finally:
            with self._lock:
                self._calls -= 1
                self._ended = time.perf_counter()
                if math.isinf(self._until):
                    self._until = self._ended
                if not self._calls:
                    self._idle.set()

    @contextmanager
    def compile(self) -> Iterator[None]:
        """Compile in this thread."""
        with _pauses.short(), frames.traces_apart():
            self._is_compiling = True
            sys.setprofile(self._step)
            try:
                yield
            finally:
                sys.setprofile(None)
                self._kept = None
                self._is_compiling = False

    def stop(self) -> None:
        """End the compile that goes on, wherever it is, and all that follow."""
        self._is_stopped = True
        self._idle.set()

    def _step(self, _frame: FrameType, event: str, called: Any) -> None:
        if self._calls and time.perf_counter() >= self._until:
            self._wait()
        if self._is_stopped:
            sys.setprofile(None)
            raise StoppedError
        if event == "c_call" and getattr(called, "__name__", "") in _SETS_RANDOM_NUMBERS:
            self._keep(getattr(called, "__self__", None))
        elif self._kept is not None and event in ("c_return", "c_exception"):
            generator, state = self._kept
            self._kept = None
            generator.set_state(state)

    def _wait(self) -> None:
        """Stand still until nobody is answering, or for twice the time that a call ever took.

        If none has ended by then, one may wait for a lock that this thread holds: it goes on until one does. If calls come
        without an end, it goes on for a part of the time.
        """
        patience_s, ended = max(PATIENCE_S, 2 * self._longest_s), self._ended
        if not self._idle.wait(patience_s):
            self._until = math.inf if self._ended == ended else time.perf_counter() + DUTY * patience_s

    def _keep(self, generator: Any) -> None:
        """Random numbers that others draw meanwhile are neither seeded nor set back by what a compile does."""
        if isinstance(generator, torch.Generator) and generator in _shared():
            self._kept = generator, generator.get_state()


class _Pauses:
    """Settings of the process while anything is compiled in the background, by any number of threads.

    Calls get at Python sooner; and garbage, whose collection stops all threads, is looked for in young objects only: what
    was there before is frozen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._interval_s, self._thresholds, self._freezes = 0.0, (0, 0, 0), False

    @contextmanager
    def short(self) -> Iterator[None]:
        """Settings as long as the first that came and the last that goes."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._interval_s, self._thresholds = sys.getswitchinterval(), gc.get_threshold()
                self._freezes = gc.get_freeze_count() == 0  # otherwise somebody else does, and would not want it undone
                sys.setswitchinterval(min(self._interval_s, SWITCH_S))
                gc.set_threshold(*self._thresholds[:2], NEVER)
                if self._freezes:
                    gc.freeze()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    gc.set_threshold(*self._thresholds)
                    sys.setswitchinterval(self._interval_s)
                    if self._freezes:
                        gc.unfreeze()


_pauses = _Pauses()


def _shared() -> Iterator[torch.Generator]:
    yield torch.default_generator
    if torch.cuda.is_initialized():
        yield from torch.cuda.default_generators
