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
from lz_compile.ground.reasons import Reason
from lz_compile.ground.store import Store
from lz_compile.lowering import ops
from lz_compile.lowering.ops import scan
from lz_compile.passes.proof.agreement import TOLERANCE, compare
from lz_compile.passes.proof.sides import ProofRun, is_same, run_kernel
from lz_compile.passes.proof.validate import Validation, recalled

if TYPE_CHECKING:
    from lz_compile.runtime.kernels.kernel import KernelSpec

#: By name, in the op's canonical layout; None for those that there are not.
Operands: TypeAlias = Mapping[str, Any]

_N = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seeds"), "N")
#: The dimensions of operands, and which of them are lengths: they differ from call to call, and are proven up to a bound.
_DIMS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "attention": ({"query": "BHQD", "key": "BGKD", "value": "BGKE", "mask": "BHQK", "bias": "BHQK"}, "QK"),
    "norm": ({"input": "ND", "weight": "D", "bias": "D"}, "N"),
    "sampling": ({"logits": "NV", "bitmask": "NW", "bias": "NV", **_N}, "N"),
    "scan": (scan.DIMS, "T"),
}


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
    plain = attrs.deterministic() if hasattr(attrs, "deterministic") else attrs
    problem = _Problem(kernel, op, plain, dict(operands), torch.is_grad_enabled())
    try:
        verdict = recalled(problem.key, Store("validation") if kernel.is_reproducible else None, problem.verdict)
    except _UndefinedError as error:
        return _refused("UNPROVEN", op, kernel, f"what it should give cannot be computed ({error})")
    except TrialError as error:
        return _failed(op, kernel, error, error.what)
    except Exception as error:  # noqa: BLE001  a kernel that cannot be tried apart may raise anything; the next one is tried
        return _failed(op, kernel, error, f"raised {type(error).__name__}: {error}")
    return None if verdict.ok else _refused("VALIDATION_FAILED", op, kernel, verdict.reason)


class _UndefinedError(Exception):
    """The op's definition failed: the kernel is not to blame."""


def _failed(op: str, kernel: KernelSpec, error: Exception, text: str) -> Reason:
    """The kernel is retired, unless memory was full."""
    if not hooks.falls_back():
        raise KernelExecutionError(kernel.kernel_id, error) from error
    reason = _refused("KERNEL_FAILED", op, kernel, text)
    if not health.is_out_of_memory(RuntimeError(text)):
        health.retire(kernel.kernel_id, error)
    return reason


def _refused(code: str, op: str, kernel: KernelSpec, text: str) -> Reason:
    message = f"{kernel.kernel_id} runs no eager {op} like this: {text.strip().partition(chr(10))[0]}"
    events.record(code, message)
    return Reason(code, message)


