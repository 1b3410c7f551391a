"""Tensors as products of others, and running sums of outer products: linear attention without a loop.

``S = cumsum(k v^T)`` over time, of which every step reads ``y[t] = S[t]^T q[t]``, is a recurrence that adds one outer product
in each step. The source holds the states of all steps, ``n * d * e`` numbers; a scan holds one. So it is with decays, where
what drives the recurrence is such a product.

**Source** Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import sympy
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims, LayoutError, axes_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, mutated
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan, Updates, dims_of, scans_of, too_short
from lz_compile.passes.loops.recurrence.prefix_scan_reads import StatesRead, multiplied, read_of, uncancelled
from lz_compile.passes.loops.roll.worthwhile import LEAST_CONTRACTIONS
from lz_compile.passes.rewriting.core import Core, core_between

#: How many products may be made of each other.
_DEEP = 8


def running_sums(graph: fx.Graph, effects: Effects, known: Collection[fx.Node]) -> Iterator[PrefixScan | NearMiss]:
    """Every running sum of outer products that is none of what is ``known``; of those that are read otherwise, how."""
    sums = (call for call in map(effects.calls.get, graph.nodes) if call is not None and call.name == "cumsum")
    calls = (call for call in sums if call.node not in known and call.node.users and not call.is_inplace)
    yield from scans_of(calls, effects, _read)


def _read(call: Call, effects: Effects) -> PrefixScan | None:
    """The recurrence that a running sum is; None where it adds up no outer products.

    Raises:
        RefusedError: it does, and is used otherwise.
    """
    result, source, dim = tensor_of(call.node), tensor_of(call.input), call.get("dim")
    if result is None or source is None or not isinstance(dim, int) or not result.is_floating_point():
        return None
    if not source.is_floating_point() or effects.ambient(call.node).is_transformed:
        return None
    dims = dims_of(call.node, (call.input,))
    scan = PrefixScan(call.node, (call.node,), dim % result.dim(), call.input, None, dims)
    if not dims[call.node][scan.dim] or not _is_outer(Region(effects), scan):
        return None
    steps = result.shape[scan.dim]
    if isinstance(steps, int) and steps < LEAST_CONTRACTIONS:
        raise too_short(f"{steps} steps of a running sum of outer products", f"{LEAST_CONTRACTIONS} steps")
    read = read_of(scan, effects)
    if read is None and effects.has_mutations:
        raise mutated("a running sum of outer products is read in no graph that writes in place")
    if read is None:
        text = "a running sum of outer products is used otherwise than by one product with the queries of each step"
        edit = (
            "read the states by einsum('bhnd,bhnde->bhne', query, states), and use them, beside the last, nowhere else"
        )
        raise RefusedError("STATES_READ_OTHERWISE", text, edit)
    return replace(scan, read=read, updates=_updates_of(scan, read, effects))


def with_reads(scan: PrefixScan, effects: Effects) -> PrefixScan:
    """A recurrence with what is read of its states, if that is one product; what drives it is taken apart where it may be."""
    try:
        read = None if scan.is_reversed else read_of(scan, effects)
    except RefusedError:  # then the states are there as they are, and are read so
        read = None
    if read is None:
        return scan
    try:
        updates = None if scan.has_log_drive else _updates_of(scan, read, effects)
    except (RefusedError, LayoutError):  # then the products are there as they are, and drive it
        updates = None
    return scan if updates is None and read.is_tall else replace(scan, read=read, updates=updates)


def _is_outer(region: Region, scan: PrefixScan) -> bool:
    """Whether a running sum adds up products, at each time, of every element of one tensor with every one of another."""
    drive = region.effects.calls.get(scan.drive)
    is_backwards = drive is not None and drive.name == "flip"  # refused, by its reason
    shown = drive.input if drive is not None and is_backwards else scan.drive
    product, _ = _opened(region, shown, scan.dims[scan.drive])
    axes = [region.axes_in(factor) for factor in sympy.Mul.make_args(product)]
    over_time = [each for each in axes if scan.time in each]
    return any(one - other and other - one for one in over_time for other in over_time)


def _updates_of(scan: PrefixScan, read: StatesRead, effects: Effects) -> Updates | None:
    """What drives a recurrence as rank-one updates: the factors that have rows, and all others.

    Raises:
        RefusedError: the products are used by others as well, or a factor of theirs is divided by.
    """
    region = Region(effects)
    product, is_outer = _opened(region, scan.drive, scan.dims[scan.drive])
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


def _opened(region: Region, node: fx.Node, dims: Dims, depth: int = 0) -> tuple[sympy.Expr, bool]:
    """A tensor as a product of others, and whether one of these products is outer: each factor lacks an axis of it.

    What holds no outer product is one factor.

    Raises:
        RefusedError: a factor is divided by as well.
    """
    given = None if depth > _DEEP else multiplied(region.effects.calls.get(node), dims)
    if given is None:
        return region.leaf(node, dims), False
    tensors = [(each, own) for each, own, _ in given if isinstance(each, fx.Node)]
    parts = [_opened(region, each, own, depth + 1) for each, own in tensors]
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
