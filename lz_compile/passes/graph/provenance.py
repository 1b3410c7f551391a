"""Which nodes are ours, and which lines of the source they stand for."""

from __future__ import annotations

from typing import Any

from torch import fx

from lz_compile.passes.graph.view import origin_of

#: In the metadata of every node that is ours: what a kernel emitted is not recognised again.
EMITTED = "layerzero_emitted"


def provenance(template: fx.Node) -> dict[str, Any]:
    """The metadata that says where a node comes from, and that it is ours, for what replaces ``template``."""
    return {**origin_of(template), EMITTED: True}
