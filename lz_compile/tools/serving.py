"""A model that answers at once: what is compiled runs, what is not runs eagerly while it is compiled in the background."""

from __future__ import annotations

import enum
import hashlib
import inspect
import itertools
import json
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lz_compile.backend import layerzero
from lz_compile.compile.options import split
from lz_compile.compile.verification import difference, pairs
from lz_compile.errors import ArgumentError
from lz_compile.ground import events
from lz_compile.ground.records import Record
from lz_compile.ground.store import Store
from lz_compile.lowering import inductor
from lz_compile.tools.progress import bar
from lz_compile.tools.turns import StoppedError, Turns

__all__ = ["Padding", "Served", "ServedState", "serve"]

Call = tuple[Sequence[Any], Mapping[str, Any]]
#: Of a model, the shapes that are remembered for the next process.
_MOST_REMEMBERED = 256
#: How often one shape is compiled, since its guards did not hold; as Dynamo's own limit is.
_MOST_COMPILES = 8
#: How often compiling a shape may fail: a reason may pass, as what another thread does.
_MOST_FAILURES = 2
#: Of shapes that are not compiled, how many are known: those that came last.
_MOST_NEW = 1024
#: Of an error, what a state tells; the event has all of it.
_MOST_TEXT = 300
#: How often a thread that waits looks whether it still should.
_LOOK_S = 0.05
#: Values that are told apart by what they are.
_PLAIN = (
    bool,
    int,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
_numbers = itertools.count()


@dataclass(frozen=True)
class Padding:
    """How a call may be made longer than it is, to a length that is compiled.

    ``dim`` of every tensor whose size there is the first tensor's is filled up to the next of ``sizes``, with the value that
    ``values`` names for an argument (by its name or position; 0 otherwise). Results that have this size in ``dim`` are cut.
    The model has to give the same for it, as with a mask that is 0 there: the first call of each size is compared with eager,
    for which the model runs twice.
    """

    dim: int
    sizes: Sequence[int]
    values: Mapping[str | int, float] = field(default_factory=dict)

    def length_of(self, leaves: Iterable[Any]) -> int | None:
        """The size that is padded, of the first tensor that has the dimension."""
        return next((each.shape[self.dim] for each in leaves if _has(each, self.dim)), None)

    def size_for(self, length: int) -> int | None:
        """The next of the sizes."""
        return next((size for size in self.sizes if size >= length), None)

    def padded(self, call: Call, names: Sequence[str], length: int, size: int) -> Call:
        """The call at a larger size; ``names`` are those of arguments that are given by position."""
        args, kwargs = call
        fills: dict[str | int, float] = {
            names[each] if _is_place(each, names) else each: fill for each, fill in self.values.items()
        }

        def longer(value: Any, fill: float) -> Any:
            if not _has(value, self.dim) or value.shape[self.dim] != length:
                return value
            shape = list(value.shape)
            shape[self.dim] = size - length
            return torch.cat([value, value.new_full(shape, fill)], self.dim)

        def of(name: str | int, argument: Any) -> Any:
            return pytree.tree_map(lambda value: longer(value, fills.get(name, 0)), argument)

        named = [*names[: len(args)], *range(len(names), len(args))]
        return [of(*each) for each in zip(named, args, strict=True)], {name: of(name, kwargs[name]) for name in kwargs}

    def cut(self, result: Any, length: int, size: int) -> Any:
        """What a call at a larger size gives, at its own."""
        return pytree.tree_map(
            lambda value: (
                value.narrow(self.dim, 0, length) if _has(value, self.dim) and value.shape[self.dim] == size else value
            ),
            result,
        )


def _is_place(name: str | int, names: Sequence[str]) -> TypeGuard[int]:
    return isinstance(name, int) and name < len(names)


def _has(value: Any, dim: int) -> bool:
    return isinstance(value, torch.Tensor) and -value.dim() <= dim < value.dim()


@dataclass(frozen=True)
class ServedState(Record):
    """What became of calls, and of the shapes that were met.

    ``ready`` shapes are compiled and ``waiting`` ones will be; ``failures`` says why others will not. ``compiled``,
    ``padded`` and ``eager`` count calls. Those are eager whose shape is ``new``, ``waiting``, could not be compiled
    (``failed``), found no place (``full``), or is compiled for another state of the program (``guards``); whose arguments
    are neither tensors nor plain values (``arguments``); and all new ones after ``close`` (``closed``).
    """

    ready: int
    waiting: int
    failures: Mapping[str, str]
    compiled: int
    padded: int
    eager: Mapping[str, int]
    compile_s: float


def serve(
    model: Callable[..., Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    calls: Iterable[Call] = (),
    padding: Padding | None = None,
    queued: int = 8,
    most: int = 64,
) -> Served:
    """A callable around a model that never waits for a compiler.

    A call whose shape was compiled runs compiled. Any other runs eagerly, or padded to a compiled size where ``padding`` says
    how, while its shape is compiled in a thread, which stands still as long as calls are answered. Shapes that were compiled
    are remembered for the next process (and by :func:`lz_compile.save_artifacts`), which may compile them before traffic:
    :meth:`Served.warmup`. A process that is forked serves what was compiled, and compiles nothing.

    Args:
        model: a module or function. One with graph breaks is answered eagerly, with an event.
        mode: as of ``torch.compile``.
        options: as of ``torch.compile(backend="layerzero")``.
        calls: ``(args, kwargs)`` that ``warmup`` compiles besides those that are remembered; nothing is computed with them.
        padding: how calls may be padded.
        queued: how many shapes may wait for the compiler; others are answered eagerly, and wait when they come again.
        most: how many shapes are compiled.

    Raises:
        OptionError: an option is unknown or has a wrong value.
        ArgumentError: ``queued`` or ``most`` is less than one, or ``padding`` has sizes that do not grow, or a value for an
            argument that the model does not have.
    """
    split(dict(options) if options else None, mode)
    for name, value in (("queued", queued), ("most", most)):
        if value < 1:
            raise ArgumentError("serve", name, "to be one or more", value)
    if padding is not None and (not padding.sizes or list(padding.sizes) != sorted(set(padding.sizes))):
        raise ArgumentError("serve", "padding", "with sizes that grow", tuple(padding.sizes))
    names, is_any = _parameters(model)
    for given in () if padding is None or is_any else padding.values:
        if isinstance(given, str) and given not in names:
            raise ArgumentError("serve", "padding", f"with values for {', '.join(names)}", given)
    compiler = _Compiler(model, mode, options, queued)
    return Served(model, compiler, list(calls), padding, most)


def _parameters(model: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a model's arguments, those first that may be given by position; and whether it takes any others."""
    try:
        found = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    except (TypeError, ValueError):  # written in C
        return [], True
    return [each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)], any(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found
    )


# ---- the thread that compiles ----------------------------------------------------------------------------------------


class _CompiledError(BaseException):
    """Raised in place of running what was compiled in the background."""


class _Local(threading.local):
    is_compiling = False
    has_run = False


@dataclass
class _Shape:
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
class _Job:
    shape: _Shape
    call: Call
    modes: _Modes


class _Compiler:
    """Compiles what is asked for, one after the other, in a thread of its own, and runs nothing."""

    def __init__(
        self, model: Callable[..., Any], mode: str | None, options: Mapping[str, Any] | None, queued: int
    ) -> None:
        self._model, self._mode, self._options = model, mode, {"compile_threads": _compile_threads(), **(options or {})}
        self._jobs: queue.Queue[_Job | None] = queue.Queue(queued)
        self.turns, self.local, self.compile_s, self.is_stopped = Turns(), _Local(), 0.0, False
        self._store, self._key = Store("shapes"), _key_of(model)
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

    def offer(self, job: _Job, *, wait: bool) -> bool:
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

    def wait(self, shape: _Shape, end: float | None = None) -> bool:
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

    def _compiled(self, job: _Job) -> Callable[..., Any]:
        compiled = torch.compile(job.shape.function, backend=self._backend, fullgraph=True, dynamic=False)
        args, kwargs = job.call
        self.local.is_compiling = True
        try:
            with job.modes.entered(), inductor.unlimited_recompiles(), self.turns.compile():
                compiled(*args, **kwargs)
        except _CompiledError:
            job.shape.compiles += 1
            return inductor.run_only(compiled)
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

    def _remember(self, job: _Job) -> None:
        try:
            told = {"call": _told([list(job.call[0]), dict(job.call[1])]), "modes": job.modes.told()}
            text = json.dumps(told, allow_nan=False)
        except (TypeError, ValueError) as error:
            events.record("SHAPE_NOT_KEPT", f"{job.shape.name} is not remembered for the next process: {error}")
            return
        self.remembered = {**self.remembered, hashlib.sha256(text.encode()).hexdigest()[:16]: told}
        self._store.save(self._key, dict(list(self.remembered.items())[-_MOST_REMEMBERED:]))


def _compile_threads() -> int:
    """How many C++ compilers run at once: as many as there are cores that no call uses."""
    return max((os.cpu_count() or 1) - torch.get_num_threads(), 1)


def _apart(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model as a function with code of its own: Dynamo keeps what it compiled by code, and looks through all of that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"served_{next(_numbers)}")
    return call


def _key_of(model: Callable[..., Any]) -> str:
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


# ---- calls -----------------------------------------------------------------------------------------------------------


#: Those that are alive, for whoever counts.
served: weakref.WeakSet[Served] = weakref.WeakSet()


class Served:
    """What :func:`serve` gives: called as the model is, by any thread. Close it, or use it as a context."""

    def __init__(
        self, model: Callable[..., Any], compiler: _Compiler, calls: Sequence[Call], padding: Padding | None, most: int
    ) -> None:
        self._model, self._compiler, self._calls, self._padding, self._most = model, compiler, calls, padding, most
        self._lock = threading.Lock()
        self._shapes: dict[Any, _Shape] = {}
        self._counts: Counter[str] = Counter()
        self._names, _ = _parameters(model)
        self._close = weakref.finalize(self, compiler.stop)
        served.add(self)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Compile no more; a compile that goes on ends. Calls are answered as before."""
        self._close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, compiled if it can be without waiting."""
        shape = self._shape(args, kwargs)
        with self._compiler.turns.call(0.0 if shape is None else shape.usual_s):
            start = time.perf_counter()
            result, count = self._answer(shape, args, kwargs)
            if shape is not None:
                shape.usual_s = time.perf_counter() - start
        with self._lock:
            self._counts[count] += 1
        return result

    def _answer(self, shape: _Shape | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """What the model gives, and as what the call counts."""
        if shape is None:
            return self._model(*args, **kwargs), "arguments"
        if shape.state == "ready":
            return self._run(shape, args, kwargs, "compiled")
        size, length = self._size_and_length(args, kwargs)
        if self._padding is not None and size is not None and length is not None:
            call = self._padding.padded((args, kwargs), self._names, length, size)
            longer = self._shape(*call)
            if longer is not None and longer.agrees is not False and longer.state == "ready":
                result, count = self._run(longer, *call, "padded")
                result = self._padding.cut(result, length, size)
                return (result if longer.agrees else self._agreed(longer, result, args, kwargs)), count
            if longer is not None and longer.agrees is not False:
                return self._model(*args, **kwargs), self._ask(longer, *call)
        count = self._ask(shape, args, kwargs)
        return self._model(*args, **kwargs), count

    def state(self) -> ServedState:
        """What became of calls, and of the shapes that were met."""
        with self._lock:
            shapes, counts = list(self._shapes.values()), dict(self._counts)
        states = Counter(shape.state for shape in shapes)
        compiled, padded = counts.pop("compiled", 0), counts.pop("padded", 0)
        failures = {shape.name: shape.failure for shape in shapes if shape.failure}
        waiting = states["waiting"]
        return ServedState(states["ready"], waiting, failures, compiled, padded, counts, self._compiler.compile_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to compile; whether that is so."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            waiting = [shape for shape in self._shapes.values() if shape.state == "waiting"]
        return all(self._compiler.wait(shape, end) for shape in waiting)

    def warmup(self, *, progress: bool = True) -> ServedState:
        """Compile the calls that were given and those that are remembered, and wait for it.

        Args:
            progress: show a bar on the error stream.
        """
        calls = [(call, _Modes.now()) for call in self._calls]
        calls += filter(None, map(_untold, self._compiler.remembered.values()))
        with bar() if progress else nullcontext(_no_bar) as show:
            for number, ((args, kwargs), modes) in enumerate(calls):
                with modes.entered():
                    shape = self._shape(args, kwargs)
                    name = "" if shape is None else shape.name
                    show(number, len(calls), name)
                    if shape is not None and self._ask(shape, args, kwargs, wait=True) in ("new", "waiting"):
                        self._compiler.wait(shape)
            show(len(calls), len(calls), "")
        return self.state()

    def _shape(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Shape | None:
        """The shape of a call, None where an argument is none that code can be compiled for."""
        signature = _signature(args, kwargs)
        if signature is None:
            return None
        key = *signature, _Modes.now(), getattr(self._model, "training", False)
        with self._lock:
            found = self._shapes.get(key)
            if found is None:
                found = self._shapes[key] = _Shape(_name_of(args, kwargs), _apart(self._model))
                new = [each for each, shape in self._shapes.items() if shape.state == "new"]
                for each in new[:-_MOST_NEW]:
                    del self._shapes[each]
        return found

    def _size_and_length(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The size that a call is padded to, and that it has; None where it is not padded."""
        length = None if self._padding is None else self._padding.length_of(pytree.tree_leaves((args, kwargs)))
        size = None if self._padding is None or length is None else self._padding.size_for(length)
        return (None, None) if size == length else (size, length)

    def _agreed(self, shape: _Shape, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a padded call gives, where it is the first of its size and differs from eager: that."""
        expected = self._model(*args, **kwargs)
        told = [text for each in pairs(expected, result) if (text := difference(*each))]
        shape.agrees = not told
        if told:
            events.record("PADDING_DIFFERS", f"{shape.name} is not padded to: a result {told[0]}")
        return result if shape.agrees else expected

    def _run(self, shape: _Shape, args: Sequence[Any], kwargs: Mapping[str, Any], count: str) -> tuple[Any, str]:
        assert shape.run is not None, "it is ready"
        local = self._compiler.local
        local.has_run = False
        try:
            result = shape.run(*args, **kwargs)
        except RuntimeError:  # Dynamo's, while another thread traces, or the model's own, which comes again
            if local.has_run:
                raise
            return self._model(*args, **kwargs), "guards"
        if local.has_run:
            return result, count
        if shape.compiles < _MOST_COMPILES:
            shape.state = "new"  # compiled again, for the program as it is by then
        return result, "guards"

    def _ask(self, shape: _Shape, args: Sequence[Any], kwargs: Mapping[str, Any], *, wait: bool = False) -> str:
        """Have a shape compiled: its state until now, or why it will not be."""
        with self._lock:
            if shape.state != "new":
                return shape.state
            if not self._compiler.is_alive:
                return "closed"
            if sum(each.state in ("waiting", "ready") for each in self._shapes.values()) >= self._most:
                return "full"
            shape.state = "waiting"
            shape.settled.clear()
        if not self._compiler.offer(_Job(shape, (args, kwargs), _Modes.now()), wait=wait):
            shape.state = "new"
            return "full"
        return "new"


def _no_bar(_finished: int, _total: int, _what: str) -> None: ...


# ---- what calls are --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Modes:
    """The modes of a calling thread that compiled code is bound to."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    threads: int  #: of OpenMP; every thread of Python has its own number

    @staticmethod
    def now() -> _Modes:
        """Those of this thread."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        autocast = tuple((name, torch.get_autocast_dtype(name)) for name in devices if torch.is_autocast_enabled(name))
        return _Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_num_threads())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread in these modes."""
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            if threads != self.threads:
                torch.set_num_threads(self.threads)
                stack.callback(torch.set_num_threads, threads)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for name, dtype in self.autocast:
                stack.enter_context(torch.autocast(name, dtype))
            yield

    def told(self) -> dict[str, Any]:
        """As JSON."""
        autocast = {name: str(dtype).removeprefix("torch.") for name, dtype in self.autocast}
        return {"grad": self.grad, "inference": self.inference, "autocast": autocast, "threads": self.threads}


def _signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What calls that run the same code have in common; of equal tensors which are the same one.

    None where an argument is neither a tensor nor a plain value: nothing tells whether another one is like it.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    first: dict[int, int] = {}
    told: list[tuple[Any, ...]] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            strides = leaf.stride() if leaf.layout is torch.strided else None
            same = first.setdefault(id(leaf), number)
            told.append((type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad, same))
        elif isinstance(leaf, float):
            told.append((type(leaf), leaf.hex()))  # no two NaN are equal, but -0.0 and 0.0 are
        elif isinstance(leaf, _PLAIN):
            told.append((type(leaf), leaf))
        else:
            return None
    return spec, tuple(told)


def _name_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call for people: the shapes of its tensors."""
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return f"a call with {', '.join(map(str, shapes)) or 'no tensors'}"


def _told(value: Any) -> Any:
    """An argument as JSON.

    Raises:
        TypeError: it is none that can be told.
    """
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
        dtype, place = str(value.dtype).removeprefix("torch."), str(value.device)
        return {"tensor": [list(value.shape), list(value.stride()), dtype, place, value.requires_grad]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_told(each) for each in value]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: _told(each) for name, each in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}")


def _made(told: Any) -> Any:
    """An argument of JSON; tensors are 0."""
    if not isinstance(told, dict):
        return told
    ((kind, value),) = told.items()
    if kind == "tensor":
        shape, strides, dtype, place, requires_grad = value
        size = (
            1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        memory = torch.zeros(size, dtype=getattr(torch, dtype), device=place)
        return memory.as_strided(shape, strides).requires_grad_(requires_grad)
    if kind == "dict":
        return {name: _made(each) for name, each in value.items()}
    return (tuple if kind == "tuple" else list)(map(_made, value))


def _untold(told: Mapping[str, Any]) -> tuple[Call, _Modes] | None:
    try:
        modes = told["modes"]
        autocast = tuple((name, getattr(torch, dtype)) for name, dtype in modes["autocast"].items())
        args, kwargs = _made(told["call"])
        return (args, kwargs), _Modes(modes["grad"], modes["inference"], autocast, modes["threads"])
    except Exception as error:  # noqa: BLE001 a device that is not here, or a file that somebody else wrote
        events.record("SHAPE_NOT_MADE", "a shape that is remembered is not compiled", error)
        return None
