"""The measurements that speak of a problem."""

from __future__ import annotations

import torch

from lz_compile.ground.machine import environment
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.measure import perfdb
from lz_compile.runtime.measure.estimate import fixed_part
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.problem.context import SelectionContext


def records_of(problem: Problem, context: SelectionContext, path: str | None) -> list[PerfRecord]:
    """The measurements that share a problem's fixed part, in this environment."""
    database = database_at(path)
    is_here = context.device_type == "cpu" or (context.device_type != "meta" and torch.accelerator.is_available())
    if not (database.exists and is_here):  # nothing was ever measured there
        return []
    fixed = fixed_part(context, problem.alone)
    return database.curve(context.operation, context.dtype_name, environment(context.device_type), fixed)


def database_at(path: str | None) -> perfdb.PerfDB:
    """The database of measurements, by default that of the user's cache directory."""
    return perfdb.database(perfdb.path_of(path))
