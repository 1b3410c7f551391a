"""Records: dataclasses that are told as stable JSON, all in the same way; and reasons, why something was not done."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Record:
    """A dataclass that is told as its fields, in the order in which they are declared."""

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(cast("Any", self))}


class Shown:
    """What rich prints by a function, ``module:name``, that is imported when it is printed."""

    shown_by: ClassVar[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What the function gives of it."""
        yield from pkgutil.resolve_name(self.shown_by)(self)


def plain(value: Any) -> Any:
    """A value as JSON: what tells itself as it does, sets in order."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def first_line(error: BaseException | str) -> str:
    """What an error says, without the details that follow."""
    return str(error).strip().partition("\n")[0]


@dataclass(frozen=True)
class Reason(Record):
    """Why something was not done, as a code for machines and a sentence for people.

    ``code`` is stable and machine-readable, ``message`` names the values that led to it.
    """

    code: str
    message: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"
