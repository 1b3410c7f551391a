"""Routed adapters to test kernels with: operands of every form, and what is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import RoutingAttrs

#: Relative to the largest value of a tensor.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Problem:
    """An adapter of given sizes; ``is_packed``: tokens say in which rollout they are, some in none."""

    arm: str = "grad"
    gate: str = "none"
    is_packed: bool = False
    has_layer: bool = True
    rollouts: int = 4
    length: int = 5
    wide: int = 7
    out: int = 6
    rank: int = 3
    few: int = 2

    def __str__(self) -> str:
        return f"{self.arm}-gate_{self.gate}-{'packed' if self.is_packed else 'even'}"

    def attrs(self, dtype: torch.dtype) -> RoutingAttrs:
        """With a result in ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        return RoutingAttrs(self.arm, self.gate, self.is_packed, self.has_layer, 0.0, wide, dtype)  # type: ignore[arg-type]

    def operands(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """By name, in the op's canonical layout; all but a frozen basis and the direction want gradients."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, seeks: bool = True) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
            return values.to(dtype).requires_grad_(seeks)

        tokens = self.rollouts * self.length
        shape = (1, tokens) if self.is_packed else (self.rollouts, self.length)
        found: dict[str, Any] = {
            "x": random(*shape, self.wide),
            "vh": random(self.rank, self.wide, seeks=False),
            "u": random(self.out, self.rank, seeks=False),
            "delta": random(self.rank),
            "a_q": random(self.few, self.wide),
            "b_q": random(self.out, self.few),
            "v": random(self.rank, seeks=False),
        }
        if self.has_layer:
            found |= {"weight": random(self.out, self.wide), "bias": random(self.out), "base": random(*shape, self.out)}
        if self.gate != "none":
            found["gate"] = random(*(shape if self.gate == "token" else (self.rollouts,)), self.rank)
        if self.is_packed:
            found["rollout"] = torch.randint(-1, self.rollouts + 1, (tokens,), generator=generator)
            found["num_rollouts"] = self.rollouts
        return found


PROBLEMS = [
    Problem(arm, gate, is_packed)
    for arm in ("none", "grad", "act")
    for gate in ("none", "rollout", "token")
    for is_packed in (False, True)
]


def exactly(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    return {
        name: each.detach().double().requires_grad_(each.requires_grad)
        if isinstance(each, Tensor) and each.is_floating_point()
        else each
        for name, each in operands.items()
    }


def with_gradients(call: Callable[..., Tensor], operands: Mapping[str, Any], attrs: RoutingAttrs) -> dict[str, Tensor]:
    """The result, and the gradients of a sum that weighs its elements differently, by name."""
    out = call(**operands, attrs=attrs)
    leaves = {name: each for name, each in operands.items() if isinstance(each, Tensor) and each.requires_grad}
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.device)
    found = torch.autograd.grad(out, list(leaves.values()), weights.to(out.dtype))
    return {"result": out.detach(), **dict(zip(leaves, found, strict=True))}


def expected(operands: Mapping[str, Any], attrs: RoutingAttrs) -> dict[str, Tensor]:
    """The same of the definition, in float64."""
    form = replace(attrs, compute_dtype=torch.float64, out_dtype=torch.float64)
    return with_gradients(op.reference, exactly(operands), form)


def misses(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    """What is further from float64 than the dtype allows."""
    assert found.keys() == exact.keys()
    for name, one in found.items():
        scale = max(float(exact[name].abs().max()), 1e-3)
        error = float((one.double() - exact[name]).abs().max()) / scale
        if not error <= TOLERANCE[dtype]:
            yield f"{name} is off by {error:.3g}"
