"""Ask what is chosen, and why: for one problem, or for a whole model without compiling it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import rich
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lz_compile.api.arguments import Arguments
from lz_compile.api.given import read
from lz_compile.compile import pipeline
from lz_compile.compile.compiler import process
from lz_compile.compile.options import Options, named_options, split
from lz_compile.errors import LayerZeroError
from lz_compile.ground import events
from lz_compile.ground.events import Event
from lz_compile.ground.isolation import isolated
from lz_compile.ground.records import Reason, Shown
from lz_compile.lowering import frames
from lz_compile.report.graph_breaks import GraphBreaks, Watch
from lz_compile.report.report import GraphReport, Report
from lz_compile.runtime.choose.problem import Candidate, Decision, Problem
from lz_compile.runtime.policy import policy
from lz_compile.runtime.ranks.agree import decide

SCHEMA_VERSION = "1.0"


@dataclass(frozen=True)
class SelectionReport(Shown):
    """The kernel for one problem, why, and every candidate; ``policy`` is what the configuration says about it."""

    shown_by = "lz_compile.report.render:selection"

    problem: Problem
    decision: Decision
    policy: Mapping[str, Any]
    events: tuple[Event, ...] = field(default=())

    @property
    def kernel_id(self) -> str:
        """The kernel that is chosen."""
        return self.decision.kernel.kernel_id

    @property
    def chosen(self) -> Candidate:
        """Its candidate."""
        return next(each for each in self.decision.candidates if each.kernel.kernel_id == self.kernel_id)

    @property
    def refused(self) -> list[Reason]:
        """Why a lock or a dispatch table was not followed."""
        return [reason for reason in (self.decision.refused_lock, self.decision.refused_table) if reason is not None]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self.summary(),
            "refused": [reason.to_dict() for reason in self.refused],
            "policy": dict(self.policy),
            "context": self.problem.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.decision.candidates],
            "events": [event.to_dict() for event in self.events],
        }

    def summary(self) -> dict[str, Any]:
        """What :func:`which` tells."""
        return {
            "operation": self.problem.context.operation,
            "kernel_id": self.kernel_id,
            "score": round(self.chosen.score, 2),
            "why": self.decision.why,
            "origin": self.chosen.estimate.origin,
        }


def which(operation: str, *tensors: Any, **named: Any) -> dict[str, Any]:
    """The kernel that would be chosen for an operation on these tensors: ``kernel_id``, ``score``, ``why``, ``origin``.

    ``score`` is its speed in percent of Inductor's, plus what preferences add; ``origin`` says whether that was measured
    on this machine, is a shipped ``prior``, or is ``assumed``. Nothing runs: fake tensors do as well.

    Args:
        operation: an op, or a variant of it, which sets what makes the variant (``norm.rms``, ``attention.causal``).
            Without one, attributes and operands tell it: ``attention`` is ``attention.full``, ``norm`` is ``norm.rms``.
        tensors: operands in the op's order.
        named: other operands by name, and the op's attributes: of attention ``scale``, ``dropout_p`` and others, a ``mask``
            that is boolean (True keeps) or additive, and ``layout="BSHD"`` for tokens before heads; of a norm ``eps``.

    Shapes:
        those of each op are in docs/ops.md, and in every error.

    Raises:
        UnknownOperationError: there is no such operation.
        ArgumentError: an operand or attribute is unknown or missing, or does not fit.
    """
    return _ask("which", operation, tensors, named).summary()


def _ask(function: str, operation: str, tensors: Sequence[Any], named: Mapping[str, Any]) -> SelectionReport:
    with events.collect() as happened:
        context = read(function, operation, tensors, named).context
        current, problem = policy.current(), Problem(context)
        resolved_policy = current.resolved_policy(context)
        said = {
            "file": current.file,
            "lock": None
            if resolved_policy.lock is None
            else {"kernel": resolved_policy.lock, "origin": resolved_policy.lock_origin},
            **{
                kind: [{"kernel": kernel_id, "origin": origin} for kernel_id, origin in getattr(resolved_policy, kind)]
                for kind in ("prefer", "avoid", "exclude")
            },
        }
        return SelectionReport(problem, decide(problem, current, writes=False), said, tuple(happened))


# ---- models ----------------------------------------------------------------------------------------------------------


@overload
def explain(model: str, *args: Any, print_report: bool = True, **kwargs: Any) -> SelectionReport: ...


@overload
def explain(
    model: Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    print_report: bool = True,
    verbose: bool = False,
    **kwargs: Any,
) -> Report: ...


def explain(
    model: Callable[..., Any] | str,
    *args: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    print_report: bool = True,
    verbose: bool = False,
    **kwargs: Any,
) -> Report | SelectionReport:
    """Run ``model(*args, **kwargs)`` once and tell every decision: what was recognised, what runs it, and why.

    The graphs are rewritten and validated as in a compile, and then run without Inductor. Nothing of an earlier
    ``torch.compile`` of the model changes. Given the name of an operation and its tensors instead
    (``explain("norm.rms", input, weight)``), it tells how a kernel is chosen for these; nothing runs.

    Args:
        model: a module or function; or an operation, whose other arguments are then those of :func:`which`.
        args: its inputs.
        options: as for ``torch.compile(..., options=...)``.
        dynamic: as for ``torch.compile``.
        print_report: print the report.
        verbose: print every candidate of every kind of match, instead of a screen.
        kwargs: its keyword inputs.

    Returns:
        the reports of the model's graphs, or that of the operation.

    Raises:
        UnknownOperationError: there is no such operation.
        ArgumentError: of an operation, an operand or attribute does not fit; ``model`` or ``dynamic`` is of another kind.
        OptionError: of a model, an option is unknown or has a wrong value.
    """
    report: Report | SelectionReport
    if isinstance(model, str):
        report = _ask("explain", model, args, kwargs)
    else:
        _check_model("explain", model, dynamic, "as a module, a function or the name of an operation")
        ours, _ = split({"layerzero.tune": "off", **named_options(options)})

        def take(module: fx.GraphModule, inputs: Sequence[Any], watch: Watch) -> Callable[..., Any]:
            return process(module, inputs, ours, lambda graph, _, report: watch(graph.forward, report))

        report = Report(_traced(model, args, kwargs, dynamic, take))
    if print_report:
        rich.print(report.in_full() if verbose and isinstance(report, Report) else report)
    return report


def _check_model(function: str, model: object, dynamic: object, expected: str) -> None:
    arguments = Arguments(function)
    arguments.instance("model", None if isinstance(model, type) else model, Callable, expected)
    arguments.instance("dynamic", dynamic, bool, "as True, False or None", optional=True)


#: What compiles a graph, by a function that notes its report and gives what runs it.
Take = Callable[[fx.GraphModule, Sequence[Any], Watch], Callable[..., Any]]


def _traced(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: bool | None, take: Take
) -> list[GraphReport]:
    """The reports of the graphs of one call of a model."""
    breaks = GraphBreaks()

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return take(module, inputs, breaks.watched(module))

    with frames.unlimited_recompiles():
        frames.compile_isolated(model, backend, dynamic)(*args, **kwargs)
    return breaks.reports


def dry_run(
    model: Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    print_report: bool = True,
    verbose: bool = False,
    **kwargs: Any,
) -> Report:
    """What would be chosen for a model's graphs, without running them, a kernel or Inductor.

    Dynamo traces the model; a graph then gives tensors without data, with which the code after a graph break goes on.
    Where that code needs the numbers (``if loss > 1``), the graphs are run eagerly in PyTorch's own operations, from the
    beginning, and the event ``DRY_RUN_NEEDS_VALUES`` says so. Code outside of graphs that touches only inputs and
    parameters is executed. No rewrite is proven here (``explain`` does that), so ``rewritten`` is always False.

    Attributes that the model sets on itself and its modules are put back; what it puts into containers (a cache among the
    inputs) may be left as tensors without data, so pass a fresh one.

    Args:
        model: a module or function.
        args: its inputs.
        options: as for ``torch.compile(..., options=...)``.
        dynamic: as for ``torch.compile``.
        print_report: print the report.
        verbose: print every candidate of every kind of match, instead of a screen.
        kwargs: its keyword inputs.

    Returns:
        the reports of the model's graphs.

    Raises:
        ArgumentError: ``model`` or ``dynamic`` is of another kind.
        OptionError: an option is unknown or has a wrong value.
    """
    _check_model("dry_run", model, dynamic, "as a module or a function")
    ours, _ = split(options)
    reason: Exception | None = None
    try:
        with _unchanged(model):
            report = Report(_traced(model, args, kwargs, dynamic, _choosing(ours, _without_data())))
    except LayerZeroError:
        raise
    except Exception as error:  # noqa: BLE001 whether values are missing or the model is wrong, a run of it tells
        reason = error
    if reason is not None:
        take = _choosing(ours, lambda module: module.forward)
        report = Report(_traced(model, args, kwargs, dynamic, take))
        with events.collect() as happened:
            text = "the model's code needs values that a dry run does not have, so its graphs were run eagerly"
            events.record("DRY_RUN_NEEDS_VALUES", f"{text}: {type(reason).__name__}: {reason}")
        for graph in report.graphs[:1]:
            graph.events[:0] = happened
    if print_report:
        rich.print(report.in_full() if verbose else report)
    return report


Run = Callable[[fx.GraphModule], Callable[..., Any]]


def _choosing(options: Options, run: Run) -> Take:
    """Chooses kernels for a graph, which is not rewritten."""
    ids = itertools.count()

    def take(module: fx.GraphModule, _inputs: Sequence[Any], watch: Watch) -> Callable[..., Any]:
        report = GraphReport(next(ids))
        with events.collect() as happened, isolated() as outside, outside.entered():
            pipeline.choose(module, options, report)
        report.events.extend(happened)
        return watch(run(module), report)

    return take


def _without_data() -> Run:
    """Runs a graph for the shapes of its results. In-place changes reach no real tensor."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return mode.from_tensor(value) if is_real else value

    def run(module: fx.GraphModule) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            with mode:
                return module.forward(*map(fake, inputs))

        return call

    return run


@contextmanager
def _unchanged(model: Callable[..., Any]) -> Iterator[None]:
    """Put back what a run changes in the attributes of a module (or of the one that a method belongs to) and below it."""
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
    places = [place for module in modules for place in (vars(module), module._buffers, module._parameters)]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        for place, known in zip(places, before, strict=True):
            for name in [name for name in place if name not in known]:
                del place[name]
            place.update(known)
