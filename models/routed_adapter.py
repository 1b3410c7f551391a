"""A linear layer with a kept and a quarantined adapter, and gradients that are routed to one or both of them.

    a    = Vh x                          the input in the frozen singular basis of W
    kept = U (a * delta_S)               trained by clean rollouts only, and deployed
    quar = B_q (A_q x)                   trained by every rollout, and dropped at deployment
    y    = W x + kept + quar

The value of ``y`` does not depend on the routing. What is routed is the gradient of ``delta_S``: by a gate of ones whose
gradient tells, after backward, what each rollout (or each token) wants of ``delta_S``; or by a mask that detaches ``kept``.
Routing reads activations, directions, ``delta_S`` and gradients, and nothing else.

Shape suffixes:
    G  rollouts        I  inputs of the layer       R  rank of the kept adapter
    S  tokens of one   O  outputs of the layer      Q  rank of the quarantine
    N  tokens of all   D  units that are flagged: rollouts or tokens

**Source** *GRPO gradient routing through a quarantine adapter*; Cloud et al., Gradient routing (2024); Hu et al., LoRA
(2021).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

#: An axis of ``delta_S`` of this magnitude or less tells nothing of its gradient through a gate.
RELIABLE = 1e-6
#: What the denominator of a cosine is at least.
SMALLEST_NORM = 1e-6


#: A batch that shows the unwanted behaviour, and one that is the same but for it.
Pair: TypeAlias = tuple[Any, Any]


class Arm(enum.Enum):
    """How gradients are kept away from ``delta_S``."""

    NONE = "none"
    ACT = "act"
    GRAD_TOKEN = "grad, per token"
    GRAD_ROLLOUT = "grad, per rollout"


#: Arms that read gradients, through a gate.
GATED = (Arm.GRAD_TOKEN, Arm.GRAD_ROLLOUT)


class CollectionError(RuntimeError):
    """Gradients of a backward were about to be used without being routed."""


@dataclass(frozen=True)
class Rollouts:
    """Which rollout every token belongs to: ``count`` of equal length in a row, or by ``ids`` (any shape, 0 to count - 1)."""

    count: int
    length: int = 0
    ids: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.count * self.length if self.ids is None else self.ids.numel()

    def spread(self, gate_GR: Tensor) -> Tensor:
        """What every token gets of its rollout, ``[N, R]``."""
        if self.ids is None:
            gate_NR: Tensor = gate_GR[:, None].expand(-1, self.length, -1).flatten(0, 1)
            return gate_NR
        return gate_GR[self.ids.flatten()]

    def sum(self, values_NR: Tensor) -> Tensor:
        """The sum over the tokens of every rollout, ``[G, R]``."""
        if self.ids is None:
            sums_GR: Tensor = values_NR.unflatten(0, (self.count, self.length)).sum(1)
            return sums_GR
        zeros_GR = values_NR.new_zeros(self.count, values_NR.shape[1])
        return zeros_GR.index_add(0, self.ids.flatten(), values_NR)


class Routed(NamedTuple):
    """What a backward told of one layer: each unit's gradient ``[D, R]`` (zero on unreliable axes), and its flag ``[D]``."""

    gradient_DR: Tensor
    flagged_D: Tensor


def cosine(values_DR: Tensor, direction_R: Tensor) -> Tensor:
    """The cosine of every row with a direction, ``[D]``; the product of the norms is taken as 1e-6 at least."""
    norms_D = values_DR.norm(dim=-1) * direction_R.norm()
    cosine_D: Tensor = values_DR @ direction_R / norms_D.clamp_min(SMALLEST_NORM)
    return cosine_D


def gradients_of_gate(gate_grad_DR: Tensor, delta_s_R: Tensor) -> Tensor:
    """What each unit adds to the gradient of ``delta_S``: the gate's gradient is that, times ``delta_S``."""
    is_reliable_R = delta_s_R.abs() > RELIABLE
    return torch.where(is_reliable_R, gate_grad_DR / torch.where(is_reliable_R, delta_s_R, 1.0), 0.0)


