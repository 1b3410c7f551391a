"""The environment hash changes with what makes measurements incomparable, and with nothing that passes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lz_compile.ground import machine


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_same_process_has_the_same_environment():
    assert machine.environment() == machine.environment(torch.device("cpu")) == machine.environment("cpu")


def test_the_details_name_software_processor_and_threads():
    details = machine.environment_details()
    assert details["torch"] == torch.__version__
    assert details["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert details["threads"] == str(torch.get_num_threads())
    assert details["torch_cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert all(isinstance(value, str) for value in details.values())


def test_another_number_of_threads_is_another_environment(threads):
    torch.set_num_threads(1)
    one = machine.environment()
    torch.set_num_threads(2)
    assert machine.environment() != one


def test_another_matmul_precision_is_another_environment(precision):
    torch.set_float32_matmul_precision("highest")
    highest = machine.environment()
    torch.set_float32_matmul_precision("high")
    assert machine.environment() != highest


@pytest.mark.parametrize("part", ["torch", "triton", "python", "system", "processor"])
def test_other_software_or_another_processor_is_another_environment(part, monkeypatch):
    before = machine.environment()
    software = {**machine._software(), part: "another"}
    monkeypatch.setattr(machine, "_software", lambda: software)
    assert machine.environment() != before


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        ("TORCHINDUCTOR_FREEZING", True),
        ("TORCHINDUCTOR_CPP_GEMM_CACHE_BLOCKING", True),
        ("TORCHINDUCTOR_SOMETHING_NEW", True),
        ("KMP_AFFINITY", True),
        ("ONEDNN_MAX_CPU_ISA", True),
        ("CXX", True),
        ("LD_PRELOAD", True),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", False),
        ("TORCHINDUCTOR_COMPILE_THREADS", False),
        ("OMP_NUM_THREADS", False),
        ("ONEDNN_VERBOSE", False),
        ("CXXFLAGS_OF_ANOTHER", False),
        ("HOME", False),
    ],
)
def test_variables_count_where_they_change_what_is_compiled_or_how_threads_run(variable, counts, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    before = machine.environment()
    monkeypatch.setenv(variable, "another_value")
    assert (machine.environment() != before) == counts


PROPERTIES: dict[str, Any] = {"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 150, "uuid": "1234"}


def _accelerate(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    properties = SimpleNamespace(**{**PROPERTIES, **changes})
    module = SimpleNamespace(get_device_properties=lambda index: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    machine._accelerator.cache_clear()


def test_an_accelerators_environment_is_its_own_and_leaves_out_the_threads_of_its_host(monkeypatch, threads):
    _accelerate(monkeypatch)
    found = machine.environment("cuda")
    assert found == machine.environment("cuda:0") != machine.environment("cpu")
    details = machine.environment_details("cuda")
    assert (details["device"], details["major"], details["total_memory"]) == ("NVIDIA H200", "9", "150")
    assert "threads" not in details
    torch.set_num_threads(3)
    assert machine.environment("cuda") == found
    _accelerate(monkeypatch, name="NVIDIA H100")
    assert machine.environment("cuda") != found
    machine._accelerator.cache_clear()


def test_conditions_that_cannot_be_known_are_unknown():
    known = machine.conditions("cpu")
    assert known["memory_pressure"] in ("low", "medium", "high", "unknown")
    assert (known["gpu_temperature"], known["power_state"]) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("available_kb", "limit", "used", "bucket"),
    [
        (800, None, None, "low"),
        (500, None, None, "low"),
        (499, None, None, "medium"),
        (149, None, None, "high"),
        (800, "1000", "900", "high"),
        (800, "1000", "100", "low"),
        (400, "max", "900", "medium"),
        (None, None, None, "unknown"),
        (None, "1000", "700", "medium"),
    ],
)
def test_memory_pressure_is_that_of_the_machine_or_of_its_container(tmp_path, available_kb, limit, used, bucket):
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    if available_kb is not None:
        text = f"MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:   {available_kb} kB\n"
        (tmp_path / "proc/meminfo").write_text(text)
    if limit is not None:
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    assert machine._pressure(machine._host_memory_available(tmp_path)) == bucket


class _Refused(Exception):
    pass


def _nvml(celsius: int = 40, reasons: int = 0, clock: int = 1980, **changes: Any) -> SimpleNamespace:
    """NVML's Python binding, as far as we ask it, of a GPU in the state given."""
    return SimpleNamespace(
        **{
            "NVMLError": _Refused,
            "NVML_TEMPERATURE_GPU": 0,
            "NVML_CLOCK_SM": 1,
            "nvmlClocksThrottleReasonHwSlowdown": 8,
            "nvmlClocksThrottleReasonSwPowerCap": 4,
            "nvmlClocksThrottleReasonSwThermalSlowdown": 32,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": {"GPU-1234": "handle", "MIG-1234": "handle"}.__getitem__,
            "nvmlDeviceGetTemperature": lambda handle, sensor: celsius,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: reasons,
            "nvmlDeviceGetClockInfo": lambda handle, kind: clock,
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("state", "temperature", "power"),
    [
        ({}, "cold", "boost"),
        ({"celsius": 50, "clock": 1000}, "warm", "nominal"),
        ({"celsius": 80, "reasons": 4}, "hot", "throttled"),
        ({"reasons": 1}, "cold", "boost"),
    ],
)
def test_a_gpus_temperature_and_power_are_bucketed(state, temperature, power, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(**state))
    for uuid in ("1234", "MIG-1234"):
        assert machine._nvml_conditions(uuid) == {"gpu_temperature": temperature, "power_state": power}


def test_a_gpu_is_unknown_where_nvml_is_absent_or_refuses(monkeypatch):
    def refuse() -> None:
        raise _Refused

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine._nvml_conditions("1234") == {}
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(nvmlInit=refuse))
    assert machine._nvml_conditions("1234") == {}
    without = _nvml()
    del without.nvmlClocksThrottleReasonSwPowerCap
    monkeypatch.setitem(sys.modules, "pynvml", without)
    assert machine._nvml_conditions("1234") == {}


def test_conditions_of_a_gpu_hold_its_own_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (30, 100))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**PROPERTIES))
    monkeypatch.setitem(sys.modules, "pynvml", _nvml())
    expected = {"memory_pressure": "medium", "gpu_temperature": "cold", "power_state": "boost"}
    assert machine.conditions("cuda") == expected


def test_a_compiler_of_no_name_is_none(monkeypatch):
    monkeypatch.setenv("CXX", " ")
    assert '"none"' in machine.code_runs_on()
