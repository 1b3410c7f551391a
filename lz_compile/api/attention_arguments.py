"""What fits an attention, whoever calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lz_compile.api.arguments import Arguments


class Call(NamedTuple):
    """What ``lz.attention`` is given (see there)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float | None
    dropout_p: float
    layout: str


def check(call: Call, is_cast: bool = False) -> None:
    """Refuse what is no attention, before a kernel reads memory that is not there; ``is_cast``: dtypes will be alike.

    Raises:
        ArgumentError: an argument does not fit.
    """
    query, key, value, mask, causal, scale, dropout_p, layout = call
    given = Arguments("attention")
    given.one_of("layout", layout, ("BHSD", "BSHD"))
    is_turned = layout == "BSHD"
    given.tensor("query", query, "B Sq Hq D" if is_turned else "B Hq Sq D")
    given.tensor("key", key, "B Sk Hk D" if is_turned else "B Hk Sk D")
    given.tensor("value", value, "B Sk Hk E" if is_turned else "B Hk Sk E")
    if not is_cast:
        given.equal_dtypes("query", query, key=key, value=value)
    heads, lengths = (2, 1) if is_turned else (1, 2)
    count, shared = query.shape[heads], key.shape[heads]
    if shared == 0 or count % shared:
        advice = "Check the layout: BHSD is [batch, heads, length, features]"
        raise given.wrong("query", f"heads in a multiple of the key heads, {shared}", count, advice)
    given.flag("causal", causal)
    given.number("scale", scale, optional=True)
    given.number("dropout_p", dropout_p, 0.0, 1.0)
    if mask is not None:
        _check_mask(given, mask, query, (query.shape[0], count, query.shape[lengths], key.shape[lengths]), is_cast)


def _check_mask(given: Arguments, mask: Any, query: torch.Tensor, scores: tuple[Any, ...], is_cast: bool) -> None:
    """Refuse a mask that would be added although it was meant to keep or drop."""
    given.tensor("mask", mask, kind="real")
    if mask.dtype == torch.bool:
        pass
    elif not mask.is_floating_point() or mask.dtype.itemsize == 1:
        expected = "of booleans (True keeps), or of floating-point numbers that are added to the scores"
        raise given.wrong("mask", expected, mask.dtype, "Give mask.bool(), if ones keep")
    elif not is_cast and mask.dtype not in (query.dtype, torch.float32):
        raise given.wrong("mask", f"in the dtype of query, {query.dtype}", mask.dtype, "Cast it")
    if mask.dim() < 2:
        raise given.wrong(
            "mask", "[..., Sq, Sk], of two dimensions at least", tuple(mask.shape), "Add dimensions of size one"
        )
    given.broadcasts("mask", mask, scores, "[B, Hq, Sq, Sk] = ")
