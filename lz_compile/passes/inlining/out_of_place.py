"""Calls that are made in place, as calls that give what they leave in a tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.view import Call, inplace_position, read, tensor_of

#: Of which every element is a function of that element, and of other tensors: activations, and sums.
ACTIVATIONS = frozenset("relu relu6 hardtanh hardswish hardsigmoid leaky_relu elu celu selu silu mish gelu".split())
_ELEMENTWISE = ACTIVATIONS | frozenset(
    "add sub mul div pow exp exp2 expm1 log log2 log1p neg abs sign square sqrt rsqrt reciprocal sigmoid tanh sin cos erf "
    "clamp clamp_min clamp_max floor ceil round trunc nan_to_num masked_fill addcmul addcdiv lerp and or xor not "
    "tril triu scatter".split()
)
_OPERATORS: Mapping[Any, Any] = {
    getattr(operator, f"i{name}"): getattr(operator, name.strip("_"), None) or getattr(operator, f"{name}_")
    for name in "add sub mul truediv pow and or xor".split()
}

_Form: TypeAlias = "tuple[Any, tuple[Any, ...], Mapping[str, Any]]"


def forms(node: fx.Node, target: fx.Node, old: torch.Tensor, emit: Emitter) -> Iterator[_Form]:
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
    elif call.name in _ELEMENTWISE and old.dim() and call.is_inplace:
        out_of_place = _twin(node)
        if out_of_place is not None:
            yield out_of_place
        yield from _filling(call, target, old)


def forgets(node: fx.Node) -> bool:
    """Whether a call leaves nothing of what was there: what had a gradient gets one of zeros, rather than none."""
    call = read(node)
    index = node.args[1] if node.target is operator.setitem else None
    chosen = index if isinstance(index, tuple) else (index,)
    is_store = index is not None and not any(isinstance(each, fx.Node) for each in chosen)
    return is_store or "out" in node.kwargs or (call is not None and call.name in ("copy", "fill", "zero"))


def _filling(call: Call, target: fx.Node, old: torch.Tensor) -> Iterator[_Form]:
    """What is filled keeps its strides in a second form."""
    mask, value = call.get("mask"), call.get("value")
    if call.name == "masked_fill" and not isinstance(value, fx.Node) and _holds(old.dtype, value):
        yield torch.where, (mask, value, target), {}


def _twin(node: fx.Node) -> _Form | None:
    """The call that computes the same and writes nothing."""
    args, kwargs, name = node.args, dict(node.kwargs), str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method":
        stem = name.removesuffix("_")
        return (stem, args, kwargs) if name.endswith("_") and hasattr(torch.Tensor, stem) else None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target], args, kwargs
    position = inplace_position(node.target)
    if position is not None:
        kwargs.pop("inplace", None)
        return (
            node.target,
            (*args[:position], *[False for _ in args[position : position + 1]], *args[position + 1 :]),
            kwargs,
        )
    twin = getattr(torch, name.removesuffix("_"), None)
    return (twin, args, kwargs) if name.endswith("_") and getattr(torch, name, None) is node.target and twin else None


def _stores(call: Call, target: fx.Node, old: torch.Tensor, emit: Emitter) -> Iterator[_Form]:
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


def _copies(value: Any, target: fx.Node, old: torch.Tensor, emit: Emitter) -> Iterator[_Form]:
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


def _filled(target: fx.Node, value: Any, old: torch.Tensor) -> Iterator[_Form]:
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
