"""A scan on CPUs as one loop over its steps, in C++ that is written for its structure and built as Inductor builds its own.

Memory is linear in the length: the state is kept every ``CHUNK`` steps, and the backward computes what lies between again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lz_compile.lowering import inductor
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.kernel_operator import signed
from lz_compile.lowering.kernels.scan import cpp_launch as launch
from lz_compile.lowering.kernels.scan.computed import compute_while_scanning
from lz_compile.lowering.kernels.scan.cpp_ahead import build_ahead
from lz_compile.lowering.kernels.scan.cpp_launch import Launch
from lz_compile.lowering.kernels.scan.cpp_terms import Recipe
from lz_compile.lowering.needless_copies import leave_out_needless_copies
from lz_compile.lowering.opaque import define, opaque, pass_autograd, record
from lz_compile.lowering.ops import scan as op
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, reference

#: Steps from one kept state to the next.
CHUNK = 64

_KERNEL_ID = "lz.rolled_scan"
_NAMES = Operands.names
_COUNT = len(_NAMES)


def scan(x: Operands, attrs: ScanAttrs, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout (see ``lowering/ops/scan.py``), with a state kept every ``chunk`` steps."""
    results = torch.ops.layerzero.rolled_scan.default(*x.flat(), encode(attrs), chunk)
    return results[0], results[1]


def _called(given: Sequence[Any]) -> tuple[Operands, ScanAttrs, int, Any]:
    """Operands, attributes, the steps of a chunk, and what comes behind them in a call of an operator."""
    operands, (attrs, chunk, last) = given[:_COUNT], given[_COUNT:]
    return Operands(*operands), decode(ScanAttrs, attrs), chunk, last


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward(*given: Any) -> launch.Results:
    """Reads ``[B, T, H, Q, V]``, the last state, and where it ``keeps`` them those before chunks ``[B, H, chunks, K, V]``."""
    attrs, chunk, keeps = given[_COUNT:]
    return launch.forward(given[:_COUNT], attrs, chunk, keeps=keeps)


def _forward_fake(*given: Any) -> launch.Results:
    x, attrs, chunk, keeps = _called(given)
    launched = Launch(x, attrs, chunk)
    build_ahead(launched)
    return launched.results(keeps)


def _forward_fallback(*given: Any) -> launch.Results:
    """By PyTorch: every chunk from where the one before ended."""
    x, attrs, chunk, keeps = _called(given)
    reads, last, checkpoints = Launch(x, attrs, chunk).results(keeps)
    wide = checkpoints.dtype
    unrounded = replace(attrs, out_dtype=wide, state_dtype=wide)
    current = last.new_zeros(last.shape, dtype=wide) if x.state is None else x.state.to(wide).expand(last.shape)
    length = reads.shape[1]
    for index, start in enumerate(range(0, length, chunk)):
        if keeps:
            checkpoints[:, :, index] = current
        part = _steps(x, slice(start, min(start + chunk, length)))
        found, current = reference(replace(part, state=current), unrounded)
        reads[:, start : start + chunk] = found.transpose(1, 2)
    last.copy_(current)
    return reads, last, checkpoints


def _steps(x: Operands, steps: slice) -> Operands:
    """Some of the steps; of what is the same in all of them, that."""
    given = {name: each for name, each in x.given().items() if name != "state"}
    return Operands(**{name: each if each.shape[2] == 1 else each[:, :, steps] for name, each in given.items()})


# ---- forward, with operands that are computed meanwhile ---------------------------------------------------------------


def _computed(*given: Any) -> launch.Results:
    """The same, of which some operands are None: a recipe says what they are of smaller tensors."""
    operands, (leaves, recipe, attrs, chunk, keeps) = given[:_COUNT], given[_COUNT:]
    return launch.forward(operands, attrs, chunk, keeps=keeps, recipe=recipe, leaves=leaves)


def _made(*given: Any) -> Sequence[Any]:
    """What :func:`_forward` is given, with these operands computed by PyTorch."""
    operands, (leaves, recipe, *others) = given[:_COUNT], given[_COUNT:]
    made = decode(Recipe, recipe).of(leaves)
    return (*(made.get(name, each) for name, each in zip(_NAMES, operands, strict=True)), *others)


def _computed_fake(*given: Any) -> launch.Results:
    x, attrs, chunk, keeps = _called(_made(*given))
    leaves, recipe = given[_COUNT : _COUNT + 2]
    launched = Launch(x, attrs, chunk, decode(Recipe, recipe), leaves)
    build_ahead(launched)
    return launched.results(keeps)


