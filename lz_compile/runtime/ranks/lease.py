"""One rank measures a problem at a time: its turn is a key in the job's store, and ends where it says nothing any more.

No clocks are compared. Who has the turn writes again and again; who waits takes it over when nothing new was written for
the time of a lease.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from lz_compile.ground import events
from lz_compile.runtime.ranks.store import JobStore, StoreGoneError

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
