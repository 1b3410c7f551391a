"""What latency to expect of each kernel: as measured here at these sizes or near them, else by its prior.

Only measurements that were made together are compared. Near means: the same features and exact sizes (as head_dim), and
every bucketed size of the op less than :data:`REACH` away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lz_compile.lowering import ops
from lz_compile.runtime.context import SelectionContext, SymbolicDim
from lz_compile.runtime.kernel import KernelSpec
from lz_compile.runtime.perf_record import PerfRecord

INDUCTOR = "inductor"
#: The largest ratio between a size and the measured one that stands for it.
REACH = 2.0
#: A prior comes from another machine: it decides only where it promises more than this share of the latency.
PRIOR_NOISE = 0.10

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """The expected latency of a kernel over that of Inductor's own code (1.0).

    ``noise`` is the relative difference that may be chance. ``median_us`` and ``samples`` are of the measurement, made
    at ``sizes``; a kernel of which nothing is known is assumed to be as fast as Inductor.
    """

    relative_latency: float
    origin: Literal["measured", "prior", "assumed"] = "assumed"
    noise: float = PRIOR_NOISE
    median_us: float | None = None
    samples: int = 0
    sizes: Sizes | None = None

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON; what is not known is left out."""
        found: dict[str, Any] = {"relative_latency": round(self.relative_latency, 4), "origin": self.origin}
        if self.origin == "measured":
            found |= {
                "median_us": self.median_us,
                "noise": round(self.noise, 4),
                "samples": self.samples,
                "measured_at": dict(self.sizes or {}),
            }
        return found


def fixed_part(context: SelectionContext, source_kernel: str | None) -> dict[str, Any]:
    """What a measurement must share with a context: features, which sizes are symbolic, how the source spells it."""
    exact = {name: dim for name, dim in context.dims.items() if name in ops.module(context.op).EXACT_DIMS}
    return {
        "features": sorted(context.features),
        "symbolic": sorted(name for name, dim in context.dims.items() if isinstance(dim, SymbolicDim)),
        "source": source_kernel or "",
        "dims": {name: dim for name, dim in exact.items() if isinstance(dim, int)},
    }


def workload(context: SelectionContext, source_kernel: str | None, sizes: Sizes) -> dict[str, Any]:
    """The full description under which a measurement at ``sizes`` is kept."""
    fixed = fixed_part(context, source_kernel)
    return {**fixed, "dims": {name: sizes[name] for name in sorted(context.dims)}}


def estimates(
    context: SelectionContext,
    specs: Iterable[KernelSpec],
    sizes: Sizes,
    records: Sequence[PerfRecord],
    *,
    source_kernel: str | None = None,
    surroundings: str = "",
) -> dict[str, Estimate]:
    """What to expect of every kernel at ``sizes``.

    Args:
        context: the problem.
        specs: the kernels.
        sizes: the sizes to expect it at (a symbolic one may have several).
        records: measurements that share the context's :func:`fixed_part`.
        source_kernel: the kernel that the source itself calls: leaving that to Inductor is to run it.
        surroundings: those that the match has; measurements within them count more than others at the same distance.
    """
    specs = list(specs)
    measured = _measured(context, sizes, records, surroundings)
    if INDUCTOR in measured:
        found = {spec.kernel_id: measured.get(spec.kernel_id, Estimate(1.0)) for spec in specs}
        if source_kernel in found:
            found[source_kernel] = found[INDUCTOR]
            measured[source_kernel] = found[INDUCTOR]
        unmeasured = [spec for spec in specs if spec.kernel_id not in measured]
        return {**found, **{spec.kernel_id: _prior(spec, context, sizes) for spec in unmeasured}}
    priors = {spec.kernel_id: _prior(spec, context, sizes) for spec in specs}
    if source_kernel in priors:
        priors[INDUCTOR] = priors[source_kernel]
    base = priors[INDUCTOR].relative_latency if INDUCTOR in priors else 1.0
    return {
        kernel_id: Estimate(prior.relative_latency / base, prior.origin, prior.noise)
        for kernel_id, prior in priors.items()
    }


def _measured(
    context: SelectionContext, sizes: Sizes, records: Sequence[PerfRecord], surroundings: str
) -> dict[str, Estimate]:
    """The nearest group of measurements that were made together, Inductor's among them."""
    groups: dict[tuple[str, str], dict[str, PerfRecord]] = {}
    for record in records:
        groups.setdefault((record.workload, record.surroundings), {})[record.kernel_id] = record
    near = []
    for (_, around), group in groups.items():
        if INDUCTOR in group:
            there = group[INDUCTOR].entries()["dims"]
            distance = _distance(context.op, sizes, there)
            if distance is not None:
                near.append((distance + (0.0 if around == surroundings else 0.1), there, group))
    if not near:
        return {}
    _, there, group = min(near, key=lambda each: each[0])
    base = group[INDUCTOR].median_us
    return {
        kernel_id: Estimate(
            record.median_us / base, "measured", _noise(record), record.median_us, record.samples, there
        )
        for kernel_id, record in group.items()
    }


def _distance(op: str, sizes: Sizes, there: Sizes) -> float | None:
    """The largest difference of a bucketed size, in octaves; None where it is out of reach."""
    total = 0.0
    for names in ops.module(op).BUCKETED_DIMS:
        ours, theirs = (math.prod(max(found[name], 1) for name in names) for found in (sizes, there))
        octaves = abs(math.log2(ours / theirs))
        if octaves >= math.log2(REACH):
            return None
        total += octaves
    return total


def _noise(record: PerfRecord) -> float:
    """The relative standard error of the median, twice."""
    if not record.variance_us or not record.samples:
        return 0.0
    return 2 * 1.25 * math.sqrt(record.variance_us / record.samples) / record.median_us


def _prior(spec: KernelSpec, context: SelectionContext, sizes: Sizes) -> Estimate:
    fitting = [row for row in spec.prior if row.fits(context, sizes)]
    return Estimate(fitting[-1].relative_latency, "prior") if fitting else Estimate(1.0)
