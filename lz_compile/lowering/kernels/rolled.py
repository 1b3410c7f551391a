"""A scan on CPUs as one loop over its steps, in C++ that is written for its structure and built as Inductor builds its own.

Memory is linear in the length: the state is kept every ``CHUNK`` steps, and the backward computes what lies between again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lz_compile.lowering.cpp import launch
from lz_compile.lowering.cpp.ahead import build_ahead
from lz_compile.lowering.cpp.launch import Launch
from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque, record
from lz_compile.lowering.ops.scan import OPERANDS, ScanAttrs, ScanSizes, reference, sizes_of

#: Steps from one kept state to the next.
CHUNK = 64

_KERNEL_ID = "lz.rolled_scan"
_NAMES = tuple(OPERANDS)


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
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout (see ``lowering/ops/scan.py``), with a state kept every ``chunk`` steps."""
    operator = torch.ops.layerzero.rolled_scan.default
    results = operator(state, decay, left, right, erase, drive, query, encode(attrs), chunk)
    return results[0], results[1]


def _attributes(text: str) -> ScanAttrs:
    found: ScanAttrs = decode(ScanAttrs, text)
    return found


def _named(operands: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in zip(_NAMES, operands, strict=True) if each is not None}


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward(
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads ``[B, T, H, Q, V]``, the last state, and where ``keeps`` the states before chunks ``[B, H, chunks, K, V]``."""
    return launch.forward((state, decay, left, right, erase, drive, query), _attributes(attrs), chunk, keeps=keeps)


def _forward_fake(
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands, form = _named((state, decay, left, right, erase, drive, query)), _attributes(attrs)
    build_ahead(operands, form, chunk)
    return Launch(operands, form, chunk).results(keeps)


def _forward_fallback(
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By PyTorch: every chunk from where the one before ended."""
    operands = _named((state, decay, left, right, erase, drive, query))
    form = _attributes(attrs)
    reads, last, checkpoints = Launch(operands, form, chunk).results(keeps)
    sizes = sizes_of(operands)
    current = _first_state(operands, sizes, checkpoints.dtype)
    for index, start in enumerate(range(0, sizes.length, chunk)):
        if keeps:
            checkpoints[:, :, index] = current
        part = _steps(operands, start, min(start + chunk, sizes.length))
        found, current = reference(**{**part, "state": current}, attrs=_unrounded(form, checkpoints.dtype))
        reads[:, start : start + chunk] = found.transpose(1, 2)
    last.copy_(current)
    return reads, last, checkpoints


def _unrounded(attrs: ScanAttrs, dtype: torch.dtype) -> ScanAttrs:
    return replace(attrs, out_dtype=dtype, state_dtype=dtype)


def _first_state(operands: dict[str, torch.Tensor], sizes: ScanSizes, dtype: torch.dtype) -> torch.Tensor:
    shape = (sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim)
    given = operands.get("state")
    like = next(iter(operands.values()))
    return like.new_zeros(shape, dtype=dtype) if given is None else given.to(dtype).expand(shape)


def _steps(operands: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Some of the steps."""
    return {
        name: each if name == "state" or each.shape[2] == 1 else each[:, :, start:stop]
        for name, each in operands.items()
    }


# ---- backward --------------------------------------------------------------------------------------------------------


def _backward(
    of_reads: torch.Tensor,
    of_last: torch.Tensor,
    checkpoints: torch.Tensor,
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """The gradients of the wanted ones of the seven operands."""
    operands = _named((state, decay, left, right, erase, drive, query))
    names = frozenset(name for name, wants in zip(_NAMES, wanted, strict=True) if wants)
    found = Launch(operands, _attributes(attrs), chunk).backward(checkpoints, of_reads.transpose(1, 2), of_last, names)
    return [found[name] for name in _NAMES if name in names]


def _backward_fake(
    of_reads: torch.Tensor,
    of_last: torch.Tensor,
    checkpoints: torch.Tensor,
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    operands = (state, decay, left, right, erase, drive, query)
    names = frozenset(name for name, wants in zip(_NAMES, wanted, strict=True) if wants)
    build_ahead(_named(operands), _attributes(attrs), chunk, names, backward=True)
    return [torch.empty_like(each) for each, wants in zip(operands, wanted, strict=True) if wants and each is not None]


def _backward_fallback(
    of_reads: torch.Tensor,
    of_last: torch.Tensor,
    checkpoints: torch.Tensor,
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """By PyTorch, which keeps every state meanwhile."""
    operands = _named((state, decay, left, right, erase, drive, query))
    leaves = {name: each.detach() for name, each in operands.items()}
    asked = [leaves[name].requires_grad_() for name, wants in zip(_NAMES, wanted, strict=True) if wants]
    with torch.enable_grad():
        results = reference(**leaves, attrs=_attributes(attrs))
        pairs = zip(results, (of_reads.transpose(1, 2), of_last), strict=True)
        outputs, given = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        found = torch.autograd.grad(outputs, asked, given, materialize_grads=True)
    return [torch.empty_like(each).copy_(gradient) for each, gradient in zip(asked, found, strict=True)]


# ---- calls that nobody compiles --------------------------------------------------------------------------------------


def _bind(
    attrs: ScanAttrs,
    operands: Sequence[torch.Tensor | None],
    reads: Sequence[int] | None = None,
    last: Sequence[int] | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """One call of C++ for operands like these, without gradients (see :func:`lz_compile.lowering.cpp.launch.by_address`)."""
    return launch.by_address(operands, attrs, CHUNK, reads, last)


scan.bind = _bind  # type: ignore[attr-defined]  # what eager calls look for

# ---- the operator ----------------------------------------------------------------------------------------------------

_run = opaque("rolled_scan_forward", _forward, _forward_fake, fallback=_forward_fallback, kernel_id=_KERNEL_ID)
_run_back = opaque("rolled_scan_backward", _backward, _backward_fake, fallback=_backward_fallback, kernel_id=_KERNEL_ID)


class _Recorded(torch.autograd.Function):
    """A call of the kernel, for autograd."""

    @staticmethod
    def forward(ctx: Any, attrs: str, chunk: int, *operands: torch.Tensor | None) -> Any:
        reads, last, checkpoints = _run(*operands, attrs, chunk, True)
        _keep(ctx, checkpoints, operands, attrs, chunk)
        return reads, last

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_kept(ctx, gradients, ctx.needs_input_grad[2:])


def _keep(ctx: Any, checkpoints: torch.Tensor, operands: Sequence[torch.Tensor | None], attrs: str, chunk: int) -> None:
    ctx.save_for_backward(checkpoints, *operands)
    ctx.attrs, ctx.chunk = attrs, chunk


def _kept(ctx: Any, gradients: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    checkpoints, *operands = ctx.saved_tensors
    found = iter(_run_back(gradients[0], gradients[1], checkpoints, *operands, ctx.attrs, ctx.chunk, list(wanted)))
    return [next(found) if wants else None for wants in wanted]


def _call(
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    attrs: str,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    operands = (state, decay, left, right, erase, drive, query)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands):
        reads, last = _Recorded.apply(attrs, chunk, *operands)  # type: ignore[no-untyped-call]
    else:
        reads, last, _ = _run(*operands, attrs, chunk, False)
    return reads.transpose(1, 2), last


class _RecordedKernel(torch.autograd.Function):
    """The same in a graph that was traced already, and holds what tracing leaves of a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *operands, attrs, chunk, keeps = inputs
        assert keeps, "a kernel that was traced without gradients is asked for some"
        results = torch.ops.layerzero.rolled_scan_forward_kernel(*inputs)
        _keep(ctx, results[2], operands, attrs, chunk)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return *_kept(ctx, gradients, ctx.needs_input_grad[: len(_NAMES)]), None, None, None


def _define() -> None:
    """The operator that graphs hold, and gradients in graphs that were traced already and hold the kernel instead of it."""
    library = torch.library.Library("layerzero", "FRAGMENT")
    schema = torch.library.infer_schema(_call, mutates_args=())
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    library.define("rolled_scan" + schema, tags=tags)
    library.impl("rolled_scan", _call, "CompositeImplicitAutograd")
    record("rolled_scan_forward_kernel", _RecordedKernel.apply)
    library.impl(
        "rolled_scan_backward_kernel", torch.library.fallthrough_kernel, "Autograd"
    )  # its fallback asks autograd
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
_define()
