"""Trials in a copy of the process: what hangs, exits or crashes there is an error here, and nothing else happens."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from lz_compile.errors import TrialError
from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import child

CPU = [torch.device("cpu")]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")


def crash() -> None:
    """As an invalid access to memory does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def exits_in_a_thread() -> None:
    threading.Thread(target=os._exit, args=(4,)).start()
    time.sleep(30)


def hangs_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def raises() -> NoReturn:
    raise ValueError("not for me")


FATAL: dict[str, tuple[Callable[[], Any], str]] = {
    "hangs": (hangs_deaf, "gave no result within 0.3 s"),
    "waits": (lambda: time.sleep(30), "gave no result within 0.3 s"),
    "exits": (lambda: os._exit(3), "ended its process with code 3"),
    "exits with nothing": (lambda: os._exit(0), "ended its process before it gave a result"),
    "exits in a thread": (exits_in_a_thread, "ended its process with code 4"),
    "crashes": (crash, "ended its process by SIGSEGV"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended its process by SIGKILL"),
    "aborts": (os.abort, "ended its process by SIGABRT"),
}


@pytest.mark.parametrize("name", FATAL)
def test_what_ends_or_holds_up_its_process_is_an_error_here(name: str) -> None:
    run, text = FATAL[name]
    start = time.monotonic()
    with pytest.raises(TrialError, match=text) as raised:
        child.attempt("a kernel", run, CPU, limit_s=0.3 if "0.3" in text else 20)
    assert raised.value.is_fatal
    assert time.monotonic() - start < 5


def test_a_result_that_is_no_tensor_is_told() -> None:
    with pytest.raises(TrialError, match="gave no tensors") as raised:
        child.attempt("a kernel", threading.Lock, CPU)
    assert not raised.value.is_fatal


@pytest.mark.parametrize("run", [raises, sys.exit])
def test_what_is_raised_there_is_told_here(run: Callable[[], Any]) -> None:
    with pytest.raises(TrialError, match=r"ValueError: not for me|SystemExit") as raised:
        child.attempt("a kernel", run, CPU)
    assert not raised.value.is_fatal


def test_results_come_back_and_nothing_else_does() -> None:
    given = torch.arange(6.0).reshape(2, 3)
    changed: list[int] = []

    def run() -> Any:
        changed.append(1)
        given.zero_()
        return {"tensors": [given + 1, given.bfloat16().t()], "text": "a", "number": 1.5, "none": None}

    found = child.attempt("a kernel", run, CPU)
    assert torch.equal(found["tensors"][0], torch.ones(2, 3))
    assert found["tensors"][1].dtype == torch.bfloat16
    assert (found["text"], found["number"], found["none"]) == ("a", 1.5, None)
    assert (given.sum().item(), changed) == (15.0, [])


def test_gradients_can_be_computed_there_after_some_were_computed_here() -> None:
    def gradient() -> Any:
        x = torch.ones(300, 300, requires_grad=True)
        return torch.autograd.grad((x @ x).sum(), x)[0]

    with isolated():
        assert torch.equal(child.attempt("a kernel", gradient, CPU), gradient())


def test_many_threads_here_do_not_hold_up_a_product_there() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        x = torch.ones(500, 500)
        expected = (x @ x).exp_().sum(0)  # starts the threads
        assert torch.equal(child.attempt("a kernel", lambda: (x @ x).exp_().sum(0), CPU), expected)
    finally:
        torch.set_num_threads(before)


def test_events_there_are_events_here() -> None:
    with events.collect() as happened:
        child.attempt("a kernel", lambda: events.record("KERNEL_FAILED", "there"), CPU)
    assert [(event.code, event.message) for event in happened] == [("KERNEL_FAILED", "there")]


def test_whatever_the_process_started_is_stopped_with_it(tmp_path) -> None:
    path = tmp_path / "pid"

    def run() -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        path.write_text(str(pid))
        time.sleep(60)

    with pytest.raises(TrialError):
        child.attempt("a kernel", run, CPU, limit_s=2)
    status = Path(f"/proc/{path.read_text()}/stat")

    def is_gone() -> bool:
        try:
            return status.read_text().split()[2] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until = time.monotonic() + 20
    while not is_gone() and time.monotonic() < until:
        time.sleep(0.05)
    assert is_gone()


@pytest.mark.parametrize("why", ["platform", "device", "no process", "no space", "gradients"])
def test_what_cannot_be_tried_apart_is_an_event_and_tried_here(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork(*_: Any) -> int:
        raise BlockingIOError("too many processes, or no space")

    here = os.getpid()

    def run() -> bool:
        if why == "gradients" and os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return os.getpid() == here

    devices = [torch.device("cuda", 0)] if why == "device" else CPU
    if why == "platform":
        monkeypatch.setattr(sys, "platform", "win32")
    if why == "no space":
        monkeypatch.setattr(torch, "save", no_fork)
    if why == "no process":
        monkeypatch.setattr(os, "fork", no_fork)
    with events.collect() as happened:
        assert child.attempt("my.kernel", run, devices)
        assert child.attempt("my.kernel", run, devices), "which is told once"
    (event,) = happened
    assert event.code == "TRIAL_NOT_APART"
    assert event.message.startswith("my.kernel is tried in this process, which ends if that hangs or exits: ")
