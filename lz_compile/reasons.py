"""Reasons: why something was not done, as a code for machines and a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """``code`` is stable and machine-readable, ``message`` names the values that led to it."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def to_dict(self) -> dict[str, str]:
        """As stable JSON."""
        return {"code": self.code, "message": self.message}
