"""What is known of a loop: its names, what its steps read and hand out, what it carries."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from lz_compile.api.rolling.places import Counter, Read
from lz_compile.api.rolling.slots import Slot


@dataclass(frozen=True)
class Written:
    """What each step appends to a list, writes to a place of a tensor, or joins to one: the name, where, and under what.

    ``in_front`` it is inserted at the beginning of a list.
    """

    name: str
    read: Read | None = None
    joined: ast.expr | None = None
    under: ast.expr | None = None
    in_front: bool = False


@dataclass(frozen=True)
class Condition:
    """A comparison of what a counter gives with zero, on which a branch of a step depends."""

    counter: Counter
    difference: ast.expr
    order: str


@dataclass
class Scope:
    """Names in front of a statement, and behind it.

    ``before`` may have a value, ``sure`` do; ``own`` hold what the function has made, so that nobody else sees it change,
    ``tensors`` those that one call has made;
    ``lists`` are empty lists, ``started`` others, of which ``repeated`` are ``[first] * steps``; ``after`` are read behind
    it, or by the next turn of a loop around it, ``around`` behind its block.
    """

    before: set[str] = field(default_factory=set)
    sure: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    repeated: dict[str, tuple[ast.stmt, ast.BinOp]] = field(default_factory=dict)
    after: set[str] = field(default_factory=set)
    around: set[str] = field(default_factory=set)

    def inside(self, after: set[str], made: set[str] = frozenset()) -> Scope:  # type: ignore[assignment]
        """The same in front of a block, behind which ``after`` are read."""
        return Scope({*self.before, *made}, {*self.sure, *made}, {*self.own}, {*self.tensors}, after=after)


@dataclass
class Loop:
    """A loop that can be a scan. ``body`` is new: what is read are names, and what is handed out.

    ``free`` are names in front of the loop that steps read and do not change.

    ``late`` are names without a value that counts in front of the loop, ``behind`` counters that are read behind it.
    """

    node: ast.For
    ranges: list[ast.expr] = field(default_factory=list)
    streams: list[tuple[ast.expr, Read]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    tests: list[Condition] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    behind: list[Counter] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)
