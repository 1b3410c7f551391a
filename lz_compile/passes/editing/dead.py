"""What nobody reads: a value that is computed and thrown away is no use of what it was computed from.

Models return attention weights that their callers drop, average them, keep statistics for a log that is off. Inductor
computes none of it, so that it must not stand in the way of a rewrite either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.expressions import is_constant, specialised
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.view import Call, read

#: Calls that do nothing but compute their result, beyond those that :mod:`algebra` and :mod:`layout` can read.
_PURE = frozenset(
    "mean sum prod amax amin max min var std var_mean std_mean norm linalg_norm linalg_vector_norm all any argmax argmin "
    "topk sort argsort cumsum cumprod logsumexp softmax log_softmax layer_norm rms_norm group_norm normalize "
    "relu gelu silu sigmoid softplus abs sign sin cos erf log2 log10 log1p expm1 floor ceil round trunc "
    "gt ge lt le minimum clamp_max isnan isinf isfinite floordiv mod remainder xor lshift rshift "
    "cat stack chunk split split_with_sizes unbind tensor_split gather take_along_dim index_select select narrow diagonal "
    "tril triu arange eye detach cpu cuda size dim numel".split()
)
#: A join of fewer values may be part of one step, and so may be fewer calls.
_MANY = 4


def drop_dead(graph: fx.Graph) -> int:
    """Erase calls whose results nobody reads, and what only they read; how many there were.

    Calls that write, draw random numbers, or may do anything else besides giving a result stay.
    """
    return _erase(graph, dead_calls(graph))


def drop_dead_of_loops(graph: fx.Graph) -> int:
    """The same of what all steps of a loop but its last compute for nobody, of joins of many values, and computed of those.

    Other values stay: steps are equal only as long as they compute the same, whoever reads it.
    """
    dead, gone = dict.fromkeys(dead_calls(graph)), dict[fx.Node, None]()
    unread, others, scattered = Counter(map(_alike, dead)), Counter[Any](), set[Any]()
    for node in graph.nodes if dead else ():
        if node not in dead:
            others[_alike(node)] += 1
        elif others[_alike(node)]:  # without it, the steps before and behind one that is read were two loops
            scattered.add(_alike(node))
    for node in reversed(dead):
        is_join = str(getattr(read(node), "name", "")) in ("cat", "stack") and len(node.all_input_nodes) >= _MANY
        key = _alike(node)
        is_unread = key not in scattered and unread[key] >= _MANY * max(others[key], 1)
        if is_join or is_unread or any(each in gone for each in node.all_input_nodes):
            gone[node] = None
    return _erase(graph, list(reversed(gone)))


def _alike(node: fx.Node) -> Any:
    """The same for a call in every step of a loop."""
    return str(node.target) if node.op == "call_method" else node.target, node.meta.get("stack_trace")


def dead_calls(graph: fx.Graph) -> list[fx.Node]:
    """Calls whose results nobody reads, the last first."""
    dead: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if all(user in dead for user in node.users):
            call = read(node)
            if call is not None and _is_pure(call):
                dead[node] = None
    return list(dead)


def _erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> int:
    for node in nodes:
        graph.erase_node(node)
    return len(nodes)


def _is_pure(call: Call) -> bool:
    """Whether nothing but its result tells that a call was made."""
    if call.is_inplace or call.get("out") is not None or call.node.meta.get("unbacked_bindings"):
        return False
    if not is_torchs(call.node.target):
        return False
    if call.name == "dropout":
        return not call.get("training", True) or specialised(call.get("p", 0.5)) == 0
    is_known = call.name in _PURE or call.name in contraction.PRODUCTS
    return is_known or is_pointwise(call) or layout.rearranges(call) or is_constant(call)


def is_torchs(target: Any) -> bool:
    """Whether a name means what it means in torch: a method's does, others may have functions of the same name."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten"
    module = getattr(target, "__module__", None)
    return isinstance(target, str) or module in (None, "_operator") or module.partition(".")[0] == "torch"
