"""Which memory a call writes to, however it is spelled, and whether it draws random numbers.

PyTorch says so in most schemas. Those of running statistics and renormalised embeddings say nothing, which the table here
does. Who asks a packet of overloads asks all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.view import Call, read

#: Calls that make a tensor of which nobody knows another name.
NEW = frozenset(
    "empty zeros ones full empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full "
    "empty_strided".split()
)
_STATISTICS = ("running_mean", "running_var")
#: By a call's name: what it overwrites, the argument that says whether it does (none: always), and what that is if not given.
_UNSAID: Mapping[str, tuple[tuple[str, ...], str, Any]] = {
    "embedding": (("weight",), "max_norm", None),
    "embedding_bag": (("weight",), "max_norm", None),
    "batch_norm": (_STATISTICS, "training", False),
    "native_batch_norm": (_STATISTICS, "training", False),
    "cudnn_batch_norm": (_STATISTICS, "training", False),
    "miopen_batch_norm": (_STATISTICS, "training", False),
    "instance_norm": (_STATISTICS, "use_input_stats", True),
    "fused_moving_avg_obs_fake_quant": (("running_min", "running_max", "scale", "zero_point"), "", None),
}


def overwritten(call: Call) -> list[fx.Node]:
    """The tensors that a call writes into."""
    targets: list[Any] = []
    if call.is_inplace or call.name == "setitem":
        targets.extend(call.input if isinstance(call.input, (tuple, list)) else (call.input,))
    if isinstance(call.node.target, torch._ops.HigherOrderOperator) and _writes_inside(call.node):
        targets.extend(call.node.all_input_nodes)
    if "out" in call.arguments:
        out = call.arguments["out"]
        targets.extend(out if isinstance(out, (tuple, list)) else (out,))
    for schema in [overload._schema for overload in _overloads(call.node.target)]:
        if schema.is_mutable:
            given = _named(schema, call.node)
            targets.extend(given.get(each.name) for each in schema.arguments if each.is_write)
    if call.name in _UNSAID:
        targets.extend(_unsaid(call))
    return [each for each in dict.fromkeys(targets) if isinstance(each, fx.Node)]


def writes(call: Call) -> bool:
    """Whether a call writes to anything."""
    return call.is_inplace or call.name == "setitem" or "out" in call.arguments or bool(overwritten(call))


def is_seeded(target: Any) -> bool:
    """Whether an operator, or any overload of it, says that it draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(target))


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def _named(schema: Any, node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in a schema."""
    positional = [each.name for each in schema.arguments if not each.kwarg_only]
    return dict(zip(positional, node.args, strict=False)) | node.kwargs


def _unsaid(call: Call) -> list[Any]:
    names, switch, default = _UNSAID[call.name]
    given = dict(zip(_parameters(call.node.target, call.name), call.node.args, strict=False)) | call.node.kwargs
    said = given.get(switch, default)
    is_off = bool(switch) and (said is None or said is False)
    return [] if is_off else [given.get(name) for name in names]


@cache
def _parameters(target: Any, name: str) -> tuple[str, ...]:
    """The names of a function's parameters; those of a builtin are the operator's of its name."""
    for overload in _overloads(target):
        return tuple(each.name for each in overload._schema.arguments)
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        packet = getattr(torch.ops.aten, name, None)
        return _parameters(packet.default, name) if packet is not None else ()


def _writes_inside(node: fx.Node) -> bool:
    """Whether a graph that a higher-order operator calls overwrites anything, or a kernel that it launches may."""
    if "mutation" in str(node.target):  # a Triton kernel of the user's
        return True
    owner = node.graph.owning_module
    bodies = [getattr(owner, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
    calls = (read(inner) for body in bodies if isinstance(body, fx.GraphModule) for inner in body.graph.nodes)
    return any(overwritten(call) for call in calls if call is not None)