class RoutedLinear(nn.Module):
    """A frozen linear layer with both adapters, which add nothing until they are trained.

    Inputs are ``[G, S, I]`` or ``[N, I]``; ``gate`` is what the next forward multiplies in, ``[G, R]`` or ``[N, R]``.
    """

    weight_OI: Tensor
    bias_O: Tensor | None
    vh_RI: Tensor
    u_OR: Tensor
    direction_R: Tensor

    def __init__(self, linear: nn.Linear, rank: int, quarantine_rank: int, arm: Arm) -> None:
        super().__init__()
        weight_OI = linear.weight.detach()
        u, _, vh = torch.linalg.svd(weight_OI.float(), full_matrices=False)
        rank = min(rank, *weight_OI.shape)
        self.register_buffer("weight_OI", weight_OI)
        self.register_buffer("bias_O", None if linear.bias is None else linear.bias.detach())
        self.register_buffer("vh_RI", vh[:rank].to(weight_OI).contiguous())
        self.register_buffer("u_OR", u[:, :rank].to(weight_OI).contiguous())
        self.register_buffer("direction_R", weight_OI.new_zeros(rank))
        self.delta_s_R = nn.Parameter(weight_OI.new_zeros(rank))
        self.a_QI = nn.Parameter(
            torch.randn(quarantine_rank, weight_OI.shape[1]).to(weight_OI) * weight_OI.shape[1] ** -0.5
        )
        self.b_OQ = nn.Parameter(weight_OI.new_zeros(weight_OI.shape[0], quarantine_rank))
        self.arm = arm
        self.is_ablated = False
        self.rollouts: Rollouts | None = None
        self.gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer with what both adapters add; without the quarantine once that is ablated."""
        a = F.linear(x, self.vh_RI)
        kept = F.linear(self._gated(a) * self.delta_s_R, self.u_OR)
        if self.arm is Arm.ACT:
            flagged = cosine(a.detach(), self.direction_R.to(a.dtype)) > 0
            kept = torch.where(flagged[..., None], kept.detach(), kept)
        y = F.linear(x, self.weight_OI, self.bias_O) + kept
        return y if self.is_ablated else y + F.linear(F.linear(x, self.a_QI), self.b_OQ)

    def _gated(self, a: Tensor) -> Tensor:
        if self.gate is None or self.rollouts is None:
            return a
        gate_NR = self.rollouts.spread(self.gate) if self.arm is Arm.GRAD_ROLLOUT else self.gate
        return a * gate_NR.view_as(a)

    def open(self, rollouts: Rollouts) -> None:
        """Put a new gate in for the forward to come; whether that is one per rollout or per token says the arm."""
        self.rollouts, self.gate = rollouts, None
        if self.arm in GATED:
            units = rollouts.count if self.arm is Arm.GRAD_ROLLOUT else rollouts.tokens
            self.gate = self.delta_s_R.new_ones(units, self.delta_s_R.shape[0]).requires_grad_()

    def close(self) -> None:
        """Let go of the gate, and of the graph that it hangs in."""
        self.rollouts = self.gate = None

    def flags(self, gradient_DR: Tensor) -> Tensor:
        """Which units are kept away from ``delta_S``: those whose gradient points to the unwanted side."""
        return cosine(gradient_DR, self.direction_R) > 0

    @torch.no_grad()
    def filter(self) -> Routed | None:
        """Take what flagged units added to ``delta_S.grad`` away again; None where no gate tells of it.

        Axes where ``delta_S`` is as good as zero keep their full gradient: the gate says nothing of them.

        Raises:
            CollectionError: ``delta_S`` has a gradient, and there is no gate to tell whose.
        """
        if self.arm not in GATED or self.delta_s_R.grad is None:
            return None
        if self.gate is None or self.gate.grad is None:
            raise CollectionError("filtering delta_S.grad: no gate has a gradient; call begin() before each forward")
        gradient_DR = gradients_of_gate(self.gate.grad, self.delta_s_R)
        flagged_D = self.flags(gradient_DR)
        self.delta_s_R.grad -= flagged_D.to(gradient_DR.dtype) @ gradient_DR
        return Routed(gradient_DR, flagged_D)

    @torch.no_grad()
    def deployed(self) -> nn.Linear:
        """A plain linear layer that computes ``W x + kept``: the kept adapter is folded in, the quarantine is gone."""
        outputs, inputs = self.weight_OI.shape
        linear = nn.Linear(
            inputs, outputs, self.bias_O is not None, device=self.weight_OI.device, dtype=self.weight_OI.dtype
        )
        linear.weight.copy_(self.weight_OI + (self.u_OR * self.delta_s_R) @ self.vh_RI)
        if self.bias_O is not None:
            linear.bias.copy_(self.bias_O)
        return linear


class Routing:
    """A model whose chosen linear layers are routed, and the gradients of a step of several prompts.

    A step is, for every prompt, ``begin``, forward, backward, ``collect`` and ``zero_grad``; then ``restore``, clipping, the
    optimizer's step and ``zero_grad``.
    """

    #: What takes the place of a linear layer.
    layer_type: type[RoutedLinear] = RoutedLinear

    def __init__(self, model: nn.Module, names: Sequence[str], *, rank: int, quarantine_rank: int, arm: Arm) -> None:
        self.model = model.requires_grad_(False)
        self.arm = arm
        self.layers: dict[str, RoutedLinear] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        for name in names:
            linear = model.get_submodule(name)
            if not isinstance(linear, nn.Linear):
                raise TypeError(f"routing {name}: expected nn.Linear, got {type(linear).__name__}; name linear layers")
            self.layers[name] = self.layer_type(linear, rank, quarantine_rank, arm)
            model.set_submodule(name, self.layers[name])

    def parameters(self) -> list[nn.Parameter]:
        """What is trained: ``delta_S``, ``A_q`` and ``B_q`` of every layer."""
        return [each for layer in self.layers.values() for each in (layer.delta_s_R, layer.a_QI, layer.b_OQ)]

    def aim(self, directions: Mapping[str, Tensor]) -> None:
        """Set each layer's direction ``[R]``."""
        for name, direction_R in directions.items():
            self.layers[name].direction_R.copy_(direction_R)

    def begin(self, rollouts: Rollouts) -> None:
        """New gates for one forward and backward.

        Raises:
            CollectionError: a backward went through the last gates, and nobody collected what it left.
        """
        if any(layer.gate is not None and layer.gate.grad is not None for layer in self.layers.values()):
            raise CollectionError(
                "beginning a prompt: gradients of the last one were not collected; call collect() first"
            )
        for layer in self.layers.values():
            layer.open(rollouts)

    def collect(self) -> dict[str, Routed]:
        """Filter ``delta_S.grad``, add all gradients to the step's, drop the gates. What was flagged, by layer."""
        found = {name: layer.filter() for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.close()
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter] += parameter.grad
            else:
                self._sums[parameter] = parameter.grad.detach().clone()
        return {name: routed for name, routed in found.items() if routed is not None}

    def restore(self, group: dist.ProcessGroup | None = None) -> None:
        """Put the step's gradients into ``.grad``, averaged over the processes of a group where one is given."""
        for parameter in self.parameters():
            total = self._sums.get(parameter)
            if group is not None:
                total = torch.zeros_like(parameter) if total is None else total
                dist.all_reduce(total, group=group)
                total /= dist.get_world_size(group)
            parameter.grad = total
        self._sums = {}

    @contextlib.contextmanager
    def ablated(self) -> Iterator[None]:
        """The model as it would be deployed, without the quarantine."""
        before = [layer.is_ablated for layer in self.layers.values()]
        try:
            for layer in self.layers.values():
                layer.is_ablated = True
            yield
        finally:
            for layer, was_ablated in zip(self.layers.values(), before, strict=True):
                layer.is_ablated = was_ablated

    def deploy(self) -> nn.Module:
        """The model with plain linear layers in place of the routed ones, for good."""
        for name, layer in self.layers.items():
            self.model.set_submodule(name, layer.deployed())
        return self.model


