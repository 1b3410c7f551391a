"""Recurrences in the space of logarithms: ``exp(s + logcumsumexp(v - s))`` with running sums ``s`` of the decays' logarithms.

They are ``h[t] = a[t] h[t-1] + b[t]`` with positive decays and summands, ``a = exp`` of what ``s`` grows by, ``b = exp(v)``.

**Source** Heinsen, "Efficient Parallelization of a Ubiquitous Sequential Computation" (2023); Feng et al., "Were RNNs All We
Needed?" (2024), appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.loops.recurrence.prefix_scan import PrefixScan, dims_of
from lz_compile.passes.loops.roll.reroll import LEAST_POINTWISE

#: Numbers below which two running sums (some 20 ns a number) cost less than calling a kernel (15 us).
_LEAST_NUMBERS = 512


def log_scans(graph: fx.Graph, effects: Effects) -> Iterator[PrefixScan | NearMiss]:
    """Every such recurrence of a graph; of those that are used otherwise, why they are left alone."""
    for node in graph.nodes:
        call = effects.calls[node]
        if call is None or call.name != "logcumsumexp" or not node.users:
            continue
        try:
            scan = _read(call, effects)
        except RefusedError as refusal:
            yield NearMiss.of("scan", node, refusal)
            continue
        if scan is not None:
            yield scan


def _read(call: Call, effects: Effects) -> PrefixScan | None:
    """The recurrence that a running logarithm of sums belongs to; None where it is another's.

    Raises:
        RefusedError: its states are used as logarithms, someone else reads a part of it, or memory is overwritten.
    """
    tensor, dim = tensor_of(call.node), _dim(call)
    difference = effects.calls.get(call.input) if isinstance(call.input, fx.Node) else None
    if tensor is None or not isinstance(dim, int) or difference is None or difference.name != "sub":
        return None
    drive, sums = difference.input, difference.get("other")
    if not isinstance(drive, fx.Node) or not isinstance(sums, fx.Node) or difference.get("alpha", 1) != 1:
        return None
    dim %= tensor.dim()
    steps, count = tensor.shape[dim], 1
    for size in tensor.shape:
        count = count * size if isinstance(size, int) else _LEAST_NUMBERS
    if not isinstance(steps, int) or steps < LEAST_POINTWISE or count < _LEAST_NUMBERS:
        return None
    total = next((user for user in call.node.users if _adds(effects.calls.get(user), call.node, sums)), None)
    if total is None:
        return None
    output = _exponential(total, effects)
    inner = [difference.node, call.node, total]
    running = effects.calls.get(sums)
    is_sum = running is not None and running.name == "cumsum" and set(sums.users) <= {total, difference.node}
    decay = sums
    if is_sum and running is not None:
        is_sum = _dim(running) in (dim, dim - tensor.dim()) and running.get("dtype") is None
        decay = running.input if is_sum else sums
    assert isinstance(decay, fx.Node), "a sum is over a tensor"
    core = (*([sums] if is_sum else []), *inner, output)
    _check(core, (decay, drive), effects)
    leaves = [decay, drive]
    if any(each is None or each.shape[dim - len(each.shape)] != steps for each in map(tensor_of, leaves)):
        return None
    if any(known_tensor(each).dim() != tensor.dim() for each in leaves):
        return None
    return PrefixScan(output, core, dim, drive, decay, dims_of(output, leaves), "steps" if is_sum else "sums")


def _dim(call: Call) -> object:
    return call.get("dim", call.arguments.get("#1"))


def _adds(call: Call | None, one: fx.Node, other: fx.Node) -> bool:
    return (
        call is not None
        and call.name == "add"
        and not call.is_inplace
        and set(call.node.all_input_nodes) == {one, other}
    )


def _exponential(total: fx.Node, effects: Effects) -> fx.Node:
    """The only reader of the states' logarithms.

    Raises:
        RefusedError: there are others.
    """
    users = [user for user in total.users if user.users or user.op == "output"]
    calls = {user: effects.calls.get(user) for user in users}
    others = [user for user, call in calls.items() if call is None or call.name != "exp" or call.is_inplace]
    if len(users) != 1 or others:
        reader = f"by {told(others[0])}" if others else f"{len(users)} times over"
        text = f"the states of h[t] = a[t] * h[t - 1] + b[t] are used as logarithms, {reader}"
        raise RefusedError("LOG_SPACE_STATES", text, "use exp of the states only, once; a kernel needs no logarithms")
    return users[0]


def _check(core: tuple[fx.Node, ...], leaves: tuple[fx.Node, ...], effects: Effects) -> None:
    for node in core[:-1]:
        others = [user for user in node.users if user not in core and user.users]
        if others:
            text = f"{told(node)} is also used by {told(others[0])}"
            raise RefusedError("INTERIOR_USED", text, "use the states themselves instead")
        if effects.ambient(node) != effects.ambient(core[-1]):
            text = "autocast or gradient mode changes inside"
            raise RefusedError("MODE_CHANGES_INSIDE", text, "enter or leave the mode outside of it")
    for node in (*core, *leaves):
        if effects.is_overwritten(node):
            raise RefusedError("OPERAND_MUTATED", f"{told(node)} is overwritten", "use its out-of-place form")
