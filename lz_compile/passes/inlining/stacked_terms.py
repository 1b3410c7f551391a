"""A sum over a stack of two is the sum of two: ``(stack((a, b)) * stack((c, 1 - c))).sum(0)`` is ``a * c + b * (1 - c)``.

Two terms are added in one order only, so it is the same, bit by bit. A blend that is spelled so is one like any other then.
"""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of, strides_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.moves import strides_matter
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter, replaced
from lz_compile.passes.graph.view import Call, known_tensor, read, tensor_of, tensor_operands

_SUMS = frozenset({"sum", "mean"})

#: Values with one of two places, and what they are there.
_Taken = dict[tuple[fx.Node, int], fx.Node]


def add_terms(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Spell such sums out, in place, where they may be edited; how many there were."""
    found = [call for node in graph.nodes if (call := read(node)) is not None and _is_stacked(call)]
    effects = Effects(graph) if found else None
    return sum(effects is not None and _added(call, effects, may_edit) for call in reversed(found))


def _is_stacked(call: Call) -> bool:
    """Whether a call sums over the two parts of a stack, or of its products."""
    tensor = tensor_of(call.node)
    if call.name not in _SUMS or tensor is None or not tensor.is_floating_point() or call.get("dtype") is not None:
        return False
    if call.name == "mean" and tensor.dtype == torch.float16:  # of two terms that fit, whose sum does not
        return False
    dim = _summed(call)
    return dim is not None and _holds(call.input, dim)


def _summed(call: Call) -> int | None:
    """The one dimension that a call sums over, if it has two elements."""
    named = layout.named_dim(call)
    return named[0] if named is not None and named[1] == 2 else None


def _parts(node: fx.Node, dim: int) -> list[fx.Node] | None:
    """The two tensors that are joined along a dimension, each of which is one element of it."""
    call = read(node)
    parts = call.get("tensors") if call is not None and call.name in ("stack", "cat") else None
    if call is None or not isinstance(parts, (tuple, list)) or len(parts) != 2 or len(node.users) != 1:
        return None
    is_along = call.get("dim", 0) in (dim, dim - known_tensor(node).dim())
    is_single = call.name == "stack" or all(shape_of(known_tensor(each))[dim : dim + 1] == (1,) for each in parts)
    return list(parts) if is_along and is_single else None


def _holds(node: fx.Node, dim: int) -> bool:
    """Whether a value is made of such a stack by products and casts that nobody else reads."""
    call = read(node)
    if _parts(node, dim) is not None:
        return True
    if call is None or len(node.users) != 1 or call.is_inplace or not (call.name == "mul" or is_cast(call)):
        return False
    rank = known_tensor(node).dim()
    inner = ((each, dim - rank + known_tensor(each).dim()) for each in tensor_operands(node))
    return any(own >= 0 and shape_of(known_tensor(each))[own] == 2 and _holds(each, own) for each, own in inner)


def _added(call: Call, effects: Effects, may_edit: MayEdit) -> bool:
    node, ambient, old, before = call.node, effects.ambient(call.node), known_tensor(call.node), call.node.prev
    dim = _summed(call)
    if dim is None or ambient.is_transformed or ambient.autocast:
        return False
    emit = Emitter(node.graph, old.fake_mode, ambient, node)  # type: ignore[attr-defined]
    taken: _Taken = {}
    with node.graph.inserting_before(node):
        value = emit.call(torch.add, *(_element(call.input, dim, place, emit, taken) for place in range(2)))
        value = emit.call(torch.div, value, 2) if call.name == "mean" else value
        value = emit.call("unsqueeze", value, dim) if call.get("keepdim", False) else value
    new = known_tensor(value)
    is_alike = (new.dtype, shape_of(new)) == (old.dtype, shape_of(old))
    is_alike &= strides_of(new) == strides_of(old) or not strides_matter(node)
    for (each, _), element in taken.items():  # what is made here now, of what there is now
        is_alike &= known_tensor(element).dtype == known_tensor(each).dtype and not effects.is_overwritten(each)
        is_alike &= not effects.why_not_moved(each, node)
    return replaced(node, value, before, is_wanted=is_alike and may_edit(node))


def _element(node: fx.Node, dim: int, place: int, emit: Emitter, taken: _Taken) -> fx.Node:
    """One element of a dimension, the same where there is only one; ``taken`` gets those of what is not read any more."""
    call, parts, size = read(node), _parts(node, dim), shape_of(known_tensor(node))[dim]
    if parts is not None:
        is_stack = call is not None and call.name == "stack"
        taken[node, place] = parts[place] if is_stack else emit.call("select", parts[place], dim, 0)
        return taken[node, place]
    if call is None or size != 2 or not _holds(node, dim):
        return emit.call("select", node, dim, place if size == 2 else 0)
    rank, found = known_tensor(node).dim(), {}
    for operand in [call.input] if is_cast(call) else tensor_operands(node):
        own = dim - rank + known_tensor(operand).dim()
        found[operand] = operand if own < 0 else _element(operand, own, place, emit, taken)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: found.get(each, each))
    taken[node, place] = emit.call(node.target, *args, **kwargs)
    return taken[node, place]
