"""Masks that are proven become attributes: what a kernel need not read, and may skip.

Every boolean leaf of the mask and every float leaf of the bias is read for what it means (:mod:`masks`). What is a band of
positions becomes one, key padding and documents become small operands, ALiBi its slopes; the tensor itself is then read
no more. A meaning that is only part of the truth lets kernels skip, and the tensor stays.

What a row gives that sees no key is decided by the source's fills; a leaf is replaced only where that stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import sympy
import torch
from torch import fx

from lz_compile.ground import events
from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import Size
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import CAUSAL, Band, Reach
from lz_compile.passes.attention.emitter import SCORES, AttentionEmitter
from lz_compile.passes.attention.scores import MASKING_FILL
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.masks import finite as masks_finite
from lz_compile.passes.masks.meaning import Axes, Documents, Implied, Meaning, Slopes
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.rewriting.builder import Builder

#: An additive fill up to this swallows every score in float32 and bfloat16: a row of it is the mean of the values.
_SWALLOWING = -1e30


def simplify(emitter: AttentionEmitter, masks: Masks) -> AttentionEmitter:
    """The same attention, its masks replaced by what they mean where that is proven."""
    if emitter.keep == 1 and emitter.bias == 0:
        return replace(emitter, mask_label="causal" if emitter.attrs.is_causal else "")
    leaves = _read(emitter, masks)
    state = _State(emitter, masks)
    usable = [leaf for leaf in leaves if leaf.meaning is not None and leaf.can_replace(emitter)]
    if emitter.attrs.masked_rows == "fill" or any(leaf.is_finite_fill for leaf in usable):
        usable = _without_empty_rows(emitter, leaves, usable, masks)
    for leaf in usable:
        state.take(leaf)
    return state.emitter(leaves)


@dataclass(frozen=True)
class _Leaf:
    """A mask or an additive term of one attention, and what it means (None: with the ``reason``)."""

    symbol: sympy.Symbol
    node: fx.Node
    is_boolean: bool
    keeps: bool
    factor: float
    meaning: Meaning | None
    reason: Reason | None = None

    @property
    def dropped(self) -> float | None:
        """What is added where an additive mask drops."""
        assert self.meaning is not None, "asked of what is understood"
        return None if self.meaning.dropped is None else self.meaning.dropped * self.factor

    @property
    def is_finite_fill(self) -> bool:
        """Whether it is an additive mask whose fill is a number."""
        return not self.is_boolean and self.dropped not in (None, float("-inf"))

    def can_replace(self, emitter: AttentionEmitter) -> bool:
        """Whether the meaning can stand for the tensor, what rows give that see no key aside."""
        meaning, attrs = self.meaning, emitter.attrs
        assert meaning is not None, "asked of what is understood"
        if meaning.slopes is not None and (attrs.has_sinks or not meaning.is_exact or attrs.masked_rows == "fill"):
            return False
        if self.is_boolean:
            return True
        if meaning.kept != 0 or emitter.floor is not None:
            return False
        if self.dropped is None:
            return meaning.is_exact
        if self.dropped > MASKING_FILL * (1 - 1e-9):
            return False
        return self.dropped != float("-inf") or attrs.masked_rows in ("nan", "zero")


def _read(emitter: AttentionEmitter, masks: Masks) -> list[_Leaf]:
    axes, found = Axes(*emitter.axes(SCORES)), []
    for factor in sympy.Mul.make_args(emitter.keep):
        for symbol in factor.free_symbols:
            found.append(_leaf(emitter, masks, axes, symbol, 1.0, keeps=factor == symbol))
    for symbol, coefficient in emitter.bias.as_coefficients_dict().items():
        is_term = symbol in emitter.region.leaves and sympy.diff(emitter.bias, symbol).is_number
        leaf = _leaf(emitter, masks, axes, symbol, float(coefficient), keeps=True) if is_term else None
        drops = leaf is not None and (leaf.meaning is None or leaf.meaning.dropped is not None)
        if leaf is not None and (leaf.factor > 0 or not drops):  # what is subtracted may be linear, and no mask
            found.append(leaf)
    return found


def _leaf(
    emitter: AttentionEmitter, masks: Masks, axes: Axes, symbol: sympy.Symbol, factor: float, *, keeps: bool
) -> _Leaf:
    source = emitter.region.leaves[symbol]
    tensor = tensor_of(source.node)
    is_boolean = symbol in emitter.keep.free_symbols
    if tensor is None:
        reason = Reason("MASK_NOT_PROVEN", f"{told(source.node)} is no tensor")
        return _Leaf(symbol, source.node, False, keeps, factor, None, reason)
    try:
        found = masks.read(source.node, source.dims, axes, keeps=keeps)
    except Exception as error:  # noqa: BLE001 a mask that we fail to read is a tensor, and an event
        events.record("MASK_READING_FAILED", f"the mask {told(source.node)} is taken as it is", error)
        found = Reason("MASK_READING_FAILED", f"{type(error).__name__}: {error}")
    if isinstance(found, Reason):
        kind = "the mask" if is_boolean else "the bias"
        found = Reason(found.code, found.message.replace(told(source.node), kind, 1))
        return _Leaf(symbol, source.node, is_boolean, keeps, factor, None, found)
    return _Leaf(symbol, source.node, is_boolean, keeps, factor, found)


def _without_empty_rows(
    emitter: AttentionEmitter, leaves: list[_Leaf], usable: list[_Leaf], masks: Masks
) -> list[_Leaf]:
    """Of the leaves that can be replaced, those that can where it matters what a row gives that sees no key."""
    if len(usable) == len(leaves) and not _others(emitter, leaves) and _sees_a_key(emitter, usable, masks):
        return usable
    additive = [leaf for leaf in leaves if not leaf.is_boolean and (leaf.meaning is None or leaf.dropped is not None)]
    attrs = emitter.attrs
    is_swallowing = (
        len(additive) == 1
        and additive[0] in usable
        and additive[0].meaning is not None
        and additive[0].meaning.is_exact
        and (additive[0].dropped or 0.0) <= _SWALLOWING
        and (emitter.keep == 1 or attrs.masked_rows == "mean")
        and attrs.score_dtype in (torch.float32, torch.bfloat16)
        and not emitter.needs_grad()
        and not _others(emitter, leaves)
    )
    if attrs.masked_rows == "fill":
        return []
    return usable if is_swallowing else [leaf for leaf in usable if not leaf.is_finite_fill]


def _others(emitter: AttentionEmitter, leaves: list[_Leaf]) -> bool:
    """Whether the bias holds more than these leaves that may mask."""
    known = {leaf.symbol for leaf in leaves}
    rest = emitter.bias.xreplace(dict.fromkeys(known, sympy.S.Zero))
    return not masks_finite.is_bounded(emitter.region, rest)


def _sees_a_key(emitter: AttentionEmitter, leaves: list[_Leaf], masks: Masks) -> bool:
    """Whether every query sees a key under all of these together."""
    return _sees_by_meaning(emitter, leaves) or _sees_by_values(emitter, leaves, masks)


def _sees_by_values(emitter: AttentionEmitter, leaves: list[_Leaf], masks: Masks) -> bool:
    """The same of masks of constants: they are looked at. Flags are drawn in a proof, where they may leave a query none."""
    if emitter.attrs.limits is not None or not all(isinstance(length, int) for length in emitter.lengths()):
        return False
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for leaf in leaves:
        value = None if leaf.meaning is None or leaf.meaning.flags else masks.values(leaf.node)
        if value is None:
            return False
        value = Builder(lambda node: node).arrange(value, emitter.region.leaves[leaf.symbol].dims, emitter.axes(SCORES))
        keep = keep & ((value == leaf.keeps) if leaf.is_boolean else value * leaf.factor > MASKING_FILL * (1 - 1e-9))
    return bool(keep.any(-1).all())


def _sees_by_meaning(emitter: AttentionEmitter, leaves: list[_Leaf]) -> bool:
    meanings = [leaf.meaning for leaf in leaves if leaf.meaning is not None]
    if not all(meaning.is_exact and not meaning.flags for meaning in meanings):
        return False
    band: Band | None = emitter.attrs.limits
    for meaning in meanings:
        if meaning.band is not None:
            band = meaning.band if band is None else intersection(band, meaning.band, *emitter.lengths())
            if band is None:
                return False
    documents = [meaning.documents for meaning in meanings if meaning.documents is not None]
    return all(_sees_itself(emitter, each, band) for each in documents)


def _sees_itself(emitter: AttentionEmitter, documents: Documents, band: Band | None) -> bool:
    """Whether a query sees the key at its own position: both are of one sequence of documents."""
    queries, keys = emitter.lengths()
    inside = band is None or ((band.lower or 0) <= 0 <= (0 if band.upper is None else band.upper))
    return documents.query.node is documents.key.node and queries == keys and inside


def intersection(one: Band, other: Band, queries: Size, keys: Size) -> Band | None:
    """What both bands keep, None where that is no band or leaves a query without a key."""
    if one.at_end != other.at_end:
        if not (isinstance(queries, int) and isinstance(keys, int)):
            return None
        start, end = (other, one) if one.at_end else (one, other)
        shift = keys - queries  # the one that is counted from the start, counted from the end
        lower, upper = (None if bound is None else bound - shift for bound in (start.lower, start.upper))
        one, other = Band(lower, upper, at_end=True), end
    lowers = [bound for bound in (one.lower, other.lower) if bound is not None]
    uppers = [bound for bound in (one.upper, other.upper) if bound is not None]
    lower, upper = max(lowers, default=None), min(uppers, default=None)
    return None if lower is not None and upper is not None and lower > upper else Band(lower, upper, one.at_end)


def _common(one: Reach, other: Reach) -> Reach:
    """Of two reaches, that which lets fewer through (they say what the masks say in any case)."""
    return min(one, other, key=lambda reach: sum(last - first for first, last in reach.spans) / len(reach.spans))


@dataclass
class _State:
    """What the leaves that were taken so far leave of the masks."""

    given: AttentionEmitter
    masks: Masks
    band: Band | None = None
    reach: Reach | None = None
    documents: Documents | None = None
    slopes: Slopes | None = None
    keep: sympy.Expr = sympy.S.One
    bias: sympy.Expr = sympy.S.Zero
    implied: dict[fx.Node, Implied] = field(default_factory=dict)
    taken: list[_Leaf] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.band = self.given.attrs.limits
        self.keep, self.bias = self.given.keep, self.given.bias

    def take(self, leaf: _Leaf) -> None:
        """Replace a leaf by its meaning, as far as that fits what was taken before."""
        meaning = leaf.meaning
        assert meaning is not None, "only what is understood is taken"
        band = self._joined(meaning.band)
        is_new = meaning.documents is None or self.documents in (None, meaning.documents)
        if (band is None and meaning.band is not None) or not is_new or (meaning.slopes and self.slopes):
            return
        self.band = band
        if meaning.reach is not None:
            self.reach = meaning.reach if self.reach is None else _common(self.reach, meaning.reach)
        if meaning.is_exact:
            self._replace(leaf, meaning)
        if meaning.is_exact or meaning.band is not None or meaning.reach is not None:
            self._imply(leaf, meaning)
            self.taken.append(leaf)

    def _joined(self, band: Band | None) -> Band | None:
        if band is None or self.band is None:
            return band or self.band
        return intersection(self.band, band, *self.given.lengths())

    def _replace(self, leaf: _Leaf, meaning: Meaning) -> None:
        region = self.given.region
        self.documents = meaning.documents or self.documents
        if meaning.slopes is not None:
            self.slopes = replace(meaning.slopes, factor=meaning.slopes.factor * leaf.factor)
        if leaf.is_boolean:
            self.keep = self.keep.xreplace({leaf.symbol: sympy.S.One if leaf.keeps else sympy.S.Zero})
        else:
            self.bias = self.bias.xreplace({leaf.symbol: sympy.S.Zero})
        for flag in meaning.flags:
            symbol = region.leaf(flag.node, flag.dims)
            if leaf.symbol in region.selecting:
                region.selecting.add(symbol)
            factor = symbol if flag.keeps else 1 - symbol
            self.keep = self.keep if factor in sympy.Mul.make_args(self.keep) else self.keep * factor

    def _imply(self, leaf: _Leaf, meaning: Meaning) -> None:
        dims = self.given.region.leaves[leaf.symbol].dims
        if leaf.is_boolean:
            self.implied[leaf.node] = Implied(meaning, dims, leaf.keeps, not leaf.keeps)
        else:
            self.implied[leaf.node] = Implied(meaning, dims, meaning.kept, meaning.dropped)

    def emitter(self, leaves: list[_Leaf]) -> AttentionEmitter:
        """The attention with what is left."""
        given = self.given
        if not self.taken:
            return replace(given, mask_label=_label(leaves), mask_reasons=_reasons(leaves))
        is_whole = len(self.taken) == len(leaves) and not _others(given, leaves)
        never_empty = is_whole and _sees_a_key(given, leaves, self.masks)
        attrs = self._attrs(never_empty=never_empty)
        buffers = {node: None for leaf in self.taken if leaf.meaning is not None for node in leaf.meaning.buffers}
        return replace(
            given,
            keep=self.keep,
            bias=self.bias,
            slopes=self.slopes,
            documents=self.documents,
            implied=self.implied,
            buffers=tuple(buffers),
            sees_keys=never_empty,
            attrs=attrs,
            fill=sympy.S.Zero if attrs.masked_rows != "fill" else given.fill,
            mask_label=_label(leaves),
            mask_reasons=_reasons(leaves),
        )

    def _attrs(self, *, never_empty: bool) -> AttentionAttrs:
        given, region = self.given, self.given.region
        masked_rows = given.attrs.masked_rows
        if never_empty:
            masked_rows = "nan"
        elif any(leaf.is_finite_fill for leaf in self.taken):
            masked_rows = "mean"
        symbols = {s for factor in sympy.Mul.make_args(self.keep) for s in factor.free_symbols}
        across = {*given.roles.batch, *given.roles.keys}
        return replace(
            given.attrs,
            is_causal=self.band == CAUSAL,
            band=None if self.band == CAUSAL else self.band,
            reach=self.reach,
            masked_rows=masked_rows,
            has_mask=self.keep != 1,
            has_bias=self.bias != 0 or given.distance != 0,
            has_slopes=self.slopes is not None,
            has_documents=self.documents is not None,
            bias_is_finite=self.bias == 0 or masks_finite.is_finite(region, self.bias),
            bias_can_mask=not masks_finite.is_bounded(region, self.bias),
            selects_masked=bool(symbols & region.selecting),
            masks_keys=all(region.leaves[symbol].axes <= across for symbol in symbols),
        )


def _label(leaves: list[_Leaf]) -> str:
    """What all masks mean together."""
    labels: dict[str, None] = {}
    for leaf in leaves:
        kind = "mask" if leaf.is_boolean else "bias"
        for part in (leaf.meaning.label if leaf.meaning is not None else "").split(" and "):
            labels.setdefault(part or kind)
        if leaf.meaning is not None and not (leaf.meaning.is_exact or leaf.is_boolean or leaf.meaning.reach):
            labels.setdefault(kind)
    if len(labels) > 1:
        labels.pop("none", None)
    return " and ".join(labels)


def _reasons(leaves: list[_Leaf]) -> tuple[Reason, ...]:
    return tuple(leaf.reason for leaf in leaves if leaf.reason is not None)
