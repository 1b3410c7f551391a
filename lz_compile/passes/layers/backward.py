"""Whether a backward pass through a region that is called more than once is right: tried, once for each environment.

It was wrong in PyTorch 2.13 (:mod:`lz_compile.lowering.regions` says why, and mends it); nobody knows about the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from lz_compile.ground import machine
from lz_compile.ground.isolation import isolated
from lz_compile.ground.store import Store
from lz_compile.lowering import inductor
from lz_compile.lowering.regions import INVOKE, NAME

_LAYERS, _WIDTH = 3, 16
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Tried:
    """What was found: what was wrong, empty if nothing was."""

    wrong: str


def why_not_differentiated(device: torch.device) -> str:
    """Why no backward pass goes through regions on a device, under the configuration of this compile; empty if it may."""
    try:
        where = f"{machine.proven_on(device)} {inductor.settings_digest()}"
        return Store("regions").recall(where, Tried, lambda: Tried(_try(device))).wrong
    except Exception as error:  # noqa: BLE001 what cannot be tried is not trusted, and the reason says so
        return f"it cannot be tried here: {type(error).__name__}: {error}"


def _layer(x: torch.Tensor, scale: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor]:
    """One whose backward pass needs what it is handed, views of it, pieces of one product, and what it gives."""
    one, other = (F.layer_norm(x, (_WIDTH,), scale) @ up).chunk(2, -1)
    return (torch.tanh(x + (one * torch.sigmoid(other)) @ down),)


def _stacked(layer: Callable[..., Any], one: Any, other: Any, *weights: Any) -> tuple[Any, Any]:
    """Two stacks of layers: one is a result, behind the other something takes memory. Each shows a fault of its own."""
    given = other
    for number in range(_LAYERS):
        operands = weights[3 * number : 3 * number + 3]
        (one,), (other,) = layer(one, *operands), layer(other, *operands)
    return one, torch.sin(other @ other.mT) @ given


def _graph() -> fx.GraphModule:
    """Both stacks as calls of one region."""
    graph = fx.Graph()

    def layer(*operands: fx.Proxy) -> tuple[fx.Proxy]:
        call = graph.call_function(
            INVOKE, (graph.get_attr("region"), f"{NAME}_tried", *(each.node for each in operands))
        )
        return (fx.Proxy(graph.call_function(operator.getitem, (call, 0))),)

    given = [fx.Proxy(graph.placeholder(f"operand_{number}")) for number in range(2 + 3 * _LAYERS)]
    graph.output(tuple(each.node for each in _stacked(layer, *given)))
    return fx.GraphModule({"region": fx.symbolic_trace(_layer)}, graph)


def _inputs(device: torch.device) -> list[torch.Tensor]:
    """The same numbers every time, drawn from nobody's generator."""
    shapes = [(4, 3, _WIDTH), (4, 3, _WIDTH), *((_WIDTH,), (_WIDTH, 2 * _WIDTH), (_WIDTH, _WIDTH)) * _LAYERS]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in shapes]
    return [each.to(device).requires_grad_() for each in found]


def _try(device: torch.device) -> str:
    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        inputs = _inputs(device)
        results = function(*inputs)
        total = torch.stack([each.sum() for each in results]).sum()
        return [*(each.detach() for each in results), *torch.autograd.grad(total, inputs)]

    with isolated(), inductor.apart(), torch.inference_mode(False), torch.enable_grad():
        expected = gradients(partial(_stacked, _layer))
        found = gradients(inductor.compile_graph(_graph(), _inputs(device), inductor.configuration(), ""))
    off = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True))
    return f"it is off by {off:.2g} here" if not off <= _ROUNDING else ""
