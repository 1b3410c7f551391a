"""What a blend did, reduced on its device and read without waiting for it.

The figures are a few numbers in a buffer that the blend itself writes. A reader copies them to the host when it is asked, and
gives the copy that has arrived; on a GPU that is the one that was asked for before.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lz_compile.runtime import events

#: The figures of the buffer, in this order.
FIGURES = ("alpha_mean", "alpha_p95", "alpha_sparsity", "gate_mean", "clamped_fraction")
#: Weights up to this count as zero.
NOTHING = 1e-3
#: The 95th percentile is that of so many elements at most, evenly spaced, to within a 256th of the range from 0 to 1.
SAMPLED, HALVINGS = 1024, 8
_PERCENTILE = 0.95


@dataclass(frozen=True)
class BlendTelemetry:
    """The figures of one batch.

    ``alpha_sparsity`` is the share of weights that are zero, ``clamped_fraction`` that of weights which a bound or cap
    changed; ``gate_mean`` is NaN without a gate. ``kernel_ms`` is that of calls which are not compiled into something larger,
    telemetry included, and None for others: there a blend has no time of its own.
    """

    blend_mode: str
    alpha_mean: float
    alpha_p95: float
    alpha_sparsity: float
    gate_mean: float
    clamped_fraction: float
    kernel_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON; what is no number is None."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def measured(given: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """The figures of a batch: of the weights that were asked for, those that were used, and the gate.

    Shapes:
        given and weight of the same number of elements, or given of fewer, which broadcast; the result is one number for each
        of :data:`FIGURES`, in float32.
    """
    used, wanted = weight.detach().float(), given.detach().float()
    of_gate = torch.full((), math.nan, device=used.device) if gate is None else gate.detach().float().mean()
    return torch.stack(
        [
            used.mean(),
            percentile(used.flatten()),
            (used.abs() <= NOTHING).float().mean(),
            of_gate.to(used.device),
            (used != wanted).float().mean(),
        ]
    )


def percentile(values: torch.Tensor) -> torch.Tensor:
    """The 95th percentile of weights between 0 and 1, by halving the range: no sort, and no size that is data's."""
    step = -(-values.shape[0] // SAMPLED)
    sampled = values[::step]
    low = torch.zeros((), dtype=values.dtype, device=values.device)
    width = 1.0
    for _ in range(HALVINGS):
        width /= 2
        below = (sampled <= low + width).to(values.dtype).mean()
        low = torch.where(below < _PERCENTILE, low + width, low)
    found = low + width
    return torch.where(sampled.isnan().any(), torch.nan, found)


@dataclass
class Reader:
    """Copies of a buffer on its way to the host."""

    _host: torch.Tensor | None = None
    _arrival: Any = None
    _last: tuple[float, ...] | None = None
    _stopwatch: list[tuple[Any, Any]] = field(default_factory=list)
    kernel_ms: float | None = None

    def poll(self, figures: torch.Tensor, mode: str) -> BlendTelemetry | None:
        """The figures that have arrived last, None where none have; never waits."""
        values = self._arrived(figures)
        self._read_clock()
        if values is None:
            return None
        found = BlendTelemetry(mode, **dict(zip(FIGURES, values, strict=True)), kernel_ms=self.kernel_ms)
        if math.isnan(found.alpha_mean):
            events.record("BLEND_ALPHA_NAN", f"alpha of a {mode} blend is NaN", level=logging.CRITICAL)
        events.record("BLEND_TELEMETRY", json.dumps(found.to_dict()), level=logging.DEBUG)
        return found

    def _arrived(self, figures: torch.Tensor) -> tuple[float, ...] | None:
        if figures.device.type != "cuda":
            return tuple(figures.tolist())
        if self._arrival is not None and self._arrival.query():
            assert self._host is not None, "what has arrived was sent"
            self._last, self._arrival = tuple(self._host.tolist()), None
        if self._arrival is None:
            self._host = torch.empty(figures.shape, pin_memory=True) if self._host is None else self._host
            self._host.copy_(figures, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()
        return self._last

    # ---- the clock -------------------------------------------------------------------------------------------------

    def start(self, device: torch.device) -> None:
        """Before a blend that runs by itself."""
        self._stopwatch.append((_now(device), None))

    def stop(self, device: torch.device) -> None:
        """After it."""
        self._stopwatch[-1] = (self._stopwatch[-1][0], _now(device))

    def _read_clock(self) -> None:
        while self._stopwatch:
            first, last = self._stopwatch[0]
            if isinstance(first, float):
                self.kernel_ms = 1e3 * (last - first)
            elif last.query():
                self.kernel_ms = first.elapsed_time(last)
            else:
                break
            self._stopwatch.pop(0)
        del self._stopwatch[:-_KEPT]


#: Of calls whose time nobody has asked for.
_KEPT = 16


def _now(device: torch.device) -> Any:
    """A moment: of the device's stream, or of the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
