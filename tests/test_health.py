"""The circuit breaker: which failure retires a kernel, which does not, and that the call is completed."""

from __future__ import annotations

import logging
import pickle
import threading
import weakref

import pytest
import torch

from lz_compile.errors import ArgumentError, KernelExecutionError, LayerZeroError, NoKernelFoundError
from lz_compile.ground import events, health
from lz_compile.ground.health import LIBRARY_LIMIT, OUT_OF_MEMORY_LIMIT, CircuitBreaker
from lz_compile.ground.records import Reason

ILLEGAL_ACCESS = RuntimeError("CUDA error: an illegal memory access was encountered")
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    MemoryError(),
]


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker()


def failing(error: BaseException):
    def call(*args, **kwargs):
        raise error

    return call


def reference(*args, **kwargs) -> str:
    return f"reference{args}{kwargs}"


def codes(collected: list[events.Event]) -> list[str]:
    return [event.code for event in collected]


def test_a_kernel_that_works_is_called_with_its_arguments_and_nothing_is_recorded(breaker):
    with events.collect() as collected:
        assert breaker.guarded(
            "lib.kernel", lambda *args, **kwargs: (args, kwargs), failing(AssertionError()), 1, b=2
        ) == (
            (1,),
            {"b": 2},
        )
    assert collected == []
    assert breaker.failures() == []
    assert breaker.version() == 0


def test_an_argument_that_does_not_fit_is_the_callers_error_and_retires_nothing(breaker):
    error = ArgumentError("kda", "initial_state", "of floating-point numbers", torch.int64, "Cast it")
    with events.collect() as collected, pytest.raises(ArgumentError) as raised:
        breaker.guarded("lib.kernel", failing(error), reference)
    assert raised.value is error
    assert collected == []
    assert breaker.retirements() == {}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.argument) == (str(error), "initial_state")


def test_a_kernel_that_fails_is_retired_with_events_and_the_call_completes_on_the_fallback(breaker):
    with events.collect() as collected:
        result = breaker.guarded("lib.kernel", failing(ValueError("bad tile")), reference, 1, b=2)
    assert result == "reference(1,){'b': 2}"
    assert [str(event.message) for event in collected] == [
        "running lib.kernel: ValueError: bad tile",
        "lib.kernel is not chosen again in this process: ValueError: bad tile",
    ]
    assert codes(collected) == ["KERNEL_FAILED", "KERNEL_RETIRED"]
    assert breaker.retired("lib.kernel") == Reason("KERNEL_RETIRED", "ValueError: bad tile")
    assert breaker.retired("lib.other") is None
    assert breaker.version() == 1


def test_the_failures_say_how_often_what_and_whether_retired(breaker):
    breaker.guarded("lib.kernel", failing(ValueError("bad tile")), reference)
    breaker.guarded("lib.kernel", failing(ValueError("worse")), reference)
    (found,) = breaker.failures()
    assert found.to_dict() == {
        "kernel_id": "lib.kernel",
        "count": 2,
        "out_of_memory_count": 0,
        "last_error": "ValueError: worse",
        "retired": {"code": "KERNEL_RETIRED", "message": "ValueError: bad tile"},
    }


def test_wrong_inputs_are_the_callers_error_and_retire_nothing(breaker):
    with events.collect() as collected, pytest.raises(TypeError, match="of the fallback") as raised:
        breaker.guarded("lib.kernel", failing(ValueError("of the kernel")), failing(TypeError("of the fallback")))
    assert str(raised.value.__context__) == "of the kernel"
    assert collected == []
    assert breaker.retired("lib.kernel") is None
    assert breaker.failures() == []


def test_an_interrupt_passes_through(breaker):
    with pytest.raises(KeyboardInterrupt):
        breaker.guarded("lib.kernel", failing(KeyboardInterrupt()), reference)
    assert breaker.failures() == []


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_running_out_of_memory_retires_a_kernel_only_when_it_goes_on(breaker, error):
    for _ in range(OUT_OF_MEMORY_LIMIT - 1):
        assert breaker.guarded("lib.kernel", failing(error), reference) == "reference(){}"
    assert breaker.retired("lib.kernel") is None
    assert breaker.guarded("lib.kernel", failing(error), reference) == "reference(){}"
    assert breaker.retired("lib.kernel") is not None
    assert breaker.failures()[0].out_of_memory_count == OUT_OF_MEMORY_LIMIT


def test_memory_that_the_fallback_lacks_too_is_not_counted(breaker):
    for _ in range(OUT_OF_MEMORY_LIMIT):
        with pytest.raises(MemoryError):
            breaker.guarded("lib.kernel", failing(OUT_OF_MEMORY[0]), failing(MemoryError()))
    assert breaker.failures() == []


def test_the_fallback_gets_the_memory_that_the_failed_call_held(breaker):
    held: list[weakref.ref] = []

    def call():
        workspace = torch.zeros(3)
        held.append(weakref.ref(workspace))
        try:
            raise RuntimeError("first")
        except RuntimeError:
            raise torch.OutOfMemoryError("out of memory") from None

    assert breaker.guarded("lib.kernel", call, lambda: held[0]() is None) is True


def test_a_device_error_retires_at_once_though_the_fallback_fails_as_well(breaker):
    with events.collect() as collected, pytest.raises(RuntimeError, match="also broken"):
        breaker.guarded("lib.kernel", failing(ILLEGAL_ACCESS), failing(RuntimeError("also broken")))
    assert codes(collected) == ["KERNEL_FAILED", "KERNEL_RETIRED"]
    assert breaker.retired("lib.kernel") is not None


