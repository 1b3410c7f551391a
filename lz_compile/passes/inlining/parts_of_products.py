"""A part of the scores of an attention is the scores of a part: ``(q @ k.mT)[:, -1:]`` is ``q[:, -1:] @ k.mT``.

What cuts a piece out of a product, behind pointwise operations, transposes and a softmax over another axis, cuts its factors
instead, where nobody reads the rest. That is less to compute, and what reads attention meets no cut between its products.
What puts scores in another order (``flip``, ``roll``, an index) puts queries or keys in that order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of, strides_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import LayoutError, fresh
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.moves import strides_matter
from lz_compile.passes.formula.pointwise import is_exponential, is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter, replaced
from lz_compile.passes.graph.view import Call, known_tensor, reached, read, tensor_of, tensor_operands
from lz_compile.passes.graph.writes import DROPOUTS

#: Products of two computed tensors.
_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})
#: What gives each dimension of its input another place, at most.
_PLACED = frozenset({"transpose", "permute", "mT", "T", "t", "movedim", "getattr", "contiguous", "clone"})
_CUTS = layout.SPLITS | {"getitem", "select", "narrow"}
_SOFTMAXES = frozenset({"softmax", "log_softmax"})
#: How far behind a cut a softmax is looked for, in nodes.
_FAR = 16

#: What takes places of a dimension of a tensor, which is given by its number, in any order.
_Pick = Callable[[Emitter, fx.Node, int], fx.Node]
#: The places that are cut out of some dimensions.
_Cuts = Mapping[int, range | _Pick]


def cut_factors(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Cut the factors of products instead of these, in place, where that may be edited; how many there were."""
    found = (_Cutter(Effects(graph), node, *cut) for node in [*graph.nodes] if (cut := _cut(node)) is not None)
    return sum(each.made(may_edit) for each in found)


def _cut(node: fx.Node) -> tuple[fx.Node, _Cuts, tuple[int, ...]] | None:
    """What a call cuts, which places of which dimensions, and the dimensions that it drops; None where it cuts no scores."""
    call = read(node)
    picked = _picked(call) if call is not None and tensor_of(node) is not None else None
    if call is None or picked:
        return (call.input, picked, ()) if call is not None and picked and _is_of_scores(call.input, node) else None
    if tensor_of(node) is None or call.name not in _CUTS:
        return None
    found = layout.index_of(call)
    if found is None or None in found[1] or not _is_of_scores(found[0], node):
        return None
    source, elements = found
    cuts: dict[int, range | _Pick] = {}
    dropped: list[int] = []
    is_less = False
    for dim, (element, size) in enumerate(zip(elements, shape_of(known_tensor(source)), strict=True)):
        if element == layout.WHOLE:
            continue
        places = layout.places_of(element, size if isinstance(size, int) else None)
        if places is None or not len(places[0]) or places[0].step < 1:
            return None
        cuts[dim] = places[0]
        dropped += [dim] if places[1] else []
        is_less |= len(places[0]) != size
    return (source, cuts, tuple(dropped)) if is_less else None


def _picked(call: Call) -> dict[int, range | _Pick] | None:
    """The dimensions that a call puts in another order, or takes places of by an index, no more than there are."""
    source = tensor_of(call.input)
    if source is None or not source.dim() or call.name not in ("flip", "roll", "index_select", "getitem"):
        return None
    if call.name == "flip":
        dims = call.get("dims") or call.positional()
        dims = dims if isinstance(dims, (tuple, list)) else [dims]
        is_known = all(isinstance(dim, int) for dim in dims)
        return {dim % source.dim(): _flipped for dim in dims} if is_known else None
    if call.name == "roll":
        shifts, dims = (x if isinstance(x, (tuple, list)) else [x] for x in map(call.get, ("shifts", "dims")))
        is_known = all(isinstance(each, int) for each in dims) and len(shifts) == len({*dims})
        return (
            {dim % source.dim(): partial(_rolled, by) for dim, by in zip(dims, shifts, strict=True)}
            if is_known
            else None
        )
    elements = layout.spelled_out(call.node.args[1], source.dim()) if call.name == "getitem" else None
    if elements is None:
        named = layout.named_dim(call) if call.name == "index_select" else None
        elements = [] if named is None else [*[layout.WHOLE] * named[0], call.get("index")]
    indices = {dim: each for dim, each in enumerate(elements) if each != layout.WHOLE}
    for dim, index in indices.items():
        tensor = tensor_of(index)
        if (
            len(indices) == 1
            and tensor is not None
            and tensor.dim() == 1
            and tensor.dtype in (torch.int32, torch.int64)
        ):
            sizes = as_size(tensor.shape[0]), as_size(source.shape[dim])
            is_no_more = sizes[0] == sizes[1] or (all(isinstance(x, int) for x in sizes) and sizes[0] < sizes[1])
            return {dim: partial(_indexed, index)} if is_no_more else None
    return None


