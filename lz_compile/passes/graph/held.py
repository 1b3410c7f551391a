"""What the module of a graph holds beside it: parameters, buffers and graphs that ``get_attr`` nodes name."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx


def hold(owner: fx.GraphModule | None, name: str, graph: fx.GraphModule) -> str:
    """Put a graph into the module of another one, under a name of its own that begins with ``name``; the whole name."""
    assert owner is not None, f"the graph that {name} is put beside belongs to no module"
    path = next(path for path in (f"{name}_{i}" for i in itertools.count()) if not hasattr(owner, path))
    owner.add_module(path, graph)
    return path


def held_by(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """What the module of a graph holds of what these nodes name."""
    names = [node for node in nodes if node.op == "get_attr"]
    return {str(node.target): operator.attrgetter(str(node.target))(node.graph.owning_module) for node in names}
