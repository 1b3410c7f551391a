"""``lz.blend``: a seed network's output mixed into that of its host, which never gets a gradient from it.

All modes are a sum ``weight * seed + host_weight * host`` of tensors; what they weigh by is a tensor, too, so that nothing is
compiled again when it changes, be it to zero or to one. To a compiler this is plain PyTorch code, to whatever backend; ours
recognises it (:mod:`lz_compile.passes.blend.recogniser`) and chooses a kernel. An eager call may be one, too
(:mod:`lz_compile.api.blend_calls`).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from lz_compile.api.arguments import Arguments, remembered
from lz_compile.api.blend_calls import one_call
from lz_compile.errors import ArgumentError
from lz_compile.ground import events
from lz_compile.lowering.ops.blend import bounded, gate, top2_margin

#: A number, or a tensor without dimensions: as a tensor it may change without anything being compiled again.
Scalar: TypeAlias = "float | torch.Tensor"


class BlendMode(enum.Enum):
    """How a seed is mixed into its host."""

    CONVEX = "convex"
    RESIDUAL = "residual"
    CHANNEL = "channel"
    CONFIDENCE = "confidence"
    DELTA = "delta"
    LOGIT = "logit"
    SOFT_GATE = "soft_gate"


@dataclass(frozen=True)
class BlenderConfig:
    """The mode of a blend and its safety rails.

    ``low`` and ``high`` bound every weight. Of weights that are a tensor, no more than ``cap_share`` may lie above
    ``cap_above``. ``hysteresis`` is half the width of the band in which nothing switches. ``gain`` and ``threshold`` are
    those of the gate ``sigmoid(gain * (margin - threshold))``. ``max_step`` is what a soft gate's weight may change by
    from batch to batch, ``ramp_batches`` how long alpha takes to its target. ``channel_dim`` is that of channels, and of
    classes in LOGIT.

    Raises:
        ArgumentError: a number makes no sense. Tensors are taken as they are: to look at them would be to wait for them.
    """

    mode: BlendMode = BlendMode.CONVEX
    low: Scalar | None = 0.0
    high: Scalar | None = 1.0
    cap_above: float = 0.8
    cap_share: float = 1.0
    hysteresis: float = 0.02
    gain: Scalar = 6.0
    threshold: Scalar = 0.2
    max_step: float = 0.1
    ramp_batches: int = 100
    channel_dim: int = 1

    def __post_init__(self) -> None:
        given = Arguments("BlenderConfig")
        if not isinstance(self.mode, BlendMode):
            raise given.wrong("mode", "as a BlendMode", repr(self.mode), "Give BlendMode.RESIDUAL, for example")
        for name in ("low", "high", "gain", "threshold"):
            value = getattr(self, name)
            if value is not None or name in ("gain", "threshold"):
                given.scalar(name, value)
        given.number("cap_above", self.cap_above)
        given.number("cap_share", self.cap_share, 0, 1)
        given.number("hysteresis", self.hysteresis, 0)
        given.number("max_step", self.max_step, 0, above=True)
        given.number("ramp_batches", self.ramp_batches, 1, whole=True)
        given.number("channel_dim", self.channel_dim, whole=True)
        low, high = self.low, self.high
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
            raise given.wrong("low", f"up to high, {high}", low, "Swap them")


_DEFAULT = BlenderConfig()


def blend(
    host: torch.Tensor,
    seed: torch.Tensor,
    alpha: torch.Tensor,
    mode: BlendMode | None = None,
    *,
    config: BlenderConfig = _DEFAULT,
    logits: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The seed mixed into the host by ``alpha``, as the mode says; no gradient flows to the host or to ``alpha``.

    CONVEX and DELTA are ``host + alpha * (seed - host)``, RESIDUAL is ``host + alpha * seed``; CHANNEL is CONVEX with one
    alpha for each channel, or group of them; CONFIDENCE with an alpha that is multiplied, row by row, by a gate; LOGIT is the
    softmax of CONVEX; SOFT_GATE weighs by ``softmax(gate_logits)``, the seed's weight first. A mode whose tensors do not fit
    falls back to CONVEX with the mean alpha, and is an event (``BLEND_FELL_BACK``).

    Args:
        host: what is grafted upon.
        seed: what is grafted.
        alpha: how much of the seed is taken, held within the bounds of ``config``. NaN stays NaN.
        mode: by default that of ``config``.
        config: bounds and the gate's parameters; tensors among them may change without a new compile.
        logits: for CONFIDENCE, by whose margin the gate opens; by default the seed, if it has two dimensions.
        gate: for CONFIDENCE, a gate that is known already, as that of :func:`drift_gate`.
        gate_logits: for SOFT_GATE, the two logits of each row, or of all. Gradients flow to them.

    Shapes:
        host and seed ``[N, C, ...]`` alike; alpha ``[]``, ``[N]``, ``[N, C, ...]`` (of each extent that or 1), in CHANNEL
        ``[C]`` or ``[G]`` with G a divisor of C; logits ``[N, K]``; gate ``[N]``; gate_logits ``[N, 2]`` or ``[2]``; the
        result is like the seed.

    Raises:
        ArgumentError: host and seed differ in shape or device, not all are tensors of floating-point numbers, alpha is empty,
            or the mode is no mode; that is an event (``BLEND_IMPOSSIBLE``), too.
    """
    check(host, seed, alpha, mode, config, logits, gate, gate_logits)
    mode = config.mode if mode is None else mode
    if mode is BlendMode.CONFIDENCE and logits is None and seed.dim() == 2:
        logits = seed
    mode, alpha = fitted(seed, alpha, mode, config.channel_dim, Gates(logits, gate, gate_logits))
    if mode is BlendMode.SOFT_GATE:
        assert gate_logits is not None, "a soft gate that fits has logits"
        return _soft(host, seed, gate_logits)
    if mode is BlendMode.CONFIDENCE and gate is None:
        assert logits is not None, "a gate that fits has logits"
        gate = confidence_gate(logits, config.gain, config.threshold)
    rails = Rails(config.low, config.high, config.cap_above, config.cap_share, config.channel_dim)
    return mix(host, seed, weigh(seed.shape, alpha, mode, rails, gate), mode, config.channel_dim)


