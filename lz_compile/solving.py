"""Decide ahead of time: a dispatch table for a model over buckets of sizes, or a lock file of what this process decided."""

from __future__ import annotations

import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile import __version__
from lz_compile.compiler import inductor_runner, process
from lz_compile.errors import SolveError, nearest
from lz_compile.lowering import inductor, ops
from lz_compile.options import Options, split
from lz_compile.runtime import decision_tree, events, loaded_tables, machine, registry
from lz_compile.runtime.decision_tree import ANY, Range
from lz_compile.runtime.dispatch_table import DispatchTable, KernelIdentity, KindTree, Plan, PlannedOp
from lz_compile.runtime.hardware import hardware
from lz_compile.runtime.report import GraphReport, MatchReport, reports
from lz_compile.runtime.table_trees import of_points, of_regions

if TYPE_CHECKING:
    from lz_compile.compiler import Runner

Bucket = Mapping[str, int]
Inputs = tuple[Sequence[Any], Mapping[str, Any]]


def solve(
    model: Callable[..., Any],
    *example_inputs: Any,
    shape_buckets: Mapping[str, Sequence[int]],
    dims: Mapping[str, int] | None = None,
    inputs: Callable[[dict[str, int]], Inputs] | None = None,
    model_id: str | None = None,
    tune: str = "on-miss",
    compile_jit: bool = False,
    budget_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> DispatchTable:
    """The kernels for a model at every combination of buckets, as a table to save and to load in production.

    For each combination the model runs once at that size, as in :func:`lz_compile.explain`: recognised, measured where it
    was not yet, chosen, proven. A bucket stands for all sizes up to it and above the previous one. Tables that are loaded
    have no part in this.

    Inputs of a size are made from the examples: a bucketed dimension is the one at position ``dims[name]`` of every tensor
    whose size there is that of the first tensor with such a position; it is filled by repeating the example. Where that
    does not fit a model (masks of ``[B, 1, S, S]``, lengths given as numbers), give ``inputs``.

    Args:
        model: a module or function.
        example_inputs: its inputs.
        shape_buckets: sizes by the name of a bucketed dimension.
        dims: the position of each bucketed dimension; by default ``{"batch": 0, "seq_len": 1}``, of those that are there.
        inputs: gives ``(args, kwargs)`` for a bucket, in place of examples and ``dims``.
        model_id: what the table calls the model; by default the name of its class or function.
        tune: ``"on-miss"`` measures what was never measured at these sizes, ``"off"`` decides without.
        compile_jit: compile with Inductor as well, so that its caches hold what production will ask for.
        budget_s: measure no more after that many seconds.
        options: as for ``torch.compile(..., options=...)``; give those of production.
        kwargs: the model's keyword inputs.

    Raises:
        SolveError: the buckets, positions or examples do not fit each other, or the model does not run at some size.
        OptionError: ``tune`` or one of the options is not valid.
    """
    made = _inputs(shape_buckets, example_inputs, kwargs, dims, inputs)
    start, solved, device = time.perf_counter(), [], torch.device("cpu")
    ours, rest = split({"layerzero.tune": tune, **(options or {})})
    for bucket, (args, keywords) in made:
        if budget_s is not None:
            ours = replace(ours, tune_budget_s=max(start + budget_s - time.perf_counter(), 0.0))
        run = inductor_runner(None, rest) if compile_jit else _eager
        device = _device((args, keywords))
        solved.append(_solved(model, bucket, args, keywords, ours, run))
    found = _Solution(shape_buckets, solved)
    return _table(
        model_id=model_id or getattr(model, "__qualname__", type(model).__qualname__),
        hardware_signature=hardware(device).signature(),
        capabilities_hash=registry.digest(),
        shape_buckets={name: tuple(sorted(set(sizes))) for name, sizes in shape_buckets.items()},
        plans=found.plans(),
        trees=found.trees(),
        kernels=tuple(map(KernelIdentity.of, _kernels_of(found.ops()))),
        environment=machine.environment_details(device),
    )


def save_decisions(path: str | Path) -> DispatchTable:
    """Write every decision that this process made (:func:`lz_compile.reports`) as a lock file, for others to decide alike.

    A lock file holds on every machine on which the kernels that it names have the same capabilities and versions. It speaks
    of exactly the sizes that were compiled: a number, or the range of a symbol between the guards of its decision. Of two
    decisions for the same problem the later one counts.
    """
    decided = [found for match in _matches(reports()) if (found := _Decided.of(match)) is not None]
    trees = _lock_trees(decided)
    planned = _merged(each.op for each in decided)
    draft = _table(
        model_id="",
        kind="lock",
        hardware_signature=None,
        capabilities_hash=None,
        shape_buckets={},
        plans=(),
        trees=trees,
        kernels=tuple(KernelIdentity.of(spec) for spec in _kernels_of(planned, named_only=True)),
        environment=machine.environment_details("cpu"),
    )
    kept = tuple(op for op in planned if draft.kernel_at(op) == op.kernel_id)
    table = DispatchTable(**{**{f: getattr(draft, f) for f in draft.__struct_fields__}, "plans": (Plan(bucket={}, ops=kept),)})
    table.save(path)
    return table
