"""Loops over time as model authors write them: the same recurrences in spellings drawn at random from a seed.

A spelling draws how slices are taken, how contractions are written, how the state is updated, where the time dimension is,
in which order it is walked, and how outputs are kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensors = Sequence[torch.Tensor]

B, H, K, V = 2, 3, 4, 5


@dataclass(frozen=True)
class Spelling:
    """A loop: ``function(*inputs)`` walks ``steps`` of them; ``notes`` say what was drawn."""

    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    steps: int
    notes: str


# ---- slices ------------------------------------------------------------------------------------------------------------


def by_index(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (t,)]


def by_negative_index(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return x[(..., t - x.shape[dim]) + (slice(None),) * (x.dim() - 1 - dim)]


def by_slice(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(t, t + 1),)].squeeze(dim)


def by_select(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return x.select(dim, t)


def by_narrow(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return torch.narrow(x, dim, t, 1).squeeze(dim)


def by_moved(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return x.movedim(dim, 0)[t]


def by_unbind(x: torch.Tensor, dim: int, t: int) -> torch.Tensor:
    return x.unbind(dim)[t]


SLICES = (by_index, by_negative_index, by_slice, by_select, by_narrow, by_moved, by_unbind)


def unbound(x: torch.Tensor, dim: int) -> Tensors:
    return x.unbind(dim)


def split(x: torch.Tensor, dim: int) -> Tensors:
    return [piece.squeeze(dim) for piece in x.split(1, dim)]


def chunked(x: torch.Tensor, dim: int) -> Tensors:
    return [piece.squeeze(dim) for piece in torch.chunk(x, x.shape[dim], dim)]


def listed(x: torch.Tensor, dim: int) -> Tensors:
    return [x.select(dim, t) for t in range(x.shape[dim])]


SPLITS = (unbound, split, chunked, listed)

# ---- contractions ------------------------------------------------------------------------------------------------------
# Of a vector [B, H, K] with a state [B, H, K, V], and of two vectors to a state.


def read_einsum(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhk,bhkv->bhv", q, s)


def read_matmul(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (q.unsqueeze(-2) @ s).squeeze(-2)


def read_bmm(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.bmm(q.reshape(-1, 1, K), s.reshape(-1, K, V)).view(B, H, V)


def read_sum(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (q[..., None] * s).sum(dim=-2)


READS = (read_einsum, read_matmul, read_bmm, read_sum)


def outer_einsum(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhk,bhv->bhkv", k, v)


def outer_matmul(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.matmul(k.unsqueeze(-1), v[:, :, None])


def outer_product(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


OUTERS = (outer_einsum, outer_matmul, outer_product)

# ---- steps -------------------------------------------------------------------------------------------------------------
# A step: (draw, state, q, k, v, a, b) -> (state, output); q, k, a are [B, H, K], v is [B, H, V], b is [B, H].

Step = Callable[..., tuple[tuple[torch.Tensor, ...], torch.Tensor]]


@dataclass(frozen=True)
class Draw:
    """What a step's spelling was drawn to be."""

    read: Callable[..., torch.Tensor]
    outer: Callable[..., torch.Tensor]
    in_place: bool
    gate: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor


