"""The nodes that a rewrite makes superfluous, and whether it may."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.expressions import is_cast, made_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient, grad_enabled
from lz_compile.passes.graph.refusal import RefusedError, mutated, told
from lz_compile.passes.graph.view import read, tensor_of
from lz_compile.passes.graph.writes import refuse_transformed

#: What is advised where someone reads an inner value of an attention.
IF_USED = "return no scores or probabilities and compute nothing else from them (transformers: output_attentions=False)"


@dataclass(frozen=True)
class Core:
    """Everything between the first node of a subgraph and its output that depends on the first, in graph order.

    No gradient flows through ``ungraded`` ones, so that the gradient mode around them makes no difference.
    """

    nodes: tuple[fx.Node, ...]
    ambient: Ambient
    ungraded: frozenset[fx.Node] = frozenset()

    @property
    def output(self) -> fx.Node:
        """The last node."""
        return self.nodes[-1]

    def check(self, effects: Effects, readers: Mapping[fx.Node, fx.Node], if_used: str = IF_USED) -> None:
        """Refuse where someone else needs an inner value, a mode changes inside, or an operand is overwritten.

        Args:
            effects: of the graph.
            readers: for every input, the node that reads it first; none may change from then on.
            if_used: what to do about a reader of an inner value.

        Raises:
            RefusedError: with the reason.
        """
        inside = set(self.nodes)
        for node in self.nodes[:-1]:
            outside = [user for user in node.users if user not in inside and not _measures(user, node)]
            if outside:
                raise RefusedError("INTERIOR_USED", f"{told(node)} is also {_reader(outside[0])}", if_used)
        self.check_modes(effects)
        for node in self.nodes:
            call = effects.calls[node]
            if call is not None and "out" in call.arguments and effects.owner(call.get("out")) not in inside:
                raise RefusedError(
                    "OPERAND_MUTATED", f"{told(node)} writes into a given tensor (out=)", "use its result"
                )
            if call is not None and call.is_inplace and effects.owner(node) not in inside:
                raise mutated(f"{told(node)} writes into memory of {told(effects.owner(node))}, which others may read")
        refuse_transformed(self.ambient)
        for node, reader in readers.items():
            writer = reader if effects.writes(reader, node) else effects.overwritten_after(node, reader, self.output)
            if writer is not None:
                raise mutated(f"{told(node)} is overwritten by {told(writer)} before the output")

    def check_modes(self, effects: Effects) -> None:
        """Refuse (``RefusedError``) where a mode changes inside."""
        if any(self._differs(effects.ambient(node), node) for node in self.nodes):
            text = "autocast or gradient mode changes inside"
            raise RefusedError("MODE_CHANGES_INSIDE", text, "enter or leave the mode outside of it")

    def widest(self) -> torch.dtype:
        """The widest dtype in which anything is computed."""
        tensors = map(tensor_of, self.nodes)
        kinds = [tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()]
        return max(kinds, key=lambda kind: kind.itemsize)

    def wants_grad(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether gradients are recorded there, and any of the nodes wants one."""
        return wants_grad(self.ambient, nodes)

    def _differs(self, ambient: Ambient, node: fx.Node) -> bool:
        """Whether a node runs under other modes; that gradients are on may be said in the graph, or be so from the start."""
        is_graded = node in self.ungraded or grad_enabled(ambient) == grad_enabled(self.ambient)
        return not is_graded or replace(ambient, grad=None) != replace(self.ambient, grad=None)


def wants_grad(ambient: Ambient, nodes: Iterable[fx.Node]) -> bool:
    """Whether gradients are recorded under these modes, and any of the nodes wants one."""
    tensors = map(tensor_of, nodes)
    return grad_enabled(ambient) and any(each is not None and each.requires_grad for each in tensors)


def _reader(node: fx.Node) -> str:
    return "returned" if node.op == "output" else f"used by {told(node)}"


def _measures(user: fx.Node, node: fx.Node) -> bool:
    """Whether only the size or the dtype of a value is asked for, or of a cast of it, which nobody has to compute it for."""
    call = read(user)
    if call is None:
        return False
    is_asked = call.name in ("size", "dim", "numel") or node not in made_of(user, call)
    return is_asked or (is_cast(call) and bool(user.users) and all(_measures(each, user) for each in user.users))


def find_core(effects: Effects, first: fx.Node, output: fx.Node, *, is_operand: bool = False) -> Core:
    """The nodes on a path from ``first`` to ``output``; in-place results count as the tensor they overwrite.

    With ``is_operand`` nobody computes ``first`` again, so that it may be overwritten before its first reader, the second
    node.
    """
    start, depends = effects.position[first], {first: True}
    order: list[fx.Node] = []

    def visit(node: fx.Node) -> bool:
        known = depends.get(node)
        if known is not None:
            return known
        depends[node] = False
        if effects.position[node] > start:
            inputs = [effects.current(operand, node) for operand in made_of(node, effects.calls.get(node))]
            found = [visit(operand) for operand in inputs]  # all of them, for their place in the order
            depends[node] = any(found)
            made = (each for each in inputs if depends[each] and not (is_operand and each is first))
            read = next((each for each in made if effects.is_opaque(each, node)), None)
            if read is not None:
                raise _overwritten(read, effects.overwritten_after(read, read, node), node)
        if depends[node]:
            order.append(node)
        return depends[node]

    visit(output)
    nodes = sorted({first, *order}, key=effects.position.__getitem__)
    return Core((*(node for node in nodes if node is not output), output), effects.ambient(output))


def core_between(effects: Effects, edges: Iterable[fx.Node], inside: Container[fx.Node], output: fx.Node) -> Core:
    """Of the nodes on paths from ``edges`` to ``output``, those that are ``inside``.

    A view of an edge that someone else reads, too, is none of them: it costs nothing.

    Raises:
        RefusedError: an edge is overwritten after it was read first.
    """
    firsts = dict.fromkeys(edges)  # in their order: the first that is at fault is told
    earlier = [each for each in firsts if effects.position[each] < effects.position[output]]
    cores = [find_core(effects, each, output, is_operand=True) for each in earlier]
    for first, reader in (core.nodes[:2] for core in cores):
        writer = effects.overwritten_after(first, reader, output)
        if writer is not None:
            raise _overwritten(first, writer, output)
    between = {node for core in cores for node in core.nodes if node in inside}
    nodes = sorted(between - {*firsts, output}, key=effects.position.__getitem__)
    views = set(firsts)
    for node in nodes:
        call = effects.calls[node]
        if call is not None and layout.is_view(call) and call.input in views:
            views.add(node)
    core = {*nodes, output}
    core -= {node for node in reversed(nodes) if node in views and not core.issuperset(node.users)}
    return Core((*(node for node in nodes if node in core), output), effects.ambient(output))


def _overwritten(read: fx.Node, writer: fx.Node | None, reader: fx.Node) -> RefusedError:
    """That memory of a value may have changed before it is read; of two inputs of a graph, nobody knows."""
    assert writer is not None, "somebody overwrote it"
    text = (
        f"{told(reader)} reads {told(read)}, memory of which {told(writer)} overwrites, or may overwrite, before that"
    )
    return RefusedError(
        "OPERAND_MUTATED", text, "overwrite it after the last use of this result, or compute a new tensor"
    )
