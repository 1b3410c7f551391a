"""An import in another process, which a thread of this one watches: by a copy of this process, or by a new one."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from lz_compile.errors import TrialError

if TYPE_CHECKING:
    from lz_compile.lowering.child import Copy

#: How long an import may take in a copy of this process, and in a new one, which imports PyTorch first.
COPY_S, NEW_S = 10.0, 60.0
#: A process whose maker was killed ends by itself, so much later.
_ORPHAN_S = 5
#: Bytes of what a library wrote that are told.
MOST_TOLD = 600
#: How a new process says that the import raised.
_RAISED = 97
_CODE = """
import json, signal, sys
sys.path[:], module, name, library, limit = json.loads(sys.argv[1])
getattr(signal, "alarm", id)(limit)
from lz_compile.runtime.kernels.libraries import LazyFunction
try:
    LazyFunction(module, name, library).resolve()
except BaseException as error:
    sys.stderr.write(f"\\n{type(error).__name__}: {error}")
    sys.stderr.flush()
    import os
    os._exit(97)
"""

Outcome: TypeAlias = Literal["imports", "raises", "ends its process", "hangs", "is being tried"]


class ImportTrial:
    """A trial from its beginning on; it ends with this process at the latest.

    Args:
        names: module, what of it is needed, and the library that is imported before.
        ended: is told outcome, text and seconds, in the thread that watches.
    """

    def __init__(
        self, names: tuple[str, str, str], run: Callable[[], Any], ended: Callable[[Outcome, str, float], None]
    ) -> None:
        self._names, self._ended, self._start = names, ended, time.perf_counter()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 it is closed when the trial has ended
        self._maker, self._is_stopped = os.getpid(), False
        self._copy = self._copied(run)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name=f"first import of {names[0]}", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    @property
    def is_copy(self) -> bool:
        """Whether it began in a copy of this process, which has PyTorch already."""
        return self._copy is not None

    @property
    def seconds(self) -> float:
        """For how long it has been going on."""
        return time.perf_counter() - self._start

    def wait(self, limit_s: float | None) -> None:
        """Until it has ended, or for so many seconds."""
        self._thread.join(limit_s)

    def stop(self) -> None:
        """End the process where it goes on, without an answer: this one ends."""
        if os.getpid() != self._maker:
            return
        self._is_stopped = True
        if self._copy is not None:
            self._copy.close()
        if self._process is not None:
            _kill(self._process)

    def _watch(self) -> None:
        outcome, text = self._outcome()
        atexit.unregister(self.stop)
        self._said.close()
        if not self._is_stopped:
            self._ended(outcome, text, self.seconds)

    def _copied(self, run: Callable[[], Any]) -> Copy | None:
        """Made by whoever asks, whose locks it has; None where none can tell."""
        from lz_compile.lowering import child

        if sys.platform != "linux" or torch.cuda.is_initialized():
            return None
        try:
            return child.Copy(f"importing {self._names[0]}", lambda: _quietly(run, self._said.fileno()))
        except child.ImpossibleError:
            return None

    def _outcome(self) -> tuple[Outcome, str]:
        """By the copy; by a new process where a copy cannot tell, or what it lacks may be to blame."""
        from lz_compile.lowering import child

        if self._copy is None:
            return self._in_a_new_process()
        try:
            with self._copy:
                self._copy.result(COPY_S)
        except child.ImpossibleError:
            return self._in_a_new_process()
        except TrialError as error:
            if not error.is_fatal:
                return "raises", error.what.removeprefix("raised ")
            found = self._in_a_new_process()  # a copy has no threads but one: what it lacks may have ended it
            self._said.seek(0)
            return found if found[1] else (found[0], f"{error.what}: {self._said.read().decode(errors='replace')}")
        return "imports", ""

    def _in_a_new_process(self) -> tuple[Outcome, str]:
        from lz_compile.lowering import child

        ours = str(Path(__file__).resolve().parents[3])
        given = json.dumps([[*sys.path, ours], *self._names, int(NEW_S) + _ORPHAN_S])
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, given],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            self._process = process
            if self._is_stopped:
                _kill(process)
            try:
                code = process.wait(NEW_S)
            except subprocess.TimeoutExpired:
                return "hangs", f"it was not imported within {NEW_S:g} s"
            finally:
                _kill(process)
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
        if code == 0:
            return "imports", ""
        if code == _RAISED:
            return "raises", text.rpartition("\n")[2]
        return "ends its process", f"{child.ending(code)}{': ' if text else ''}{text[-MOST_TOLD:]}"


def _quietly(run: Callable[[], Any], error_stream: int) -> None:
    """What a library says on its way out is read afterwards; of Python's own stack there is nothing to tell."""
    faulthandler.disable()
    os.dup2(error_stream, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(COPY_S) + _ORPHAN_S)
    run()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
    process.wait()
