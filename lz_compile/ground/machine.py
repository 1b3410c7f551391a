"""The environment that a measurement holds for, and the passing conditions that it was made under.

The environment is what decides how fast a kernel is here: software, device, threads and the variables that change
generated code. Measurements of two environments are never mixed. The conditions (temperature, memory pressure, power
state) come and go; they are kept beside a measurement as its provenance.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

UNKNOWN = "unknown"

# Variables that change what is compiled or how threads run. A new TORCHINDUCTOR variable counts until it is listed as
# harmless below: tuning once more is cheaper than a choice that rests on another program's measurements.
_COUNTED = re.compile(r"(TORCHINDUCTOR|OMP|KMP|GOMP|MKL|ONEDNN|DNNL)_.+|CXX|LD_PRELOAD")
# They say where things are kept, what is printed, or how compiling is organised; torch reports the number of threads.
_HARMLESS = re.compile(
    r".*(_CACHE|_CACHE_DIR|_CACHE_DEFAULT|_CACHE_WRITE|_NUM_THREADS|COMPILE_THREADS|_VERBOSE|_WARNINGS|_SAVE_ARGS"
    r"|_DISPLAY_ENV)|.*(LOG|DEBUG|WORKER|TIMEOUT|METRIC|REPORT|UNIQUE_.*KERNEL_NAMES).*"
)
_VECTOR_FLAGS = re.compile(r"(avx|amx|fma|f16c|sse4|sve|sme(?!p)|asimd|neon|bf16|i8mm).*")


def environment(device: torch.device | str = "cpu") -> str:
    """A hash of ``environment_details(device)``: the key under which measurements may be compared."""
    details = json.dumps(environment_details(device), sort_keys=True)
    return hashlib.sha256(details.encode()).hexdigest()[:16]


def environment_details(device: torch.device | str = "cpu") -> dict[str, str]:
    """Everything that separates measurements of ``device`` from others, by name.

    Threads and instruction sets count on the CPU only. An accelerator's host is named all the same, since it launches.
    """
    import torch

    found = torch.device(device)
    if found.type != "cpu" and found.index is None:
        found = torch.device(found.type, torch.accelerator.current_device_index())
    details = dict(_software())
    details["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    details["variables"] = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if _counts(name))
    if found.type == "cpu":
        details["threads"] = str(torch.get_num_threads())
        details["torch_cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        details["instructions"] = _processor()["instructions"]
        details["device"] = details["processor"]
    else:
        details.update(_accelerator(found))
    return details


def proven_on(device: torch.device | str = "cpu") -> str:
    """What decides about the results of a kernel on ``device``: instructions or GPU, compilers and the precision of products.

    A proof that was made elsewhere says nothing here. How fast it is, and how many threads there are, plays no part.
    """
    import torch

    from lz_compile.ground.hardware import hardware

    found = hardware(device)
    details = {
        "software": " ".join(_software()[name] for name in ("torch", "triton", "system")),
        "toolkit": f"{torch.version.cuda} {torch.version.hip}",
        "compiler": _compiler(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "device": f"{found.platform} {found.sm_version} {found.generation}",
    }
    if found.platform == "cpu":
        details["instructions"] = f"{torch.backends.cpu.get_cpu_capability()} {_processor()['instructions']}"
    else:
        details["device"] += f" {found.device_name}"
    return json.dumps(details, sort_keys=True)


def code_runs_on() -> str:
    """What native code that is built here may ask of a machine: Inductor compiles for this very processor."""
    found = {
        "processor": _processor()["name"].rpartition(" x ")[0],
        "instructions": _processor()["instructions"],
        "system": _software()["system"],
        "compiler": _compiler(),
    }
    return json.dumps(found, sort_keys=True)


def _compiler() -> str:
    """The C++ compiler that Inductor calls, as its file: to ask it for its version takes longer than many a proof."""
    return _file_of(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


@cache
def _file_of(command: str) -> str:
    path = shutil.which(command.partition(" ")[0])
    if path is None:
        return "none"
    status = Path(path).resolve().stat()
    return f"{command} {status.st_size} {status.st_mtime_ns}"


def conditions(device: torch.device | str = "cpu") -> dict[str, str]:
    """What passes and yet slows a kernel, in three buckets or "unknown" where this machine does not tell.

    ``memory_pressure`` is low, medium or high, ``gpu_temperature`` cold, warm or hot, ``power_state`` boost, nominal or
    throttled.
    """
    import torch

    found = torch.device(device)
    known = {"memory_pressure": UNKNOWN, "gpu_temperature": UNKNOWN, "power_state": UNKNOWN}
    if found.type == "cpu":
        known["memory_pressure"] = _pressure(_host_memory_available())
    elif found.type == "cuda":
        index = torch.cuda.current_device() if found.index is None else found.index
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        known["memory_pressure"] = _pressure(free_bytes / total_bytes)
        known.update(_nvml_conditions(str(torch.cuda.get_device_properties(index).uuid)))
    return known


@cache
def _counts(name: str) -> bool:
    return bool(_COUNTED.fullmatch(name)) and not _HARMLESS.fullmatch(name)


@cache
def _software() -> dict[str, str]:
    import importlib.metadata

    import torch

    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "torch": torch.__version__,
        "triton": triton,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor()["name"],
    }


@cache
def _processor() -> dict[str, str]:
    """Model and vector instructions. Virtual machines share a model's name, so family and cache size belong to it."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        first = ""
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}
    names = ("model name", "cpu family", "model", "stepping", "cache size", "CPU implementer", "CPU part")
    model = " / ".join(fields[name] for name in names if name in fields) or platform.processor() or UNKNOWN
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    vector = " ".join(sorted(flag for flag in flags if _VECTOR_FLAGS.fullmatch(flag)))
    return {"name": f"{model} x {os.cpu_count()}", "instructions": vector or UNKNOWN}


