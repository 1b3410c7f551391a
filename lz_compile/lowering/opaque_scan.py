"""A scan by a kernel that PyTorch cannot look into: what an adapter needs around the call itself.

Every such kernel is a function of the same parameters (see :func:`fake`), so one fake and one fallback serve all of them. Its
one result holds both of the op's, one behind the other. An operand that there is not has no elements and one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from lz_compile.lowering.chunk_operands import sizes_of_shapes
from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.ops.scan import OPERANDS, ScanAttrs, ScanSizes, sizes_of

Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: Of the seven operands, in the op's order.
Seven: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


def scan_by(operator: Callable[..., torch.Tensor]) -> Callable[..., Results]:
    """The adapter of a kernel: the op's canonical operands through ``operator``, which takes what :func:`fake` takes."""

    def scan(
        state: torch.Tensor | None = None,
        decay: torch.Tensor | None = None,
        left: torch.Tensor | None = None,
        right: torch.Tensor | None = None,
        erase: torch.Tensor | None = None,
        drive: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        *,
        attrs: ScanAttrs,
    ) -> Results:
        """The scan in the op's canonical layout (see ``lowering/ops/scan.py``)."""
        operands = (state, decay, left, right, erase, drive, query)
        there = {name: each for name, each in zip(OPERANDS, operands, strict=True) if each is not None}
        like = next(iter(there.values()))
        both = operator(*(like.new_empty(0) if each is None else each for each in operands), encode(attrs))
        sizes = sizes_of_shapes(there)
        reads = tuple(sizes[dim] for dim in "BHTQV")
        count = reads[0] * reads[1] * reads[2] * reads[3] * reads[4]
        return (
            _as(both[:count].view(reads), attrs.out_dtype),
            _as(both[count:].view(tuple(sizes[dim] for dim in "BHKV")), attrs.state_dtype),
        )

    return scan


def fake(
    state: torch.Tensor,
    decay: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    erase: torch.Tensor,
    drive: torch.Tensor,
    query: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    """An empty result ``[N]``; ``attrs`` is the op's, as JSON."""
    sizes = sizes_of(given((state, decay, left, right, erase, drive, query)))
    steps = sizes.length * sizes.reads + sizes.key_dim
    return state.new_empty(sizes.batch * sizes.heads * steps * sizes.value_dim, dtype=_dtype(decoded(attrs)))


def fallback(
    state: torch.Tensor,
    decay: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    erase: torch.Tensor,
    drive: torch.Tensor,
    query: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    """The same by PyTorch, in as few steps as the decay allows; parameters as in :func:`fake`."""
    form = decoded(attrs)
    return together(in_torch(given((state, decay, left, right, erase, drive, query)), form), form)


def in_torch(operands: dict[str, torch.Tensor | None], attrs: ScanAttrs) -> Results:
    """The scan in chunks, or step by step where columns have decays of their own, or states are dropped."""
    from lz_compile.lowering.kernels import chunked_scan
    from lz_compile.lowering.ops.scan import reference

    decay = operands["decay"]
    by_column = decay is not None and decay.shape[4] != 1
    return (reference if by_column or attrs.drops else chunked_scan.scan)(**operands, attrs=attrs)


def decoded(attrs: str) -> ScanAttrs:
    """The op's attributes."""
    found: ScanAttrs = decode(ScanAttrs, attrs)
    return found


def given(operands: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor | None]:
    """The operands by name, None for those that there are not."""
    return {name: None if each.dim() == 1 else each for name, each in zip(OPERANDS, operands, strict=True)}


def together(results: Results, attrs: ScanAttrs) -> torch.Tensor:
    """Both results as ``[N]``."""
    dtype = _dtype(attrs)
    return torch.cat([each.to(dtype).flatten() for each in results])


def apart(both: torch.Tensor, sizes: ScanSizes) -> Results:
    """The inverse of :func:`together`, but for dtypes: views of ``[N]``."""
    reads = (sizes.batch, sizes.heads, sizes.length, sizes.reads, sizes.value_dim)
    last = (sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim)
    first, second = both.split((math.prod(reads), math.prod(last)))
    return first.view(reads), second.view(last)


def of_operands(gradients: dict[str, torch.Tensor], operands: tuple[torch.Tensor, ...]) -> Seven:
    """Gradients in the op's order; one of an operand that there is not has no elements."""
    pairs = zip(OPERANDS, operands, strict=True)
    state, decay, left, right, erase, drive, query = (
        gradients.get(name, torch.empty_like(each)).contiguous() for name, each in pairs
    )
    return state, decay, left, right, erase, drive, query


def gradients_by(run: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The backward of a function that autograd can see into: it is called once more, and asked."""

    def gradients(
        gradient: torch.Tensor,
        state: torch.Tensor,
        decay: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        erase: torch.Tensor,
        drive: torch.Tensor,
        query: torch.Tensor,
        attrs: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        operands = (state, decay, left, right, erase, drive, query)
        there = {name: each.requires_grad_() for name, each in given(operands).items() if each is not None}
        both = run(*operands, attrs)
        found = torch.autograd.grad(both, list(there.values()), gradient, materialize_grads=True)
        return of_operands(dict(zip(there, found, strict=True)), operands)

    return gradients


def _dtype(attrs: ScanAttrs) -> torch.dtype:
    """That of both results together."""
    return torch.promote_types(attrs.out_dtype, attrs.state_dtype)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
