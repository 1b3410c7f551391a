"""``validate`` tries a kernel on given inputs: whether it may run them, whether it does, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lz_compile.errors import TrialError, UnknownKernelError
from lz_compile.lowering import inductor
from lz_compile.lowering.ops.attention import AttentionAttrs, reference
from lz_compile.passes.proof.agreement import SLACK, TOLERANCE
from lz_compile.passes.proof.sides import is_same, tried
from lz_compile.reasons import Reason
from lz_compile.runtime import events, health
from lz_compile.runtime.context import SelectionContext, from_tensors
from lz_compile.runtime.isolation import isolated
from lz_compile.runtime.kernel import KernelSpec
from lz_compile.runtime.measure import synchronise
from lz_compile.runtime.names import kernel_named
from lz_compile.runtime.registry import kernels


def validate(
    kernel_id: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    layout: str = "BHSD",
) -> tuple[bool, list[Reason]]:
    """Whether a kernel works for these inputs, and every reason why it does not.

    What its capabilities allow is run on the inputs and held against the op's definition in float64; where gradients are
    recorded and an input requires one, so are gradients. Figures are compared without dropout, and not where a row masks
    every key. Policy plays no part. A kernel that is not shipped with this package runs in a process of its own.

    Args:
        kernel_id: as ``list_kernels`` gives it (``torch.sdpa.causal`` is ``torch.sdpa``, and causal); ``inductor`` is the
            definition, compiled by Inductor.
        query: ``[B, Hq, Sq, D]``, or ``[B, Sq, Hq, D]`` in layout ``BSHD``.
        key: ``[B, Hk, Sk, D]``, or ``[B, Sk, Hk, D]``.
        value: ``[B, Hk, Sk, E]``, or ``[B, Sk, Hk, E]``.
        causal: query ``i`` sees the keys up to ``i`` only.
        mask: boolean (True keeps) or additive, broadcastable to ``[B, Hq, Sq, Sk]``.
        scale: of the scores, by default ``D ** -0.5``.
        dropout_p: probability of dropout.
        layout: ``BHSD`` or ``BSHD``.

    Raises:
        UnknownKernelError: there is no such kernel.
        ValueError: the tensors are no attention's, or the layout has another name.
    """
    kernel_id, name = kernel_named(kernel_id), kernel_id
    causal = causal or name == f"{kernel_id}.causal"
    context = from_tensors(query, key, value, causal=causal, mask=mask, scale=scale, dropout_p=dropout_p, layout=layout)
    specs = kernels(context.op)
    if kernel_id not in specs:
        raise UnknownKernelError(context.op, kernel_id, list(specs), doing="validating a kernel for")
    reasons = _against(specs[kernel_id], context)
    if not reasons:
        needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        with isolated():
            inputs = _inputs((query, key, value), mask, scale, causal, layout, needs_grad)
            reasons = _try(specs[kernel_id], inputs)
    return not reasons, reasons


def _against(spec: KernelSpec, context: SelectionContext) -> list[Reason]:
    reasons = spec.check(context)
    retired = health.retired(spec.kernel_id)
    if retired is not None:  # calling it would run its fallback
        reasons.append(retired)
    missing = None if reasons else spec.load()
    return reasons if missing is None else [missing]


@dataclass(frozen=True)
class _Inputs:
    """Canonical operands; ``mask`` is boolean or additive."""

    tensors: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    attrs: AttentionAttrs
    needs_grad: bool

    @property
    def masks(self) -> dict[str, torch.Tensor]:
        """The mask by the name of its operand."""
        return {} if self.mask is None else {"mask" if self.attrs.has_mask else "bias": self.mask}

    def copied(self) -> _Inputs:
        """Copies, also of the masks."""
        mask = None if self.mask is None else self.mask.clone(memory_format=torch.preserve_format)
        return _Inputs(tuple(map(_copy, self.tensors)), mask, self.attrs, self.needs_grad)

    def as_float64(self) -> _Inputs:
        mask = self.mask if self.mask is None or self.attrs.has_mask else self.mask.detach().double()
        tensors = tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in self.tensors)
        return _Inputs(tensors, mask, replace(self.attrs, score_dtype=torch.float64), self.needs_grad)


def _inputs(
    tensors: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    layout: str,
    needs_grad: bool,
) -> _Inputs:
    query, key, value = (each.transpose(1, 2) if layout == "BSHD" else each for each in map(_copy, tensors))
    scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask is not None:
        try:
            mask = mask.detach().expand(scores)
        except RuntimeError as error:
            text = f"validating a kernel: expected a mask that broadcasts to {scores}, received {tuple(mask.shape)}"
            raise ValueError(text) from error
    is_bool = mask is not None and mask.dtype == torch.bool
    attrs = AttentionAttrs(
        scale=scale,
        is_causal=causal,
        has_mask=is_bool,
        has_bias=mask is not None and not is_bool,
        bias_is_finite=mask is not None and not is_bool and bool(mask.isfinite().all()),
        enable_gqa=query.shape[1] != key.shape[1],
        score_dtype=query.dtype,
    )
    return _Inputs((query, key, value), mask, attrs, needs_grad)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same strides, so that gradients end here and nothing of the caller's can be changed."""
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def _try(spec: KernelSpec, inputs: _Inputs) -> list[Reason]:
    """Run the kernel and compare; what speaks against it."""
    with events.collect() as happened:
        try:
            ours, written = _run_kernel(spec, inputs)
        except TrialError as error:
            return [Reason("KERNEL_FAILED", f"{spec.kernel_id} {_first_line(error.what)}")]
        except Exception as error:  # noqa: BLE001 a kernel that fails is what is asked for
            return [Reason("KERNEL_FAILED", f"{spec.kernel_id} raised {type(error).__name__}: {_first_line(error)}")]
    if written:
        return [Reason("VALIDATION_FAILED", f"{spec.kernel_id} writes into {' and '.join(written)}")]
    failures = [Reason(event.code, event.message) for event in happened if event.code in health.FAILURE_EVENTS]
    if failures:
        return failures
    exact = inputs.as_float64()
    truth = _evaluate(_by_heads(exact), exact)
    given = _evaluate(_by_heads(inputs), inputs)
    names = ("output", "gradient of query", "gradient of key", "gradient of value")
    found = [_difference(spec.kernel_id, *each) for each in zip(names, truth, given, ours, strict=False)]
    return [reason for reason in found if reason is not None]


