"""``validate`` tries a kernel on given inputs: whether it may run them, whether it does, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lz_compile.errors import TrialError, UnknownKernelError
from lz_compile.ground import events, health
from lz_compile.ground.isolation import isolated
from lz_compile.ground.reasons import Reason
from lz_compile.lowering import inductor
from lz_compile.lowering.ops.attention import AttentionAttrs, Operands, reference, reference_in_parts
from lz_compile.passes.proof.agreement import SLACK, TOLERANCE
from lz_compile.passes.proof.sides import is_same, tried
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.timing import synchronise
from lz_compile.runtime.policy.names import kernel_named
from lz_compile.runtime.problem.context import SelectionContext, from_tensors


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
            turned = (each.transpose(1, 2) if layout == "BSHD" else each for each in map(_copy, (query, key, value)))
            x = replace(Operands(*turned), mask=mask)
            inputs = _inputs(x, AttentionAttrs(scale=scale, is_causal=causal), needs_grad)
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
    """Canonical operands and attributes."""

    x: Operands
    attrs: AttentionAttrs
    needs_grad: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Query, key and value."""
        return self.x.query, self.x.key, self.x.value

    def copied(self) -> _Inputs:
        """Copies, also of the masks."""
        return replace(self, x=self.x.map(_copy))

    def as_float64(self) -> _Inputs:
        """The same in float64, beside a boolean mask."""
        attrs = replace(self.attrs, score_dtype=torch.float64)
        return replace(self, x=self.x.map(_as_float64), attrs=attrs)


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _inputs(x: Operands, attrs: AttentionAttrs, needs_grad: bool) -> _Inputs:
    """The inputs with what the tensors say of the attributes, and the mask, boolean or additive, by its own name."""
    attrs = replace(attrs, enable_gqa=x.query.shape[1] != x.key.shape[1], score_dtype=x.query.dtype)
    if x.mask is None:
        return _Inputs(x, attrs, needs_grad)
    scores = (x.query.shape[0], x.query.shape[1], x.query.shape[2], x.key.shape[2])
    try:
        mask = x.mask.detach().expand(scores)
    except RuntimeError as error:
        text = f"validating a kernel: expected a mask that broadcasts to {scores}, received {tuple(x.mask.shape)}"
        raise ValueError(text) from error
    if mask.dtype == torch.bool:
        return _Inputs(replace(x, mask=mask), replace(attrs, has_mask=True), needs_grad)
    attrs = replace(attrs, has_bias=True, bias_is_finite=bool(mask.isfinite().all()))
    return _Inputs(replace(x, mask=None, bias=mask), attrs, needs_grad)


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
    truth, given = (_evaluate(reference_in_parts, each) for each in (exact, inputs))
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
        synchronise(copies.x.query.device)
        before, after = inputs.x.given(), copies.x.given()
        return found, [name for name, given in before.items() if not is_same(given, after[name])]

    return run() if spec.is_shipped else tried(spec, {inputs.x.query.device}, run)


def _function(spec: KernelSpec, inputs: _Inputs) -> Callable[..., Any]:
    """The kernel, over operands and attributes; the definition, compiled, where Inductor is asked for."""
    if spec.call is not None:
        return spec.call
    names = list(inputs.x.given())

    def definition(*tensors: torch.Tensor) -> torch.Tensor:
        return reference(Operands(**dict(zip(names, tensors, strict=True))), inputs.attrs)

    compiled = inductor.compile_apart(definition, inputs.x.tensors)
    return lambda x, attrs: compiled(*x.tensors)


def _evaluate(function: Callable[..., Any], inputs: _Inputs) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value where they are wanted (a weighted sum of the output's)."""
    with torch.set_grad_enabled(inputs.needs_grad):
        output = function(inputs.x, inputs.attrs)
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
