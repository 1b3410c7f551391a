"""An ``einsum`` that sums no products, as the products or sums that it is, and joins by other names as ``cat`` or ``stack``.

``einsum("bsd,bs->bsd", x, scale)`` is ``x * scale.unsqueeze(-1)``, ``einsum("...d->...", x)`` is ``x.sum(-1)``: PyTorch
computes the same, and whoever reads arithmetic reads it. ``hstack((x, y))`` is ``cat((x, y), 1)``. Of probabilities, a choice
of zero where they are NaN is ``nan_to_num``: none of them is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula.expressions import constant_value, is_cast
from lz_compile.passes.formula.layout import Notation, notation
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter, replaced
from lz_compile.passes.graph.view import Call, known_tensor, read, tensor_of

#: Joins, with the dimension along which they join tensors of how many dimensions at least; those of one less get a new one.
_JOINS = {"vstack": (0, 2), "row_stack": (0, 2), "hstack": (1, 2), "column_stack": (1, 2), "dstack": (2, 3)}

#: Choices by a condition, with the names of that, of what is chosen and of what else there is.
_CHOICES = {"where": ("condition", "input", "other"), "masked_fill": ("mask", "value", "input")}


def spell_out_notation(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Spell such calls out, in place, where they may be edited; how many there were."""
    calls = [call for node in graph.nodes if (call := read(node)) is not None]
    nodes = [
        call.node for call in calls if call.name == "einsum" or call.name in _JOINS or _without_nan(call) is not None
    ]
    effects = Effects(graph) if nodes else None
    return sum(_spelled(node, effects, may_edit) for node in nodes if effects is not None)


def _sums_no_products(said: Notation) -> bool:
    """Whether it is one tensor that is summed, or several that are multiplied; none is read along a diagonal."""
    is_plain = all(len(set(names)) == len(names) for names in said.labels)
    sums = {label for names in said.labels for label in names} - {*said.result}
    return is_plain and (len(said.operands) == 1 or not sums)


def _spelled(node: fx.Node, effects: Effects, may_edit: MayEdit) -> bool:
    """Whether a call is spelled out: not where autocast would cast the one and not the other."""
    call, ambient, old, before = read(node), effects.ambient(node), known_tensor(node), node.prev
    if call is None or ambient.is_transformed or ambient.autocast:
        return False
    emit = Emitter(node.graph, old.fake_mode, ambient, node)  # type: ignore[attr-defined]
    with node.graph.inserting_before(node):
        chosen = _without_nan(call)
        if chosen is not None:
            value = None if any(map(effects.is_overwritten, chosen)) else emit.call(torch.nan_to_num, chosen[0])
        else:
            value = _joined(call, emit) if call.name in _JOINS else _arithmetic(call, emit)
    if value is None:
        return False
    new = known_tensor(value)
    is_alike = (new.dtype, shape_of(new), strides_of(new)) == (old.dtype, shape_of(old), strides_of(old))
    return replaced(node, value, before, is_wanted=value not in node.all_input_nodes and is_alike and may_edit(node))


def _arithmetic(call: Call, emit: Emitter) -> fx.Node | None:
    """The product or sum that an ``einsum`` is, None where it sums products."""
    said = notation(call)
    if said is None or not _sums_no_products(said):
        return None
    summed = [label for label in said.labels[0] if label not in said.result]
    order = [*said.result, *summed]
    values = [_placed(*each, order, emit) for each in zip(said.operands, said.labels, strict=True)]
    value = reduce(partial(emit.call, torch.mul), values)  # from left to right, as PyTorch does
    return emit.call("sum", value, list(range(len(said.result), len(order)))) if summed else value


def _joined(call: Call, emit: Emitter) -> fx.Node | None:
    """What such a join is: ``hstack`` joins vectors along the one dimension that they have."""
    tensors = call.get("tensors", call.input)
    known = [tensor_of(each) for each in tensors] if isinstance(tensors, (tuple, list)) else []
    ranks = {0 if each is None else each.dim() for each in known}
    rank = min(ranks, default=0)
    dim, least = (0, 1) if call.name == "hstack" and rank == 1 else _JOINS[call.name]
    if len(ranks) != 1 or rank < max(least - 1, 1) or "out" in call.arguments:
        return None
    return emit.call(torch.cat if rank >= least else torch.stack, tensors, dim)


def _without_nan(call: Call) -> tuple[fx.Node, ...] | None:
    """Probabilities for which a choice takes zero where they are NaN, with what fills it; None for other choices."""
    if call.name not in _CHOICES or call.is_inplace:
        return None
    condition, *sides = (call.get(name) for name in _CHOICES[call.name])
    for filled, kept, where in ((*sides, True), (*sides[::-1], False)):
        made = read(filled) if isinstance(filled, fx.Node) else None
        value = filled if made is None else constant_value(made)
        is_zero = isinstance(value, (int, float)) and value == 0
        if is_zero and _is_softmax(kept) and _is_nan(condition, kept) is where:
            return tuple(each for each in (kept, filled) if isinstance(each, fx.Node))
    return None


def _is_softmax(node: object) -> bool:
    call = read(node) if isinstance(node, fx.Node) else None
    return call is not None and (call.name == "softmax" or (is_cast(call) and _is_softmax(call.input)))


def _is_nan(condition: object, node: fx.Node) -> bool | None:
    """Whether a condition says where a value is NaN, or (False) where it is none; None where it says neither."""
    call = read(condition) if isinstance(condition, fx.Node) else None
    if call is not None and call.name == "not":
        inner = _is_nan(call.input, node)
        return None if inner is None else not inner
    is_compared = call is not None and call.name in ("eq", "ne") and call.get("other") is node
    if call is None or call.input is not node or not (is_compared or call.name == "isnan"):
        return None
    return call.name != "eq"


def _placed(operand: fx.Node, names: Sequence[str], order: Sequence[str], emit: Emitter) -> fx.Node:
    """A tensor with its dimensions in an order, and one of one element for each further one behind its first."""
    own = [label for label in order if label in names]
    if own != list(names):
        operand = emit.call("permute", operand, [names.index(label) for label in own])
    first = order.index(own[0]) if own else len(order)
    for place in range(first, len(order)):
        if order[place] not in names:
            operand = emit.call("unsqueeze", operand, place - first)
    return operand
