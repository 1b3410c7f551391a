"""What a model computes twice is made one value, where both stand in one formula: a recogniser compares nodes.

Values that are equal but never meet stay: layers that make the same mask, each for itself, are to stay alike.
"""

from __future__ import annotations

from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import memory_of
from lz_compile.passes.rewriting.rewrite import erase_unread


def merge_met(graph: fx.Graph, effects: Effects) -> int:
    """Make one of all equal values of those that were met, and of what is computed of them alike; how many are gone."""
    number = effects.numbers
    wanted, firsts = {number[node] for node in effects.met}, dict[int, fx.Node]()
    merged, gone = set[fx.Node](), list[fx.Node]()
    for node in list(graph.nodes):
        first = firsts.setdefault(number[node], node)
        is_met = number[node] in wanted or not merged.isdisjoint(node.all_input_nodes)
        if first is not node and is_met and _may_be_one(first, node):
            node.replace_all_uses_with(first)
            merged.add(first)
            gone.append(node)
    erase_unread(graph, gone)
    return len(gone)


def _may_be_one(one: fx.Node, other: fx.Node) -> bool:
    """Whether nobody can tell by writing to one of two values whether they are one: whoever calls the graph may write."""
    memory = memory_of(one)
    is_shared = memory is not None and memory == memory_of(other)
    return memory is not None and (is_shared or not (layout.is_returned(one) or layout.is_returned(other)))
