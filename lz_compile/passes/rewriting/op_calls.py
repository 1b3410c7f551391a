"""Calls of our own functions, which graphs hold as operators ``layerzero::<op>``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.lowering.operands import Operands
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.match import Driver, Match, Outcome, TableEmitter


@dataclass(frozen=True)
class CallEmitter(TableEmitter):
    """Operands are in the op's canonical layout already; ``places`` are those of the outputs among several results."""

    given: Mapping[str, fx.Node]
    attrs: Any
    operand_type: type[Operands]
    places: tuple[int, ...] | None = None

    def operands(self, builder: Builder) -> Operands:
        """As they are."""
        return self.operand_type(**{name: builder.value(node) for name, node in self.given.items()})

    def result(self, _builder: Builder, value: Any) -> Any:
        """As it is; of several results, those that are read."""
        if self.places is None:
            return value
        found = tuple(value[place] for place in self.places)
        return found if len(found) > 1 else found[0]


def op_calls(
    op: str, graph: fx.Graph, effects: Effects, match: Callable[[fx.Node, Effects], Match]
) -> Iterator[Outcome]:
    """Every call of ``layerzero::<op>`` that somebody reads, as ``match`` has it, and what it refuses."""

    def is_own(node: fx.Node) -> bool:
        packet = getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None
        return bool(node.users) and getattr(packet, "_qualified_op_name", "") == f"layerzero::{op}"

    return Driver(op).walk(graph.nodes, is_own, lambda node: match(node, effects))


def arguments_of(
    node: fx.Node, operands: type[Operands], *named: str
) -> tuple[dict[str, fx.Node], dict[str, torch.Tensor], dict[str, Any]]:
    """The operands that a call is given, what is known of these, and the arguments of other names, which come behind."""
    arguments: dict[str, Any] = dict(zip((*operands.names, *named), node.args, strict=False)) | node.kwargs
    given = {name: each for name in operands.names if isinstance(each := arguments.get(name), fx.Node)}
    tensors = {name: tensor for name, each in given.items() if (tensor := tensor_of(each)) is not None}
    return given, tensors, {name: arguments[name] for name in named}
