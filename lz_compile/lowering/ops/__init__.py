"""The op vocabulary: one module per op, named like it, with attributes, facts, reference and features."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Every op there is."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def module(op: str) -> Any:
    """The module that defines an op."""
    return importlib.import_module(f"{__name__}.{op}")
