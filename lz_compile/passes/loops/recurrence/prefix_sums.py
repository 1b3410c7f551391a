"""Recurrences without steps, by running sums: of logarithms of decays, or of outer products.

``exp(s + logcumsumexp(v - s))`` and ``exp(s) * cumsum(b * exp(-s))`` with running sums ``s`` of logarithms, and
``p * cumsum(b / p)`` with running products ``p``, are ``h[t] = a[t] h[t-1] + b[t]`` with decays ``a = exp`` of what ``s``
grows by, or of which ``p`` is the product, and ``b = exp(v)`` in the first. What stands around a running sum is read as an
expression, in whatever way it is spelled.

``S = cumsum(k v^T)`` over time, of which every step reads ``y[t] = S[t]^T q[t]``, is linear attention without a loop: it adds
one outer product in each step. The source holds the states of all steps, ``n * d * e`` numbers; a scan holds one.

**Source** Heinsen, "Efficient Parallelization of a Ubiquitous Sequential Computation" (2023); Feng et al., "Were RNNs All We
Needed?" (2024), appendix B; Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention" (2020).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims, fresh
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, mutated, told
from lz_compile.passes.graph.view import Call, known_tensor, needed, tensor_of, tensor_operands
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan, dims_of, scans_of, too_short
from lz_compile.passes.loops.recurrence.prefix_scan_reads import opened, read_of, updates_of
from lz_compile.passes.loops.roll.worthwhile import LEAST_CONTRACTIONS, LEAST_POINTWISE
from lz_compile.passes.rewriting.core import Core

#: Numbers below which two running sums (some 20 ns a number) cost less than calling a kernel (15 us).
_LEAST_NUMBERS = 512
#: How many functions may lie between a running sum and what it is made of, or becomes.
_NEAR = 4


def log_scans(graph: fx.Graph, effects: Effects) -> Iterator[PrefixScan | NearMiss]:
    """Every such recurrence of a graph; of those that are used otherwise, why they are left alone."""
    calls = (call for call in map(effects.calls.get, graph.nodes) if call is not None and call.name in _RUNNING)
    yield from scans_of((call for call in calls if call.node.users), effects, _read)


#: What runs along time, and how what it runs over is made of what goes in and of what decays.
_RUNNING: Mapping[str, frozenset[str]] = {
    "logcumsumexp": frozenset({"sub", "add"}),
    "cumsum": frozenset({"mul", "div"}),
}
_SUM, _DECAY = sympy.Symbol("running", real=True), sympy.Symbol("decay", real=True)


@dataclass(frozen=True)
class _Around:
    """What is around a running sum: ``drive`` and ``decay`` go in; ``whole`` is what the sum must be part of."""

    drive: fx.Node
    decay: fx.Node
    whole: sympy.Expr
    is_product: bool = False


def _read(call: Call, effects: Effects) -> PrefixScan | None:
    """The recurrence that a running sum belongs to; None where it is another's.

    Raises:
        RefusedError: its states are used as logarithms, someone else reads a part of it, or memory is overwritten.
        LayoutError: a layout has no exact form in axes.
    """
    tensor, dim = tensor_of(call.node), call.get("dim")
    inner = effects.calls.get(call.input)
    if tensor is None or not isinstance(dim, int) or inner is None or inner.name not in _RUNNING[call.name]:
        return None
    dim %= tensor.dim()
    steps, count = tensor.shape[dim], 1
    for size in tensor.shape:
        count = count * size if isinstance(size, int) else _LEAST_NUMBERS
    around = _around(effects, call, inner)
    output = None if around is None else _output(effects, call, around)
    if around is None or output is None:
        return None
    own = effects.calls.get(around.decay)
    runs = own is not None and own.name == ("cumprod" if around.is_product else "cumsum")
    is_own = runs and own is not None and own.get("dim") in (dim, dim - tensor.dim()) and own.get("dtype") is None
    if (isinstance(steps, int) and steps < LEAST_POINTWISE) or count < _LEAST_NUMBERS:
        text = f"two running sums over {steps} steps, of {count} numbers, for h[t] = a[t] * h[t - 1] + b[t]"
        raise too_short(text, f"{LEAST_POINTWISE} steps and {_LEAST_NUMBERS} numbers")
    given = {around.drive, around.decay}
    core = tuple(needed([output], given, tensor_operands))
    if is_own and set(around.decay.users) <= set(core):
        core, decay = (around.decay, *core), own.input  # type: ignore[union-attr]  # it is a call
    else:
        is_own, decay = False, around.decay
    if around.is_product and not is_own:
        return None
    leaves = (decay, around.drive)
    _check(core, leaves, effects)
    if any(each is None or each.shape[dim - len(each.shape)] != steps for each in map(tensor_of, leaves)):
        return None
    if any(known_tensor(each).dim() != tensor.dim() for each in leaves):
        return None
    decays: Literal["products", "steps", "sums"] = "products" if around.is_product else "steps" if is_own else "sums"
    drives = call.name == "logcumsumexp"
    return PrefixScan(output, core, dim, around.drive, decay, dims_of(output, leaves), decays, drives)


def _around(effects: Effects, call: Call, inner: Call) -> _Around | None:
    """What goes into a running sum: one operand, and the decay that the other is made of."""
    first, second = inner.input, inner.get("other")
    pairs = [(first, second)] if inner.name in ("sub", "div") else [(first, second), (second, first)]
    for drive, other in pairs:
        if tensor_of(drive) is None or tensor_of(other) is None or inner.get("alpha", 1) != 1:
            continue
        for decay in _behind(effects, other):
            value = _expressed(effects, other, {decay: _DECAY})
            value = value if inner.name in ("add", "mul") else -value if inner.name == "sub" else 1 / value
            if call.name == "logcumsumexp" and value == -_DECAY:
                return _Around(drive, decay, sympy.exp(_SUM + _DECAY))
            if call.name == "cumsum" and value == sympy.exp(-_DECAY):
                return _Around(drive, decay, _SUM * sympy.exp(_DECAY))
            if call.name == "cumsum" and value == 1 / _DECAY and effects.name(decay) == "cumprod":
                return _Around(drive, decay, _SUM * _DECAY, is_product=True)
    return None


def _behind(effects: Effects, node: fx.Node) -> list[fx.Node]:
    """A tensor, and those that it is made of by few functions of one argument."""
    found = [node]
    for _ in range(_NEAR):
        call = effects.calls.get(found[-1])
        operands = tensor_operands(found[-1])
        if call is None or len(operands) != 1 or not (is_pointwise(call) or layout.rearranges(call)):
            break
        found.append(operands[0])
    return found


def _expressed(effects: Effects, node: fx.Node, known: Mapping[fx.Node, sympy.Symbol]) -> sympy.Expr:
    """A value in others that are known; what else it is made of are symbols of its own."""
    region = Region(effects, expand_masks=True, stops=known)
    dims = fresh(shape_of(known_tensor(node)))
    expression = region.express(node, dims)
    leaves = {symbol: region.leaves[symbol] for symbol in expression.free_symbols & region.leaves.keys()}
    names = {
        symbol: known[leaf.node]
        for symbol, leaf in leaves.items()
        if leaf.node in known and _is_same_place(leaf.dims, dims)
    }
    return sympy.powsimp(expression.xreplace(names))


def _is_same_place(own: Dims, dims: Dims) -> bool:
    """Whether a tensor has these axes, or one element for them all."""
    return len(own) == len(dims) and all(each in ((), whole) for each, whole in zip(own, dims, strict=True))


def _output(effects: Effects, call: Call, around: _Around) -> fx.Node | None:
    """What the states of all steps are in; RefusedError where their logarithms are read."""
    known = {call.node: _SUM, around.decay: _DECAY}
    level, seen = [call.node], {call.node}
    for _ in range(_NEAR):
        level = [user for node in level for user in node.users if _is_plain(effects, user) and user not in seen]
        seen.update(level)
        for node in level:
            value = _expressed(effects, node, known)
            if value == around.whole:
                return node
            if call.name == "logcumsumexp" and value == _SUM + _DECAY:
                return _exponential(node, effects)
    return None


def _is_plain(effects: Effects, node: fx.Node) -> bool:
    call, tensor = effects.calls.get(node), tensor_of(node)
    return call is not None and tensor is not None and is_pointwise(call) and not call.is_inplace


def _exponential(total: fx.Node, effects: Effects) -> fx.Node:
    """The only reader of the states' logarithms; RefusedError where there are others."""
    users = [user for user in total.users if user.users or user.op == "output"]
    calls = {user: effects.calls.get(user) for user in users}
    others = [user for user, call in calls.items() if call is None or call.name != "exp" or call.is_inplace]
    if len(users) != 1 or others:
        reader = f"by {told(others[0])}" if others else f"{len(users)} times over"
        text = f"the states of h[t] = a[t] * h[t - 1] + b[t] are used as logarithms, {reader}"
        raise RefusedError("LOG_SPACE_STATES", text, "use exp of the states only, once; a kernel needs no logarithms")
    return users[0]


