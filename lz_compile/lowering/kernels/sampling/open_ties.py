"""Rows of a filter that kernels leave open, filled in by the source's own operations.

Which of several equal scores a sort puts first is nobody's rule, so a limit that cuts between them is decided by running
what the source spelled, with PyTorch's own kernels (``lowering/spelled.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lz_compile.lowering.spelled import function

_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")


def _fill(out: torch.Tensor, given: Sequence[torch.Tensor], dim: int, source: str) -> None:
    """Rows of ``out`` along ``dim`` that are NaN become those of ``source``, a function of ``given``."""
    is_open = out.select(dim, 0).isnan()
    if not is_open.any():
        return
    with torch.no_grad():
        found = function(source)(None, *given)
        out.copy_(torch.where(is_open.unsqueeze(dim), found, out))


_LIBRARY.define(
    "fill_open_ties(Tensor(a!) out, Tensor[] given, int dim, str source) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe),
)
_LIBRARY.impl("fill_open_ties", _fill, "CompositeExplicitAutograd")
torch.library.register_fake("layerzero::fill_open_ties", lambda out, given, dim, source: None, lib=_LIBRARY)
fill: Any = torch.ops.layerzero.fill_open_ties.default
