"""Recurrences over a few steps, which Inductor unrolls: time to compile from empty caches, and to run without gradients.

Claim: a loop whose state has rows and columns takes less time than Inductor's unrolled code from 16 steps on, and compiles in
a third of the time. Selective scans (Mamba) compute an exponential for each element: of 16 steps they take up to 1.3 of it,
of 32 as long. Sums are written out, ``(state * query).sum()``; states are ``[2, 2, N, N]``, those of the selective scan
``[2, 4 N, 16]``.

    python -m benchmarks.short_loops [--models gated] [--lengths 16 32] [--widths 16 64] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.harness import EAGER, compiled, measure, prepare
from benchmarks.publish import Publication, timing_table

LENGTHS = (16, 32)


def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated linear attention over ``[B, T, H, N]``."""
    state, found = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        found.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(found, 1)


def delta(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """The delta rule, with a rate ``b`` per head."""
    state, found = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        old = (k[:, t, :, :, None] * state).sum(-2)
        state = state + k[:, t, :, :, None] * (b[:, t, :, :1] * (v[:, t] - old))[:, :, None, :]
        found.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(found, 1)


def selective(u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's scan over ``[B, T, channels]`` with 16 states for each channel."""
    state, found = u.new_zeros(u.shape[0], u.shape[2], a.shape[1]), []
    for t in range(u.shape[1]):
        state = torch.exp(step[:, t, :, None] * a) * state + step[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
        found.append((state * c[:, t, None]).sum(-1))
    return torch.stack(found, 1)


def _heads(length: int, width: int) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, 2, length, 2, width)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, torch.rand(2, length, 2, width)


def _channels(length: int, width: int) -> tuple[Tensor, ...]:
    u, step = torch.randn(2, 2, length, 4 * width)
    b, c = torch.randn(2, 2, length, 16)
    return u, F.softplus(step), -torch.rand(4 * width, 16), b, c


MODELS: Mapping[str, tuple[Callable[..., Tensor], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "gated": (gated, _heads),
    "delta": (delta, _heads),
    "selective": (selective, _channels),
}


def run_case(publication: Publication, name: str, length: int, width: int, settings: argparse.Namespace) -> None:
    """Compile, check and time one loop."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, given = MODELS[name]
    with torch.no_grad():
        with settings.device:
            inputs = given(length, width)
        prepared = prepare(compiled(model), lambda function: function(*inputs), is_cold=True)
        timings = measure(prepared.variants, settings.device, rounds=settings.rounds)
    compile_s = {each.name: each.first_call_s for each in prepared.variants if each.name != EAGER}
    publication.add_timings({"model": name, "length": length, "width": width}, prepared, timings, compile_s=compile_s)
    print(
        name, length, width, *(f"{each} compiled in {s:.1f} s" for each, s in compile_s.items()), sep=" | ", flush=True
    )


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--widths", nargs="+", type=int, default=[16, 64])
    settings = parse(options, LENGTHS)
    publication = Publication("short_loops", settings.device, is_quick=settings.quick)
    for case in itertools.product(settings.models, settings.lengths, settings.widths):
        run_case(publication, *case, settings)
    publication.show(timing_table("loops of a few steps", publication.rows))


if __name__ == "__main__":
    main()
