"""``lz.Blender``: a blend with a memory. Alpha, its ramp, the gate's hysteresis and the telemetry are buffers of a module.

Nothing of it is a parameter, and nothing is read from the device: alpha may reach zero or one, gates may open and close, and
gain, threshold and bounds may be set anew, without a line being compiled again.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from lz_compile.blending import (
    BlenderConfig,
    BlendMode,
    Scalar,
    blend,
    capped,
    confidence_gate,
    drift_gate,
    mix,
    steady,
    weigh,
)
from lz_compile.lowering.ops.blend import bounded, top2_margin
from lz_compile.runtime.blend_telemetry import FIGURES, BlendTelemetry, Reader, measured

__all__ = ["Blender", "SoftGate"]

#: Numbers of the configuration that are tensors of the module.
_TENSORS = ("low", "high", "gain", "threshold", "hysteresis", "max_step")
#: What drift is a moving deviation over, in batches.
_MEMORY = 0.9
_TINY = 1e-6


class Blender(nn.Module):
    """Mixes a seed into its host batch by batch (see :func:`lz_compile.blend`), and ramps alpha towards a target.

    Buffers: ``alpha``, its ``target`` and where it came from (``origin``), all of alpha's shape; ``progress`` of the ramp, 0
    to 1; ``is_confident``, the gate's last decision; ``weights``, the last of a soft gate, the seed's first; ``drift_mean``
    and ``drift_square``, moving averages; the numbers of the configuration; ``figures`` of telemetry.

    Args:
        config: the mode and its safety rails.
        alpha: to begin with: a number, or a tensor ``[C]``, ``[G]`` or of the seed's shape.
        target: where :meth:`advance` takes it to, by default ``high``.
        has_telemetry: whether :meth:`telemetry` has anything to tell.
    """

    alpha: Tensor
    target: Tensor
    origin: Tensor
    progress: Tensor
    is_confident: Tensor
    weights: Tensor
    drift_mean: Tensor
    drift_square: Tensor
    low: Tensor
    high: Tensor
    gain: Tensor
    threshold: Tensor
    hysteresis: Tensor
    max_step: Tensor
    figures: Tensor

    def __init__(
        self,
        config: BlenderConfig | None = None,
        alpha: float | Tensor = 0.0,
        target: float | Tensor | None = None,
        *,
        has_telemetry: bool = True,
    ) -> None:
        super().__init__()
        self.config = config = config or BlenderConfig()
        self.has_telemetry = has_telemetry
        start = torch.as_tensor(alpha, dtype=torch.get_default_dtype()).detach().clone()
        end = torch.as_tensor(config.high if target is None else target, dtype=start.dtype).detach()
        for name, value in (
            ("alpha", start),
            ("origin", start.clone()),
            ("target", end.expand(start.shape).clone()),
            ("progress", start.new_zeros(())),
            ("is_confident", torch.zeros((), dtype=torch.bool)),
            ("weights", start.new_tensor([0.0, 1.0])),
            ("drift_mean", start.new_zeros(())),
            ("drift_square", start.new_zeros(())),
            ("figures", torch.zeros(len(FIGURES))),
            *((name, torch.as_tensor(getattr(config, name), dtype=start.dtype).clone()) for name in _TENSORS),
        ):
            self.register_buffer(name, value)
        self._reader = Reader()

    # ---- blending --------------------------------------------------------------------------------------------------

    def forward(
        self, host: Tensor, seed: Tensor, *, logits: Tensor | None = None, gate_logits: Tensor | None = None
    ) -> Tensor:
        """The blend of this batch; of a gate, the decision is kept for the next one.

        Args:
            host: what is grafted upon; gets no gradient.
            seed: what is grafted.
            logits: for CONFIDENCE: of the seed, by default the seed itself if it has two dimensions. Without any, the gate
                follows the drift of the seed's output.
            gate_logits: for SOFT_GATE.
        """
        if torch.compiler.is_compiling() or not self.has_telemetry:
            return self._blended(host, seed, logits, gate_logits)
        self._reader.start(seed.device)
        out = self._blended(host, seed, logits, gate_logits)
        self._reader.stop(seed.device)
        return out

    def _blended(self, host: Tensor, seed: Tensor, logits: Tensor | None, gate_logits: Tensor | None) -> Tensor:
        mode, config = self.config.mode, self.settings()
        if mode is BlendMode.SOFT_GATE and gate_logits is not None and gate_logits.shape in ((seed.shape[0], 2), (2,)):
            return self._softly(host, seed, gate_logits)
        gate = None
        if mode is BlendMode.CONFIDENCE:
            gate = self._gate(seed, seed if logits is None and seed.dim() == 2 else logits)
        out = blend(host, seed, self.alpha, mode, config=config, gate=gate, gate_logits=gate_logits)
        if self.has_telemetry:
            alpha = self.alpha.mean() if mode is BlendMode.SOFT_GATE else self.alpha
            weight = weigh(seed, alpha, mode, config, gate) if gate is not None else self._limited(alpha)
            given = weigh(seed, alpha, mode, replace(config, low=None, high=None), gate) if gate is not None else alpha
            self._note(given, weight, gate)
        return out

    def settings(self) -> BlenderConfig:
        """The configuration with the numbers as they are now, as tensors."""
        numbers = {name: getattr(self, name) for name in ("low", "high", "gain", "threshold")}
        return replace(self.config, **numbers)

    def _limited(self, alpha: Tensor) -> Tensor:
        return capped(bounded(alpha, self.low, self.high), self.config.cap_above, self.config.cap_share)

    def _gate(self, seed: Tensor, logits: Tensor | None) -> Tensor:
        """One number for each row; the threshold lies lower while the batches before were confident."""
        with torch.no_grad():
            threshold = self.threshold - torch.where(self.is_confident, self.hysteresis, -self.hysteresis)
            if logits is None:
                drift = self._drift(seed)
                found = drift_gate(drift, self.gain, self.threshold).expand(seed.shape[0])
                self.is_confident.copy_(drift <= self.threshold + (self.threshold - threshold))
                return found
            found = confidence_gate(logits, self.gain, threshold)
            self.is_confident.copy_(top2_margin(logits.detach()).mean() > threshold)
        return found

    def _drift(self, seed: Tensor) -> Tensor:
        """The moving deviation of the output's mean, relative to its size."""
        mean = seed.detach().float().mean().to(self.drift_mean.dtype)
        self.drift_mean.lerp_(mean, 1 - _MEMORY)
        self.drift_square.lerp_(mean.square(), 1 - _MEMORY)
        deviation = (self.drift_square - self.drift_mean.square()).clamp_min(0.0).sqrt()
        size = seed.detach().float().square().mean().sqrt().to(deviation.dtype)
        return deviation / (size + _TINY)

    def _softly(self, host: Tensor, seed: Tensor, gate_logits: Tensor) -> Tensor:
        """By a soft gate, whose weights differ from the last ones by a step at most."""
        share = torch.softmax(gate_logits, -1)[..., 0]
        last = self.weights[0].to(share.dtype)
        step = bounded(share - last, -self.max_step.to(share.dtype), self.max_step.to(share.dtype))
        wanted, share = share, bounded(last + step, self.low.to(share.dtype), self.high.to(share.dtype))
        weight = share.reshape(*share.shape, *(1 for _ in range(seed.dim() - share.dim())))
        out = mix(host, seed, weight, BlendMode.SOFT_GATE)
        with torch.no_grad():
            mean = share.detach().mean().to(self.weights.dtype)
            self.weights.copy_(torch.stack([mean, 1 - mean]))
        if self.has_telemetry:
            self._note(wanted, share, share)
        return out

    # ---- the schedule ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self) -> None:
        """One batch further on the way to the target, straight and element by element; call it once a batch."""
        self.progress.add_(1.0 / self.config.ramp_batches).clamp_(max=1.0)
        self.alpha.copy_(self._limited(torch.lerp(self.origin, self.target, self.progress)))

    @torch.no_grad()
    def aim(self, target: float | Tensor) -> None:
        """Begin a ramp from where alpha is to another target, a number or a tensor of alpha's shape."""
        self.origin.copy_(self.alpha)
        self.target.copy_(torch.as_tensor(target, dtype=self.alpha.dtype, device=self.alpha.device))
        self.progress.zero_()

    @torch.no_grad()
    def request(self, alpha: float | Tensor) -> None:
        """What a controller asks for now; alpha follows where it is out of the dead band around what is held."""
        wanted = torch.as_tensor(alpha, dtype=self.alpha.dtype, device=self.alpha.device).expand_as(self.alpha)
        wanted = self._limited(wanted)
        at_end = (wanted <= self.low) | (wanted >= self.high)
        self.alpha.copy_(torch.where(at_end, wanted, steady(wanted, self.alpha, self.hysteresis)))
        self.origin.copy_(self.alpha)
        self.target.copy_(self.alpha)

    @torch.no_grad()
    def configure(self, **numbers: Scalar) -> None:
        """Set gain, threshold, low, high, hysteresis or max_step anew.

        Raises:
            ValueError: there is no such number.
        """
        for name, value in numbers.items():
            if name not in _TENSORS:
                raise ValueError(f"lz.Blender: no number '{name}'; valid are {', '.join(_TENSORS)}")
            getattr(self, name).copy_(torch.as_tensor(value))

    # ---- telemetry -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _note(self, given: Tensor, weight: Tensor, gate: Tensor | None) -> None:
        self.figures.copy_(measured(given, weight, gate))

    def telemetry(self) -> BlendTelemetry | None:
        """What the last blends did, as far as it has arrived on the host; never waits for the device.

        NaN in alpha is an event (``BLEND_ALPHA_NAN``) of level CRITICAL.
        """
        return self._reader.poll(self.figures, self.config.mode.value)

    def extra_repr(self) -> str:
        """The configuration."""
        return ", ".join(f"{each.name}={getattr(self.config, each.name)}" for each in fields(self.config))

    def __deepcopy__(self, memo: dict[int, Any]) -> Blender:
        """With buffers of its own, and nothing on its way to the host."""
        copied = Blender(self.config, self.alpha, has_telemetry=self.has_telemetry)
        copied.load_state_dict(self.state_dict())
        memo[id(self)] = copied
        return copied


