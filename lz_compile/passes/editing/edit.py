"""The one door for changes of a graph: a change is made and proven, or not made at all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.passes.editing.edit_proof import difference
from lz_compile.passes.graph.snapshot import Snapshot

#: Changes that were made and could not be proven, with the reason.
Unproven: TypeAlias = list[Reason]

#: Asked by an edit with the node where it is about to change a graph.
MayEdit: TypeAlias = Callable[[fx.Node], bool]
#: Changes all places of a graph where it may; how many it did.
Edit: TypeAlias = Callable[[fx.Graph, MayEdit], int]
#: Trials of one edit from which on places are not told apart any more.
_MOST_TRIALS = 24

Made = TypeVar("Made")


def anywhere(_place: fx.Node) -> bool:
    """All places."""
    return True


class RefutedError(Exception):
    """A graph computes something else after a change, or its gradients are others."""


@dataclass(frozen=True)
class Rewrite(Generic[Made]):
    """A change of a graph that is wanted.

    Args:
        what: it is, in an error.
        make: makes it, and gives what the caller wants to know.
        shown: why it needs no run before and after: it was proven by itself, or changes no value that anybody reads.
        undoes_itself: whether ``make`` leaves the graph as it was when it raises; spares a snapshot, and needs ``shown``.
    """

    what: str
    make: Callable[[], Made]
    shown: str = ""
    undoes_itself: bool = False


def apply(
    module: fx.GraphModule, rewrite: Rewrite[Made], unproven: Unproven | None = None, before: Snapshot | None = None
) -> Made:
    """Make a change and prove it: what it concerns is run before and after. The only way to change a graph.

    Whatever raises leaves the graph (and those in it) with equal nodes, metadata and submodules as before. The nodes are
    new ones then: whoever keeps some has to look again.

    Args:
        module: whose graph is changed.
        rewrite: the change.
        unproven: gets the reason why it could not be run; the change stays.
        before: the graph as it is, where that is known already.

    Returns:
        what ``rewrite.make`` gave.

    Raises:
        RefutedError: the graph would compute something else.
    """
    if rewrite.undoes_itself:
        assert rewrite.shown, "what is to be run before and after is kept as it was"
        return rewrite.make()
    kept = Snapshot(module) if before is None else before
    try:
        made = rewrite.make()
        if not rewrite.shown:
            _prove(kept, module, rewrite.what, unproven)
    except BaseException:
        kept.restore()
        raise
    return made


def _prove(before: Snapshot, module: fx.GraphModule, what: str, unproven: Unproven | None) -> None:
    verdict = difference(before, module)
    if verdict.differs:
        raise RefutedError(f"{what} is not made: {verdict.differs}")
    if verdict.unproven and unproven is not None:
        unproven.append(Reason("EDIT_UNPROVEN", f"{what}: {verdict.unproven}"))


class _Places:
    """Where an edit may change a graph (None: all over), and where it did; by name, for nodes that are put back are new."""

    def __init__(self, allowed: Collection[str] | None) -> None:
        self._allowed = allowed
        self.taken: dict[str, None] = {}

    def __call__(self, place: fx.Node) -> bool:
        is_allowed = self._allowed is None or place.name in self._allowed
        if is_allowed:
            self.taken[place.name] = None
        return is_allowed


def apply_places(
    module: fx.GraphModule, what: str, edit: Edit, unproven: Unproven, before: Snapshot
) -> tuple[int, list[tuple[str, Exception]]]:
    """Make an edit wherever it can be proven: what fails is made again in halves, so that a bad place costs no other.

    Those that are right are proven together: what each of them leaves to be read, nobody may read after all.

    Args:
        module: whose graph is changed.
        what: the edit, in an error.
        edit: makes it.
        unproven: gets the reasons why changes could not be run; those stay.
        before: the graph as it is.

    Returns:
        how many changes were made, and for places where none is what failed there.
    """
    count, faults = 0, list[tuple[str, Exception]]()
    pending: list[list[str] | None] = [None]
    good: list[str] = []
    trials, is_made = 0, True

    def edited(places: _Places, start: Snapshot | None) -> int:
        return apply(module, Rewrite(what, partial(edit, module.graph, places)), unproven, start)

    while pending:
        part = pending.pop()
        places = _Places(part if part is None else [*good, *part])
        trials += 1
        try:
            count = edited(places, before if trials == 1 else None)
            good, is_made = list(places.taken), True
        except Exception as error:  # noqa: BLE001 one place must not cost the others; the caller makes an event of it
            taken, is_made = [name for name in places.taken if name not in good], False
            middle = len(taken) // 2
            if middle and trials < _MOST_TRIALS:
                pending += [taken[middle:], taken[:middle]]
            else:
                faults.append((", ".join(taken), error))
        if pending or not is_made:
            before.restore()
    if good and not is_made:
        edited(_Places(good), None)
    return count, faults
