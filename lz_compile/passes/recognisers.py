"""One recogniser per op, in the room named like it: ``recognise(graph, effects)`` of the module ``recogniser``.

Where that only says what it read, ``matches(graph, effects)`` of the module ``matching`` beside it makes matches of that.
Anchors are read by a :class:`~lz_compile.passes.rewriting.match.Driver`, so that one that fails costs no other one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

from torch import fx

from lz_compile.passes.attention.matching import attentions
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.paged_attention.gathered import matched
from lz_compile.passes.rewriting.match import Outcome

Recogniser = Callable[[fx.Graph, Effects], Iterator[Outcome]]


@cache
def recognisers() -> Mapping[str, Recogniser]:
    """All recognisers by op, in alphabetical order."""
    rooms = {path.parent for name in ("recogniser", "matching") for path in Path(__file__).parent.glob(f"*/{name}.py")}
    found = {room.name: _asked(room) for room in rooms if room.name != "attention"}
    return dict(sorted({**found, "attention": _attentions}.items()))


def _asked(room: Path) -> Recogniser:
    """Who gives the matches of an op."""
    name, function = ("matching", "matches") if (room / "matching.py").exists() else ("recogniser", "recognise")
    found: Recogniser = getattr(importlib.import_module(f"{__package__}.{room.name}.{name}"), function)
    return found


def _attentions(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Attention asks what masks mean, and not how they are read, nor which op keeps its keys in a cache."""
    masks = Masks(effects)
    return attentions(graph, effects, masks, partial(matched, masks))


recognisers()  # imported with the package: the first compile does not pay for it
