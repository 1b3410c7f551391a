"""What fits a routed adapter: its tensors, and the ways to say which token belongs to which rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lz_compile.lowering.routing_function import is_autocast

_INTEGERS = (torch.int32, torch.int64)


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

    def check(self, arm: str) -> None:
        """Refuse what is no adapter, before anything is computed.

        Raises:
            ValueError: shapes, dtypes or devices do not fit, or the arm has no direction.
        """
        if self.x.dim() not in (2, 3):
            raise ValueError(
                f"lz.routed_adapter: expected x [G, s, D] or [tokens, D], received {tuple(self.x.shape)}. Flatten it"
            )
        sizes = {"D": self.x.shape[-1], "R": self.delta_S.numel(), "Q": self.A_q.shape[0], "E": self.U.shape[0]}
        # Tables stand in functions: compiled code would check every entry of a module's at each call.
        shapes = {
            "Vh": "RD", "U": "ER", "delta_S": "R", "A_q": "QD", "B_q": "EQ", "v": "R", "weight": "ED", "bias": "E",
        }  # fmt: skip
        for name, dims in shapes.items():
            self._check_shape(name, getattr(self, name), tuple(sizes[dim] for dim in dims), dims)
        self._check_shape("base", self.base, (*self.x.shape[:-1], sizes["E"]), "as x, with E at the end")
        if arm != "none" and self.v is None:
            raise ValueError(
                f"lz.routed_adapter: the arm '{arm}' compares with a direction: expected v [R], received none"
            )
        self._check_kinds()

    def _check_shape(self, name: str, tensor: torch.Tensor | None, wanted: tuple[int, ...], dims: str) -> None:
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ValueError(
                f"lz.routed_adapter: expected {name} of shape {wanted} ({dims}), received {tuple(tensor.shape)}. "
                "D and E are the layer's sizes, R and Q the ranks"
            )

    def _check_kinds(self) -> None:
        is_cast = is_autocast(self.x)
        multiplied = ("Vh", "U", "A_q", "B_q", "weight", "bias")
        for name in ("x", *multiplied, "delta_S", "v", "base"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not tensor.is_floating_point():
                raise ValueError(
                    f"lz.routed_adapter: expected {name} of floating-point numbers, received {tensor.dtype}. Cast it"
                )
            if tensor.device != self.x.device:
                raise ValueError(
                    f"lz.routed_adapter: expected {name} on {self.x.device} as x is, received {tensor.device}. Move it"
                )
            if tensor.dtype != self.x.dtype and name in multiplied and not is_cast:
                raise ValueError(
                    f"lz.routed_adapter: expected {name} in the dtype of x, {self.x.dtype}, received {tensor.dtype}. Cast "
                    "one of them, or call it under torch.autocast"
                )

    def result_dtype(self) -> torch.dtype:
        """That of the products, or the wider one of the base."""
        where, found = self.x.device.type, self.x.dtype
        if is_autocast(self.x) and found != torch.float64:
            found = torch.get_autocast_dtype(where)
        return found if self.base is None else torch.promote_types(found, self.base.dtype)


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
        if rollouts is not None and cu_seqlens is not None:
            raise ValueError("lz.routed_adapter: expected rollouts or cu_seqlens, received both. Leave one of them out")
        if cu_seqlens is not None:
            return cls._packed(x, cu_seqlens, num_rollouts)
        if isinstance(rollouts, torch.Tensor):
            return cls._numbered(x, rollouts, num_rollouts)
        if num_rollouts is not None:
            raise ValueError("lz.routed_adapter: num_rollouts goes with the number of a rollout for every token")
        if rollouts is not None:
            return cls._uniform(x, rollouts)
        if x.dim() == 3:
            return cls(x.shape[0], x.shape[1], None)
        if is_needed:
            raise ValueError(
                f"lz.routed_adapter: the unit of routing is the rollout, and x {tuple(x.shape)} does not say where one "
                "ends: expected rollouts=(G, s), a number for each token, or cu_seqlens, received none. Tokens that are "
                "flagged one by one scatter: about half of those of a clean rollout pass by noise"
            )
        return cls(1, x.shape[0], None)

    @classmethod
    def _uniform(cls, x: torch.Tensor, rollouts: Sequence[int] | int) -> Rollouts:
        sizes = (rollouts,) if isinstance(rollouts, int) else tuple(rollouts)
        flat = x.shape[1:2] if x.dim() == 3 and x.shape[0] == 1 else x.shape[:-1]
        fits = len(sizes) == 2 and (tuple(x.shape[:-1]) == sizes or tuple(flat) == (sizes[0] * sizes[1],))
        if not fits:
            raise ValueError(
                f"lz.routed_adapter: expected x of rollouts {rollouts}, as (G, s), received {tuple(x.shape)}. Give "
                "rollouts=(G, s) as they are, or for rollouts of different lengths a number for each token, or cu_seqlens"
            )
        return cls(sizes[0], sizes[1], None)

    @classmethod
    def _packed(cls, x: torch.Tensor, cu_seqlens: torch.Tensor, num_rollouts: int | None) -> Rollouts:
        _check_integers("cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or (x.dim() == 3 and x.shape[0] != 1):
            raise ValueError(
                f"lz.routed_adapter: expected cu_seqlens [G + 1] of packed tokens [tokens, D], received "
                f"{tuple(cu_seqlens.shape)} and {tuple(x.shape)}. Pack the rollouts one behind the other"
            )
        size, count = x.shape[-2], cu_seqlens.shape[0] - 1
        if num_rollouts is not None and num_rollouts != count:
            raise ValueError(
                f"lz.routed_adapter: expected num_rollouts {count}, as cu_seqlens has them, received {num_rollouts}. Leave "
                "it out"
            )
        if _is_readable(cu_seqlens):
            _check_bounds(cu_seqlens.tolist(), size)
        steps = torch.arange(size, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        ends = cu_seqlens[1:].contiguous()
        ids = torch.bucketize(steps, ends, out_int32=True, right=True)
        return cls(count, size, ids.to(x.device))

    @classmethod
    def _numbered(cls, x: torch.Tensor, ids: torch.Tensor, num_rollouts: int | None) -> Rollouts:
        _check_integers("rollouts", ids)
        size = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
        if ids.shape != x.shape[:-1]:
            raise ValueError(
                f"lz.routed_adapter: expected a number of a rollout for each token, {tuple(x.shape[:-1])}, received "
                f"{tuple(ids.shape)}. Repeat it for the tokens of a rollout"
            )
        count = size if num_rollouts is None else num_rollouts
        if _is_readable(ids) and ids.numel() and int(ids.max()) >= count:
            raise ValueError(
                f"lz.routed_adapter: expected numbers of rollouts below {count}, received {int(ids.max())}. Number them "
                "from zero, or give num_rollouts"
            )
        return cls(count, size, ids.reshape(-1).to(x.device))

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` in the op's canonical layout: ``[G, S, D]``, or ``[1, N, D]`` of packed tokens."""
        if self.ids is not None:
            return tensor.reshape(1, -1, tensor.shape[-1])
        return tensor.reshape(self.number, self.length, tensor.shape[-1])


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether the numbers in a tensor may be looked at: no device has to be waited for, and nothing is traced."""
    return tensor.device.type == "cpu" and type(tensor) is torch.Tensor and not torch.compiler.is_compiling()


def _check_bounds(bounds: list[int], size: int) -> None:
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > size:
        raise ValueError(
            f"lz.routed_adapter: expected cu_seqlens to rise from 0 to {size}, the number of tokens, or less, received "
            f"{bounds if len(bounds) < 20 else [*bounds[:9], '...', *bounds[-9:]]}. Give where each rollout begins, and at "
            "last where the last one ends"
        )


def _check_integers(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _INTEGERS:
        raise ValueError(
            f"lz.routed_adapter: expected {name} in int32 or int64, received {tensor.dtype}. Cast it, as by .long()"
        )
