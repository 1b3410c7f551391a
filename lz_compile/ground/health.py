"""A circuit breaker for kernels: one that fails while it runs is retired for the process, the call is completed anyway.

Whose fault a failure is, is asked of the fallback: where that fails too, the inputs were wrong (or the memory is full), its
error reaches the caller and the kernel keeps its place. Two errors are judged otherwise:

- *Out of memory* says little about the kernel; it is retired when that happened :data:`OUT_OF_MEMORY_LIMIT` times and the
  fallback managed each time.
- *Device errors* (illegal memory access, ``CUDA error: ...``) leave a device on which the fallback fails as well, so the
  kernel is retired at once; with :data:`LIBRARY_LIMIT` kernels of a library retired by them, the whole library is. They are
  reported by the device later than they happen: another kernel's call can be the one to raise. ``LAYERZERO_DEBUG`` waits for
  the device after every call.

Kernels are functions without side effects on their inputs; what failed half-way is simply computed again.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lz_compile.errors import ArgumentError, KernelExecutionError
from lz_compile.ground import events, hooks
from lz_compile.ground.records import Reason, Record

T = TypeVar("T")

OUT_OF_MEMORY_LIMIT = 3
LIBRARY_LIMIT = 2

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_DEVICE_ERROR = ("cuda error", "hip error", "illegal memory access")

#: Events that tell of a kernel which failed while something else completed the call.
FAILURE_EVENTS = frozenset({"KERNEL_FAILED", "KERNEL_RETIRED"})


@dataclass(frozen=True)
class KernelFailures(Record):
    """How often a kernel failed in this process, the last error, and whether it is retired for it (or by hand)."""

    kernel_id: str
    count: int = 0
    out_of_memory_count: int = 0
    last_error: str = ""
    retired: Reason | None = None


class CircuitBreaker:
    """Which kernels failed and which are retired; safe under threads. The process has one, see below."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[str, KernelFailures] = {}
        self._device_errors: set[str] = set()  # kernels retired by one
        self._retired: Mapping[str, Reason] = {}  # replaced whole, so that readers need no lock
        self._retired_libraries: Mapping[str, Reason] = {}
        self._version = 0

    def version(self) -> int:
        """Changes whenever a kernel is retired or restored: part of the key of every decision."""
        return self._version

    def retired(self, kernel_id: str) -> Reason | None:
        """Why a kernel, or its whole library, is retired; None where it is not."""
        reason = self._retired.get(kernel_id)
        if reason is None and self._retired_libraries:
            reason = self._retired_libraries.get(library(kernel_id))
        return reason

    def retirements(self) -> dict[str, Reason]:
        """Every retired kernel, and every retired library as ``library.*``, with the reason."""
        return {**self._retired, **{f"{name}.*": reason for name, reason in self._retired_libraries.items()}}

    def failures(self) -> list[KernelFailures]:
        """Every kernel that failed in this process, by name."""
        with self._lock:
            known = sorted(self._failures.items())
        return [replace(failures, retired=self.retired(kernel_id)) for kernel_id, failures in known]

    def retire(self, kernel_id: str, why: BaseException | Reason | str) -> None:
        """Keep a kernel from being chosen again in this process, with an event. One that is retired stays as it is."""
        reason = why if isinstance(why, Reason) else Reason("KERNEL_RETIRED", _text(why))
        with self._lock:
            if kernel_id in self._retired:
                return
            self._retired = {**self._retired, kernel_id: reason}
            self._version += 1
        events.record("KERNEL_RETIRED", f"{kernel_id} is not chosen again in this process: {reason.message}")
        if isinstance(why, BaseException) and is_device_error(why):
            self._count_device_error(kernel_id)

    def restore(self, kernel_id: str) -> None:
        """Let a kernel be chosen again, and its library where that was retired; forget what it failed with.

        A library's name restores what was retired as a library; its kernels that were retired on their own stay so.
        """
        with self._lock:
            name = library(kernel_id)
            self._retired = {known: why for known, why in self._retired.items() if known != kernel_id}
            self._retired_libraries = {known: why for known, why in self._retired_libraries.items() if known != name}
            self._device_errors -= {kernel_id} if kernel_id != name else set(self._of(name))
            self._failures.pop(kernel_id, None)
            self._version += 1

    def guarded(
        self,
        kernel_id: str,
        call: Callable[..., T],
        fallback: Callable[..., T],
        /,
        *args: Any,
        fallback_enabled: bool = True,
        **kwargs: Any,
    ) -> T:
        """``call(*args, **kwargs)``; where it raises, what ``fallback`` gives for the same arguments.

        Raises:
            ArgumentError: ``call`` says that its arguments do not fit; that is no failure of the kernel's.
            KernelExecutionError: ``call`` raised and the fallback is disabled. The kernel is retired by a device error only:
                without a second opinion, another error may be the inputs'.
            Exception: ``fallback`` raised too; ``call``'s error is its context.
        """
        try:
            result = call(*args, **kwargs)
            if hooks.is_debugging():
                wait(args, kwargs, result)
            return result
        except ArgumentError:  # the caller's, whichever kernel it meets
            raise
        except Exception as error:  # the one guarded place: recorded, retired, completed on the fallback
            is_broken = is_device_error(error)
            if is_broken or not fallback_enabled:
                self._record(kernel_id, error)
            if is_broken:
                self.retire(kernel_id, error)
            if not fallback_enabled:
                raise KernelExecutionError(kernel_id, error) from error
            if is_out_of_memory(error):
                for link in _chain(error):  # whose frames hold tensors: the fallback needs their memory
                    traceback.clear_frames(link.__traceback__)
            result = fallback(*args, **kwargs)
            if not is_broken:
                self._record(kernel_id, error)
                self._judge(kernel_id, error)
            return result

    def _record(self, kernel_id: str, error: Exception) -> None:
        with self._lock:
            known = self._failures.get(kernel_id, KernelFailures(kernel_id))
            self._failures[kernel_id] = replace(
                known,
                count=known.count + 1,
                out_of_memory_count=known.out_of_memory_count + is_out_of_memory(error),
                last_error=_text(error),
            )
        events.record("KERNEL_FAILED", f"running {kernel_id}", error)

    def _judge(self, kernel_id: str, error: Exception) -> None:
        """Retire a kernel for an error that the fallback did not have."""
        if is_out_of_memory(error):
            with self._lock:
                known = self._failures.get(kernel_id)
            if known is None or known.out_of_memory_count < OUT_OF_MEMORY_LIMIT:
                return
        self.retire(kernel_id, error)

    def _count_device_error(self, kernel_id: str) -> None:
        name = library(kernel_id)
        with self._lock:
            self._device_errors.add(kernel_id)
            broken = self._of(name)
            if len(broken) < LIBRARY_LIMIT or name in self._retired_libraries:
                return
            message = f"device errors in {', '.join(broken)}"
            self._retired_libraries = {**self._retired_libraries, name: Reason("KERNEL_RETIRED", message)}
            self._version += 1
        events.record("KERNEL_RETIRED", f"{name}.* is not chosen again in this process: {message}")

    def _of(self, name: str) -> list[str]:
        return sorted(kernel_id for kernel_id in self._device_errors if library(kernel_id) == name)


def library(kernel_id: str) -> str:
    """The library of a kernel: ``flash_attn`` of ``flash_attn.v2``."""
    return kernel_id.partition(".")[0]


def wait(*values: object) -> None:
    """Until the accelerators of all tensors among the values are done, so that their errors are raised here."""
    for device in set(_accelerators(values)):
        torch.accelerator.synchronize(device)


def _accelerators(value: object) -> Iterator[torch.device]:
    if isinstance(value, torch.Tensor):
        is_capturing = value.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if value.device.type not in ("cpu", "meta") and not is_capturing and not isinstance(value, FakeTensor):
            yield value.device
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _accelerators(each)
    elif isinstance(value, Mapping):
        yield from _accelerators(tuple(value.values()))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Whether an error comes from the device or its driver, after which its state cannot be trusted."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return any(words in str(error).lower() for words in _DEVICE_ERROR)


def _text(why: BaseException | str) -> str:
    return why if isinstance(why, str) else f"{type(why).__name__}: {why}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


_process = CircuitBreaker()

failures = _process.failures
guarded = _process.guarded
restore = _process.restore
retire = _process.retire
retired = _process.retired
retirements = _process.retirements
version = _process.version
