"""Scans over time whose gradients keep the carry of each step, or of each chunk of steps, and compute the rest again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.utils import (
    _clone_aliasing_output,
    first_slice_copy,
    materialize_as_graph,
    save_values_for_backward,
    saved_values,
    split_into_chunks,
)

#: What a node is annotated with that wants chunks of so many steps.
CHUNK_NOTE = "lz_chunk"

Operands = Sequence[Any]
Step = Callable[..., Sequence[torch.Tensor]]
Tensors = tuple[torch.Tensor, ...]


def checkpointed_scan(combine: Step, init: Operands, xs: Operands, additional: Operands, chunk: int | None) -> Tensors:
    """``scan(combine, init, xs, additional)``, whose gradients compute steps anew from the carry that each begins with.

    With ``chunk``, chunks of so many steps are computed anew from the carry that each of these begins with: memory of
    ``steps / chunk + chunk`` carries, and a step is computed three times forwards. Where chunks are not even the first one
    has 2 to ``chunk`` + 1 steps, and at least two follow: sizes of 1 would be compiled anew. Wherever no gradient is wanted
    it is PyTorch's own operator.
    """
    operands = (*init, *xs, *additional)
    if not torch.is_grad_enabled() or not any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in operands
    ):
        return tuple(scan_op(combine, list(init), list(xs), tuple(additional)))
    steps = xs[0].shape[0]
    sizes = _symbols(steps)
    own = len(init) + len(xs) + len(additional)

    def one(*args: Any) -> Sequence[torch.Tensor]:
        return combine(*args[:own])  # Inductor (2.13) knows the sizes of outputs only by symbols that are operands

    def several(*args: Any) -> Sequence[torch.Tensor]:
        return _scan(one, *_split(args, len(init), len(xs)))

    if chunk is None or steps < 2 * chunk + 2:
        return _scan(one, init, xs, (*additional, *sizes))
    even = _even(steps, chunk) if isinstance(steps, int) else None
    chunk = even or chunk
    chunks = (steps - 2) // chunk if even is None else steps // chunk
    first = steps - chunks * chunk
    head: Tensors = ()
    if even is None:
        head = _scan(one, init, [each.narrow(0, 0, first) for each in xs], (*additional, *sizes))
    rest = [each.narrow(0, first, chunks * chunk).unflatten(0, (chunks, chunk)) for each in xs]
    tail = _scan(several, head[: len(init)] or init, rest, (*additional, *sizes))
    ys = [each.flatten(0, 1) for each in tail[len(init) :]]
    if head:
        ys = [torch.cat(each) for each in zip(head[len(init) :], ys, strict=True)]
    return (*tail[: len(init)], *ys)


def _even(steps: int, chunk: int) -> int | None:
    """A chunk of about the same size that leaves no steps over: one loop less to compile."""
    sizes = [each for each in range(max(2, chunk // 2), 2 * chunk) if steps % each == 0]
    return min(sizes, key=lambda each: abs(each - chunk), default=None)


def _scan(step: Step, init: Operands, xs: Operands, additional: Operands) -> Tensors:
    """A scan of which the carry that each step begins with is saved, and nothing else of a step."""
    found: Tensors = _Scan.apply(  # type: ignore[no-untyped-call]
        step, len(init), len(xs), *init, *xs, *additional
    )
    return found


class _Scan(torch.autograd.Function):
    """Forwards and backwards through time by PyTorch's operator, never by its gradients.

    Those (2.13) keep what every step makes in memory of all steps that is copied in every step, and refuse two states whose
    gradients are one tensor.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, carries: int, slices: int, *operands: Any) -> Tensors:
        init, xs, additional = _split(operands, carries, slices)

        def saving(*args: Any) -> list[torch.Tensor]:
            return _apart(args, (*step(*args), *args[:carries]))

        found = _run(saving, [each.contiguous() for each in init], xs, additional)
        outputs, begins = found[:-carries], found[-carries:]
        ctx.step, ctx.carries, ctx.slices, ctx.smooth = step, carries, slices, [is_smooth(each) for each in outputs]
        save_values_for_backward(ctx, (*begins, *xs, *additional))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        carries, slices, saved = ctx.carries, ctx.slices, saved_values(ctx)
        begins, xs, additional = _split(saved, carries, slices)
        needed = [True] * carries + list(ctx.needs_input_grad[3 + carries :])  # a carry leads to other operands
        wanted = [need and is_smooth(each) for need, each in zip(needed, saved, strict=True)]
        counts = [sum(each) for each in _split(wanted, carries, slices)]
        smooth = _chosen(grads, ctx.smooth)
        last, ys = smooth[: counts[0]], smooth[counts[0] :]
        sums = [torch.zeros_like(each) for each in _chosen(additional, wanted[carries + slices :])]

        def back(*args: Any) -> list[torch.Tensor]:
            sizes = [counts[0], counts[2], carries + slices, len(ys), len(additional)]
            after, before, now, of_ys, more = split_into_chunks(args, sizes)
            leaves = [
                each.detach().requires_grad_() if want else each
                for each, want in zip((*now, *more), wanted, strict=True)
            ]
            with torch.enable_grad():
                made = _chosen(ctx.step(*leaves), ctx.smooth)
            pairs = zip(made, (*after, *of_ys), strict=True)
            joined = [(each, grad) for each, grad in pairs if each.requires_grad]
            inputs = _chosen(leaves, wanted)
            found: Sequence[torch.Tensor] = [torch.zeros_like(each) for each in inputs]
            if joined:
                outputs, tangents = zip(*joined, strict=True)
                found = torch.autograd.grad(outputs, inputs, tangents, allow_unused=True, materialize_grads=True)
            to_init, to_xs, to_more = split_into_chunks(found, counts)
            return _apart(args, (*to_init, *(one + other for one, other in zip(before, to_more, strict=True)), *to_xs))

        over = [each.flip(0) for each in (*begins, *xs, *ys)]
        carry = [each.clone(memory_format=torch.contiguous_format) for each in (*last, *sums)]  # two may be the same
        found = _run(back, carry, over, additional)
        to_init, to_more, to_xs = split_into_chunks(found, [counts[0], counts[2], counts[1]])
        results = iter([*to_init, *(each.flip(0) for each in to_xs), *to_more])
        return (None, None, None, *(next(results) if want else None for want in wanted))


