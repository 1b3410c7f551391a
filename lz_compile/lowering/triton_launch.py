"""How a kernel is launched: with tiles that are timed on a GPU, once for its kind of rows, or with fixed ones.

Fixed tiles are for Triton's interpreter, which has no clock worth asking, and for whoever wants the same bits in every
process: another tile sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

#: Elements of a tile, by preference; the first one is that of fixed tiles.
TILES = (4096, 1024, 2048, 8192)
WARPS = (4, 8, 16)  # 16 of 64 threads are the most that a block of an AMD GPU has
#: Fewer rows than this leave most of a GPU without work, and another tile is best.
FEW_ROWS = 512
#: Multiprocessors that the interpreter is said to have: more than one, so that partial sums are summed.
INTERPRETED_PROCESSORS = 3

WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, as ``TRITON_INTERPRET`` said when it was imported."""
    return not isinstance(_probe, triton.JITFunction)


@triton.jit
def _probe() -> None:
    pass


@dataclass(frozen=True)
class Tiled:
    """A kernel over tiles of ``ROWS`` rows and ``BLOCK`` columns, which says itself how many rows it takes.

    It has the constants ``BLOCK``, ``ROWS`` and ``HAS_FEW_ROWS``.
    """

    kernel: Any

    def launch(self, grid: Callable[[Mapping[str, Any]], tuple[int, ...]], *arguments: Any, **constants: Any) -> None:
        """Run over a grid that is a function of the constants."""
        if is_interpreted() or torch.are_deterministic_algorithms_enabled():
            rows, warps = _fixed(constants["BLOCK"])
            self.kernel[grid](*arguments, **constants, ROWS=rows, num_warps=warps)
        else:
            self._tuned[grid](*arguments, **constants)

    @cached_property
    def _tuned(self) -> Any:
        configs = [triton.Config({"ROWS": tile}, num_warps=warps) for tile in TILES for warps in WARPS]
        prune = {"early_config_prune": _for_block}
        tune = triton.autotune(configs, key=["BLOCK", "HAS_FEW_ROWS"], prune_configs_by=prune)
        return tune(self.kernel)


def _fixed(block: int) -> tuple[int, int]:
    """Rows and warps of a fixed tile."""
    rows = max(1, TILES[0] // block)
    return rows, min(max(rows * block // 1024, 4), 16)


def _for_block(configs: Sequence[Any], named: Mapping[str, Any], **constants: Any) -> list[Any]:
    """Of tiles given by their elements, those that hold whole rows of ``BLOCK``, each once."""
    block = constants["BLOCK"] if "BLOCK" in constants else named["BLOCK"]
    found: dict[tuple[int, int], Any] = {}
    for config in configs:
        rows = max(1, config.kwargs["ROWS"] // block)
        found.setdefault((rows, config.num_warps), triton.Config({"ROWS": rows}, num_warps=config.num_warps))
    return list(found.values())


def cdiv(total: int, part: int) -> int:
    """How many parts there are; Triton's own function takes ten times as long on the host, for it serves kernels, too."""
    return -(-total // part)


def next_power_of_2(size: int) -> int:
    """The least power of two that is no less than a positive size, as Triton has it, which is slow on the host."""
    return 1 << (size - 1).bit_length()


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """How many blocks run at the same time at least."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same without gaps in rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the one that kernels are launched on."""
    is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_other else nullcontext()


# ---- float8: converted by a GPU that knows the format, elsewhere read as bits ----------------------------------------


#: The first compute capability that converts from e4m3 by itself: on an H100 a product takes 26 us then, and 46 by bits.
CONVERTS_E4M3 = (8, 9)

_BITS = {torch.float8_e4m3fn: "e4m3 bits", torch.float8_e5m2: "e5m2 bits"}


@lru_cache(maxsize=64)
def format_of(dtype: torch.dtype, device: torch.device) -> str:
    """How :func:`decoded` reads the bytes of a dtype; empty where elements are numbers already."""
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.version.cuda and not is_interpreted():
        return "e4m3" if torch.cuda.get_device_capability(device) >= CONVERTS_E4M3 else _BITS[dtype]
    return _BITS.get(dtype, "")


def as_read(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel is given: bytes in the place of float8."""
    return tensor.view(torch.uint8) if tensor.dtype in _BITS else tensor


@triton.jit
def decoded(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What is stored as numbers, by a format that :func:`format_of` gives."""
    if FORMAT == "e4m3":
        stored = stored.to(tl.float8e4nv, bitcast=True)
    if FORMAT == "e5m2 bits":
        stored = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FORMAT == "e4m3 bits":
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        stored = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    return stored.to(DTYPE)
