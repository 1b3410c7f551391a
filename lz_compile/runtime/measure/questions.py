"""What decisions ask of measurements, noted: the same answers in another process are the same decisions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.perf_record import PerfRecord


@dataclass(frozen=True)
class Question:
    """What a decision asked of the measurements at ``path``: those whose workload has the entries of ``match`` (JSON)."""

    path: str | None
    operation: str
    dtype: str
    environment: str
    match: str

    def answers(self) -> list[PerfRecord]:
        """The measurements."""
        there = perfdb.database(self.path)
        if not there.exists:  # nothing was ever measured
            return []
        return there.curve(self.operation, self.dtype, self.environment, json.loads(self.match))

    def digest(self) -> str:
        """A hash of what is answered now."""
        told = [dataclasses.astuple(replace(each, measured_at="", conditions=None)) for each in self.answers()]
        return hashlib.sha256(repr(told).encode()).hexdigest()


_asked: ContextVar[set[Question] | None] = ContextVar("lz_compile_measurements_asked", default=None)


@contextmanager
def noting() -> Iterator[set[Question]]:
    """What is asked inside."""
    found: set[Question] = set()
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def ask(question: Question) -> list[PerfRecord]:
    """The answers, and a note that they were asked for."""
    noted = _asked.get()
    if noted is not None:
        noted.add(question)
    return question.answers()
