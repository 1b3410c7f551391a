"""The first import of an optional library happens in a process of its own: a wheel for another ABI ends whoever imports it.

What came of it is kept on disk, by the library's version and files, and those of Python and PyTorch. Those answers are the
compatibility matrix: ``doctor`` shows what was really tried. A library that ends its process or hangs is not imported here
any more. One that raises is: that cannot hurt, and what it lacks may have come since.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from lz_compile.errors import TrialError
from lz_compile.ground.records import Record

#: How long an import may take in a copy of this process, and how much longer in a new one, which imports PyTorch first.
LIMIT_S, START_S = 20.0, 40.0
#: Files of a library that are looked at, and bytes of what it wrote that are told.
_MOST_FILES, _MOST_TOLD = 5_000, 600
#: How a new process says that the import raised.
_RAISED = 97
_CODE = """
import json, sys
sys.path[:], module, name, library = json.loads(sys.argv[1])
from lz_compile.runtime.kernels.libraries import LazyFunction
try:
    LazyFunction(module, name, library).resolve()
except BaseException as error:
    sys.stderr.write(f"\\n{type(error).__name__}: {error}")
    sys.stderr.flush()
    import os
    os._exit(97)
"""

Outcome: TypeAlias = Literal["imports", "raises", "ends its process", "hangs"]
_lock = threading.RLock()


def _be_a_copy() -> None:
    """In a forked process no other thread lives on that could release the lock; what is tried may try what it needs."""
    global _lock  # noqa: PLW0603 one for the process
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_be_a_copy)


@dataclass(frozen=True)
class Tried(Record):
    """What came of importing ``module`` (an adapter of ours, or the library itself) for the first time.

    ``text`` is what it raised or wrote last, ``seconds`` what the trial took, ``files`` a hash of the library's files.
    """

    library: str
    module: str
    version: str
    torch: str
    python: str
    files: str
    outcome: Outcome
    text: str
    seconds: float

    @property
    def is_harmless(self) -> bool:
        """Whether it can be imported without an end to the process."""
        return self.outcome in ("imports", "raises")


def tried(module: str, name: str, library: str, version: str, run: Callable[[], Any], *, again: bool = False) -> Tried:
    """What came of a first import, now or earlier.

    Args:
        module: it is to be imported.
        name: what of it is needed.
        library: the module of the library itself, which is imported before.
        version: of the library, empty where it has none.
        run: imports it.
        again: try again what was tried.
    """
    from lz_compile.ground.store import Store  # whose parser the policy does without

    root = library.partition(".")[0]
    files = _digest_of(root)
    facts = {
        "module": module, "name": name, "library": library, "version": version, "torch": str(torch.__version__),
        "python": platform.python_version(), "machine": platform.machine(), "files": files,
        "search path": os.environ.get("LD_LIBRARY_PATH", ""), "preload": os.environ.get("LD_PRELOAD", ""),
    }  # fmt: skip
    key, store = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(), Store("libraries")
    with _lock:  # of threads that ask at once, one tries
        known = None if again else store.load(key, Tried)
        if known is not None:
            return known
        start = time.perf_counter()
        outcome, text = _outcome(f"importing {module}", run, (module, name, library))
        seconds = round(time.perf_counter() - start, 3)
        told = (facts["torch"], facts["python"], files[:16])
        found = Tried(library, module, version, *told, outcome, text.strip()[-_MOST_TOLD:], seconds)
        store.save(key, asdict(found))
        return found


def _outcome(subject: str, run: Callable[[], Any], names: tuple[str, str, str]) -> tuple[Outcome, str]:
    """By a copy of this process, which is fast; by a new one where a copy cannot tell, or what it lacks may be to blame."""
    from lz_compile.lowering import child

    if sys.platform != "linux" or torch.cuda.is_initialized():
        return _in_a_new_process(names)
    with tempfile.TemporaryFile() as said:
        try:
            child.run_apart(subject, lambda: _quietly(run, said.fileno()), LIMIT_S)
        except child.ImpossibleError:
            return _in_a_new_process(names)
        except TrialError as error:
            if not error.is_fatal:
                return "raises", error.what.removeprefix("raised ")
            found = _in_a_new_process(names)  # a copy has no threads but one: what it lacks may have ended it
            said.seek(0)
            return found if found[1] else (found[0], f"{error.what}: {said.read().decode(errors='replace')}")
        return "imports", ""


def _quietly(run: Callable[[], Any], error_stream: int) -> None:
    """What a library says on its way out is read afterwards; of Python's own stack there is nothing to tell."""
    faulthandler.disable()
    os.dup2(error_stream, 2)
    run()


def _in_a_new_process(names: tuple[str, str, str]) -> tuple[Outcome, str]:
    ours = str(Path(__file__).resolve().parents[3])
    given = json.dumps([[*sys.path, ours], *names])
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, given],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S + START_S)
        except subprocess.TimeoutExpired:
            return "hangs", f"it was not imported within {LIMIT_S:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
    if code == 0:
        return "imports", ""
    if code == _RAISED:
        return "raises", text.rpartition("\n")[2]
    ending = f"ended its process with code {code}" if code > 0 else f"ended its process by {_signal(-code)}"
    return "ends its process", f"{ending}{': ' if text else ''}{text[-_MOST_TOLD:]}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _digest_of(root: str) -> str:
    """A hash of a library's files: its own module's content, of the others names, sizes and times."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError, AttributeError):  # it says itself that it is not there
        spec = None
    if spec is None:
        return ""
    digest = sha256()
    for path in (spec.origin, *(file for place in spec.submodule_search_locations or () for file in _files(place))):
        if path is None or not os.path.isfile(path):
            continue
        found = os.stat(path)
        digest.update(f"{path}:{found.st_size}:{found.st_mtime_ns}\n".encode())
    if spec.origin is not None and os.path.isfile(spec.origin):
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()


def _files(place: str) -> Iterator[str]:
    """Of a package, what Python and the loader read, in order, up to a number."""
    count = 0
    for directory, folders, names in os.walk(place):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".so", ".pyd", ".dll")) or ".so." in name:
                yield os.path.join(directory, name)
                count += 1
                if count >= _MOST_FILES:
                    return
