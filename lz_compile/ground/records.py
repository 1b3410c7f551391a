"""Records: dataclasses that are told as stable JSON, all in the same way."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import fields
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
