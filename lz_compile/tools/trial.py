"""``validate`` tries a kernel on given inputs: whether it may run them, whether it does, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lz_compile.api.given import Given, check_operation, read
from lz_compile.errors import ArgumentError, TrialError, UnknownKernelError
from lz_compile.ground import health
from lz_compile.ground.isolation import isolated
from lz_compile.ground.records import Reason, first_line
from lz_compile.lowering import inductor, ops
from lz_compile.passes.proof.eager_proof import OperandTrial, UndefinedError, copied, tensors_of
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.policy.names import kernel_named


def validate(kernel_id: str, *tensors: Any, operation: str | None = None, **named: Any) -> tuple[bool, list[Reason]]:
    """Whether a kernel works for these inputs, and every reason why it does not.

    What its capabilities allow is run on the inputs and held against the op's definition in float64; where gradients are
    recorded and an input requires one, so are gradients. Figures are compared without dropout, and not where a row masks
    every key. Policy plays no part. A kernel that is not shipped with this package runs in a process of its own.

    Args:
        kernel_id: as ``list_kernels`` gives it, or with a variant of its op (``torch.sdpa.causal`` is ``torch.sdpa``, and
            causal); ``inductor`` is the definition, compiled by Inductor.
        tensors: operands of the kernel's op, in the op's order.
        operation: for ``inductor``, of which operation (by default attention); of other kernels, the variant.
        named: other operands by name, and the op's attributes, as of :func:`lz_compile.which`.

    Shapes:
        those of each op are in docs/ops.md, and in every error.

    Raises:
        UndefinedError: the op's definition cannot be computed for these operands.
        UnknownKernelError: there is no such kernel.
        UnknownOperationError: there is no such operation.
        ArgumentError: an operand or attribute is unknown or missing, or does not fit.
    """
    spec, operation = kernel_asked_for(kernel_id, operation)
    given = read("validate", operation, tensors, named)
    reasons = _against(spec, given)
    if not reasons:
        reasons = _try(spec, given)
    return not reasons, reasons


def kernel_asked_for(named: str, operation: str | None) -> tuple[KernelSpec, str]:
    """The kernel of a name, and the operation that it is asked for.

    Raises:
        UnknownKernelError: there is no such kernel.
        UnknownOperationError: there is no such operation.
    """
    if operation is not None:
        check_operation("calling lz.validate", operation)
    if not isinstance(named, str):
        raise ArgumentError("validate", "kernel_id", "as the name of a kernel", repr(named))
    kernel_id = kernel_named(named)
    having = [op for op in ops.names() if kernel_id in kernels(op)]
    wanted = None if operation is None else operation.partition(".")[0]
    op = wanted or ("attention" if "attention" in having else having[0] if having else "attention")
    if op not in having:
        known = [op] if wanted else ops.names()
        valid = sorted({each for name in known for each in kernels(name)})
        raise UnknownKernelError(op if wanted else "any op", named, valid, doing="validating a kernel for")
    spec = kernels(op)[kernel_id]
    if named.startswith(f"{kernel_id}."):
        return spec, operation or f"{op}{named.removeprefix(kernel_id)}"
    return spec, operation or (spec.operation if spec.operation.startswith(f"{op}.") else op)


def _against(spec: KernelSpec, given: Given) -> list[Reason]:
    reasons = spec.check(given.context)
    retired = health.retired(spec.kernel_id)
    if retired is not None:  # calling it would run its fallback
        reasons.append(retired)
    missing = None if reasons else spec.load(waits=True)
    return reasons if missing is None else [missing]


def _try(spec: KernelSpec, given: Given) -> list[Reason]:
    """Run the kernel and compare; what speaks against it."""
    operands = given.x.given()
    trial = OperandTrial.of(spec, given.op, given.attrs, operands)
    operands = {name: copied(each) for name, each in operands.items()}
    if spec.call is None:
        trial = replace(trial, compiled=_definition(trial, operands))
    try:
        with isolated():
            found = list(trial.faults(operands))
    except UndefinedError:  # the operands are to blame
        raise
    except TrialError as error:
        return [Reason("KERNEL_FAILED", f"{spec.kernel_id} {first_line(error.what)}")]
    except Exception as error:  # noqa: BLE001 a kernel that fails is what is asked for
        return [Reason("KERNEL_FAILED", f"{spec.kernel_id} raised {type(error).__name__}: {first_line(error)}")]
    return [Reason("VALIDATION_FAILED", f"{spec.kernel_id}: {each}") for each in found]


def _definition(trial: OperandTrial, operands: Mapping[str, Any]) -> Callable[..., Any]:
    """The op's definition as Inductor compiles it, in the place of a kernel."""
    module, names = ops.module(trial.op), list(tensors_of(operands))

    def definition(*tensors: Any) -> Any:
        return module.reference(module.Operands(**{**operands, **dict(zip(names, tensors, strict=True))}), trial.attrs)

    inputs = [copied(each).requires_grad_(name in trial.wants) for name, each in tensors_of(operands).items()]
    compiled = inductor.compile_apart(definition, inputs)
    return lambda x, attrs: compiled(*x.tensors)
