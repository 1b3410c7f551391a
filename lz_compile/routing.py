"""``lz.routed_adapter``: two adapters of a layer, one of which learns from those rollouts only that are not flagged.

Without compiling, a call runs the kernel that is expected to be the fastest here. In a function that is compiled, by
whatever backend, it is one operator, ``layerzero::routing``, for which the kernel is chosen while compiling.

**Source** *GRPO gradient routing through a quarantine adapter*: what is routed, by what, and why by rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.autograd import forward_ad

from lz_compile.arguments import PLAIN, is_plain
from lz_compile.errors import ArgumentError, TransformUnsupportedError
from lz_compile.lowering.ops.routing import Arm, RoutingAttrs, RoutingFacts, reference
from lz_compile.routing_operands import Adapter, Rollouts
from lz_compile.routing_record import RoutingRecord
from lz_compile.runtime import context as contexts
from lz_compile.runtime import eager, fingerprint, health, policy

__all__ = ["RoutingRecord", "routed_adapter"]


def routed_adapter(
    x: torch.Tensor,
    Vh: torch.Tensor,
    U: torch.Tensor,
    delta_S: torch.Tensor,
    A_q: torch.Tensor,
    B_q: torch.Tensor,
    *,
    v: torch.Tensor | None = None,
    arm: Arm = "grad",
    rollouts: tuple[int, int] | torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_rollouts: int | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    threshold: float = 0.0,
    record: RoutingRecord | None = None,
) -> torch.Tensor:
    """``x weight^T + bias + base + U ((Vh x) * delta_S) + B_q (A_q x)``, whose gradients are routed; the value never is.

    With the arm ``grad``, what all tokens of a rollout together would send to ``delta_S`` is compared with ``v``. Where the
    cosine is above the threshold, the rollout is flagged, and left out of the gradient of ``delta_S``; where it is NaN, so is
    that gradient. With ``act`` a token is flagged, where the cosine of ``Vh x`` with ``v`` is above the threshold: the kept
    adapter gets nothing from it, and ``x`` gets nothing through the kept adapter. With ``none`` nothing is routed. The
    quarantine, ``A_q`` and ``B_q``, and whatever else there is learn from every rollout. What is routed depends on operands
    and gradients, and on nothing else.

    There is no second derivative, and ``torch.func`` does not transform the arm ``grad``. Under autocast products are in its
    dtype; sums of gradients by rollout are in float32 at least.

    Args:
        x: the input of the layer.
        Vh: of the frozen basis, what is projected on.
        U: of the frozen basis, what the projection comes back by.
        delta_S: the adapter that is kept, a shift of the singular values. Zeros are routed like all others.
        A_q: of the quarantine, the projection.
        B_q: of the quarantine, what it comes back by.
        v: a direction to compare with, never differentiated. The arm ``none`` has one for its record, or none.
        arm: what is routed.
        rollouts: the number of rollouts and of tokens in each; or the number of its rollout for every token, in any order,
            where a token with a number below zero belongs to none. By default the first dimension of x is that of rollouts.
        cu_seqlens: where packed rollouts begin and, at last, end, in place of ``rollouts``; tokens after that are of none.
        num_rollouts: more than the largest number of a rollout, by default the number of tokens, which is enough where
            rollouts are numbered from zero without gaps, but takes memory (and a GPU time) for as many. Tokens with larger
            numbers are refused on a CPU, and are of none where nobody can look: on other devices, and in compiled functions.
            With ``cu_seqlens`` it is known.
        weight: of the layer itself; by default the layer is no part of this.
        bias: of the layer.
        base: anything to add, such as the value of the layer where it was computed before.
        threshold: of the cosine, a finite number.
        record: is told by every backward what it did.

    Shapes:
        x ``[G, s, D]``, ``[G * s, D]`` or packed ``[tokens, D]``, rollouts one number for each token, cu_seqlens
        ``[G + 1]``; Vh ``[R, D]``, U ``[E, R]``, delta_S and v ``[R]``, A_q ``[Q, D]``, B_q ``[E, Q]``, weight ``[E, D]``,
        bias ``[E]``. The base and the result are shaped like x, with E at the end.

    Raises:
        ArgumentError: the tensors do not fit together, what an arm needs is missing, or the threshold is no finite number.
        TransformUnsupportedError: it is the arm ``grad``, or has a record, in a transform of ``torch.func``.
        DoubleBackwardError: (in backward) a graph of the gradients is asked for.
    """
    adapter = Adapter(x, Vh, U, delta_S, A_q, B_q, v, weight, bias, base)
    adapter.check(arm, threshold)
    if record is not None and not isinstance(record, RoutingRecord):
        raise ArgumentError("routed_adapter", "record", "as an lz.RoutingRecord", type(record).__name__)
    tokens = Rollouts.of(x, rollouts, cu_seqlens, num_rollouts, is_needed=arm == "grad" or record is not None)
    leaf = None if record is None else record.leaf(tokens.number, delta_S.shape[0], x.device)
    attrs = RoutingAttrs(
        arm=arm,
        has_rollout_ids=tokens.ids is not None,
        has_weight=weight is not None,
        threshold=threshold,
        compute_dtype=torch.promote_types(x.dtype, torch.float32),
        out_dtype=adapter.result_dtype(),
    )
    given = (
        tokens.of_rows(x), Vh, U, delta_S, A_q, B_q, v, weight, bias, None if base is None else tokens.of_rows(base),
        None, tokens.ids, None if tokens.ids is None else tokens.number, leaf,
    )  # fmt: skip
    if torch.compiler.is_dynamo_compiling():
        out: torch.Tensor = torch.ops.layerzero.routing.default(*given, *_fields(attrs), fingerprint.traced_source())
    elif any(type(each) not in PLAIN for each in given if isinstance(each, torch.Tensor)):
        out = _own(*given, attrs=attrs)
    else:
        out = _selected(given, attrs)
    return out.view((*x.shape[:-1], U.shape[0]))


# ---- choosing and running --------------------------------------------------------------------------------------------


def _fields(attrs: RoutingAttrs) -> tuple[str, float, torch.dtype]:
    """What the operands do not say."""
    return attrs.arm, attrs.threshold, attrs.out_dtype


def _operator(
    x: torch.Tensor,
    vh: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    a_q: torch.Tensor,
    b_q: torch.Tensor,
    v: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    base: torch.Tensor | None,
    gate: torch.Tensor | None,
    rollout: torch.Tensor | None,
    num_rollouts: int | None,
    record: torch.Tensor | None,
    arm: str,
    threshold: float,
    out_dtype: torch.dtype,
    source: str,
) -> torch.Tensor:
    """The operator that graphs hold: which kernel it is, is decided where it runs, or where it is traced.

    All but ``source`` is as in the op's canonical layout.
    """
    del source  # for caches: see traced_source
    attrs = RoutingAttrs(
        arm=arm,  # type: ignore[arg-type]  # checked where it was called
        gate="none" if gate is None else "rollout" if gate.dim() == 2 else "token",
        has_rollout_ids=rollout is not None,
        has_weight=weight is not None,
        threshold=threshold,
        compute_dtype=torch.promote_types(x.dtype, torch.float32),
        out_dtype=out_dtype,
    )
    given = (x, vh, u, delta, a_q, b_q, v, weight, bias, base, gate, rollout, num_rollouts, record)
    return _selected(given, attrs)


#: Of the op's operands.
_NAMES = tuple(name for name in signature(reference).parameters if name != "attrs")


def _selected(operands: tuple[Any, ...], attrs: RoutingAttrs) -> torch.Tensor:
    own = partial(_own, attrs=attrs)
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed(operands, attrs)
    if not eager.has_choice("routing", operands[0].device.type):
        return own(*operands)
    facts = _facts(operands)
    if 0 in (facts.num_rollouts, facts.rollout_length, facts.in_features, facts.out_features):
        return own(*operands)
    # A record is written, and so no operand of a proof.
    proven = {name: each for name, each in zip(_NAMES, operands, strict=True) if name != "record"}
    is_real = is_plain(*[each for each in operands if isinstance(each, torch.Tensor)])
    kernel = eager.kernel_for("routing", attrs, facts, operands[0].device, proven if is_real else None)
    if kernel is None or kernel.call is None:
        return own(*operands)

    def complete(*operands: Any) -> torch.Tensor:
        eager.forget()
        return own(*operands)

    enabled = policy.current().settings.fallback_enabled
    run = partial(_called, kernel.call, attrs)
    return health.guarded(kernel.kernel_id, run, complete, *operands, fallback_enabled=enabled)


def _transformed(operands: tuple[Any, ...], attrs: RoutingAttrs) -> torch.Tensor:
    """Inside a transform, which no backward of ours survives: what autograd can see into."""
    if attrs.arm == "grad" or operands[-1] is not None:
        what = "the arm 'grad'" if attrs.arm == "grad" else "a record"
        raise TransformUnsupportedError("lz.routed_adapter", what, "the arm 'none' or 'act' without a record")
    return reference(*operands, attrs=attrs)


def _own(*operands: Any, attrs: RoutingAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels import torch_routing

    return torch_routing.routing(*operands, attrs=attrs)


def _called(call: Callable[..., Any], attrs: RoutingAttrs, *operands: Any) -> torch.Tensor:
    found: torch.Tensor = call(*operands, attrs=attrs)
    return found


def _facts(operands: tuple[Any, ...]) -> RoutingFacts:
    """With a number for every size."""
    x, vh, u, _, a_q, *_ = operands
    count = operands[12]
    tokens = contexts.known_size(x.shape[0]) * contexts.known_size(x.shape[1])
    rollouts = contexts.known_size(x.shape[0]) if count is None else contexts.known_size(count)
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    is_recorded = torch.is_grad_enabled()
    return RoutingFacts(
        num_rollouts=rollouts,
        rollout_length=-(-tokens // max(rollouts, 1)),
        in_features=contexts.known_size(x.shape[2]),
        out_features=contexts.known_size(u.shape[0]),
        rank=contexts.known_size(vh.shape[0]),
        quarantine_rank=contexts.known_size(a_q.shape[0]),
        dtype=x.dtype,
        device=x.device.type,
        needs_grad=is_recorded and any(each.requires_grad for each in tensors),
        basis_needs_grad=is_recorded and (vh.requires_grad or u.requires_grad),
        has_record=operands[13] is not None,
    )


_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
_LIBRARY.define(
    "routing" + torch.library.infer_schema(_operator, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("routing", _operator, "CompositeImplicitAutograd")
