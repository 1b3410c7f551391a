"""One measurement of the performance database, and the canonical text of the workload that it was made on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lz_compile import __version__
from lz_compile.errors import MeasurementError
from lz_compile.ground.records import Record

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def canonical(entries: Mapping[str, Any]) -> str:
    """``entries`` as JSON that is equal text where they are equal: sorted keys, no spaces."""
    return _encode(entries)


def now() -> str:
    """The time, UTC in ISO 8601 with microseconds, so that text order is time order."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class PerfRecord(Record):
    """One kernel's measured latency. ``None`` stands for what an operation or a device does not have.

    ``workload`` is ``canonical`` JSON of the dims and features; ``surroundings`` a hash of the pointwise chain that was
    measured with the kernel, "" for the kernel alone; ``environment`` the hash that ``environment()`` gives.
    ``conditions`` is canonical JSON of what passes, such as temperature.

    Units: ``median_us``, ``p95_us`` in µs, ``variance_us`` in µs², ``warmup_ms`` in ms.
    """

    kernel_id: str
    operation: str
    device_id: str
    dtype: str
    environment: str
    workload: str
    median_us: float
    p95_us: float
    samples: int
    surroundings: str = ""
    sm_version: int | None = None
    head_dim: int | None = None
    seq_bucket: int | None = None
    batch_bucket: int | None = None
    variance_us: float | None = None
    warmup_ms: float | None = None
    kernel_version: str | None = None
    layerzero_version: str | None = __version__
    capabilities_hash: str | None = None
    power_state: str | None = None
    conditions: str | None = None
    measured_at: str = field(default_factory=now)
    valid: bool = True

    def entries(self) -> dict[str, Any]:
        """The workload's dims and features by name."""
        found: dict[str, Any] = json.loads(self.workload)
        return found


COLUMNS = tuple(f.name for f in dataclasses.fields(PerfRecord))


def checked_values(record: PerfRecord) -> tuple[Any, ...]:
    """The record's values in the order of ``COLUMNS``.

    Raises: MeasurementError for what cannot be stored, or could not be found or compared again.
    """
    for name in ("median_us", "p95_us"):
        latency = getattr(record, name)
        if not (math.isfinite(latency) and latency > 0):  # SQLite would take NaN for NULL
            raise MeasurementError(record.kernel_id, f"expected {name} above 0 and finite, found {latency}")
    if not _is_canonical(record.workload):
        raise MeasurementError(
            record.kernel_id, f"expected a workload as canonical() gives it, found {record.workload}"
        )
    if not _is_timestamp(record.measured_at):
        raise MeasurementError(record.kernel_id, f"expected measured_at as now() gives it, found {record.measured_at}")
    return tuple([getattr(record, name) for name in COLUMNS])


def _is_canonical(workload: str) -> bool:
    try:
        entries = json.loads(workload)
        return isinstance(entries, dict) and canonical(entries) == workload
    except ValueError:  # no JSON, or NaN in it
        return False


def _is_timestamp(text: str) -> bool:
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return False
    return parsed.tzinfo is not None and parsed.astimezone(timezone.utc).isoformat(timespec="microseconds") == text


def from_values(row: tuple[Any, ...]) -> PerfRecord:
    """The record of a row of ``COLUMNS``, made without the frozen constructor: a lookup makes thousands at once."""
    record = object.__new__(PerfRecord)
    named = dict(zip(COLUMNS, row, strict=True))
    named["valid"] = named["valid"] == 1
    object.__setattr__(record, "__dict__", named)
    return record


def fragments(match: Mapping[str, Any]) -> Iterator[str]:
    """What stands in the canonical text of every workload that has the entries of ``match`` (and of some others)."""
    for name, value in match.items():
        if isinstance(value, Mapping):
            yield f"{json.dumps(name)}:{{"
            yield from fragments(value)
        else:
            yield canonical({name: value})[1:-1]


def meets(entries: Any, match: Mapping[str, Any]) -> bool:
    """Whether ``entries`` has those of ``match``, both as JSON gives them; a mapping in it is met entry by entry too."""
    if not isinstance(entries, dict) or not match.keys() <= entries.keys():
        return False
    return all(_is_met(entries[name], value) for name, value in match.items())


def _is_met(found: Any, value: Any) -> bool:
    if isinstance(value, Mapping):
        return meets(found, value)
    if isinstance(value, list):
        return _encode(found) == _encode(value)
    return type(found) is type(value) and bool(found == value)  # 1 is neither true nor 1.0
