"""Code that may hang, exit or crash, run in a copy of this process: what comes of it is an error that can be caught.

Kernels that do not come with this package are tried so. A copy is made by ``fork``: nothing has to be pickled but results,
so that closures and functions of a notebook can be tried as well. It computes with one thread, for the others are not copied.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import torch

from lz_compile.errors import TrialError
from lz_compile.ground import events
from lz_compile.lowering import frames

#: How long a trial may take.
LIMIT_S = 60.0
_LONGEST_PAUSE_S = 0.02
#: What autograd says in a copy of a process whose own threads computed gradients for an accelerator.
_BAD_FORK = "fork-based multiprocessing"


def why_not(devices: Collection[torch.device]) -> str:
    """Why code on these devices cannot be tried in a copy of this process; empty where it can."""
    if sys.platform != "linux":
        return f"a process that uses PyTorch cannot be copied on {sys.platform}"
    others = sorted({device.type for device in devices} - {"cpu"})
    return f"a copy of a process cannot use {' and '.join(others)}" if others else ""


def attempt(
    subject: str, run: Callable[[], Any], devices: Collection[torch.device], limit_s: float | None = None
) -> Any:
    """What ``run`` gives, computed apart where that is possible, and in this process with an event (one) where it is not.

    Args:
        subject: for people, what is run.
        run: gives tensors, numbers and texts, in lists, tuples and dictionaries with names.
        devices: that it uses.
        limit_s: how long it may take (default: :data:`LIMIT_S`).

    Raises:
        TrialError: it raised in the copy; ``is_fatal`` where the copy hung, exited or was killed.
        Exception: what it raised in this process.
    """
    reason = why_not(devices)
    if not reason:
        try:
            return run_apart(subject, run, LIMIT_S if limit_s is None else limit_s)
        except ImpossibleError as error:
            reason = str(error)
    if (subject, reason) not in _told:  # once, not for every run
        _told.add((subject, reason))
        text = f"{subject} is tried in this process, which ends if that hangs or exits: {reason}"
        events.record("TRIAL_NOT_APART", text)
    return run()


#: How a copy ends that cannot say what came of it.
_UNTOLD = 98
_UNTOLD_TEXT = f"ended its process with code {_UNTOLD}"
#: What was told: subjects with reasons.
_told: set[tuple[str, str]] = set()


class ImpossibleError(Exception):
    """A copy cannot be made, or cannot do this; nobody is to blame."""


def run_apart(subject: str, run: Callable[[], Any], limit_s: float) -> Any:
    """What ``run`` gives, computed in a copy of this process and nowhere else.

    Raises:
        TrialError: as of :func:`attempt`.
        ImpossibleError: a copy cannot be made, or cannot do this.
    """
    with Copy(subject, run) as copy:
        return copy.result(limit_s)


class Copy:
    """A copy of this process that runs something, from now on. Whoever leaves it stops it."""

    def __init__(self, subject: str, run: Callable[[], Any]) -> None:
        self._subject, self._directory = subject, tempfile.TemporaryDirectory(prefix="lz_compile_trial_")
        self._path = Path(self._directory.name) / "outcome"
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._pid = os.fork()
        except OSError as error:
            self._directory.cleanup()
            raise ImpossibleError(f"no process can be started ({error})") from error
        if self._pid == 0:
            _be_the_copy(run, self._path)

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, if it has not ended, and forget what it gave."""
        self._stop()
        self._directory.cleanup()

    def _stop(self) -> None:
        pid, self._pid = self._pid, 0
        if pid:
            _stop(pid)

    def result(self, limit_s: float) -> Any:
        """What it gives, within ``limit_s`` seconds from now; asked once.

        Raises:
            TrialError: as of :func:`attempt`.
            ImpossibleError: a copy cannot do this.
        """
        ending = self._wait(limit_s)
        if ending == _UNTOLD_TEXT:
            raise ImpossibleError("what it gives cannot be written to a temporary file")
        if ending:
            raise TrialError(self._subject, ending, is_fatal=True)
        try:
            with frames.apart():  # while something is traced, tensors would be loaded without their values
                outcome = torch.load(self._path, weights_only=True)
        except Exception as error:
            text = f"ended its process before it gave a result ({type(error).__name__})"
            raise TrialError(self._subject, text, is_fatal=True) from error
        events.pass_on(outcome["events"])
        if _BAD_FORK in outcome["error"]:
            raise ImpossibleError(
                "gradients cannot be computed in a copy of a process that computed some on an accelerator"
            )
        if outcome["error"]:
            raise TrialError(self._subject, outcome["error"], is_fatal=False)
        return outcome["value"]

    def _wait(self, limit_s: float) -> str:
        """Wait, and stop it after ``limit_s``: how it failed, empty where it ended by itself as it should."""
        end, pause = time.monotonic() + limit_s, 0.0005
        try:
            while pid := self._pid:
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._pid = 0
                    return ending(os.waitstatus_to_exitcode(status))
                if time.monotonic() > end:
                    return f"gave no result within {limit_s:g} s in a process of its own, with one thread"
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        except ChildProcessError:  # somebody else in this program waits for all processes: the file tells
            self._pid = 0
            return ""
        finally:
            self._stop()
        return "was stopped"


def _be_the_copy(run: Callable[[], Any], path: Path) -> NoReturn:
    """Leave the outcome in a file. Whatever happens, nothing of the program goes on here, not even its ``atexit``."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # to be stopped with everything that it starts
        torch.set_num_threads(1)
        value, failure = None, ""
        with events.collect() as happened:
            try:
                value = run()
            except BaseException as error:  # noqa: BLE001 told to whoever waits
                failure = f"raised {type(error).__name__}: {error}"
        outcome = {"value": value, "error": failure, "events": [(each.code, each.message) for each in happened]}
        try:
            torch.save(outcome, path)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 told to whoever waits
            torch.save({**outcome, "value": None, "error": f"gave no tensors ({type(error).__name__}: {error})"}, path)
        code = 0
    except (OSError, RuntimeError):  # torch's own, where a file cannot be written
        code = _UNTOLD
    finally:
        os._exit(code)


def _stop(pid: int) -> None:
    for stop in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            stop(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def ending(code: int) -> str:
    """How a process has ended, by its exit code; empty for one that has done what it should."""
    if code >= 0:
        return f"ended its process with code {code}" if code else ""
    try:
        return f"ended its process by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended its process by signal {-code}"
