"""What a measurement was made on: machine, versions, threads and load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import lz_compile
from lz_compile.ground.fingerprint import source_hash

#: The instruction sets beyond torch's own dispatch level that decide how fast bfloat16 runs.
_MATRIX_FLAGS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "bf16", "sve")


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, the versions, the threads and the load before the measurement, as stable JSON."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(device),
        "versions": _versions(),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def slug(device: torch.device) -> str:
    """A short name of the processor for file names, such as ``amd-epyc-avx512`` or ``nvidia-h200``."""
    words = re.sub(r"\((R|TM|tm)\)|@.*|\bCPU\b|\bProcessor\b", " ", _processor(device))
    if device.type == "cpu":
        words += f" {torch.backends.cpu.get_cpu_capability()}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _processor(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "matrix_flags": _matrix_flags(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    return found


def _matrix_flags() -> list[str]:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer than torch 2.11
    return [flag for flag in _MATRIX_FLAGS if capabilities.get(flag) is True]


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "lz_compile": lz_compile.__version__,
        "lz_compile_source": source_hash()[:12],
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
