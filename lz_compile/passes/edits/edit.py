"""One edit of a graph: made and proven, or not made at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import fx

from lz_compile.passes.edits.proof import Verdict, difference
from lz_compile.passes.edits.snapshot import Snapshot
from lz_compile.reasons import Reason

#: Edits that were made and could not be proven, with the reason.
Unproven: TypeAlias = list[Reason]


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