def gradient_directions(routing: Routing, pairs: Iterable[Pair], loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """``v_grad`` of every layer: where the unwanted side of contrast pairs pulls ``delta_S``, less where the clean side does.

    Args:
        routing: the model, which is in eval mode while its gradients are taken; ``.grad`` of its parameters is not touched.
        pairs: the unwanted and the clean batch of each.
        loss: of one batch, from which the gradients come.
    """
    deltas = [layer.delta_s_R for layer in routing.layers.values()]

    def gradients(batch: Any) -> list[Tensor]:
        return list(torch.autograd.grad(loss(batch), deltas))

    return _directions(routing, pairs, gradients)


def activation_directions(routing: Routing, pairs: Iterable[Pair], run: Callable[[Any], Any]) -> dict[str, Tensor]:
    """``v_act`` of every layer: the same of the mean of ``a`` over the tokens of a batch, which ``run`` runs."""
    means: dict[str, Tensor] = {}

    def reader(name: str) -> Callable[[RoutedLinear, tuple[Tensor, ...]], None]:
        def read(layer: RoutedLinear, inputs: tuple[Tensor, ...]) -> None:
            means[name] = F.linear(inputs[0], layer.vh_RI).flatten(0, -2).mean(0)

        return read

    def activations(batch: Any) -> list[Tensor]:
        with torch.no_grad():
            run(batch)
        return [means[name] for name in routing.layers]

    hooks = [layer.register_forward_pre_hook(reader(name)) for name, layer in routing.layers.items()]
    try:
        return _directions(routing, pairs, activations)
    finally:
        for hook in hooks:
            hook.remove()


def _directions(routing: Routing, pairs: Iterable[Pair], read: Callable[[Any], Sequence[Tensor]]) -> dict[str, Tensor]:
    """The unit vector of the mean difference between both sides, by layer, with the model in eval mode."""
    was_training = routing.model.training
    routing.model.eval()
    try:
        differences = [
            [one - two for one, two in zip(read(unwanted), read(clean), strict=True)] for unwanted, clean in pairs
        ]
    finally:
        routing.model.train(was_training)
    means = [torch.stack(of_layer).mean(0) for of_layer in zip(*differences, strict=True)]
    return {name: F.normalize(mean_R, dim=0) for name, mean_R in zip(routing.layers, means, strict=True)}