def _check(core: tuple[fx.Node, ...], leaves: tuple[fx.Node, ...], effects: Effects) -> None:
    Core(core, effects.ambient(core[-1])).check(effects, {}, "use the states themselves instead")
    for node in (*core, *leaves):
        if effects.is_overwritten(node):
            raise RefusedError("OPERAND_MUTATED", f"{told(node)} is overwritten", "use its out-of-place form")


# ---- outer products --------------------------------------------------------------------------------------------------


def running_sums(graph: fx.Graph, effects: Effects, known: Collection[fx.Node]) -> Iterator[PrefixScan | NearMiss]:
    """Every running sum of outer products that is none of what is ``known``; of those that are read otherwise, how."""
    sums = (call for call in map(effects.calls.get, graph.nodes) if call is not None and call.name == "cumsum")
    calls = (call for call in sums if call.node not in known and call.node.users and not call.is_inplace)
    yield from scans_of(calls, effects, _read_outer)


def _read_outer(call: Call, effects: Effects) -> PrefixScan | None:
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
    return replace(scan, read=read, updates=updates_of(scan, read, effects))


def _is_outer(region: Region, scan: PrefixScan) -> bool:
    """Whether a running sum adds up products, at each time, of every element of one tensor with every one of another."""
    drive = region.effects.calls.get(scan.drive)
    is_backwards = drive is not None and drive.name == "flip"  # refused, by its reason
    shown = drive.input if drive is not None and is_backwards else scan.drive
    product, _ = opened(region, shown, scan.dims[scan.drive])
    axes = [region.axes_in(factor) for factor in sympy.Mul.make_args(product)]
    over_time = [each for each in axes if scan.time in each]
    return any(one - other and other - one for one in over_time for other in over_time)
