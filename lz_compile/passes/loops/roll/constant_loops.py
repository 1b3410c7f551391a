"""Loops that make constants: masks over windows, tables of positions. No kernel could be missing there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lz_compile.passes.formula.calls import is_constant
from lz_compile.passes.graph.view import read, tensor_of
from lz_compile.passes.graph.walks import needed


def reads_data(nodes: Iterable[fx.Node]) -> bool:
    """Whether anything of what these calls compute depends on values that the graph is given, and not on shapes alone."""

    def sources(node: fx.Node) -> Iterable[fx.Node]:
        call = read(node)
        return () if call is not None and is_constant(call) else node.all_input_nodes

    given = (node for node in needed(nodes, (), sources) if node.op in ("placeholder", "get_attr"))
    return any(tensor_of(node) is not None for node in given)
