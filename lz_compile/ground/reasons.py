"""Reasons: why something was not done, as a code for machines and a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

from lz_compile.ground.records import Record


def first_line(error: BaseException | str) -> str:
    """What an error says, without the details that follow."""
    return str(error).strip().partition("\n")[0]


@dataclass(frozen=True)
class Reason(Record):
    """``code`` is stable and machine-readable, ``message`` names the values that led to it."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"
