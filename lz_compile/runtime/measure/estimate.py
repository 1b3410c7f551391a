"""What latency to expect of each kernel: as measured here at these sizes or near them, else by its work, else by its prior.

Only measurements that were made together are compared. Near means: the same features and exact sizes (as head_dim), and
every bucketed size of the op less than :data:`REACH` away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from lz_compile.lowering import configured, ops
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.measure import cost
from lz_compile.runtime.measure.perf_record import PerfRecord
from lz_compile.runtime.problem.context import SelectionContext, SymbolicDim

INDUCTOR = "inductor"
#: The largest ratio between a size and the measured one that stands for it.
REACH = 2.0
#: What other surroundings count in distance, in octaves.
ELSEWHERE = 0.1
#: A prior comes from another machine: it decides only where it promises more than this share of the latency.
PRIOR_NOISE = 0.10

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """The expected latency of a kernel over that of Inductor's own code (1.0).

    ``noise`` is the relative difference that may be chance. ``median_us`` and ``samples`` are of the measurement, made
    at ``sizes``; ``parts_us`` are of what was estimated, by kind of work. A kernel of which nothing is known is assumed to
    be as fast as Inductor.
    """

    relative_latency: float
    origin: Literal["measured", "estimated", "prior", "assumed"] = "assumed"
    noise: float = PRIOR_NOISE
    median_us: float | None = None
    samples: int = 0
    sizes: Sizes | None = None
    parts_us: Mapping[str, float] | None = None

    @property
    def least(self) -> float:
        """The latency if a heap holds the memory ready that may be new."""
        parts = self.parts_us or {}
        return self.relative_latency * (1 - parts.get("unheld", 0.0) / max(sum(parts.values()), 1e-9))

    @property
    def is_measured(self) -> bool:
        """Whether it rests on measurements of this machine."""
        return self.origin == "measured"

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
        if self.parts_us is not None:
            found["parts_us"] = {kind: float(f"{us:.3g}") for kind, us in self.parts_us.items()}
        return found


def fixed_part(context: SelectionContext, alone: str | None) -> dict[str, Any]:
    """What a measurement must share with a context: features, which sizes are symbolic, what leaving it alone runs."""
    exact = {name: dim for name, dim in context.dims.items() if name in ops.module(context.op).EXACT_DIMS}
    return {
        "features": sorted(context.features.keys() - ops.module(context.op).TIMELESS_FEATURES),
        "symbolic": sorted(name for name, dim in context.dims.items() if isinstance(dim, SymbolicDim)),
        "source": alone or "",
        "config": configured.configuration_digest(),
        "dims": {name: dim for name, dim in exact.items() if isinstance(dim, int)},
    }


def workload(context: SelectionContext, alone: str | None, sizes: Sizes) -> dict[str, Any]:
    """The full description under which a measurement at ``sizes`` is kept."""
    fixed = fixed_part(context, alone)
    return {**fixed, "dims": {name: sizes[name] for name in sorted(context.dims)}}


def estimates(
    context: SelectionContext,
    specs: Iterable[KernelSpec],
    sizes: Sizes,
    records: Sequence[PerfRecord],
    *,
    source_kernel: str | None = None,
    surroundings: str = "",
    spelled_out: Sequence[PerfRecord] = (),
    left_as: str | None = None,
) -> dict[str, Estimate]:
    """What to expect of every kernel at ``sizes``.

    Args:
        sizes: the sizes to expect it at (a symbolic one may have several).
        records: measurements that share the context's :func:`fixed_part`.
        source_kernel: the kernel that the source itself calls: leaving that to Inductor is to run it. It may be one that
            is no candidate.
        surroundings: those that the match has; measurements within them count more than others at the same distance.
        spelled_out: the same where leaving it alone runs no kernel (as ``tune`` measures): they count where there are no
            others, and that kernel was measured with the rest.
        left_as: the kernel that Inductor makes of the source by itself.
    """
    by_id = {spec.kernel_id: spec for spec in specs}
    found = _priors(context, list(by_id.values()), sizes, source_kernel, left_as)
    measured = _measured(context, sizes, _current(records, by_id), surroundings)
    alone = source_kernel or (left_as if context.copies == 1 else None)
    if alone is not None:
        base = alone if alone in by_id else INDUCTOR  # a call with a mask that was proven is no kernel
        measured = measured or _measured(context, sizes, _current(spelled_out, by_id), surroundings, base)
        measured |= {base: measured[INDUCTOR]} if measured else {}
    if measured:  # a prior is no match for measurements: whatever was not measured with the others is not preferred
        found = dict.fromkeys(found, Estimate(1.0))
    return {kernel_id: measured.get(kernel_id, prior) for kernel_id, prior in found.items()}


def _current(records: Iterable[PerfRecord], specs: Mapping[str, KernelSpec]) -> list[PerfRecord]:
    return [each for each in records if each.kernel_id in specs and is_current(each, specs[each.kernel_id])]


def is_current(record: PerfRecord, spec: KernelSpec) -> bool:
    """Whether a measurement is of the kernel as it is now: the installed version, the same limits or code."""
    is_same = record.capabilities_hash in (None, spec.capabilities_hash)
    return is_same and record.kernel_version in (None, spec.version)


def _priors(
    context: SelectionContext, specs: Sequence[KernelSpec], sizes: Sizes, source_kernel: str | None, left_as: str | None
) -> dict[str, Estimate]:
    """What work and the shipped tables say, over the latency of leaving the match alone."""
    priors = {spec.kernel_id: _prior(spec, context, sizes) for spec in specs}
    if left_as in priors:
        priors[INDUCTOR] = priors[left_as]
    priors |= _worked_out(context, specs, sizes, left_as)
    if source_kernel in priors:
        priors[INDUCTOR] = priors[source_kernel]
    base = priors[INDUCTOR].relative_latency if INDUCTOR in priors else 1.0
    return {name: replace(prior, relative_latency=prior.relative_latency / base) for name, prior in priors.items()}


def _worked_out(
    context: SelectionContext, specs: Sequence[KernelSpec], sizes: Sizes, left_as: str | None
) -> dict[str, Estimate]:
    """What those kernels take of which it is known what they do, over what is known of Inductor's own code."""
    forms = {spec.kernel_id: spec.kernel_id for spec in specs}
    if left_as is not None:
        forms[INDUCTOR] = f"{INDUCTOR} {left_as}"
    found = {kernel_id: cost.parts(form, context, sizes) for kernel_id, form in forms.items()}
    whole = {name: sum(parts.values()) for name, parts in found.items() if parts is not None}
    if INDUCTOR not in whole:
        return {}
    return {
        name: Estimate(us / whole[INDUCTOR], "estimated", cost.NOISE, parts_us=found[name])
        for name, us in whole.items()
    }


