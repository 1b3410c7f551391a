"""What a blend did, reduced on its device and read without waiting for it.

The figures are a few numbers in a buffer that the blend itself writes. A reader copies them to the host when it is asked, and
gives the copy that has arrived; on a GPU that is the one that was asked for before.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lz_compile.ground import events

#: Names of modes, by their number among the figures.
MODES = ("convex", "residual", "channel", "confidence", "delta", "logit", "soft_gate")
#: The figures of the buffer, in this order; the first is the number of the mode, and NaN before any blend.
FIGURES = ("blend_mode", "alpha_mean", "alpha_p95", "alpha_sparsity", "gate_mean", "clamped_fraction")
#: Weights up to this count as zero.
NOTHING = 1e-3
#: The 95th percentile is that of so many elements at most, evenly spaced.
SAMPLED = 512
_PERCENTILE = 0.95
#: Of a rank, for rounding.
_SLACK = 1e-3


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


def measured(given: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, mode: int = 0) -> torch.Tensor:
    """The figures of a batch: of the weights that were asked for, those that were used, the gate, and the mode's number.

    Shapes:
        given and weight of the same number of elements, or given of fewer, which broadcast; the result is one number for each
        of :data:`FIGURES`, in float32.
    """
    used, wanted = weight.detach().float(), given.detach().float()
    of_gate = torch.full((), math.nan, device=used.device) if gate is None else gate.detach().float().mean()
    return torch.stack(
        [
            used.new_full((), mode),
            used.mean(),
            percentile(used.flatten()),
            (used.abs() <= NOTHING).float().mean(),
            of_gate.to(used.device),
            (used != wanted).float().mean(),
        ]
    )


def percentile(values: torch.Tensor) -> torch.Tensor:
    """The 95th percentile, the higher of two: the least value that is not below 95 % of the others. NaN if any is.

    Every value is compared with every other, which is two small reductions; a sort would be a kernel that nothing is fused
    with, and a search for the value one reduction after another.

    Shapes:
        values ``[N]``; the result has no dimensions.
    """
    step = -(-values.shape[0] // SAMPLED)
    sampled = values[::step]
    ranks = (sampled <= sampled[:, None]).to(torch.float32).sum(-1)
    is_above = ranks - 1 >= _PERCENTILE * (sampled.shape[0] - 1) - _SLACK
    found = torch.where(is_above, sampled, math.inf).amin()
    return torch.where(sampled.isnan().any(), torch.nan, found)


@dataclass
class Reader:
    """Copies of a buffer on its way to the host, and moments that were noted. A copy of a reader has seen nothing yet.

    ``untold`` is what fills the buffer when somebody asks, and the buffer's version of then.
    """

    _host: torch.Tensor | None = None
    _arrival: Any = None
    _last: tuple[float, ...] | None = None
    _moments: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    kernel_ms: float | None = None
    untold: tuple[int, Callable[[], None]] | None = None

    def __reduce__(self) -> tuple[type[Reader], tuple[()]]:
        return Reader, ()

    def poll(self, figures: torch.Tensor) -> BlendTelemetry | None:
        """The figures that have arrived last, None where none have; never waits."""
        values = self._arrived(figures)
        self._read_clock()
        if values is None or math.isnan(values[0]):
            return None
        mode, *rest = values
        named = dict(zip(FIGURES[1:], rest, strict=True))
        found = BlendTelemetry(MODES[round(mode)], **named, kernel_ms=self.kernel_ms)
        if math.isnan(found.alpha_mean):
            events.record("BLEND_ALPHA_NAN", f"alpha of a {found.blend_mode} blend is NaN", level=logging.CRITICAL)
        events.record("BLEND_TELEMETRY", json.dumps(found.to_dict()), level=logging.DEBUG)
        return found

    def _arrived(self, figures: torch.Tensor) -> tuple[float, ...] | None:
        if figures.device.type != "cuda":
            return tuple(figures.tolist())
        if self._arrival is not None and self._arrival.query():
            assert self._host is not None, "what has arrived was sent"
            self._last, self._arrival = tuple(self._host.tolist()), None
        if self._arrival is None:
            if self._host is None:
                self._host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._host.copy_(figures, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()
        return self._last

    # ---- the clock -------------------------------------------------------------------------------------------------

    def now(self, device: torch.device) -> Any:
        """A moment: of the device's stream, or of the clock; None while a graph is captured, which notes none."""
        if device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def took(self, begun: Any, device: torch.device) -> None:
        """A blend that began then, and ran by itself, is over; of those that nobody asks for, the last few are kept."""
        if begun is not None:
            self._moments.append((begun, self.now(device)))

    def _read_clock(self) -> None:
        while self._moments:
            first, last = self._moments[0]
            if isinstance(first, float):
                self.kernel_ms = 1e3 * (last - first)
            elif last.query():
                self.kernel_ms = first.elapsed_time(last)
            else:
                break
            self._moments.popleft()


#: Of calls whose time nobody has asked for.
_KEPT = 16
