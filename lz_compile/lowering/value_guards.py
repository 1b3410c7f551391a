"""Whether tensors still hold the values that a graph was made from. Asked before every call of the graph, so it is cheap.

A tensor is known by its identity, version counter and address (Dynamo asks for its type, shape and strides itself); only
when one of them is new, its values are compared, by a hash. So every layer of a model may share a graph that was made
from one layer's mask, and loading the same weights again compiles nothing. Writes that a version counter does not see
(``buffer.data.fill_()``, a write through a NumPy view) are not noticed, as autograd does not notice them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

#: How often one tensor's values are compared because its version changed: a buffer that is written at every step with
#: the values it has (``DistributedDataParallel`` broadcasts buffers) costs this much and one compilation.
MOST_CHANGES = 4

#: How many comparisons one guard makes in all: a model may make its mask anew for every call.
MOST_COMPARISONS = 256

#: Compilations of one function for different values of a buffer: two kinds of layers (local and global) are common.
MOST_VALUES = 2

T = TypeVar("T")


class ByIdentity(Generic[T]):
    """A dictionary over tensors themselves, not their values; what dies is dropped."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def get(self, tensor: Tensor) -> T | None:
        """What is kept for a tensor."""
        entry = self._entries.get(id(tensor))
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Keep something for a tensor, as long as it lives."""
        key, entries = id(tensor), self._entries
        entries[key] = (weakref.ref(tensor, lambda _: entries.pop(key, None)), value)

    def values(self) -> list[T]:
        """What is kept for the tensors that live."""
        return [value for _, value in list(self._entries.values())]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor when it was compared. ``alias`` keeps its memory from being given to another tensor."""

    version: int
    address: int
    alias: Tensor
    is_equal: bool
    changes: int

    @classmethod
    def now(cls, tensor: Tensor, is_equal: bool, changes: int = 0) -> _Seen:
        """A tensor as it is."""
        return cls(tensor._version, tensor.data_ptr(), tensor.detach(), is_equal, changes)


#: Tensors that were written to with other values, or too often.
_unsteady: ByIdentity[bool] = ByIdentity()


class KnownValues:
    """The values of a tensor, and which tensors are known to hold them."""

    def __init__(self, tensor: Tensor) -> None:
        self._digest = digest(tensor)
        self._seen: ByIdentity[_Seen] = ByIdentity()
        self._comparisons = 0
        self._seen.set(tensor, _Seen.now(tensor, is_equal=True))

    def held_by(self, tensor: Tensor) -> bool:
        """Whether a tensor holds these values."""
        seen = self._seen.get(tensor)
        if seen is not None:
            if not seen.is_equal:
                return False
            if seen.version == tensor._version and seen.address == tensor.data_ptr():
                return True
        return self._compare(tensor, seen)

    def has_holder(self) -> bool:
        """Whether a tensor that held these values when it was last looked at still lives."""
        return any(seen.is_equal for seen in self._seen.values())

    def _compare(self, tensor: Tensor, seen: _Seen | None) -> bool:
        changes = 0 if seen is None else seen.changes + 1
        self._comparisons += 1
        is_worth_it = changes <= MOST_CHANGES and self._comparisons <= MOST_COMPARISONS
        is_equal = is_worth_it and is_steady(tensor) and digest(tensor) == self._digest
        if not is_equal and seen is not None:
            _unsteady.set(tensor, True)
        self._seen.set(tensor, _Seen.now(tensor, is_equal, changes))
        return is_equal


def is_steady(tensor: Tensor) -> bool:
    """Whether a tensor's values have not been seen to change."""
    return _unsteady.get(tensor) is None


class Frame:
    """Which values buffers had in the compilations of one function, to stop where they go on changing."""

    def __init__(self) -> None:
        self._values: dict[str, list[weakref.ref[KnownValues]]] = {}

    def is_reliable(self, tensor: Tensor, name: str) -> bool:
        """Whether one more compilation may rely on the values of a buffer, called ``name`` in the function."""
        earlier = self._earlier(name)
        if any(known.held_by(tensor) for known in earlier):
            return True
        return is_steady(tensor) and len(earlier) < MOST_VALUES and all(known.has_holder() for known in earlier)

    def values(self, tensor: Tensor, name: str) -> KnownValues:
        """The values of a buffer, which the function is compiled for."""
        found = next((known for known in self._earlier(name) if known.held_by(tensor)), None)
        if found is None:
            found = KnownValues(tensor)
            self._values.setdefault(name, []).append(weakref.ref(found))
        return found

    def _earlier(self, name: str) -> list[KnownValues]:
        return [known for each in self._values.get(name, []) if (known := each()) is not None]


def has_values(tensor: object) -> bool:
    """Whether something is a plain tensor with values and a version counter, that needs no gradient."""
    return type(tensor) is torch.Tensor and tells_writes(tensor) and not tensor.requires_grad


def tells_writes(tensor: Tensor) -> bool:
    """Whether a tensor, or a parameter, has plain memory and a version counter."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_inference() or tensor.is_quantized or tensor.is_nested)
    )


_looked_at: ContextVar[list[Tensor] | None] = ContextVar("lz_compile_values_looked_at", default=None)


@contextmanager
def noting() -> Iterator[list[Tensor]]:
    """The tensors whose values are looked at inside, also those on which nothing rests in the end."""
    found: list[Tensor] = []
    token = _looked_at.set(found)
    try:
        yield found
    finally:
        _looked_at.reset(token)


def look_at(tensor: Tensor) -> None:
    """Note that a decision follows from a tensor's values, be it that they are of no use."""
    noted = _looked_at.get()
    if noted is not None and not any(each is tensor for each in noted):
        noted.append(tensor)


def digest(tensor: Tensor) -> bytes:
    """A hash of the values, their type and arrangement."""
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=32)
    found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
