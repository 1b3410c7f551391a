"""One recogniser per op. Every module here with a ``recognise(graph, effects)`` is one; the file name is the op.

An anchor is read by way of :func:`~lz_compile.passes.rewriting.match.attempt`, so that one that fails costs no other one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.rewriting.match import Failure, Match, NearMiss

Recogniser = Callable[[fx.Graph, Effects], "Iterator[Match | NearMiss | Failure]"]


@cache
def recognisers() -> Mapping[str, Recogniser]:
    """All recognisers by op, in alphabetical order."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {module.__name__.rpartition(".")[2]: module.recognise for module in modules if hasattr(module, "recognise")}


recognisers()  # imported with the package: the first compile does not pay for it
