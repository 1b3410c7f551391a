"""What recognisers yield where there is no match: a near miss with its reason, or the failure of reading one anchor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.passes.graph.view import where_of


class RefusedError(Exception):
    """Raised inside a recogniser where it gives up on an anchor; becomes a :class:`NearMiss`."""

    def __init__(self, code: str, message: str, edit: str) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)
        self.edit = edit


@dataclass(frozen=True)
class NearMiss:
    """A subgraph with the op's anchor that was refused, and the smallest edit that would make it match.

    ``pieces`` are all calls that it is made of, where those may turn out to be pieces of something else; they do not where it
    ``is_whole``: then whatever else is missed among them is a piece of this.
    """

    op: str
    node: fx.Node
    reason: Reason
    edit: str
    where: str
    pieces: frozenset[fx.Node] = frozenset()
    is_whole: bool = False

    @classmethod
    def of(cls, op: str, node: fx.Node, refusal: RefusedError, edit: str | None = None) -> NearMiss:
        """What was refused at ``node``; with an edit of one's own."""
        return cls(op, node, refusal.reason, refusal.edit if edit is None else edit, where_of(node))


@dataclass(frozen=True)
class Failure:
    """An anchor at which a recogniser raised, by a fault of ours; the others are read all the same."""

    op: str
    where: str
    error: Exception
