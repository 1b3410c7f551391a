"""Splice a kernel into a graph in place of a match; the graph is untouched everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from lz_compile.passes import contraction, layout
from lz_compile.passes.algebra import is_pointwise
from lz_compile.passes.axes import Dims
from lz_compile.passes.builder import Builder, GraphBuilder
from lz_compile.passes.match import Attributes, Match
from lz_compile.passes.view import read, tensor_of

KernelCall = Callable[..., Any]


class RewriteError(Exception):
    """The replacement does not look like what it replaces (shape, dtype or device)."""


def splice(graph: fx.Graph, match: Match, call: KernelCall) -> list[fx.Node]:
    """Replace ``match.output`` by the kernel's nodes and erase what became superfluous.

    Either the whole replacement is made or, on any exception, the graph is as it was.

    Args:
        graph: the graph that the match was found in.
        match: what to replace.
        call: the kernel, a function of the op's canonical operands and ``attrs`` (see ``lowering/ops``).

    Returns:
        the new nodes, in graph order.

    Raises:
        RewriteError: the replacement's shape, dtype or device differs.
    """
    sources = {**match.inputs, **_live(match.read, match.core)}
    builder = GraphBuilder(graph, match.output, match.ambient, sources)
    try:
        with graph.inserting_before(match.output):
            result = _emit(builder, match, call)
    except BaseException:
        for node in reversed(builder.created):
            graph.erase_node(node)
        raise
    match.output.replace_all_uses_with(result)
    superfluous = set(match.core)
    for node in reversed(match.core):
        _erase_if_unused(graph, node)
    for node in reversed(list(match.read)):
        step = None if node in superfluous or node.users else read(node)
        if step is not None and layout.rearranges(step) and not step.is_inplace:
            graph.erase_node(node)
    return [node for node in builder.created if not _erase_if_unused(graph, node)]


def emit(builder: Builder, match: Match, call: KernelCall, attributes: Attributes) -> Any:
    """Operands, kernel and result, over the tensors or proxies of ``builder``."""
    operands = match.emitter.operands(builder)
    value = call(**operands, attrs=attributes)
    return match.emitter.result(builder, value)


def _live(read: Mapping[fx.Node, Dims], core: tuple[fx.Node, ...]) -> dict[fx.Node, Dims]:
    """The nodes that were read and that stay after the rewrite."""
    return {node: dims for node, dims in read.items() if node not in core}


def _emit(builder: Builder, match: Match, call: KernelCall) -> fx.Node:
    result: fx.Proxy = emit(builder, match, call, match.attributes)
    old, new = tensor_of(match.output), tensor_of(result.node)
    if old is None or new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise RewriteError(
            f"rewriting {match.op} at {match.where}: expected a {_describe(old)}, the kernel gives a {_describe(new)}"
        )
    if new.stride() != old.stride() and _shows_strides(match.output):
        strides = old.stride()
        order = sorted(range(old.dim()), key=lambda dim: -strides[dim])
        back = [order.index(dim) for dim in range(old.dim())]
        result = result.permute(order).contiguous().permute(back)
    return result.node


def _describe(tensor: torch.Tensor | None) -> str:
    return (
        "value that is no tensor"
        if tensor is None
        else f"{tensor.dtype} tensor {tuple(tensor.shape)} on {tensor.device}"
    )


#: Readers to which the strides of what they read make no difference that anyone can see.
_AGNOSTIC = contraction.PRODUCTS | {"contiguous", "layer_norm", "rms_norm", "sum", "mean"}


def _shows_strides(node: fx.Node) -> bool:
    """Whether strides of ``node`` matter to someone: a ``view`` that needs them, an output, or who knows what."""
    queue, seen = list(node.users), set()
    while queue:
        user = queue.pop()
        call = None if user in seen else read(user)
        if user in seen or (call is not None and call.name in _AGNOSTIC):
            continue
        seen.add(user)
        if call is None or call.is_inplace or call.name in ("view", "view_as"):
            return True
        if (
            not layout.is_view(call)
            and not is_pointwise(call)
            and call.name not in ("chunk", "split", "unbind", "getitem")
        ):
            return True
        queue.extend(user.users)
    return False


def _erase_if_unused(graph: fx.Graph, node: fx.Node) -> bool:
    if node.users:
        return False
    graph.erase_node(node)
    return True