def _run(step: Step, init: Operands, xs: Operands, additional: Operands) -> list[torch.Tensor]:
    """PyTorch's operator while something traces, else the steps one after the other: below it nothing has gradients."""
    tensors = [each for each in (*init, *xs, *additional) if isinstance(each, torch.Tensor)]
    if not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors):
        graph = materialize_as_graph(step, (*init, *map(first_slice_copy, xs), *additional), force_enable_grad=True)
        return list(scan_op(graph, list(init), list(xs), tuple(additional)))
    return one_by_one(step, init, xs, additional)


def one_by_one(step: Step, init: Operands, xs: Operands, additional: Operands) -> list[torch.Tensor]:
    """What a scan gives, its steps run one after the other."""
    carry, ys = list(init), []
    for now in zip(*(each.unbind(0) for each in xs), strict=True):
        found = step(*carry, *now, *additional)
        carry = list(found[: len(carry)])
        ys.append(found[len(carry) :])
    return [*carry, *(torch.stack(each) for each in zip(*ys, strict=True))]


def _apart(inputs: Operands, outputs: Operands) -> list[torch.Tensor]:
    """Outputs in the one order that a scan carries, each in memory of its own."""
    found: list[torch.Tensor] = _clone_aliasing_output(inputs, [each.contiguous() for each in outputs])
    return found


def _chosen(values: Operands, choice: Sequence[bool]) -> list[Any]:
    return [each for each, is_chosen in zip(values, choice, strict=True) if is_chosen]


def _split(operands: Operands, carries: int, slices: int) -> list[Any]:
    """Operands as carries, slices over time, and what every step reads."""
    return split_into_chunks(operands, [carries, slices, len(operands) - carries - slices])


def is_smooth(value: Any) -> bool:
    """Whether a value can have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _symbols(size: Any) -> list[Any]:
    """The symbols that a size is made of, as numbers."""
    if not isinstance(size, torch.SymInt):
        return []
    env = size.node.shape_env
    return [env.create_symintnode(each, hint=None) for each in sorted(size.node.expr.free_symbols, key=str)]
