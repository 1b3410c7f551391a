"""What was found in a graph beside matches, each as a report tells it: near misses, loops, repeated layers, modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lz_compile.ground.records import Reason, Record
from lz_compile.passes.graph.refusal import module_of

if TYPE_CHECKING:
    from lz_compile.passes.graph.refusal import NearMiss
    from lz_compile.passes.layers.fold import Folded
    from lz_compile.passes.loops.roll.reroll import RolledLoop


@dataclass(frozen=True)
class MissReport(Record):
    """A subgraph that looks like an op and was refused; ``edit`` is the smallest change that would make it match."""

    op: str
    where: str
    reason: Reason
    edit: str
    module: str = ""

    @classmethod
    def of(cls, miss: NearMiss) -> MissReport:
        """The report of a near miss."""
        return cls(miss.op, miss.where, miss.reason, miss.edit, module_of(miss.node))


@dataclass
class LoopReport(Record):
    """A loop that Dynamo unrolled, or that came as a scan: ``steps`` of ``calls`` each, and whether it is one step again.

    ``steps`` is the name of a size where the loop came with one.

    ``carried`` are the tensors that a step hands on, ``streams`` says where what moves on comes from, ``around`` is how many
    tensors every step reads, ``outputs`` are the shapes of what each step gives besides.
    """

    where: str
    graph: str
    steps: int | str
    calls: int
    carried: tuple[str, ...]
    streams: tuple[str, ...]
    around: int
    outputs: tuple[str, ...]
    rolled: bool
    reason: Reason | None = None

    @classmethod
    def of(cls, loop: RolledLoop, graph: str) -> LoopReport:
        """The report of a loop that was found in the nested graph at a path."""
        names = ("where", "steps", "calls", "carried", "streams", "around", "outputs")
        same = {name: getattr(loop, name) for name in names}
        return cls(graph=graph, rolled=loop.scan is not None, reason=loop.kept, **same)


@dataclass
class LayersReport(Record):
    """``count`` layers of ``calls`` calls each that compute the same; folded into one region, or the reason why not."""

    where: str
    graph: str
    count: int
    calls: int
    folded: bool
    reason: Reason | None = None

    @classmethod
    def of(cls, found: Folded, graph: str) -> LayersReport:
        """The report of layers that were found in the nested graph at a path."""
        return cls(found.where, graph, found.count, found.calls, found.kept is None, found.kept)


@dataclass
class ModuleReport(Record):
    """A module of the model: its path, its class, and how many calls of the graph are directly in it."""

    path: str
    kind: str
    calls: int
