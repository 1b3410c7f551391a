"""A recurrence over canonical operands: the operator that graphs hold, and calls that nobody compiles.

Which kernel runs is decided where the operator runs, or where it is traced; an eager call finds it again by its layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from lz_compile.arguments import PLAIN, Arguments, is_plain
from lz_compile.lowering.ops import scan as scan_op
from lz_compile.lowering.ops.scan import OPERANDS, ScanAttrs, ScanFacts, ScanSizes
from lz_compile.runtime import context as contexts
from lz_compile.runtime import eager, fingerprint, policy
from lz_compile.runtime.kernel import KernelSpec


def scan(
    operands: Mapping[str, torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan over canonical operands, reads after the step."""
    given = [operands.get(name) for name in OPERANDS]
    if torch.compiler.is_dynamo_compiling():
        found = torch.ops.layerzero.scan.default(*given, out_dtype, state_dtype, fingerprint.traced_source())
        return found[0], found[1]
    if any(type(each) not in PLAIN for each in given if each is not None):
        return _own(*given, attrs=attributes(given, out_dtype, state_dtype))
    return _selected(given, out_dtype, state_dtype)


def _operator(
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    out_dtype: torch.dtype,
    state_dtype: torch.dtype,
    source: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator that graphs hold: which kernel it is, is decided where it runs, or where it is traced."""
    del source  # for caches: see traced_source
    operands = (state, decay, left, right, erase, drive, query)
    given = Arguments("linear_scan or kda")
    for name, each in zip(OPERANDS, operands, strict=True):
        given.tensor(name, each, kind="inexact", optional=True)
    return _selected(operands, out_dtype, state_dtype)


def _selected(
    operands: Sequence[torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor]
    if not is_plain(*operands):
        found = _bind(operands, out_dtype, state_dtype, is_traced=True)(*operands)
        return found
    names = (out_dtype, state_dtype, torch.is_grad_enabled(), *[eager.layout(each) for each in operands])
    found = eager.bound("scan", names, partial(_bind, operands, out_dtype, state_dtype))(*operands)
    return found


def _bind(
    operands: Sequence[torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype, is_traced: bool = False
) -> Callable[..., Any]:
    """The scan over operands like these, by the kernel that is chosen for them."""
    attrs = attributes(operands, out_dtype, state_dtype)
    own = partial(_own, attrs=attrs)
    kernel, needs_grad = _chosen(operands, attrs, is_traced=is_traced)
    if kernel is None or kernel.call is None:
        return own
    bind = None if is_traced or needs_grad else getattr(kernel.call, "bind", None)
    call = partial(_by_name, kernel.call, attrs) if bind is None else partial(_turned, bind(attrs, operands))
    return eager.guarded(kernel, call, own, fallback_enabled=policy.current().settings.fallback_enabled)


def _chosen(
    operands: Sequence[torch.Tensor | None], attrs: ScanAttrs, *, is_traced: bool = False
) -> tuple[KernelSpec | None, bool]:
    """The kernel for operands, None for PyTorch's operations; and whether gradients are wanted."""
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    named = dict(zip(OPERANDS, operands, strict=True))
    facts = facts_of_call(named)
    if is_transformed or 0 in (facts.batch, facts.heads, facts.length, facts.key_dim, facts.value_dim):
        return None, facts.needs_grad
    device = next(each.device for each in operands if each is not None)
    return eager.kernel_for("scan", attrs, facts, device, None if is_traced else named), facts.needs_grad


def by_address(
    operands: Mapping[str, torch.Tensor | None],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int] | None],
    called: Callable[..., Any],
    own: Callable[..., Any],
) -> Callable[..., Any]:
    """``called(run, *arguments)``, where the kernel for the operands has a ``run`` that reads addresses only; else ``own``.

    ``shapes`` are those of the results ``[B, T, H, 1, V]`` and ``[B, H, K, V]``, contiguous.
    """
    given = [operands.get(name) for name in OPERANDS]
    attrs = attributes(given, *dtypes)
    kernel, needs_grad = _chosen(given, attrs)
    bind = None if kernel is None or needs_grad else getattr(kernel.call, "bind", None)
    if kernel is None or bind is None:
        return own
    enabled = policy.current().settings.fallback_enabled
    return eager.guarded(kernel, partial(called, bind(attrs, given, *shapes)), own, fallback_enabled=enabled)


def is_view(operand: torch.Tensor | None, of: torch.Tensor | None) -> bool:
    """Whether an operand begins where the argument does, rather than being a copy."""
    return operand is None or of is None or operand.data_ptr() == of.data_ptr()


def _turned(call: Callable[..., Any], *operands: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads as the op has them, heads before time."""
    reads, last = call(*operands)
    return reads.transpose(1, 2), last


def attributes(operands: Sequence[torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype) -> ScanAttrs:
    """Those of the op, reads after the step."""
    named = dict(zip(OPERANDS, operands, strict=True))
    wide = torch.promote_types(scan_op.common_dtype(named), torch.float32)
    return ScanAttrs("after", named["erase"] is not None, wide, out_dtype, state_dtype)


def _own(*operands: torch.Tensor | None, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    return scan_op.reference(*operands, attrs=attrs)


def _by_name(
    call: Callable[..., Any], attrs: ScanAttrs, *operands: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel, which is not given what there is not."""
    given = {name: each for name, each in zip(OPERANDS, operands, strict=True) if each is not None}
    reads, last = call(**given, attrs=attrs)
    return reads, last


def facts_of_call(operands: Mapping[str, torch.Tensor | None]) -> ScanFacts:
    """What a call selects its kernel by: a number for every size, also while it is traced."""
    found = scan_op.facts_of(operands)
    return ScanFacts(
        *ScanSizes._make(map(contexts.known_size, scan_op.sizes_of(operands))),
        structure=found.structure,
        dtype=found.dtype,
        device=found.device,
        needs_grad=found.needs_grad,
    )


_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
_LIBRARY.define(
    "scan" + torch.library.infer_schema(_operator, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("scan", _operator, "CompositeImplicitAutograd")
