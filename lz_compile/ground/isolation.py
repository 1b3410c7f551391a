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
from contextlib import ExitStack, contextmanager
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


def is_autocast(x: torch.Tensor) -> bool:
    """Whether products of ``x`` are cast: on a meta device, of which autocast knows nothing, they are not."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


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
        with ExitStack() as stack:
            _autocast(stack, {kind: (True, dtype) for kind, dtype in self.autocast})
            _default_dtype(stack, self.dtype)
            stack.enter_context(torch.set_grad_enabled(self.grad))
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
            part(stack)
        depth = _here.depth
        _here.depth = depth + 1
        stack.callback(setattr, _here, "depth", depth)
        yield outside


# ---- what is hidden: each part changes something, and leaves with the stack how that is put back -----------------------


def _function_modes(stack: ExitStack) -> None:
    stack.enter_context(torch._C._EnableTorchFunction())
    modes = _take_modes()

    def put_back() -> None:
        _take_modes()
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)

    stack.callback(put_back)


def _take_modes() -> list[Any]:
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]


def _saved_tensor_hooks(stack: ExitStack) -> None:
    """Without the hooks that are there, and with those that the code inside brings along."""
    autograd = torch._C._autograd
    was_tracing = autograd._saved_tensors_hooks_set_tracing(False)
    message, hooks = _take_hooks()

    def put_back() -> None:
        _take_hooks()
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
        autograd._saved_tensors_hooks_set_tracing(was_tracing)
        if message is not None:
            autograd._saved_tensors_hooks_disable(message, False)

    stack.callback(put_back)


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


def _autocast(stack: ExitStack, wanted: _Autocast) -> None:
    """Autocast on these device types alone. Nothing is kept in its cache, which is emptied when the program leaves it.

    What enters it inside and does not leave it again (a part of a graph may hold no more than its beginning) is left here:
    the program would never come to empty its cache, and go on with weights of before.
    """
    depth = _autocast_depth()
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST}
    has_cache = torch.is_autocast_cache_enabled()
    _set_autocast({kind: (False, dtype) for kind, (_, dtype) in before.items()} | dict(wanted), has_cache=False)

    def put_back() -> None:
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        for _ in range(depth - _autocast_depth()):
            torch.autocast_increment_nesting()
        _set_autocast(before, has_cache=has_cache)

    stack.callback(put_back)


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast(wanted: _Autocast, *, has_cache: bool) -> None:
    for kind, (enabled, dtype) in wanted.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(has_cache)


def _default_dtype(stack: ExitStack, wanted: torch.dtype) -> None:
    stack.callback(_set_default_dtype, torch.get_default_dtype())
    _set_default_dtype(wanted)


def _set_default_dtype(wanted: torch.dtype) -> None:
    """All threads share it: it is touched only if it is another one."""
    if torch.get_default_dtype() != wanted:
        torch.set_default_dtype(wanted)


def _deterministic_flags(stack: ExitStack) -> None:
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch._C._set_deterministic_algorithms, flags[0], warn_only=flags[1])
    for name in ("deterministic", "benchmark"):
        stack.callback(setattr, torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
        setattr(torch.backends.cudnn, name, False)
    torch._C._set_deterministic_algorithms(False, warn_only=False)


def generators() -> Iterator[torch.Generator]:
    """Those that draw where nobody names one. Of a device that was never used nothing is asked: that would start it."""
    yield torch.default_generator
    for kind in _ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            yield from module.default_generators
    if torch.backends.mps.is_available():
        yield torch.mps._get_default_mps_generator()


def _random_numbers(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        stack.callback(numpy.set_state, numpy.get_state())
    for generator in generators():
        stack.callback(generator.set_state, generator.get_state())
        generator.manual_seed(0)


def _floating_point(stack: ExitStack) -> None:
    """Rounding to nearest, nothing that traps, denormals as numbers."""
    library = _math_library()
    if library is None:
        stack.callback(torch.set_flush_denormal, sys.float_info.min / 2 == 0.0)
        torch.set_flush_denormal(False)
        return
    state = ctypes.create_string_buffer(64)
    library.fegetenv(state)
    stack.callback(library.fesetenv, state)
    library.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV


@cache
def _math_library() -> Any | None:
    """C's library where its default environment is known to be the address -1; None elsewhere."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:  # another C library than glibc
        return None


def _warnings(stack: ExitStack) -> None:
    """What there is to warn of, the program's own calls are told."""
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    if (numpy := sys.modules.get("numpy")) is not None:
        stack.enter_context(numpy.errstate(all="ignore"))


def _tracebacks(stack: ExitStack) -> None:
    """PyTorch prints the traceback of a call that takes no example values, which is an answer to a question of ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_of_others(_record: logging.LogRecord) -> bool:
        return not is_isolated()

    logger.addFilter(is_of_others)
    stack.callback(logger.removeFilter, is_of_others)


def _transforms(stack: ExitStack) -> None:
    """What a run enters of ``torch.func``'s transforms, and leaves by an exception, is left with it."""
    functorch = torch._C._functorch
    stack.callback(functorch.pop_dynamic_layer_stack_and_undo_to_depth, functorch.get_dynamic_layer_stack_depth())


_PARTS: tuple[Callable[[ExitStack], object], ...] = (
    _transforms,
    _function_modes,
    lambda stack: stack.enter_context(_disable_current_modes()),
    _saved_tensor_hooks,
    lambda stack: stack.enter_context(torch.inference_mode(False)),
    lambda stack: stack.enter_context(torch.enable_grad()),
    lambda stack: _autocast(stack, {}),
    lambda stack: stack.enter_context(torch.autograd.set_detect_anomaly(False)),
    lambda stack: _default_dtype(stack, torch.float32),
    _deterministic_flags,
    _random_numbers,
    _floating_point,
    _warnings,
    _tracebacks,
)
