"""A loop as PyTorch's operator: what that needs, and gives."""

from __future__ import annotations

from builtins import isinstance, len, list, next, tuple, zip  # noqa: UP029
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, cat, contiguous_format, dtype, float64, int64, is_grad_enabled, zeros
from torch._higher_order_ops.scan import scan, scan_op
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.traceback import annotate

from lz_compile.api.rolling.asked import see_assignments
from lz_compile.api.rolling.facts import Answers, Items, middle, reads_it
from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.api.rolling.trees import leaves as leaves_of
from lz_compile.api.rolling.trees import rebuilt
from lz_compile.lowering.checkpointed_scan import CHUNK_NOTE

Step: TypeAlias = "Callable[..., tuple[tuple[Any, ...], tuple[Tensor, ...]]]"


def scanned(
    step: Step,
    init: tuple[Any, ...],
    answers: Answers,
    items: Sequence[Tensor | Items | None],
    steps: int,
    peels: bool,
    handed: Sequence[dtype | None],
    chunk: str | None,
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """What is carried out of a scan, and what its steps hand out; the first and the last one by themselves if they differ."""
    if not is_compiling():
        raise NotRolledError("it was compiled too often")
    first: tuple[Tensor, ...] = ()
    ends = answers[2] != answers[1]
    there = [middle(each, peels, ends) for each in items if each is not None and reads_it(each, 1)]

    if peels:
        init, first = step(*init, *answers[0], *_at_end(items, 0))
    carried = leaves_of(init)
    leaves = [each for each in carried if each is not None]
    like = next((each for each in (*leaves, *there)), zeros(()))
    # PyTorch's scan needs a state, something to go over, and something that is handed out (of the state, for gradients).
    is_trained = is_grad_enabled()
    # Differentiated, PyTorch's scan (2.13) carries and hands out no whole numbers.
    kinds = [None if each.is_floating_point() or not is_trained else each.dtype for each in leaves]
    # No two states may be the same, nor what is read.
    leaves = [own(_as_float(each, kind)) for each, kind in zip(leaves, kinds, strict=True)]
    leaves = leaves or [like.new_zeros(())]
    given_out = [dtype if is_trained else None for dtype in handed]
    over = there or [like.new_zeros(steps - peels - ends)]

    def whole(flat: Sequence[Tensor]) -> tuple[Any, ...]:
        left = [_as_whole(each, kind) for each, kind in zip(flat, kinds or [None], strict=True)]
        tree: tuple[Any, ...] = rebuilt(init, [None if each is None else left.pop(0) for each in carried])
        return tree

    def combine(flat: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        carry, ys = step(*whole(flat), *answers[1], *_of(items, now if there else ()))
        out = [each for each in leaves_of(carry) if each is not None]
        out = [_as_float(each, kind) for each, kind in zip(out, kinds, strict=True)] or flat
        ys = tuple(_as_float(each, kind) for each, kind in zip(ys, given_out, strict=True))
        ys = ys or (out[0] if is_trained else out[0].new_zeros(()),)
        return [own(each) for each in out], [own(each) for each in ys]

    with nullcontext() if chunk is None else annotate({CHUNK_NOTE: chunk}):
        flat, ys = _scan(combine, leaves, over)
    found, ys = whole(flat), ys[: len(handed)]
    ys = [_as_whole(each, kind) for each, kind in zip(ys, given_out, strict=True)]
    if first:
        ys = [cat([one[None], rest]) for one, rest in zip(first, ys, strict=False)]
    if ends:
        found, last = step(*found, *answers[2], *_at_end(items, 2))
        ys = [cat([rest, one[None]]) for one, rest in zip(last, ys, strict=True)]
    return found, tuple(ys)


def _scan(combine: Any, leaves: list[Tensor], over: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """PyTorch's operator; where Dynamo traces, without what it asks of its arguments in front of that."""
    if not is_dynamo_compiling():
        flat, ys = scan(combine, leaves, over, dim=0)
        return flat, ys

    see_assignments(is_behind=False)
    flat, ys = scan_op(partial(_combined, combine_fn=combine, states=len(leaves)), leaves, over, ())
    see_assignments(is_behind=True)
    return flat, ys


def _combined(*given: Tensor, combine_fn: Any, states: int) -> Any:
    return combine_fn([*given[:states]], [*given[states:]])


def _at_end(items: Sequence[Tensor | Items | None], which: int) -> list[Tensor | None]:
    """What the first step reads (0), or the last (2)."""
    found: list[Tensor | None] = []
    for each in items:
        read = each.read if isinstance(each, Items) else each
        found.append(read[0 if which == 0 else -1] if read is not None and reads_it(each, which) else None)
    return found


def _of(items: Sequence[Tensor | Items | None], now: Sequence[Tensor]) -> list[Tensor | None]:
    """What a step between those reads, in their places."""
    left = list(now)
    return [left.pop(0) if reads_it(each, 1) else None for each in items]


def _as_float(found: Tensor, whole: dtype | None) -> Tensor:
    """Whole numbers in floats, as they are, or by their bits where floats are not wide enough; None: they are floats."""
    if whole is None:
        return found
    return found.view(float64) if whole == int64 else found.to(float64)


def _as_whole(found: Tensor, whole: dtype | None) -> Tensor:
    if whole is None:
        return found
    return found.view(whole) if whole == int64 else found.to(whole)


def own(found: Tensor) -> Tensor:
    """Memory of its own, in the one order that a scan carries."""
    return found.clone(memory_format=contiguous_format)
