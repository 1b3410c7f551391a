"""Calls that are made in place, as calls that give what they leave in a tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.view import Call, read, tensor_of
from lz_compile.passes.graph.writes import ELEMENTWISE, Form, without_writing


def forms(node: fx.Node, target: fx.Node, old: torch.Tensor, emit: Emitter) -> Iterator[Form]:
    """Calls that give what a call leaves in a tensor which is ``target`` until then."""
    call = read(node)
    if call is None:
        return
    if node.target is operator.setitem:
        yield from _stores(call, target, old, emit)
    elif "out" in node.kwargs:
        yield node.target, node.args, {name: each for name, each in node.kwargs.items() if name != "out"}
    elif call.name == "copy" and len(node.args) == 2:
        yield from _copies(node.args[1], target, old, emit)
    elif call.name in ("fill", "zero"):
        yield from _filled(target, (*node.args[1:], 0)[0], old)
    elif call.name in ELEMENTWISE and old.dim() and call.is_inplace:
        twin = without_writing(node, node.args, node.kwargs)
        yield from [] if twin is None else [twin]
        yield from _filling(call, target, old)


def forgets(node: fx.Node) -> bool:
    """Whether a call leaves nothing of what was there: what had a gradient gets one of zeros, rather than none."""
    call = read(node)
    index = node.args[1] if node.target is operator.setitem else None
    chosen = index if isinstance(index, tuple) else (index,)
    is_store = index is not None and not any(isinstance(each, fx.Node) for each in chosen)
    return is_store or "out" in node.kwargs or (call is not None and call.name in ("copy", "fill", "zero"))


def _filling(call: Call, target: fx.Node, old: torch.Tensor) -> Iterator[Form]:
    """What is filled keeps its strides in a second form."""
    mask, value = call.get("mask"), call.get("value")
    if call.name == "masked_fill" and not isinstance(value, fx.Node) and _holds(old.dtype, value):
        yield torch.where, (mask, value, target), {}


def _stores(call: Call, target: fx.Node, old: torch.Tensor, emit: Emitter) -> Iterator[Form]:
    """A number, or another tensor, put into elements that a mask chooses, or into all of them."""
    index, value = call.node.args[1:]
    elements = index if isinstance(index, tuple) else (index,)
    if all(each is Ellipsis or each == slice(None) for each in elements if not isinstance(each, fx.Node)):
        masks = [place for place, each in enumerate(elements) if isinstance(each, fx.Node)]
        if not masks and isinstance(value, fx.Node):
            yield from _copies(value, target, old, emit)
        elif not masks:
            yield from _filled(target, value, old)
        elif len(masks) == 1 and _holds(old.dtype, value):
            mask = _aligned(elements, masks[0], old, emit)
            if mask is not None:
                yield "masked_fill", (target, mask, value), {}
                yield torch.where, (mask, value, target), {}


def _aligned(elements: tuple[Any, ...], place: int, old: torch.Tensor, emit: Emitter) -> fx.Node | None:
    """A mask over some neighbouring dimensions of a tensor, as one that broadcasts against all of it."""
    mask: fx.Node = elements[place]
    chosen, shape = tensor_of(mask), shape_of(old)
    if chosen is None or chosen.dtype != torch.bool or not chosen.dim():
        return None
    before, behind = elements[:place], elements[place + 1 :]
    first = len(before) if Ellipsis not in before else len(shape) - len(behind) - chosen.dim()
    last = first + chosen.dim()
    if (Ellipsis in before and Ellipsis in behind) or first < 0 or shape_of(chosen) != shape[first:last]:
        return None
    for _ in shape[last:]:
        mask = emit.call("unsqueeze", mask, -1)
    return mask


def _copies(value: Any, target: fx.Node, old: torch.Tensor, emit: Emitter) -> Iterator[Form]:
    """A tensor in memory of its own, in the shape and dtype of another one."""
    given = tensor_of(value)
    if given is None or given.device != old.device or given.is_complex():
        return
    if given.dtype != old.dtype:
        value = emit.call("to", value, old.dtype)
    if shape_of(given) != shape_of(old):
        value = emit.call("expand_as", value, target)
    yield "clone", (value,), {}
    yield "clone", (value,), {"memory_format": torch.contiguous_format}


def _filled(target: fx.Node, value: Any, old: torch.Tensor) -> Iterator[Form]:
    """One number everywhere."""
    if _holds(old.dtype, value):
        yield torch.full_like, (target, value), {}


def _holds(kind: torch.dtype, value: object) -> bool:
    """Whether a number is one of a dtype, so that filling with it is assigning it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return isinstance(value, bool)
    if kind.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(kind).max
    return isinstance(value, int) and abs(value) <= (1 if kind == torch.bool else torch.iinfo(kind).max)
