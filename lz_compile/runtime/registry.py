"""The kernels that there are: one module and one capabilities descriptor each, found by file name.

``lowering/kernels/<name>.json`` says what a kernel can do (fail closed: what is not listed is not supported);
``lowering/kernels/<name>.py`` holds a function for every op, named like the op. Adding a kernel edits no list.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lz_compile.runtime import events

SCHEMA_VERSION = "1.0"
KERNELS = Path(__file__).resolve().parent.parent / "lowering" / "kernels"


@dataclass(frozen=True)
class Prior:
    """What to expect of a kernel before anything was measured here: latency relative to Inductor's own code."""

    platform: str
    dtypes: frozenset[str]
    relative_latency: float
    min_query_len: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """One kernel for one operation.

    ``call`` is None for the kernel that leaves the subgraph alone. ``supports`` names features (see the op's
    ``features``); ``"*"`` stands for everything. ``validation_arguments`` make the small sizes of a proof meet what large
    ones meet, such as several blocks.
    """

    kernel_id: str
    operation: str
    source: str
    platforms: frozenset[str]
    dtypes: frozenset[str]
    supports: frozenset[str]
    call: Callable[..., Any] | None
    validation_arguments: Mapping[str, Any] = field(default_factory=dict)
    prior: tuple[Prior, ...] = field(default=())


@cache
def kernels(operation: str) -> Mapping[str, KernelSpec]:
    """Every kernel for an operation by its id, ``inductor`` first. A descriptor or module that fails is an event."""
    found: dict[str, KernelSpec] = {}
    for path in sorted(KERNELS.glob("*.json"), key=lambda p: (p.stem != "inductor", p.stem)):
        try:
            for spec in _load(path, operation):
                found[spec.kernel_id] = spec
        except Exception as error:  # noqa: BLE001 a broken kernel disables itself, never the compiler
            events.record("BACKEND_IMPORT_FAILED", f"kernel descriptor {path.name} is disabled", error)
    return found


def _load(path: Path, operation: str) -> list[KernelSpec]:
    descriptor = json.loads(path.read_text())
    version = descriptor.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"reading {path.name}: expected schema_version {SCHEMA_VERSION}, found {version}")
    return [_spec(path.stem, operation, descriptor, entry) for entry in descriptor["ops"].get(operation, [])]


def _spec(module: str, operation: str, descriptor: Mapping[str, Any], entry: Mapping[str, Any]) -> KernelSpec:
    implementation = importlib.import_module(f"lz_compile.lowering.kernels.{module}")
    return KernelSpec(
        kernel_id=entry["kernel_id"],
        operation=operation,
        source=descriptor["source"],
        platforms=frozenset(entry.get("platforms", ())),
        dtypes=frozenset(entry.get("dtypes", ())),
        supports=frozenset(entry.get("supports", ())),
        call=getattr(implementation, operation, None),
        validation_arguments=entry.get("validation_arguments", {}),
        prior=tuple(
            Prior(row["platform"], frozenset(row["dtypes"]), row["relative_latency"], row.get("min_query_len", 0))
            for row in entry.get("prior", ())
        ),
    )
