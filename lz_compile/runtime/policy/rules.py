"""Rules of a policy: under which conditions (architecture, operation, sizes) which kernels are wanted or not.

A condition on a number is ``64``, ``"==64"``, ``"!=64"``, ``">=90"``, ``">90"``, ``"<128"``, ``"<=128"`` or an inclusive
range ``"512..2048"``; one on a name is a name or a glob. A list holds where one of its entries does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lz_compile.errors import nearest, no_such
from lz_compile.ground.hardware import GENERATIONS
from lz_compile.lowering import ops
from lz_compile.runtime.policy import names
from lz_compile.runtime.policy.names import Invalid
from lz_compile.runtime.problem.context import SelectionContext, dim_names, hint, name_of

PLATFORMS = ("cpu", "cuda", "rocm", "xpu", "mps")
NAMED = ("operation", "dtype", "platform", "generation", "device_name")

_COMPARISON = re.compile(r"(>=|<=|==|!=|>|<)?\s*([0-9]+)")
_RANGE = re.compile(r"([0-9]+)\s*\.\.\s*([0-9]+)")

Kind = Literal["prefer", "avoid", "forbid"]
KINDS: Mapping[str, Kind] = {"prefer": "prefer", "avoid": "avoid", "forbid": "forbid"}

Interval = tuple[int, int | None]  # both ends inclusive; None has no end


@dataclass(frozen=True)
class Statement:
    """A wish about the kernels that a pattern names. ``forbid`` is final; the others order kernels that can run."""

    kind: Kind
    pattern: str
    origin: str


@dataclass(frozen=True)
class Lock:
    """The kernel of an operation (pattern); None: not locked, whatever a weaker layer says."""

    operation: str
    kernel_id: str | None
    origin: str


@dataclass(frozen=True)
class Numbers:
    """A condition on a number: it lies in one of the intervals. A symbolic size counts as its hint."""

    key: str
    intervals: tuple[Interval, ...]

    def holds(self, subject: SelectionContext) -> bool:
        """Whether the subject has this number and it fits."""
        value = _number(self.key, subject)
        return value is not None and any(
            low <= value and (high is None or value <= high) for low, high in self.intervals
        )

    def __str__(self) -> str:
        return ", ".join(_text(low, high) for low, high in self.intervals)


@dataclass(frozen=True)
class Names:
    """A condition on a name: one of the patterns names it."""

    key: str
    patterns: tuple[str, ...]

    def holds(self, subject: SelectionContext) -> bool:
        """Whether the subject has this name and it fits."""
        value = _name(self.key, subject)
        return value is not None and any(names.covers(pattern, value) for pattern in self.patterns)

    def __str__(self) -> str:
        return ", ".join(self.patterns)


@dataclass(frozen=True)
class Rule:
    """Statements, and perhaps a lock, where every condition holds."""

    origin: str
    conditions: tuple[Numbers | Names, ...]
    statements: tuple[Statement, ...] = ()
    lock: str | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        """The patterns of operations that the rule asks for; empty: it applies to any."""
        asked = [each for each in self.conditions if isinstance(each, Names) and each.key == "operation"]
        return tuple(pattern for each in asked for pattern in each.patterns)

    def holds(self, subject: SelectionContext) -> bool:
        """Whether the rule applies."""
        return all(condition.holds(subject) for condition in self.conditions)

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON, without its origin."""
        return {
            "match": {condition.key: str(condition) for condition in self.conditions},
            "lock": self.lock,
            "statements": [[statement.kind, statement.pattern] for statement in self.statements],
        }


def condition(key: str, wanted: Any) -> Numbers | Names:
    """One entry of a rule's ``match``.

    Raises:
        Invalid: an unknown key, or a condition that cannot be read or never holds.
    """
    valid = (*NAMED, *_numeric())
    if key not in valid:
        raise Invalid((), no_such("condition", key, valid))
    alternatives = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
    if not alternatives:
        raise Invalid((key,), "expected at least one alternative, received an empty list")
    if key not in NAMED:
        return Numbers(key, _merged([part for each in alternatives for part in _intervals(key, each)]))
    return Names(key, tuple(dict.fromkeys(_pattern(key, each) for each in alternatives)))


