"""Which inputs of a graph are read by places of their memory: they may begin elsewhere in it in a later call."""

from __future__ import annotations

from torch import fx

from lz_compile.passes.graph.view import memory_of, read


def read_by_place(graph: fx.Graph) -> list[fx.Node]:
    """The inputs in whose memory a call counts from the beginning, as ``as_strided`` with an offset does."""
    calls = [call for node in graph.nodes if (call := read(node)) is not None and call.name == "as_strided"]
    memories = {memory_of(call.input) for call in calls if call.get("storage_offset") is not None} - {None}
    return [node for node in graph.find_nodes(op="placeholder") if memory_of(node) in memories]
