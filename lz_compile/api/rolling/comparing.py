"""Whether a rolled target gives what it gave: results, gradients, and what arguments and modules hold."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lz_compile.ground.isolation import generators

#: How far apart results may be, of their size, by dtype: a scan computes each step as the loop does.
_TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


def contents(found: Any) -> list[Any]:
    """What a result holds, also in objects that are no containers."""
    leaves = pytree.tree_leaves(found)
    opaque = [hasattr(each, "__dict__") and not isinstance(each, (Tensor, nn.Module)) for each in leaves]
    inner = [vars(each) if is_opaque else each for each, is_opaque in zip(leaves, opaque, strict=True)]
    return pytree.tree_leaves(inner)


def held_by(module: nn.Module) -> list[Any]:
    """Buffers of a module, and what else it holds that a call may change."""
    kinds = (int, float, list, tuple, dict)
    own = {*vars(nn.Module())}
    every = [(name, each) for name, each in sorted(vars(module).items()) if name not in own]
    others = [each for name, each in every if isinstance(each, Tensor) or (name[:1] != "_" and isinstance(each, kinds))]
    return [*module.buffers(recurse=False), *others]


def are_close(expected: list[Any], found: list[Any]) -> bool:
    """Whether all of it is the same but for rounding."""
    if len(expected) != len(found):
        return False
    most = max((_size(each) for each in expected if isinstance(each, Tensor) and each.dtype in _TOLERANCE), default=0.0)
    return all(_is_close(one, other, most) for one, other in zip(expected, found, strict=True))


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().abs().nan_to_num(posinf=0.0).max()) if tensor.numel() else 0.0


def _is_close(one: Any, other: Any, most: float) -> bool:
    """Whether it is the same but for rounding; what is next to nothing of the ``most`` may be rounding."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        some = other if one is None else one
        is_zero = isinstance(some, Tensor) and not bool(some.any())
        is_plain = isinstance(one, (int, float, complex, str, bytes, bool))
        is_same = type(one) is type(other) and (not is_plain or one == other)
        return (is_zero and (one is None or other is None)) or is_same
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    tolerance = _TOLERANCE.get(one.dtype, 0.0)
    if not tolerance:
        return torch.equal(one, other)
    kinds = (each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each))
    tolerance = max([tolerance, *(_TOLERANCE.get(torch.get_autocast_dtype(each), 0.0) for each in kinds)])
    floor = torch.finfo(one.dtype).eps * most
    return torch.allclose(one, other, rtol=tolerance, atol=max(tolerance * _size(one), floor), equal_nan=True)


@contextmanager
def random_numbers() -> Iterator[Callable[[], list[Tensor]]]:
    """Generators as they are now, afterwards, and whenever what is given is called; that gives how they were."""
    before = [(each, each.get_state()) for each in generators()]

    def again() -> list[Tensor]:
        found = [each.get_state() for each, _ in before]
        for each, state in before:
            each.set_state(state)
        return found

    try:
        yield again
    finally:
        again()


@contextmanager
def watching(ran: set[tuple[str, int]]) -> Iterator[None]:
    """Note the functions that run in this thread, by file and first line."""
    before = sys.getprofile()

    def called(frame: types.FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            ran.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)
