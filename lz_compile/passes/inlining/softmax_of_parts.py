"""A softmax of parts of the rows, joined again, is one: ``cat([s.softmax(-1) for s in scores.split(4, 2)], 2)``.

What is computed alike of all parts of a tensor is computed of the whole. Products may be among it where the softmax is of
them, once: then nothing is larger than what was joined, however many parts that had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import LayoutError, fresh
from lz_compile.passes.formula.equal_values import numbers
from lz_compile.passes.formula.moves import strides_matter
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter, replaced
from lz_compile.passes.graph.view import Call, known_tensor, reached, read, tensor_of
from lz_compile.passes.graph.writes import DROPOUTS

_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
_CUTS = layout.SPLITS | {"getitem", "narrow"}
_SOFTMAXES = frozenset({"softmax", "log_softmax"})
#: How far behind a join a softmax is looked for, in nodes.
_FAR = 16


def join_softmaxes(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Take such softmaxes of the whole, in place, where they may be edited; how many there were."""
    found = [call for node in graph.nodes if (call := read(node)) is not None and _joins(call)]
    return sum(_joined(call, Effects(graph), may_edit) for call in found)


def _joins(call: Call) -> bool:
    parts, tensor = call.get("tensors"), tensor_of(call.node)
    if call.name != "cat" or not isinstance(parts, (tuple, list)) or len(parts) < 2 or tensor is None:
        return False
    above = (read(each) for each in reached(parts[:1], lambda node: node.all_input_nodes, _FAR))
    return isinstance(call.get("dim", 0), int) and any(each is not None and each.name in _SOFTMAXES for each in above)


def _joined(call: Call, effects: Effects, may_edit: MayEdit) -> bool:
    node, ambient, old, before = call.node, effects.ambient(call.node), known_tensor(call.node), call.node.prev
    if ambient.is_transformed:
        return False
    emit = Emitter(node.graph, old.fake_mode, ambient, node)  # type: ignore[attr-defined]
    with node.graph.inserting_before(node):
        value = _Whole(effects, emit, node).of(call.get("tensors"), call.get("dim", 0) % old.dim())
    new = old if value is None else known_tensor(value)
    is_alike = (new.dtype, shape_of(new)) == (old.dtype, shape_of(old))
    is_alike &= strides_of(new) == strides_of(old) or not strides_matter(node)
    return replaced(node, value, before, is_wanted=value is not None and is_alike and may_edit(node))


