"""What served calls are: which run the same code, and how one is remembered for the next process."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lz_compile.ground import events

Call = tuple[Sequence[Any], Mapping[str, Any]]
#: Values that are told apart by what they are.
_PLAIN = (
    bool,
    int,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


def is_call(value: Any) -> TypeGuard[Call]:
    """Whether something is positional and keyword inputs."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and isinstance(value[0], (tuple, list)) and isinstance(value[1], Mapping)


@dataclass(frozen=True)
class Modes:
    """The modes of a calling thread that compiled code is bound to."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    threads: int  #: of OpenMP; every thread of Python has its own number

    @staticmethod
    def now() -> Modes:
        """Those of this thread."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        autocast = tuple((name, torch.get_autocast_dtype(name)) for name in devices if torch.is_autocast_enabled(name))
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_num_threads())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread in these modes."""
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            if threads != self.threads:
                torch.set_num_threads(self.threads)
                stack.callback(torch.set_num_threads, threads)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for name, dtype in self.autocast:
                stack.enter_context(torch.autocast(name, dtype))
            yield

    def told(self) -> dict[str, Any]:
        """As JSON."""
        autocast = {name: str(dtype).removeprefix("torch.") for name, dtype in self.autocast}
        return {"grad": self.grad, "inference": self.inference, "autocast": autocast, "threads": self.threads}


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What calls that run the same code have in common; of equal tensors which are the same one.

    None where an argument is neither a tensor nor a plain value: nothing tells whether another one is like it.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    first: dict[int, int] = {}
    told: list[tuple[Any, ...]] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            strides = leaf.stride() if leaf.layout is torch.strided else None
            same = first.setdefault(id(leaf), number)
            told.append((type(leaf), leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad, same))
        elif isinstance(leaf, float):
            told.append((type(leaf), leaf.hex()))  # no two NaN are equal, but -0.0 and 0.0 are
        elif isinstance(leaf, _PLAIN):
            told.append((type(leaf), leaf))
        else:
            return None
    return spec, tuple(told)


def name_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call for people: the shapes of its tensors."""
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return f"a call with {', '.join(map(str, shapes)) or 'no tensors'}"


def told_of(value: Any) -> Any:
    """An argument as JSON.

    Raises:
        TypeError: it is none that can be told.
    """
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
        dtype, place = str(value.dtype).removeprefix("torch."), str(value.device)
        return {"tensor": [list(value.shape), list(value.stride()), dtype, place, value.requires_grad]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [told_of(each) for each in value]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: told_of(each) for name, each in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}")


def _made(told: Any) -> Any:
    """An argument of JSON; tensors are 0."""
    if not isinstance(told, dict):
        return told
    ((kind, value),) = told.items()
    if kind == "tensor":
        shape, strides, dtype, place, requires_grad = value
        size = (
            1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        memory = torch.zeros(size, dtype=getattr(torch, dtype), device=place)
        return memory.as_strided(shape, strides).requires_grad_(requires_grad)
    if kind == "dict":
        return {name: _made(each) for name, each in value.items()}
    return (tuple if kind == "tuple" else list)(map(_made, value))


def untold(told: Mapping[str, Any]) -> tuple[Call, Modes] | None:
    """A call that is remembered and its modes; None where it cannot be made here, which an event tells."""
    try:
        modes = told["modes"]
        autocast = tuple((name, getattr(torch, dtype)) for name, dtype in modes["autocast"].items())
        args, kwargs = _made(told["call"])
        return (args, kwargs), Modes(modes["grad"], modes["inference"], autocast, modes["threads"])
    except Exception as error:  # noqa: BLE001 a device that is not here, or a file that somebody else wrote
        events.record("SHAPE_NOT_MADE", "a shape that is remembered is not compiled", error)
        return None