def test_device_errors_in_several_kernels_retire_the_library(breaker):
    assert LIBRARY_LIMIT == 2
    breaker.guarded("lib.one", failing(ILLEGAL_ACCESS), reference)
    breaker.guarded("lib.one", failing(ILLEGAL_ACCESS), reference)
    assert breaker.retired("lib.three") is None
    with events.collect() as collected:
        breaker.guarded("lib.two", failing(ILLEGAL_ACCESS), reference)
    assert breaker.retired("lib.three") == Reason("KERNEL_RETIRED", "device errors in lib.one, lib.two")
    assert breaker.retired("library.one") is None
    assert collected[-1].message == "lib.* is not chosen again in this process: device errors in lib.one, lib.two"
    assert sorted(breaker.retirements()) == ["lib.*", "lib.one", "lib.two"]


def test_other_errors_never_retire_a_library(breaker):
    for name in ("one", "two", "three"):
        breaker.guarded(f"lib.{name}", failing(ValueError("bad tile")), reference)
    assert breaker.retired("lib.four") is None


def test_a_restored_kernel_starts_anew(breaker):
    for _ in range(OUT_OF_MEMORY_LIMIT):
        breaker.guarded("lib.kernel", failing(MemoryError()), reference)
    version = breaker.version()
    breaker.restore("lib.kernel")
    assert breaker.retired("lib.kernel") is None
    assert breaker.failures() == []
    assert breaker.version() > version
    breaker.guarded("lib.kernel", failing(MemoryError()), reference)
    assert breaker.retired("lib.kernel") is None


def test_restoring_a_kernel_restores_its_library_but_not_the_others_that_failed(breaker):
    for name in ("one", "two"):
        breaker.guarded(f"lib.{name}", failing(ILLEGAL_ACCESS), reference)
    breaker.restore("lib.one")
    assert breaker.retired("lib.one") is None
    assert breaker.retired("lib.three") is None
    assert breaker.retired("lib.two") is not None


def test_restoring_a_library_by_name_needs_new_errors_to_retire_it_again(breaker):
    for name in ("one", "two"):
        breaker.guarded(f"lib.{name}", failing(ILLEGAL_ACCESS), reference)
    breaker.restore("lib")
    assert breaker.retired("lib.three") is None
    breaker.guarded("lib.three", failing(ILLEGAL_ACCESS), reference)
    assert breaker.retired("lib.four") is None
    breaker.guarded("lib.four", failing(ILLEGAL_ACCESS), reference)
    assert breaker.retired("lib.five") is not None


@pytest.mark.parametrize("why", [Reason("POLICY_DISABLED", "by hand"), "by hand", ValueError("by hand")])
def test_retiring_by_hand_takes_a_reason_a_text_or_an_error(breaker, why):
    breaker.retire("lib.kernel", why)
    reason = breaker.retired("lib.kernel")
    assert reason is not None
    assert "by hand" in reason.message
    assert reason.code == ("POLICY_DISABLED" if isinstance(why, Reason) else "KERNEL_RETIRED")


def test_without_fallback_the_error_names_the_kernel_and_the_next_step(breaker):
    with events.collect() as collected, pytest.raises(KernelExecutionError) as raised:
        breaker.guarded("lib.kernel", failing(ValueError("bad tile")), reference, fallback_enabled=False)
    assert str(raised.value) == (
        "running lib.kernel: expected a result, received ValueError: bad tile. Switch fallback_enabled on to complete on "
        "the reference, or avoid lib.kernel"
    )
    assert isinstance(raised.value, LayerZeroError)
    assert isinstance(raised.value.__cause__, ValueError)
    assert codes(collected) == ["KERNEL_FAILED"]
    assert breaker.retired("lib.kernel") is None


def test_without_fallback_a_device_error_still_retires(breaker):
    with pytest.raises(KernelExecutionError):
        breaker.guarded("lib.kernel", failing(ILLEGAL_ACCESS), reference, fallback_enabled=False)
    assert breaker.retired("lib.kernel") is not None


def test_many_threads_retire_a_kernel_once_and_count_every_failure(breaker, caplog):
    caplog.set_level(logging.CRITICAL, "lz_compile")
    retired: list[int] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(30)
        with events.collect() as collected:
            for _ in range(50):
                breaker.guarded("lib.kernel", failing(ValueError("bad tile")), reference)
        retired.append(codes(collected).count("KERNEL_RETIRED"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(retired) == 1
    assert breaker.failures()[0].count == 400
    assert breaker.version() == 1


def test_the_process_has_one_breaker():
    version = health.version()
    try:
        health.guarded("test_lib.kernel", failing(ValueError("bad tile")), reference)
        assert health.retired("test_lib.kernel") is not None
        assert "test_lib.kernel" in health.retirements()
        assert [found.kernel_id for found in health.failures()] == ["test_lib.kernel"]
        health.retire("test_lib.other", "by hand")
        assert health.version() == version + 2
    finally:
        health.restore("test_lib.kernel")
        health.restore("test_lib.other")
    assert health.retired("test_lib.kernel") is None


def test_no_kernel_found_lists_every_candidate_with_its_reasons():
    error = NoKernelFoundError(
        "attention.causal",
        {"flash_attn.v2": [Reason("DTYPE_UNSUPPORTED", "float32"), Reason("NOT_INSTALLED", "flash-attn")]},
    )
    assert str(error) == (
        "No kernel available for 'attention.causal'\n"
        "\n"
        "Candidate failures:\n"
        "  flash_attn.v2:\n"
        "    - [DTYPE_UNSUPPORTED] float32\n"
        "    - [NOT_INSTALLED] flash-attn\n"
        "Lift one of these, or switch fallback_enabled on to run the reference."
    )
    assert error.failures["flash_attn.v2"][1].code == "NOT_INSTALLED"
    assert "no kernel is registered" in str(NoKernelFoundError("norm.rms", {}))
