"""What is ambient does not reach proofs and measurements, and they leave none of it changed."""

from __future__ import annotations

import ctypes
import platform
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from backends import Rewriting, Traced
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lz_compile import register_kernel, tune, unregister_kernel, validate
from lz_compile.compile import match_tuning, measuring
from lz_compile.compile.measuring import Measured
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import child
from lz_compile.lowering.ops.attention import Operands, reference
from lz_compile.passes.proof.validate import forget
from lz_compile.tools import tuning

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
    return sys.float_info.min / 2 == 0


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


UNIT = torch.ones(2, 2)
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
        lambda: (torch.is_autocast_enabled("cpu"), (UNIT @ UNIT).dtype),
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


# ---- where code is run to learn something about it -------------------------------------------------------------------


def looks() -> dict[str, Any]:
    """Everything that a kernel can see, but for what a graph is meant to run under."""
    names = set(AMBIENT) - {"no grad", "inference mode"}  # a proof sets them as it needs them
    return {name: AMBIENT[name][1]() for name in sorted(names)}


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A kernel that notes what it sees whenever it runs on real tensors, here and not in a process of its own."""
    monkeypatch.setattr(child, "attempt", lambda subject, run, devices: run())
    found: list[dict[str, Any]] = []

    def attention(x: Operands, attrs: Any) -> Any:
        if type(x.query) is torch.Tensor and x.query.dtype != torch.float64:
            found.append(looks())
        return reference(x, attrs)

    register_kernel(
        operation="attention",
        kernel_id="test.spy",
        platform="cpu",
        supported_dtypes=[torch.float32, torch.float16],
        supports=["training", "nan_rows", "causal"],
        is_traceable=True,
        deterministic=True,
    )(attention)
    yield found
    unregister_kernel("test.spy")


def written(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-2, -1) * 0.3).softmax(-1) @ value


def operands() -> list[torch.Tensor]:
    return [torch.randn(2, 3, length, 16, device="cpu") for length in (7, 11, 11)]


def proven(inputs: list[torch.Tensor]) -> None:
    forget()
    backend = Rewriting(lock={"attention": "test.spy"}, assume_finite=True, strict=True)
    torch.compile(written, backend=backend, fullgraph=True)(*inputs)
    assert backend.report.matches[0].rewritten, backend.why_not()


def tried(inputs: list[torch.Tensor]) -> None:
    assert validate("test.spy", *inputs) == (True, [])


def measured(inputs: list[torch.Tensor]) -> None:
    tune("attention.full", seq_lens=[8], head_dim=16, num_heads=2, device="cpu", samples=1, resume=False)


def measured_while_compiling(inputs: list[torch.Tensor]) -> None:
    backend = Rewriting(tune="on-miss", assume_finite=True)
    torch.compile(written, backend=backend, fullgraph=True)(*inputs)


#: Modes under which Dynamo compiles nothing at all, or something else.
_UNCOMPILED = {"a dispatch mode", "functions disabled", "a function mode"}
#: What compiled code runs under, and is proven and measured under.
_OUTSIDE = {"autocast", "autocast of another device", "a default dtype"}


def check(names: list[str], run: Callable[[list[torch.Tensor]], None], spy: list[dict[str, Any]]) -> None:
    inputs, compiles = operands(), run in (proven, measured_while_compiling)
    with isolated():
        expected = looks()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(AMBIENT[name][0]())
        before = {name: AMBIENT[name][1]() for name in names}
        expected |= {name: before[name] for name in names if compiles and name in _OUTSIDE}
        run(inputs)
        assert {name: AMBIENT[name][1]() for name in names} == before
    assert spy, "the kernel must have run"
    for found in spy:
        assert {name: value for name, value in found.items() if value != expected[name]} == {}


@pytest.mark.parametrize("run", [proven, tried])
@pytest.mark.parametrize("name", sorted(set(AMBIENT) - {"filters of warnings"}))
def test_no_kernel_sees_what_is_ambient_while_it_is_proven_or_tried(
    name: str, run: Callable[[list[torch.Tensor]], None], spy: list[dict[str, Any]]
) -> None:
    if name in _UNCOMPILED and run is proven:
        pytest.skip(f"Dynamo compiles something else under {name}")
    check([name], run, spy)


@pytest.mark.parametrize("run", [measured, measured_while_compiling])
def test_nothing_ambient_is_seen_while_kernels_are_measured(
    run: Callable[[list[torch.Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []

    def measure_forms(context: Any, *_: Any, **__: Any) -> Measured:
        found.append(looks())
        return Measured(context, {})

    for module in (tuning, match_tuning):
        monkeypatch.setattr(module, "measure_forms", measure_forms)
        monkeypatch.setattr(module, "is_measured", lambda *_, **__: False)
    monkeypatch.setattr(measuring, "may_differ", lambda *_: True)
    names = set(AMBIENT) - {"filters of warnings", "disabled saved tensor hooks", "a set default device"}
    check(sorted(names - (_UNCOMPILED if run is measured_while_compiling else set())), run, found)


@pytest.mark.parametrize("kernel_id", [None, "lz.tiled", "lz.blocked", "torch.sdpa"])
def test_an_attention_inside_a_checkpoint_trains_from_the_first_step_on(kernel_id: str | None) -> None:
    backend = Rewriting(lock={} if kernel_id is None else {"attention": kernel_id}, assume_finite=True)
    compiled = torch.compile(written, backend=backend, fullgraph=True)
    inputs = [each.requires_grad_() for each in operands()]
    forget()
    for _ in range(2):
        loss = checkpoint(compiled, *inputs, use_reentrant=False).square().sum()
        found = torch.autograd.grad(loss, inputs)
        torch.testing.assert_close(found, torch.autograd.grad(written(*inputs).square().sum(), inputs))
    assert backend.report.matches[0].rewritten, backend.why_not()
    assert not backend.report.events


def test_hooks_on_saved_tensors_see_what_the_compiled_graph_saves_and_nothing_else() -> None:
    inputs = [each.requires_grad_() for each in operands()]
    compiled = torch.compile(written, backend=Rewriting(assume_finite=True), fullgraph=True)
    forget()
    with hooks():
        first, second = seen(lambda: compiled(*inputs)), seen(lambda: compiled(*inputs))
    assert first == second != []


def test_autocast_that_is_entered_and_not_left_is_left():
    def depth() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    before = depth()
    with isolated() as outside, outside.entered():
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
        with isolated():
            torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
        assert depth() == before + 1
    assert depth() == before
    with torch.autocast("cpu"), isolated():
        torch.autocast_decrement_nesting()  # as what leaves it without having entered it
    assert depth() == before


def test_weights_are_cast_anew_after_a_loop_was_compiled_under_autocast():
    def looped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        with torch.autocast("cpu", torch.bfloat16):
            for now in x.unbind():
                h = torch.tanh(now @ w + h @ w)
        return h

    x, w = torch.randn(12, 2, 4), torch.randn(4, 4, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(looped, backend=Traced(loops="roll"))(x, w).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        before = x[0] @ w
    with torch.no_grad():
        w.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(x[0] @ w, 2 * before)
