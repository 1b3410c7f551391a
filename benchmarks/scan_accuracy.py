"""How exact every kernel for scans is, by how much a step forgets: outputs, last state and gradients against float64.

The claim to check: decays are factors, not logarithms, so that nothing is lost where they are tiny, and nothing breaks where
they are zero. Errors are the largest over a tensor, over the largest value of it or 1. Keys have length one; half of the
decays, at random, are the small ones, except where all are said to be alike.

    python -m benchmarks.scan_accuracy [--kernels lz.chunked_scan] [--lengths 256] [--dtypes fp32] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import parse, parser
from benchmarks.publish import Publication, table_of
from lz_compile.ground.hardware import hardware
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, facts_of, reference
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.kernels.registry import kernels
from lz_compile.runtime.problem.context import name_of, of_facts

Scan = Callable[..., tuple[Tensor, Tensor]]

#: What is drawn as decays from uniform numbers and a random half.
DECAYS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "0.99": lambda uniform, half: 0.985 + 0.01 * uniform,
    "0.01": lambda uniform, half: 0.007 + 0.006 * uniform,
    "<1e-8": lambda uniform, half: torch.where(half, 1e-8 * uniform, 0.9 + 0.1 * uniform),
    "0": lambda uniform, half: torch.where(half, 0.0, 0.9 + 0.1 * uniform),
}
#: Steps by name: whether they erase, and whether a decay is one for each row.
STRUCTURES: Mapping[str, tuple[bool, bool]] = {
    "kda": (True, True),
    "gated delta": (True, False),
    "gla": (False, True),
    "mamba-2": (False, False),
}


@dataclass(frozen=True)
class Case:
    """One scan; ``decay`` is a key of :data:`DECAYS`, ``structure`` one of :data:`STRUCTURES`."""

    structure: str
    decay: str
    length: int = 256
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 32

    def operands(self, dtype: torch.dtype, device: torch.device) -> Operands:
        """Queries and keys of length one, random values and strengths, and a state."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, self.heads, *shape, generator=generator)

        erases, by_row = STRUCTURES[self.structure]
        shape = (1, self.heads, self.length, self.key_dim if by_row else 1, 1)
        uniform, half = torch.rand(shape, generator=generator), torch.rand(shape, generator=generator) < 0.5
        decay = DECAYS[self.decay](uniform, half)
        key, query = (F.normalize(normal(self.length, 1, self.key_dim), dim=-1) for _ in range(2))
        x = Operands(
            state=normal(self.key_dim, self.value_dim),
            decay=decay,
            left=key * torch.rand(key.shape[:-1], generator=generator).unsqueeze(-1),
            right=normal(self.length, 1, self.value_dim),
            erase=key * decay.transpose(3, 4) if erases else None,
            query=query,
        )
        return x.map(lambda each: each.to(device, dtype))

    def attrs(self, dtype: torch.dtype) -> ScanAttrs:
        """With results in ``dtype``."""
        return ScanAttrs(erases=STRUCTURES[self.structure][0], out_dtype=dtype, state_dtype=dtype)


def errors(scan: Scan, case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The errors of reads, the last state, and every gradient (``of_`` and the operand's name)."""
    x = case.operands(dtype, device)
    found = _with_gradients(scan, x, case.attrs(dtype))
    exact = _with_gradients(reference, x.map(torch.Tensor.double), case.attrs(torch.float64))
    return {name: _error(found[name], exact[name]) for name in found}


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)).item()


def _with_gradients(scan: Scan, x: Operands, attrs: ScanAttrs) -> dict[str, Tensor]:
    x = x.map(lambda each: each.detach().requires_grad_())
    leaves = x.given()
    with torch.enable_grad():
        reads, last = scan(x, attrs)
        weights = torch.linspace(-1, 1, reads.numel(), dtype=torch.float64, device=reads.device).view(reads.shape)
        total = (reads * weights.to(reads.dtype)).sum() + last.sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
    named = {f"of_{name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {"reads": reads.detach(), "last": last.detach(), **named}


def runs(spec: KernelSpec, case: Case, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel takes a case here, with gradients."""
    context = of_facts("scan", case.attrs(dtype), facts_of(_with_leaves(case, dtype, device)))
    return not spec.check(context) and spec.call is not None


def _with_leaves(case: Case, dtype: torch.dtype, device: torch.device) -> Operands:
    with torch.enable_grad():
        return case.operands(dtype, device).map(torch.Tensor.requires_grad_)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per case and kernel: reads, last state, the gradient of the decay, and the worst other one."""
    columns = (
        "structure",
        "length",
        "decay",
        "dtype",
        "kernel",
        "reads",
        "last state",
        "gradient of decay",
        "other gradients",
    )
    found = table_of("Largest error against float64, step by step", columns, left=("structure", "kernel"))
    for row in rows:
        case, error = row["case"], row["errors"]
        others = [value for name, value in error.items() if name.startswith("of_") and name != "of_decay"]
        numbers = (error["reads"], error["last"], error["of_decay"], max(others))
        found.add_row(*map(str, case.values()), row["kernel"], *(f"{number:.1e}" for number in numbers))
    return found


def cases(settings: argparse.Namespace) -> list[Case]:
    """Every case."""
    structures = list(STRUCTURES)[: 1 if settings.quick else None]
    lengths = settings.lengths
    return [Case(structure, decay, length) for length in lengths for structure in structures for decay in DECAYS]


def main() -> None:
    """Run every case by every kernel that takes it here."""
    options = parser(__doc__)
    options.set_defaults(dtypes=[torch.float32])
    options.add_argument("--kernels", nargs="+", help="by default all that run here")
    settings = parse(options, [256])
    publication = Publication("scan_accuracy", settings.device, is_quick=settings.quick, lengths=settings.lengths)
    platform = {"*", hardware(settings.device).platform}
    for dtype in settings.dtypes:
        for case in cases(settings):
            for name, spec in kernels("scan").items():
                is_wanted = settings.kernels is None or name in settings.kernels
                if not is_wanted or not platform & spec.platforms or not runs(spec, case, dtype, settings.device):
                    continue
                assert spec.call is not None, "a kernel that runs"
                found = errors(spec.call, case, dtype, settings.device)
                named = {
                    "structure": case.structure,
                    "length": case.length,
                    "decay": case.decay,
                    "dtype": name_of(dtype),
                }
                publication.add({"case": named, "kernel": name, "errors": found})
    publication.show(table(publication.rows))


if __name__ == "__main__":
    main()
