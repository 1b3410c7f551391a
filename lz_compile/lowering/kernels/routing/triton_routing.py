"""A routed adapter in Triton (see ``lowering/kernels/routing/triton_source.py``, which is imported when it is called)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lz_compile.lowering.kernels.routing import steps as routing_steps
from lz_compile.lowering.kernels.routing.function import operator
from lz_compile.lowering.kernels.routing.steps import Steps
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.routing import Operands, RoutingAttrs


def routing(x: Operands, attrs: RoutingAttrs) -> torch.Tensor:
    """The adapter in the op's canonical layout (see ``lowering/ops/routing.py``), without gates for tokens."""
    assert attrs.gate != "token", "lz.triton_routing is given a gate for each token"
    return _routing(x, attrs)


# ---- steps -----------------------------------------------------------------------------------------------------------


def _step(name: str, empty: Callable[..., Any]) -> Callable[..., Any]:
    """A step of the adapter as one node; PyTorch's completes a call in which it fails. Signatures are those of PyTorch's."""
    own = getattr(routing_steps, name)

    def run(*given: Any) -> Any:
        from lz_compile.lowering.kernels.routing import triton_source as routing

        return getattr(routing, name)(*given)

    def fallback(*given: Any) -> Any:
        return pytree.tree_map(torch.Tensor.contiguous, own(*given))

    for function in (run, empty, fallback):
        function.__signature__ = inspect.signature(own, eval_str=True)  # type: ignore[attr-defined]
    return opaque(
        f"triton_routing_{name}", run, empty, fallback=fallback, kernel_id="lz.triton_routing", is_cuda_graph_safe=True
    )


_project = _step("project", lambda rows, first, second: rows.new_empty(rows.shape[0], first.shape[0] + second.shape[0]))
_expand = _step("expand", lambda columns, *given: columns.new_empty(columns.shape[0], given[3].shape[1]))
_cosines = _step("cosines", lambda a, v: v.new_empty(a.shape[0]))
_sums = _step("sums", lambda dk, *given: dk.new_empty(given[3], dk.shape[1], dtype=torch.float32))
_decide = _step("decide", lambda g, v, threshold: (g.new_empty(g.shape[1]), g.new_empty(g.shape[0])))
_routing = operator("triton_routing", Steps(_project, _expand, _cosines, _sums, _decide))
