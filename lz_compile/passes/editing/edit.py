"""One edit of a graph: made and proven, or not made at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.passes.editing.edit_proof import Verdict, difference
from lz_compile.passes.graph.snapshot import Snapshot

#: Edits that were made and could not be proven, with the reason.
Unproven: TypeAlias = list[Reason]

#: Asked by a stage with the node where it is about to edit a graph.
MayEdit: TypeAlias = Callable[[fx.Node], bool]
#: Edits all places of a graph where it may; how many it did.
Stage: TypeAlias = Callable[[fx.Graph, MayEdit], int]
#: Trials of one stage from which on places are not told apart any more.
_MOST_TRIALS = 24


def anywhere(_place: fx.Node) -> bool:
    """All places."""
    return True


class RefutedError(Exception):
    """A graph computes something else after an edit, or its gradients are others."""


@contextmanager
def all_or_nothing(module: fx.GraphModule, before: Snapshot | None = None) -> Iterator[Snapshot]:
    """Whatever raises inside leaves the graph (and those in it) with equal nodes, metadata and submodules as before.

    The nodes are new ones then: whoever keeps some has to look again. For edits that need no proof: what changes is
    nothing but names, or was proven by itself. ``before`` is the graph as it is, where that is known already.
    """
    before = Snapshot(module) if before is None else before
    try:
        yield before
    except BaseException:
        before.restore()
        raise


@contextmanager
def proven(
    module: fx.GraphModule, what: str, unproven: Unproven | None = None, before: Snapshot | None = None
) -> Iterator[Snapshot]:
    """The same, and what was edited inside is run before and after, and put back where that is not the same.

    Args:
        module: whose graph is edited.
        what: the edit, in an error.
        unproven: gets the reason why it could not be run; the edit stays.
        before: the graph as it is, where that is known already.

    Raises:
        RefutedError: the graph is as it was.
    """
    with all_or_nothing(module, before) as kept:
        yield kept
        verdict: Verdict = difference(kept, module)
        if verdict.differs:
            raise RefutedError(f"{what} is not made: {verdict.differs}")
        if verdict.unproven and unproven is not None:
            unproven.append(Reason("EDIT_UNPROVEN", f"{what}: {verdict.unproven}"))


class _Places:
    """Where a stage may edit a graph (None: all over), and where it did; by name, for nodes that are put back are new."""

    def __init__(self, allowed: Collection[str] | None) -> None:
        self._allowed = allowed
        self.taken: dict[str, None] = {}

    def __call__(self, place: fx.Node) -> bool:
        is_allowed = self._allowed is None or place.name in self._allowed
        if is_allowed:
            self.taken[place.name] = None
        return is_allowed


def edit_places(
    module: fx.GraphModule, what: str, stage: Stage, unproven: Unproven, before: Snapshot
) -> tuple[int, list[tuple[str, Exception]]]:
    """Make all edits of a stage that can be proven: what fails is made again in halves, so that a bad place costs no other.

    Args:
        module: whose graph is edited.
        what: the edit, in an error.
        stage: makes the edits.
        unproven: gets the reasons why edits could not be run; those stay.
        before: the graph as it is.

    Returns:
        how many edits were made, and for places where none is what failed there.
    """
    count, faults = 0, list[tuple[str, Exception]]()
    pending: list[list[str] | None] = [None]
    start: Snapshot | None = before
    trials = 0
    while pending:
        places = _Places(pending.pop())
        trials += 1
        try:
            with proven(module, what, unproven, start):
                made = stage(module.graph, places)
            count += made
        except Exception as error:  # noqa: BLE001 one place must not cost the others; the caller makes an event of it
            taken = list(places.taken)
            middle = len(taken) // 2
            if middle and trials < _MOST_TRIALS:
                pending += [taken[middle:], taken[:middle]]
            else:
                faults.append((", ".join(taken), error))
        start = None
    return count, faults
