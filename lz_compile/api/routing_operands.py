"""What fits a routed adapter: its tensors, and the ways to say which token belongs to which rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lz_compile.api.arguments import Arguments, is_plain, remembered
from lz_compile.lowering.kernels.routing.function import is_autocast

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
        sizes = (rollouts,) if not isinstance(rollouts, (list, tuple)) else tuple(rollouts)
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
            return tensor.reshape(1, -1, tensor.shape[-1])
        return tensor.reshape(self.number, self.length, tensor.shape[-1])


def _check_bounds(given: Arguments, bounds: list[int], size: int) -> None:
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > size:
        shown = bounds if len(bounds) < 20 else [*bounds[:9], "...", *bounds[-9:]]
        advice = "Give where each rollout begins, and at last where the last one ends"
        raise given.wrong("cu_seqlens", f"to rise from 0 to {size}, the number of tokens, or less", shown, advice)
