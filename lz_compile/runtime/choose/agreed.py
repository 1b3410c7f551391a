"""What the ranks of one job agreed on for a problem, as it is kept in the job's store, and how a decision tells it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from lz_compile.ground.records import Record
from lz_compile.runtime.problem import decision_tree
from lz_compile.runtime.problem.decision_tree import Leaf, Node, Split


class Agreed(Struct, frozen=True, kw_only=True):
    """The decision of the rank that came first, or of the one that had to move on from it.

    ``identity`` is what the kernel was on that rank. ``tree`` is the decision over symbolic sizes, whose names are those of
    ``symbols``. ``passed_over`` are kernels that some rank could not run: which rank, and why.
    """

    kernel: str
    identity: str
    why: str
    rank: int
    tree: dict[str, Any] | None = None
    symbols: tuple[str, ...] = ()
    passed_over: dict[str, tuple[int, str]] = {}

    def encoded(self) -> bytes:
        """As it is kept."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> Agreed:
        """From what is kept.

        Raises:
            ValueError: it is something else.
        """
        found = msgspec.json.decode(data, type=cls)
        if found.tree is not None:
            decision_tree.from_dict(found.tree)
        return found

    def node(self, known: Collection[str]) -> Node | None:
        """The tree over symbolic sizes; None where there is none, or where it is about other symbols than ``known``."""
        node = None if self.tree is None else decision_tree.from_dict(self.tree)
        return node if node is not None and {*decision_tree.edges(node)} <= {*known} else None

    def named(self, names: Mapping[str, str]) -> Agreed:
        """The same with other names for the symbols of its tree."""
        if self.tree is None:
            return self
        tree = decision_tree.to_dict(_named(decision_tree.from_dict(self.tree), names))
        return msgspec.structs.replace(self, tree=tree)


def _named(node: Node, names: Mapping[str, str]) -> Node:
    if isinstance(node, Leaf):
        return node
    return Split(names.get(node.dim, node.dim), node.at, _named(node.below, names), _named(node.above, names))


@dataclass(frozen=True)
class Agreement(Record):
    """With whom a decision is shared: how many other ranks of this kind of device were heard, and which rank decided.

    ``key`` is that of the problem in the job's store; ``passed_over`` are kernels that some rank cannot run, with its reason.
    """

    key: str
    others: int
    rank: int
    passed_over: Mapping[str, str]

    def __str__(self) -> str:
        ranks = "1 rank" if self.others == 1 else f"{self.others} ranks"
        moved = "".join(f"; {why}" for why in self.passed_over.values())
        return f"agreed with {ranks}, decided by rank {self.rank}{moved}"
