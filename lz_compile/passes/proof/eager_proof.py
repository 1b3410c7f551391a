"""Prove a kernel that is not shipped with this package, before an eager call gives its result away.

What compiled graphs do with their matches (``validate.py``), for a call that there is no graph of: the kernel runs apart, on
copies of the call's own operands and on longer ones, and is held against the op's definition in float64, gradients included.
Verdicts hold for lengths up to the next power of two, and are remembered where those of graphs are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lz_compile.errors import KernelExecutionError, TrialError
from lz_compile.ground import events, health, hooks, machine
from lz_compile.ground.isolation import Outside, isolated
from lz_compile.ground.records import Reason, first_line
from lz_compile.ground.store import Store
from lz_compile.lowering import ops
from lz_compile.passes.proof.agreement import TOLERANCE, Special, doubled, elementwise, is_same
from lz_compile.passes.proof.cases import ProofRun, gradients_of, lies_in, run_kernel
from lz_compile.passes.proof.validate import Validation, recalled

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
    error, source_error, is_near = elementwise(truth, given, ours, tolerance, Special(True, True))
    if bool(is_near.all()):
        return ""
    wrong, undefined = int((~is_near).sum()), int((~is_near & ~ours.isfinite()).sum())
    return (
        f"is off by {error:.3g} where PyTorch is off by {source_error:.3g} (tolerance {tolerance:g}); "
        f"{wrong} of {truth.numel()} elements are wrong, {undefined} of them not finite"
    )


#: By name, in the op's canonical layout; None for those that there are not.
Operands: TypeAlias = Mapping[str, Any]


def why_not(kernel: KernelSpec, op: str, attrs: Any, operands: Operands) -> Reason | None:
    """Why a kernel may not run an eager call with these operands; None where it may, as any may that is shipped.

    Raises:
        KernelExecutionError: it failed, and falling back is switched off.
    """
    if kernel.is_shipped:
        return None
    tensors = [each for each in operands.values() if isinstance(each, torch.Tensor)]
    if any(each.is_cuda for each in tensors) and torch.cuda.is_current_stream_capturing():
        return Reason(
            "UNPROVEN", f"{kernel.kernel_id} was never run, and while a CUDA graph is captured it cannot be tried"
        )
    problem = _Problem(OperandTrial.of(kernel, op, attrs, operands), dict(operands))
    try:
        verdict = recalled(problem.key, Store("validation") if kernel.is_reproducible else None, problem.verdict)
    except UndefinedError as error:
        return _refused("UNPROVEN", op, kernel, f"what it should give cannot be computed ({first_line(error)})", error)
    except TrialError as error:
        return _failed(op, kernel, error, error.what)
    except Exception as error:  # noqa: BLE001  a kernel that cannot be tried apart may raise anything; the next one is tried
        return _failed(op, kernel, error, f"raised {type(error).__name__}: {error}")
    return None if verdict.ok else _refused("VALIDATION_FAILED", op, kernel, verdict.reason)


def _failed(op: str, kernel: KernelSpec, error: Exception, text: str) -> Reason:
    """The kernel is retired, unless memory was full."""
    if not hooks.falls_back():
        raise KernelExecutionError(kernel.kernel_id, error) from error
    reason = _refused("KERNEL_FAILED", op, kernel, text, error)
    if not health.is_out_of_memory(RuntimeError(text)):
        health.retire(kernel.kernel_id, error)
    return reason


def _refused(code: str, op: str, kernel: KernelSpec, text: str, error: Exception | None = None) -> Reason:
    message = f"{kernel.kernel_id} runs no eager {op} like this: {first_line(text)}"
    events.record(code, message, error)
    return Reason(code, message)


@dataclass(frozen=True)
class _Problem:
    """A trial on the operands of a call, which are not changed."""

    trial: OperandTrial
    operands: dict[str, Any]

    @property
    def key(self) -> str:
        """A hash of everything that the verdict depends on; of lengths, their bounds."""
        trial = self.trial
        lines = [f"eager {trial.op} {trial.kernel.identity} {trial.attrs!r} {Outside.now()!r}"]
        lines += sorted({machine.proven_on(each.device) for each in tensors_of(self.operands).values()})
        lengths = self._bounds
        for name, each in self.operands.items():
            lines.append(
                f"{name} {each if not isinstance(each, torch.Tensor) else self._described(name, each, lengths)}"
            )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def verdict(self) -> Validation:
        """Of the call itself, and of longer ones."""
        count = 0
        with isolated() as outside:
            for count, (name, operands) in enumerate(self._cases(), 1):
                for fault in self.trial.faults(operands, outside):
                    about, _, rest = fault.partition(" is off by ")
                    reason = f"{about} with {name} is off by {rest}" if rest else f"it {fault}, with {name}"
                    return Validation(ok=False, cases=count, reason=reason)
        return Validation(ok=True, cases=count)

    def _described(self, name: str, tensor: torch.Tensor, lengths: Mapping[str, int]) -> str:
        shape = [lengths.get(dim, size) if size > 1 else size for dim, size in self._named(name, tensor)]
        wants = name in self.trial.wants
        is_dense = [tensor.stride(-1) == 1 if tensor.dim() else True, tensor.is_contiguous()]
        return f"{shape} {tensor.dtype} {tensor.device.type} {wants} {is_dense}"

    def _named(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, int]]:
        """The dimensions of an operand with their sizes, those first that all operands of that name have."""
        dims = [each.removesuffix("|1") for each in ops.module(self.trial.op).SHAPES[name].split()]
        missing = ["?"] * (tensor.dim() - len(dims))
        return zip([*missing, *dims][len(dims) + len(missing) - tensor.dim() :], tensor.shape, strict=True)

    @property
    def _bounds(self) -> dict[str, int]:
        """Up to which lengths the verdict holds: the next powers of two."""
        sizes: dict[str, int] = {}
        for name, each in self.operands.items():
            if isinstance(each, torch.Tensor):
                for dim, size in self._named(name, each):
                    sizes[dim] = max(size, sizes.get(dim, 0))
        lengths = getattr(ops.module(self.trial.op), "LENGTHS", ())
        return {dim: 1 << (size - 1).bit_length() for dim, size in sizes.items() if dim in lengths and size > 1}

    def _cases(self) -> Iterator[tuple[str, dict[str, Any]]]:
        given = {name: copied(each) for name, each in self.operands.items()}
        yield "the call's own operands", given
        longer = {
            name: self._longer(name, each) if isinstance(each, torch.Tensor) else each for name, each in given.items()
        }
        if any(each.shape != given[name].shape for name, each in longer.items() if isinstance(each, torch.Tensor)):
            yield "lengths of " + ", ".join(map(str, self._bounds.values())), longer
        varied = {name: varied_like(name, each) for name, each in given.items() if _is_constant(each)}
        if varied:  # zeros and full masks, as in warm-ups, show nothing of what is done with them
            yield "others in place of constant operands", {**given, **varied}

    def _longer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same over again up to the bounds, so that it means what it did; numbers are varied a little."""
        found = tensor
        for place, (dim, size) in enumerate(list(self._named(name, tensor))):
            if size > 1 and self._bounds.get(dim, size) > size:
                found = found.index_select(place, torch.arange(self._bounds[dim], device=tensor.device) % size)
        if found is not tensor and found.is_floating_point():
            found = found * (1 - 0.1 * torch.rand(found.shape, device=found.device)).to(found.dtype)
        return found


#: Operands that are no numbers of any size: what they are at least, and by how much more at most.
_RANGES = {
    "decay": (0.0, 1.0),
    "alpha": (0.0, 1.0),
    "temperature": (0.5, 1.0),
    "top_p": (0.1, 0.8),
    "min_p": (0.01, 0.1),
}


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1 and bool((value == value.flatten()[0]).all())


def varied_like(name: str, like: torch.Tensor) -> torch.Tensor:
    """Random elements that such an operand may have; the first key or token of a row is never masked."""
    made = torch.empty_like(like)
    if like.is_floating_point():
        least, width = _RANGES.get(name, (0.0, 0.0))
        return made.uniform_(least, least + width) if width else made.normal_()
    if like.dtype == torch.bool:
        made.bernoulli_(0.5)[..., 0] = True
    elif name == "bitmask":
        made.random_(-(2**31), 2**31)[..., 0] |= 1
    elif name == "top_k":
        made.random_(1, 5)
    else:  # numbers of rollouts, seeds
        made.copy_(like)
    return made
