"""What nobody reads: a value that is computed and thrown away is no use of what it was computed from.

Models return attention weights that their callers drop, average them, keep statistics for a log that is off. Inductor
computes none of it, so that it must not stand in the way of a rewrite either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

from lz_compile.passes.formula.equal_values import only_computes
from lz_compile.passes.graph.view import read

#: A join of fewer values may be part of one step, and so may be fewer calls.
_MANY = 4


def drop_dead(graph: fx.Graph) -> int:
    """Erase calls whose results nobody reads, and what only they read; how many there were.

    Calls that write, draw random numbers, or may do anything else besides giving a result stay.
    """
    return _erase(graph, dead_calls(graph))


def drop_dead_of_loops(graph: fx.Graph) -> int:
    """The same of what all steps of a loop but its last compute for nobody, of joins of many values, and computed of those.

    Other values stay: steps are equal only as long as they compute the same, whoever reads it.
    """
    dead, gone = dict.fromkeys(dead_calls(graph)), dict[fx.Node, None]()
    unread, others, scattered = Counter(map(_alike, dead)), Counter[Any](), set[Any]()
    for node in graph.nodes if dead else ():
        if node not in dead:
            others[_alike(node)] += 1
        elif others[_alike(node)]:  # without it, the steps before and behind one that is read were two loops
            scattered.add(_alike(node))
    for node in reversed(dead):
        is_join = str(getattr(read(node), "name", "")) in ("cat", "stack") and len(node.all_input_nodes) >= _MANY
        key = _alike(node)
        is_unread = key not in scattered and unread[key] >= _MANY * max(others[key], 1)
        if is_join or is_unread or any(each in gone for each in node.all_input_nodes):
            gone[node] = None
    return _erase(graph, list(reversed(gone)))


def _alike(node: fx.Node) -> Any:
    """The same for a call in every step of a loop."""
    return str(node.target) if node.op == "call_method" else node.target, node.meta.get("stack_trace")


def dead_calls(graph: fx.Graph) -> list[fx.Node]:
    """Calls whose results nobody reads, the last first."""
    dead: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if all(user in dead for user in node.users):
            call = read(node)
            if call is not None and only_computes(call):
                dead[node] = None
    return list(dead)


def _erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> int:
    for node in nodes:
        graph.erase_node(node)
    return len(nodes)
