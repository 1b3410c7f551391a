"""Loops that make constants: masks over windows, tables of positions. No kernel could be missing there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lz_compile.passes.formula.calls import is_constant
from lz_compile.passes.graph.view import read, tensor_of


def reads_data(nodes: Iterable[fx.Node]) -> bool:
    """Whether anything of what these calls compute depends on values that the graph is given, and not on shapes alone."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        call = read(node)
        if call is None and node.op in ("placeholder", "get_attr"):
            if tensor_of(node) is not None:
                return True
        elif call is None or not is_constant(call):
            stack.extend(node.all_input_nodes)
    return False
