"""The thread that compiles what is served, while calls are answered."""

from __future__ import annotations

import gc
import hashlib
import inspect
import itertools
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lz_compile.backend import layerzero
from lz_compile.ground import events
from lz_compile.ground.store import Store
from lz_compile.lowering import frames
from lz_compile.tools.serving_calls import Call, Modes, told_of

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
    """Whose turn it is: calls of any thread first, one compile otherwise, which stands still while others work.

    Python runs one thread at a time, and may switch at each of the hundreds of operators of a model, for milliseconds. So a
    compile beside it makes a call many times slower. Here the compiling thread asks at every call of a Python function
    whether somebody is answering, and waits until nobody is.
    """

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


#: Of a model, the shapes that are remembered for the next process.
_MOST_REMEMBERED = 256
#: How often compiling a shape may fail: a reason may pass, as what another thread does.
_MOST_FAILURES = 2
#: Of an error, what a state tells; the event has all of it.
_MOST_TEXT = 300
#: How often a thread that waits looks whether it still should.
_LOOK_S = 0.05
_numbers = itertools.count()


class _CompiledError(BaseException):
    """Raised in place of running what was compiled in the background."""


class _Local(threading.local):
    is_compiling = False
    has_run = False


@dataclass
class Shape:
    """Calls of one signature; ``state`` is new, waiting, ready or failed.

    ``function`` is compiled, by all of its compiles: Dynamo chooses among them by their guards.
    """

    name: str
    function: Callable[..., Any]
    state: str = "new"
    run: Callable[..., Any] | None = None
    failure: str = ""
    usual_s: float = 0.0
    compiles: int = 0
    failures: int = 0
    agrees: bool | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    def settle(self, state: str, failure: str = "") -> None:
        """End waiting."""
        self.state, self.failure = state, failure
        self.settled.set()


@dataclass(frozen=True)
class Job:
    """A call that is to be compiled, and the modes that it was made in."""

    shape: Shape
    call: Call
    modes: Modes


class Compiler:
    """Compiles what is asked for, one after the other, in a thread of its own, and runs nothing."""

    def __init__(
        self, model: Callable[..., Any], mode: str | None, options: Mapping[str, Any] | None, queued: int
    ) -> None:
        # As many C++ compilers run at once as there are cores that no call uses.
        compilers = max((os.cpu_count() or 1) - torch.get_num_threads(), 1)
        self._model, self._mode, self._options = model, mode, {"compile_threads": compilers, **(options or {})}
        self._jobs: queue.Queue[Job | None] = queue.Queue(queued)
        self.turns, self.local, self.compile_s, self.is_stopped = Turns(), _Local(), 0.0, False
        self._store, self._key = Store("shapes"), key_of(model)
        self.remembered: dict[str, Any] = self._store.load(self._key, dict) or {}
        self._thread = threading.Thread(target=self._work, name="lz_compile.serve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, in the middle of a compile if need be."""
        self.is_stopped = True
        self.turns.stop()
        with suppress(queue.Full):  # it looks whether to go on after every job
            self._jobs.put_nowait(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def offer(self, job: Job, *, wait: bool) -> bool:
        """Whether a job found a place in the queue."""
        while not self.is_stopped:
            try:
                self._jobs.put(job, block=wait, timeout=_LOOK_S)
            except queue.Full:
                if wait:
                    continue
                return False
            return True
        return False

    @property
    def is_alive(self) -> bool:
        """Whether it compiles: not when it was stopped, nor in a process that was forked."""
        return self._thread.is_alive() and not self.is_stopped

    def wait(self, shape: Shape, end: float | None = None) -> bool:
        """Wait for a shape until it is settled, at most until the time ``end``; whether it is."""
        while self.is_alive and (end is None or time.monotonic() < end):
            if shape.settled.wait(_LOOK_S):
                return True
        return shape.settled.is_set()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            shape, start = job.shape, time.perf_counter()
            try:
                if self.is_stopped:
                    raise StoppedError
                shape.run = self._compiled(job)
            except StoppedError:
                shape.settle("new")
                break
            except BaseException as error:  # noqa: BLE001 what cannot be compiled is answered eagerly; the thread goes on
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_TEXT]}"
                shape.failures += 1
                events.record("SERVED_EAGERLY", f"{shape.name} cannot be compiled: {text}", error)
                shape.settle("new" if shape.failures < _MOST_FAILURES else "failed", text)
            else:
                self._remember(job)
                shape.settle("ready")
            self.compile_s += time.perf_counter() - start
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.shape.settle("new")

    def _compiled(self, job: Job) -> Callable[..., Any]:
        compiled = torch.compile(job.shape.function, backend=self._backend, fullgraph=True, dynamic=False)
        args, kwargs = job.call
        self.local.is_compiling = True
        try:
            with job.modes.entered(), frames.unlimited_recompiles(), self.turns.compile():
                compiled(*args, **kwargs)
        except _CompiledError:
            job.shape.compiles += 1
            return frames.run_only(compiled)
        finally:
            self.local.is_compiling = False
        raise ValueError("there is nothing in it to compile")

    def _backend(self, module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = layerzero(module, inputs, mode=self._mode, options=self._options)
        local = self.local

        def run(*args: Any) -> Any:
            if local.is_compiling:
                raise _CompiledError
            local.has_run = True
            return compiled(*args)

        return run

    def _remember(self, job: Job) -> None:
        try:
            told = {"call": told_of([list(job.call[0]), dict(job.call[1])]), "modes": job.modes.told()}
            text = json.dumps(told, allow_nan=False)
        except (TypeError, ValueError) as error:
            events.record("SHAPE_NOT_KEPT", f"{job.shape.name} is not remembered for the next process: {error}")
            return
        self.remembered = {**self.remembered, hashlib.sha256(text.encode()).hexdigest()[:16]: told}
        self._store.save(self._key, dict(list(self.remembered.items())[-_MOST_REMEMBERED:]))


def apart(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model as a function with code of its own: Dynamo keeps what it compiled by code, and looks through all of that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"served_{next(_numbers)}")
    return call


def key_of(model: Callable[..., Any]) -> str:
    """A hash of a model's code and of the shapes of its parameters."""
    digest = hashlib.sha256()
    kinds: list[Any] = [type(each) for each in model.modules()] if isinstance(model, nn.Module) else [model]
    for kind in dict.fromkeys(kinds):
        digest.update(f"{kind.__module__}.{getattr(kind, '__qualname__', kind)}".encode())
        with suppress(OSError, TypeError):  # written nowhere, as in a console: its name has to do
            digest.update(Path(inspect.getsourcefile(kind) or "").read_bytes())
    if isinstance(model, nn.Module):
        for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
    return digest.hexdigest()
