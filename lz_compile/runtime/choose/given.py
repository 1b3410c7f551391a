"""What a selection looks at: a problem under a policy's settings, what was measured, and the sizes that symbols may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lz_compile.ground import memory
from lz_compile.ground.machine import environment
from lz_compile.ground.records import Reason
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.estimate import fixed_part
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.policy.resolved import Policy, ResolvedPolicy
from lz_compile.runtime.problem.context import SelectionContext

#: The sizes of a symbol that are looked at: 16 to 16,384.
POWERS = tuple(1 << power for power in range(4, 15))


def with_settings(context: SelectionContext, policy: Policy) -> SelectionContext:
    """With what the policy says; what memory there is, is asked of the device where neither says it."""
    settings = policy.settings
    headroom = settings.memory_headroom_bytes
    headroom = context.memory_headroom_bytes if headroom is None else headroom
    return replace(
        context,
        requires_deterministic=context.requires_deterministic or bool(settings.deterministic),
        requires_batch_invariant=settings.deterministic == "batch_invariant",
        memory_headroom_bytes=memory.headroom_bytes(context.device_type) if headroom is None else headroom,
    )


def span(symbol: Any) -> tuple[int, int | None]:
    """The least and the most that a symbol may be; None where there is no most."""
    return symbol.lower, symbol.upper


def points(symbols: Mapping[str, Any]) -> list[dict[str, int]]:
    """A grid of powers of two over the symbols' ranges, with the sizes that the graph was traced with."""
    points: list[dict[str, int]] = [{}]
    for name, symbol in symbols.items():
        inside = [size for size in POWERS if symbol.lower <= size and (symbol.upper is None or size <= symbol.upper)]
        sizes = sorted({*inside, symbol.hint})
        points = [{**point, name: size} for point in points for size in sizes]
    return points


def notes(said: ResolvedPolicy, kernel_id: str) -> tuple[Reason, ...]:
    """Who prefers a kernel, and who wants it avoided."""
    preference, avoided = said.preference(kernel_id), said.avoided(kernel_id)
    preferred = () if preference is None else (Reason("POLICY_PREFERRED", f"preferred by {preference[1]}"),)
    return preferred if avoided is None else (*preferred, Reason("POLICY_AVOIDED", f"avoided by {avoided}"))


def records_of(problem: Problem, context: SelectionContext, path: str | None) -> list[PerfRecord]:
    """The measurements that share a problem's fixed part, in this environment."""
    if not (context.device_type == "cpu" or (context.device_type != "meta" and torch.accelerator.is_available())):
        return []
    where, match = environment(context.device_type), perfdb.canonical(fixed_part(context, problem.alone))
    return perfdb.ask(perfdb.Question(path, context.operation, context.dtype_name, where, match))
