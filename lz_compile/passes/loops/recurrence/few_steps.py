"""A loop of few steps in a graph of its own: what is done to a long one is done to that first, and proven there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lz_compile.passes.editing.edit import Rewrite, Unproven, apply
from lz_compile.passes.graph.modes import Ambient
from lz_compile.passes.graph.view import tensor_of, value_of
from lz_compile.passes.loops.recurrence.indicators import is_indicator
from lz_compile.passes.loops.recurrence.step_trace import SCAN, ScanCall, scan_call

#: Loops of more steps are long, and what is tried instead.
_LONG, _FEW = 256, 7


def shown_on_few_steps(node: fx.Node, ambient: Ambient, what: str, make: Callable[[fx.Node], Any]) -> str:
    """How a change of a long loop is shown; empty where it is to be proven at full length.

    Raises:
        RefutedError: the loop would be another one.
        Exception: what ``make`` raises.
    """
    call = scan_call(node)
    if call is None or not _is_long(call.length) or ambient != Ambient():
        return ""
    if any(map(is_indicator, (*call.xs, *call.given))):  # which is told by what they are made of
        return ""
    module, scan = _shortened(call)
    unproven: Unproven = []
    apply(module, Rewrite(what, lambda: make(scan)), unproven)
    return "" if unproven else f"held against the loop on {_FEW} steps"


def _is_long(length: Any) -> bool:
    if isinstance(length, torch.SymInt):
        return bool(length.node.has_hint() and length.node.hint > _LONG)  # one that data decide is not cut
    return bool(length > _LONG)


def _shortened(call: ScanCall) -> tuple[fx.GraphModule, fx.Node]:
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    graph, given = module.graph, dict[fx.Node, fx.Node]()
    for node in dict.fromkeys(call.operands):
        given[node] = graph.placeholder(node.name)
        given[node].meta = {**node.meta, "example_value": _cut(node) if node in call.xs else value_of(node)}
    module.body = call.body
    init, xs, more = ([given[node] for node in part] for part in (call.init, call.xs, call.given))
    scan = graph.call_function(SCAN, (graph.get_attr("body"), init, xs, more))
    whole = value_of(call.node)
    with torch.enable_grad():
        scan.meta = {
            **call.node.meta,
            "example_value": (*whole[: len(init)], *(each[:_FEW] for each in whole[len(init) :])),
        }
    results = []
    for users in call.results().values():
        for user in users:
            results.append(graph.call_function(operator.getitem, (scan, user.args[1])))
            results[-1].meta = {**user.meta, "example_value": value_of(scan)[user.args[1]]}
    graph.output(tuple(results))
    module.recompile()
    return module, scan


def _cut(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None, "what is gone over is a tensor"
    with torch.enable_grad():
        return value[:_FEW]
