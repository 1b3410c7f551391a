"""What a boolean mask of real values keeps, read off the mask itself: a band, keys, documents; then no kernel need read it.

An eager call has the mask and not how it was made. What is read is held against every value of the mask, so it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lz_compile.lowering.bands import CAUSAL, Band

#: What tells that nobody wrote to a mask: the version of its values, and where they lie.
State: TypeAlias = "tuple[int, int] | None"


@dataclass(frozen=True)
class Kept:
    """Operands and attributes of an attention that say the same as a mask; none where it says something else."""

    state: State
    operands: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """The keys from the first to before the last that any query sees, and a mask over these; None if they are most of all."""

    state: State
    keys: slice = field(default_factory=lambda: slice(None))
    mask: torch.Tensor | None = None


Read = TypeVar("Read", Kept, Seen)
#: A model makes a mask once, and hands it to every layer.
_kept: Any = WeakTensorKeyDictionary()
_seen: Any = WeakTensorKeyDictionary()
#: Elements up to which a mask may be read for each layer anew.
_FEW = 1 << 14


def kept(mask: torch.Tensor) -> Kept | None:
    """What a mask says, None where that is neither band, keys nor documents, or could change unseen.

    Shapes:
        mask ``[B, 1, Sq, Sk]``, True keeps.
    """
    state = _state(mask)
    if state is None:
        return None
    found: Kept = _once(_kept, mask, state, lambda: _Reading(mask[:, 0]).kept(state))
    return found if found.attributes else None


def seen(mask: torch.Tensor) -> Seen:
    """The keys that a mask lets anybody see, as of a cache that is not full.

    Shapes:
        mask ``[..., Sk]``, True keeps.
    """
    state = _state(mask)
    if state is None:
        return _over_seen(mask, state) if mask.numel() <= _FEW else Seen(state)
    return _once(_seen, mask, state, lambda: _over_seen(mask, state))


def _over_seen(mask: torch.Tensor, state: State) -> Seen:
    places = mask.flatten(0, -2).any(0).nonzero()
    if not places.numel():
        return Seen(state)
    keys = slice(int(places[0]), int(places[-1]) + 1)
    if keys.stop - keys.start > mask.shape[-1] // 2:
        return Seen(state)
    return Seen(state, keys, mask[..., keys].clone())  # a view would keep the mask alive


def _state(mask: torch.Tensor) -> State:
    """None where nobody would know of a write: inference tensors have no version, and others may write to foreign memory."""
    if mask.is_inference() or not mask.untyped_storage().resizable():
        return None
    return mask._version, mask.data_ptr()


def _once(known: Any, mask: torch.Tensor, state: State, read: Callable[[], Read]) -> Read:
    """What is read of a mask, once as long as nobody writes to it."""
    found: Read | None = known.get(mask)
    if found is None or found.state != state:
        found = read()
        known[mask] = found
    return found


class _Reading:
    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask
        *_, queries, keys = mask.shape
        self._sizes = queries, keys
        self._sees = mask.any(-1)  # [B, Sq]
        ones = mask.to(torch.uint8)
        self._first = ones.argmax(-1)
        self._last = keys - 1 - ones.flip(-1).argmax(-1)

    def kept(self, state: State) -> Kept:
        queries, keys = self._sizes
        offset = keys - queries
        if not self._sees.any():
            return Kept(state)
        place = torch.arange(queries, device=self._mask.device)
        upper = int((self._last - place)[self._sees].max())
        lower = int((self._first - place)[self._sees].min())
        seen = self._mask.any(1)  # [B, Sk]
        # Keys that nobody sees, as padding, are no window: limits are taken only where it needs them.
        for low, high in ((None, None), (None, upper), (lower, None), (lower, upper)):
            at_end = offset != 0 and high == offset
            shift = offset if at_end else 0
            band = Band(None if low is None else low - shift, None if high is None else high - shift, at_end)
            inside = self._inside(band)
            if bool(inside.any(-1).all()) and self._is(inside & seen[:, None]):
                operands = {} if bool(seen.all()) else {"mask": seen[:, None, None]}
                return Kept(state, operands, _attributes(band))
        if offset == 0 and upper == 0 and bool(self._sees.all()):
            same = self._first[:, :, None] == self._first[:, None]
            if self._is(self._inside(CAUSAL) & same):
                return Kept(
                    state, dict.fromkeys(("query_documents", "key_documents"), self._first), _attributes(CAUSAL)
                )
        return Kept(state)

    def _inside(self, band: Band) -> torch.Tensor:
        return band.mask(self._mask, *self._sizes, band.offset(*self._sizes))

    def _is(self, predicted: torch.Tensor) -> bool:
        return torch.equal(predicted.expand_as(self._mask), self._mask)


def _attributes(band: Band) -> dict[str, Any]:
    return {"is_causal": True} if band == CAUSAL else {"is_causal": False, "band": None if band == Band() else band}
