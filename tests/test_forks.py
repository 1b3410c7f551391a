"""A process that is forked while another thread works waits for nothing that this thread would have ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from lz_compile.ground import telemetry
from lz_compile.runtime.choose.decision_cache import DecisionCache
from lz_compile.runtime.kernels import first_import, registry
from lz_compile.runtime.measure import cost
from lz_compile.runtime.policy import policy

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
#: What a forked process has for its call, and a thread for its turn.
PATIENCE_S = 5

decisions = DecisionCache[str]()

#: What a thread holds, what a forked process calls meanwhile, and what that gives.
HELD: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "rates": (lambda: cost._lock, lambda: not cost._lock.locked()),
    "kernels": (lambda: registry._state.lock, lambda: "inductor" in registry.kernels("attention.only_here")),
    "policy": (lambda: policy._mutex, lambda: policy.configure(deterministic=False) is None),
    "counts": (lambda: telemetry._lock, lambda: telemetry.count("forked") is None),
    "trials": (lambda: first_import._lock, lambda: first_import._lock.acquire() and not first_import._running),
}


def answer_of_a_copy(call: Callable[[], bool]) -> int:
    """The exit status of a process that is forked now: 0 where the call is true; -14 where it does not end in time."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        with suppress(BaseException):
            os._exit(0 if call() else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def answer_while(holding: Callable[[Callable[[], None]], Any], call: Callable[[], bool]) -> int:
    """The same, forked while another thread is in the middle of ``holding``, which calls what it is given there."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_end.wait(4 * PATIENCE_S)

    thread = threading.Thread(target=holding, args=(hold,))
    thread.start()
    try:
        assert is_held.wait(PATIENCE_S)
        return answer_of_a_copy(call)
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("name", HELD)
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_process(name: str) -> None:
    lock, call = HELD[name]

    def holding(hold: Callable[[], None]) -> None:
        with lock():
            hold()

    assert answer_while(holding, call) == 0


def test_a_thread_that_forks_while_it_holds_a_lock_releases_it_in_both_processes() -> None:
    with cost._lock:
        assert answer_of_a_copy(lambda: not cost._lock.locked()) == 0
        assert cost._lock.locked()
    assert not cost._lock.locked()


def test_a_decision_that_another_thread_computes_is_computed_again_in_a_forked_process() -> None:
    def holding(hold: Callable[[], None]) -> None:
        decisions.get_or_compute("key", lambda: hold() or "ours")  # type: ignore[func-returns-value]

    assert answer_while(holding, lambda: decisions.get_or_compute("key", lambda: "its own") == "its own") == 0
    assert decisions.get("key") == "ours"


def test_a_process_that_is_forked_while_kernels_are_found_has_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, add = set(registry.kernels("attention")), registry._add_descriptor
    state = registry._State()
    monkeypatch.setattr(registry, "_state", state)
    registry.forks.renewed(state, lock=threading.RLock, found=state.found_by_a_copy)

    def holding(hold: Callable[[], None]) -> None:
        def adding(table: Any, path: Any, module: str) -> None:
            add(table, path, module)
            hold()

        registry._add_descriptor = adding
        registry.kernels("attention")

    def found() -> bool:
        registry._add_descriptor = add
        return set(registry.kernels("attention")) >= everything

    try:
        assert answer_while(holding, found) == 0
    finally:
        registry._add_descriptor = add
