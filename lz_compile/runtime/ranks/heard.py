"""What a rank of a job knows of the others by now, and what is new."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from lz_compile.runtime.choose.agreed import Agreed
from lz_compile.runtime.ranks.cards import Card, Table


class News(Struct, frozen=True, kw_only=True):
    """Something that a rank said after it had joined: its card is another one, or the job moved on from a kernel."""

    rank: int
    key: str = ""
    kernel: str = ""
    why: str = ""


@dataclass
class Heard:
    """What is known of the others by now; ``seen`` counts the news that were read, ``settled`` are decisions by key.

    ``taken`` are the kernels that this rank has compiled, by key; ``is_told`` says that nobody came since it was told who
    differs.
    """

    cards: dict[int, Card] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    settled: dict[str, Agreed] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    seen: int = 0
    has_waited: bool = False
    taken: dict[str, set[str]] = field(default_factory=dict)
    is_told: bool = True
