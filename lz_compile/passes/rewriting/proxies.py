"""What kernels are called with as they are put into a graph: proxies that know what a tensor, or a symbolic size, is.

Python may ask them for numbers and lengths, and iterate over them, where these are the same in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.view import known_tensor, read


def check_lengths(node: fx.Node) -> None:
    """Refuse a call whose results are as many as a size that differs from call to call: it would be one size from then on.

    Raises:
        TypeError: it is such a call.
    """
    call = read(node)
    if call is not None and call.name == "unbind":
        _fixed(known_tensor(call.input).shape[call.get("dim", 0)])


def _fixed(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        raise TypeError(f"the size {size} differs from call to call: only kernels without is_traceable count over it")
    return operator.index(size)


class _Counted(fx.Proxy):
    """A proxy that a kernel may iterate over where it has the same length in every call."""

    def __iter__(self) -> Iterator[Any]:
        places = range(len(self))
        return iter(
            [self.tracer.create_proxy("call_function", operator.getitem, (self, place), {}) for place in places]
        )


class TensorProxy(_Counted):
    """A proxy that knows its dtype, device and shape; symbolic extents are proxies themselves."""

    @property
    def _value(self) -> torch.Tensor:
        return known_tensor(self.node)

    @property
    def dtype(self) -> torch.dtype:
        """As of the tensor."""
        return self._value.dtype

    @property
    def device(self) -> torch.device:
        """As of the tensor."""
        return self._value.device

    @property
    def shape(self) -> tuple[Any, ...]:
        """Static extents as ``int``."""
        return tuple(map(self.size, range(self.dim())))

    def dim(self) -> int:
        """Of the tensor."""
        return self._value.dim()

    def size(self, dim: int) -> Any:
        """An ``int`` where it is static."""
        size = self._value.shape[dim]
        return size if isinstance(size, int) else self.tracer.create_proxy("call_method", "size", (self, dim), {})

    def stride(self) -> tuple[Any, ...]:
        """Of the tensor, symbolic ones as such."""
        return self._value.stride()

    def __len__(self) -> int:
        return _fixed(self._value.shape[0])


class NumberProxy(_Counted):
    """A symbolic size, or another value that is no tensor; compared, and made a number, by value, under a guard."""

    def __eq__(self, other: object) -> bool:
        one, two = (each.node.meta["example_value"] if isinstance(each, fx.Proxy) else each for each in (self, other))
        return bool(one == two)

    __hash__ = fx.Proxy.__hash__

    def __float__(self) -> float:
        return float(self.node.meta["example_value"])

    def __index__(self) -> int:
        return _fixed(self.node.meta["example_value"])

    def __len__(self) -> int:
        return len(self.node.meta["example_value"])
