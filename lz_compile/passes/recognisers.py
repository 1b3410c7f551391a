"""One recogniser per op: the ``recognise(graph, effects)`` of the module ``recogniser`` in the room named like the op.

Anchors are read by a :class:`~lz_compile.passes.rewriting.driver.Driver`, so that one that fails costs no other one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.masks.meaning import Meanings
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.rewriting.match import Outcome

Recogniser = Callable[[fx.Graph, Effects], Iterator[Outcome]]


@cache
def recognisers() -> Mapping[str, Recogniser]:
    """All recognisers by op, in alphabetical order."""
    rooms = Path(__file__).parent.glob("*/recogniser.py")
    ops = sorted(path.parent.name for path in rooms)
    found = {op: importlib.import_module(f"{__package__}.{op}.recogniser").recognise for op in ops}
    attention: Callable[[fx.Graph, Effects, Meanings], Iterator[Outcome]] = found["attention"]
    # attention asks what masks mean, and not how they are read
    return {**found, "attention": lambda graph, effects: attention(graph, effects, Masks(effects))}


recognisers()  # imported with the package: the first compile does not pay for it
