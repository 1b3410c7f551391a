"""What an attention is beside its operands: attributes, and the sizes and dtypes by which a kernel is selected."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from typing_extensions import Self

from lz_compile.ground.sizes import Size
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.bands import CAUSAL, Band, Reach

#: What a row gives whose every key is masked: NaN (softmax over ``-inf``), the mean of all values (softmax over equal
#: finite fills), zero, or the softmax over fills that differ (given as the operand ``fill``).
MaskedRows: TypeAlias = Literal["nan", "mean", "zero", "fill"]


@dataclass(frozen=True)
class AttentionAttrs(OpAttributes):
    """The attributes of one attention.

    ``is_causal`` is the commonest band, counted from the first query and key; ``band`` is any other one.

    ``scale`` multiplies ``query @ key^T`` (None: the op's default, ``D ** -0.5``); ``bias_can_mask`` says that the bias may
    hold masking constants, ``bias_is_finite`` that these are no infinities. ``selects_masked`` says that the mask drops
    scores whatever they are, NaN and infinities too, as ``where`` and ``masked_fill`` do and adding ``-inf`` does not;
    ``masks_keys`` that the operand ``mask`` is the same for every query and head; ``zeroes_nan`` that rows of NaN give
    zero. Neither asks for anything where ``nan_is_open``: what NaN and infinities in query and key come to is the kernel's
    business. ``rounds_bias`` says that the source adds the bias in the operands' dtype.
    """

    scale: float | None = None
    is_causal: bool = False
    band: Band | None = None
    reach: Reach | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    masked_rows: MaskedRows = "nan"
    has_mask: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    has_slopes: bool = False
    has_documents: bool = False
    bias_is_finite: bool = False
    bias_can_mask: bool = False
    enable_gqa: bool = False
    selects_masked: bool = False
    masks_keys: bool = False
    zeroes_nan: bool = False
    nan_is_open: bool = False
    score_dtype: torch.dtype = torch.float32
    rounds_bias: bool = False

    @property
    def limits(self) -> Band | None:
        """The band, whichever way it is given."""
        return CAUSAL if self.is_causal else self.band

    @property
    def hides_future(self) -> bool:
        """Whether no query sees a key after it."""
        return self.limits is not None and self.limits.upper == 0

    @property
    def variant(self) -> str:
        """``causal`` where the future is hidden, else ``full``."""
        return "causal" if self.hides_future else "full"

    def span(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        """The half-open range of keys outside of which the queries from ``start`` to before ``stop`` see none."""
        first, last = (0, keys) if self.limits is None else self.limits.span(start, stop, queries, keys)
        if self.reach is not None:
            low, high = self.reach.span(start, stop)
            first, last = max(first, low), min(last, high)
        return first, max(first, last)

    def deterministic(self) -> Self:
        """The same without dropout."""
        return replace(self, dropout_p=0.0)

    def assuming_finite(self) -> Self:
        """The same for operands without NaN and infinities."""
        return replace(self, nan_is_open=True)

    def to_dict(self) -> dict[str, Any]:
        """Names and values, those at their default left out (``scale`` always stays)."""
        default = AttentionAttrs()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {k: _plain(v) for k, v in values.items() if k == "scale" or v != getattr(default, k)}


def _plain(value: Any) -> Any:
    if isinstance(value, Reach):
        return f"{len(value.spans)} tiles of {value.tile} queries"
    if isinstance(value, Band):
        return asdict(value)
    return str(value) if isinstance(value, torch.dtype) else value


@dataclass(frozen=True)
class AttentionFacts:
    """Sizes (``int``, or sympy expressions where symbolic), dtype and device of one attention, for kernel selection."""

    batch: Size
    heads: Size
    kv_heads: Size
    query_len: Size
    key_len: Size
    head_dim: Size
    value_dim: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    bias_needs_grad: bool = False
    #: Whether a bias is handed over in a wider dtype than the operands, to which the source does not round it.
    bias_is_wide: bool = False
    #: How many copies of keys and values the source makes for the heads that share them.
    copies: int = 1
