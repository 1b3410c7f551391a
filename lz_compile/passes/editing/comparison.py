"""What two runs of the same calls gave, held against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.passes.editing.shared_memory import may_be_view, shared_otherwise, written
from lz_compile.passes.editing.stretch import Stretch
from lz_compile.passes.formula.strides import STRIDED, order_of, strides_matter, that_count
from lz_compile.passes.graph.subclasses import is_subclass
from lz_compile.passes.graph.view import memories_of, read, tensors_in, value_of
from lz_compile.passes.graph.walks import reached
from lz_compile.passes.proof.trial_run import Ran

#: Rounding of that many operations in a row is no difference, of the largest value of a tensor.
_ROUNDINGS = 256
_COARSEST = 0.05
_SMALL = 1 << 22
_FLOAT64 = 1e-8

#: How far results of a dtype may be apart, of the largest of them.
Rounding: TypeAlias = Callable[[torch.dtype], float]


def exact(_kind: torch.dtype) -> float:
    """In float64."""
    return _FLOAT64


def of_sums(kind: torch.dtype, *, least: float = 0.0) -> float:
    """Of long sums in a dtype; ``least`` is the unit of what is coarser among what was computed."""
    return min(_ROUNDINGS * max(torch.finfo(kind).eps, least), _COARSEST)


@dataclass(frozen=True)
class Difference:
    """What is another one; rounding may explain that of values."""

    text: str
    may_be_rounding: bool = False


def differences(stretch: Stretch, original: Ran, edited: Ran, rounding: Rounding) -> Iterator[Difference]:
    """Everything that differs after an edit."""
    if edited.error:
        yield Difference(f"the calls in their place raise {edited.error}")
        return
    overwritten = written([*stretch.before, *stretch.after])
    inputs = {
        node: each
        for node, each in original.inputs.items()
        if _is_small(each) or not overwritten.isdisjoint(memories_of(node))
    }
    scale = cache(lambda: _scale(tensors_in([original.values, list(inputs.values())])))
    for (old, new), one, other in zip(stretch.read, original.values, edited.values, strict=True):
        yield from _unlike(old.name, one, other, _strides_seen_of(new), scale, rounding)
    for node, value in inputs.items():
        yield from _unlike(f"{node.name} afterwards", value, edited.inputs[node], torch.Tensor.stride, scale, rounding)
    yield from map(Difference, shared_otherwise(stretch, original, edited))
    if original.gradients is None:
        return
    if edited.gradients is None or edited.raising:
        yield Difference("its backward pass raises")
        return
    largest = cache(lambda: _scale(tensors_in(original.gradients)))
    for index, (one, other) in enumerate(zip(original.gradients, edited.gradients, strict=True)):
        name = f"the gradient of input {index}"
        if (one is None) != (other is None):
            yield Difference(
                f"{name} is {'none' if other is None else 'there'}, and was {'none' if one is None else 'there'}"
            )
        elif one is not None and other is not None:
            yield from _apart(name, one, other, largest, rounding)


def _scale(values: Sequence[torch.Tensor]) -> float:
    return max((_largest(each) for each in values), default=0.0)


def _largest(value: torch.Tensor) -> float:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(comparable(value).abs().double().nan_to_num(0.0, 0.0, 0.0).max())


def comparable(value: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that has arithmetic."""
    value = value.detach()
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _unlike(
    name: str,
    one: Any,
    other: Any,
    strides: Callable[[torch.Tensor], Any],
    scale: Callable[[], float],
    rounding: Rounding,
) -> Iterator[Difference]:
    if is_subclass(one) and is_subclass(other):
        one, other = tensors_in(one), tensors_in(other)
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False))
    if pytree.tree_structure(one) != pytree.tree_structure(other):
        yield Difference(f"{name} has another structure")
    for first, second in pairs:
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            if first is not second and first != second:
                yield Difference(f"{name} is {second!r}, and was {first!r}")
            continue
        was, now = ({**_kind(each), "strides": that_count(strides(each), each)} for each in (first, second))
        other_kinds = [f"{name} has {what} {now[what]}, and had {was[what]}" for what in was if was[what] != now[what]]
        yield from map(Difference, other_kinds[:1])
        if not other_kinds:
            yield from _apart(name, first, second, scale, rounding)


def _kind(value: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": value.dtype,
        "device": value.device,
        "shape": tuple(value.shape),
        "requires_grad": value.requires_grad,
    }


def _strides_seen_of(node: fx.Node) -> Callable[[torch.Tensor], Sequence[int]]:
    """What can be seen behind of the strides of a value: all, their order, or nothing."""

    def readers(user: fx.Node) -> Iterable[fx.Node]:
        call = read(user)
        shows = call is not None and (may_be_view(call, user.all_input_nodes) or isinstance(value_of(user), tuple))
        return user.users if shows else ()

    calls = map(read, reached(node.users, readers))
    if any(call is None or call.is_inplace or call.name in STRIDED for call in calls):
        return torch.Tensor.stride
    return order_of if strides_matter(node) else lambda _: ()


def _apart(
    name: str, one: torch.Tensor, other: torch.Tensor, scale: Callable[[], float], rounding: Rounding
) -> Iterator[Difference]:
    if not (one.is_floating_point() or one.is_complex()):
        if not torch.equal(one, other):
            yield Difference(f"{name} has other values")
        return
    kind, one, other = one.dtype, comparable(one), comparable(other)
    if torch.equal(one, other):
        return
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, 0.0, (one - other).abs().double().nan_to_num(math.inf))
    worst = float(off.max()) if off.numel() else 0.0
    if worst > rounding(kind) * (_largest(one) + 1e-6 * scale()):
        text = (
            f"{name} is off by {worst:.2g}"
            if math.isfinite(worst)
            else f"{name} is NaN or infinite where it was not, or was"
        )
        yield Difference(text, may_be_rounding=True)


def _is_small(value: Any) -> bool:
    """Whether a tensor is compared even if nothing is known to write to it."""
    return sum(each.numel() for each in tensors_in(value)) <= _SMALL
