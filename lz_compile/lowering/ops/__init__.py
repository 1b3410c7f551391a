"""The op vocabulary: one module per op, named like it, with attributes, facts, reference and features."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lz_compile.passes.rewriting.match import Match


def names() -> list[str]:
    """Every op there is."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def module(op: str) -> Any:
    """The module that defines an op."""
    return importlib.import_module(f"{__name__}.{op}")


def features(match: Match) -> dict[str, str]:
    """What a kernel must support to run a match, by feature name, and what asks for it."""
    found: dict[str, str] = module(match.op).features(match.attributes, match.facts)
    return found
