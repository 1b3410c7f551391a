"""Whether anybody can tell in which order the elements of a tensor lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import Size, as_size, product
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.view import read
from lz_compile.passes.graph.walks import reached

#: Calls to which strides matter exactly; to pointwise ones, only their order does.
STRIDED = frozenset({"view", "view_as", "as_strided", "stride", "data_ptr", "is_contiguous", "storage_offset"})
#: Readers to which the strides of what they read make no difference that anyone can see.
_AGNOSTIC = contraction.PRODUCTS | {"contiguous", "layer_norm", "rms_norm", "sum", "mean"}


def strides_matter(node: fx.Node) -> bool:
    """Whether strides of ``node`` matter to someone: a ``view`` that needs them, an output, or who knows what."""

    def readers(user: fx.Node) -> Iterable[fx.Node]:
        call = read(user)
        return () if call is not None and call.name in _AGNOSTIC else user.users

    return any(map(_are_seen_by, reached(node.users, readers)))


def _are_seen_by(user: fx.Node) -> bool:
    """Whether strides matter to a call itself, rather than to who reads its result."""
    call = read(user)
    if call is None or call.name in _AGNOSTIC:
        return call is None
    is_layout = layout.is_view(call) or call.name in ("chunk", "split", "unbind", "getitem")
    return call.is_inplace or call.name in ("view", "view_as") or not (is_layout or is_pointwise(call))


def order_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """What pointwise operations take over of a tensor's strides.

    They pack the dimensions in the order that they have in memory. Where elements repeat (a stride of zero) there is none:
    which order they take then depends on that of the dimensions themselves, after a transpose for one.
    """
    strides, packed = (map(as_size, each.stride()) for each in (tensor, torch.empty_like(tensor)))
    return tuple(0 if stride == 0 else dense for stride, dense in zip(strides, packed, strict=True))


def that_count(strides: Sequence[Any], tensor: torch.Tensor) -> tuple[Any, ...]:
    """Those of dimensions with more than one element: the others lead nowhere, and PyTorch makes them up."""
    return tuple(stride for stride, extent in zip(strides, tensor.shape, strict=False) if as_size(extent) not in (0, 1))


def order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Dimensions in the order that they have in memory; None where that is none, or has gaps."""
    strides, sizes = ([as_size(each) for each in of] for of in (tensor.stride(), tensor.shape))
    order, _ = layout.stride_order(strides)
    width: Size = 1
    for dim in reversed(order):
        if strides[dim] != width and sizes[dim] != 1:
            return None
        width = product((width, sizes[dim]))
    return order
