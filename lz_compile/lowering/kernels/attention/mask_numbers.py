"""What is dropped, as numbers in memory: for compiled code on CPUs that asks it of every head, and twice.

Inductor's C++ widens booleans one by one, and compares positions in 64 bits: with them, a softmax over scores takes three to
six times as long. Numbers it compares as fast as it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lz_compile.lowering.bands import Band

#: Scores that pay for one more operator.
FEWEST = 1 << 18
_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
_OPERATORS: Any = torch.ops.layerzero


def of_mask(mask: torch.Tensor, extents: tuple[Any, ...]) -> torch.Tensor:
    """A boolean mask of scores of some sizes, to select them by."""
    kept: torch.Tensor = _OPERATORS.mask_numbers.default(mask) > 0 if _pays(mask, extents) else mask
    return kept


def of_band(band: Band, query: torch.Tensor, extents: tuple[Any, ...], start: Any) -> torch.Tensor:
    """Where a band keeps scores of some sizes, whose first row is at ``start``: see :meth:`Band.mask`."""
    rows, columns = extents[-2:]
    if not _pays(query, extents):
        return band.mask(query, rows, columns, start=start)
    limits = (None if limit is None else start + limit for limit in (band.lower, band.upper))
    kept: torch.Tensor = _OPERATORS.band_numbers.default(query, rows, columns, *limits) > 0
    return kept


def _pays(like: torch.Tensor, extents: tuple[Any, ...]) -> bool:
    is_small = all(isinstance(size, int) for size in extents) and math.prod(extents) < FEWEST
    return like.device.type == "cpu" and not is_small


def _of_mask(mask: torch.Tensor) -> torch.Tensor:
    return _empty(mask, *mask.shape).copy_(mask)


def _of_band(like: torch.Tensor, rows: int, columns: int, lower: int | None, upper: int | None) -> torch.Tensor:
    kept = _empty(like, rows, columns).fill_(1)
    if upper is not None:
        kept.tril_(upper)
    return kept if lower is None else kept.triu_(lower)


def _empty(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    return like.new_empty(sizes, dtype=torch.bfloat16)


_DEFINITIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mask_numbers(Tensor mask) -> Tensor": (_of_mask, lambda mask: _empty(mask, *mask.shape)),
    "band_numbers(Tensor like, SymInt rows, SymInt columns, SymInt? lower, SymInt? upper) -> Tensor": (
        _of_band,
        lambda like, rows, columns, lower, upper: _empty(like, rows, columns),
    ),
}
for _schema, (_run, _fake) in _DEFINITIONS.items():
    _name = _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"layerzero::{_name}", _fake, lib=_LIBRARY)
