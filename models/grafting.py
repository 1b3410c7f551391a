"""A network that grows: a seed is trained beside a block of its host, mixed in, watched, and takes the block's place.

The seed is isolated in every stage: it reads what its host reads without a gradient, and the host's own output is detached
where both are mixed. How much of the seed is taken depends on the batch, too: a seed that is not sure of an image (whose two
best classes are close) is held back for it.

    TRAINING      the seed learns by a loss of its own; the model gives what the host gives
    BLENDING      alpha rises from zero to one, times the gate of each image
    SHADOWING     the model gives what the host gives once more, and both are compared
    PROBATIONARY  the seed alone, the host ready to come back
    FOSSILIZED    the seed is the block; the host's is no longer run

Shape suffixes:
    B  batch       C  channels       H, W  pixels       K  classes

**Source** Margins as confidence: Scheffer et al., Active hidden Markov models (2001).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stage(enum.Enum):
    """Where a seed is in its life."""

    TRAINING = "training"
    BLENDING = "blending"
    SHADOWING = "shadowing"
    PROBATIONARY = "probationary"
    FOSSILIZED = "fossilized"


@dataclass(frozen=True)
class GraftingConfig:
    """Sizes, the gate ``sigmoid(gain * (margin - threshold))``, and how many batches each stage takes."""

    channels: int = 12
    classes: int = 10
    gain: float = 6.0
    threshold: float = 0.2
    hysteresis: float = 0.02
    batches: Mapping[Stage, int] = field(
        default_factory=lambda: MappingProxyType(
            {Stage.TRAINING: 150, Stage.BLENDING: 150, Stage.SHADOWING: 50, Stage.PROBATIONARY: 100}
        )
    )


class Grafted(NamedTuple):
    """What the model gives, what the seed alone would say ``[B, K]``, what the seed was weighed by, and its gate ``[B]``."""

    logits_BK: Tensor
    seed_logits_BK: Tensor
    weight_B: Tensor
    gate_B: Tensor


class Host(nn.Module):
    """A small convolutional network: a stem, one block, and a classifier."""

    def __init__(self, config: GraftingConfig) -> None:
        super().__init__()
        width = config.channels
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.block = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.head = nn.Linear(width * 4, config.classes)

    def features(self, images_B1HW: Tensor) -> Tensor:
        """What the block reads."""
        return F.relu(self.stem(images_B1HW))

    def classify(self, x_BCHW: Tensor) -> Tensor:
        """Logits of the block's output."""
        logits_BK: Tensor = self.head(F.adaptive_avg_pool2d(x_BCHW, 2).flatten(1))
        return logits_BK

    def forward(self, images_B1HW: Tensor) -> Tensor:
        """Logits without any seed."""
        return self.classify(F.relu(self.block(self.features(images_B1HW))))


class Seed(nn.Module):
    """What is grafted: a block of the same shape that is worth more, and a classifier of its own to learn by."""

    def __init__(self, config: GraftingConfig) -> None:
        super().__init__()
        width = config.channels
        self.wide = nn.Conv2d(width, 4 * width, 3, padding=1)
        self.narrow = nn.Conv2d(4 * width, width, 3, padding=1)
        self.head = nn.Linear(width * 4, config.classes)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output ``[B, C, H, W]`` and logits ``[B, K]``."""
        y_BCHW = F.relu(x_BCHW + self.narrow(F.relu(self.wide(x_BCHW))))
        return y_BCHW, self.head(F.adaptive_avg_pool2d(y_BCHW, 2).flatten(1))


class Grafting(nn.Module):
    """A host with a seed beside its block. Alpha and the gate's memory are buffers, and never trained."""

    alpha: Tensor
    is_confident: Tensor

    def __init__(self, host: Host, config: GraftingConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GraftingConfig()
        self.host, self.seed = host, Seed(config)
        self.seed.head.load_state_dict(host.head.state_dict())
        self.stage = Stage.TRAINING
        self.batch = 0
        self.register_buffer("alpha", torch.zeros(()))
        self.register_buffer("is_confident", torch.zeros((), dtype=torch.bool))

    def forward(self, images_B1HW: Tensor) -> Grafted:
        """One batch, as the stage has it."""
        x_BCHW = self.host.features(images_B1HW).detach()
        seed_BCHW, seed_logits_BK = self.seed(x_BCHW)
        if self.stage is Stage.FOSSILIZED:
            ones_B = torch.ones_like(seed_logits_BK[:, 0])
            return Grafted(self.host.classify(seed_BCHW), seed_logits_BK, ones_B, ones_B)
        host_BCHW = F.relu(self.host.block(x_BCHW)).detach()
        gate_B = self._gate(seed_logits_BK.detach())
        weight_B = (self.alpha * gate_B).clamp(0.0, 1.0)
        weight_B111 = weight_B[:, None, None, None]
        mixed_BCHW = weight_B111 * seed_BCHW + (1 - weight_B111) * host_BCHW
        return Grafted(self.host.classify(mixed_BCHW), seed_logits_BK, weight_B, gate_B)

    def _gate(self, logits_BK: Tensor) -> Tensor:
        """How far each image lets the seed in, by how sure that is; on probation the gate stays open."""
        if self.stage is Stage.PROBATIONARY:
            return torch.ones_like(logits_BK[:, 0])
        config = self.config
        top_B2 = torch.topk(logits_BK.softmax(-1), 2, dim=1).values
        margin_B = top_B2[:, 0] - top_B2[:, 1]
        band = torch.where(self.is_confident, -config.hysteresis, config.hysteresis)
        threshold = config.threshold + band
        gate_B = torch.sigmoid(config.gain * (margin_B - threshold))
        self.is_confident.copy_(margin_B.mean() > threshold)
        return gate_B

    @torch.no_grad()
    def advance(self) -> Stage:
        """One batch further: alpha along its ramp, and into the next stage where this one is over."""
        self.batch += 1
        length = self.config.batches.get(self.stage, 0)
        if self.stage is not Stage.FOSSILIZED and self.batch >= length:
            self.stage, self.batch = _NEXT[self.stage], 0
            self.alpha.fill_(_ALPHA[self.stage])
        elif self.stage is Stage.BLENDING:
            self.alpha.fill_(self.batch / length)
        return self.stage

    def reject(self) -> None:
        """Send the seed back to where it learns by itself: the host was better."""
        self.stage, self.batch = Stage.TRAINING, 0
        self.alpha.zero_()


_NEXT: Mapping[Stage, Stage] = {
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.SHADOWING,
    Stage.SHADOWING: Stage.PROBATIONARY,
    Stage.PROBATIONARY: Stage.FOSSILIZED,
}
#: Alpha at the beginning of a stage.
_ALPHA: Mapping[Stage, float] = {
    Stage.TRAINING: 0.0,
    Stage.BLENDING: 0.0,
    Stage.SHADOWING: 0.0,
    Stage.PROBATIONARY: 1.0,
    Stage.FOSSILIZED: 1.0,
}


def loss(found: Grafted, labels_B: Tensor, stage: Stage) -> Tensor:
    """What the seed learns by: its own logits, and the model's where it has a part in them."""
    own = F.cross_entropy(found.seed_logits_BK, labels_B)
    if stage in (Stage.TRAINING, Stage.SHADOWING):
        return own
    return own + F.cross_entropy(found.logits_BK, labels_B)
