"""What was done to every compiled graph, and why: for people (rich) and for machines (stable JSON)."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lz_compile.ground import health
from lz_compile.ground.events import Event
from lz_compile.ground.records import Reason, Record, Shown, plain
from lz_compile.passes.graph.refusal import module_of, modules_of
from lz_compile.report.findings import LayersReport, LoopReport, MissReport, ModuleReport
from lz_compile.report.graph_text import statements
from lz_compile.report.mask_picture import picture
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem.decision_tree import told

if TYPE_CHECKING:
    from rich.console import Group
    from torch import fx

    from lz_compile.passes.rewriting.match import Match
    from lz_compile.runtime.choose.problem import Decision, Problem

SCHEMA_VERSION = "1.0"


@dataclass
class MatchReport(Record):
    """One recognised op: where it is, which kernel runs it and why, and how its rewrite was proven.

    ``graph`` is the path of the nested graph it was found in ("" for the outermost); ``context`` is what the kernel was
    chosen for, ``guards`` are the questions about symbolic sizes that the choice depends on. ``mask`` says what the masks
    mean ("causal and key padding"; "mask" and "bias" stand for what is a tensor like any other), ``mask_reasons`` why a
    mask is no more than that. ``validation`` is the last proof, with the kernel that ran in it.
    ``formula`` is what is computed, where the attributes alone would not say it.

    ``module`` is the path of the module that it is in. ``picture`` is what a mask keeps, in at most 32 rows of as many
    characters (see :func:`~lz_compile.report.mask_picture.picture`); ``buckets`` are the kernels by ranges of symbolic sizes.
    ``before`` and ``after`` are the calls that were recognised and those in their place, of the first of equal matches.
    """

    op: str
    kernel: str = field(default="inductor", kw_only=True)
    rewritten: bool = field(default=False, kw_only=True)
    where: str
    graph: str
    attributes: dict[str, Any]
    formula: str = ""
    mask: str = ""
    mask_reasons: list[Reason] = field(default_factory=list)
    why: str = ""
    reasons: list[Reason] = field(default_factory=list)
    context: dict[str, Any] | None = None
    guards: list[str] = field(default_factory=list)
    candidates: list[dict[str, Any]] = field(default_factory=list)
    validation: dict[str, Any] | None = None
    module: str = ""
    picture: list[str] = field(default_factory=list)
    buckets: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, match: Match, graph: str) -> MatchReport:
        """The report of a match, before anything is decided."""
        return cls(
            module=module_of(match.site.output),
            before=[] if match.prototype is not None else statements(match.core),
            op=match.op,
            where=match.site.where,
            graph=graph,
            attributes=match.found.attributes.to_dict(),
            mask=match.found.masks_mean,
            mask_reasons=list(match.found.notes),
            formula=match.found.formula,
        )

    def decide(self, decision: Decision, problem: Problem, attributes: Any = None) -> None:
        """Note a decision, what it was made for and every candidate's reasons."""
        self.kernel = decision.kernel.kernel_id
        self.picture = picture(attributes, problem.context.hints())
        self.buckets = [] if decision.tree is None else list(told(decision.tree))
        self.why = decision.why
        self.context = problem.to_dict()
        self.guards = list(decision.asked)
        self.candidates = [candidate.to_dict() for candidate in decision.candidates]

    @property
    def all_reasons(self) -> list[Reason]:
        """The reasons, and what happened to the kernel afterwards."""
        since = health.retired(self.kernel) if self.rewritten else None
        text = f"{self.kernel} failed after it had been put in; where it is one call, its fallback computes this"
        return self.reasons if since is None else [*self.reasons, Reason(since.code, f"{text}: {since.message}")]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {**super().to_dict(), "reasons": plain(self.all_reasons)}


