"""What a boolean mask of real values keeps, read off the mask itself: a band, keys, documents; then no kernel need read it.

An eager call has the mask and not how it was made. What is read is held against every value of the mask, so it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lz_compile.lowering.bands import CAUSAL, Band


@dataclass(frozen=True)
class Kept:
    """Operands and attributes of an attention that say the same as a mask; ``version`` is that of the mask's values.

    Values of an inference tensor have none, and are read every time.
    """

    version: int | None
    operands: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """The keys from the first to before the last that any query sees, and the mask over these."""

    version: int | None
    keys: slice
    mask: torch.Tensor


Read = TypeVar("Read", Kept, Seen)
#: A model makes a mask once, and hands it to every layer.
_kept: Any = WeakTensorKeyDictionary()
_seen: Any = WeakTensorKeyDictionary()


def kept(mask: torch.Tensor) -> Kept | None:
    """What a mask says, None where that is neither band, keys nor documents.

    Shapes:
        mask ``[B, 1, Sq, Sk]``, True keeps.
    """
    found = _once(_kept, mask, lambda version: _Reading(mask[:, 0]).kept(version))
    return found if found.attributes else None


def seen(mask: torch.Tensor) -> Seen:
    """The keys that a mask lets anybody see, as of a cache that is not full.

    Shapes:
        mask ``[..., Sk]``, True keeps.
    """

    def read(version: int | None) -> Seen:
        places = mask.flatten(0, -2).any(0).nonzero()
        keys = slice(int(places[0]), int(places[-1]) + 1) if places.numel() else slice(0, mask.shape[-1])
        return Seen(version, keys, mask[..., keys])

    return _once(_seen, mask, read)


def _once(known: Any, mask: torch.Tensor, read: Callable[[int | None], Read]) -> Read:
    """What is read of a mask, once as long as nobody writes to it."""
    version = None if mask.is_inference() else mask._version
    found: Read | None = known.get(mask)
    if found is None or version is None or found.version != version:
        found = read(version)
        known[mask] = found
    return found


class _Reading:
    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask
        *_, queries, keys = mask.shape
        self._sizes = queries, keys
        self._sees = mask.any(-1)  # [B, Sq]
        self._first = mask.int().argmax(-1)
        self._last = keys - 1 - mask.flip(-1).int().argmax(-1)

    def kept(self, version: int | None) -> Kept:
        queries, keys = self._sizes
        offset = keys - queries
        if not self._sees.any():
            return Kept(version)
        place = torch.arange(queries, device=self._mask.device)
        upper = int((self._last - place)[self._sees].max())
        lower = int((self._first - place)[self._sees].min())
        seen = self._mask.any(1)  # [B, Sk]
        is_open = lower <= 1 - queries, upper >= keys - 1
        for at_end in (offset != 0 and upper == offset, False):
            shift = offset if at_end else 0
            band = Band(None if is_open[0] else lower - shift, None if is_open[1] else upper - shift, at_end)
            if self._is(self._inside(band) & seen[:, None]):
                operands = {} if bool(seen.all()) else {"mask": seen[:, None, None]}
                return Kept(version, operands, _attributes(band))
        if offset == 0 and upper == 0:
            documents = torch.where(self._sees, self._first, -1 - place)
            same = documents[:, :, None] == documents[:, None]
            if self._is(self._inside(CAUSAL) & same & self._sees[:, :, None]) and bool(self._sees.all()):
                return Kept(version, {"query_documents": documents, "key_documents": documents}, _attributes(CAUSAL))
        return Kept(version)

    def _inside(self, band: Band) -> torch.Tensor:
        return band.mask(self._mask, *self._sizes, band.offset(*self._sizes))

    def _is(self, predicted: torch.Tensor) -> bool:
        return torch.equal(predicted, self._mask)


def _attributes(band: Band) -> dict[str, Any]:
    return {"is_causal": True} if band == CAUSAL else {"is_causal": False, "band": None if band == Band() else band}
