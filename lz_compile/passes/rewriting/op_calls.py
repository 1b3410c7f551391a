"""Calls of our own functions, which graphs hold as operators ``layerzero::<op>``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.rewriting.driver import Driver, Found
from lz_compile.passes.rewriting.match import Match


def op_calls(op: str, graph: fx.Graph, effects: Effects, match: Callable[[fx.Node, Effects], Match]) -> Iterator[Found]:
    """Every call of ``layerzero::<op>`` that somebody reads, as ``match`` has it, and what it refuses."""

    def is_own(node: fx.Node) -> bool:
        packet = getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None
        return bool(node.users) and getattr(packet, "_qualified_op_name", "") == f"layerzero::{op}"

    return Driver(op).walk(graph.nodes, is_own, lambda node: match(node, effects))
