"""Code of scans that a traced graph is going to call, built while the rest of the graph is compiled."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from lz_compile.lowering.kernels.scan.cpp_launch import Launch, function_of
from lz_compile.lowering.kernels.scan.cpp_program import Program

_lock = threading.Lock()
_started: set[tuple[Program, bool]] = set()
_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lz-compile-cpp")


def build_ahead(launch: Launch, wanted: frozenset[str] = frozenset(), *, backward: bool = False) -> None:
    """Start building what a scan over tensors like these (fake ones) runs; nothing waits for it but who needs it.

    A build that fails is met again, with its error, where the scan runs.
    """
    operands = (*launch.operands.values(), *launch.leaves)
    if not all(isinstance(size, int) for each in operands for size in each.shape):
        return
    if any(each.device.type != "cpu" for each in operands):
        return
    key = launch.program(wanted), backward
    with _lock:
        if key in _started:
            return
        _started.add(key)
    _pool.submit(function_of, *key)
