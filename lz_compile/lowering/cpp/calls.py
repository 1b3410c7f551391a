"""Functions of C++ sources: their constants, how one is built, what it is called with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from lz_compile.lowering import cpp_builds

#: Shape, strides and dtype of a tensor: a call's arrays follow from them.
Layout: TypeAlias = tuple[Sequence[int], Sequence[int], torch.dtype]


def truths(**values: bool) -> str:
    """Constants that ``if constexpr`` asks."""
    return "".join(f"constexpr bool {name} = {str(value).lower()};\n" for name, value in values.items())


def function(name: str, source: str, flags: Sequence[str] = (), result: Any = None) -> Any:
    """The function ``name`` of a translation unit, which gives nothing, or a ``result`` of one of the types of ctypes.

    Raises:
        RuntimeError: there is no C++ compiler, or it refuses the source.
    """
    found = getattr(cpp_builds.load_cpp(source, flags), name)
    found.restype = result
    return found


def layouts(tensors: Iterable[torch.Tensor | None]) -> tuple[Layout | None, ...]:
    """How tensors lie in memory, for what is kept by that."""
    return tuple([None if each is None else (each.shape, each.stride(), each.dtype) for each in tensors])


def without_memory(layouts: Iterable[Layout | None]) -> list[torch.Tensor | None]:
    """Tensors that lie like these, to be asked and not to be read."""
    return [
        None if each is None else torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
        for each in layouts
    ]


def addresses(tensors: Iterable[torch.Tensor | None]) -> Any:
    """Where tensors lie; null for those that there are not."""
    return _array(ctypes.c_void_p, [None if each is None else each.data_ptr() for each in tensors])


def integers(values: Sequence[int]) -> Any:
    """Sizes, strides and truth values."""
    return _array(ctypes.c_int64, values)


def reals(values: Sequence[float]) -> Any:
    """Floating-point numbers."""
    return _array(ctypes.c_double, values)


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)