@cache
def _accelerator(device: torch.device) -> dict[str, str]:
    import torch

    properties = torch.get_device_module(device).get_device_properties(device.index)
    described = {"device": str(getattr(properties, "name", device.type))}
    for name in ("major", "minor", "gcnArchName", "multi_processor_count", "total_memory"):
        if hasattr(properties, name):
            described[name] = str(getattr(properties, name))
    described["runtime"] = str(torch.version.cuda or torch.version.hip or UNKNOWN)
    described["driver"] = _driver()
    return described


def _driver() -> str:
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        version = re.search(r"\d+(\.\d+)+", text)
        return version.group() if version else text.strip()
    return UNKNOWN


# ---- conditions ----------------------------------------------------------------------------------------------------


def _pressure(available: float | None) -> str:
    """Half free is no pressure; under 15% the system begins to reclaim."""
    if available is None:
        return UNKNOWN
    return "low" if available >= 0.5 else "medium" if available >= 0.15 else "high"


def _host_memory_available(root: Path = Path("/")) -> float | None:
    """The share of memory that is free to take, of the machine or of the container, whichever has less."""
    return min((free / total for free, total in host_memory(root) if total), default=None)


def host_memory(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Free bytes and all bytes of the machine and of the container, as far as they tell."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
        yield sizes["MemAvailable"] << 10, sizes["MemTotal"] << 10
    except (OSError, ValueError, KeyError, IndexError):
        pass  # not Linux, or a kernel older than 3.14: unknown
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())  # "max" where there is no limit
        yield max(limit - int((root / "sys/fs/cgroup/memory.current").read_text()), 0), limit
    except (OSError, ValueError):
        pass  # no limit that we can see


def _nvml_conditions(uuid: str) -> dict[str, str]:
    """Temperature and power of one GPU, nothing where NVML or its Python binding is absent or refuses."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
            celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            limit = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            held_back = (
                nvml.nvmlClocksThrottleReasonHwSlowdown
                | nvml.nvmlClocksThrottleReasonSwPowerCap
                | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            )
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, AttributeError):  # AttributeError: a binding of another version, without these names
        return {}
    return {
        "gpu_temperature": "cold" if celsius < 50 else "warm" if celsius < 80 else "hot",
        "power_state": "throttled" if reasons & held_back else "boost" if clock >= 0.9 * limit else "nominal",
    }
