"""Copies of what a kernel gave, into the order in which it lies already: PyTorch asks for them, nobody else reads it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_COPY = _aten.clone.default
_SHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_VIEWS = (*_SHAPES, _aten.permute.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims)


def leave_out_needless_copies(module: fx.GraphModule) -> None:
    """Let what a graph copies of a kernel's result be that result, where nobody else reads it and it lies as the copy would.

    A loop whose outputs are stacked copies them twice, steps first and then in the order that they had: a pass over memory.
    """
    if [copy for copy in module.graph.find_nodes(op="call_function", target=_COPY) if _leave_out(copy)]:
        module.recompile()


def _leave_out(copy: fx.Node) -> bool:
    chain = [copy]
    while chain[-1].target in (*_VIEWS, _COPY):
        chain.append(chain[-1].all_input_nodes[0])
    source = chain.pop()
    if any(len(each.users) != 1 for each in (source, *chain[1:])) or not _is_of_kernel(source):
        return False
    wanted, seen = copy.meta["val"], source.meta["val"]
    if not all(isinstance(size, int) for each in (seen, wanted) for size in each.shape):
        return False
    views: list[tuple[Any, Any, torch.Tensor]] = []
    try:
        for view in (each for each in reversed(chain) if each.target != _COPY):
            target: Any = _aten.view.default if view.target in _SHAPES else view.target
            seen = target(seen, *view.args[1:])
            views.append((target, view.args[1:], seen))
    except RuntimeError:  # no view of that memory
        return False
    if not views or _layout(seen) != _layout(wanted):
        return False
    found = source
    for target, given, value in views:
        with copy.graph.inserting_before(copy):
            found = copy.graph.call_function(target, (found, *given))
        found.meta["val"] = value
    copy.replace_all_uses_with(found)
    for each in chain:
        copy.graph.erase_node(each)
    return True


def _layout(value: torch.Tensor) -> list[tuple[int, int]]:
    return [(size, 0 if size == 1 else stride) for size, stride in zip(value.shape, value.stride(), strict=True)]


def _is_of_kernel(node: fx.Node) -> bool:
    """Whether a tensor is what a kernel of ours gave, which is memory of its own."""
    call = node.args[0] if node.target is operator.getitem else node
    target = call.target if isinstance(call, fx.Node) else None
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "layerzero"
