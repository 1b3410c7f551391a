"""Graphs of tensors as text, as in a cache of compiled code: what an operator runs that is given some of the source."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import fx

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
def function(source: str) -> Callable[..., Any]:
    """The function of a text that :func:`spelled` made; its first argument is not used."""
    names = dict(_NAMES)
    exec(source, names)  # from a graph of this process, or from the user's own cache of compiled code
    found: Callable[..., Any] = names["forward"]
    return found
