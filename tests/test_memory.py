"""What memory there is for a kernel: asked of the device, kept for a minute, asked again when it ran out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from problems import from_tensors

from lz_compile.ground import health, memory
from lz_compile.ground.hardware import Hardware
from lz_compile.runtime.choose.given import with_settings
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.choose.select import select
from lz_compile.runtime.policy import policy

GIB = 2**30


class Device:
    """A CUDA device that is not there, with the memory that it says to have; counts how often it is asked."""

    def __init__(self) -> None:
        self.free = 4 * GIB
        self.stats = {
            "reserved_bytes.all.current": 3 * GIB,
            "active_bytes.all.current": GIB,
            "inactive_split_bytes.all.current": GIB // 2,
        }
        self.asked: list[int] = []
        self.is_capturing = False

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked.append(index)
        return self.free, 80 * GIB


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", made.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _index: made.stats)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(memory.time, "monotonic", lambda: clock.now)
    made.clock = clock  # type: ignore[attr-defined]
    memory.forget()
    yield made
    memory.forget()


def test_a_cpu_and_a_device_that_is_not_used_have_no_known_headroom():
    assert memory.headroom_bytes("cpu") is None
    assert torch.cuda.is_initialized() or memory.headroom_bytes("cuda") is None


def test_headroom_is_what_is_free_and_what_the_allocator_holds_in_whole_blocks(device):
    assert memory.headroom_bytes("cuda") == 4 * GIB + (3 - 1) * GIB - GIB // 2


def test_without_statistics_it_is_what_is_free(device):
    device.stats = {}
    assert memory.headroom_bytes("cuda") == 4 * GIB


def test_every_device_is_asked_on_its_own(device):
    memory.headroom_bytes("cuda")
    memory.headroom_bytes("cuda:0")
    memory.headroom_bytes(torch.device("cuda", 1))
    assert device.asked == [0, 1]


def test_an_answer_is_kept_for_a_minute(device):
    before = memory.headroom_bytes("cuda")
    device.free = GIB
    device.clock.now = memory.TTL_S
    assert memory.headroom_bytes("cuda") == before
    device.clock.now = memory.TTL_S + 0.1
    assert memory.headroom_bytes("cuda") == before - 3 * GIB
    assert device.asked == [0, 0]


def test_a_kernel_that_runs_out_of_memory_makes_it_be_asked_again(device):
    before = memory.headroom_bytes("cuda")
    device.free = GIB

    def greedy() -> int:
        raise torch.OutOfMemoryError("out of memory")

    assert health.guarded("tests.greedy", greedy, lambda: 1) == 1
    try:
        assert memory.headroom_bytes("cuda") == before - 3 * GIB
        assert memory.headroom_bytes("cuda") == before - 3 * GIB
        assert device.asked == [0, 0]
    finally:
        health.restore("tests.greedy")


def test_another_failure_does_not(device):
    memory.headroom_bytes("cuda")

    def broken() -> int:
        raise ValueError("broken")

    health.guarded("tests.broken", broken, lambda: 1)
    try:
        memory.headroom_bytes("cuda")
        assert device.asked == [0]
    finally:
        health.restore("tests.broken")


def test_a_capture_asks_nothing(device):
    device.is_capturing = True
    assert memory.headroom_bytes("cuda") is None
    device.is_capturing = False
    known = memory.headroom_bytes("cuda")
    device.is_capturing, device.clock.now = True, 1000.0
    assert memory.headroom_bytes("cuda") == known
    assert device.asked == [0]


def cuda_problem() -> Problem:
    query = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    context = from_tensors(query, query, query)
    there = Hardware("cuda", "NVIDIA H200", 90, "hopper", 4, frozenset(), 0)
    return Problem(context.__class__(**{**vars(context), "hardware": there}))


def test_selection_takes_the_policy_before_the_device(device):
    try:
        policy.configure(memory_headroom_mb=3)
        context = with_settings(cuda_problem().context, policy.current())
        assert context.memory_headroom_bytes == 3 * 2**20
        assert device.asked == []
        policy.reset()
        assert with_settings(cuda_problem().context, policy.current()).memory_headroom_bytes == memory.headroom_bytes(
            "cuda"
        )
    finally:
        policy.reset()


def test_a_kernel_whose_workspace_does_not_fit_is_refused(device, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))  # what others measured asks which device this is

    def against() -> list[str]:
        decision = select(cuda_problem(), policy.current())
        (blocked,) = [each for each in decision.candidates if each.kernel.kernel_id == "lz.blocked"]
        return [reason.code for reason in blocked.against]

    assert "MEMORY_HEADROOM_EXCEEDED" not in against()
    device.free, device.stats = 1000, {}
    memory.forget()
    assert "MEMORY_HEADROOM_EXCEEDED" in against()
