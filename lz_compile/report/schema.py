"""What pages and comparisons ask of a report that came as JSON: somebody may have edited it, or made it of something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from lz_compile.errors import ArgumentError
from lz_compile.ground.records import Reason
from lz_compile.report.findings import LayersReport, LoopReport, MissReport, ModuleReport

#: Levels of lists and objects in a report at most; one of ours has ten.
_DEEPEST = 40
#: Beyond it a number cannot be printed by Python at once.
_MOST_BITS = 4_096
_ADVICE = "Write one by report.save('report.json') or 'python -m lz_compile explain ... --json'."


class _Told(msgspec.Struct):
    """Something of a report; fields that are not asked for may be there, too."""


class _Size(_Told):
    hint: int
    name: str


class _Hardware(_Told):
    platform: str
    device_name: str
    signature: str


class _Context(_Told):
    operation: str
    dtype: str
    hardware: _Hardware
    dims: dict[str, int | _Size]
    features: dict[str, str]


class _Candidate(_Told):
    kernel: str
    score: float
    relative_latency: float
    origin: str
    against: list[Reason]
    notes: list[Reason] = []
    median_us: float | None = None
    noise: float | None = None
    measured_at: dict[str, int] | None = None
    parts_us: dict[str, float] | None = None

    def __post_init__(self) -> None:
        needed = {"measured": ("median_us", "noise", "measured_at"), "estimated": ("parts_us",)}.get(self.origin, ())
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a candidate whose origin is {self.origin} lacks {', '.join(missing)}")


class _Validation(_Told):
    ok: bool
    error: float
    source_error: float
    kernel: str = ""
    reason: str = ""


class _Match(_Told):
    op: str
    kernel: str
    rewritten: bool
    where: str
    graph: str
    attributes: dict[str, Any]
    context: _Context | None
    candidates: list[_Candidate]
    reasons: list[Reason]
    guards: list[str]
    why: str
    formula: str
    mask: str | None
    mask_reasons: list[Reason]
    validation: _Validation | None
    module: str = ""
    picture: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=256)] = []
    buckets: list[str] = []
    before: list[str] = []
    after: list[str] = []


class _Graph(_Told):
    matches: list[_Match]
    near_misses: list[MissReport]
    loops: list[LoopReport]
    layers: list[LayersReport]
    events: list[Reason]
    seconds: dict[str, float]
    unproven: list[Reason] = []
    modules: list[ModuleReport] = []


class _Report(_Told):
    graphs: list[_Graph]
    environment: dict[str, str] = {}


def checked(told: Any, function: str, source: str = "") -> Mapping[str, Any]:
    """The same report, if it is one.

    Args:
        told: as :meth:`~lz_compile.report.report.Report.to_dict` gives it, or JSON that was read.
        function: that was called with it.
        source: where it is from.

    Raises:
        ArgumentError: it is none; the text names the first field that is wrong.
    """
    wrong = next(_unprintable(told), None)
    if wrong is None:
        try:
            msgspec.convert(told, _Report)
        except (msgspec.ValidationError, OverflowError) as error:
            wrong = str(error)
        else:
            found: Mapping[str, Any] = told
            return found
    place = f"{source}: " if source else ""
    expected = "with graphs that have matches, near_misses, loops, layers, events and seconds"
    raise ArgumentError(function, "a report", expected, f"{place}{wrong}", _ADVICE)


def _unprintable(told: Any) -> Iterator[str]:
    """What no page can show: what is nested too deeply, half characters, numbers without end."""
    waiting: list[tuple[Any, tuple[str, ...]]] = [(told, ("$",))]
    while waiting:
        value, path = waiting.pop()
        if len(path) > _DEEPEST:
            yield f"a value below {_DEEPEST} others - at `{''.join(path)[:200]}`"
        elif isinstance(value, Mapping):
            waiting += [(each, (*path, f".{name}")) for name, each in value.items()]
            waiting += [(name, path) for name in value]
        elif isinstance(value, (list, tuple)):
            waiting += [(each, (*path, f"[{n}]")) for n, each in enumerate(value)]
        elif isinstance(value, str) and not _is_text(value):
            yield f"a text that is no Unicode - at `{ascii(''.join(path))[1:-1]}`"
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            yield f"a number of {value.bit_length()} bits - at `{''.join(path)}`"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
