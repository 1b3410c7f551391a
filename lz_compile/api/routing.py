"""``lz.routed_adapter``: two adapters of a layer, one of which learns from those rollouts only that are not flagged.

Without compiling, a call runs the kernel that is expected to be the fastest here. In a function that is compiled, by
whatever backend, it is one operator, ``layerzero::routing``, for which the kernel is chosen while compiling.

**Source** *GRPO gradient routing through a quarantine adapter*: what is routed, by what, and why by rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import PLAIN, Arguments, is_plain, is_transformed, recorded_number, remembered
from lz_compile.api.routing_record import RoutingRecord
from lz_compile.errors import ArgumentError, TransformUnsupportedError
from lz_compile.ground.isolation import is_autocast
from lz_compile.lowering.kernel_operator import call_operator
from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import Arm, Operands, RoutingAttrs, RoutingFacts, reference
from lz_compile.runtime.problem import context as contexts


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
    if torch.compiler.is_dynamo_compiling():
        out: torch.Tensor = _traced(given, *said)
    elif any(type(each) not in PLAIN for each in given.tensors):
        out = _own(given, _problem(given, *said)[0])
    else:
        out = _called(given, *said)
    return out.view((*x.shape[:-1], U.shape[0]))


# ---- choosing and running --------------------------------------------------------------------------------------------


def _problem(x: Operands, arm: Arm, threshold: float, out_dtype: torch.dtype) -> tuple[RoutingAttrs, RoutingFacts]:
    known = x if x.num_rollouts is None else replace(x, num_rollouts=contexts.known_size(x.num_rollouts))
    return eager.problem_of(known, arm=arm, threshold=threshold, out_dtype=out_dtype)


def _called(x: Operands, arm: Arm, threshold: float, out_dtype: torch.dtype) -> torch.Tensor:
    attrs, facts = _problem(x, arm, threshold, out_dtype)
    if is_transformed():
        return _transformed(x, attrs)
    sizes = (facts.num_rollouts, facts.rollout_length, facts.in_features, facts.out_features)
    if 0 in sizes or not eager.has_choice("routing", x.x.device.type):
        return _own(x, attrs)
    # A record is written, and so no operand of a proof.
    proven = {name: each for name, each in x.given().items() if name != "record"}
    kernel = eager.kernel_for("routing", attrs, facts, x.x.device, proven if is_plain(*x.tensors) else None)
    if kernel is None or kernel.call is None:
        return _own(x, attrs)
    found: torch.Tensor = eager.guarded(kernel.kernel_id, kernel.call, _own)(x, attrs)
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


_traced = call_operator("routing", op, _called, arm=str, threshold=float, out_dtype=torch.dtype)


# ---- what fits: tensors, and the ways to say which token belongs to which rollout ------------------------------------


_FUNCTION = "routed_adapter"


class Adapter(NamedTuple):
    """The tensors of ``lz.routed_adapter``, by the names of its parameters."""

    x: torch.Tensor
    Vh: torch.Tensor
    U: torch.Tensor
    delta_S: torch.Tensor
    A_q: torch.Tensor
    B_q: torch.Tensor
    v: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    base: torch.Tensor | None

    def check(self, arm: str, threshold: float) -> None:
        """Refuse what is no adapter, before anything is computed.

        Raises:
            ArgumentError: shapes, dtypes or devices do not fit, the arm has no direction, or the threshold is no number.
        """
        _check_adapter(*self, arm, threshold)

    def result_dtype(self) -> torch.dtype:
        """That of the products, or the wider one of the base."""
        where, found = self.x.device.type, self.x.dtype
        if is_autocast(self.x) and found != torch.float64:
            found = torch.get_autocast_dtype(where)
        return found if self.base is None else torch.promote_types(found, self.base.dtype)


@remembered
def _check_adapter(*arguments: Any) -> None:
    *tensors, arm, threshold = arguments
    x, vh, u, delta, a_q, b_q, v, weight, bias, base = tensors
    given = Arguments(_FUNCTION)
    given.one_of("arm", arm, ("none", "grad", "act"))
    given.number("threshold", threshold)
    given.tensor("x", x, "... D")
    if x.dim() not in (2, 3):
        raise given.wrong("x", "[G, s, D] or [tokens, D]", tuple(x.shape), "Flatten it")
    given.tensor("delta_S", delta, "R")
    given.tensor("Vh", vh, "R D")
    given.tensor("U", u, "E R")
    given.tensor("A_q", a_q, "Q D")
    given.tensor("B_q", b_q, "E Q")
    if arm != "none" and v is None:
        raise given.wrong(
            "v", f"[R], the direction that the arm '{arm}' compares with", "none", "Give it, or the arm 'none'"
        )
    given.tensor("v", v, "R", optional=True)
    given.tensor("weight", weight, "E D", optional=True)
    given.tensor("bias", bias, "E", optional=True)
    given.tensor("base", base, "... E", optional=True)
    if base is not None and base.shape[:-1] != x.shape[:-1]:
        raise given.wrong("base", f"of shape {(*x.shape[:-1], u.shape[0])}, as x, with E at the end", tuple(base.shape))
    if not is_autocast(x):
        given.equal_dtypes("x", x, Vh=vh, U=u, A_q=a_q, B_q=b_q, weight=weight, bias=bias)


class Rollouts(NamedTuple):
    """Which token belongs to which rollout: ``number`` of ``length`` tokens, or ``ids [N]`` in ``number`` rollouts."""

    number: int
    length: int
    ids: torch.Tensor | None

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        rollouts: tuple[int, int] | torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        num_rollouts: int | None,
        *,
        is_needed: bool,
    ) -> Rollouts:
        """Those of the tokens of x, as the parameters of ``lz.routed_adapter`` say.

        Raises:
            ValueError: they say nothing where something is needed, or say it twice, or of other tokens.
        """
        given = Arguments(_FUNCTION)
        if num_rollouts is not None:
            given.number("num_rollouts", num_rollouts, 0, whole=True)
        if rollouts is not None and cu_seqlens is not None:
            raise given.wrong("rollouts", "or cu_seqlens", "both", "Leave one of them out")
        if cu_seqlens is not None:
            return cls._packed(x, cu_seqlens, num_rollouts)
        if isinstance(rollouts, torch.Tensor):
            return cls._numbered(x, rollouts, num_rollouts)
        if num_rollouts is not None:
            expected = "with the number of a rollout for every token"
            raise given.wrong("num_rollouts", expected, num_rollouts, "Leave it out, or give rollouts as a tensor")
        if rollouts is not None:
            return cls._uniform(x, rollouts)
        if x.dim() == 3:
            return cls(x.shape[0], x.shape[1], None)
        if is_needed:
            expected = "as (G, s), a number for each token, or cu_seqlens"
            why = f"the unit of routing is the rollout, and x {tuple(x.shape)} does not say where one ends"
            advice = "Tokens that are flagged one by one scatter: about half of those of a clean rollout pass by noise"
            raise given.wrong("rollouts", expected, f"none: {why}", advice)
        return cls(1, x.shape[0], None)

    @classmethod
    def _uniform(cls, x: torch.Tensor, rollouts: Sequence[int] | int) -> Rollouts:
        both = rollouts if isinstance(rollouts, (list, tuple)) else (rollouts,)
        sizes = tuple([recorded_number(each) for each in both])
        flat = x.shape[1:2] if x.dim() == 3 and x.shape[0] == 1 else x.shape[:-1]
        are_sizes = len(sizes) == 2 and all(isinstance(size, (int, torch.SymInt)) for size in sizes)
        fits = are_sizes and (tuple(x.shape[:-1]) == sizes or tuple(flat) == (sizes[0] * sizes[1],))
        if not fits:
            expected = f"as (G, s), of as many tokens as x {tuple(x.shape)} has"
            advice = "For rollouts of different lengths give a number for each token, or cu_seqlens"
            raise Arguments(_FUNCTION).wrong("rollouts", expected, rollouts, advice)
        return cls(sizes[0], sizes[1], None)

    @classmethod
    def _packed(cls, x: torch.Tensor, cu_seqlens: torch.Tensor, num_rollouts: int | None) -> Rollouts:
        given = Arguments(_FUNCTION)
        given.tensor("x", x)
        given.tensor("cu_seqlens", cu_seqlens, kind="index", anywhere=True)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or (x.dim() == 3 and x.shape[0] != 1):
            expected = "[G + 1] of packed tokens [tokens, D]"
            found = f"{tuple(cu_seqlens.shape)} and {tuple(x.shape)}"
            raise given.wrong("cu_seqlens", expected, found, "Pack the rollouts one behind the other")
        size, count = x.shape[-2], cu_seqlens.shape[0] - 1
        if num_rollouts is not None and num_rollouts != count:
            raise given.wrong("num_rollouts", f"{count}, as cu_seqlens has them", num_rollouts, "Leave it out")
        if is_plain(cu_seqlens) and cu_seqlens.device.type == "cpu":
            _check_bounds(given, cu_seqlens.tolist(), size)
        steps = torch.arange(size, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        ends = cu_seqlens[1:].contiguous()
        ids = torch.bucketize(steps, ends, out_int32=True, right=True)
        return cls(count, size, ids.to(x.device))

    @classmethod
    def _numbered(cls, x: torch.Tensor, ids: torch.Tensor, num_rollouts: int | None) -> Rollouts:
        given = Arguments(_FUNCTION)
        given.tensor("x", x)
        given.tensor("rollouts", ids, kind="index", anywhere=True)
        size = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
        if ids.shape != x.shape[:-1]:
            expected = f"as a number for each token, {tuple(x.shape[:-1])}"
            raise given.wrong("rollouts", expected, tuple(ids.shape), "Repeat it for the tokens of a rollout")
        count = size if num_rollouts is None else num_rollouts
        if is_plain(ids) and ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= count:
            advice = "Number them from zero, or give num_rollouts"
            raise given.wrong("rollouts", f"as numbers of rollouts below {count}", int(ids.max()), advice)
        return cls(count, size, ids.reshape(-1).to(x.device))

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` in the op's canonical layout: ``[G, S, D]``, or ``[1, N, D]`` of packed tokens."""
        if self.ids is not None:
            return tensor.flatten(0, -2).unsqueeze(0)
        return tensor.reshape(self.number, self.length, tensor.shape[-1])


def _check_bounds(given: Arguments, bounds: list[int], size: int) -> None:
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > size:
        shown = bounds if len(bounds) < 20 else [*bounds[:9], "...", *bounds[-9:]]
        advice = "Give where each rollout begins, and at last where the last one ends"
        raise given.wrong("cu_seqlens", f"to rise from 0 to {size}, the number of tokens, or less", shown, advice)
