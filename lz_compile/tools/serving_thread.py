"""The thread that compiles what is served, while calls are answered."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lz_compile.backend import layerzero
from lz_compile.ground import events
from lz_compile.ground.store import Store
from lz_compile.lowering import frames
from lz_compile.tools.serving_calls import Call, Modes, told_of
from lz_compile.tools.turns import StoppedError, Turns

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
        self._model, self._mode, self._options = model, mode, {"compile_threads": _compile_threads(), **(options or {})}
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


def _compile_threads() -> int:
    """How many C++ compilers run at once: as many as there are cores that no call uses."""
    return max((os.cpu_count() or 1) - torch.get_num_threads(), 1)


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
