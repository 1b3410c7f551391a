"""The measurements that speak of a problem."""

from __future__ import annotations

import torch

from lz_compile.ground.machine import environment
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.measure import perfdb, questions
from lz_compile.runtime.measure.estimate import fixed_part
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.problem.context import SelectionContext


def records_of(problem: Problem, context: SelectionContext, path: str | None) -> list[PerfRecord]:
    """The measurements that share a problem's fixed part, in this environment."""
    if not (context.device_type == "cpu" or (context.device_type != "meta" and torch.accelerator.is_available())):
        return []
    where, match = environment(context.device_type), perfdb.canonical(fixed_part(context, problem.alone))
    return questions.ask(questions.Question(path, context.operation, context.dtype_name, where, match))


def database_at(path: str | None) -> perfdb.PerfDB:
    """The database of measurements, by default that of the user's cache directory."""
    return perfdb.database(perfdb.path_of(path))
