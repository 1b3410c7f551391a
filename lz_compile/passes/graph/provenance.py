"""Which nodes are ours, and which lines of the source they stand for."""

from __future__ import annotations

from typing import Any

from torch import fx

#: In the metadata of every node that is ours: what a kernel emitted is not recognised again.
EMITTED = "layerzero_emitted"


def provenance(template: fx.Node) -> dict[str, Any]:
    """The metadata that says where a node comes from, and that it is ours, for what replaces ``template``."""
    keys = ("stack_trace", "nn_module_stack", "source_fn_stack")
    return {key: template.meta[key] for key in keys if key in template.meta} | {EMITTED: True}
