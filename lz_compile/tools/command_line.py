"""The command line: ``python -m lz_compile which attention.causal --shape 1,8,1024,64 --json``.

Exit codes: 0, 1 where something is not ready, not valid or fails, 2 where the command is wrong, 130 after Ctrl-C. Errors
are one line on the error stream; with ``LAYERZERO_DEBUG=1`` they keep their traceback.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lz_compile.errors import CommandError, LayerZeroError
from lz_compile.tools.command_arguments import parser
from lz_compile.tools.command_models import ModelError, model_of
from lz_compile.tools.progress import bar

if TYPE_CHECKING:
    import argparse

    from lz_compile.runtime.tables.dispatch_table import DispatchTable
    from lz_compile.tools.tuning import TuneReport

SCHEMA_VERSION = "1.0"
OK, NOT_OK, USAGE, INTERRUPTED = 0, 1, 2, 130
#: Columns where the output is no terminal.
WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parsed = parser().parse_args(arguments)
    try:
        with _events_in_one_line():
            return _COMMANDS[parsed.command](parsed)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except Exception as error:
        if _is_debug():
            raise
        is_usage = isinstance(error, CommandError) or (
            isinstance(error, LayerZeroError) and isinstance(error, ValueError)
        )
        kind = "" if isinstance(error, (ModelError, LayerZeroError)) else f"{type(error).__name__}: "
        sys.stderr.write(f"lz_compile: error: {kind}{' '.join(str(error).split())}\n")
        return USAGE if is_usage else NOT_OK


def _is_debug() -> bool:
    return os.environ.get("LAYERZERO_DEBUG", "0").lower() not in ("", "0", "false", "no", "off")


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"lz_compile: {record.levelname.lower()}: {' '.join(record.getMessage().split())}"


@contextmanager
def _events_in_one_line() -> Iterator[None]:
    """Events go to the error stream without their tracebacks, unless logging is set up already (``TORCH_LOGS``)."""
    logger = logging.getLogger("lz_compile")
    if logger.handlers or _is_debug():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


# ---- commands --------------------------------------------------------------------------------------------------------


def _which(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.command_operands import named_of, operation_of
    from lz_compile.tools.inspection import which

    operation = operation_of(arguments) or ""
    with _usage():
        found = which(operation, **named_of(arguments, operation, are_fake=True))
    _show(arguments, found, f"{found['kernel_id']}: {found['why']}")
    return OK


def _explain(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.command_operands import named_of, operation_of
    from lz_compile.tools.inspection import explain

    if ":" in (arguments.subject or ""):
        return _about_model(arguments, explain)
    arguments.operation = arguments.subject
    operation = operation_of(arguments, None)
    if arguments.html is not None or arguments.since is not None:
        raise CommandError(
            "--html and --since: expected module:callable, for pages are of models, received an operation"
        )
    if operation is None:
        raise CommandError("expected what to explain: an operation, or module:callable that returns (model, inputs)")
    with _usage():
        report = explain(operation, print_report=False, **named_of(arguments, operation, are_fake=True))
    _show(arguments, report.to_dict(), report)
    return OK


def _dry_run(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.inspection import dry_run

    return _about_model(arguments, dry_run)


def _about_model(arguments: argparse.Namespace, ask: Callable[..., Any]) -> int:
    if arguments.since is not None and arguments.html is None:
        raise CommandError("--since: expected --html FILE with it, the page that tells what changed")
    model, inputs, keywords = model_of(arguments.subject)
    try:
        report = ask(model, *inputs, dynamic=arguments.dynamic or None, print_report=False, **keywords)
    except LayerZeroError:
        raise
    except Exception as error:
        raise ModelError(f"running {arguments.subject}: {type(error).__name__}: {error}") from error
    if arguments.html is not None:
        report.save(arguments.html, since=arguments.since)
        sys.stderr.write(f"written to {arguments.html}\n")
    _show(arguments, report.to_dict(), report.in_full() if arguments.verbose else report)
    return OK


def _diff(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Group

    from lz_compile.report.changes import changes
    from lz_compile.report.files import read, save
    from lz_compile.report.render import differences

    before, after = (read(Path(path), "diff") for path in (arguments.before, arguments.after))
    found = changes(before, after)
    if arguments.html is not None:
        save(after, Path(arguments.html), Path(arguments.before), "diff")
    _show(arguments, {"changes": [each.to_dict() for each in found]}, Group(*differences(found)))
    return NOT_OK if arguments.exit_code and found else OK


def _validate(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.command_operands import named_of, operation_of
    from lz_compile.tools.trial import kernel_asked_for, validate

    _, arguments.operation = kernel_asked_for(arguments.kernel, arguments.op)
    operation = operation_of(arguments) or ""
    with _usage():
        ok, reasons = validate(arguments.kernel, operation=operation, **named_of(arguments, operation))
    told = {"kernel_id": arguments.kernel, "ok": ok, "reasons": [reason.to_dict() for reason in reasons]}
    text = "\n".join([f"{arguments.kernel}: {'valid' if ok else 'not valid'}", *(f"  {reason}" for reason in reasons)])
    _show(arguments, told, text)
    return OK if ok else NOT_OK


def _list_kernels(arguments: argparse.Namespace) -> int:
    from lz_compile.report.render import kernel_list
    from lz_compile.runtime.kernels.registry import list_kernels

    found = list_kernels(arguments.operation)
    _show(arguments, {"kernels": [each.to_dict() for each in found]}, kernel_list(found))
    return OK


def _doctor(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.diagnosis import doctor

    report = doctor(print_report=False, retry=arguments.retry)
    if arguments.fix:
        told = "\n".join(report.fixes) or "# nothing that a command could mend"
        _show(arguments, {"fixes": report.fixes}, told)
        return OK
    _show(arguments, report.to_dict(), report)
    return OK


def _readiness_check(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.readiness import readiness_check

    report = readiness_check(arguments.dispatch_table, arguments.artifacts)
    _show(arguments, report.to_dict(), report)
    is_warned = arguments.strict and any(check.status != "pass" for check in report.checks)
    return OK if report.ok and not is_warned else NOT_OK


def _tune(arguments: argparse.Namespace) -> int:
    from rich.console import Group

    from lz_compile.report.render import tuned

    _check_chart(arguments)
    done = [0, 0]
    try:
        report = _tuned(arguments, done)
    except KeyboardInterrupt:
        text = f"interrupted: {done[0]} of {done[1]} problems are done and kept. The same command goes on from there"
        sys.stderr.write(f"{text}{'' if arguments.resume else ', without --no-resume'}.\n")
        return INTERRUPTED
    if arguments.chart is not None:
        report.save_chart(arguments.chart)
    _show(arguments, report.to_dict(), Group(*tuned(report)))
    return OK


#: Arguments that ``tune`` calls as the command line does.
_TUNED = (
    *("head_dim", "seq_lens", "seq_lens_k", "batch_sizes", "num_heads", "num_kv_heads"),
    *("mask", "training", "samples", "resume"),
)


def _tuned(arguments: argparse.Namespace, done: list[int]) -> TuneReport:
    from lz_compile.tools.command_operands import device_of, dtype_of, operation_of
    from lz_compile.tools.tuning import tune

    with _interruptible() as stop_if_asked, bar() as show:

        def on_progress(finished: int, total: int, problem: str) -> None:
            stop_if_asked()
            done[:] = finished, total
            show(finished, total, problem)

        report = tune(
            operation_of(arguments) or "attention",
            dtype=[dtype_of(name) for name in arguments.dtype],
            sizes=dict(arguments.sizes),
            device=device_of(arguments.device),
            budget_s=arguments.budget,
            on_progress=on_progress,
            **{name: getattr(arguments, name) for name in _TUNED},
        )
        total = max(done[1], report.remaining)  # a budget may be used up before the first problem
        show(total - report.remaining, total, "done")
    return report


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C as ever, and a function that raises where it was pressed and got lost: Python drops it in a destructor."""
    was_pressed = False

    def press(_signal: int, _frame: object) -> None:
        nonlocal was_pressed
        was_pressed = True
        raise KeyboardInterrupt

    def stop_if_asked() -> None:
        if was_pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield stop_if_asked
    finally:
        signal.signal(signal.SIGINT, before)


