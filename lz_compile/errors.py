"""Every error of this package. Each says what was being done, what was expected, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lz_compile.ground.records import Reason


class LayerZeroError(Exception):
    """Base of all errors."""


class OptionError(LayerZeroError, ValueError):
    """An option of ours that does not exist or has a wrong value."""


class CommandError(LayerZeroError):
    """A command of the command line, or one of its values, is wrong."""


class UnknownKernelError(OptionError):
    """A kernel is named (in a lock, say) that an operation does not have."""

    def __init__(self, operation: str, kernel_id: object, valid: Sequence[str], *, doing: str = "locking") -> None:
        super().__init__(f"{doing} {operation}: {no_such('kernel', kernel_id, sorted(valid))}")


class RewriteFailedError(LayerZeroError):
    """In strict mode: something of ours failed that would otherwise fall back to Inductor."""


class ConfigError(LayerZeroError, ValueError):
    """A configuration (file, environment variable, call) that cannot be followed as it is written."""


#: A list of names that is no longer is told beside the nearest one.
_SHORT = 160


def nearest(name: object, valid: Sequence[str]) -> str:
    """``" (did you mean 'x'?)"``, or nothing where no valid name is close."""
    close = difflib.get_close_matches(str(name), valid, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def no_such(what: str, name: object, valid: Iterable[str], where: str = "") -> str:
    """That there is nothing of a name, and the nearest one, or those that there are: all of them, where they are few."""
    known = list(valid)
    near, listed = nearest(name, known), ", ".join(known)
    return f"no {what} '{name}'{where}{near}" + (f"; valid are {listed}" if not near or len(listed) <= _SHORT else "")


class GradientUnsupportedError(LayerZeroError, RuntimeError):
    """A kernel is given an input that wants a derivative, forwards or backwards, which it does not compute."""

    def __init__(self, operator: str, position: int, *, is_forward: bool = False) -> None:
        wanted = (
            f"tangents, for it has no derivative in forward mode; argument {position} has one. Differentiate backwards, "
            "or write the call out in PyTorch"
            if is_forward
            else f"gradients, for it has no backward; argument {position} requires one. Call it under torch.no_grad(), or "
            "choose a kernel that supports 'training'"
        )
        super().__init__(f"calling {operator}: expected inputs without {wanted}")


class DoubleBackwardError(LayerZeroError, RuntimeError):
    """A gradient is to be differentiated that is no function of its operands: what is routed, is by a comparison."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"differentiating {function} twice: expected a backward without create_graph, for routed gradients have none of "
            "their own. Leave create_graph out, or take the plain sum of both adapters"
        )


class TransformUnsupportedError(LayerZeroError, RuntimeError):
    """A function is transformed by ``torch.func`` or forward-mode differentiation in a form that has no such transform."""

    def __init__(self, function: str, what: str, instead: str) -> None:
        super().__init__(
            f"transforming {function} by torch.func: expected {instead}, received {what}, whose backward is no derivative. "
            "Call it outside of the transform, or take that"
        )


class OperatorRedefinedError(LayerZeroError, ValueError):
    """A name of an operator is used a second time, for another function."""

    def __init__(self, operator: str, function: object) -> None:
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
        super().__init__(
            f"defining {operator} as {name}: the name already stands for another function (or another fake or fallback). "
            "Give the operator a name of its own"
        )


class KernelExecutionError(LayerZeroError, RuntimeError):
    """A kernel raised while it ran, and falling back is switched off."""

    def __init__(self, kernel_id: str, error: BaseException) -> None:
        self.kernel_id = kernel_id
        super().__init__(
            f"running {kernel_id}: expected a result, received {type(error).__name__}: {error}. Switch fallback_enabled "
            f"on to complete on the reference, or avoid {kernel_id}"
        )


class TrialError(LayerZeroError, RuntimeError):
    """A kernel that is not shipped with this package failed while it was tried; ``is_fatal``: it hung, exited or crashed."""

    def __init__(self, subject: str, what: str, *, is_fatal: bool) -> None:
        self.what, self.is_fatal = what, is_fatal
        super().__init__(f"trying {subject}: expected a result, but it {what}. Correct the kernel, or avoid it")


class NoKernelFoundError(LayerZeroError):
    """No kernel can run an operation; ``failures`` says why, kernel by kernel."""

    def __init__(self, operation: str, failures: Mapping[str, Sequence[Reason]]) -> None:
        self.operation = operation
        self.failures = {kernel_id: tuple(reasons) for kernel_id, reasons in failures.items()}
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [f"No kernel available for '{self.operation}'", "", "Candidate failures:"]
        for kernel_id, reasons in self.failures.items():
            lines += [f"  {kernel_id}:", *(f"    - [{reason.code}] {reason.message}" for reason in reasons)]
        if not self.failures:
            lines.append("  no kernel is registered for it")
        return "\n".join([*lines, "Lift one of these, or switch fallback_enabled on to run the reference."])


