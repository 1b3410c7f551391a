"""Forward and backward of a routed adapter: ``lz.routed_adapter`` against the gate form, which reads a gate of ones after it.

The claims to check: the op, compiled by layerzero, is faster than the gate form, compiled by Inductor, in every case (the aim
is 1.5 times); and the gate form itself is never slower by layerzero than by Inductor. A step of the gate form contains what
comes after its backward: division by ``delta_S``, cosines, and the filtered gradient, compiled as well. The frozen layer is
part of neither. The quarantine is as wide as the rank unless ``--quarantine-rank`` says otherwise.

Memory is measured by ``benchmarks/routing_memory.py``.

    python -m benchmarks.routing [--ranks 16 64 256] [--rollouts 4 16 64] [--lengths 128 512 2048] [--width 512] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import lz_compile as lz
from benchmarks.arguments import parse, parser
from benchmarks.harness import EAGER, INDUCTOR, LAYERZERO, prepare
from benchmarks.publish import Publication, summary_table, table_of, timing_table
from lz_compile.backend import layerzero
from lz_compile.runtime.measure.timing import measure
from lz_compile.runtime.problem.context import name_of
from models.routed_adapter import cosine, gradients_of_gate

RANKS, ROLLOUTS, LENGTHS = (16, 64, 256), (4, 16, 64), (128, 512, 2048)
#: The gate form by layerzero.
GATE_LAYERZERO = "gate form, layerzero"
#: How many times faster than the gate form by Inductor is aimed at.
AIM = 1.5

Step = Callable[[], list[Tensor]]


class Operands(NamedTuple):
    """What an adapter takes, the direction, and the gradient of its output ``[G, S, O]``."""

    x: Tensor
    vh: Tensor
    u: Tensor
    delta: Tensor
    a_q: Tensor
    b_q: Tensor
    v: Tensor
    dy: Tensor

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those that want a gradient."""
        return self.x, self.delta, self.a_q, self.b_q


@dataclass(frozen=True)
class Case:
    """Sizes of one adapter and of its batch."""

    dtype: torch.dtype
    rank: int
    rollouts: int
    length: int

    def build(self, settings: argparse.Namespace) -> Operands:
        """Operands, with every other rollout clearly on the unwanted side, so that rounding decides no flag."""
        width, quarantine = settings.width, settings.quarantine_rank or self.rank
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        u, vh = (torch.linalg.qr(drawn(width, self.rank))[0] for _ in range(2))
        v = F.normalize(drawn(self.rank), dim=0)
        side = torch.where(torch.arange(self.rollouts) % 2 == 0, 1.0, -1.0)[:, None, None]
        x = drawn(self.rollouts, self.length, width) + 3 * side * (v @ vh.T)
        dy = 0.1 * drawn(self.rollouts, self.length, width) + u.sum(1)
        parts = [
            x,
            vh.T.contiguous(),
            u,
            drawn(self.rank),
            drawn(quarantine, width),
            drawn(width, quarantine) * 0.05,
            v,
            dy,
        ]
        operands = Operands(*(each.to(settings.device, self.dtype) for each in parts))
        for each in operands.trained:
            each.requires_grad_()
        return operands

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"dtype": name_of(self.dtype), "rank": self.rank, "rollouts": self.rollouts, "length": self.length}


def gated(x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor, gate: Tensor) -> Tensor:
    """The gate form: ones are multiplied in, one for each rollout and axis."""
    a = F.linear(x, vh)
    kept = F.linear(a * gate[:, None] * delta, u)
    return kept + F.linear(F.linear(x, a_q), b_q)


def filtered(delta_grad: Tensor, gate_grad: Tensor, delta: Tensor, v: Tensor) -> Tensor:
    """What is left of the gradient of ``delta_S`` once flagged rollouts are taken away."""
    gradients = gradients_of_gate(gate_grad.float(), delta.float())
    flagged = cosine(gradients, v.float()) > 0
    return (delta_grad.float() - flagged.float() @ gradients).to(delta_grad.dtype)


def gate_step(operands: Operands, backend: Any) -> Step:
    """A training step of the gate form: the output and all gradients."""
    forward, after = _compiled(gated, backend), _compiled(filtered, backend)
    x, vh, u, delta, a_q, b_q, v, dy = operands

    def step() -> list[Tensor]:
        gate = torch.ones(x.shape[0], vh.shape[0], device=x.device, dtype=x.dtype, requires_grad=True)
        y = forward(x, vh, u, delta, a_q, b_q, gate)
        x_grad, delta_grad, a_grad, b_grad, gate_grad = torch.autograd.grad(y, (*operands.trained, gate), dy)
        return [y.detach(), x_grad, after(delta_grad, gate_grad, delta.detach(), v), a_grad, b_grad]

    return step


