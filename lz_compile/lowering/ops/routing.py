"""Gradient routing through a quarantine adapter: two adapters of a linear layer, one of which learns from some rollouts only.

``delta`` shifts the singular values of the layer in its frozen basis ``u``, ``vh``: the adapter that is kept. ``a_q`` and
``b_q`` are the quarantine, which is dropped later on. The value is the plain sum; only gradients are routed:

    a = x vh^T,  kept = (a * gate * delta) u^T,  result = x weight^T + bias + base + kept + (x a_q^T) b_q^T

Canonical layout, in which every kernel takes and returns it, of ``G`` rollouts of ``S`` tokens:

    x            [G, S, D]   packed: [1, S, D] of S tokens, whose rollouts are given
    vh, u        [R, D], [E, R]
    delta        [R]
    a_q, b_q     [Q, D], [E, Q]
    v            [R], never differentiated; what the arms compare with. Without an arm it is for the record alone
    weight, bias [E, D], [E]; absent: zero
    base         [G, S, E]; absent: zero
    gate         [G, R] for each rollout or [G, S, R] for each token; absent: one. Its gradient is what the source's gets
    rollout      [S], the rollout of every token of x [1, S, D], as an integer; those out of range are of none
    num_rollouts G, given where ``rollout`` is
    record       [G, C], see below
    result       [G, S, E] in ``attrs.out_dtype``

With the arm ``grad``, what the tokens of one rollout send to ``delta`` is summed, ``g_b``, and left out of the gradient of
``delta`` (and of nothing else) where its cosine with ``v`` is above the threshold; where that is NaN, so is the gradient.
With ``act`` the kept adapter of a token is detached where the cosine of ``a`` with ``v`` is above the threshold, which NaN is
not. Both norms of a cosine are at least :data:`EPS`.

``record`` is a leaf of zeros, never read, whose *gradient* says what a backward did, in the columns :data:`COLUMNS` and,
where it has ``R`` more, ``g_b`` before anything was left out. Kernels fill it; to the definition it is nothing.

**Source** *GRPO gradient routing through a quarantine adapter* (the layer, arms A and B, the finding on gates per token).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base_operands
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler

#: What is routed: nothing, the gradient of a rollout, or the activations of a token.
Arm: TypeAlias = Literal["none", "grad", "act"]
#: What there is a gate for.
Gate: TypeAlias = Literal["none", "rollout", "token"]

LAYOUT = "GSD"
EAGER_KERNEL = "torch.routing"
EXACT_DIMS: tuple[str, ...] = ()
BUCKETED_DIMS = (
    ("num_rollouts", "rollout_length"),
    ("num_rollouts",),
    ("rank",),
    ("quarantine_rank",),
    ("in_features",),
    ("out_features",),
)
TIMELESS_FEATURES: frozenset[str] = frozenset({"base"})

#: The least that the norms in a cosine count as.
EPS = 1e-6
#: Of a record: the cosine (that of ``act`` is the mean over tokens), the share of tokens that were left out, the norm of
#: ``g_b``, that of what reached ``delta``, and how many backwards are summed here.
COLUMNS = ("cosine", "flagged", "norm", "passed_norm", "calls")


@dataclass(frozen=True)
class RoutingAttrs(OpAttributes):
    """The attributes of one routed adapter.

    ``compute_dtype`` is the widest dtype in which the source sums the gradient of ``delta``; a kernel may round less, never
    more.
    """

    arm: Arm = "none"
    gate: Gate = "none"
    has_rollout_ids: bool = False
    has_weight: bool = False
    threshold: float = 0.0
    compute_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32


Attributes = RoutingAttrs
#: The operands that opaque kernels give gradients of: those of a step's are traced (``kernels/routing/function.py``).
DIFFERENTIABLE: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoutingFacts:
    """Sizes, dtype (of ``x``) and device of one routed adapter, for kernel selection.

    ``rollout_length`` is the mean where rollouts are packed. ``basis_needs_grad`` says that ``vh`` or ``u`` wants one.
    """

    num_rollouts: Size
    rollout_length: Size
    in_features: Size
    out_features: Size
    rank: Size
    quarantine_rank: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    basis_needs_grad: bool = False
    has_record: bool = False


#: By the names that descriptors use, in the order of the letters ``G S D E R Q``.
SIZES = ("num_rollouts", "rollout_length", "in_features", "out_features", "rank", "quarantine_rank")
SHAPES: Mapping[str, str] = {
    "x": "G|1 S D",
    "vh": "R D",
    "u": "E R",
    "delta": "R",
    "a_q": "Q D",
    "b_q": "E Q",
    "v": "R",
    "weight": "E D",
    "bias": "E",
    "base": "G|1 S E",
    "gate": "... R",
    "rollout": "S",
    "num_rollouts": "",
    "record": "... C",
}
#: What operands are that are no tensors of floating-point numbers.
KINDS: Mapping[str, str] = {"rollout": "int64", "num_rollouts": "count"}
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {each: {"arm": each} for each in get_args(Arm)}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {
    "num_rollouts": (8,),
    "rollout_length": (512,),
    "in_features": (1024,),
    "out_features": (1024,),
    "rank": (64,),
    "quarantine_rank": (16,),
}


@operands
class Operands(base_operands.Operands):
    """Tokens, the layer, its two adapters, and what is known of rollouts; shapes as in the module's legend."""

    x: torch.Tensor
    vh: torch.Tensor
    u: torch.Tensor
    delta: torch.Tensor
    a_q: torch.Tensor
    b_q: torch.Tensor
    v: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    base: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    rollout: torch.Tensor | None = None
    num_rollouts: int | None = None
    record: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """How many rollouts there are."""
        return self.x.shape[0] if self.num_rollouts is None else self.num_rollouts

    def gate_kind(self) -> Gate:
        """What there is a gate for."""
        return "none" if self.gate is None else "rollout" if self.gate.dim() == 2 else "token"


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[RoutingAttrs, RoutingFacts]:
    """The attributes, of which some are given, and the facts of a routed adapter over tensors (real or fake)."""
    arm = given.get("arm", "none")
    if arm != "none" and x.v is None:
        raise MisfitError("routing", "v", f"to be given with the arm {arm}", "none")
    if (x.rollout is None) != (x.num_rollouts is None):
        raise MisfitError("routing", "rollout", "and num_rollouts together", "one of them")
    groups, length, wide_in, wide_out, rank, few = (sizes[each] for each in "GSDERQ")
    count = groups if x.num_rollouts is None else x.num_rollouts
    if x.rollout is not None and groups != 1:
        raise MisfitError("routing", "x", "[1, N, D] where rollout is given", tuple(x.x.shape))
    shapes = ((count, rank), (groups, length, rank))
    if x.gate is not None and tuple(x.gate.shape) not in shapes:
        raise MisfitError("routing", "gate", f"of shape {shapes[0]} or {shapes[1]}", tuple(x.gate.shape))
    dtype = x.x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    told = {"gate": x.gate_kind(), "has_rollout_ids": x.rollout is not None, "has_weight": x.weight is not None}
    attrs = RoutingAttrs(**{"compute_dtype": wide, "out_dtype": dtype, **given, **told})
    lengths = (count, -(-groups * length // max(count, 1)), wide_in, wide_out, rank, few)
    wants = x.wants_gradient(), x.wants_gradient("vh", "u"), x.record is not None
    return attrs, RoutingFacts(*lengths, dtype, x.x.device.type, *wants)


def fake(x: Operands, attrs: RoutingAttrs) -> torch.Tensor:
    """An empty result, contiguous as kernels give it."""
    return x.x.new_empty((*x.x.shape[:2], x.u.shape[0]), dtype=attrs.out_dtype)


def reference(x: Operands, attrs: RoutingAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the wider dtype of ``x`` (float64 is the ground truth of every test).

    Every rollout has a copy of ``delta``, so that the gradient of a copy is ``g_b``; what flows back through the copying
    is filtered. With the other arms all of it is for autograd to see.
    """
    wide = torch.promote_types(torch.promote_types(x.x.dtype, attrs.compute_dtype), torch.float32)
    x_GSD, vh, u, delta, a_q, b_q = (each.to(wide) for each in (x.x, x.vh, x.u, x.delta, x.a_q, x.b_q))
    place = places(x_GSD, x.rollout, x.num_rollouts)
    a_GSR = x_GSD @ vh.T
    direction = None if x.v is None else x.v.detach().to(wide)
    copies = delta.expand(x.count + 1, -1)
    if attrs.arm == "grad":
        copies = _Copies.apply(delta, direction, x.count, attrs.threshold)  # type: ignore[no-untyped-call]
    gated_GSR = a_GSR if x.gate is None else a_GSR * spread(x.gate.to(wide), place)
    kept = (gated_GSR * spread(copies, place)) @ u.T
    if attrs.arm == "act":
        assert direction is not None, "the act arm has a direction"
        is_flagged = (cosine(a_GSR.detach(), direction) > attrs.threshold).unsqueeze(-1)
        kept = torch.where(is_flagged, kept.detach(), kept)
    total = kept + (x_GSD @ a_q.T) @ b_q.T
    if x.weight is not None:
        total = total + x_GSD @ x.weight.to(wide).T
    for summand in (x.bias, x.base):
        total = total if summand is None else total + summand.to(wide)
    return total.to(attrs.out_dtype)


class _Copies(torch.autograd.Function):
    """``delta`` once for every rollout, and once more for tokens of none; backward leaves flagged rollouts out."""

    @staticmethod
    def forward(ctx: Any, delta: torch.Tensor, v: torch.Tensor, count: int, threshold: float) -> torch.Tensor:
        ctx.v, ctx.threshold = v, threshold
        return delta.repeat(count + 1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = gradient[-1].clone()
        for g in gradient[:-1]:
            found = cosine(g, ctx.v)
            if not found > ctx.threshold:
                total += torch.where(found.isnan(), found, g)
        return total, None, None, None


def cosine(g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of the last dimension of ``g [..., R]`` with ``v [R]``, where neither norm counts as less than :data:`EPS`."""
    lengths: torch.Tensor = g.norm(dim=-1).clamp_min(EPS) * v.norm().clamp_min(EPS)
    return (g * v).sum(-1) / lengths


def places(x: torch.Tensor, rollout: torch.Tensor | None, num_rollouts: int | None) -> torch.Tensor:
    """The number of every token's rollout, ``[G, S]``; tokens of none have the number after the last."""
    groups, length, _ = x.shape
    if rollout is None:
        return torch.arange(groups, device=x.device).unsqueeze(1).expand(groups, length)
    assert num_rollouts is not None, "the rollouts of tokens are numbered"
    ids = rollout.long()
    return torch.where((ids < 0) | (ids >= num_rollouts), num_rollouts, ids).unsqueeze(0)


def spread(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """``[G, S, R]`` of one row for every rollout (and perhaps one more); of rows for every token, the same."""
    if rows.dim() == 3:
        return rows
    beyond = torch.nn.functional.pad(rows, (0, 0, 0, 1), value=1.0)  # a token of no rollout has no gate
    return beyond[place]


def features(attrs: RoutingAttrs, facts: RoutingFacts) -> dict[str, str]:
    """What a kernel must support for this adapter: feature name (``supports`` in descriptors) and what asks for it."""
    needed = {
        "grad_arm": attrs.arm == "grad" and "gradients that are routed by rollout",
        "act_arm": attrs.arm == "act" and "activations that are routed by token",
        "rollout_gate": attrs.gate == "rollout" and "a gate for each rollout",
        "token_gate": attrs.gate == "token" and "a gate for each token",
        "rollout_ids": attrs.has_rollout_ids and "rollouts of any length",
        "weight": attrs.has_weight and "the layer itself",
        "training": facts.needs_grad and "gradients",
        "basis_gradient": facts.basis_needs_grad and "gradients of the basis",
        "record": facts.has_record and "a record of what was routed",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


def _written(attrs: RoutingAttrs, *given: torch.Tensor) -> torch.Tensor:
    """The op as models spell it: gradients by rollout are read off a gate of ones, the last input."""
    x, vh, u, delta, a_q, b_q, *rest = given
    a = x @ vh.T
    inner = a * rest[1] * delta if attrs.arm == "grad" else a * delta
    kept = inner @ u.T
    if attrs.arm == "act":
        is_flagged = torch.nn.functional.cosine_similarity(a, rest[0], -1, EPS) > attrs.threshold
        kept = torch.where(is_flagged.unsqueeze(-1), kept.detach(), kept)
    return kept + (x @ a_q.T) @ b_q.T


@sampler("grad")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with random inputs."""
    (rollouts, length, wide, out, rank, few), variant = asked.of(*SIZES), asked.variant
    inputs = [
        asked.random(rollouts, length, wide),
        asked.random(rank, wide, seeks=False, scale=wide**-0.5),
        asked.random(out, rank, seeks=False, scale=rank**-0.5),
        asked.random(rank),
        asked.random(few, wide, scale=wide**-0.5),
        asked.random(out, few),
    ]
    inputs += [asked.random(rank, seeks=False)] if variant != "none" else []
    inputs += [torch.ones_like(inputs[6]).expand(rollouts, 1, rank).clone()] if variant == "grad" else []
    if variant == "grad":
        inputs[-1].requires_grad_(asked.is_training)

    def canonical(*given: torch.Tensor) -> Operands:
        return Operands(*given[: 6 if variant == "none" else 7])  # type: ignore[arg-type]  # the first seven are tensors

    return Sample.of(inputs, canonical, _written, arm=variant)
