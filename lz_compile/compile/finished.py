"""Compiled graphs as a whole, from one process to another: by what a graph follows from, its code and its report.

Where a file of artifacts holds one, nothing is read, proven, chosen or traced again, and Inductor is not imported. Graphs on
CPUs with sizes that are numbers and without a backward pass are kept; others are compiled as ever, and so is one whose
measurements would be answered otherwise by now. The code itself is in ``lowering/finished_code.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from lz_compile.compile import telling
from lz_compile.compile.finished_key import CompiledAnewError, key_of
from lz_compile.compile.options import split
from lz_compile.ground import events, telemetry
from lz_compile.lowering import dynamo, finished_code, value_guards
from lz_compile.lowering.finished_code import Code, NotKeepableError
from lz_compile.report.report import GraphReport, new_report
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.perfdb import Question
from lz_compile.runtime.policy import policy


@dataclass(frozen=True)
class Asked:
    """A question to the measurements, and a hash of the answers."""

    question: Question
    answers: str


@dataclass(frozen=True)
class Finished:
    """A compiled graph: its code, what was decided and why, and what those decisions asked of the measurements.

    ``pickled`` is PyTorch's part of the code, as PyTorch's caches hold it; ``values`` a hash of those inputs that were
    looked at, by their places.
    """

    code: Code
    report: GraphReport
    asked: tuple[Asked, ...]
    values: Mapping[int, str]
    pickled: bytes


@dataclass(frozen=True)
class _Made:
    """A graph that was compiled in this process: what AOTAutograd keeps of it."""

    entry: Any
    report: GraphReport
    asked: tuple[Asked, ...]
    values: Mapping[int, str]


#: Events that say nothing of the code: rates that could not be measured are the usual ones.
_PASSING = frozenset({"MACHINE_BUSY"})
#: By key: what was compiled here, and what a file held, as that is written.
_made: dict[str, _Made] = {}
_told: dict[str, bytes] = {}
#: Those of a file that were taken up here: they are written again.
_taken: set[str] = set()


@dataclass
class Attempt:
    """A graph on its way through the backend: looked for by its key, compiled where there is none, and kept for others.

    ``key`` is None where a graph is compiled in every process; ``why`` says why.
    """

    module: fx.GraphModule
    inputs: Sequence[Any]
    mode: str | None
    options: Mapping[str, Any] | None
    key: str | None = None
    why: str = ""
    asked: set[Question] = field(default_factory=set)
    looked_at: Sequence[torch.Tensor] = ()
    guards: tuple[int, int] = (0, 0)

    @classmethod
    def at(
        cls, module: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any] | None
    ) -> Attempt:
        """The attempt for a graph as Dynamo hands it over.

        Raises:
            OptionError: an option of ours is unknown or has a wrong value.
        """
        made, (ours, rest) = cls(module, inputs, mode, options), split(options, mode)
        dynamo.drop_fixed_guards()
        try:
            made.key = key_of(module, inputs, mode, ours, rest, policy.current())
        except CompiledAnewError as reason:
            made.why = str(reason)
        except Exception as error:  # noqa: BLE001 a key that cannot be made must not break a model
            made.why = "what it follows from cannot be told"
            events.record("FINISHED_NOT_TOLD", "a graph is compiled in every process", error, level=logging.INFO)
        return made

    def compiled(self) -> Callable[..., Any]:
        """The compiled graph.

        Raises:
            RewriteFailedError: something of ours failed and ``layerzero.strict`` is set.
        """
        taken = self._taken_up()
        if taken is not None:
            return taken
        from lz_compile.compile.compiler import compile_with_inductor

        self.guards = dynamo.guards()
        with perfdb.noting() as self.asked, value_guards.noting() as self.looked_at:
            return compile_with_inductor(self.module, self.inputs, self.mode, self.options, self._keep)

    def _taken_up(self) -> Callable[..., Any] | None:
        """What a file holds of this graph; None where it holds nothing, or what is no use here any more."""
        if self.key is None or self.key not in _told:
            return None
        start = time.perf_counter()
        try:
            found = msgspec.msgpack.decode(_told[self.key], type=Finished)
            if any(each.question.digest() != each.answers for each in found.asked):
                events.logger.info("a finished graph is compiled anew: its measurements are others by now")
                return None
            if any(_values(self.inputs[place]) != told for place, told in found.values.items()):
                events.logger.info("a finished graph is compiled anew: a buffer that was read has other values")
                return None
            _define(found)
            compiled = finished_code.loaded(found.code, found.pickled, [*self.inputs])
        except Exception as error:  # noqa: BLE001 whatever is wrong with it, the graph can be compiled
            events.record("FINISHED_NOT_LOADED", "a graph of a file of artifacts is compiled anew", error)
            return None
        _taken.add(self.key)
        report = _retold(found.report)
        report.seconds["load"] = time.perf_counter() - start
        with telemetry.span("compile", graph_id=report.graph_id, is_recompile=dynamo.is_recompile()) as span:
            telling.tell(span, report)
        telling.count(report)
        return compiled

    def _keep(self, compiled: Callable[..., Any], report: GraphReport) -> None:
        """Note what was compiled, for :func:`made_here`."""
        self.why = self.why or self._why_not(compiled, report)
        if self.key is None or self.why:
            events.logger.log(logging.DEBUG, "a graph is compiled in every process: %s", self.why)
            return
        asked = tuple(Asked(each, each.digest()) for each in sorted(self.asked, key=repr))
        places = {id(each): place for place, each in enumerate(self.inputs)}
        values = {places[id(each)]: _values(each) for each in self.looked_at}
        _made[self.key] = _Made(finished_code.entry_of(compiled), report, asked, values)

    def _why_not(self, compiled: Callable[..., Any], report: GraphReport) -> str:
        faults = [event.code for event in report.events if event.code not in _PASSING]
        if faults:
            return f"{faults[0]} happened"
        if dynamo.guards() != self.guards:
            return "it holds for some values only"
        if {id(each) for each in self.looked_at} - {id(each) for each in self.inputs}:
            return "values were read that are none of its inputs"
        try:
            finished_code.entry_of(compiled)
        except NotKeepableError as reason:
            return str(reason)
        return ""


def _values(tensor: torch.Tensor) -> str:
    return value_guards.digest(tensor).hex()


def _define(found: Finished) -> None:
    """Have the operators that code calls defined, by what defines them.

    Raises:
        LookupError: nothing defines one any more.
    """
    missing = _missing(found.code)
    for match in found.report.matches if missing else ():
        spec = kernels(match.op).get(match.kernel) if match.rewritten else None
        if spec is not None:
            _ = spec.call
    if _missing(found.code):
        from lz_compile.compile import compiler as _compiler  # noqa: F401 with it, all that is no kernel's

    missing = _missing(found.code)
    if missing:
        raise LookupError(f"layerzero::{missing[0]} is not defined")


def _missing(code: Code) -> list[str]:
    return [name for name in code.operators if not hasattr(torch.ops.layerzero, name)]


def _retold(told: GraphReport) -> GraphReport:
    """The report of a graph that is taken up, as one of this process."""
    report = new_report()
    for name, value in vars(told).items():
        if name not in ("graph_id", "seconds"):
            setattr(report, name, value)
    report.loaded = True
    return report


# ---- files -----------------------------------------------------------------------------------------------------------


def made_here() -> Iterator[tuple[str, bytes]]:
    """The key and all else of each graph that this process has compiled, or taken up."""
    for key in sorted(_taken):
        yield key, _told[key]
    for key, made in list(_made.items()):
        if key in _taken:
            continue
        try:
            code, pickled = finished_code.written(made.entry)
            yield key, msgspec.msgpack.encode(Finished(code, made.report, made.asked, made.values, pickled))
        except (NotKeepableError, TypeError) as reason:  # TypeError: of what a report tells by objects
            events.record("FINISHED_NOT_SAVED", "a compiled graph is left out", reason, level=logging.INFO)


def libraries() -> Iterator[Path]:
    """The libraries of graphs that were taken up here."""
    for key in sorted(_taken):
        code = msgspec.msgpack.decode(_told[key], type=Finished).code
        yield from {dynamo.cache_root() / each.library for each in code.kernels.values()}


def offer(key: str, data: bytes) -> None:
    """Have a graph of a file taken up where its key is met.

    Raises:
        msgspec.MsgspecError: it is no graph of a file.
    """
    msgspec.msgpack.decode(data, type=Finished)
    _told[key] = data


def forget() -> None:
    """Take up nothing of files any more, and keep nothing of what was compiled so far."""
    for known in (_made, _told, _taken):
        known.clear()
