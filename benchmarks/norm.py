"""RMSNorm and LayerNorm by every kernel: how much of a copy's bandwidth each reaches, and its latency over Inductor's.

The claim to check: a normalisation is bound by memory, so that a kernel is good where it moves its bytes as fast as a copy
does. Forward reads and writes every element once; backward reads input and gradient and writes one. Weights and what is
summed for their gradients are left out of the bytes. A share above 1 means that something was still in a cache.

On a GPU the hidden sizes are 1,024 to 65,536 and every input has 2^26 elements; on a CPU both are small.

    python -m benchmarks.norm [--variants rms layer] [--hidden 4096] [--elements 26] [--dtypes bf16] [--training] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.attention import locked_elsewhere
from benchmarks.harness import INDUCTOR, Function, Run, Timing, compiled, prepare
from benchmarks.publish import Publication, rounded, table_of
from lz_compile.ground.hardware import hardware
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.measure.timing import measure
from lz_compile.runtime.problem.context import name_of

GPU_HIDDEN = (1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536)
CPU_HIDDEN = (256, 1000, 4096)
#: Elements of an input, as powers of two.
GPU_ELEMENTS, CPU_ELEMENTS = 26, 18
COPY, CALL = "copy", "F.{}_norm"
#: Times that every element is read or written.
FORWARD, BOTH = 2, 5


def rms(given: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as Llama spells it."""
    row = given.float()
    return weight * (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6)).to(given.dtype)


def layer(given: Tensor, weight: Tensor) -> Tensor:
    """LayerNorm, spelled out, without a bias."""
    row = given.float()
    row = row - row.mean(-1, keepdim=True)
    return (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(given.dtype)


SPELLED: Mapping[str, Function] = {"rms": rms, "layer": layer}


def call(variant: str) -> Function:
    """The same by PyTorch's own function, in eager."""

    def run(given: Tensor, weight: Tensor) -> Tensor:
        shape = weight.shape
        return (
            F.rms_norm(given, shape, weight, 1e-6)
            if variant == "rms"
            else F.layer_norm(given, shape, weight, None, 1e-6)
        )

    return run


@dataclass(frozen=True)
class Case:
    """One normalisation of rows of ``hidden`` elements."""

    variant: str
    dtype: torch.dtype
    rows: int
    hidden: int

    def build(self, settings: argparse.Namespace) -> list[Tensor]:
        """Input and weight."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((self.rows, self.hidden), (self.hidden,))
        drawn = (torch.randn(shape, generator=generator).to(settings.device, self.dtype) for shape in shapes)
        return [tensor.requires_grad_(settings.training) for tensor in drawn]

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"form": self.variant, "dtype": name_of(self.dtype), "rows": self.rows, "hidden": self.hidden}


def runner(inputs: Sequence[Tensor], *, is_training: bool) -> Run:
    """Run a function on the inputs; in training, also backward from a gradient that is there already."""
    if not is_training:
        return lambda function: function(*inputs)
    gradient = torch.randn_like(inputs[0], requires_grad=False)

    def forward_and_backward(function: Function) -> list[Tensor]:
        output = function(*inputs)
        return [output, *torch.autograd.grad(output, list(inputs), gradient)]

    return forward_and_backward


def locks(variant: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The kernels for a variant that are installed and run here."""
    here = {"*", hardware(device).platform}
    return [
        spec.kernel_id
        for spec in kernels(f"norm.{variant}").values()
        if spec.kernel_id not in (INDUCTOR, "dispatch")
        and here & spec.platforms
        and name_of(dtype) in spec.dtypes
        and spec.availability() is None
    ]


def run_case(case: Case, settings: argparse.Namespace, publication: Publication) -> None:
    """Check, time and keep one case."""
    torch._dynamo.reset()
    inputs = case.build(settings)
    functions = compiled(SPELLED[case.variant], locks(case.variant, settings.device, case.dtype), "norm")
    functions[CALL.format(case.variant)] = call(case.variant)
    prepared = prepare(functions, runner(inputs, is_training=settings.training))
    locked = [variant for variant in prepared.variants if variant.name != CALL.format(case.variant)]
    refused = {variant.name: variant.refusals for variant in locked if locked_elsewhere(variant)}
    prepared = prepared.without(refused)
    source = inputs[0].detach()
    target = torch.empty_like(source)
    calls = {COPY: lambda: target.copy_(source), **{variant.name: variant.call for variant in prepared.variants}}
    timings = measure(calls, settings.device, rounds=settings.rounds, block_ms=20.0)
    passes = BOTH if settings.training else FORWARD
    publication.add_timings(
        case.to_dict(),
        prepared,
        timings,
        refused=refused,
        copy_us=rounded(timings[COPY].latency_us),
        share_of_copy={name: share(timings[name], timings[COPY], passes) for name in calls if name != COPY},
    )


def share(timing: Timing, copy: Timing, passes: int) -> float:
    """The bandwidth over a copy's; a copy reads and writes every element once."""
    return round(passes / FORWARD / timing.relative_to(copy).median, 3)


def shares(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case and variant."""
    cases = list(rows[0]["case"]) if rows else []
    columns = (*cases, "variant", "kernels", "latency us", "of a copy's bandwidth", "of inductor's latency")
    table = table_of(
        f"{title}: bandwidth over a copy's, and latency over Inductor's", columns, left=("variant", "kernels")
    )
    for row in rows:
        for name, entry in row["variants"].items():
            of_inductor = entry.get("of_inductor", {}).get("median")
            table.add_row(
                *map(str, row["case"].values()),
                name,
                entry["kernels"],
                f"{entry['latency_us']['median']:.1f}",
                f"{row['share_of_copy'][name]:.2f}",
                "" if of_inductor is None else f"{of_inductor:.2f}",
            )
    return table


def cases(settings: argparse.Namespace) -> Iterator[Case]:
    """Every case, inputs of one size."""
    for dtype, variant, hidden in itertools.product(settings.dtypes, settings.variants, settings.hidden):
        yield Case(variant, dtype, max(1, 2**settings.elements // hidden), hidden)


def main() -> None:
    """Run every case."""
    options = parser(__doc__)
    options.set_defaults(dtypes=[torch.bfloat16])
    options.add_argument("--variants", nargs="+", choices=list(SPELLED), default=list(SPELLED))
    options.add_argument("--hidden", nargs="+", type=int)
    options.add_argument("--elements", type=int, help="of an input, as a power of two")
    options.add_argument("--training", action="store_true", help="time forward and backward together")
    settings = parse(options, [0])
    is_gpu = settings.device.type != "cpu"
    if settings.hidden is None:
        settings.hidden = list(GPU_HIDDEN if is_gpu else CPU_HIDDEN)[: 2 if settings.quick else None]
    if settings.elements is None:
        settings.elements = GPU_ELEMENTS if is_gpu else CPU_ELEMENTS
    name = "norm_training" if settings.training else "norm"
    publication = Publication(name, settings.device, is_quick=settings.quick, elements=2**settings.elements)
    for case in cases(settings):
        with torch.set_grad_enabled(settings.training):
            run_case(case, settings, publication)
    publication.show(shares(name, publication.rows))


if __name__ == "__main__":
    main()