def _numeric() -> list[str]:
    """Architecture and the sizes of all ops; ``seq_len`` is the longer of ``seq_len_q`` and ``seq_len_k``."""
    return ["sm", "seq_len", *dict.fromkeys(name for op in ops.names() for name in dim_names(op))]


def _intervals(key: str, wanted: Any) -> list[Interval]:
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        return [(wanted, wanted)]
    if not isinstance(wanted, str):
        raise Invalid((key,), f"expected {_EXPECTED}, received {type(wanted).__name__} {wanted!r}")
    if between := _RANGE.fullmatch(wanted.strip()):
        return _possible(key, wanted, int(between[1]), int(between[2]))
    compared = _COMPARISON.fullmatch(wanted.strip())
    if compared is None:
        raise Invalid((key,), f"expected {_EXPECTED}, received '{wanted}'")
    sign, number = compared[1], int(compared[2])
    if sign == "!=":
        return [*([(0, number - 1)] if number else []), (number + 1, None)]
    low = {">=": number, ">": number + 1, "<": 0, "<=": 0}.get(sign, number)
    high = {">=": None, ">": None, "<": number - 1, "<=": number}.get(sign, number)
    return _possible(key, wanted, low, high)


_EXPECTED = "a number, a comparison such as '>=90' or '<128', or a range such as '512..2048'"


def _possible(key: str, wanted: str, low: int, high: int | None) -> list[Interval]:
    if high is not None and high < low:
        raise Invalid((key,), f"'{wanted}' never holds; the smaller end of a range comes first")
    return [(low, high)]


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    """The same set of numbers as few intervals in order: one spelling for equal conditions."""
    merged: list[Interval] = []
    for low, high in sorted(intervals, key=lambda each: each[0]):
        if merged and (merged[-1][1] is None or low <= merged[-1][1] + 1):
            last_low, last_high = merged[-1]
            merged[-1] = (last_low, None if last_high is None or high is None else max(last_high, high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _text(low: int, high: int | None) -> str:
    if high is None:
        return f">={low}"
    return str(low) if low == high else f"{low}..{high}"


def _pattern(key: str, wanted: Any) -> str:
    if not isinstance(wanted, str) or not wanted:
        raise Invalid((key,), f"expected a name or a glob, received {type(wanted).__name__} {wanted!r}")
    pattern = wanted.removeprefix("torch.") if key == "dtype" else wanted
    if key == "operation":
        with names.below(key):
            names.ops_covered(pattern)
    valid = _valid(key, pattern)
    if valid and not any(names.covers(pattern, name) for name in valid):
        raise Invalid((key,), f"no {key} '{wanted}'{nearest(pattern, valid)}; valid are {', '.join(valid)}")
    return pattern


def _valid(key: str, pattern: str) -> list[str]:
    """The names that there are; empty where that is not known (names of devices, architectures of ROCm)."""
    if key == "platform":
        return list(PLATFORMS)
    if key == "generation" and not pattern.startswith("gfx"):
        return [name for _, name, _ in GENERATIONS]
    return _dtypes() if key == "dtype" else []


def _dtypes() -> list[str]:
    found = {name_of(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(name for name in found if "float" in name)


def _number(key: str, subject: SelectionContext) -> int | None:
    if key == "sm":
        return subject.hardware.sm_version
    if key == "seq_len" and key not in subject.dims:
        lengths = [hint(subject.dims[name]) for name in ("seq_len_q", "seq_len_k") if name in subject.dims]
        return max(lengths, default=None)
    return hint(subject.dims[key]) if key in subject.dims else None


def _name(key: str, subject: SelectionContext) -> str | None:
    if key == "operation":
        return subject.operation
    if key == "dtype":
        return name_of(subject.dtype)
    name: str | None = getattr(subject.hardware, key)
    return name