def _flipped(emit: Emitter, node: fx.Node, dim: int) -> fx.Node:
    return emit.call("flip", node, [dim])


def _rolled(by: Any, emit: Emitter, node: fx.Node, dim: int) -> fx.Node:
    return emit.call("roll", node, by, dim)


def _indexed(index: fx.Node, emit: Emitter, node: fx.Node, dim: int) -> fx.Node:
    return emit.call(operator.getitem, node, (*[layout.WHOLE] * dim, index))


def _is_of_scores(source: fx.Node, node: fx.Node) -> bool:
    """Whether a cut is of a product, read once, and a softmax stands between that and what reads the cut, or behind."""
    way, is_normalised = _way(source, node), False
    while way is not None and (call := read(way)) is not None:
        if call.name in _PRODUCTS:
            return is_normalised or any(_normalises(each) for each in reached(node.users, _behind, _FAR))
        is_normalised |= call.name in _SOFTMAXES
        if not _is_passed(call):
            return False
        inner = [_way(each, way) for each in tensor_operands(way)]
        way = next((each for each in inner if each is not None), None)
    return False


def _way(node: fx.Node, reader: fx.Node) -> fx.Node | None:
    """A node that is read once and is, or is made of, a product; None where it is not."""
    users = [*node.users]
    while users and users[0] is not reader and len(users) == 1 and tensor_of(users[0]) is None:
        users = [*users[0].users]  # what takes a tensor apart, of whose parts one is read
    call = read(node)
    if users != [reader] or call is None:
        return None
    return (
        node
        if any((each := read(x)) is not None and each.name in _PRODUCTS for x in reached([node], _above, _FAR))
        else None
    )


def _above(node: fx.Node) -> list[fx.Node]:
    call = read(node)
    return tensor_operands(node) if call is not None and _is_passed(call) else []


def _is_passed(call: Call) -> bool:
    """Whether a part of what a call gives is what the call gives of a part."""
    is_known = call.name in _SOFTMAXES or call.name in _PLACED or is_pointwise(call)
    return is_known and call.name not in DROPOUTS and not call.is_inplace


def _behind(node: fx.Node) -> list[fx.Node]:
    call = read(node)
    is_passed = call is not None and (is_pointwise(call) or layout.rearranges(call) or call.name in _CUTS)
    return [*node.users] if is_passed else []


def _normalises(node: fx.Node) -> bool:
    call = read(node)
    return call is not None and (call.name in _SOFTMAXES or is_exponential(call))


