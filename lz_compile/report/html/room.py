"""How much of a report one page shows: all where there is room, as text or packed, else as much as fits, and it says so."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

#: Items of a page that nobody reads to the end; a browser takes seconds for more.
_MANY = 4_000
#: What is told of parts that are left out.
_PARTS = {
    "calls": "the calls before and after (`before` and `after` of each match)",
    "source": "the source around places",
    "candidates": "the kernels that were compared (`candidates` of each match)",
    "places": "all places after the first 8 of a kind (`where` and `module`)",
}


@dataclass(frozen=True)
class Room:
    """What a page shows.

    ``is_packed``: what is behind the header is compressed, and the page's script unpacks it. ``without`` are parts that are
    left out, ``longest`` letters of a text are shown, and ``most`` of each list.
    """

    is_packed: bool = False
    without: frozenset[str] = frozenset()
    longest: int | None = None
    most: int | None = None

    @property
    def left_out(self) -> list[str]:
        """What is told of it."""
        found = [text for name, text in _PARTS.items() if name in self.without]
        if self.longest is not None:
            found.append(f"what texts have after {self.longest:,} letters")
        if self.most is not None:
            found.append(f"everything after the first {self.most:,} of each list")
        return found

    def cut(self, text: str) -> str:
        """A text, as far as it is shown."""
        if self.longest is None or text is None or len(text) <= self.longest:
            return text
        return f"{text[: self.longest]} ... ({len(text) - self.longest:,} letters more in the JSON)"

    def fitting(self, found: Sequence[T], most: int | None = None) -> Sequence[T]:
        """Those of a list that are shown."""
        limits = [each for each in (most, self.most) if each is not None]
        return found[: min(limits)] if limits else found


def rooms(count: int) -> Iterator[Room]:
    """From the largest on, for so many items. Why something was refused, what helps, cost and masks are cut last."""
    room = Room(most=None if count <= _MANY else _MANY // 2)
    yield room
    room = replace(room, is_packed=True)
    yield room
    for longest, part in ((20_000, ""), (4_000, ""), (4_000, "calls"), (1_000, "source"), (500, "candidates")):
        room = replace(room, longest=longest, without=room.without | ({part} if part else set()))
        yield room
    room = replace(room, without=room.without | {"places"})
    for most in (1_000, 500, 250, 100, 30, 10):
        yield replace(room, most=most)


class Bodies:
    """What is shown once something is opened: at once a part of the page, or one of those that are packed."""

    def __init__(self, *, is_packed: bool) -> None:
        self._is_packed, self.texts = is_packed, list[str]()

    def keep(self, text: str) -> str:
        """What stands in its place; both are HTML."""
        from markupsafe import Markup

        if not self._is_packed:
            return Markup(text)
        self.texts.append(str(text))
        return Markup(f'<div class="later" data-body="{len(self.texts) - 1}"></div>')

    def packed(self, main: str) -> str:
        """The page behind its header, and the bodies, as the script unpacks them."""
        whole = json.dumps({"main": main, "bodies": self.texts})
        return base64.b64encode(zlib.compress(whole.encode(), 9)).decode()