class MeasurementError(LayerZeroError, ValueError):
    """A measurement that the performance database must not hold."""

    def __init__(self, kernel_id: str, problem: str) -> None:
        super().__init__(f"storing a measurement of {kernel_id}: {problem}. Leave out what could not be measured")


class CapabilitiesError(LayerZeroError, ValueError):
    """A capabilities descriptor that says something wrong, or too little."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"reading capabilities {name}: {problem}. Correct it (lz_compile/lowering/kernels.schema.json is its schema); "
            "its kernels are disabled until then"
        )


class FormulaError(LayerZeroError, ValueError):
    """A formula over sizes that cannot be evaluated."""

    def __init__(self, formula: str, problem: str) -> None:
        super().__init__(f"evaluating '{formula}': {problem}")


class KernelUnavailableError(LayerZeroError, ImportError):
    """A kernel is to be called whose library or adapter is not there; ``reason`` says why."""

    def __init__(self, kernel_id: str, reason: Reason) -> None:
        self.reason = reason
        super().__init__(
            f"calling {kernel_id}: expected a kernel that can be imported, received {reason}. "
            "Install what it needs, or choose another kernel"
        )


class RegistrationError(LayerZeroError, ValueError):
    """A kernel that cannot be registered as described."""

    def __init__(self, kernel_id: object, problem: str) -> None:
        super().__init__(f"registering kernel '{kernel_id}': {problem}")


class UnknownOperationError(LayerZeroError, ValueError):
    """An operation that there is not."""

    def __init__(self, doing: str, operation: object, valid: Sequence[str]) -> None:
        super().__init__(f"{doing}: {no_such('operation', operation, sorted(valid))}")


class DispatchTableError(LayerZeroError, ValueError):
    """A dispatch table, or a lock file of decisions, that cannot be followed here."""

    def __init__(self, path: object, problem: str, kind: str = "dispatch_table") -> None:
        again = "Save the decisions again (lz.save_decisions)" if kind == "lock" else "Solve again (lz.solve)"
        super().__init__(f"loading {'decisions' if kind == 'lock' else 'dispatch table'} {path}: {problem}. {again}")


class ArtifactError(LayerZeroError, ValueError):
    """A file of artifacts that is none, or is damaged."""

    def __init__(self, doing: str, expected: str, received: str, advice: str) -> None:
        super().__init__(f"{doing}: expected {expected}, received {received}. {advice}")


class SolveError(LayerZeroError, ValueError):
    """A model cannot be solved for the buckets that were asked for."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"solving a model: {problem}")


class ConstraintError(LayerZeroError, ValueError):
    """Constraints on tokens (masks, scores, logits) that contradict each other or their domain."""


class ArgumentError(LayerZeroError, ValueError):
    """An argument of a public function that it cannot take; ``function`` and ``argument`` are their names."""

    def __init__(self, function: str, argument: str, expected: str, received: object, advice: str = "") -> None:
        self.function, self.argument = function, argument
        text = f"lz.{function}: expected {argument} {expected}, received {received}"
        super().__init__(f"{text}. {advice}" if advice else text)

    def __reduce__(self) -> tuple[Any, ...]:
        """As errors of other processes travel: with the text that there is."""
        return _again, (type(self), self.function, self.argument, str(self))


class IntegrationError(LayerZeroError, ImportError):
    """A library that we are to be registered with is missing, or is another version than the one that is known."""

    def __init__(self, library: str, expected: str, received: object) -> None:
        super().__init__(
            f"registering with {library}: expected {library} {expected}, received {received}. Install a version that is known"
        )


class TokenArgumentError(ArgumentError, ConstraintError):
    """An argument of a function that draws tokens: constraints that it cannot take."""


def _again(kind: type[ArgumentError], function: str, argument: str, text: str) -> ArgumentError:
    found = kind.__new__(kind, text)
    found.function, found.argument = function, argument
    return found


class RanksDifferError(LayerZeroError, RuntimeError):
    """The ranks of a job run different versions, and ``ranks.versions`` is ``refuse``."""

    def __init__(self, differences: str) -> None:
        self.differences = differences
        super().__init__(
            f"agreeing with the ranks of this job: expected the same versions on all, received {differences}. "
            "Install the same everywhere, or set ranks.versions to 'lowest' or 'warn'"
        )


#: What is the user's to mend, and is raised whatever falls back otherwise.
USER_ERRORS = (OptionError, ConfigError, DispatchTableError, RewriteFailedError, RanksDifferError)
