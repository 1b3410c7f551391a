"""Proofs, probes and measurements apart from the program in which they happen.

They run while something else compiles or runs: in a training step under hooks on saved tensors, under autocast, in the
middle of a sequence of random numbers. Nothing of that may change what they find, and nothing that they do may be
noticed. :func:`isolated` is the one door to running code in order to learn something about it.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: Device types that autocast knows.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")
#: Accelerators with one generator of random numbers for each device.
_ACCELERATORS = ("cuda", "xpu")

_Autocast = Mapping[str, tuple[bool, torch.dtype]]


@dataclass(frozen=True)
class Outside:
    """What code that is called here runs under, beyond what its graph says: it decides about dtypes and gradients.

    ``autocast`` are the device types with autocast, each with its dtype, ``dtype`` is the default one, ``grad`` whether
    gradients are recorded.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    grad: bool

    @classmethod
    def now(cls) -> Outside:
        """As it is here."""
        found = ((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST if torch.is_autocast_enabled(kind))
        return cls(tuple(found), torch.get_default_dtype(), torch.is_grad_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run what is inside, which is isolated, as if it were called there."""
        autocast = _autocast({kind: (True, dtype) for kind, dtype in self.autocast})
        with autocast, _default_dtype(self.dtype), torch.set_grad_enabled(self.grad):
            yield


class _Here(threading.local):
    """How many times this thread is isolated."""

    depth = 0


_here = _Here()


def is_isolated() -> bool:
    """Whether what runs here runs inside of :func:`isolated`."""
    return _here.depth > 0


@contextmanager
def isolated() -> Iterator[Outside]:
    """Run what is inside as in a fresh thread of a fresh program; leave everything as it was.

    Hidden and put back: hooks on saved tensors, modes (``TorchFunctionMode``, ``TorchDispatchMode``, the default device),
    autocast, inference and anomaly mode, the default dtype, flags for deterministic algorithms, the random numbers of every
    device, of Python and of NumPy, the floating-point environment (denormals, rounding, traps), filters of warnings,
    NumPy's ``errstate``, and what fake tensors print of calls that fail. Gradients are recorded. Random numbers begin
    with the seed 0.

    It yields what a compiled graph runs under when it is called here: a proof of its parts enters that again.
    """
    outside = Outside.now()
    with ExitStack() as stack:
        for part in _PARTS:
            stack.enter_context(part())
        _here.depth += 1
        stack.callback(_leave)
        yield outside


def _leave() -> None:
    _here.depth -= 1


@contextmanager
def _function_modes() -> Iterator[None]:
    with torch._C._EnableTorchFunction():
        modes = _take_modes()
        try:
            yield
        finally:
            _take_modes()
            for mode in reversed(modes):
                torch._C._push_on_torch_function_stack(mode)


def _take_modes() -> list[Any]:
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]


@contextmanager
def _saved_tensor_hooks() -> Iterator[None]:
    """Without the hooks that are there, and with those that the code inside brings along."""
    autograd = torch._C._autograd
    was_tracing = autograd._saved_tensors_hooks_set_tracing(False)
    message, hooks = _take_hooks()
    try:
        yield
    finally:
        _take_hooks()
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
        autograd._saved_tensors_hooks_set_tracing(was_tracing)
        if message is not None:
            autograd._saved_tensors_hooks_disable(message, False)


def _take_hooks() -> tuple[str | None, list[Any]]:
    """Leave no hook and allow them: why they were forbidden, and those that there were, the last one first."""
    autograd = torch._C._autograd
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    autograd._saved_tensors_hooks_enable()
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    return message, hooks


@contextmanager
def _autocast(wanted: _Autocast) -> Iterator[None]:
    """Autocast on these device types alone. Nothing is kept in its cache, which is emptied when the program leaves it.

    What enters it inside and does not leave it again (a part of a graph may hold no more than its beginning) is left here:
    the program would never come to empty its cache, and go on with weights of before.
    """
    depth = _autocast_depth()
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST}
    has_cache = torch.is_autocast_cache_enabled()
    _set_autocast({kind: (False, dtype) for kind, (_, dtype) in before.items()} | dict(wanted), has_cache=False)
    try:
        yield
    finally:
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        for _ in range(depth - _autocast_depth()):
            torch.autocast_increment_nesting()
        _set_autocast(before, has_cache=has_cache)


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast(wanted: _Autocast, *, has_cache: bool) -> None:
    for kind, (enabled, dtype) in wanted.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(has_cache)


@contextmanager
def _default_dtype(wanted: torch.dtype) -> Iterator[None]:
    """The default dtype, which all threads share, is touched only if it is another one."""
    before = torch.get_default_dtype()
    if before != wanted:
        torch.set_default_dtype(wanted)
    try:
        yield
    finally:
        if torch.get_default_dtype() != before:
            torch.set_default_dtype(before)


@contextmanager
def _deterministic_flags() -> Iterator[None]:
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch._C._set_deterministic_algorithms(False, warn_only=False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, False
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(flags[0], warn_only=flags[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def generators() -> Iterator[torch.Generator]:
    """Those that draw where nobody names one. Of a device that was never used nothing is asked: that would start it."""
    yield torch.default_generator
    for kind in _ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            yield from module.default_generators
    if torch.backends.mps.is_available():
        yield torch.mps._get_default_mps_generator()


@contextmanager
def _random_numbers() -> Iterator[None]:
    states = [(generator, generator.get_state()) for generator in generators()]
    python, numpy = random.getstate(), getattr(sys.modules.get("numpy"), "random", None)
    of_numpy = None if numpy is None else numpy.get_state()
    for generator, _ in states:
        generator.manual_seed(0)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(of_numpy)


@contextmanager
def _floating_point() -> Iterator[None]:
    """Rounding to nearest, nothing that traps, denormals as numbers."""
    library = _math_library()
    if library is None:
        flushes = sys.float_info.min / 2 == 0.0
        torch.set_flush_denormal(False)
        try:
            yield
        finally:
            torch.set_flush_denormal(flushes)
        return
    state = ctypes.create_string_buffer(64)
    library.fegetenv(state)
    library.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        library.fesetenv(state)


@cache
def _math_library() -> Any | None:
    """C's library where its default environment is known to be the address -1; None elsewhere."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:  # another C library than glibc
        return None


@contextmanager
def _warnings() -> Iterator[None]:
    """What there is to warn of, the program's own calls are told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numpy = sys.modules.get("numpy")
        if numpy is None:
            yield
            return
        with numpy.errstate(all="ignore"):
            yield


@contextmanager
def _tracebacks() -> Iterator[None]:
    """PyTorch prints the traceback of a call that takes no example values, which is an answer to a question of ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_of_others(_record: logging.LogRecord) -> bool:
        return not is_isolated()

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


@contextmanager
def _transforms() -> Iterator[None]:
    """What a run enters of ``torch.func``'s transforms, and leaves by an exception, is left with it."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


_PARTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    _transforms,
    _function_modes,
    _disable_current_modes,
    _saved_tensor_hooks,
    lambda: torch.inference_mode(False),
    torch.enable_grad,
    lambda: _autocast({}),
    lambda: torch.autograd.set_detect_anomaly(False),
    lambda: _default_dtype(torch.float32),
    _deterministic_flags,
    _random_numbers,
    _floating_point,
    _warnings,
    _tracebacks,
)
