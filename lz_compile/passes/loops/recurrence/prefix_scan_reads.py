"""What is read of the states of a recurrence in logarithmic depth, a product that sums over some dimensions; what drives it.

Mamba's states are sixteen numbers for each channel and step, of which one is read. A scan that reads them itself never
writes them. The last states may be read beside that. Where what drives them is a product of two tensors, neither of which
has all of their dimensions, a scan is given these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
from torch import fx

from lz_compile.ground.sizes import Size, product, shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, broadcast_from, fresh, renamed, resolve
from lz_compile.passes.formula.contraction import PRODUCTS
from lz_compile.passes.formula.expressions import CASTS, is_cast
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of, tensor_operands
from lz_compile.passes.rewriting.core import Core, core_between, find_core

if TYPE_CHECKING:
    from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan

#: Calls that spell sizes out, which a proof could not change.
_SPELLED = frozenset({"view", "reshape", "flatten", "unflatten", "expand", "repeat", "broadcast_to"})
#: How many products may be made of each other.
_DEEP = 8
#: What weighs states before they are read.
_SCALES = frozenset({"mul", "div"})


@dataclass(frozen=True)
class StatesRead:
    """``output = sum over rows of query * states``, another query for each step, and the last of the states.

    ``query`` is a product of leaves of ``region``. ``inner`` are the nodes between the states and all that is given.
    ``lasts`` are the nodes of the last states, with their axes. It ``is_tall`` where there are more rows than columns.
    """

    output: fx.Node
    dims: Dims
    query: sympy.Expr
    region: Region
    rows: tuple[Axis, ...]
    inner: tuple[fx.Node, ...]
    lasts: Mapping[fx.Node, Dims]
    is_tall: bool

    @property
    def query_axes(self) -> frozenset[Axis]:
        """What a query differs over."""
        return self.region.axes_in(self.query)


@dataclass(frozen=True)
class Updates:
    """What drives a recurrence as ``left * right``, products of leaves of ``region``; ``inner`` are the nodes between."""

    left: sympy.Expr
    right: sympy.Expr
    region: Region
    inner: tuple[fx.Node, ...]


def with_reads(scan: PrefixScan, effects: Effects) -> PrefixScan:
    """A recurrence with what is read of its states, if that is one product; what drives it is taken apart where it may be."""
    try:
        read = None if scan.is_reversed else read_of(scan, effects)
    except RefusedError:  # then the states are there as they are, and are read so
        read = None
    if read is None:
        return scan
    try:
        updates = None if scan.has_log_drive else updates_of(scan, read, effects)
    except (RefusedError, LayoutError):  # then the products are there as they are, and drive it
        updates = None
    return scan if updates is None and read.is_tall else replace(scan, read=read, updates=updates)


def read_of(scan: PrefixScan, effects: Effects) -> StatesRead | None:
    """How states are read, if that is by one product, and the last of them beside; nothing is overwritten.

    Raises:
        RefusedError: what they are multiplied by is divided by as well.
    """
    states, dims, time = scan.output, scan.dims[scan.output], scan.time
    inner, products, others = _around(states, effects)
    if len(products) != 1:
        return None
    (output,) = products
    try:
        found = _product(states, dims, output, {*inner}, effects)
        lasts = {node: _last(states, dims, node, time, effects) for node in others}
    except (LayoutError, MutatedError):
        return None
    known = {node: own for node, own in lasts.items() if own is not None}
    if found is None or len(known) != len(lasts) or effects.has_mutations:
        return None
    own, query, region, rows = found
    known_axes, axes = set(axes_of(dims)), region.axes_in(query)
    columns = known_axes - {time, *rows, *axes}
    if not rows or time in rows or time not in axes or not axes <= known_axes:
        return None  # a projection, which is a product of matrices
    is_tall = _is_less(product(each.size for each in columns), product(each.size for each in rows))
    within = dict.fromkeys((*inner, *find_core(effects, states, output).nodes))
    users = {user for node in within if node is not output for user in node.users}
    if any(user not in within and user not in known for user in users):
        return None
    if any(effects.ambient(node) != effects.ambient(states) for node in (*within, *known)):
        return None
    first = min(map(effects.position.__getitem__, (output, *known)))
    if any(effects.position[leaf.node] > first for leaf in region.leaves_in(query).values()):
        return None
    return StatesRead(output, own, query, region, rows, tuple(within), known, is_tall)


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
            elif call.name == "mul" and [effects.name(each) for each in user.users] == ["sum"]:
                products.append(next(iter(user.users)))
            elif call.name in CASTS or call.name in _SCALES or layout.is_in_axes(call):
                inner.append(user)
                queue.append(user)
            else:
                others.append(user)
    return inner, products, others


def _product(
    states: fx.Node, dims: Dims, output: fx.Node, inner: Collection[fx.Node], effects: Effects
) -> tuple[Dims, sympy.Expr, Region, tuple[Axis, ...]] | None:
    """The axes of a product of the states, what they are multiplied by, and the axes summed over; in those of the states."""
    region, call, own = Region(effects), effects.calls[output], fresh(shape_of(known_tensor(output)))
    assert call is not None
    if call.name == "sum":
        found = contraction.read(region, call, own)
        if found is None:
            return None
        sides, summed = tuple((each.node, each.dims) for each in (found.left, found.right)), found.summed
    else:
        given = contraction.factors(call, own)
        if given is None or given.addend is not None or not given.is_plain:
            return None
        sides, summed = given.factors, given.summed
    parts = [part for node, each in sides for part in _apart(node, each, 1, states, inner, effects)]
    seen = [part for part in parts if part[0] is states]
    if len(seen) != 1 or seen[0][2] != 1:
        return None
    names = _named(seen[0][1], dims)
    others = [part for part in parts if part[0] is not states]
    tensors = [each for each in (states, output, *(node for node, _, _ in others)) if isinstance(each, fx.Node)]
    if names is None or len({known_tensor(each).dtype for each in tensors}) > 1:
        return None
    factors = [
        (region.leaf(node, renamed(each, names)) if isinstance(node, fx.Node) else region.scalar(node)) ** power
        for node, each, power in others
    ]
    query = uncancelled(factors, "what reads the states")
    return renamed(own, names), query, region, axes_of(renamed((summed,), names))


def uncancelled(factors: Sequence[sympy.Expr], what: str) -> sympy.Expr:
    """The product of factors.

    Raises:
        RefusedError: one of them is divided by as well: where it is zero, the source has no number.
    """
    powers = [factor.as_powers_dict() for factor in factors]
    above, below = (
        {base for each in powers for base, power in each.items() if base.free_symbols and sign * power > 0}
        for sign in (1, -1)
    )
    if above & below:
        text = f"{what} is multiplied and divided by the same values: NaN where these are zero would be lost"
        raise RefusedError("CANCELS_OUT", text, "multiply by what is left of them")
    return sympy.Mul(*factors)


def _apart(
    node: Any, dims: Dims, power: int, states: fx.Node, inner: Collection[fx.Node], effects: Effects
) -> list[tuple[Any, Dims, int]]:
    """What a tensor is the product of, down to the states; what these are no part of is one factor."""
    if not isinstance(node, fx.Node):
        return [(node, dims, power)]
    node, dims = _shown(node, dims, effects, states)
    given = multiplied(effects.calls.get(node), dims) if node in inner and node is not states else None
    if given is None or len(given) == 1:
        return [(node, dims, power)]
    return [part for each, own, sign in given for part in _apart(each, own, power * sign, states, inner, effects)]


def multiplied(call: Call | None, dims: Dims) -> list[tuple[Any, Dims, int]] | None:
    """What a call multiplies, or shows in another shape, each with its axes and its power; None where it does more."""
    if call is None or call.is_inplace or not tensor_operands(call.node):
        return None
    if call.name == "mul" or (call.name == "div" and call.get("rounding_mode") is None):
        powers = {"input": 1, "other": 1 if call.name == "mul" else -1}
        pairs = [(call.get(name), power) for name, power in powers.items()]
        if not all(_is_factor(each, power) for each, power in pairs):
            return None
        return [(each, _broadcast(dims, each), power) for each, power in pairs]
    if call.name in contraction.PRODUCTS:
        product = contraction.factors(call, dims)
        if product is None or product.summed or product.addend is not None or not product.is_plain:
            return None
        return [(each, own, 1) for each, own in product.factors]
    source = tensor_of(call.input)
    if source is None or source.dtype != known_tensor(call.node).dtype:
        return None
    shown = dims if is_cast(call) else layout.read_input_dims(call, dims)
    return None if shown is None else [(call.input, shown, 1)]


def _is_factor(value: Any, power: int) -> bool:
    """Whether a product may have this factor in another place: infinity and one over zero would make NaN of zeros there."""
    if isinstance(value, (int, float)):
        return math.isfinite(value) and (value != 0 or power > 0)
    return tensor_of(value) is not None


def _broadcast(dims: Dims, value: Any) -> Dims:
    tensor = tensor_of(value)
    return () if tensor is None else broadcast_from(dims, shape_of(tensor))


def _shown(node: fx.Node, dims: Dims, effects: Effects, states: fx.Node) -> tuple[fx.Node, Dims]:
    """What a tensor with these axes shows in another shape, and its axes; of states it is asked no further."""
    while node is not states and (call := effects.calls.get(node)) is not None and isinstance(call.input, fx.Node):
        source = tensor_of(call.input)
        own = dims if call.name in CASTS else layout.read_input_dims(call, dims)
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


def _last(states: fx.Node, dims: Dims, node: fx.Node, time: Axis, effects: Effects) -> Dims | None:
    """The axes of a node that is the states after the last step; None where it is something else."""
    call = effects.calls.get(node)
    cut = None if call is None else layout.index_of(call)
    if cut is None:
        return None
    below = fresh(shape_of(known_tensor(cut[0])))
    source, seen = _shown(cut[0], below, effects, states)
    names = _named(seen, dims) if source is states else None
    own = () if names is None else renamed(below, names)
    place = next((place for place, dim in enumerate(own) if dim == (time,)), None)
    if place is None or len(cut[1]) != len(own) or cut[1][place] not in (-1, time.size - 1):
        return None
    rest = own[:place] + own[place + 1 :]
    return rest if cut[1][:place] + cut[1][place + 1 :] == (layout.WHOLE,) * len(rest) else None


# ---- products of others ----------------------------------------------------------------------------------------------


def updates_of(scan: PrefixScan, read: StatesRead, effects: Effects) -> Updates | None:
    """What drives a recurrence as rank-one updates: the factors that have rows, and all others.

    Raises:
        RefusedError: the products are used by others as well, or a factor of theirs is divided by.
    """
    region = Region(effects)
    product, is_outer = opened(region, scan.drive, scan.dims[scan.drive])
    if not is_outer:
        return None
    left, right = sympy.S.One, sympy.S.One
    for factor in sympy.Mul.make_args(product):
        if region.axes_in(factor).isdisjoint(read.rows):
            right *= factor
        else:
            left *= factor
    own = region.axes_in(left)
    if not own.issuperset(read.rows) or region.axes_in(right) <= own | read.query_axes | {scan.time}:
        return None
    edges = [leaf.node for leaf in region.leaves_in(product).values()]
    inner = core_between(effects, edges, region.interior, scan.drive)
    within = {*inner.nodes, *scan.core}
    within -= {node for node in inner.nodes if _is_shown(node, effects) and not within.issuperset(node.users)}
    nodes = sorted(within - {scan.output}, key=effects.position.__getitem__)
    Core((*nodes, scan.output), effects.ambient(scan.output)).check(effects, {}, "use the outer products nowhere else")
    if any(map(effects.is_overwritten, (*nodes, *edges))):
        return None
    return Updates(left, right, region, tuple(nodes))


def _is_shown(node: fx.Node, effects: Effects) -> bool:
    """Whether a node is another one in another shape, which costs nothing where others need it as well."""
    call = effects.calls.get(node)
    return call is not None and layout.is_view(call)


def opened(region: Region, node: fx.Node, dims: Dims, depth: int = 0) -> tuple[sympy.Expr, bool]:
    """A tensor as a product of others, and whether one of these products is outer: each factor lacks an axis of it.

    What holds no outer product is one factor.

    Raises:
        RefusedError: a factor is divided by as well.
    """
    given = None if depth > _DEEP else multiplied(region.effects.calls.get(node), dims)
    if given is None:
        return region.leaf(node, dims), False
    tensors = [(each, own) for each, own, _ in given if isinstance(each, fx.Node)]
    parts = [opened(region, each, own, depth + 1) for each, own in tensors]
    axes = set(axes_of(dims))
    is_outer = any(each for _, each in parts) or (
        len(parts) > 1 and all(region.axes_in(each) < axes for each, _ in parts)
    )
    if not is_outer and len(given) > 1:
        return region.leaf(node, dims), False
    region.interior.setdefault(node, dims)
    values = iter(value for value, _ in parts)
    factors = [
        (next(values) if isinstance(each, fx.Node) else region.scalar(each)) ** power for each, _, power in given
    ]
    return uncancelled(factors, "an outer product"), is_outer
