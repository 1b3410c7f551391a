"""Whether a backward pass through a region that is called more than once is right: tried, once for each environment.

It was wrong in PyTorch 2.13 (:mod:`lz_compile.lowering.regions` says why, and mends it); nobody knows about the next one.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from lz_compile.ground import machine
from lz_compile.ground.isolation import isolated
from lz_compile.ground.store import Store
from lz_compile.lowering import inductor
from lz_compile.lowering.regions import INVOKE, NAME

_LAYERS, _WIDTH = 5, 16
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Tried:
    """What was found: what was wrong, empty if nothing was."""

    wrong: str


def why_not_differentiated(device: torch.device) -> str:
    """Why no backward pass goes through regions on a device, under the configuration of this compile; empty if it may."""
    where = f"{machine.proven_on(device)} {inductor.configuration_digest()}"
    store, key = Store("regions"), hashlib.sha256(where.encode()).hexdigest()
    found = store.load(key, Tried)
    if found is not None:
        return found.wrong
    try:
        found = Tried(_try(device))
    except Exception as error:  # noqa: BLE001 what cannot be tried is not trusted, and the reason says so
        return f"it cannot be tried here: {type(error).__name__}: {error}"
    store.save(key, asdict(found))
    return found.wrong


def _layer(x: torch.Tensor, scale: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor]:
    """One whose backward pass needs what it is handed, views of it, pieces of one product, and what it gives."""
    one, other = (F.layer_norm(x, (_WIDTH,), scale) @ up).chunk(2, -1)
    return (torch.tanh(x + (one * torch.sigmoid(other)) @ down),)


def _stack() -> fx.GraphModule:
    graph = fx.Graph()
    x = given = graph.placeholder("x")
    for number in range(_LAYERS):
        weights = [graph.placeholder(f"{name}_{number}") for name in ("scale", "up", "down")]
        region = graph.get_attr("region")
        call = graph.call_function(INVOKE, (region, f"{NAME}_tried", x, *weights))
        x = graph.call_method("__getitem__", (call, 0))
    graph.output((graph.call_function(_last, (x, given)),))
    return fx.GraphModule({"region": fx.symbolic_trace(_layer)}, graph)


def _last(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """What takes memory behind the layers."""
    return torch.sin(x @ x.mT) @ given


def _inputs(device: torch.device) -> list[torch.Tensor]:
    """The same numbers every time, drawn from nobody's generator."""
    shapes = [(4, 3, _WIDTH), *((_WIDTH,), (_WIDTH, 2 * _WIDTH), (_WIDTH, _WIDTH)) * _LAYERS]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in shapes]
    return [each.to(device).requires_grad_() for each in found]


def _try(device: torch.device) -> str:
    def gradients(function: Any) -> list[torch.Tensor]:
        inputs = _inputs(device)
        (result,) = function(*inputs)
        return [result.detach(), *torch.autograd.grad(result.sum(), inputs)]

    def layers(given: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        x = given
        for number in range(_LAYERS):
            (x,) = _layer(x, *weights[3 * number : 3 * number + 3])
        return (_last(x, given),)

    with isolated(), inductor.apart(), torch.inference_mode(False), torch.enable_grad():
        expected = gradients(layers)
        found = gradients(inductor.compile_graph(_stack(), _inputs(device), inductor.configuration(), ""))
    off = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True))
    return f"it is off by {off:.2g} here" if not off <= _ROUNDING else ""
