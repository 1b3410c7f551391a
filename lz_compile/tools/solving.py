"""Decide ahead of time: a dispatch table for a model over buckets of sizes, or a lock file of what this process decided."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, TypeAlias

import torch
from msgspec.structs import replace as changed
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile import __version__
from lz_compile.api.arguments import Arguments
from lz_compile.compile.compiler import Runner, inductor_runner, process
from lz_compile.compile.options import Options, named_options, split
from lz_compile.errors import LayerZeroError, SolveError, nearest
from lz_compile.ground import machine
from lz_compile.ground.files import path_given
from lz_compile.ground.hardware import hardware
from lz_compile.lowering import dynamo, frames
from lz_compile.report.report import GraphReport, reports
from lz_compile.runtime.kernels import registry
from lz_compile.runtime.tables import loaded as loaded_tables
from lz_compile.runtime.tables.dispatch_table import DispatchTable, KernelIdentity, Plan, PlannedOp
from lz_compile.tools import decisions
from lz_compile.tools.decisions import Bucket, Decided
from lz_compile.tools.serving_calls import is_call

#: Positional and keyword inputs of a model.
Inputs: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

#: The positions of bucketed dimensions where none are given.
_DIMS: Mapping[str, int] = {"batch": 0, "seq_len": 1}


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
        ArgumentError: an argument is of another kind.
        SolveError: the buckets, positions or examples do not fit each other, or the model does not run at some size.
        OptionError: ``tune`` or one of the options is not valid.
    """
    _check_kinds(model, shape_buckets, dims, inputs)
    _check_options(model_id, budget_s, compile_jit)
    made = _made(shape_buckets, (example_inputs, kwargs), dims, inputs)
    ours, rest = split({"layerzero.tune": tune, **named_options(options)})
    start, device = time.perf_counter(), torch.device("cpu")
    solved: list[tuple[Bucket, tuple[PlannedOp, ...], tuple[str, ...]]] = []
    for bucket, given in made:
        if budget_s is not None:
            ours = replace(ours, tune_budget_s=max(start + budget_s - time.perf_counter(), 0.0))
        run = inductor_runner(None, rest) if compile_jit else _eager
        with dynamo.cache_artifacts() as artifacts:
            planned = _planned(model, bucket, given, ours, run)
        solved.append((bucket, planned, tuple(artifacts)))
        device = next((each.device for each in _tensors(given)), device)
    trees = decisions.bucket_trees([(bucket, planned) for bucket, planned, _ in solved])
    return _agreed(
        _table(
            model_id=model_id or getattr(model, "__qualname__", type(model).__qualname__),
            hardware_signature=hardware(device).signature(),
            capabilities_hash=registry.digest(),
            shape_buckets={name: tuple(sorted(set(sizes))) for name, sizes in shape_buckets.items()},
            plans=tuple(
                Plan(bucket=dict(bucket), ops=decisions.merged(planned), jit_artifacts=artifacts)
                for bucket, planned, artifacts in solved
            ),
            trees=trees,
            kernels=_identities(op for _, planned, _ in solved for op in planned),
            environment=_environment(device),
        )
    )


def save_decisions(path: str | os.PathLike[str]) -> DispatchTable:
    """Write every decision of this process (those in :func:`lz_compile.reports`) as a lock file, for others to decide alike.

    A lock file holds on every machine on which the kernels that it names have the same capabilities and versions. It speaks
    of exactly the sizes that were compiled: a number, or the range of a symbol between the guards of its decision. Of two
    decisions for the same problem the later one counts.

    Args:
        path: of the file, which is written whole.

    Raises:
        OSError: it cannot be written.
    """
    path_given("save_decisions", "path", path)
    matches = [match for graph in reports() for match in graph.matches]
    decided = [found for match in matches if (found := Decided.of(match)) is not None]
    planned = decisions.merged(each.op for each in decided)
    table = _agreed(
        _table(
            kind="lock",
            model_id="",
            hardware_signature=None,
            capabilities_hash=None,
            shape_buckets={},
            plans=(Plan(bucket={}, ops=planned),),
            trees=decisions.lock_trees(decided),
            kernels=_identities(planned, named_only=True),
            environment=_environment(torch.device("cpu")),
        )
    )
    table.save(path)
    return table


def _table(**parts: Any) -> DispatchTable:
    created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return DispatchTable(
        **parts, layerzero_version=__version__, torch_version=str(torch.__version__), created_at=created_at
    )


def _environment(device: torch.device) -> dict[str, str]:
    return {name: str(value) for name, value in machine.environment_details(device).items()}


def _agreed(table: DispatchTable) -> DispatchTable:
    """The table with every planned op as its trees have it."""

    def why(op: PlannedOp) -> str:
        return f"as another decision for the same problem; by itself {op.kernel_id}"

    plans = (changed(plan, ops=decisions.as_in_trees(table, plan.ops, why)) for plan in table.plans)
    return changed(table, plans=tuple(plans))


def _identities(planned: Iterable[PlannedOp], *, named_only: bool = False) -> tuple[KernelIdentity, ...]:
    return tuple(KernelIdentity.of(spec) for spec in decisions.kernels_of(planned, named_only=named_only))


# ---- one bucket ---------------------------------------------------------------------------------------------------------


