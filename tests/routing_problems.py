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
    out = call(op.Operands(**operands), attrs)
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


# ---- as users call it -------------------------------------------------------------------------------------------------

G, S, D, E, R, Q = 6, 9, 11, 7, 5, 3
NAMES = ("x", "Vh", "U", "delta_S", "A_q", "B_q")
ARMS = ("grad", "act", "none")


def adapter(dtype: torch.dtype = torch.float64, *shape: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The operands of ``lz.routed_adapter``, and a direction."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape or (G, S, D), (R, D), (E, R), (R,), (Q, D), (E, Q))
    found = [torch.randn(each, generator=generator, dtype=torch.float64).to(dtype) for each in shapes]
    for name, each in zip(NAMES, found, strict=True):
        each.requires_grad_(name not in ("Vh", "U"))
    return found, torch.randn(R, generator=generator, dtype=torch.float64).to(dtype)


def plain(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Any = 1.0) -> Tensor:
    """The sum of both adapters."""
    return ((x @ vh.T) * gate * delta) @ u.T + (x @ a_q.T) @ b_q.T


def weights(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.numel(), dtype=torch.float64).mul(37).sin().view(like.shape).to(like.dtype)


def by_rollout(operands: list[Tensor], v: Tensor) -> tuple[list[Tensor], list[bool]]:
    """The gradient of every rollout for ``delta_S`` by a backward of its own, and whether it is flagged."""
    whole = weights(plain(*operands))
    found, flags = [], []
    for number in range(operands[0].shape[0]):
        delta = operands[3].detach().clone().requires_grad_()
        out = plain(operands[0][number], *operands[1:3], delta, *operands[4:])
        (g,) = torch.autograd.grad(out, delta, whole[number])
        found.append(g)
        flags.append(bool(torch.dot(g, v) > 0))
    return found, flags


def gradients(call: Callable[..., Tensor], operands: list[Tensor], **given: Any) -> list[Tensor]:
    """Of every operand that wants one."""
    leaves = [each for each in operands if each.requires_grad]
    out = call(*operands, **given)
    return list(torch.autograd.grad(out, leaves, weights(out)))
