"""A sampling by the kernel that is chosen for it: a call, or the operator that graphs hold, ``layerzero::sampling``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import is_plain
from lz_compile.ground import fingerprint
from lz_compile.lowering.kernel_operator import call_operator
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import Operands, Result, SamplingAttrs, SamplingFacts
from lz_compile.runtime.problem import context as contexts


def run(x: Operands, result: Result, out_dtype: torch.dtype) -> torch.Tensor:
    """The result of a sampling, in the op's canonical layout."""
    if not torch.compiler.is_compiling():
        return _selected(x, result, out_dtype)
    source = fingerprint.traced_source()
    found: torch.Tensor = torch.ops.layerzero.sampling.default(*x.flat(), result, out_dtype, source)
    return found


def bind(
    x: Operands, result: Result, out_dtype: torch.dtype, is_traced: bool = False
) -> Callable[[Operands], torch.Tensor]:
    """The sampling of operands like these, by the kernel that is chosen for them."""
    given = x.given()
    attrs = SamplingAttrs.of(given, result, out_dtype)
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in x.tensors)
    rows, vocab = (contexts.known_size(size) for size in x.logits.shape)
    device = x.logits.device
    facts = SamplingFacts(rows, vocab, x.logits.dtype, device.type, needs_grad)
    kernel = eager.kernel_for("sampling", attrs, facts, device, None if is_traced else given) if rows else None
    own = partial(_own, attrs=attrs)
    if kernel is None or kernel.call is None:
        return own
    of_kernel = None if is_traced or needs_grad else getattr(kernel.call, "bind", None)
    call = None if of_kernel is None else of_kernel(x, attrs)
    call = partial(kernel.call, attrs=attrs) if call is None else call
    return eager.guarded(kernel, call, own)


def _selected(x: Operands, result: Result, out_dtype: torch.dtype) -> torch.Tensor:
    given = x.flat()
    if not is_plain(*given):
        return bind(x, result, out_dtype, is_traced=True)(x)
    names = (result, out_dtype, torch.is_grad_enabled(), *[eager.layout(each) for each in given])
    found: torch.Tensor = eager.bound("sampling", names, partial(bind, x, result, out_dtype))(x)
    return found


def _own(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.sampling import torch_sampling

    return torch_sampling.sampling(x, attrs)


def _operator(*given: Any) -> torch.Tensor:
    """The operator that graphs hold: which kernel it is, is decided where it runs, or where it is traced."""
    *operands, result, out_dtype, _source = given  # the last is for caches: see traced_source
    return _selected(Operands(*operands), result, out_dtype)


call_operator("sampling", op, _operator, result=str, out_dtype=torch.dtype)
