"""Calls of our own functions, which graphs hold as operators ``layerzero::<op>``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import where_of
from lz_compile.passes.rewriting.builder import EMITTED
from lz_compile.passes.rewriting.match import Failure, Match, NearMiss, RefusedError, attempt


def op_calls(
    op: str, graph: fx.Graph, effects: Effects, match: Callable[[fx.Node, Effects], Match]
) -> Iterator[Match | NearMiss | Failure]:
    """Every call of ``layerzero::<op>`` that somebody reads, as ``match`` has it, and what it refuses."""

    def found(node: fx.Node) -> Match | NearMiss:
        try:
            return match(node, effects)
        except RefusedError as refusal:
            return NearMiss(op, node, refusal.reason, refusal.edit, where_of(node))

    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None
        is_own = getattr(packet, "_qualified_op_name", "") == f"layerzero::{op}"
        if is_own and node.users and EMITTED not in node.meta:
            yield attempt(op, node, found, node)