@dataclass(frozen=True)
class _Cutter:
    """Cuts a node's ``source`` at ``cuts``, and drops dimensions after that."""

    effects: Effects
    node: fx.Node
    source: fx.Node
    cuts: _Cuts
    dropped: tuple[int, ...]

    def made(self, may_edit: MayEdit) -> bool:
        """Whether the factors are cut instead."""
        node, ambient, old, before = self.node, self.effects.ambient(self.node), known_tensor(self.node), self.node.prev
        if ambient.is_transformed:
            return False
        emit = Emitter(node.graph, old.fake_mode, ambient, node)  # type: ignore[attr-defined]
        with node.graph.inserting_before(node):
            value = self._part(self.source, self.cuts, emit)
            if value is not None and self.dropped:
                value = emit.call(
                    operator.getitem, value, _index(dict.fromkeys(self.dropped, 0), known_tensor(value).dim())
                )
        new = old if value is None else known_tensor(value)
        is_alike = (new.dtype, shape_of(new)) == (old.dtype, shape_of(old))
        is_alike &= strides_of(new) == strides_of(old) or not strides_matter(node)
        return replaced(node, value, before, is_wanted=value is not None and is_alike and may_edit(node))

    def _part(self, node: fx.Node, cuts: _Cuts, emit: Emitter) -> fx.Node | None:
        """What a node is at these places; None where what it is made of cannot be cut."""
        call = read(node)
        if call is None or self.effects.is_overwritten(node) or self.effects.why_not_moved(node, self.node):
            return None
        if call.name in _PRODUCTS:
            return self._product(call, cuts, emit)
        operands = self._operands(call, cuts)
        if operands is None:
            return None
        parts = {}
        for operand, own in operands.items():
            is_way = any(_way(operand, each) is not None for each in operand.users)
            part = self._part(operand, own, emit) if is_way else _taken(operand, own, emit)
            if part is None:
                return None
            parts[operand] = part
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: parts.get(each, each))
        return emit.call(node.target, *args, **kwargs)

    def _operands(self, call: Call, cuts: _Cuts) -> dict[fx.Node, _Cuts] | None:
        """What a call that is no product reads, each with the places of it that are read."""
        if call.name in _PLACED and not is_cast(call):
            dims = fresh(shape_of(known_tensor(call.node)))
            try:
                source = layout.read_input_dims(call, dims)
            except LayoutError:
                return None
            places = {dims[dim]: own for dim, own in cuts.items()}
            if source is None or () in places:
                return None
            return {call.input: {dim: places[own] for dim, own in enumerate(source) if own in places}}
        rank = known_tensor(call.node).dim()
        if call.name in _SOFTMAXES:
            dim = call.get("dim")
            return None if not isinstance(dim, int) or dim % rank in cuts else {call.input: cuts}
        if not _is_passed(call):
            return None
        found = dict[fx.Node, _Cuts]()
        for operand in [call.input] if is_cast(call) else tensor_operands(call.node):
            sizes = shape_of(known_tensor(operand))
            first = rank - len(sizes)
            found[operand] = {dim - first: own for dim, own in cuts.items() if dim >= first and sizes[dim - first] != 1}
        return found

    def _product(self, call: Call, cuts: _Cuts, emit: Emitter) -> fx.Node | None:
        dims = fresh(shape_of(known_tensor(call.node)))
        product = contraction.factors(call, dims)
        places = {dims[dim]: own for dim, own in cuts.items()}
        if product is None or not product.is_plain or () in places:
            return None
        given = [*product.factors, *([] if product.addend is None else [product.addend])]
        if any(
            isinstance(tensor_of(source), torch.nn.Parameter) for node, _ in given for source in reached([node], _moved)
        ):
            return None
        parts = [
            _taken(node, {at: places[dim] for at, dim in enumerate(own) if dim in places}, emit) for node, own in given
        ]
        if call.name == "einsum":
            return emit.call(call.node.target, call.input, *parts)
        if call.name == "baddbmm":
            factors = {name: call.get(name, 1) for name in ("beta", "alpha")}
            return emit.call(torch.baddbmm, parts[2], *parts[:2], **factors) if len(parts) > 2 else None
        return emit.call(getattr(torch, call.name), *parts)


def _moved(node: fx.Node) -> list[fx.Node]:
    call = read(node)
    return [call.input] if call is not None and (is_cast(call) or layout.rearranges(call)) else []


def _taken(node: fx.Node, cuts: _Cuts, emit: Emitter) -> fx.Node:
    """The places of a tensor."""
    slices = {dim: slice(own.start, own[-1] + 1, own.step) for dim, own in cuts.items() if isinstance(own, range)}
    value = emit.call(operator.getitem, node, _index(slices, known_tensor(node).dim())) if slices else node
    for dim, pick in cuts.items():
        value = value if isinstance(pick, range) else pick(emit, value, dim)
    return value


def _index(elements: Mapping[int, Any], rank: int) -> tuple[Any, ...]:
    return tuple(elements.get(dim, layout.WHOLE) for dim in range(rank))
