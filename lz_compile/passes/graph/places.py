"""Which inputs of a graph are read by places of their memory: they may begin elsewhere in it in a later call."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.passes.graph.view import memory_of, read

_BY_PLACE = frozenset({"as_strided", "as_strided_copy"})


def read_by_place(graph: fx.Graph) -> list[fx.Node]:
    """The inputs in whose memory a call counts from the beginning, as ``as_strided`` with an offset does."""
    memories = {memory_of(node) for node in _counted_in(graph)} - {None}
    return [node for node in graph.find_nodes(op="placeholder") if memory_of(node) in memories]


def _counted_in(graph: fx.Graph) -> Iterator[fx.Node]:
    """The tensors in whose memory calls count, here, and what graphs are given that hold such calls."""
    for node in graph.nodes:
        call = read(node)
        if call is not None and call.name in _BY_PLACE and call.get("storage_offset") is not None:
            yield call.input
        nested = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(nested, fx.GraphModule) and any(_counted_in(nested.graph)):
            for user in node.users:
                yield from user.all_input_nodes
