"""One kernel on an op's operands, held against the op's definition in float64, gradients included.

For calls that there is no graph of: eager ones (``eager_proof.py``), and those of ``lz.validate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.ground.isolation import Outside
from lz_compile.lowering import ops
from lz_compile.passes.proof.agreement import TOLERANCE, doubled, elementwise
from lz_compile.passes.proof.sides import ProofRun, gradients_of, is_same, lies_in, run_kernel

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.kernel import KernelSpec


class UndefinedError(Exception):
    """The op's definition failed: the kernel is not to blame."""


@dataclass(frozen=True)
class OperandTrial:
    """A kernel and what is asked of it; ``wants`` are the operands of which gradients are wanted.

    ``compiled`` runs in the place of a kernel that has no function.

    Draws that no seed decides are left out: figures could not be compared.
    """

    kernel: KernelSpec
    op: str
    attrs: Any
    wants: tuple[str, ...] = ()
    compiled: Callable[..., Any] | None = None

    @classmethod
    def of(cls, kernel: KernelSpec, op: str, attrs: Any, operands: Mapping[str, Any]) -> OperandTrial:
        """With gradients of the operands that require one, where gradients are recorded."""
        named = tensors_of(operands).items() if torch.is_grad_enabled() else ()
        return cls(kernel, op, attrs.deterministic(), tuple(name for name, each in named if each.requires_grad))

    def faults(self, operands: Mapping[str, Any], outside: Outside | None = None) -> Iterator[str]:
        """What is wrong with the kernel on operands, which are not changed; in the modes of ``outside``, if any.

        Raises:
            UndefinedError: the op's definition raises.
            TrialError: the kernel failed, and something else gave the result.
            Exception: what the kernel raises.
        """
        call, module = self.compiled or self.kernel.call, ops.module(self.op)
        assert call is not None, f"{self.kernel.kernel_id} cannot be called eagerly"
        definition = partial(_definition, module)
        devices = {each.device for each in tensors_of(operands).values()}
        ours = run_kernel(self.kernel, devices, partial(self._run, call, operands, outside))
        wide = {name: doubled(each) for name, each in operands.items()}
        try:
            given = self._run(definition, operands, outside)
            truth = replace(self, attrs=_in_float64(self.attrs))._run(definition, wide)
        except Exception as error:
            raise UndefinedError(f"{type(error).__name__}: {error}") from error
        if ours.written:
            yield f"writes into {' and '.join(ours.written)}"
        if ours.is_view:
            yield "gives a result that lies in the memory of an input"
        count = len(truth.values) - len(self.wants)
        names = ["output"] if count == 1 else [f"output {number}" for number in range(count)]
        names += [f"gradient of {name}" for name in self.wants]
        for name, exact, base, own in zip(names, truth.values, given.values, ours.values, strict=True):
            text = _difference(exact, base, own)
            if text:
                yield f"{name} {text}"

    def _run(self, call: Callable[..., Any], operands: Mapping[str, Any], outside: Outside | None = None) -> ProofRun:
        """Results, and gradients of what wants one; in float64, which knows no autocast, without ``outside``."""
        given = {name: copied(each) for name, each in operands.items()}
        leaves = [given[name].requires_grad_() for name in self.wants]
        with nullcontext() if outside is None else outside.entered(), torch.set_grad_enabled(bool(leaves)):
            found = call(ops.module(self.op).Operands(**given), self.attrs)
        outputs = [each for each in (found if isinstance(found, (tuple, list)) else [found]) if each is not None]
        values = [each.detach() for each in outputs]
        values += gradients_of(outputs, leaves) if leaves else []
        tensors = tensors_of(given)
        written = [name for name, each in tensors.items() if not is_same(each.detach(), operands[name])]
        return ProofRun(values, written, lies_in(outputs, tensors.values()))


def tensors_of(operands: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The operands that are tensors."""
    return {name: each for name, each in operands.items() if isinstance(each, torch.Tensor)}


def copied(value: Any) -> Any:
    """A tensor with the same strides, so that nothing of the caller's can be changed, without a gradient."""
    return value.detach().clone(memory_format=torch.preserve_format) if isinstance(value, torch.Tensor) else value


def _definition(op: ModuleType, x: Any, attrs: Any) -> Any:
    """The op's own, in parts where it can be too large for memory; rows without keys are those in which kernels differ."""
    if hasattr(attrs, "masked_rows") and attrs.masked_rows != "fill":
        attrs = replace(attrs, masked_rows="nan")
    return getattr(op, "reference_in_parts", op.reference)(x, attrs)


def _in_float64(attrs: Any) -> Any:
    """The attributes of the same in float64."""
    values = {each.name: getattr(attrs, each.name) for each in fields(attrs)}
    wide = [name for name, each in values.items() if isinstance(each, torch.dtype) and each.is_floating_point]
    return replace(attrs, **dict.fromkeys(wide, torch.float64))


def _difference(truth: torch.Tensor, given: torch.Tensor, ours: torch.Tensor) -> str:
    """How a result differs from the definition's, which nobody asks for where that is NaN; empty where it does not."""
    expected, received = (f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (given, ours))
    if expected != received:
        return f"is {received}, expected {expected}"
    known = ~(truth.isnan() | given.isnan())
    zero = torch.zeros((), device=truth.device)
    truth, given, ours = (torch.where(known, each, zero.to(each.dtype)) for each in (truth, given, ours))
    tolerance = TOLERANCE.get(given.dtype, 0.0)
    error, source_error, is_near = elementwise(truth, given, ours, tolerance, True, True, False)
    if bool(is_near.all()):
        return ""
    wrong, undefined = int((~is_near).sum()), int((~is_near & ~ours.isfinite()).sum())
    return (
        f"is off by {error:.3g} where PyTorch is off by {source_error:.3g} (tolerance {tolerance:g}); "
        f"{wrong} of {truth.numel()} elements are wrong, {undefined} of them not finite"
    )
