"""What a stage of a compile is, what it works on, and the one guard around all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from torch import fx

from lz_compile.compile.choices import Choices
from lz_compile.compile.options import Options
from lz_compile.errors import USER_ERRORS, RewriteFailedError
from lz_compile.ground import events, telemetry
from lz_compile.ground.records import Reason
from lz_compile.passes.editing.edit import Rewrite, apply
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss
from lz_compile.passes.graph.snapshot import Snapshot
from lz_compile.passes.rewriting.match import Match
from lz_compile.report.report import GraphReport, MatchReport
from lz_compile.runtime.tables.loaded import Loaded

#: Which loops of a graph may become scans: as the policy says, those for kernels that take the place of the scan, none.
Scans: TypeAlias = Literal["any", "replaced", "none"]

Made = TypeVar("Made")
#: Stages that are spans, by their names for operators. What is measured is one in ``measuring.py``.
_SPANS = {"recognise": "recognise", "validate": "prove"}


@dataclass
class State:
    """One graph on its way through the stages, and what is known of it by then.

    ``effects`` is None where it could not be read; ``entries`` is what is told of each of ``matches``, ``spliced`` what
    computes those that were replaced, ``before`` the graph as it is, where that is known. ``kept`` is why not every loop may
    become a scan that stays, ``misfit`` why one must not.
    """

    module: fx.GraphModule
    path: str
    options: Options
    report: GraphReport
    tables: Sequence[Loaded]
    scans: Scans = "any"
    kept: Reason | None = None
    misfit: str = ""
    is_changed: bool = False
    before: Snapshot | None = None
    effects: Effects | None = None
    misses: list[NearMiss] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    entries: list[MatchReport] = field(default_factory=list)
    choices: Choices = field(default_factory=Choices)
    spliced: list[tuple[Match, MatchReport, tuple[fx.Node, ...]]] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        """The graph as it is."""
        self.before = Snapshot(self.module) if self.before is None else self.before
        return self.before

    def change(self, rewrite: Rewrite[Made], is_made: Callable[[Made], bool] = bool) -> Made:
        """Change the graph as a whole; ``is_made`` says by what was made whether anything is another one now."""
        before, self.before = self.snapshot(), None
        made = apply(self.module, rewrite, self.report.unproven, before)
        if is_made(made):
            self.is_changed = True
        else:
            self.before = before
        return made

    def fail(self, code: str, text: str, error: Exception) -> None:
        """Make an event of a fault; errors of the user's own pass, and under ``options.strict`` all do.

        Raises:
            RewriteFailedError: ``options.strict`` is set.
        """
        if isinstance(error, USER_ERRORS):
            raise error
        events.record(code, text, error)
        if self.options.strict:
            raise RewriteFailedError(f"{text}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Stage:
    """A step of a compile.

    Args:
        does: what it is about, in an event.
        code: of the event if it fails; what it leaves then is for the next stage to go on with.
        run: works on the state.
        timed: under which name a report counts its seconds; None where it counts its own.
    """

    does: str
    code: str
    run: Callable[[State], None]
    timed: str | None = None


def run(stages: Iterable[Stage], state: State) -> None:
    """Take a graph through stages: a fault of one is an event, and costs what that one would have done.

    Raises:
        RewriteFailedError: a stage failed and ``options.strict`` is set.
    """
    for stage in stages:
        with nullcontext() if stage.timed is None else timed(state.report, stage.timed, does=stage.does):
            try:
                stage.run(state)
            except Exception as error:  # noqa: BLE001 a fault of ours must not break a model; it is an event
                state.fail(stage.code, stage.does, error)


@contextmanager
def timed(report: GraphReport, stage: str, **attributes: Any) -> Iterator[telemetry.Span]:
    """Add the seconds that pass inside to those of a stage; those that operators ask for are spans, with attributes."""
    name = _SPANS.get(stage)
    start = time.perf_counter()
    try:
        with nullcontext(telemetry.Span()) if name is None else telemetry.span(name, **attributes) as span:
            yield span
    finally:
        report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
