"""The job's key-value store with a limit on time: whatever it does, nobody waits for it longer than that.

Every question runs in a thread of its own, on a connection of its own. One that fails or takes too long is the last: from
then on the store counts as gone, and everybody decides alone.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

from lz_compile.ground import events

Answer = TypeVar("Answer")
#: Part of every key: ranks that write something else do not read ours.
PREFIX = "layerzero/1"
#: What the C++ side of a store may take beyond our own limit, so that ours is told and not its.
_SLACK = 2.0


class StoreGoneError(Exception):
    """The store cannot be asked any more; the text says why."""


class _File:
    """The file of a ``FileStore``, which only ever grows; its process answers from memory, whatever became of the file."""

    def __init__(self, store: Any) -> None:
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._path: str | None = getattr(store, "path", None)
        self._number = self._size = 0

    def check(self) -> None:
        """Whether what was written is where others read it.

        Raises:
            OSError: the file is gone.
            RuntimeError: it is another one, or shorter than it was.
        """
        if self._path is None:
            return
        now = os.stat(self._path)
        if now.st_ino != (self._number or now.st_ino) or now.st_size < self._size:
            raise RuntimeError(f"{self._path} was written anew")
        self._number, self._size = now.st_ino, now.st_size


class JobStore:
    """A store of ``torch.distributed``, asked for ``timeout_s`` seconds at most. Threads may share one.

    Raises: every method a StoreGoneError, the first time after ``timeout_s`` at most, then at once.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.gone = ""
        self._given: Any = store
        self._own: Any = None
        self._pid = os.getpid()
        self._file = _File(store)
        self._questions: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, key: str) -> bytes | None:
        """What is kept under a key; None: nothing."""

        def read(store: Any) -> bytes | None:
            return bytes(store.get(key)) if store.check([key]) else None

        return self._ask(read)

    def has(self, keys: Iterable[str]) -> bool:
        """Whether something is kept under every one of some keys."""
        listed = list(keys)
        return self._ask(lambda store: bool(store.check(listed)))

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, whatever was there."""
        self._ask(lambda store: store.set(key, value))

    def exchange(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Keep a value where ``expected`` is kept (empty: nothing); what is kept then: the first writer wins."""
        return self._ask(lambda store: bytes(store.compare_set(key, expected, value)))

    def give_up(self, why: str) -> StoreGoneError:
        """Never ask again; the error to raise."""
        self.gone = self.gone or why
        return StoreGoneError(self.gone)

    # ---- the thread that asks ---------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Any], Answer]) -> Answer:
        if self._pid != os.getpid():
            raise self.give_up("this process was forked from the one that had joined")
        if self.gone:
            raise StoreGoneError(self.gone)
        answer: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="lz_compile-ranks", daemon=True)
                self._thread.start()
        self._questions.put((question, answer))
        try:
            found: Answer = answer.result(self.timeout_s)
        except TimeoutError:
            # A thread that comes back from C++ when Python has ended aborts the process.
            atexit.register(wait, [answer], _SLACK * self.timeout_s)
            raise self.give_up(f"it did not answer within {self.timeout_s:g} s") from None
        except Exception as error:  # torch's stores raise RuntimeErrors of many kinds, all of which mean this
            raise self.give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        return found

    def _serve(self) -> None:
        while True:
            question, answer = self._questions.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                found = question(self._connected())
                self._file.check()
                answer.set_result(found)
            except Exception as error:  # noqa: BLE001 whoever asked raises it
                answer.set_exception(error)

    def _connected(self) -> Any:
        """A connection of our own, so that no collective waits for us, nor we for it."""
        if self._own is None:
            own = self._given.clone() if hasattr(self._given, "clone") else self._given
            own.set_timeout(timedelta(seconds=_SLACK * self.timeout_s))
            from torch.distributed.distributed_c10d import PrefixStore  # a build without it has no stores

            self._own, self._given = PrefixStore(PREFIX, own), None
        return self._own


# ---- leases ----------------------------------------------------------------------------------------------------------
#
# One rank measures a problem at a time: its turn is a key in the job's store, and ends where it says nothing any more. No
# clocks are compared. Who has the turn writes again and again; who waits takes it over when nothing new was written for the
# time of a lease.


#: How a turn comes out: there are no others, this rank measures for all, the job has decided by now, or another rank
#: measures for longer than is waited.
Turn = Literal["alone", "mine", "decided", "theirs"]

_DONE = b"done"
_PAUSE_S = 0.05
#: What of a lease may pass between two signs of life.
_BEAT = 0.25


class Lease:
    """The turn to measure the problem of ``key``, for ``rank``; others may have it after ``lease_s`` without a sign."""

    def __init__(self, store: JobStore, key: str, rank: int, lease_s: float) -> None:
        self._store, self._rank, self._lease_s = store, rank, lease_s
        self._key, self._decision = f"lease/{key}", f"decision/{key}"
        self._held = b""
        self._beats = 0
        self._ended = threading.Event()

    @contextmanager
    def turn(self, budget_s: float) -> Iterator[Turn]:
        """Whose turn it is, after ``budget_s`` of waiting at most.

        Raises:
            StoreGoneError: the store cannot be asked.
        """
        whose = self._waited(budget_s)
        if whose != "mine":
            yield whose
            return
        keeper = threading.Thread(target=self._keep, name="lz_compile-lease", daemon=True)
        keeper.start()
        try:
            yield whose
        finally:
            self._ended.set()
            keeper.join()
            self._give_back()

    def _waited(self, budget_s: float) -> Turn:
        deadline = time.monotonic() + budget_s
        seen, since = b"", time.monotonic()
        while True:
            if self._store.has([self._decision]):
                return "decided"
            found = self._store.exchange(self._key, b"", self._sign())
            if self._is_mine(found):
                return "mine"
            if found == _DONE:  # it was measured, and nothing came of it
                return "decided" if self._store.has([self._decision]) else "theirs"
            now = time.monotonic()
            if found != seen:
                seen, since = found, now
            elif now - since > self._lease_s and self._is_mine(self._store.exchange(self._key, found, self._sign())):
                text = (
                    f"{_holder(found)} said nothing for {self._lease_s:g} s while it measured: rank {self._rank} does"
                )
                events.record("LEASE_EXPIRED", text)
                return "mine"
            if now >= deadline:
                return "theirs"
            time.sleep(min(_PAUSE_S, max(deadline - now, 0.0)))

    def _sign(self) -> bytes:
        """A new sign of life."""
        self._beats += 1
        self._held = json.dumps({"rank": self._rank, "beat": self._beats}).encode()
        return self._held

    def _is_mine(self, found: bytes) -> bool:
        return found == self._held

    def _keep(self) -> None:
        """Say again and again that this rank is at it."""
        while not self._ended.wait(_BEAT * self._lease_s):
            before = self._held
            try:
                if not self._is_mine(self._store.exchange(self._key, before, self._sign())):
                    return  # another rank took it for dead: both measure, and one of them decides
            except StoreGoneError:
                return  # whoever decides is told so

    def _give_back(self) -> None:
        try:
            self._store.exchange(self._key, self._held, _DONE)
        except StoreGoneError as error:
            events.record("STORE_LOST", f"a turn to measure could not be given back: {error}")


def _holder(sign: bytes) -> str:
    """Whose sign of life it was."""
    try:
        return f"rank {json.loads(sign)['rank']}"
    except (ValueError, TypeError, KeyError):
        return "somebody else"
