"""``lz.Blender``: a blend with a memory. Alpha, its ramp, the gate's hysteresis and the telemetry are buffers of a module.

Nothing of it is a parameter, and nothing is read from the device: alpha may reach zero or one, gates may open and close, and
gain, threshold and bounds may be set anew, without a line being compiled again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lz_compile.api.arguments import Arguments, is_plain
from lz_compile.api.blend_telemetry import FIGURES, MODES, BlendTelemetry, Reader, measured
from lz_compile.api.blending import (
    BlenderConfig,
    BlendMode,
    Gates,
    Rails,
    Scalar,
    capped,
    check,
    confidence_gate,
    drift_gate,
    fitted,
    mix,
    steady,
    weigh,
)
from lz_compile.lowering.ops.blend import bounded, top2_margin

#: Numbers of the configuration that are tensors of the module.
_TENSORS = ("low", "high", "gain", "threshold", "hysteresis", "max_step")
#: What drift is a moving deviation over, in batches.
_MEMORY = 0.9
_TINY = 1e-6
#: What so many weights did may be worked out later.
_SMALL = 4096

#: A gate (or what it follows), and what the buffers are to hold after the blend.
Gate: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"


class Blender(nn.Module):
    """Mixes a seed into its host batch by batch (see :func:`lz_compile.blend`), and ramps alpha towards a target.

    Buffers: ``alpha``, its ``target`` and where it came from (``origin``), all of alpha's shape; ``batches``, how many of the
    ramp are over; ``is_confident``, the gate's last decision; ``weights``, the last of a soft gate, the seed's first;
    ``drift_mean`` and ``drift_square``, moving averages; the numbers of the configuration, infinite where there is no bound;
    ``figures`` of telemetry, as of when it was asked for. Every call moves the memory, in evaluation as in training; what is
    no number does not enter it.

    Args:
        config: the mode and its safety rails.
        alpha: to begin with: a number, or a tensor ``[C]``, ``[G]`` or of the seed's shape.
        target: where :meth:`advance` takes it to, by default ``high``, or one without that.
        has_telemetry: whether :meth:`telemetry` has anything to tell.
    """

    alpha: Tensor
    target: Tensor
    origin: Tensor
    batches: Tensor
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
        config = BlenderConfig() if config is None else config
        given = Arguments("Blender")
        if not isinstance(config, BlenderConfig):
            raise given.wrong("config", "as a BlenderConfig", type(config).__name__)
        _check_weights(given, "alpha", alpha)
        if target is not None:
            _check_weights(given, "target", target, alpha)
        self.config = config
        self.has_telemetry = has_telemetry
        start = torch.as_tensor(alpha, dtype=torch.get_default_dtype()).detach().clone()
        bounds = {"low": -math.inf if config.low is None else config.low}
        bounds |= {"high": math.inf if config.high is None else config.high}
        target = (1.0 if config.high is None else config.high) if target is None else target
        end = torch.as_tensor(target, dtype=start.dtype).detach()
        for name, value in (
            ("alpha", start),
            ("origin", start.clone()),
            ("target", end.expand(start.shape).clone()),
            ("batches", torch.zeros((), dtype=torch.int64, device=start.device)),
            ("is_confident", torch.zeros((), dtype=torch.bool, device=start.device)),
            ("weights", start.new_tensor([0.0, 1.0])),
            ("drift_mean", start.new_zeros(())),
            ("drift_square", start.new_zeros(())),
            ("figures", torch.full((len(FIGURES),), math.nan, device=start.device)),
        ):
            self.register_buffer(name, value)
        for name in _TENSORS:
            number = bounds.get(name, getattr(config, name))
            self.register_buffer(name, torch.as_tensor(number, dtype=start.dtype, device=start.device).clone())
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
        check(host, seed, self.alpha, self.config.mode, self.config, logits, None, gate_logits)
        if torch.compiler.is_compiling() or not self.has_telemetry:
            return self._blended(host, seed, logits, gate_logits)
        begun = self._reader.now(seed.device)
        out = self._blended(host, seed, logits, gate_logits)
        self._reader.took(begun, seed.device)
        return out

    def _blended(self, host: Tensor, seed: Tensor, logits: Tensor | None, gate_logits: Tensor | None) -> Tensor:
        """The blend; buffers change after it: to a compiler any two inputs may share memory, and what it reads must last."""
        config, gate = self.config, None
        learned: dict[str, Tensor] = {}
        mode, dim = config.mode, config.channel_dim
        if mode is BlendMode.CONFIDENCE and logits is None:
            if seed.dim() == 2:
                logits = seed
            else:
                gate, learned = self._gate_of_drift(seed)
        mode, alpha = fitted(seed, self.alpha, mode, dim, Gates(logits, gate, gate_logits))
        if mode is BlendMode.SOFT_GATE:
            assert gate_logits is not None, "a soft gate that fits has logits"
            return self._softly(host, seed, gate_logits)
        if mode is not BlendMode.CONFIDENCE:
            gate = None
        elif gate is None:
            assert logits is not None, "a gate that fits has logits"
            gate, learned = self._gate_of_margin(logits)
        rails = Rails(self.low, self.high, config.cap_above, config.cap_share, dim)
        weight = weigh(seed.shape, alpha, mode, rails, gate)
        out = mix(host, seed, weight, mode, dim)
        if learned:
            self._learn(learned)
        if self.has_telemetry:
            if self._puts_off(weight) and alpha.numel() <= _SMALL:
                self._put_off(partial(self._tell, seed.shape, alpha.detach().clone(), weight, gate, mode))
            else:
                self._tell(seed.shape, alpha, weight, gate, mode)
        return out

    def _tell(self, shape: Sequence[int], alpha: Tensor, weight: Tensor, gate: Tensor | None, mode: BlendMode) -> None:
        unlimited = Rails(None, None, self.config.cap_above, 1.0, self.config.channel_dim)
        self._note(weigh(shape, alpha, mode, unlimited, gate), weight, gate, mode)

    def _puts_off(self, weight: Tensor) -> bool:
        """Whether what a batch did is worked out when somebody asks: on a CPU, without a compiler, of few weights."""
        is_small = weight.numel() <= _SMALL and weight.device.type == "cpu"
        return is_small and is_plain(weight) and not self.figures.is_inference()

    def _put_off(self, tell: Callable[[], None]) -> None:
        self._reader.untold = self.figures._version, tell

    def _catch_up(self) -> None:
        """Work out what was put off."""
        untold, self._reader.untold = self._reader.untold, None
        if untold is not None and untold[0] == self.figures._version:  # else compiled code told of a later batch
            untold[1]()

    @torch.no_grad()
    def _learn(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            getattr(self, name).copy_(value)

    def settings(self) -> BlenderConfig:
        """The configuration with the numbers as they are now, as tensors."""
        numbers = {name: getattr(self, name) for name in ("low", "high", "gain", "threshold")}
        return replace(self.config, **numbers)

    def _limited(self, alpha: Tensor) -> Tensor:
        return capped(bounded(alpha, self.low, self.high), self.config.cap_above, self.config.cap_share)

    @torch.no_grad()
    def _gate_of_margin(self, logits: Tensor) -> Gate:
        """One number for each row; the threshold lies lower while the batches before were confident."""
        threshold = self.threshold - torch.where(self.is_confident, self.hysteresis, -self.hysteresis)
        gate = confidence_gate(logits, self.gain, threshold)
        return gate, {"is_confident": top2_margin(logits.detach()).mean() > threshold}

    @torch.no_grad()
    def _gate_of_drift(self, seed: Tensor) -> Gate:
        """The same number for every row; more drift is borne while the batches before were confident."""
        threshold = self.threshold + torch.where(self.is_confident, self.hysteresis, -self.hysteresis)
        drift, averages = self._drift(seed)
        gate = drift_gate(drift, self.gain, threshold).expand(seed.shape[:1])
        return gate, {**averages, "is_confident": drift <= threshold}

    def _drift(self, seed: Tensor) -> Gate:
        """The moving deviation of the output's mean, relative to its size; and the averages that it is computed from."""
        values = seed.detach().float()
        mean = values.mean().to(self.drift_mean.dtype)
        averages = {}
        for name, now in (("drift_mean", mean), ("drift_square", mean.square())):
            last = getattr(self, name)
            averages[name] = torch.lerp(last, torch.where(now.isfinite(), now, last), 1 - _MEMORY)
        deviation = (averages["drift_square"] - averages["drift_mean"].square()).clamp_min(0.0).sqrt()
        size = values.square().mean().sqrt().to(deviation.dtype)
        return deviation / (size + _TINY), averages

    def _softly(self, host: Tensor, seed: Tensor, gate_logits: Tensor) -> Tensor:
        """By a soft gate, whose weights differ from the last ones by a step at most."""
        wanted = torch.softmax(gate_logits, -1)[..., 0]
        last, most = self.weights[0].to(wanted.dtype), self.max_step.to(wanted.dtype)
        share = last + bounded(wanted - last, -most, most)
        share = bounded(share, self.low.to(wanted.dtype), self.high.to(wanted.dtype))
        weight = share.reshape(*share.shape, *(1 for _ in range(seed.dim() - share.dim())))
        out = mix(host, seed, weight, BlendMode.SOFT_GATE)
        with torch.no_grad():
            mean = share.detach().mean().to(self.weights.dtype)
            mean = torch.where(mean.isfinite(), mean, self.weights[0])
            self.weights.copy_(torch.stack([mean, 1 - mean]))
        if self.has_telemetry:
            if self._puts_off(share):
                given = (wanted.detach(), share.detach(), share.detach())
                self._put_off(partial(self._note, *given, BlendMode.SOFT_GATE))
            else:
                self._note(wanted, share, share, BlendMode.SOFT_GATE)
        return out

    # ---- the schedule ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self) -> None:
        """One batch further on the way to the target, straight and element by element; call it once a batch."""
        self.batches.add_(1).clamp_(max=self.config.ramp_batches)
        share = (self.batches / self.config.ramp_batches).to(self.alpha.dtype)
        self.alpha.copy_(self._limited(torch.lerp(self.origin, self.target, share)))

    @torch.no_grad()
    def aim(self, target: float | Tensor) -> None:
        """Begin a ramp from where alpha is to another target, a number or a tensor of alpha's shape.

        Raises:
            ArgumentError: it is none.
        """
        _check_weights(Arguments("Blender.aim"), "target", target, self.alpha)
        self.origin.copy_(self.alpha)
        self.target.copy_(torch.as_tensor(target, dtype=self.alpha.dtype, device=self.alpha.device))
        self.batches.zero_()

    @torch.no_grad()
    def request(self, alpha: float | Tensor) -> None:
        """What a controller asks for now; alpha follows where it is out of the dead band around what is held.

        Raises:
            ArgumentError: it is no finite number, or does not fit alpha's shape.
        """
        _check_weights(Arguments("Blender.request"), "alpha", alpha, self.alpha)
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
            ArgumentError: there is no such number, or it is none.
        """
        given = Arguments("Blender.configure")
        for name, value in numbers.items():
            given.one_of("a number", name, _TENSORS)
            given.scalar(name, value, *((0, math.inf) if name in ("hysteresis", "max_step") else ()))
        for name, value in numbers.items():
            getattr(self, name).copy_(torch.as_tensor(value))

    # ---- telemetry -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _note(self, given: Tensor, weight: Tensor, gate: Tensor | None, mode: BlendMode) -> None:
        if weight.numel():  # of an empty batch there is nothing to say
            self.figures.copy_(measured(given, weight, gate, MODES.index(mode.value)))

    def telemetry(self) -> BlendTelemetry | None:
        """What the last blends did, as far as it has arrived on the host; never waits for the device. None before the first.

        Its mode is that which was used: CONVEX where another one did not fit. NaN in alpha is an event of level CRITICAL
        (``BLEND_ALPHA_NAN``).
        """
        self._catch_up()
        return self._reader.poll(self.figures)

    def _save_to_state_dict(self, *given: Any, **named: Any) -> None:
        self._catch_up()
        super()._save_to_state_dict(*given, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Blender:
        """All of it but what is on its way; what was put off is worked out before."""
        self._catch_up()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        self._catch_up()
        return dict(self.__dict__)

    def extra_repr(self) -> str:
        """The configuration."""
        return ", ".join(f"{each.name}={getattr(self.config, each.name)}" for each in fields(self.config))


def _check_weights(given: Arguments, name: str, value: Any, like: Any = None) -> None:
    """Finite numbers, one at least, that fit alpha's shape; what a device holds is taken as it is."""
    if not isinstance(value, Tensor):
        given.number(name, value)
        return
    given.tensor(name, value, anywhere=True)
    if value.is_meta:
        raise given.wrong(name, "on a device that holds numbers", value.device)
    if not value.numel():
        raise given.wrong(name, "of one number at least", tuple(value.shape), "Give torch.tensor(...)")
    if like is not None:
        given.broadcasts(name, value, like.shape if isinstance(like, Tensor) else (), "alpha's shape, ")
    if is_plain(value) and value.device.type == "cpu" and not bool(value.isfinite().all()):
        raise given.wrong(name, "of finite numbers", "NaN or infinity", "Look where it comes from")


class SoftGate(nn.Module):
    """The two logits of a soft gate, the seed's first, from features: one hidden layer.

    Args:
        features: of the input.
        width: of the hidden layer, 64 at most: a gate is to be no network of its own.

    Shapes:
        input ``[N, features, ...]``, averaged over what follows; the result is ``[N, 2]``.

    Raises:
        ArgumentError: it is wider than that.
    """

    def __init__(self, features: int, width: int = 16) -> None:
        super().__init__()
        given = Arguments("SoftGate")
        given.number("features", features, 1, whole=True)
        given.number("width", width, 1, 64, whole=True)
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
