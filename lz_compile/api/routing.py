"""``lz.routed_adapter``: two adapters of a layer, one of which learns from those rollouts only that are not flagged.

Without compiling, a call runs the kernel that is expected to be the fastest here. In a function that is compiled, by
whatever backend, it is one operator, ``layerzero::routing``, for which the kernel is chosen while compiling.

**Source** *GRPO gradient routing through a quarantine adapter*: what is routed, by what, and why by rollout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from lz_compile.api import eager
from lz_compile.api.arguments import PLAIN, is_plain
from lz_compile.api.routing_operands import Adapter, Rollouts
from lz_compile.api.routing_record import RoutingRecord
from lz_compile.errors import ArgumentError, TransformUnsupportedError
from lz_compile.ground import fingerprint
from lz_compile.lowering.kernel_operator import call_operator
from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import Arm, Operands, RoutingAttrs, RoutingFacts, reference
from lz_compile.runtime.problem import context as contexts

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
    given = Operands(
        tokens.of_rows(x), Vh, U, delta_S, A_q, B_q, v, weight, bias, None if base is None else tokens.of_rows(base),
        None, tokens.ids, None if tokens.ids is None else tokens.number, leaf,
    )  # fmt: skip
    said = arm, threshold, adapter.result_dtype()
    attrs = _attributes(given, *said)
    if torch.compiler.is_dynamo_compiling():
        out: torch.Tensor = torch.ops.layerzero.routing.default(*given.flat(), *said, fingerprint.traced_source())
    elif any(type(each) not in PLAIN for each in given.tensors):
        out = _own(given, attrs)
    else:
        out = _selected(given, attrs)
    return out.view((*x.shape[:-1], U.shape[0]))


# ---- choosing and running --------------------------------------------------------------------------------------------


def _operator(*given: Any) -> torch.Tensor:
    """The operator that graphs hold: which kernel it is, is decided where it runs, or where it is traced.

    All but ``source`` is as in the op's canonical layout.
    """
    *operands, arm, threshold, out_dtype, _source = given  # the last is for caches: see traced_source
    x = Operands(*operands)
    return _selected(x, _attributes(x, arm, threshold, out_dtype))


def _attributes(x: Operands, arm: Arm, threshold: float, out_dtype: torch.dtype) -> RoutingAttrs:
    return RoutingAttrs(
        arm=arm,
        gate=x.gate_kind(),
        has_rollout_ids=x.rollout is not None,
        has_weight=x.weight is not None,
        threshold=threshold,
        compute_dtype=torch.promote_types(x.x.dtype, torch.float32),
        out_dtype=out_dtype,
    )


def _selected(x: Operands, attrs: RoutingAttrs) -> torch.Tensor:
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return _transformed(x, attrs)
    if not eager.has_choice("routing", x.x.device.type):
        return _own(x, attrs)
    facts = _facts(x)
    if 0 in (facts.num_rollouts, facts.rollout_length, facts.in_features, facts.out_features):
        return _own(x, attrs)
    # A record is written, and so no operand of a proof.
    proven = {name: each for name, each in x.given().items() if name != "record"}
    kernel = eager.kernel_for("routing", attrs, facts, x.x.device, proven if is_plain(*x.tensors) else None)
    if kernel is None or kernel.call is None:
        return _own(x, attrs)
    found: torch.Tensor = eager.guarded(kernel, kernel.call, _own)(x, attrs)
    return found


def _transformed(x: Operands, attrs: RoutingAttrs) -> torch.Tensor:
    """Inside a transform, which no backward of ours survives: what autograd can see into."""
    if attrs.arm == "grad" or x.record is not None:
        what = "the arm 'grad'" if attrs.arm == "grad" else "a record"
        raise TransformUnsupportedError("lz.routed_adapter", what, "the arm 'none' or 'act' without a record")
    return reference(x, attrs)


def _own(x: Operands, attrs: RoutingAttrs) -> torch.Tensor:
    from lz_compile.lowering.kernels.routing import torch_routing

    return torch_routing.routing(x, attrs)


def _facts(x: Operands) -> RoutingFacts:
    """With a number for every size."""
    tokens = contexts.known_size(x.x.shape[0]) * contexts.known_size(x.x.shape[1])
    rollouts = contexts.known_size(x.count)
    is_recorded = torch.is_grad_enabled()
    return RoutingFacts(
        num_rollouts=rollouts,
        rollout_length=-(-tokens // max(rollouts, 1)),
        in_features=contexts.known_size(x.x.shape[2]),
        out_features=contexts.known_size(x.u.shape[0]),
        rank=contexts.known_size(x.vh.shape[0]),
        quarantine_rank=contexts.known_size(x.a_q.shape[0]),
        dtype=x.x.dtype,
        device=x.x.device.type,
        needs_grad=is_recorded and any(each.requires_grad for each in x.tensors),
        basis_needs_grad=is_recorded and (x.vh.requires_grad or x.u.requires_grad),
        has_record=x.record is not None,
    )


call_operator("routing", op, _operator, arm=str, threshold=float, out_dtype=torch.dtype)
