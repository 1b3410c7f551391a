"""What is read of the states of a recurrence in logarithmic depth: a product that sums over some of their dimensions.

Mamba's states are sixteen numbers for each channel and step, of which one is read. A scan that reads them itself never
writes them. The last states may be read beside that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from lz_compile.ground.sizes import Size, product, shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, fresh, resolve
from lz_compile.passes.formula.contraction import PRODUCTS
from lz_compile.passes.formula.pointwise import is_dead
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError
from lz_compile.passes.graph.view import known_tensor, tensor_of
from lz_compile.passes.loops.roll.slices import elements_of
from lz_compile.passes.rewriting.core import find_core

_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as"})
#: Calls that spell sizes out, which a proof could not change.
_SPELLED = frozenset({"view", "reshape", "flatten", "unflatten", "expand", "repeat", "broadcast_to"})
_ALL = slice(None)


@dataclass(frozen=True)
class StatesRead:
    """``output = sum over rows of query * states``, another query for each step, and the last of the states.

    ``inner`` are the nodes between the states and all that is given. ``lasts`` are the nodes of the last states, with their
    axes.
    """

    output: fx.Node
    dims: Dims
    query: Leaf
    rows: tuple[Axis, ...]
    inner: tuple[fx.Node, ...]
    lasts: Mapping[fx.Node, Dims]


def read_of(states: fx.Node, dims: Dims, time: Axis, effects: Effects) -> StatesRead | None:
    """How states with these axes are read, if that is by one product, and the last of them beside; nothing is overwritten."""
    inner, products, others = _around(states, effects)
    if len(products) != 1:
        return None
    (output,) = products
    try:
        found = _product(states, dims, output, effects)
        lasts = {node: _last(states, dims, node, time, effects) for node in others}
    except (LayoutError, MutatedError):
        return None
    known = {node: own for node, own in lasts.items() if own is not None}
    if found is None or len(known) != len(lasts) or effects.has_mutations:
        return None
    own, query, rows = found
    known_axes = set(axes_of(dims))
    columns = known_axes - {time, *rows, *query.axes}
    if not rows or time in rows or time not in query.axes or not query.axes <= known_axes:
        return None  # a projection, which is a product of matrices
    if _is_less(product(each.size for each in columns), product(each.size for each in rows)):
        return None  # columns lie in the lanes of vectors
    within = dict.fromkeys((*inner, *find_core(effects, states, output).nodes))
    users = {user for node in within if node is not output for user in node.users}
    if any(user not in within and user not in known and not is_dead(user) for user in users):
        return None
    if any(effects.ambient(node) != effects.ambient(states) for node in (*within, *known)):
        return None
    first = min(map(effects.position.__getitem__, (output, *known)))
    return None if effects.position[query.node] > first else StatesRead(output, own, query, rows, tuple(within), known)


def _is_less(one: Size, other: Size) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one < other


def _around(states: fx.Node, effects: Effects) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """What only shows the states in another shape, the products that these enter, and what else is made of them."""
    inner, products, others, queue = [states], [], [], [states]
    while queue:
        for user in queue.pop().users:
            call = effects.calls.get(user)
            if call is None:
                others.append(user)
            elif call.name in PRODUCTS:
                products.append(user)
            elif call.name == "mul" and len(user.users) == 1 and _is_sum(next(iter(user.users)), effects):
                products.append(next(iter(user.users)))
            elif call.name in _CASTS or (layout.rearranges(call) and _moves(user, effects)):
                inner.append(user)
                queue.append(user)
            elif not is_dead(user):
                others.append(user)
    return inner, products, others


def _is_sum(node: fx.Node, effects: Effects) -> bool:
    call = effects.calls.get(node)
    return call is not None and call.name == "sum"


def _moves(node: fx.Node, effects: Effects) -> bool:
    """Whether a call shows all of its operand."""
    call = effects.calls[node]
    try:
        return call is not None and layout.read_input_dims(call, fresh(shape_of(known_tensor(node)))) is not None
    except LayoutError:
        return False


def _product(
    states: fx.Node, dims: Dims, output: fx.Node, effects: Effects
) -> tuple[Dims, Leaf, tuple[Axis, ...]] | None:
    """The axes of a product of the states, what they are multiplied by, and the axes summed over; in those of the states."""
    region, call = Region(effects), effects.calls[output]
    assert call is not None
    found = contraction.read(region, call, fresh(shape_of(known_tensor(output))))
    if found is None or found.addend is not None or found.coefficient != 1 or found.distance:
        return None
    sides = [_shown(each.node, each.dims, effects, states) for each in (found.left, found.right)]
    if [node is states for node, _ in sides].count(True) != 1:
        return None
    (own, (query, over)) = sorted(sides, key=lambda side: side[0] is not states)
    names = _named(own[1], dims)
    if names is None or len({known_tensor(each).dtype for each in (states, query, output)}) > 1:
        return None
    rows = axes_of(_renamed((found.summed,), names))
    return _renamed(found.dims, names), Leaf(query, _renamed(over, names)), rows


def _shown(node: fx.Node, dims: Dims, effects: Effects, states: fx.Node) -> tuple[fx.Node, Dims]:
    """What a tensor with these axes shows in another shape, and its axes; of states it is asked no further."""
    while node is not states and (call := effects.calls.get(node)) is not None and isinstance(call.input, fx.Node):
        source = tensor_of(call.input)
        own = dims if call.name in _CASTS else layout.read_input_dims(call, dims)
        if own is None or source is None or call.name in _SPELLED or source.dtype != known_tensor(node).dtype:
            break
        node, dims = call.input, own
    return node, resolve(dims)


def _named(seen: Dims, dims: Dims) -> dict[Axis, Axis] | None:
    """The axes of the states, by what they are called where these are looked at."""
    pairs = list(zip(resolve(seen), dims, strict=True))
    if any(len(one) != len(other) for one, other in pairs):
        return None
    return {axis: name for one, other in pairs for axis, name in zip(one, other, strict=True)}


def _renamed(dims: Dims, names: Mapping[Axis, Axis]) -> Dims:
    return tuple(tuple(names.get(axis, axis) for axis in dim) for dim in resolve(dims))


def _last(states: fx.Node, dims: Dims, node: fx.Node, time: Axis, effects: Effects) -> Dims | None:
    """The axes of a node that is the states after the last step; None where it is something else."""
    call = effects.calls.get(node)
    if call is None or not isinstance(call.input, fx.Node) or tensor_of(call.input) is None:
        return None
    below = fresh(shape_of(known_tensor(call.input)))
    source, seen = _shown(call.input, below, effects, states)
    names = _named(seen, dims) if source is states else None
    own = () if names is None else _renamed(below, names)
    place = next((place for place, dim in enumerate(own) if dim == (time,)), None)
    if place is None or _picked(call.name, node, own, place) not in (-1, time.size - 1):
        return None
    return own[:place] + own[place + 1 :]


def _picked(name: str, node: fx.Node, dims: Dims, place: int) -> Any:
    """The entry that is picked along one dimension, where all others are whole; None where it is something else."""
    source = node.args[0]
    if name == "select" and len(node.args) == 3 and not node.kwargs:
        return node.args[2] if isinstance(node.args[1], int) and node.args[1] % len(dims) == place else None
    if name != "getitem" or not isinstance(source, fx.Node):
        return None
    picked = elements_of(node.args[1], known_tensor(source))
    if picked is None or len(picked) != len(dims):
        return None
    rest = [each for at, each in enumerate(picked) if at != place]
    return picked[place] if all(isinstance(each, slice) and each == _ALL for each in rest) else None
