"""What is ambient does not reach proofs and measurements, and they leave none of it changed."""

from __future__ import annotations

import ctypes
import platform
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile.runtime.isolation import isolated

SEEN: list[str] = []


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append("function")
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append("dispatch")
        return func(*args, **(kwargs or {}))


def hooks() -> AbstractContextManager[Any]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        SEEN.append("pack")
        return tensor.detach()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@contextmanager
def switched(set_: Callable[[Any], Any], there: Any, back: Any) -> Iterator[None]:
    set_(there)
    try:
        yield
    finally:
        set_(back)


def flag(name: str) -> Callable[[Any], None]:
    return lambda value: setattr(torch.backends.cudnn, name, value)


def seen(run: Callable[[], Any]) -> list[str]:
    SEEN.clear()
    run()
    return list(SEEN)


def saves() -> None:
    torch.ones(2, requires_grad=True).exp()


def flushes() -> bool:
    return bool((torch.full((1,), 1e-310, dtype=torch.float64) * 1).item() == 0)


def traps() -> int:
    return ctypes.CDLL("libm.so.6").fegetexcept()


def draws() -> tuple[float, ...]:
    """Where the three generators stand."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = torch.rand(()).item(), random.random(), np.random.rand()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return drawn


IS_GLIBC = sys.platform == "linux" and platform.machine() == "x86_64"
trap = ctypes.CDLL("libm.so.6").feenableexcept if IS_GLIBC else None
untrap = ctypes.CDLL("libm.so.6").fedisableexcept if IS_GLIBC else None

#: By name: what brings it about, and what shows it.
AMBIENT: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "saved tensor hooks": (hooks, lambda: seen(saves)),
    "disabled saved tensor hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    "a function mode": (Functions, lambda: seen(saves)),
    "functions disabled": (torch._C.DisableTorchFunction, torch._C._is_torch_function_enabled),
    "a dispatch mode": (Dispatched, lambda: seen(saves)),
    "a default device": (lambda: torch.device("meta"), lambda: torch.zeros(1).device.type),
    "a set default device": (lambda: switched(torch.set_default_device, "meta", None), torch.get_default_device),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: (torch.is_autocast_enabled("cpu"), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
    ),
    "autocast of another device": (
        lambda: switched(lambda on: torch.set_autocast_enabled("xpu", on), True, False),
        lambda: torch.is_autocast_enabled("xpu"),
    ),
    "no grad": (torch.no_grad, torch.is_grad_enabled),
    "inference mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "a default dtype": (
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
        torch.get_default_dtype,
    ),
    "deterministic algorithms": (
        lambda: switched(torch.use_deterministic_algorithms, True, False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "warnings of nondeterminism": (
        lambda: switched(lambda on: torch.use_deterministic_algorithms(on, warn_only=on), True, False),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "deterministic cudnn": (
        lambda: switched(flag("deterministic"), True, False),
        lambda: torch.backends.cudnn.deterministic,
    ),
    "cudnn's benchmark": (lambda: switched(flag("benchmark"), True, False), lambda: torch.backends.cudnn.benchmark),
    "flushed denormals": (lambda: switched(torch.set_flush_denormal, True, False), flushes),
    "filters of warnings": (warnings.catch_warnings, lambda: len(warnings.filters)),
    "NumPy's errors": (lambda: np.errstate(divide="raise"), lambda: np.geterr()["divide"]),
}


def clean(name: str, look: Callable[[], Any]) -> Any:
    """What is to be seen inside."""
    return {"filters of warnings": 1 + len(warnings.filters), "NumPy's errors": "ignore"}.get(name) or look()


@pytest.mark.parametrize("name", AMBIENT)
def test_nothing_ambient_is_seen_inside_and_all_of_it_is_back_afterwards(name: str) -> None:
    enter, look = AMBIENT[name]
    expected = clean(name, look)
    with enter():
        if name == "filters of warnings":
            warnings.simplefilter("error")
            expected += 1
        before = look()
        assert before != expected, "what is ambient must show"
        with isolated():
            assert look() == expected
        assert look() == before
        with pytest.raises(ZeroDivisionError), isolated():
            raise ZeroDivisionError
        assert look() == before


#: What is no block that code leaves, but is set, and may be left behind.
SETTINGS = (
    "saved tensor hooks", "disabled saved tensor hooks", "autocast of another device",
    "a default dtype", "deterministic algorithms", "warnings of nondeterminism", "deterministic cudnn",
    "cudnn's benchmark", "flushed denormals",
)  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_left_behind_inside_is_gone_afterwards(name: str) -> None:
    enter, look = AMBIENT[name]
    before, left = look(), enter()
    with isolated():
        left.__enter__()  # and nobody leaves it
    assert look() == before


def test_random_numbers_are_those_of_seed_zero_inside_and_go_on_afterwards() -> None:
    torch.manual_seed(5)
    before = draws()
    for _ in range(2):
        with isolated():
            assert torch.rand(()).item() == torch.rand((), generator=torch.Generator().manual_seed(0)).item()
            random.random(), np.random.rand()
    assert draws() == before


def test_every_generator_of_a_device_in_use_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(own))
    before = [each.get_state() for each in own]
    with isolated():
        for each in own:
            torch.rand(3, generator=each)
    assert all(torch.equal(each.get_state(), state) for each, state in zip(own, before, strict=True))


def test_a_device_that_is_not_in_use_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise AssertionError("the device is started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    with isolated():
        pass


@pytest.mark.skipif(not IS_GLIBC, reason="needs glibc's feenableexcept")
def test_floating_point_traps_are_off_inside_and_on_again_afterwards() -> None:
    trap(1)  # FE_INVALID
    try:
        with isolated():
            assert traps() == 0
            assert (torch.zeros(1) / torch.zeros(1)).isnan().all(), "with the trap on, this ends the process"
        assert traps() == 1
    finally:
        untrap(1)


def test_hooks_that_code_inside_brings_along_are_called() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("called"), lambda tensor: tensor), isolated():
        with hooks():
            assert seen(saves) == ["pack"]
        assert seen(saves) == []


def test_what_a_graph_runs_under_when_it_is_called_can_be_entered_again() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.float16), isolated() as outside:
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
            with outside.entered():
                assert (torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2).float()).dtype == torch.float16
                assert torch.zeros(1).dtype == torch.float64
            assert torch.zeros(1).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_being_isolated_twice_is_the_same() -> None:
    with torch.autocast("cpu"), isolated(), isolated() as outside:
        assert outside.autocast == ()