def _measured(
    context: SelectionContext, sizes: Sizes, records: Sequence[PerfRecord], surroundings: str, base: str = INDUCTOR
) -> dict[str, Estimate]:
    """The nearest group of measurements that were made together, over the kernel that stands for leaving the match alone."""
    groups: dict[tuple[str, str], dict[str, PerfRecord]] = {}
    for record in records:
        groups.setdefault((record.workload, record.surroundings), {})[record.kernel_id] = record
    near = []
    for (text, around), group in groups.items():
        if base in group:
            there = _dims_of(text)
            distance = _distance(context.op, sizes, there)
            if distance is not None:
                differing = sum(there[name] != size for name, size in sizes.items())
                near.append((distance + (0.0 if around == surroundings else ELSEWHERE), differing, there, group))
    if not near:
        return {}
    *_, there, group = min(near, key=lambda each: each[:2])
    alone = group[base].median_us
    group[INDUCTOR] = group[base]
    return {
        kernel_id: Estimate(
            record.median_us / alone, "measured", _noise(record), record.median_us, record.samples, there
        )
        for kernel_id, record in group.items()
    }


@lru_cache(maxsize=4096)
def _dims_of(text: str) -> Sizes:
    """The sizes in a workload's text; a decision over symbolic sizes asks for those of every measurement again and again."""
    dims: dict[str, int] = json.loads(text)["dims"]
    return dims


def _distance(op: str, sizes: Sizes, there: Sizes) -> float | None:
    """The differences of the bucketed sizes in octaves, summed; None where one of them is out of reach."""
    total = 0.0
    for names in ops.module(op).BUCKETED_DIMS:
        ours, theirs = (math.prod(max(found[name], 1) for name in names) for found in (sizes, there))
        octaves = abs(math.log2(ours / theirs))
        if octaves >= math.log2(REACH):
            return None
        total += octaves
    return total


def _noise(record: PerfRecord) -> float:
    """The relative standard error of the median, twice; that of a prior where one sample, or none, tells nothing of it."""
    if record.variance_us is None or record.samples < 2:
        return PRIOR_NOISE
    return 2 * 1.25 * math.sqrt(record.variance_us / record.samples) / record.median_us


def _prior(spec: KernelSpec, context: SelectionContext, sizes: Sizes) -> Estimate:
    fitting = [row for row in spec.prior if row.fits(context, sizes)]
    return Estimate(fitting[-1].relative_latency, "prior") if fitting else Estimate(1.0)