@dataclass
class GraphReport(Record):
    """One compiled graph. ``seconds`` is the time by stage, ``compile`` being what Inductor took.

    ``loaded`` says that another process compiled it: a file of artifacts held it, and its report.

    ``unproven`` says why edits of the graph could not be run before and after, or were not tried. ``modules`` are those that
    its calls are in, as the graph came.
    """

    graph_id: int
    matches: list[MatchReport] = field(default_factory=list)
    loops: list[LoopReport] = field(default_factory=list, kw_only=True)
    layers: list[LayersReport] = field(default_factory=list, kw_only=True)
    near_misses: list[MissReport] = field(default_factory=list)
    unproven: list[Reason] = field(default_factory=list, kw_only=True)
    events: list[Event] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    modules: list[ModuleReport] = field(default_factory=list, kw_only=True)
    loaded: bool = field(default=False, kw_only=True)

    def note_modules(self, graph: fx.Graph) -> None:
        """Note the modules of a graph, or of one nested in it, before anything is changed."""
        known = {each.path: each for each in self.modules}
        for node in graph.nodes:
            around = modules_of(node) if node.op not in ("placeholder", "output") else []
            for path, kind in around:
                known.setdefault(path, ModuleReport(path, kind, 0))
            if around:
                known[around[-1][0]].calls += 1
        self.modules = list(known.values())

    def add(self, part: GraphReport) -> None:
        """What is told of a part of the graph belongs to it."""
        self.matches += part.matches
        self.near_misses += part.near_misses
        self.loops += part.loops
        self.layers += part.layers
        self.unproven += part.unproven
        for stage, seconds in part.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {**super().to_dict(), "seconds": {stage: round(seconds, 6) for stage, seconds in self.seconds.items()}}


@dataclass
class Report(Record, Shown):
    """The reports of several graphs; ``rich.print(report)`` prints a screen, ``rich.print(report.in_full())`` everything."""

    shown_by = "lz_compile.report.summary:summary"

    graphs: list[GraphReport]

    @property
    def matches(self) -> list[MatchReport]:
        """Every match of every graph."""
        return [match for graph in self.graphs for match in graph.matches]

    @property
    def loops(self) -> list[LoopReport]:
        """Every loop of every graph."""
        return [loop for graph in self.graphs for loop in graph.loops]

    @property
    def layers(self) -> list[LayersReport]:
        """Repeated layers of every graph."""
        return [layers for graph in self.graphs for layers in graph.layers]

    @property
    def near_misses(self) -> list[MissReport]:
        """Every near miss of every graph."""
        return [miss for graph in self.graphs for miss in graph.near_misses]

    @property
    def unproven(self) -> list[Reason]:
        """Every edit of every graph that could not be run before and after, and why."""
        return [reason for graph in self.graphs for reason in graph.unproven]

    @property
    def events(self) -> list[Event]:
        """Every event of every graph."""
        return [event for graph in self.graphs for event in graph.events]

    @property
    def seconds(self) -> dict[str, float]:
        """The time of every stage, over all graphs."""
        whole = GraphReport(graph_id=-1)
        for graph in self.graphs:
            whole.add(graph)
        return whole.seconds

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"schema_version": SCHEMA_VERSION, **super().to_dict()}

    def save(self, path: str | os.PathLike[str], since: str | os.PathLike[str] | None = None) -> None:
        """Write the report as a page (``report.html``: one file, no network) or as JSON (``report.json``).

        The page has the source around every place, as it is now on this machine.

        Args:
            path: its ending says which.
            since: the JSON of an earlier report; the page says first what changed.

        Raises:
            ArgumentError: the path ends in something else, or ``since`` is no report.
        """
        from lz_compile.report.files import save

        save(self.to_dict(), Path(path), None if since is None else Path(since))

    def in_full(self) -> Group:
        """Every kind of match with its candidates, and all else, to be printed with rich."""
        from rich.console import Group

        from lz_compile.report.render import tables

        return Group(*tables(self))


_reports: list[GraphReport] = []
_ids = itertools.count()
_lock = threading.Lock()


def new_report() -> GraphReport:
    """A report for the next graph, kept with the others."""
    most = policy.current().settings.max_reports
    with _lock:
        report = GraphReport(graph_id=next(_ids))
        _reports.append(report)
        del _reports[:-most]
    return report


def reports() -> list[GraphReport]:
    """The reports of what was compiled in this process since it began (or was cleared), in order.

    The last 1,000 are kept; ``lz.configure(max_reports=...)`` says otherwise.
    """
    with _lock:
        return list(_reports)


def clear_reports() -> None:
    """Forget all reports."""
    with _lock:
        _reports.clear()
