"""A model that answers at once: what is compiled runs, what is not runs eagerly while it is compiled in the background."""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lz_compile.api.arguments import Arguments
from lz_compile.compile.options import split
from lz_compile.compile.verification import difference, pairs
from lz_compile.errors import ArgumentError
from lz_compile.ground import events
from lz_compile.ground.records import Record
from lz_compile.tools.progress import bar
from lz_compile.tools.serving_calls import Call, Modes, is_call, name_of, signature_of, untold
from lz_compile.tools.serving_thread import Compiler, Job, Shape, apart

#: How often one shape is compiled, since its guards did not hold; as Dynamo's own limit is.
_MOST_COMPILES = 8
#: Of shapes that are not compiled, how many are known: those that came last.
_MOST_NEW = 1024


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

    def check(self, arguments: Arguments) -> None:
        """Refuse what is no padding: sizes that do not grow, values that are no numbers."""
        arguments.number("padding.dim", self.dim, whole=True)
        if not isinstance(self.sizes, Sequence) or not self.sizes:
            raise arguments.wrong("padding", "with sizes that grow", repr(self.sizes))
        for size in self.sizes:
            arguments.number("padding.sizes", size, 1, whole=True)
        if list(self.sizes) != sorted(set(self.sizes)):
            raise arguments.wrong("padding", "with sizes that grow", tuple(self.sizes))
        arguments.instance("padding.values", self.values, Mapping, "as a number for each argument")
        for name, value in self.values.items():
            arguments.instance("padding.values", name, (str, int), "by names or positions of arguments")
            arguments.instance(f"padding.values[{name!r}]", value, (int, float), "as a number")

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
            names[each] if isinstance(each, int) and each < len(names) else each: fill
            for each, fill in self.values.items()
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
        ArgumentError: ``queued`` or ``most`` is less than one, ``padding`` has sizes that do not grow, or a value for an
            argument that the model does not have; or an argument is of another kind.
    """
    split(options, mode)
    arguments = Arguments("serve")
    arguments.instance("model", model, Callable, "as a module or a function")
    arguments.number("queued", queued, 1, whole=True)
    arguments.number("most", most, 1, whole=True)
    arguments.instance("padding", padding, Padding, "as lz.Padding(dim, sizes)", optional=True)
    if padding is not None:
        padding.check(arguments)
    arguments.instance(
        "calls", None if isinstance(calls, torch.Tensor) else calls, Iterable, "as several (args, kwargs)"
    )
    calls = list(calls)
    for each in calls:
        if not is_call(each):
            raise arguments.wrong("calls", "as several (args, kwargs)", repr(each)[:200], "A call is ([x], {})")
    names, is_any = _parameters(model)
    for given in () if padding is None or is_any else padding.values:
        if isinstance(given, str) and given not in names:
            raise ArgumentError("serve", "padding", f"with values for {', '.join(names)}", given)
    compiler = Compiler(model, mode, options, queued)
    return Served(model, compiler, calls, padding, most)


def _parameters(model: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a model's arguments, those first that may be given by position; and whether it takes any others."""
    try:
        found = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    except (TypeError, ValueError):  # written in C
        return [], True
    return [each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)], any(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found
    )


#: Those that are alive, for whoever counts.
served: weakref.WeakSet[Served] = weakref.WeakSet()


class Served:
    """What :func:`serve` gives: called as the model is, by any thread. Close it, or use it as a context."""

    def __init__(
        self, model: Callable[..., Any], compiler: Compiler, calls: Sequence[Call], padding: Padding | None, most: int
    ) -> None:
        self._model, self._compiler, self._calls, self._padding, self._most = model, compiler, calls, padding, most
        self._lock = threading.Lock()
        self._shapes: dict[Any, Shape] = {}
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

    def _answer(self, shape: Shape | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
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
        calls = [(call, Modes.now()) for call in self._calls]
        calls += filter(None, map(untold, self._compiler.remembered.values()))
        with bar() if progress else nullcontext(lambda *_: None) as show:
            for number, ((args, kwargs), modes) in enumerate(calls):
                with modes.entered():
                    shape = self._shape(args, kwargs)
                    name = "" if shape is None else shape.name
                    show(number, len(calls), name)
                    if shape is not None and self._ask(shape, args, kwargs, wait=True) in ("new", "waiting"):
                        self._compiler.wait(shape)
            show(len(calls), len(calls), "")
        return self.state()

    def _shape(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shape | None:
        """The shape of a call, None where an argument is none that code can be compiled for."""
        signature = signature_of(args, kwargs)
        if signature is None:
            return None
        key = *signature, Modes.now(), getattr(self._model, "training", False)
        with self._lock:
            found = self._shapes.get(key)
            if found is None:
                found = self._shapes[key] = Shape(name_of(args, kwargs), apart(self._model))
                new = [each for each, shape in self._shapes.items() if shape.state == "new"]
                for each in new[:-_MOST_NEW]:
                    del self._shapes[each]
        return found

    def _size_and_length(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The size that a call is padded to, and that it has; None where it is not padded."""
        length = None if self._padding is None else self._padding.length_of(pytree.tree_leaves((args, kwargs)))
        size = None if self._padding is None or length is None else self._padding.size_for(length)
        return (None, None) if size == length else (size, length)

    def _agreed(self, shape: Shape, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a padded call gives, where it is the first of its size and differs from eager: that."""
        expected = self._model(*args, **kwargs)
        told = [text for each in pairs(expected, result) if (text := difference(*each))]
        shape.agrees = not told
        if told:
            events.record("PADDING_DIFFERS", f"{shape.name} is not padded to: a result {told[0]}")
        return result if shape.agrees else expected

    def _run(self, shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any], count: str) -> tuple[Any, str]:
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

    def _ask(self, shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any], *, wait: bool = False) -> str:
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
        if not self._compiler.offer(Job(shape, (args, kwargs), Modes.now()), wait=wait):
            shape.state = "new"
            return "full"
        return "new"