@dataclass
class _Whole:
    """Computes of the whole what is computed of parts, ahead of the ``place`` where these are joined."""

    effects: Effects
    emit: Emitter
    place: fx.Node
    _numbers: Mapping[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = numbers(self.effects)

    def of(self, parts: Sequence[Any], dim: int, within: str = "") -> fx.Node | None:
        """What ``parts`` along a dimension are parts of; ``within`` a softmax, or a product in that."""
        first = parts[0]
        tensor, is_one = tensor_of(first), self._are_equal(parts)
        if is_one and (tensor is None or dim < 0 or shape_of(tensor)[dim] == 1):
            return None if self.effects.is_overwritten(first) else first
        if is_one or dim < 0 or any(tensor_of(each) is None for each in parts):
            return None
        whole = self._source(parts, dim) if within else None
        if whole is not None:
            return None if self.effects.is_overwritten(whole) else whole
        calls = [call for each in parts if (call := read(each)) is not None]
        if len(calls) < len(parts) or any(self._stays(call) for call in calls):
            return None
        return self._made(calls, dim, within)

    def _stays(self, call: Call) -> bool:
        node = call.node
        is_changed = call.is_inplace or self.effects.is_overwritten(node)
        return is_changed or len(node.users) > 1 or bool(self.effects.why_not_moved(node, self.place))

    def _made(self, calls: Sequence[Call], dim: int, within: str) -> fx.Node | None:
        first, rank = calls[0], known_tensor(calls[0].node).dim()
        if any(known_tensor(call.node).dim() != rank or call.node.target != first.node.target for call in calls):
            return None
        if first.name in _SOFTMAXES:
            own = first.get("dim")
            if within or not isinstance(own, int) or own % rank == dim:
                return None
            within = "softmax"
        elif first.name in _PRODUCTS:
            if within != "softmax":
                return None
            within = "product"
        elif first.name in DROPOUTS or not (is_pointwise(first) or _is_placed(first)):
            return None
        (told, _), *others = columns = [_operands(call) for call in calls]
        dims = _dims(first, columns[0][1], dim)
        if dims is None or any(each != told for each, _ in others):
            return None
        rows = [*zip(*(nodes for _, nodes in columns), strict=True)]
        if any(own >= 0 and not self._fit(row, own, calls, dim) for row, own in zip(rows, dims, strict=True)):
            return None
        wholes = [self.of(row, own, within) for row, own in zip(rows, dims, strict=True)]
        if any(whole is None for whole in wholes):
            return None
        given = iter(wholes)
        args, kwargs = fx.map_arg((first.node.args, first.node.kwargs), lambda _: next(given))
        return self.emit.call(first.node.target, *args, **kwargs)

    def _fit(self, row: Sequence[fx.Node], own: int, calls: Sequence[Call], dim: int) -> bool:
        """Whether each part of a result has as many places as that of an operand, or all read the same."""
        places = [shape_of(known_tensor(each))[own] for each in row]
        return self._are_equal(row) or places == [shape_of(known_tensor(call.node))[dim] for call in calls]

    def _source(self, parts: Sequence[fx.Node], dim: int) -> fx.Node | None:
        """The tensor that is cut into just these parts along a dimension."""
        sources, end = list[fx.Node](), 0
        for part in parts:
            call = read(part)
            found = layout.index_of(call) if call is not None and call.name in _CUTS else None
            if found is None or len(found[1]) <= dim or any(x != layout.WHOLE for x in _besides(found[1], dim)):
                return None
            size = shape_of(known_tensor(found[0]))[dim]
            places = layout.places_of(found[1][dim], size if isinstance(size, int) else None)
            if places is None or places[1] or places[0].step != 1 or places[0].start != end:
                return None
            end = places[0].stop
            sources.append(found[0])
        return sources[0] if self._are_equal(sources) and end == size else None

    def _are_equal(self, nodes: Sequence[fx.Node]) -> bool:
        return len({self._numbers[each] for each in nodes}) == 1


def _besides(elements: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return elements[:dim] + elements[dim + 1 :]


def _is_placed(call: Call) -> bool:
    return layout.is_in_axes(call) and call.name in ("transpose", "permute", "mT", "movedim", "getattr")


def _operands(call: Call) -> tuple[Any, list[fx.Node]]:
    """What a call is given besides nodes, and these, in their order."""
    nodes: list[fx.Node] = []
    return fx.map_arg((call.node.args, call.node.kwargs), nodes.append), nodes


def _dims(call: Call, nodes: Sequence[fx.Node], dim: int) -> list[int] | None:
    """Which dimension of each operand one of a result is; a negative number where it is none."""
    rank = known_tensor(call.node).dim()
    if not _is_placed(call) and call.name not in _PRODUCTS:
        tensors = map(tensor_of, nodes)
        return [-1 if tensor is None else dim - rank + tensor.dim() for tensor in tensors]
    dims = fresh(shape_of(known_tensor(call.node)))
    try:
        product = contraction.factors(call, dims) if call.name in _PRODUCTS else None
        source = None if product is not None else layout.read_input_dims(call, dims)
    except LayoutError:
        return None
    given = [] if source is None else [(call.input, source)]
    given = given if product is None else [*product.factors] if product.is_plain else []
    if [node for node, _ in given] != [*nodes] or not dims[dim]:
        return None
    return [own.index(dims[dim]) if dims[dim] in own else -1 for _, own in given]
