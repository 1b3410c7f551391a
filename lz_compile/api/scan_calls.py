"""A recurrence over canonical operands: the operator that graphs hold, and calls that nobody compiles.

Which kernel runs is decided where the operator runs, or where it is traced; an eager call finds it again by its layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import PLAIN, Arguments, is_plain, is_transformed
from lz_compile.lowering.kernel_operator import call_operator
from lz_compile.lowering.ops import scan as op
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, ScanFacts
from lz_compile.runtime.kernels.kernel import KernelSpec

#: Reads and the last state, and what gives them.
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Run: TypeAlias = Callable[..., Results]


def scan(x: Operands, out_dtype: torch.dtype, state_dtype: torch.dtype) -> Results:
    """The scan over canonical operands, reads after the step."""
    # Where it is exported without Dynamo, too: a loop would be as long as the example.
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not is_transformed()):
        found = _traced(x, out_dtype, state_dtype)
        return found[0], found[1]
    if any(type(each) not in PLAIN for each in x.flat() if each is not None):
        return _own(x, _problem(x, out_dtype, state_dtype)[0])
    return _selected(x, out_dtype, state_dtype)


def _called(x: Operands, out_dtype: torch.dtype, state_dtype: torch.dtype) -> Results:
    known = Arguments("linear_scan or kda")
    for name, each in x.given().items():
        known.tensor(name, each, kind="inexact")
    return _selected(x, out_dtype, state_dtype)


def _selected(x: Operands, out_dtype: torch.dtype, state_dtype: torch.dtype) -> Results:
    operands = x.flat()
    if not is_plain(*operands):
        return _bind(x, out_dtype, state_dtype, is_traced=True)(x)
    names = (out_dtype, state_dtype, torch.is_grad_enabled(), *[eager.layout(each) for each in operands])
    return eager.bound("scan", names, partial(_bind, x, out_dtype, state_dtype))(x)


def _bind(
    x: Operands, out_dtype: torch.dtype, state_dtype: torch.dtype, is_traced: bool = False
) -> Callable[[Operands], Results]:
    """The scan over operands like these, by the kernel that is chosen for them."""
    attrs, facts = _problem(x, out_dtype, state_dtype)
    own = partial(_own, attrs=attrs)
    kernel = _chosen(x, attrs, facts, is_traced=is_traced)
    if kernel is None or kernel.call is None:
        return own
    bind = None if is_traced or facts.needs_grad else getattr(kernel.call, "bind", None)
    call = partial(_through, kernel.call, attrs) if bind is None else partial(_turned, bind(x, attrs))
    return eager.guarded(kernel.kernel_id, call, own)


def _problem(x: Operands, out_dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[ScanAttrs, ScanFacts]:
    return eager.problem_of(x, out_dtype=out_dtype, state_dtype=state_dtype)


def _chosen(x: Operands, attrs: ScanAttrs, facts: ScanFacts, *, is_traced: bool = False) -> KernelSpec | None:
    """The kernel for operands, None for PyTorch's operations."""
    if is_transformed() or 0 in (facts.batch, facts.heads, facts.length, facts.key_dim, facts.value_dim):
        return None
    return eager.kernel_for("scan", attrs, facts, x.like.device, None if is_traced else x.given())


def by_address(
    x: Operands,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int] | None],
    called: Callable[..., Results],
    own: Run,
) -> Run:
    """``called(run, *arguments)``, where the kernel for the operands has a ``run`` that reads addresses only; else ``own``.

    ``shapes`` are those of the results ``[B, T, H, 1, V]`` and ``[B, H, K, V]``, contiguous.
    """
    attrs, facts = _problem(x, *dtypes)
    kernel = _chosen(x, attrs, facts)
    bind = None if kernel is None or facts.needs_grad else getattr(kernel.call, "bind", None)
    if kernel is None or bind is None:
        return own
    return eager.guarded(kernel.kernel_id, partial(called, bind(x, attrs, *shapes)), own)


def is_view(operand: torch.Tensor | None, of: torch.Tensor | None) -> bool:
    """Whether an operand begins where the argument does, rather than being a copy."""
    return operand is None or of is None or operand.data_ptr() == of.data_ptr()


def _own(x: Operands, attrs: ScanAttrs) -> Results:
    """By PyTorch's operations, laid out in memory as kernels leave it: what views the result does so whatever runs."""
    reads, last = op.reference(x, attrs)
    return reads.transpose(1, 2).contiguous().transpose(1, 2), last if reads.shape[2] else last.clone()


def _turned(run: Callable[..., Any], x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads as the op has them, heads before time."""
    reads, last = run(*x.flat())
    return reads.transpose(1, 2), last


def _through(call: Callable[..., Any], attrs: ScanAttrs, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    reads, last = call(x, attrs)
    return reads, last


_traced = call_operator("scan", op, _called, out_dtype=torch.dtype, state_dtype=torch.dtype)
