"""The first import of an optional library happens in a process of its own: a wheel for another ABI ends whoever imports it.

What came of it is kept on disk, by the library's version and files, and those of Python and PyTorch. Those answers are the
compatibility matrix: ``doctor`` shows what was really tried. A library that ends its process or hangs is not imported here
any more. One that raises is: that cannot hurt, and what it lacks may have come since.

Nobody waits long for an answer. A library that takes its time is not used yet, and its import goes on meanwhile: a slow disk
is no hang. What came of it holds from then on, in this process and in later ones.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.ground import events, forks
from lz_compile.ground.records import Record
from lz_compile.runtime.kernels.import_trial import MOST_TOLD, ImportTrial, Outcome

if TYPE_CHECKING:
    from lz_compile.ground.store import Store

#: How long one waits for a library in all before one goes on without it; the start of a new process is not its fault.
PATIENCE_S, START_S = 1.0, 4.0
#: Files of a library that are looked at.
_MOST_FILES = 5_000

_lock = threading.RLock()
#: Trials that go on, and how long this process has waited, by library; how many were answered after that.
_running: dict[str, _Running] = {}
_waited: dict[str, float] = {}
_late = 0
forks.renewed(sys.modules[__name__], _lock=threading.RLock, _running=dict)  # what is tried may try what it needs


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

    @property
    def is_answer(self) -> bool:
        """Whether the trial has ended."""
        return self.outcome != "is being tried"


@dataclass(frozen=True)
class Asked:
    """What is to be imported: ``name`` of ``module``, after the ``library`` (a module, too) of a ``version`` or of none."""

    module: str
    name: str
    library: str
    version: str

    @property
    def root(self) -> str:
        """What is waited for: all that is tried of one library shares the patience."""
        return self.library.partition(".")[0]

    def key(self, files: str) -> str:
        """What an answer is valid for."""
        facts = {
            **asdict(self), "torch": str(torch.__version__), "python": platform.python_version(), "files": files,
            "machine": platform.machine(), "search path": os.environ.get("LD_LIBRARY_PATH", ""),
            "preload": os.environ.get("LD_PRELOAD", ""),
        }  # fmt: skip
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def late_answers() -> int:
    """How many came when somebody had gone on without them: what was decided then may be decided anew."""
    return _late


def tried(asked: Asked, run: Callable[[], Any], *, again: bool = False, waits: bool = True) -> Tried:
    """What came of a first import, now or earlier.

    Args:
        waits: until there is an answer. Otherwise it ``is being tried`` after :data:`PATIENCE_S` seconds, for which only
            the first process waits.
    """
    while True:
        with _lock:  # of threads that ask at once, one tries
            running = _running.get(asked.root)
            if running is None:
                found = _known_or_started(asked, run, again, waits)
                if isinstance(found, Tried):
                    return found
                running = found
        answer = running.answer(waits)
        if running.asked == asked or not answer.is_answer:
            return answer


def _known_or_started(asked: Asked, run: Callable[[], Any], again: bool, waits: bool) -> Tried | _Running:
    from lz_compile.ground.store import Store  # whose parser the policy does without

    files, store = _digest_of(asked.root), Store("libraries")
    known = None if again else store.load(asked.key(files), Tried)
    if known is not None and known.is_answer:
        return known
    running = _Running(asked, files, store, run)
    if known is not None and not waits:  # an earlier process has waited for it, and ended before the answer came
        _waited[asked.root] = running.patience_s
    _running[asked.root] = running
    return running


class _Running:
    """A trial that goes on, and its answer."""

    def __init__(self, asked: Asked, files: str, store: Store, run: Callable[[], Any]) -> None:
        self.asked, self._files, self._store, self._is_late = asked, files, store, False
        self._answer: Tried | None = None
        self._trial = ImportTrial((asked.module, asked.name, asked.library), run, self._ended)
        self.patience_s = PATIENCE_S + (0.0 if self._trial.is_copy else START_S)

    def answer(self, waits: bool) -> Tried:
        """What came of it, or that it goes on."""
        root, start = self.asked.root, time.perf_counter()
        self._trial.wait(None if waits else max(0.0, self.patience_s - _waited.get(root, 0.0)))
        with _lock:
            if self._answer is not None:
                return self._answer
            _waited[root] = _waited.get(root, 0.0) + time.perf_counter() - start
            found = self._told("is being tried", f"{self._trial.seconds:.1f} s so far", self._trial.seconds)
            if not self._is_late:
                self._is_late = True
                self._keep(found)
            return found

    def _ended(self, outcome: Outcome, text: str, seconds: float) -> None:
        global _late  # noqa: PLW0603 one for the process
        with _lock:
            self._answer = self._told(outcome, text, seconds)
            self._keep(self._answer)
            _running.pop(self.asked.root, None)
            _late += self._is_late
        if self._is_late:
            told = f"importing {self.asked.module} {outcome}, as a process of its own showed after {seconds:.1f} s"
            events.record("LIBRARY_TRIED", told, level=logging.INFO)

    def _told(self, outcome: Outcome, text: str, seconds: float) -> Tried:
        asked, where = self.asked, (str(torch.__version__), platform.python_version(), self._files[:16])
        text = text.strip()[-MOST_TOLD:]
        return Tried(asked.library, asked.module, asked.version, *where, outcome, text, round(seconds, 3))

    def _keep(self, found: Tried) -> None:
        self._store.save(self.asked.key(self._files), asdict(found))


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