def op_step(operands: Operands, backend: Any) -> Step:
    """A training step of ``lz.routed_adapter``, compiled; all of it is in forward and backward."""
    x, vh, u, delta, a_q, b_q, v, dy = operands

    def adapter(x: Tensor, delta: Tensor, a_q: Tensor, b_q: Tensor) -> Tensor:
        return lz.routed_adapter(x, vh, u, delta, a_q, b_q, v=v, arm="grad", rollouts=(x.shape[0], x.shape[1]))

    forward = _compiled(adapter, backend)

    def step() -> list[Tensor]:
        y = forward(x, delta, a_q, b_q)
        return [y.detach(), *torch.autograd.grad(y, operands.trained, dy)]

    return step


def _compiled(function: Callable[..., Tensor], backend: Any) -> Callable[..., Tensor]:
    """The function by a backend; as it is where there is none."""
    if backend is None:
        return function
    compiled: Callable[..., Tensor] = torch.compile(function, backend=backend, dynamic=False)
    return compiled


#: What is compared: the gate form in eager, compiled by Inductor and by layerzero, and the op compiled by layerzero.
STEPS: Mapping[str, Callable[[Operands], Step]] = {
    EAGER: lambda operands: gate_step(operands, None),
    INDUCTOR: lambda operands: gate_step(operands, "inductor"),
    GATE_LAYERZERO: lambda operands: gate_step(operands, layerzero),
    LAYERZERO: lambda operands: op_step(operands, layerzero),
}


def run_case(case: Case, settings: argparse.Namespace, publication: Publication) -> None:
    """Check, time and keep one case; eager is what the others are checked against, and timed if asked for."""
    torch._dynamo.reset()
    operands = case.build(settings)
    prepared = prepare({name: build(operands) for name, build in STEPS.items()}, lambda step: step())
    if not settings.eager:
        prepared = prepared.without({EAGER})
    calls = {variant.name: variant.call for variant in prepared.variants}
    timings = measure(calls, settings.device, rounds=settings.rounds, block_ms=20.0)
    publication.add_timings(case.to_dict(), prepared, timings)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case and form by layerzero: how many times faster than the gate form by Inductor, and what was aimed at."""
    cases = list(rows[0]["case"]) if rows else []
    table = table_of(
        "times faster than the gate form by Inductor", [*cases, "form", "faster", "verdict"], left=("form",)
    )
    for row in rows:
        for name in (LAYERZERO, GATE_LAYERZERO):
            entry = row["variants"].get(name)
            if entry is None or "of_inductor" not in entry:
                continue
            ratio = entry["of_inductor"]
            faster = 1 / ratio["median"]
            verdict = "SLOWER" if ratio["low"] > 1 else "aim reached" if faster >= AIM else "not slower"
            title = "op" if name == LAYERZERO else "gate"
            table.add_row(*map(str, row["case"].values()), title, f"{faster:.2f}", verdict)
    return table


def cases(settings: argparse.Namespace) -> Iterator[Case]:
    """Every combination of sizes."""
    sizes = itertools.product(settings.dtypes, settings.ranks, settings.rollouts, settings.lengths)
    return (Case(*each) for each in sizes)


def sizes(options: argparse.ArgumentParser) -> None:
    """The options that both scripts take."""
    options.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    options.add_argument("--rollouts", nargs="+", type=int, default=list(ROLLOUTS))
    options.add_argument("--width", type=int, default=512, help="inputs and outputs of the layer")
    options.add_argument("--quarantine-rank", type=int, help="that of the kept adapter by default")
    options.set_defaults(dtypes=[torch.float32])


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    sizes(options)
    options.add_argument("--eager", action="store_true", help="time eager, too")
    settings = parse(options, LENGTHS)
    published = {"width": settings.width, "quarantine_rank": settings.quarantine_rank}
    publication = Publication("routing", settings.device, is_quick=settings.quick, **published)
    for case in cases(settings):
        run_case(case, settings, publication)
    publication.show(
        timing_table("routing", publication.rows), summary_table(publication.rows), verdicts(publication.rows)
    )


if __name__ == "__main__":
    main()
