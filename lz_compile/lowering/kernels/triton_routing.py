"""A routed adapter in Triton (see ``lowering/triton/routing.py``, which is imported when it is called)."""

from __future__ import annotations

import torch

from lz_compile.lowering import routing_steps
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.routing import RoutingAttrs
from lz_compile.lowering.routing_function import operator
from lz_compile.lowering.routing_steps import Steps


def routing(
    x: torch.Tensor,
    vh: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    a_q: torch.Tensor,
    b_q: torch.Tensor,
    v: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    rollout: torch.Tensor | None = None,
    num_rollouts: int | None = None,
    record: torch.Tensor | None = None,
    *,
    attrs: RoutingAttrs,
) -> torch.Tensor:
    """The adapter in the op's canonical layout (see ``lowering/ops/routing.py``), without gates for tokens."""
    assert attrs.gate != "token", "lz.triton_routing is given a gate for each token"
    return _routing(x, vh, u, delta, a_q, b_q, v, weight, bias, base, gate, rollout, num_rollouts, record, attrs=attrs)


# ---- both products ---------------------------------------------------------------------------------------------------


def _run_project(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    from lz_compile.lowering.triton.routing import project

    return project(rows, first, second)


def _fake_project(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], first.shape[0] + second.shape[0])


def _fallback_project(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return routing_steps.project(rows, first, second).contiguous()


def _run_expand(
    columns: torch.Tensor,
    factors: torch.Tensor,
    place: torch.Tensor | None,
    keep: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    start: torch.Tensor | None,
) -> torch.Tensor:
    from lz_compile.lowering.triton.routing import expand

    return expand(columns, factors, place, keep, first, second, start)


def _fake_expand(
    columns: torch.Tensor,
    factors: torch.Tensor,
    place: torch.Tensor | None,
    keep: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    start: torch.Tensor | None,
) -> torch.Tensor:
    return columns.new_empty(columns.shape[0], first.shape[1])


def _fallback_expand(
    columns: torch.Tensor,
    factors: torch.Tensor,
    place: torch.Tensor | None,
    keep: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    start: torch.Tensor | None,
) -> torch.Tensor:
    return routing_steps.expand(columns, factors, place, keep, first, second, start).contiguous()


# ---- sums and flags --------------------------------------------------------------------------------------------------


def _run_cosines(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from lz_compile.lowering.triton.routing import cosines

    return cosines(a, v)


def _fake_cosines(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v.new_empty(a.shape[0])


def _fallback_cosines(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return routing_steps.cosines(a, v).contiguous()


def _run_sums(
    dk: torch.Tensor, a: torch.Tensor, place: torch.Tensor | None, keep: torch.Tensor | None, count: int, length: int
) -> torch.Tensor:
    from lz_compile.lowering.triton.routing import sums

    return sums(dk, a, place, keep, count, length)


def _fake_sums(
    dk: torch.Tensor, a: torch.Tensor, place: torch.Tensor | None, keep: torch.Tensor | None, count: int, length: int
) -> torch.Tensor:
    return dk.new_empty(count, dk.shape[1], dtype=torch.float32)


def _fallback_sums(
    dk: torch.Tensor, a: torch.Tensor, place: torch.Tensor | None, keep: torch.Tensor | None, count: int, length: int
) -> torch.Tensor:
    return routing_steps.sums(dk, a, place, keep, count, length).contiguous()


def _run_decide(g: torch.Tensor, v: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    from lz_compile.lowering.triton.routing import decide

    return decide(g, v, threshold)


def _fake_decide(g: torch.Tensor, v: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    return g.new_empty(g.shape[1]), g.new_empty(g.shape[0])


def _fallback_decide(g: torch.Tensor, v: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    passed, found = routing_steps.decide(g, v, threshold)
    return passed.contiguous(), found.contiguous()


_KERNEL = "lz.triton_routing"
_project = opaque(
    "triton_routing_project",
    _run_project,
    _fake_project,
    fallback=_fallback_project,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
_expand = opaque(
    "triton_routing_expand",
    _run_expand,
    _fake_expand,
    fallback=_fallback_expand,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
_cosines = opaque(
    "triton_routing_cosines",
    _run_cosines,
    _fake_cosines,
    fallback=_fallback_cosines,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
_sums = opaque(
    "triton_routing_sums", _run_sums, _fake_sums, fallback=_fallback_sums, kernel_id=_KERNEL, is_cuda_graph_safe=True
)
_decide = opaque(
    "triton_routing_decide",
    _run_decide,
    _fake_decide,
    fallback=_fallback_decide,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
_routing = operator("triton_routing", Steps(_project, _expand, _cosines, _sums, _decide))