def _run_kernel(spec: KernelSpec, inputs: _Inputs) -> tuple[list[torch.Tensor], list[str]]:
    """What a kernel gives for copies of the inputs, and which of these it writes into; apart if it is not shipped.

    Raises:
        TrialError: it failed in a process of its own.
        Exception: what it raises.
    """

    def run() -> tuple[list[torch.Tensor], list[str]]:
        copies = inputs.copied()
        found = _evaluate(_function(spec, copies), copies)
        synchronise(copies.tensors[0].device)
        before = {**dict(zip(("query", "key", "value"), inputs.tensors, strict=True)), **inputs.masks}
        after = (*copies.tensors, *copies.masks.values())
        return found, [
            name for (name, given), own in zip(before.items(), after, strict=True) if not is_same(given, own)
        ]

    return run() if spec.is_shipped else tried(spec, {inputs.tensors[0].device}, run)


def _function(spec: KernelSpec, inputs: _Inputs) -> Callable[..., torch.Tensor]:
    if spec.call is not None:
        call = spec.call
        return lambda *tensors: call(*tensors, **inputs.masks, attrs=inputs.attrs)

    def definition(*tensors: torch.Tensor) -> torch.Tensor:
        return reference(*tensors, **inputs.masks, attrs=inputs.attrs)

    return inductor.compile_apart(definition, inputs.tensors)


def _by_heads(inputs: _Inputs) -> Callable[..., torch.Tensor]:
    """The definition, one key head at a time: in float64, the scores of all heads may not fit into memory."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        parts = []
        for head in range(key.shape[1]):
            queries, keys = slice(head * groups, (head + 1) * groups), slice(head, head + 1)
            masks = {name: mask[:, queries] for name, mask in inputs.masks.items()}
            parts.append(reference(query[:, queries], key[:, keys], value[:, keys], **masks, attrs=inputs.attrs))
        return torch.cat(parts, 1)

    return run


def _evaluate(function: Callable[..., Any], inputs: _Inputs) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value where they are wanted (a weighted sum of the output's)."""
    with torch.set_grad_enabled(inputs.needs_grad):
        output = function(*inputs.tensors)
        if isinstance(output, (tuple, list)):
            output = output[0]
    if not inputs.needs_grad:
        return [output]
    weight = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).reshape(output.shape).to(output.dtype)
    leaves = [tensor for tensor in inputs.tensors if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, leaves, weight))
    gradients = [next(found) if tensor.requires_grad else torch.zeros_like(tensor) for tensor in inputs.tensors]
    return [output.detach(), *gradients]


def _difference(
    kernel_id: str, name: str, truth: torch.Tensor, given: torch.Tensor, ours: torch.Tensor
) -> Reason | None:
    """Why a result is not the definition's, with figures; ``given`` is the definition in the inputs' own dtype."""
    expected, received = (f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (given, ours))
    if expected != received:
        return Reason("VALIDATION_FAILED", f"{kernel_id}: {name} is {received}, expected {expected}")
    tolerance = TOLERANCE.get(given.dtype, TOLERANCE[torch.bfloat16])
    given, ours = given.double(), ours.double()
    is_defined = ~truth.isnan()
    source_error = _largest((given - truth).abs()[is_defined])
    error = (ours - truth).abs()
    is_near = (error <= SLACK * source_error + tolerance * (1 + truth.abs())) | (ours == truth) | ~is_defined
    if bool(is_near.all()):
        return None
    wrong = int((~is_near).sum())
    undefined = int((~ours.isfinite() & is_defined).sum())
    text = (
        f"{kernel_id}: {name} is off by {_largest(error[is_defined]):.3g} where PyTorch is off by {source_error:.3g} "
        f"(tolerance {tolerance:g}); {wrong} of {truth.numel()} elements are wrong, {undefined} of them not finite"
    )
    return Reason("VALIDATION_FAILED", text)


def _largest(error: torch.Tensor) -> float:
    finite = error[error.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _first_line(error: Exception | str) -> str:
    return str(error).strip().partition("\n")[0]