def _solve(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.solving import solve

    _check_chart(arguments)
    buckets = dict(arguments.shape_buckets)
    model, inputs, keywords = model_of(arguments.subject)
    options = {"tune": arguments.tune, "budget_s": arguments.budget, "compile_jit": arguments.compile_jit}
    table = solve(model, *inputs, shape_buckets=buckets, dims=dict(arguments.dims) or None, **options, **keywords)
    if arguments.output is not None:
        table.save(arguments.output)
    if arguments.chart is not None:
        _draw_solved(arguments.chart, table)
    where = "" if arguments.output is None else f", written to {arguments.output}"
    kernels = sorted({op.kernel_id for plan in table.plans for op in plan.ops}) or ["none"]
    _show(arguments, table.to_dict(), f"{len(table.plans)} plans with kernels {', '.join(kernels)}{where}")
    return OK


def _check_chart(arguments: argparse.Namespace) -> None:
    if arguments.chart is not None:
        from pathlib import Path

        from lz_compile.report import charts

        charts.check_ending(Path(arguments.chart), arguments.command)


def _draw_solved(path: str, table: DispatchTable) -> None:
    """What the choices of a table rest on, with the sizes at which its trees are cut."""
    from pathlib import Path

    from lz_compile.report import charts
    from lz_compile.report.report import reports
    from lz_compile.runtime.problem.decision_tree import edges

    cuts: dict[str, set[float]] = {}
    for tree in table.trees:
        for name, sizes in edges(tree.node()).items():
            cuts.setdefault(name, set()).update(sizes)
    matches = [match.to_dict() for graph in reports() for match in graph.matches]
    charts.latencies(charts.of_matches(matches), Path(path), "solve", {name: sorted(at) for name, at in cuts.items()})


def _artifacts(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.artifacts import inspect_artifacts, merge_artifacts

    is_merge = arguments.action == "merge"
    if len(arguments.files) < 2 if is_merge else len(arguments.files) != 1:
        raise CommandError(f"artifacts {arguments.action}: expected {'OUTPUT FILE ...' if is_merge else 'one FILE'}")
    first, *others = arguments.files
    found = merge_artifacts(first, others) if is_merge else inspect_artifacts(first)
    _show(arguments, found.to_dict(), found)
    return OK


def _perfdb(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.merging import merge_measurements

    found = merge_measurements(arguments.output, arguments.files)
    _show(arguments, found.to_dict(), str(found))
    return OK


def _decisions(arguments: argparse.Namespace) -> int:
    from lz_compile.tools.merging import merge_decisions

    table = merge_decisions(arguments.output, arguments.files)
    kinds = sorted({kind for _, op in table.ops() for kind in op.hardware})
    count = len(list(table.ops()))
    _show(
        arguments, table.to_dict(), f"{arguments.output} holds {count} decisions for {', '.join(kinds) or 'no device'}"
    )
    return OK


# ---- what commands work on -------------------------------------------------------------------------------------------


@contextmanager
def _usage() -> Iterator[None]:
    """What is wrong with values that were given is an error of usage."""
    try:
        yield
    except LayerZeroError:
        raise
    except ValueError as error:
        raise CommandError(str(error)) from error


# ---- telling ---------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace, record: dict[str, Any], told: Any) -> None:
    """JSON, of the version that a record says it has, or the same for people."""
    if arguments.json:
        sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **record}, indent=2, default=str) + "\n")
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)
    console.print(told, markup=not isinstance(told, str), highlight=False, soft_wrap=isinstance(told, str))


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "which": _which,
    "explain": _explain,
    "list-kernels": _list_kernels,
    "validate": _validate,
    "dry-run": _dry_run,
    "diff": _diff,
    "doctor": _doctor,
    "readiness-check": _readiness_check,
    "tune": _tune,
    "solve": _solve,
    "artifacts": _artifacts,
    "perfdb": _perfdb,
    "decisions": _decisions,
}
