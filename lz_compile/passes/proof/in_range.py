"""Indices and other values out of range are errors before an accelerator sees them.

On a CPU an operator raises. On an accelerator it aborts the context, so that the program itself can use the device no more:
made-up inputs must not do that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Values, what they must reach and what they must not exceed.
Bounds: TypeAlias = tuple[torch.Tensor, float, float]


class InRange(TorchDispatchMode):
    """Run operators whose values are in range; the others raise.

    Raises:
        IndexError: a value is out of the range that an operator asks for.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What the operator gives."""
        name = func.overloadpacket.__name__.strip("_") if isinstance(func, torch._ops.OpOverload) else ""
        for values, low, high in _BOUNDS[name](*args) if name in _BOUNDS else ():
            is_real = type(values) is torch.Tensor and not values.is_meta and values.numel() > 0
            if is_real and not (values.min().item() >= low and values.max().item() <= high):
                raise IndexError(f"{name} reads a value that is not between {low} and {high}")
        return func(*args, **(kwargs or {}))


def _of_places(input: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> Iterator[Bounds]:
    dim = 0
    for each in indices:
        if each is not None and not each.dtype.is_floating_point and each.dtype not in (torch.bool, torch.uint8):
            yield each, -input.shape[dim], input.shape[dim] - 1
        dim += each.dim() if each is not None and each.dtype in (torch.bool, torch.uint8) else 1


def _of_dimension(input: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> Iterator[Bounds]:
    yield index, 0, (input.shape[dim] if input.dim() else 1) - 1


def _of_chances(input: torch.Tensor, *_: Any) -> Iterator[Bounds]:
    if input.is_floating_point():
        yield input, 0, 1


def _of_weights(input: torch.Tensor, *_: Any) -> Iterator[Bounds]:
    yield input, 0, math.inf
    yield input.sum(-1), torch.finfo(input.dtype).tiny, torch.finfo(input.dtype).max


#: By the operators' names, without underscores around them.
_BOUNDS: Mapping[str, Callable[..., Iterable[Bounds]]] = {
    **dict.fromkeys(("index", "index_put", "index_put_impl", "unsafe_index", "unsafe_index_put"), _of_places),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _of_dimension),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), _of_dimension),
    **dict.fromkeys(
        ("embedding", "embedding_bag", "embedding_bag_forward_only"), lambda x, i, *_: [(i, 0, x.shape[0] - 1)]
    ),
    **dict.fromkeys(("take", "put"), lambda x, index, *_: [(index, -x.numel(), x.numel() - 1)]),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"),
        lambda x, y, _weight, _kind, ignored, *_: [(y[y != ignored], 0, x.shape[min(1, x.dim() - 1)] - 1)],
    ),
    **dict.fromkeys(
        ("multi_margin_loss", "multilabel_margin_loss_forward"), lambda x, y, *_: [(y, 0, x.shape[-1] - 1)]
    ),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), lambda _, index, size, *__: [(index, 0, math.prod(size) - 1)]),
    "bernoulli": _of_chances,
    "multinomial": _of_weights,
    **dict.fromkeys(("poisson", "standard_gamma"), lambda x, *_: [(x, 0, math.inf)]),
    **dict.fromkeys(("assert_async", "functional_assert_async"), lambda x, *_: [(x != 0, 1, 1)]),
}
