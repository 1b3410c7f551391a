"""The two largest by maxima: of a tensor, and of one whose largest was masked, by its value or by its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lz_compile.passes import layout
from lz_compile.passes.algebra import constant_value, is_cast
from lz_compile.passes.axes import Dims, LayoutError, fresh, resolve, shape_of
from lz_compile.passes.blends.blend_pieces import argument, call_of
from lz_compile.passes.blends.blend_statistics import Rank, rank_of
from lz_compile.passes.effects import Effects
from lz_compile.passes.view import Call, tensor_of, value_of

#: What is filled in so that it is no maximum.
_BOTTOM = -1e30


@dataclass(frozen=True)
class Maxima:
    """Maxima in one graph; ``of`` says which order statistic a value is."""

    effects: Effects
    of: Callable[[fx.Node], Rank | None]

    def maximum(self, call: Call, values: Call) -> Rank | None:
        """A maximum: of a tensor, or of one whose maximum is masked."""
        source, dim = tensor_of(call.input), call.get("dim")
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        if source is None or not isinstance(dim, int) or not source.dim() or not source.is_floating_point():
            return None
        dim %= source.dim()
        nodes = frozenset({call.node, values.node})
        keeps_dim = call.get("keepdim", False) is True
        rest = self._without_largest(call.input, dim)
        if rest is None:
            return Rank(call.input, dim, 1, 0, keeps_dim, nodes)
        return replace(rest, keeps_dim=keeps_dim, nodes=rest.nodes | nodes)

    def _without_largest(self, node: fx.Node, dim: int) -> Rank | None:
        """The second largest, where ``node`` holds everything but the largest."""
        call = call_of(self.effects, node)
        if call is None:
            return None
        if call.name == "scatter":
            index, fill = call.arguments.get("#2", call.get("index")), argument(call, "value", "#3", call.get("src"))
            place = argument(call, "dim", "#1", None)
            found = self._place(index, dim) if isinstance(place, int) and place % rank_of(node) == dim else None
            source = self._copied(call.input)
            is_it = found is not None and found[0] is source and self._is_bottom(fill, node)
            nodes = frozenset({node, call.input} - {source})
            return self._second(source, dim, found[1] | nodes, False) if is_it and found and source else None
        if call.name == "where":
            condition, chosen, other = (call.get(name) for name in ("condition", "input", "other"))
        elif call.name == "masked_fill":
            condition, chosen, other = call.get("mask"), call.get("value"), call.input
        else:
            return None
        for mask, fill, source, wants in ((condition, chosen, other, True), (condition, other, chosen, False)):
            if not isinstance(source, fx.Node) or not isinstance(mask, fx.Node) or not self._is_bottom(fill, node):
                continue
            read = self._marks_largest(mask, source, dim)
            if read is not None and read[0] is wants:
                return self._second(source, dim, read[1] | {node}, read[2])
        return None

    def _second(self, source: fx.Node, dim: int, nodes: frozenset[fx.Node], is_distinct: bool) -> Rank:
        return Rank(source, dim, 0, 1, False, nodes, is_distinct=is_distinct)

    def _copied(self, node: Any) -> fx.Node | None:
        call = call_of(self.effects, node)
        if call is not None and call.name == "clone":
            node = call.input
        return node if isinstance(node, fx.Node) else None

    def _is_bottom(self, fill: Any, node: fx.Node) -> bool:
        call = call_of(self.effects, fill)
        number = constant_value(call) if call is not None else fill
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return False
        tensor = tensor_of(node)
        lowest = torch.finfo(tensor.dtype).min if tensor is not None and tensor.is_floating_point() else -math.inf
        return number <= max(_BOTTOM, lowest / 2)

    def _marks_largest(self, mask: fx.Node, source: fx.Node, dim: int) -> tuple[bool, frozenset[fx.Node], bool] | None:
        """Whether a mask is True (or False) at the largest; the nodes that it is made of; whether it marks every one."""
        call = call_of(self.effects, mask)
        if call is None:
            return None
        if call.name == "not" or is_cast(call):
            read = self._marks_largest(call.input, source, dim) if isinstance(call.input, fx.Node) else None
            return None if read is None else (read[0] is (call.name != "not"), read[1] | {mask}, read[2])
        if call.name in ("eq", "ne", "ge", "lt"):
            other = call.get("other", call.arguments.get("#1"))
            is_true = call.name in ("eq", "ge")
            for first, second in ((call.input, other), (other, call.input)):
                if call.name in ("ge", "lt") and first is not call.input:
                    continue
                if first is source and isinstance(second, fx.Node):
                    found = self._spread(second, source, dim)
                    if found is not None and (found[0].first, found[0].second) == (1, 0):
                        return is_true, found[1] | {mask}, True
                place = self._place(second, dim) if isinstance(second, fx.Node) else None
                if place is not None and place[0] is source and self._counts(first, source, dim):
                    return is_true, place[1] | {mask}, False
            return self._is_hot(call, other, source, dim) if is_true else None
        if call.name == "scatter" and argument(call, "value", "#3", None) in (True, 1):
            start, place = (
                call_of(self.effects, call.input),
                self._place(call.arguments.get("#2", call.get("index")), dim),
            )
            is_zero = start is not None and constant_value(start) == 0
            along = argument(call, "dim", "#1", None)
            if is_zero and place is not None and place[0] is source and along % rank_of(mask) == dim:
                return True, place[1] | {mask}, False
        return self._hot(mask, source, dim)

    def _is_hot(
        self, call: Call, other: Any, source: fx.Node, dim: int
    ) -> tuple[bool, frozenset[fx.Node], bool] | None:
        """``one_hot(argmax) == 1``."""
        read = self._hot(call.input, source, dim) if other == 1 and isinstance(call.input, fx.Node) else None
        return None if read is None else (True, read[1] | {call.node}, False)

    def _hot(self, node: fx.Node, source: fx.Node, dim: int) -> tuple[bool, frozenset[fx.Node], bool] | None:
        """``one_hot`` of the place of the largest along the last dimension."""
        call = call_of(self.effects, node)
        if call is None or call.name != "one_hot" or dim != rank_of(source) - 1:
            return None
        place = self._place(call.input, dim, keeps_dim=False)
        return None if place is None or place[0] is not source else (True, place[1] | {node}, False)

    def _place(self, node: Any, dim: int, *, keeps_dim: bool = True) -> tuple[fx.Node, frozenset[fx.Node]] | None:
        """The tensor of whose largest element along ``dim`` a value is the index."""
        nodes: set[fx.Node] = set()
        call = call_of(self.effects, node)
        is_kept = False
        while call is not None and call.name == "unsqueeze":
            if is_kept or call.get("dim") % rank_of(call.node) != dim:
                return None
            is_kept = True
            nodes.add(call.node)
            call = call_of(self.effects, call.input)
        if call is None:
            return None
        nodes.add(call.node)
        if call.name == "getitem" and call.get("#1") == 1:
            call = call_of(self.effects, call.input)
            if call is None or call.name != "max":
                return None
            nodes.add(call.node)
        elif call.name != "argmax":
            return None
        along = argument(call, "dim", "#1", None)
        is_kept |= argument(call, "keepdim", "#2", False) is True
        if not isinstance(along, int) or not isinstance(call.input, fx.Node) or is_kept is not keeps_dim:
            return None
        return (call.input, frozenset(nodes)) if along % rank_of(call.input) == dim else None

    def _counts(self, node: Any, source: fx.Node, dim: int) -> bool:
        """Whether a value is the index along the last dimension."""
        call = call_of(self.effects, node)
        if call is None or call.name != "arange" or dim != rank_of(source) - 1:
            return False
        numbers = [value_of(each) for each in call.node.args]
        size = tensor_of(source).shape[dim]  # type: ignore[union-attr]  # a source is a tensor
        return numbers in ([size], [0, size])

    def _spread(self, node: fx.Node, source: fx.Node, dim: int) -> tuple[Rank, frozenset[fx.Node]] | None:
        """The statistic of ``source`` that stands beside every element of it, with the layout operations on the way."""
        tensor = tensor_of(source)
        assert tensor is not None, "a source is a tensor"
        dims = fresh(shape_of(tensor))
        wanted = (*dims[:dim], *dims[dim + 1 :])
        given, passed = _aligned(dims, node), set()
        while (rank := self.of(node)) is None:
            call = call_of(self.effects, node)
            if call is None or not isinstance(call.input, fx.Node):
                return None
            try:
                inner = given if is_cast(call) else layout.read_input_dims(call, given)
            except LayoutError:
                return None
            if inner is None:
                return None
            passed.add(node)
            node, given = call.input, inner
        given = tuple(dim for place, dim in enumerate(given) if place not in rank.inserted)
        own = (*given[: rank.dim], *given[rank.dim + rank.keeps_dim :])
        if rank.source is not source or rank.dim != dim or resolve(own) != resolve(wanted):
            return None
        return rank, rank.nodes | passed

    def counted(self, call: Call) -> Rank | None:
        """``where(how many are the largest > 1, largest, next)``: the second largest."""
        condition, chosen, other = (call.get(name) for name in ("condition", "input", "other"))
        if not all(isinstance(each, fx.Node) for each in (condition, chosen, other)):
            return None
        largest, rest = self.of(self._plain(chosen)), self.of(self._plain(other))
        if largest is None or rest is None or (largest.first, largest.second, rest.second) != (1, 0, 1):
            return None
        if (largest.source, largest.dim) != (rest.source, rest.dim) or not rest.is_distinct:
            return None
        compared = call_of(self.effects, condition)
        if compared is None or (compared.name, compared.get("other")) not in (("gt", 1), ("ge", 2)):
            return None
        total = call_of(self.effects, compared.input)
        along = None if total is None else total.get("dim")
        along = along[0] if isinstance(along, (tuple, list)) and len(along) == 1 else along
        if total is None or total.name not in ("sum", "count_nonzero") or not isinstance(along, int):
            return None
        read = self._marks_largest(total.input, largest.source, largest.dim)
        if read is None or read[0] is not True or not read[2] or along % rank_of(largest.source) != largest.dim:
            return None
        shapes = {
            shape_of(tensor) for tensor in map(tensor_of, (call.node, condition, chosen, other)) if tensor is not None
        }
        if len(shapes) != 1:
            return None
        nodes = largest.nodes | rest.nodes | read[1] | {call.node, compared.node, total.node, chosen, other}
        keeps_dim = rank_of(call.node) == rank_of(largest.source)
        return Rank(largest.source, largest.dim, 0, 1, keeps_dim, nodes)

    def _plain(self, node: fx.Node) -> fx.Node:
        """A statistic behind a removed or inserted dimension."""
        call = call_of(self.effects, node)
        while self.of(node) is None and call is not None and call.name in ("squeeze", "unsqueeze", "getitem"):
            node = call.input
            call = call_of(self.effects, node)
        return node


def _aligned(dims: Dims, node: fx.Node) -> Dims:
    """The dims of something that is broadcast to a tensor with ``dims``."""
    shape = shape_of(tensor_of(node))  # type: ignore[arg-type]  # it is compared with a tensor
    tail = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for dim, size in zip(tail, shape, strict=True))
