"""What masks are found to mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.lowering.bands import Band, Reach
from lz_compile.passes.formula.axes import Axis, Dims, atoms


@dataclass(frozen=True)
class Axes:
    """The axes of scores, most significant first; each group may have none or several."""

    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    keys: tuple[Axis, ...]

    def resolved(self) -> Axes:
        """The same in atomic axes."""
        return Axes(*map(atoms, self.groups))

    @property
    def groups(self) -> tuple[tuple[Axis, ...], ...]:
        """Batch, heads, queries and keys."""
        return (self.batch, self.heads, self.queries, self.keys)


@dataclass(frozen=True)
class Flag:
    """A boolean tensor that keeps where it is ``keeps``. It does not depend on both queries and keys."""

    node: fx.Node
    dims: Dims
    keeps: bool


@dataclass(frozen=True)
class Documents:
    """Integers: a query sees the keys for which they are equal."""

    query: fx.Node
    query_dims: Dims
    key: fx.Node
    key_dims: Dims


@dataclass(frozen=True)
class Slopes:
    """``factor * tensor * (key position - query position)`` is added, up to what is the same for all keys of a query."""

    node: fx.Node
    dims: Dims
    factor: float


@dataclass(frozen=True)
class Meaning:
    """A mask tensor: it holds ``kept`` where a query sees a key, and ``dropped`` elsewhere (None: nothing is dropped).

    A boolean one holds 1.0 and 0.0, whichever of them True says. With ``is_exact``, ``band``, ``flags`` and ``documents``
    together say where it keeps, and ``slopes`` are added there. Otherwise these are conditions without which it drops, and
    what it holds elsewhere is not known. ``reach`` says no more than the rest, of what is of fixed size and no band.

    Every query sees a key under the band. ``buffers`` are placeholders on whose values this rests.
    """

    kept: float
    dropped: float | None
    band: Band | None = None
    flags: tuple[Flag, ...] = ()
    documents: Documents | None = None
    slopes: Slopes | None = None
    is_exact: bool = True
    reach: Reach | None = None
    buffers: tuple[fx.Node, ...] = ()
    label: str = ""


#: Tensors with their axes, times factors.
Terms: TypeAlias = "tuple[tuple[fx.Node, Dims, int], ...]"


@dataclass(frozen=True)
class Ends:
    """Before which key the last query sees keys: the sum of ``terms``, tensors with their axes times factors, and ``shift``.

    Without terms it sees all keys, or as many as the masks keep, where it ``is_counted``. Every query before it sees one key
    less at the end. With a ``window`` it sees that many keys at most, the newest ones, and none before any of ``firsts``,
    such sums. ``buffers`` are placeholders on whose values this rests.
    """

    terms: Terms = ()
    shift: int = 0
    window: int | None = None
    is_counted: bool = False
    buffers: tuple[fx.Node, ...] = ()
    firsts: tuple[tuple[Terms, int], ...] = ()


@dataclass(frozen=True)
class Window:
    """The element of ``node`` at ``query + key + start`` along one axis, and at the same index along all others.

    ``buffers`` are placeholders on whose values this rests.
    """

    node: fx.Node
    dims: Dims
    along: Axis
    start: int
    buffers: tuple[fx.Node, ...] = ()


class Meanings(Protocol):
    """What the masks of one graph mean; :mod:`masks.reading` reads it."""

    def read(self, node: fx.Node, dims: Dims, axes: Axes, *, keeps: bool = True) -> Meaning | Reason:
        """What a mask means.

        Args:
            node: a boolean mask, or a float one that is added to scores.
            dims: the axes of its dimensions.
            axes: those of the scores.
            keeps: whether True keeps, of a boolean mask.
        """

    def ends(self, masks: Sequence[tuple[fx.Node, Dims, bool]], axes: Axes) -> Ends | None:
        """Before which key every row of the batch sees keys, None where the masks mean anything else.

        Args:
            masks: boolean ones, their axes, and whether True keeps, or what is added, zero and minus infinity. Where there
                are none, one query sees all keys.
            axes: those of the scores.
        """

    def window(self, node: fx.Node, dims: Dims, query: Axis, key: Axis) -> Window | None:
        """The window that a tensor is along two of its axes, None where it is none.

        Args:
            node: keys or values that are gathered for each query.
            dims: the axes of its dimensions.
            query: the axis of queries.
            key: the axis of places in the window.
        """

    def seen(
        self, masks: Sequence[tuple[fx.Node, Dims, bool]], query: Axis, key: Axis, window: Window
    ) -> tuple[int, int] | None:
        """How many elements of what a window shows masks drop for all queries, the first and the last ones.

        None where they say more than that. Each mask is given with its axes, and whether True keeps.
        """

    def equal(self, nodes: Sequence[fx.Node], dims: Dims, axes: Axes) -> tuple[fx.Node, ...] | None:
        """On which buffers' values it rests that tensors of integers hold the same numbers, all with these axes.

        None where the way that they are computed does not tell.
        """

    def values(self, node: fx.Node) -> torch.Tensor | None:
        """What a mask holds where that depends on constants only."""

    def hold_the_same(self, buffer: fx.Node, other: fx.Node) -> bool:
        """Whether two buffers have equal values."""