def delta_step(draw: Draw, state: Tensors, q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
    (s,) = state
    a = draw.gate(a)
    if draw.in_place:
        s *= a[..., None]
        s += draw.outer(k, b[..., None] * (v - draw.read(k, s)))
    else:
        s = a[..., None] * s
        s = s + draw.outer(k, b[..., None] * (v - draw.read(k, s)))
    return (s,), draw.read(q, s)


def linear_attention_step(draw: Draw, state: Tensors, q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
    s, z = state
    s = s * draw.gate(a).unsqueeze(-1) + draw.outer(k, v)
    z = z + k.abs()
    return (s, z), draw.read(q, s) / (1 + (q * z).sum(-1, keepdim=True).abs())


def nonlinear_step(draw: Draw, state: Tensors, q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
    (h,) = state
    h = torch.tanh(F.linear(h, draw.weight) + v)
    return (h,), h * b.unsqueeze(-1)


def spiking_step(draw: Draw, state: Tensors, q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
    u, last, total = state
    u = draw.gate(b)[..., None] * u + v
    spike = (u > 0.5).to(u.dtype)
    u = torch.where(u > 0.5, u - 0.5, u)
    total = torch.maximum(total, last + spike)
    return (u, spike, total), total - last


STEPS: dict[str, tuple[Step, tuple[tuple[int, ...], ...]]] = {
    "delta": (delta_step, ((B, H, K, V),)),
    "linear_attention": (linear_attention_step, ((B, H, K, V), (B, H, K))),
    "nonlinear": (nonlinear_step, ((B, H, V),)),
    "spiking": (spiking_step, ((B, H, V), (B, H, V), (B, H, V))),
}
GATES = (
    torch.sigmoid,
    lambda a: torch.exp(-F.softplus(a)),
    lambda a: 1 - torch.sigmoid(a),
    lambda a: a.sigmoid() * 0.9,
)

# ---- loops -------------------------------------------------------------------------------------------------------------


def spelled(seed: int, *, length: int = 8, dtype: torch.dtype = torch.float64, grad: bool = False) -> Spelling:
    """The loop that a seed stands for."""
    rng = random.Random(seed)
    name = rng.choice(list(STEPS))
    step, shapes = STEPS[name]
    times = [rng.randrange(3) for _ in range(5)]
    how = [rng.choice((*SLICES, *SPLITS)) for _ in range(5)]
    order = rng.choice(("forward", "forward", "backward", "every_other"))
    output = rng.choice(("stack", "cat", "assigned", "inserted", "last", "several"))
    out_dim = rng.randrange(4)
    in_place = rng.random() < 0.3 and not grad
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    draw = Draw(rng.choice(READS), rng.choice(OUTERS), in_place, rng.choice(GATES), tensor(V, V) / V)
    steps = {"every_other": range(0, length, 2), "backward": range(length - 1, -1, -1)}.get(order, range(length))
    shaped = [(B, H, length, size) for size in (K, K, V, K)] + [(B, H, length)]
    inputs = tuple(tensor(*shape).movedim(2, time) for shape, time in zip(shaped, times, strict=True))
    if grad:
        inputs = tuple(x.detach().requires_grad_() for x in inputs)

    def function(*xs: torch.Tensor) -> Any:
        pieces = [cut(x, dim) if cut in SPLITS else x for x, cut, dim in zip(xs, how, times, strict=True)]
        state = tuple(xs[0].new_zeros(shape) for shape in shapes)
        outputs: list[torch.Tensor] = []
        width = (B, H, V)
        buffer = torch.zeros((*width[:out_dim], len(steps), *width[out_dim:]), dtype=dtype)
        for number, t in enumerate(steps):
            row = [p[t] if c in SPLITS else c(p, d, t) for p, c, d in zip(pieces, how, times, strict=True)]
            state, y = step(draw, state, *row)
            if output == "assigned":
                buffer[(slice(None),) * out_dim + (number,)] = y
            elif output == "inserted":
                outputs.insert(0, y)
            else:
                outputs.append(y.unsqueeze(min(out_dim, 2)) if output == "cat" else y)
        if output == "assigned":
            return buffer, *state
        if output == "last":
            return outputs[-1]
        if output == "cat":
            return torch.cat(outputs, min(out_dim, 2)), state[0]
        joined = torch.stack(outputs, dim=out_dim)
        return (joined, outputs[2], outputs[-1] + state[-1].sum()) if output == "several" else (joined, *state)

    cuts = ",".join(cut.__name__ for cut in how)
    notes = f"{name} {cuts} at {times} {order} {output}@{out_dim} {draw.read.__name__} {draw.outer.__name__} {in_place}"
    return Spelling(function, inputs, len(steps), notes)
