"""How much memory a kernel may use beside its operands and result, on the device as it is now.

What is asked of the device is kept for a minute, and asked again after a kernel has run out of memory.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from lz_compile.ground import health
from lz_compile.ground.machine import host_memory

_LITTLE = 1 << 30
#: For how long an answer of the device is taken to be true.
TTL_S = 60.0


@dataclass(frozen=True)
class _Probe:
    """What was found, when, and how many times kernels had run out of memory by then."""

    free_bytes: int
    at_s: float
    out_of_memory_count: int


_probes: dict[int, _Probe] = {}
_lock = threading.Lock()


def headroom_bytes(device: torch.device | str) -> int | None:
    """The memory of a device that is free or that torch's allocator holds unused; None where that is not known.

    It is known of CUDA and ROCm devices that this process uses already. Pieces of blocks that are partly in use are not
    counted: they are too small for a workspace, or no kernel would run out of memory beside them.

    Args:
        device: one without an index is the current one.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    failures = sum(known.out_of_memory_count for known in health.failures())
    with _lock:
        known = _probes.get(index)
        if known is None or known.out_of_memory_count != failures or time.monotonic() - known.at_s > TTL_S:
            if torch.cuda.is_current_stream_capturing():  # asking the device would end the capture
                return None if known is None else known.free_bytes
            known = _probes[index] = _Probe(_free_bytes(index), time.monotonic(), failures)
        return known.free_bytes


def free_bytes(device: torch.device) -> int:
    """The memory that can be taken now; of a device that does not tell, what nearly every one has (1 GiB)."""
    if device.type == "cpu":
        return min((free for free, _ in host_memory()), default=_LITTLE)
    found = headroom_bytes(device)
    return _LITTLE if found is None else found


def forget() -> None:
    """Ask every device again."""
    with _lock:
        _probes.clear()


def _free_bytes(index: int) -> int:
    free, _ = torch.cuda.mem_get_info(index)
    held = torch.cuda.memory_stats(index)
    unused = held.get("reserved_bytes.all.current", 0) - held.get("active_bytes.all.current", 0)
    fragments = held.get("inactive_split_bytes.all.current", 0)
    return int(free) + max(int(unused) - int(fragments), 0)