def _planned(
    model: Callable[..., Any], bucket: Bucket, given: Inputs, options: Options, run: Runner
) -> tuple[PlannedOp, ...]:
    """Run the model once at one size; what was decided, match by match."""
    found: list[GraphReport] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiled(graph: fx.GraphModule, graph_inputs: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
            found.append(report)
            return run(graph, graph_inputs, report)

        return process(module, inputs, options, compiled)

    if not is_call(given):
        text = f"expected inputs to give (args, kwargs) for {_text(bucket)}, received {given!r:.200}"
        raise SolveError(f"{text}. Return a list and a dict")
    args, kwargs = given
    try:
        with loaded_tables.set_aside(), frames.unlimited_recompiles():
            output = frames.compile_isolated(model, backend, dynamic=False)(*args, **kwargs)
            if run is not _eager:
                _run_backward(output, [*_parameters(model), *_tensors(given)])
    except LayerZeroError:
        raise
    except Exception as error:
        what = next(iter(str(error).splitlines()), "")
        text = f"expected it to run at {_text(bucket)}, received {type(error).__name__}: {what}"
        raise SolveError(f"{text}. Leave the size out, or give inputs=") from error
    decided = [Decided.of(match) for report in found for match in report.matches]
    return tuple(each.op for each in decided if each is not None)


def _eager(graph: fx.GraphModule, _inputs: Sequence[Any], _report: GraphReport) -> Callable[..., Any]:
    return graph.forward


def _run_backward(output: Any, leaves: Sequence[torch.Tensor]) -> None:
    """Run the backward once, for that is when it is compiled; nobody's ``.grad`` is touched."""
    outputs = [each for each in _tensors(output) if each.requires_grad]
    wanted = [each for each in leaves if each.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(each) for each in outputs], allow_unused=True)


def _parameters(model: Callable[..., Any]) -> list[torch.Tensor]:
    return list(model.parameters()) if isinstance(model, torch.nn.Module) else []


def _tensors(given: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]


# ---- inputs -------------------------------------------------------------------------------------------------------------


def _check_options(model_id: object, budget_s: object, compile_jit: object) -> None:
    arguments = Arguments("solve")
    arguments.instance("model_id", model_id, str, "as text", optional=True)
    arguments.number("budget_s", budget_s, optional=True)
    arguments.flag("compile_jit", compile_jit)


def _check_kinds(model: object, shape_buckets: object, dims: object, inputs: object) -> None:
    arguments = Arguments("solve")
    arguments.instance("model", model, Callable, "as a module or a function")
    arguments.instance("shape_buckets", shape_buckets, Mapping, "as sizes by name, {'seq_len': [128, 512]}")
    arguments.instance("dims", dims, Mapping, "as positions by name, {'seq_len': 1}", optional=True)
    for name, position in dims.items() if isinstance(dims, Mapping) else ():
        arguments.instance("dims", name, str, "as positions by name, {'seq_len': 1}")
        arguments.number(f"dims[{name!r}]", position, whole=True)
    arguments.instance("inputs", inputs, Callable, "as a function of a bucket", optional=True)


def _made(
    shape_buckets: Mapping[str, Sequence[int]],
    examples: Inputs,
    dims: Mapping[str, int] | None,
    inputs: Callable[[dict[str, int]], Inputs] | None,
) -> Iterator[tuple[Bucket, Inputs]]:
    """Every combination of buckets with the inputs of its size; what does not fit is found before the first."""
    for name, sizes in shape_buckets.items():
        are_several = isinstance(sizes, Sequence) and bool(sizes)
        if not are_several or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise SolveError(f"expected sizes of 1 or more for '{name}', received {sizes!r}. Correct shape_buckets")
    if not shape_buckets:
        raise SolveError("expected at least one bucket, received none. Give shape_buckets, as {'seq_len': [128, 512]}")
    if inputs is not None and (dims is not None or examples[0] or examples[1]):
        raise SolveError("expected examples or inputs=, received both. Leave out the examples and dims, or inputs=")
    positions = {} if inputs is not None else _positions(list(shape_buckets), examples, dims)
    grid = itertools.product(*(sorted(set(sizes)) for sizes in shape_buckets.values()))
    buckets = [dict(zip(shape_buckets, sizes, strict=True)) for sizes in grid]
    make = inputs or (lambda bucket: _resized(examples, bucket, positions))
    return ((bucket, make(dict(bucket))) for bucket in buckets)


def _positions(names: Sequence[str], examples: Inputs, dims: Mapping[str, int] | None) -> dict[str, tuple[int, int]]:
    """By bucket name, the position of its dimension and the size that the examples have there."""
    known = _DIMS if dims is None else dims
    found = {}
    for name in names:
        if name not in known:
            hint, valid = nearest(name, list(known)), ", ".join(known) or "none"
            raise SolveError(f"expected the position of '{name}', received those of {valid}{hint}. Give dims=")
        position = known[name]
        sizes = [each.shape[position] for each in _tensors(examples) if 0 <= position < each.dim()]
        if not sizes:
            shapes = ", ".join(str(tuple(each.shape)) for each in _tensors(examples)) or "no tensors"
            raise SolveError(
                f"expected an example with a dimension {position} for '{name}', received {shapes}. Give inputs="
            )
        found[name] = (position, sizes[0])
    return found


def _resized(examples: Inputs, bucket: Bucket, positions: Mapping[str, tuple[int, int]]) -> Inputs:
    """The examples at the sizes of a bucket, filled by repeating what they hold."""

    def resized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = value.detach()
        for name, (position, size) in positions.items():
            if position < value.dim() and value.shape[position] == size:
                places = torch.arange(bucket[name], device=value.device) % max(size, 1)
                found = found.index_select(position, places)
        return found.requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(resized, (tuple(examples[0]), dict(examples[1])))
    return args, kwargs


def _text(bucket: Bucket) -> str:
    return ", ".join(f"{name} {size}" for name, size in bucket.items())
