"""The job's key-value store with a limit on time: whatever it does, nobody waits for it longer than that.

Every question runs in a thread of its own, on a connection of its own. One that fails or takes too long is the last: from
then on the store counts as gone, and everybody decides alone.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

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
