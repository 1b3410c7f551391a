"""What a device can do, as torch reports it; what torch does not report counts as absent."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lz_compile.ground.records import Record

#: First SM version of a generation, its name and its tensor cores' generation, newest first.
GENERATIONS: tuple[tuple[int, str, int], ...] = (
    (100, "blackwell", 5),
    (90, "hopper", 4),
    (89, "ada", 3),
    (80, "ampere", 3),
    (75, "turing", 2),
)
#: The first SM version that no generation is known for.
UNKNOWN_SM = 200

#: Matrix instructions and the SM versions that have them (PTX ISA: ``wgmma`` is sm_90a's alone, ``tcgen05`` that of
#: sm_100 to sm_110; sm_120 has neither).
INSTRUCTION_SETS: Mapping[str, range] = {
    "mma.sync": range(75, UNKNOWN_SM),
    "wgmma": range(90, 100),
    "tcgen05.mma": range(100, 120),
}

#: ``torch.backends.cpu.get_cpu_capability()``, which follows ATEN_CPU_CAPABILITY, and the instruction sets in it.
_CPU_LEVELS: Mapping[str, tuple[str, ...]] = {
    "AVX2": ("avx2",),
    "AVX512": ("avx2", "avx512"),
    "SVE256": ("neon", "sve", "sve256"),
    "SVE": ("neon", "sve"),
    "VSX": ("vsx",),
    "Z VECTOR": ("zvector",),
}
#: Extensions: our name, the level they need, the key of ``torch.cpu.get_capabilities()`` and the older function.
_CPU_EXTENSIONS: tuple[tuple[str, str, str, str], ...] = (
    ("avx512_bf16", "avx512", "avx512_bf16", "_is_avx512_bf16_supported"),
    ("avx512_fp16", "avx512", "avx512_fp16", ""),
    ("avx512_vnni", "avx512", "avx512_vnni", "_is_vnni_supported"),
    ("amx", "avx512", "amx_tile", "_is_amx_tile_supported"),
    ("amx_bf16", "avx512", "amx_bf16", ""),
    ("amx_fp16", "avx512", "amx_fp16", "_is_amx_fp16_supported"),
)


@dataclass(frozen=True)
class Hardware(Record):
    """One device.

    ``platform`` is ``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``mps``; ``generation`` a name of :data:`GENERATIONS`, on ROCm
    the architecture (``gfx942``); ``isa`` what torch uses of a CPU, empty elsewhere; ``threads`` torch's on a CPU, else 0.
    """

    platform: str
    device_name: str
    sm_version: int | None = None
    generation: str | None = None
    tensor_core_generation: int | None = None
    isa: frozenset[str] = frozenset()
    threads: int = 0

    @property
    def instruction_sets(self) -> frozenset[str]:
        """The matrix instructions of an NVIDIA GPU (:data:`INSTRUCTION_SETS`)."""
        return frozenset(name for name, versions in INSTRUCTION_SETS.items() if self.sm_version in versions)

    def signature(self) -> str:
        """What two machines share that may share decisions: ``cuda_sm90_cu128``, ``cpu_avx512_2threads``."""
        if self.platform == "cpu":
            return f"cpu_{_level(self.isa)}_{self.threads}threads"
        if self.platform == "cuda":
            return f"cuda_sm{self.sm_version}_cu{(torch.version.cuda or '').replace('.', '')}"
        if self.platform == "rocm":
            return f"rocm_{self.generation}_hip{'.'.join((torch.version.hip or '').split('.')[:2])}"
        return self.platform

    def kind(self) -> str:
        """What two devices share on which the same kernels run: the instructions, not how many threads, nor a name."""
        return f"cpu {' '.join(sorted(self.isa))}".rstrip() if self.platform == "cpu" else self.signature()

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {**super().to_dict(), "signature": self.signature()}


def has_short_products(isa: Collection[str]) -> bool:
    """Whether PyTorch multiplies bfloat16 on a CPU by more than plain loops, which take a hundred times as long."""
    return "avx2" not in isa or "avx512" in isa


def default_device() -> torch.device:
    """The accelerator, or the CPU where none can be used: a build for CUDA names one also where there is no driver."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def hardware(device: torch.device | str) -> Hardware:
    """What there is behind a device; a type that torch does not know has a name and nothing else."""
    kind, index = (device.type, device.index) if isinstance(device, torch.device) else (device, None)
    if kind == "cpu":
        return _cpu(torch.get_num_threads())
    if kind != "cuda":
        return _other(kind, index)
    if not torch.cuda.is_available():
        return Hardware("rocm" if torch.version.hip else "cuda", "unknown")
    return _cuda(torch.cuda.current_device() if index is None else index)


def forget() -> None:
    """Ask torch again."""
    for function in (_cpu, _isa, _cpu_name, _cuda, _other):
        function.cache_clear()


def generation_of(sm_version: int) -> tuple[str | None, int | None]:
    """Name and tensor core generation of an SM version; None for those that are not in the table."""
    for first, name, tensor_cores in GENERATIONS:
        if first <= sm_version < UNKNOWN_SM:
            return name, tensor_cores
    return None, None


@cache
def _cuda(index: int) -> Hardware:
    properties: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Hardware("rocm", properties.name, generation=properties.gcnArchName.partition(":")[0])
    sm_version = properties.major * 10 + properties.minor
    return Hardware("cuda", properties.name, sm_version, *generation_of(sm_version))


@cache
def _other(kind: str, index: int | None) -> Hardware:
    module = getattr(torch, kind, None)
    name = getattr(module, "get_device_name", None)
    is_available = getattr(module, "is_available", None)
    if name is None or is_available is None or not is_available():
        return Hardware(kind, "unknown")
    return Hardware(kind, str(name(index)))


@cache
def _cpu(threads: int) -> Hardware:
    return Hardware("cpu", _cpu_name(), isa=_isa(), threads=threads)


@cache
def _isa() -> frozenset[str]:
    found = set(_CPU_LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()))
    table: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    for name, level, key, function in _CPU_EXTENSIONS:
        older = getattr(torch.cpu, function, None) if function else None
        if level in found and (table.get(key, False) or (older is not None and older())):
            found.add(name)
    if platform.machine().lower() in ("arm64", "aarch64"):
        found |= {"neon", *(name for name in ("sve", "sve2", "i8mm", "bf16") if table.get(name, False))}
    return frozenset(found)


def _level(isa: frozenset[str]) -> str:
    """What decides about a CPU's speed in matrix products, in one word."""
    return next((name for name in ("amx", "avx512", "avx2", "sve", "neon", "vsx", "zvector") if name in isa), "default")


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