class SoftGate(nn.Module):
    """The two logits of a soft gate, the seed's first, from features: one hidden layer.

    Args:
        features: of the input.
        width: of the hidden layer, 64 at most: a gate is to be no network of its own.

    Shapes:
        input ``[N, features, ...]``, averaged over what follows; the result is ``[N, 2]``.

    Raises:
        ValueError: it is wider than that.
    """

    def __init__(self, features: int, width: int = 16) -> None:
        super().__init__()
        if not 1 <= width <= 64:
            raise ValueError(f"lz.SoftGate: expected a width of 1 to 64, received {width}. Take a narrower gate")
        self.hidden = nn.Linear(features, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch."""
        pooled = x.flatten(2).mean(-1) if x.dim() > 2 else x
        logits: Tensor = self.out(torch.tanh(self.hidden(pooled)))
        return logits

    def penalty(self, logits: Tensor, *, entropy: float = 1e-2, l2: float = 1e-4) -> Tensor:
        """What to add to a loss: ``l2`` times the squared parameters, minus ``entropy`` times the weights' mean entropy.

        Shapes:
            logits ``[N, 2]``; the result has no dimensions.
        """
        logs = torch.log_softmax(logits, -1)
        disorder = -(logs.exp() * logs).sum(-1).mean()
        size = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
        return l2 * size - entropy * disorder
