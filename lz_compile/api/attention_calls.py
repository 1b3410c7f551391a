"""An eager attention with all that the op knows: windows, softcap, sinks, biases; found again by its tensors' layouts.

``lz.attention`` is the quick way to what PyTorch's own function can do; this one is what integrations call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lz_compile.api import eager
from lz_compile.api.arguments import is_plain
from lz_compile.lowering.attention_attributes import AttentionAttrs, MaskedRows
from lz_compile.lowering.bands import CAUSAL, Band
from lz_compile.lowering.kernels.attention import torch_sdpa
from lz_compile.lowering.ops import attention as op
from lz_compile.lowering.ops.attention import Operands

#: Elements of a mask from which on another kernel than PyTorch's may bring more than reading the mask costs.
_WORTHWHILE = 1 << 18
#: Keys from which on it is looked how many of them anybody sees.
_LONG = 256


def attend(x: Operands, *, is_causal: bool = False, band: Band | None = None, **attributes: Any) -> torch.Tensor:
    """The attention over canonical operands (see ``lowering/ops/attention.py``).

    A row that a mask lets see no key gives zero, as in PyTorch's function; with a soft cap, sinks or a bias it sees all of
    them alike, as in models that write those out. A kernel gets what a mask says instead of the mask, where that is known
    (:func:`kept`). In a function that is compiled, these are PyTorch's operations, which our backend reads like any
    others.

    Args:
        x: the operands.
        is_causal: whether a query sees the keys up to its own position only, counted from the first ones.
        band: what a query sees by position, where that is something else.
        **attributes: others of :class:`AttentionAttrs` that no operand tells, by name.

    Shapes:
        the result is ``[B, Hq, Sq, E]``.
    """
    if x.query.shape[0] != x.key.shape[0]:  # learned queries are the same for all
        batch = max(x.query.shape[0], x.key.shape[0])
        alike = {name: getattr(x, name).expand(batch, -1, -1, -1) for name in ("query", "key", "value")}
        x = replace(x, **alike)
    plain = _Call(x, is_causal, band)
    if not is_plain(*x.flat()):
        return _own(x, plain.problem(attributes)[0])
    plain = plain.of_one_query()
    if not plain.averages(attributes):
        plain = plain.of_seen_keys()
    known = plain.without_mask() or plain
    names = (
        tuple(attributes.items()),
        plain.limits,
        known.limits,
        torch.is_grad_enabled(),
        *(_layout(*each) for each in known.x.given().items()),
        None if plain.x.mask is None else _layout("mask", plain.x.mask),
    )
    run = eager.bound("attention", names, partial(_bind, names, plain, known, attributes))
    found = run(known.x, plain.x)
    return found if plain.x.query is x.query else found.reshape(*x.query.shape[:3], x.value.shape[3])


#: Which axes of operands are lengths: that PyTorch's function is taken holds for all up to a power of two.
_IS_LENGTH = {name: [dim.startswith("S") for dim in dims.split()] for name, dims in op.SHAPES.items()}


def _layout(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """What is looked at beside the elements; of lengths their bucket, for each token of decoding sees one key more."""
    sizes = [size.bit_length() if wide else size for size, wide in zip(tensor.shape, _IS_LENGTH[name], strict=True)]
    return (name, *sizes, tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride()[-1] == 1)


@dataclass(frozen=True)
class _Call:
    """Operands, and what a query sees by position."""

    x: Operands
    is_causal: bool = False
    band: Band | None = None

    @property
    def limits(self) -> tuple[bool, Band | None]:
        return self.is_causal, self.band

    def of_one_query(self) -> _Call:
        """The same attention of one query; heads that share keys are queries of one head then, so that no key is repeated."""
        x, band, keys = self.x, self.band, self.x.key.shape[2]
        if x.query.shape[2] != 1 or x.query_documents is not None or x.slopes is not None:
            return self
        if band is not None and band.at_end and band.upper == 0 and (band.lower is None or 1 - band.lower >= keys):
            band = None
        heads, shared = x.query.shape[1], x.key.shape[1]
        if heads == shared or self.is_causal or band is not None:
            return _Call(x, self.is_causal, band)
        grouped = {
            name: each.reshape(each.shape[0], shared, heads // shared, each.shape[3])
            for name, each in x.given().items()
            if each.shape[1] == heads
        }
        return _Call(replace(x, **grouped))

    def averages(self, attributes: Mapping[str, Any]) -> bool:
        """Whether a row that a mask lets see no key sees all of them alike, as in models that write out what they add."""
        x = self.x
        return (
            x.sinks is not None or attributes.get("softcap") is not None or (x.mask is not None and x.bias is not None)
        )

    def of_seen_keys(self) -> _Call:
        """The same attention over the keys that its mask lets anybody see, as of a cache that is not full."""
        x, keys = self.x, self.x.key.shape[2]
        if x.mask is None or self.is_causal or self.band is not None or keys < _LONG:
            return self
        found = seen(x.mask) if x.mask.shape[-1] == keys else None
        if found is None or found.mask is None:
            return self
        return _Call(replace(x, key=x.key[:, :, found.keys], value=x.value[:, :, found.keys], mask=found.mask))

    def without_mask(self) -> _Call | None:
        """The same attention by what its mask says; None where there is none, or it says more."""
        mask = self.x.mask
        if mask is None or self.is_causal or self.band is not None or mask.shape[1] != 1:
            return None
        is_whole = mask.shape[-2:] == (self.x.query.shape[2], self.x.key.shape[2])
        if not is_whole or mask.numel() < _WORTHWHILE or not eager.has_choice("attention", mask.device.type):
            return None
        found = kept(mask)
        if found is None:
            return None
        given = {name: each for name, each in self.x.given().items() if name != "mask"}
        return _Call(Operands(**given, **found.operands), **found.attributes)

    def problem(self, attributes: Mapping[str, Any]) -> tuple[AttentionAttrs, Any]:
        x = self.x
        attrs, facts = eager.problem_of(x, is_causal=self.is_causal, band=self.band, **attributes)
        masks_keys = x.mask is not None and x.mask.shape[1:3] == (1, 1)
        wide = torch.promote_types(x.query.dtype, torch.float32)
        empty: MaskedRows = "mean" if self.averages(attributes) else "zero"
        return replace(attrs, masked_rows=empty, masks_keys=masks_keys, score_dtype=wide), facts


def _bind(
    names: tuple[Any, ...], plain: _Call, known: _Call, attributes: Mapping[str, Any], is_exact: bool = False
) -> Callable[[Operands, Operands], torch.Tensor]:
    """The attention of tensors like these: by a kernel over what is ``known``, or PyTorch's over the ``plain`` operands.

    What a kernel can do may depend on each length: one is bound to lengths that are exact.
    """
    own = partial(_plainly, plain.problem(attributes)[0])
    attrs, facts = known.problem(attributes)
    if 0 in (facts.batch, facts.query_len, facts.key_len):
        return own
    kernel = eager.kernel_for("attention", attrs, facts, known.x.query.device, known.x.given())
    if kernel is None or kernel.call is None:
        return own
    if not is_exact:
        return partial(_by_length, names, plain.limits, known.limits, attributes)
    return eager.guarded(kernel.kernel_id, partial(_through, kernel.call, attrs), own)


def _by_length(
    names: tuple[Any, ...],
    plain_limits: tuple[bool, Band | None],
    known_limits: tuple[bool, Band | None],
    attributes: Mapping[str, Any],
    known: Operands,
    plain: Operands,
) -> torch.Tensor:
    """The attention as it is chosen for these very lengths."""
    exact = (*names, *(each.shape for each in known.given().values()))
    calls = _Call(plain, *plain_limits), _Call(known, *known_limits)
    run = eager.bound("attention", exact, partial(_bind, exact, *calls, attributes, is_exact=True))
    return run(known, plain)


def _own(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """PyTorch's function; what it does not know is written out."""
    is_known = x.sinks is None and attrs.softcap is None
    return torch_sdpa.attention(x, attrs) if is_known else op.reference(x, attrs)


def _plainly(attrs: AttentionAttrs, _known: Operands, plain: Operands) -> torch.Tensor:
    return _own(plain, attrs)


def _through(
    call: Callable[..., torch.Tensor], attrs: AttentionAttrs, known: Operands, _plain: Operands
) -> torch.Tensor:
    return call(known, attrs)


# ---- what masks say --------------------------------------------------------------------------------------------------
#
# What a boolean mask of real values keeps, read off the mask itself: a band, keys, documents; then no kernel need read it.
# An eager call has the mask and not how it was made. What is read is held against every value of the mask, so it is exact.


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