def _computed_fallback(*given: Any) -> launch.Results:
    reads, last, checkpoints = _forward_fallback(*_made(*given))
    is_read = decode(Recipe, given[_COUNT + 1]).last
    return reads, last if is_read else last.new_empty((*last.shape[:2], 0, last.shape[3])), checkpoints


# ---- backward --------------------------------------------------------------------------------------------------------


def _backward(of_reads: torch.Tensor, of_last: torch.Tensor, checkpoints: torch.Tensor, *given: Any) -> Any:
    x, attrs, chunk, wanted = _called(given)
    names = _wanted(wanted)
    found = Launch(x, attrs, chunk).backward(checkpoints, of_reads.transpose(1, 2), of_last, names)
    return [found[name] for name in _NAMES if name in names]


def _backward_fake(*given: Any) -> list[torch.Tensor]:
    x, attrs, chunk, wanted = _called(given[3:])
    names = _wanted(wanted)
    build_ahead(Launch(x, attrs, chunk), names, backward=True)
    return [torch.empty_like(each) for name, each in x.given().items() if name in names]


def _backward_fallback(of_reads: torch.Tensor, of_last: torch.Tensor, _checkpoints: torch.Tensor, *given: Any) -> Any:
    """By PyTorch, which keeps every state meanwhile."""
    x, attrs, _, wanted = _called(given)
    x, names = x.map(torch.Tensor.detach), _wanted(wanted)
    asked = [each.requires_grad_() for name, each in x.given().items() if name in names]
    with torch.enable_grad():
        pairs = zip(reference(x, attrs), (of_reads.transpose(1, 2), of_last), strict=True)
        outputs, gradients = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        found = torch.autograd.grad(outputs, asked, gradients, materialize_grads=True)
    return [torch.empty_like(each).copy_(gradient) for each, gradient in zip(asked, found, strict=True)]


def _wanted(wanted: Sequence[bool]) -> frozenset[str]:
    return frozenset(name for name, wants in zip(_NAMES, wanted, strict=True) if wants)


# ---- calls that nobody compiles --------------------------------------------------------------------------------------


def _bind(
    x: Operands, attrs: ScanAttrs, reads: Sequence[int] | None = None, last: Sequence[int] | None = None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """One call of C++ for operands like these, without gradients (see :func:`cpp_launch.by_address`)."""
    return launch.by_address(x, attrs, CHUNK, reads, last)


scan.bind = _bind  # type: ignore[attr-defined]  # what eager calls look for

# ---- the operator ----------------------------------------------------------------------------------------------------

_FIRST = dict.fromkeys(("of_reads", "of_last", "checkpoints"), torch.Tensor)
_LAST = {"attrs": str, "chunk": int}

_run = opaque(
    "rolled_scan_forward",
    signed(_forward, op, {}, {**_LAST, "keeps": bool}, launch.Results),
    _forward_fake,
    fallback=_forward_fallback,
    kernel_id=_KERNEL_ID,
)
opaque(
    "computed_scan_forward",
    signed(
        _computed, op, {}, {"leaves": Sequence[torch.Tensor], "recipe": str, **_LAST, "keeps": bool}, launch.Results
    ),
    _computed_fake,
    fallback=_computed_fallback,
    kernel_id=_KERNEL_ID,
)
inductor.before_lowering += [compute_while_scanning, leave_out_needless_copies]
_run_back = opaque(
    "rolled_scan_backward",
    signed(_backward, op, _FIRST, {**_LAST, "wanted": Sequence[bool]}, list[torch.Tensor]),
    _backward_fake,
    fallback=_backward_fallback,
    kernel_id=_KERNEL_ID,
)


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


def _call(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, (attrs, chunk) = given[:_COUNT], given[_COUNT:]
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands):
        reads, last = _Recorded.apply(attrs, chunk, *operands)  # type: ignore[no-untyped-call]
    else:
        reads, last, _ = _run(*given, False)
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


_schema = torch.library.infer_schema(signed(_call, op, {}, _LAST, tuple[torch.Tensor, torch.Tensor]), mutates_args=())
define("rolled_scan", _schema, _call)
# Gradients in graphs that were traced already, and hold the kernel instead of the operator.
record("rolled_scan_forward_kernel", _RecordedKernel.apply)
pass_autograd("rolled_scan_backward_kernel")  # its fallback asks autograd
