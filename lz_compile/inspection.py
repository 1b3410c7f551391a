"""Ask what the backend does to a model, without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rich
from torch import fx

from lz_compile.compiler import process
from lz_compile.lowering import inductor
from lz_compile.options import split
from lz_compile.runtime.report import GraphReport, Report


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    print_report: bool = True,
    **kwargs: Any,
) -> Report:
    """Run ``model(*args, **kwargs)`` once and tell every decision: what was recognised, what runs it, and why.

    The graphs are rewritten and validated as in a compile, and then run without Inductor. Nothing of the model or of an
    earlier ``torch.compile`` of it changes.

    Args:
        model: a module or function.
        args: its inputs.
        options: as for ``torch.compile(..., options=...)``.
        dynamic: as for ``torch.compile``.
        print_report: print the report as tables.
        kwargs: its keyword inputs.

    Returns:
        the reports of the model's graphs.
    """
    ours, _ = split(options)
    found: list[GraphReport] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(graph: fx.GraphModule, _inputs: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
            found.append(report)
            return graph.forward

        return process(module, inputs, ours, run)

    with inductor.unlimited_recompiles():
        inductor.compile_apart(model, backend, dynamic)(*args, **kwargs)
    report = Report(found)
    if print_report:
        rich.print(report)
    return report
