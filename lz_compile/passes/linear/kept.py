"""A kernel whose operands are functions of tensors that a module holds: they are computed once for all calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import torch
from torch import fx

from lz_compile.lowering import kept
from lz_compile.lowering.ops.linear import Operands
from lz_compile.lowering.spelled import spelled
from lz_compile.passes.editing.edit import Rewrite
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import memory_of, needed
from lz_compile.passes.linear.form import bytes_of, sources
from lz_compile.passes.proof.running import Subgraph
from lz_compile.passes.rewriting.rewrite import erase_unread

#: Operands that say what a weight is.
_FORM = ("weight", "scale", "zero", "offset", "codebook", "order")


def keep(graph: fx.Graph, results: Iterable[fx.Node], effects: Effects) -> tuple[Rewrite[fx.Node], int, int] | None:
    """A rewrite that keeps the operands of the kernel behind ``results``, with bytes that are kept and those that are stored.

    None where nothing is computed of tensors of modules alone.

    Raises:
        ValueError: what computes it has no text that another process understands.
    """
    kernel = next((each for each in reversed(needed(results, ())) if _kernel_of(each)), None)  # others come before it
    if kernel is None:
        return None
    *operands, attributes = kernel.args
    places = {Operands.names.index(name): name for name in _FORM}
    made = {
        place: each for place in places if isinstance(each := operands[place], fx.Node) and each.op != "placeholder"
    }
    found = {place: (each, sources(effects, each)) for place, each in made.items()}
    nodes = {place: each for place, (each, own) in found.items() if not isinstance(own, str)}
    given = [*dict.fromkeys(each for _, own in found.values() if not isinstance(own, str) for each in own)]
    if "weight" not in map(places.get, nodes):
        return None
    given.sort(key=lambda each: -bytes_of(each))
    text = _text(given, [*nodes.values()])
    rest = [None if place in nodes else each for place, each in enumerate(operands)]
    arguments = (rest, [*nodes], given, text, _kernel_of(kernel), attributes)
    owners = {memory_of(each) for each in given}
    fresh = sum(bytes_of(each) for each in nodes.values() if memory_of(each) not in owners)
    what = f"keeping the weight of {kernel.name}"
    shown = "the kernel gets what the same calls gave, looked up by all that they read"
    change = partial(_replace, graph, kernel, arguments, [*nodes.values()])
    return Rewrite(what, change, shown=shown), fresh, sum(map(bytes_of, given))


def _kernel_of(node: fx.Node) -> str:
    """The name of our operator of a product with a stored weight; empty where a node is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "layerzero":
        return ""
    return target._opname if [each.name for each in target._schema.arguments][:-1] == [*Operands.names] else ""


def _text(given: Collection[fx.Node], outputs: list[fx.Node]) -> str:
    """What computes some nodes of others, with names that do not tell which layer it is."""
    subgraph = Subgraph(inputs=dict.fromkeys(given, ()), nodes=tuple(needed(outputs, given)), outputs=tuple(outputs))
    graph, _ = subgraph.copied()
    for place, node in enumerate(graph.nodes):
        node._rename(f"n{place}")
        if node.op == "placeholder":
            node.target = node.name
    return spelled(graph)


def _replace(graph: fx.Graph, kernel: fx.Node, arguments: tuple[object, ...], superfluous: list[fx.Node]) -> fx.Node:
    """The call in the place of a kernel's."""
    with graph.inserting_before(kernel):
        new = graph.call_function(kept.call, arguments)  # type: ignore[arg-type]  # of nodes and numbers
    new.meta = dict(kernel.meta)
    kernel.replace_all_uses_with(new)
    graph.erase_node(kernel)
    erase_unread(graph, superfluous)
    return new