class Gates(NamedTuple):
    """What gates are made of, as :func:`blend` takes it."""

    logits: torch.Tensor | None
    gate: torch.Tensor | None
    gate_logits: torch.Tensor | None


def fitted(
    seed: torch.Tensor, alpha: torch.Tensor, mode: BlendMode, channel_dim: int, gates: Gates
) -> tuple[BlendMode, torch.Tensor]:
    """The mode and alpha that are used: those that are asked for, or CONVEX and a mean alpha where these do not fit."""
    misfit = _misfit(seed, alpha, mode, channel_dim, gates)
    if misfit is None:
        return mode, alpha
    _note("BLEND_FELL_BACK", f"lz.blend: {mode.name} falls back to CONVEX: {misfit}")
    return BlendMode.CONVEX, alpha if _broadcasts(alpha, seed) else alpha.mean()


class Rails(NamedTuple):
    """What holds weights, as in :class:`BlenderConfig`."""

    low: Scalar | None
    high: Scalar | None
    cap_above: float
    cap_share: float
    channel_dim: int


def weigh(
    shape: Sequence[int], alpha: torch.Tensor, mode: BlendMode, rails: Rails, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Alpha within its bounds, under its cap and times the gate, broadcastable to a seed of a shape; without gradients."""
    weight = capped(bounded(alpha.detach(), rails.low, rails.high), rails.cap_above, rails.cap_share)
    if mode is BlendMode.CHANNEL:
        weight = _over_channels(weight, shape, rails.channel_dim)
    elif weight.dim() == 1 and len(shape) > 1:
        weight = weight.reshape(-1, *(1 for _ in range(len(shape) - 1)))
    if mode is BlendMode.CONFIDENCE and gate is not None:
        gate = gate.detach()
        weight = bounded(weight * gate.reshape(-1, *(1 for _ in range(len(shape) - 1))), rails.low, rails.high)
    return weight


def mix(
    host: torch.Tensor, seed: torch.Tensor, weight: torch.Tensor, mode: BlendMode, channel_dim: int = 1
) -> torch.Tensor:
    """The blend by a weight that broadcasts to the seed, in the dtype of the seed."""
    host = host.detach()
    if mode is not BlendMode.LOGIT:
        called = one_call(host, seed, weight, is_residual=mode is BlendMode.RESIDUAL)
        if called is not None:
            return called
    if mode is BlendMode.RESIDUAL:
        blended = host + weight * seed
    elif mode is BlendMode.DELTA:
        blended = host + weight * (seed - host)
    else:
        blended = weight * seed + (1 - weight) * host
    if mode is BlendMode.LOGIT:
        blended = torch.softmax(blended, channel_dim)
    return blended if blended.dtype == seed.dtype else blended.to(seed.dtype)


def confidence_gate(logits: torch.Tensor, gain: Scalar = 6.0, threshold: Scalar = 0.2) -> torch.Tensor:
    """``sigmoid(gain * (margin - threshold))``, the margin that of the largest logit to the second largest; no gradients.

    Nothing is sorted: the margin takes two maxima, and is zero where they are equal.

    Shapes:
        logits ``[N, K]`` with two classes at least; the result is ``[N]``.
    """
    return gate(top2_margin(logits.detach()), gain, gain * threshold)


def drift_gate(drift: torch.Tensor, gain: Scalar = 6.0, threshold: Scalar = 0.2) -> torch.Tensor:
    """``sigmoid(gain * (threshold - drift))``: closes as an output drifts, where there are no classes to be sure of.

    Shapes:
        drift of any shape, a relative deviation; the result is like it.
    """
    return gate(drift.detach(), -gain, -gain * threshold)


def capped(alpha: torch.Tensor, above: float, share: float) -> torch.Tensor:
    """Alpha with no more than a ``share`` of its elements over ``above``: of those, the largest stay and others become it.

    Shapes:
        alpha of any shape; without dimensions, or with a share of one, it is left as it is.
    """
    count = alpha.numel()
    allowed = int(share * count)
    if alpha.dim() == 0 or allowed >= count:
        return alpha
    limit = alpha.flatten().kthvalue(count - allowed).values
    return torch.where((alpha > above) & (alpha <= limit), torch.full_like(alpha, above), alpha)


def steady(value: torch.Tensor, held: torch.Tensor, width: Scalar = 0.02) -> torch.Tensor:
    """What was held, until the value is more than ``width`` away from it: a dead band, element by element."""
    return torch.where((value - held).abs() > width, value, held)


# ---- soft gates ------------------------------------------------------------------------------------------------------


def _soft(host: torch.Tensor, seed: torch.Tensor, gate_logits: torch.Tensor) -> torch.Tensor:
    shares = torch.softmax(gate_logits, -1)
    trailing = [1] * (seed.dim() - shares.dim() + 1)
    of_seed, of_host = (shares[..., place].reshape(*shares.shape[:-1], *trailing) for place in (0, 1))
    return (of_seed * seed + of_host * host.detach()).to(seed.dtype)


# ---- what fits -------------------------------------------------------------------------------------------------------


def check(*given: Any) -> None:
    """Refuse what is no blend in any mode; parameters as of :func:`_check`.

    Raises:
        ArgumentError: it is none.
    """
    try:
        _check(*given)
    except ArgumentError as error:
        _note("BLEND_IMPOSSIBLE", str(error), level=logging.CRITICAL)
        raise


@remembered
def _check(host: Any, seed: Any, alpha: Any, mode: Any, config: Any, logits: Any, gate: Any, gate_logits: Any) -> None:
    given = Arguments("blend")
    if not isinstance(config, BlenderConfig):
        raise given.wrong("config", "as a BlenderConfig", type(config).__name__)
    if mode is not None and not isinstance(mode, BlendMode):
        raise given.wrong("mode", "as a BlendMode", repr(mode), "Give BlendMode.RESIDUAL, for example")
    given.tensor("host", host)
    given.tensor("seed", seed)
    if host.shape != seed.shape:
        raise given.wrong("seed", f"in the shape of host, {tuple(host.shape)}", tuple(seed.shape), "Give tensors alike")
    is_number = isinstance(alpha, torch.Tensor) and alpha.dim() == 0 and alpha.device.type == "cpu"
    given.tensor("alpha", alpha, anywhere=is_number)
    if seed.numel() and not alpha.numel():
        raise given.wrong("alpha", "of one number at least", tuple(alpha.shape), "Give torch.tensor(...)")
    given.tensor("logits", logits, optional=True)
    given.tensor("gate", gate, kind="real", optional=True)
    given.tensor("gate_logits", gate_logits, optional=True)


def _misfit(seed: torch.Tensor, alpha: torch.Tensor, mode: BlendMode, channel_dim: int, gates: Gates) -> str | None:
    """Why a mode cannot be had with these tensors; None where it can."""
    logits, gate, gate_logits = gates
    has_channels = -seed.dim() <= channel_dim < seed.dim()
    rows = seed.shape[:1]
    problem = None
    if mode is BlendMode.CHANNEL:
        is_vector = alpha.dim() == 1 and has_channels and alpha.shape[0] > 0
        if not is_vector or seed.shape[channel_dim] % alpha.shape[0]:
            problem = "alpha is not one number for each channel, or group of channels"
    elif mode is BlendMode.SOFT_GATE:
        if gate_logits is None or gate_logits.shape not in ((*rows, 2), (2,)):
            problem = "there are no two gate logits for each row"
    elif not _broadcasts(alpha, seed):
        problem = "alpha broadcasts to no dimension of the seed"
    elif mode is BlendMode.LOGIT:
        if not has_channels or seed.shape[channel_dim] < 2:
            problem = "there are no two classes"
    elif mode is BlendMode.CONFIDENCE:
        if gate is not None:
            problem = None if gate.shape == rows else "there is not one gate for each row"
        elif logits is None or logits.dim() != 2 or logits.shape[:1] != rows or logits.shape[1] < 2:
            problem = "there are no logits of two classes or more for each row"
    return problem


def _broadcasts(alpha: torch.Tensor, seed: torch.Tensor) -> bool:
    """Whether alpha is one number for all, for each row, or for elements."""
    if alpha.dim() == 0 or (alpha.dim() == 1 and seed.dim() > 0 and alpha.shape[0] in (1, seed.shape[0])):
        return True
    pairs = zip(alpha.shape, seed.shape, strict=False)
    return alpha.dim() == seed.dim() and all(own in (1, other) for own, other in pairs)


def _over_channels(alpha: torch.Tensor, shape: Sequence[int], channel_dim: int) -> torch.Tensor:
    """One number for each channel or group, broadcastable to a seed of a shape."""
    channels = shape[channel_dim]
    weight = alpha if alpha.shape[0] == channels else alpha.repeat_interleave(channels // alpha.shape[0], 0)
    place = channel_dim % len(shape)
    for _ in range(len(shape) - 1 - place):
        weight = weight.unsqueeze(-1)
    return weight


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _note(code: str, message: str, level: int = logging.WARNING) -> None:
    """An event; of compiled code, once when it is traced."""
    events.record(code, message, level=level)
