"""A loop as PyTorch's operator: what that needs, and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree

from lz_compile.api.rolling.syntax import NotRolledError
from lz_compile.lowering.checkpointed_scan import CHUNK_NOTE

Step: TypeAlias = "Callable[..., tuple[tuple[Any, ...], tuple[Tensor, ...]]]"


def scanned(
    step: Step,
    init: tuple[Any, ...],
    answers: tuple[Sequence[bool], Sequence[bool]],
    items: Sequence[Tensor | None],
    steps: int,
    peels: bool,
    handed: int,
    chunk: str | None,
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """What is carried out of a scan, and what its steps hand out; the first step by itself where it is another kind."""
    from torch._higher_order_ops.scan import scan

    if not torch.compiler.is_compiling():
        raise NotRolledError("it was compiled too often")
    first: tuple[Tensor, ...] = ()
    there = [each for each in items if each is not None]

    def given(now: Sequence[Tensor]) -> list[Tensor | None]:
        left = list(now)
        return [None if each is None else left.pop(0) for each in items]

    if peels:
        init, first = step(*init, *answers[0], *given([each[0] for each in there]))
        there = [each[1:] for each in there]
    carried, spec = pytree.tree_flatten(init)
    leaves = [each for each in carried if each is not None]
    like = next((each for each in (*leaves, *there)), torch.zeros(()))
    # PyTorch's scan needs a state, something to go over, and something that is handed out (of the state, for gradients).
    is_trained = torch.is_grad_enabled()
    leaves = [own(each) for each in leaves] or [like.new_zeros(())]  # no two of them may be the same, nor what is read
    over = there or [like.new_zeros(steps - peels)]

    def whole(flat: Sequence[Tensor]) -> tuple[Any, ...]:
        left = list(flat)
        tree: tuple[Any, ...] = pytree.tree_unflatten([None if each is None else left.pop(0) for each in carried], spec)
        return tree

    def combine(flat: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        carry, ys = step(*whole(flat), *answers[1], *given(now if there else ()))
        out = [each for each in pytree.tree_flatten(carry)[0] if each is not None] or flat
        ys = ys or (out[0] if is_trained else out[0].new_zeros(()),)
        return [own(each) for each in out], [own(each) for each in ys]

    with nullcontext() if chunk is None else annotate({CHUNK_NOTE: chunk}):
        flat, ys = scan(combine, leaves, over, dim=0)
    if first:
        ys = [torch.cat([one[None], rest]) for one, rest in zip(first, ys, strict=False)]
    return whole(flat), tuple(ys[:handed])


def own(found: Tensor) -> Tensor:
    """Memory of its own, in the one order that a scan carries."""
    return found.clone(memory_format=torch.contiguous_format)