@dataclass(frozen=True)
class _Problem:
    """One kernel on operands, which are not changed."""

    kernel: KernelSpec
    op: str
    attrs: Any
    operands: dict[str, Any]
    needs_grad: bool

    @property
    def key(self) -> str:
        """A hash of everything that the verdict depends on; of lengths, their bounds."""
        lines = [f"eager {self.op} {self.kernel.identity} {self.attrs!r} {Outside.now()!r}"]
        lines += sorted({machine.proven_on(device) for device in self._devices})
        lengths = self._bounds
        for name, each in self.operands.items():
            lines.append(
                f"{name} {each if not isinstance(each, torch.Tensor) else self._described(name, each, lengths)}"
            )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def verdict(self) -> Validation:
        """Of the call itself, and of longer ones."""
        total = Validation(ok=True)
        with isolated() as outside:
            for name, operands in self._cases():
                total = self._case(total, name, operands, outside)
                if not total.ok:
                    break
        return total

    @property
    def _devices(self) -> set[torch.device]:
        return {each.device for each in self.operands.values() if isinstance(each, torch.Tensor)}

    def _described(self, name: str, tensor: torch.Tensor, lengths: Mapping[str, int]) -> str:
        shape = [lengths.get(dim, size) if size > 1 else size for dim, size in self._named(name, tensor)]
        wants = self.needs_grad and tensor.requires_grad
        is_dense = [tensor.stride(-1) == 1 if tensor.dim() else True, tensor.is_contiguous()]
        return f"{shape} {tensor.dtype} {tensor.device.type} {wants} {is_dense}"

    def _named(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, int]]:
        """The dimensions of an operand with their sizes, those first that all operands of that name have."""
        dims = _DIMS.get(self.op, ({}, ""))[0].get(name, "")
        return zip(dims.rjust(tensor.dim(), "?")[-tensor.dim() :] if tensor.dim() else "", tensor.shape, strict=True)

    @property
    def _bounds(self) -> dict[str, int]:
        """Up to which lengths the verdict holds: the next powers of two."""
        sizes: dict[str, int] = {}
        for name, each in self.operands.items():
            if isinstance(each, torch.Tensor):
                for dim, size in self._named(name, each):
                    sizes[dim] = max(size, sizes.get(dim, 0))
        lengths = _DIMS.get(self.op, ({}, ""))[1]
        return {dim: 1 << (size - 1).bit_length() for dim, size in sizes.items() if dim in lengths and size > 1}

    def _cases(self) -> Iterator[tuple[str, dict[str, Any]]]:
        given = {
            name: each.detach().clone(memory_format=torch.preserve_format) if isinstance(each, torch.Tensor) else each
            for name, each in self.operands.items()
        }
        yield "the call's own operands", given
        longer = {
            name: self._longer(name, each) if isinstance(each, torch.Tensor) else each for name, each in given.items()
        }
        if any(each.shape != given[name].shape for name, each in longer.items() if isinstance(each, torch.Tensor)):
            yield "lengths of " + ", ".join(map(str, self._bounds.values())), longer
        varied = {name: _varied(name, each) for name, each in given.items() if _is_constant(each)}
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

    # ---- one case ----------------------------------------------------------------------------------------------------

    def _case(self, total: Validation, name: str, operands: dict[str, Any], outside: Outside) -> Validation:
        call, module = self.kernel.call, ops.module(self.op)
        assert call is not None, f"{self.kernel.kernel_id} cannot be called eagerly"
        definition = partial(_definition, module)
        ours = run_kernel(self.kernel, self._devices, partial(self._run, call, operands, outside))
        wide = {key: _wide(each) for key, each in operands.items()}
        try:
            given = self._run(definition, operands, outside)
            truth = replace(self, attrs=_in_float64(self.attrs))._run(definition, wide)
        except Exception as error:
            raise _UndefinedError(f"{type(error).__name__}: {error}") from error
        found = replace(total, cases=total.cases + 1)
        if ours.written:
            return replace(found, ok=False, reason=f"it writes into {', '.join(ours.written)}, with {name}")
        if ours.is_view:
            return replace(found, ok=False, reason=f"its result lies in the memory of an input, with {name}")
        for number, (exact, base, own) in enumerate(zip(truth.values, given.values, ours.values, strict=True)):
            text = _difference(exact, base, own)
            if text:
                return replace(found, ok=False, reason=f"value {number} with {name} {text}")
        return found

    def _run(self, call: Callable[..., Any], operands: dict[str, Any], outside: Outside | None = None) -> ProofRun:
        """Results, and gradients of the operands that want one; in float64, which knows no autocast, without ``outside``."""
        given = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in operands.items()}
        leaves = [
            given[name].requires_grad_()
            for name, each in self.operands.items()
            if isinstance(each, torch.Tensor) and each.requires_grad and self.needs_grad
        ]
        with nullcontext() if outside is None else outside.entered(), torch.set_grad_enabled(bool(leaves)):
            found = call(ops.module(self.op).Operands(**given), self.attrs)
        outputs = [each for each in (found if isinstance(found, (tuple, list)) else [found]) if each is not None]
        values = [each.detach() for each in outputs]
        reached = [each for each in outputs if each.requires_grad]
        if leaves:
            ones = [
                torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape).to(each) for each in reached
            ]
            found = torch.autograd.grad(reached, leaves, ones, allow_unused=True, materialize_grads=True)
            values += found
        tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        written = [name for name, each in tensors.items() if not is_same(each.detach(), operands[name])]
        memory = {each.untyped_storage().data_ptr() for each in tensors.values()}
        is_view = any(each.numel() and each.untyped_storage().data_ptr() in memory for each in outputs)
        return ProofRun(values, written, is_view)


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


def _varied(name: str, like: torch.Tensor) -> torch.Tensor:
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


def _definition(op: ModuleType, x: Any, attrs: Any) -> Any:
    """The op's own, in parts where it can be too large for memory; rows without keys are those in which kernels differ."""
    if hasattr(attrs, "masked_rows"):
        attrs = replace(attrs, masked_rows="nan")
    return getattr(op, "reference_in_parts", op.reference)(x, attrs)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _in_float64(attrs: Any) -> Any:
    """The attributes of the same in float64."""
    values = {each.name: getattr(attrs, each.name) for each in fields(attrs)}
    wide = [name for name, each in values.items() if isinstance(each, torch.dtype) and each.is_floating_point]
    return replace(attrs, **dict.fromkeys(wide, torch.float64))


def _difference(truth: torch.Tensor, given: torch.Tensor, ours: torch.Tensor) -> str:
    """How a result differs from the definition's, which nobody asks for where that is NaN; empty where it does not."""
    if (ours.shape, ours.dtype) != (given.shape, given.dtype):
        return f"is {tuple(ours.shape)} {ours.dtype}, expected {tuple(given.shape)} {given.dtype}"
    known = ~(truth.isnan() | given.isnan())
    zero = torch.zeros((), device=truth.device)
    truth, given, ours = (torch.where(known, each, zero.to(each.dtype)) for each in (truth, given, ours))
    error, source_error, is_near = compare(truth, given, ours, TOLERANCE.get(given.dtype, 0.0), True, True, False)
    return "" if is_near else f"is off by {error:.3g} where the definition is off by {source_error:.3g}"
