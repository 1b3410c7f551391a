"""Records: what reports and reasons are as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lz_compile.ground.records import Reason, Record


@dataclass(frozen=True)
class Part(Record):
    size: int
    names: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "is_large": self.size > 2}


@dataclass
class Whole(Record):
    first: str = field(default="declared first, given by name", kw_only=True)
    parts: tuple[Part, ...]
    by_name: dict[str, list[Reason]]
    missing: Part | None = None


def test_a_record_tells_its_fields_in_their_order_and_what_they_hold() -> None:
    whole = Whole((Part(3, frozenset("cab")), Part(1)), {"why": [Reason("CODE", "a text")]})
    assert json.dumps(whole.to_dict()) == json.dumps(
        {
            "first": "declared first, given by name",
            "parts": [
                {"size": 3, "names": ["a", "b", "c"], "is_large": True},
                {"size": 1, "names": [], "is_large": False},
            ],
            "by_name": {"why": [{"code": "CODE", "message": "a text"}]},
            "missing": None,
        }
    )


def test_what_a_record_tells_shares_no_list_with_it() -> None:
    whole = Whole((), {"why": []})
    whole.to_dict()["by_name"]["why"].append("changed")
    assert whole.by_name == {"why": []}
