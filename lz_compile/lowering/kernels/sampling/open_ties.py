"""Rows of a filter that kernels leave open, filled in by the source's own operations.

Which of several equal scores a sort puts first is nobody's rule, so a limit that cuts between them is decided by running
what the source spelled, with PyTorch's own kernels. That is text here, as in a cache of compiled code: a function of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import fx

_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
#: What code that ``torch.fx`` writes calls by a name of its own.
_NAMES: dict[str, Any] = {"device": torch.device, "inf": torch.inf, "nan": torch.nan, "NoneType": type(None)}


def spelled(graph: fx.Graph) -> str:
    """The text of a graph of tensors.

    Raises:
        ValueError: it calls what has no name that every process knows.
    """
    code = graph.python_code("self")
    modules = {}
    for name, value in code.globals.items():
        if isinstance(value, ModuleType):
            modules[name] = value.__name__
        elif name not in _NAMES:
            raise ValueError(f"{name} is known in this process only")
    imports = "".join(f"import {module} as {name}\n" for name, module in sorted(modules.items()))
    return imports + code.src


@lru_cache(maxsize=256)
def function(source: str) -> Callable[..., torch.Tensor]:
    """The function of a text that :func:`spelled` made."""
    names = dict(_NAMES)
    exec(source, names)  # from a graph of this process, or from the user's own cache of compiled code
    found: Callable[..., torch.Tensor] = names["forward"]
    return found


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
