"""RMSNorm and LayerNorm in Triton, with gradients, and with a residual added before: one launch, two results.

A row that fits into a block is read once, several short ones at a time. A longer row is read again, which finds it in the
cache. The gradients of weight and bias are sums over rows: every program sums its own rows in a fixed order, and a second
kernel sums the programs, so that the same inputs give the same bits.

Statistics and sums are in float32, or float64 where the op or an operand is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lz_compile.lowering.kernels.norm import triton_kernels as norm_kernels
from lz_compile.lowering.ops.norm import NormAttrs
from lz_compile.lowering.triton_launch import FEW_ROWS, WIDE, Tiled, cdiv, dense, next_power_of_2, on, processors

#: The longest row that is kept in registers; a backward keeps four times as much.
LARGEST_BLOCK, LARGEST_BACKWARD_BLOCK = 16384, 8192
#: The part of a longer row that is read at a time.
PART = 4096
#: Columns that the programs of one multiprocessor have together, each a row of partial sums, and the most such programs.
PARTIAL, PROGRAMS = 8192, 4
#: Rows and columns of a tile of weight gradients of long rows, and programs over rows.
TALL, NARROW, GROUPS = 16, 128, 32
#: Rows and columns of a tile of partial sums.
PARTIAL_ROWS, PARTIAL_COLUMNS = 64, 32

_forward_tiled, _backward_tiled = Tiled(norm_kernels.forward), Tiled(norm_kernels.backward)


@dataclass(frozen=True)
class Norm:
    """One normalisation: ``[N, D]`` tensors whose last dimension has no gaps, and the constants of its kernels.

    ``largest_block`` is the longest row that is kept in registers, ``part`` what is read of a longer one at a time.
    """

    input: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    attrs: NormAttrs
    largest_block: int | None = None
    part: int = PART

    @cached_property
    def wide(self) -> torch.dtype:
        """The dtype of statistics and sums."""
        dtype = torch.promote_types(torch.promote_types(self.input.dtype, self.attrs.compute_dtype), torch.float32)
        for each in (self.weight, self.bias):
            dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
        return dtype

    def forward(self, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and what was normalised: the input, or its sum with a residual."""
        input, residual = dense(self.input), None if residual is None else dense(residual)
        rows, hidden = input.shape
        result = input.new_empty((rows, hidden), dtype=self.attrs.out_dtype)
        total = input if residual is None else input.new_empty((rows, hidden))
        if result.numel() == 0:
            return result, total
        other = input if residual is None else residual
        tensors = (input, other, self._weight, self._bias, result, total)
        strides = (input.stride(0), other.stride(0))
        constants = {**self._constants, "HAS_OTHER": residual is not None, "HAS_BIAS": self.bias is not None}
        block = next_power_of_2(hidden)
        with on(input.device):
            if block <= (self.largest_block or LARGEST_BLOCK):
                few = {"HAS_FEW_ROWS": rows < FEW_ROWS, "BLOCK": block}
                _forward_tiled.launch(_over(rows), *tensors, rows, hidden, *strides, **constants, **few)
            else:
                norm_kernels.forward_long[rows,](*tensors, hidden, *strides, **constants, BLOCK=self.part, num_warps=8)
        return result, total

    def backward(
        self, gradient: torch.Tensor, of_total: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of input, weight and bias; ``of_total`` is added to the first."""
        gradient, input = dense(gradient), dense(self.input)
        more = gradient if of_total is None else dense(of_total)
        rows, hidden = input.shape
        result = input.new_empty((rows, hidden))
        if result.numel() == 0:
            return result, _zeros(self.weight), _zeros(self.bias)
        strides = (gradient.stride(0), input.stride(0), more.stride(0))
        tensors = (gradient, input, self._weight, more, result)
        constants = {**self._constants, "HAS_TOTAL": of_total is not None}
        block = next_power_of_2(hidden)
        with on(input.device):
            if block <= (self.largest_block or LARGEST_BACKWARD_BLOCK):
                partial = self._partial(min(rows, processors(input.device) * min(max(PARTIAL // block, 1), PROGRAMS)))
                few = {"HAS_FEW_ROWS": rows < FEW_ROWS, "HAS_BIAS": self.bias is not None, "BLOCK": block}
                grid = (partial.shape[1],)
                _backward_tiled.launch(
                    lambda _: grid, *tensors, partial, rows, hidden, *strides, **constants, **few
                )  # fmt: skip
            else:
                partial = self._long_backward(tensors, strides, constants)
            return result, self._summed(partial[0], self.weight), self._summed(partial[1], self.bias)

    def _long_backward(
        self, tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...], constants: dict[str, Any]
    ) -> torch.Tensor:
        """The gradient of the input is written, partial sums of the weights' are returned."""
        gradient, input = tensors[:2]
        rows, hidden = input.shape
        statistics = input.new_empty((rows, 2), dtype=self.wide)
        norm_kernels.backward_long[rows,](
            *tensors, statistics, hidden, *strides, **constants, BLOCK=self.part, num_warps=8
        )
        if self.weight is None and self.bias is None:
            return self._partial(0)
        partial = self._partial(min(GROUPS, cdiv(rows, TALL)))
        norm_kernels.weights_long[cdiv(hidden, NARROW), partial.shape[1]](
            gradient, input, statistics, partial, rows, hidden, *strides[:2],
            HAS_WEIGHT=self.weight is not None, HAS_BIAS=self.bias is not None,
            WIDE=WIDE[self.wide], ROWS=TALL, BLOCK=NARROW,
        )  # fmt: skip
        return partial

    def _partial(self, programs: int) -> torch.Tensor:
        """A row of sums for each program, for weight and bias."""
        has_any = self.weight is not None or self.bias is not None
        return self.input.new_empty((2, programs, self.input.shape[1] if has_any else 0), dtype=self.wide)

    def _summed(self, partial: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor | None:
        if like is None:
            return None
        count, hidden = partial.shape
        result = torch.empty_like(like, memory_format=torch.contiguous_format)
        tile = {"ROWS": PARTIAL_ROWS, "BLOCK": PARTIAL_COLUMNS}
        norm_kernels.column_sums[cdiv(hidden, PARTIAL_COLUMNS),](
            partial, result, count, hidden, WIDE=WIDE[self.wide], **tile
        )
        return result

    @property
    def _weight(self) -> torch.Tensor:
        return self.input if self.weight is None else self.weight.contiguous()

    @property
    def _bias(self) -> torch.Tensor:
        return self.input if self.bias is None else self.bias.contiguous()

    @property
    def _constants(self) -> dict[str, Any]:
        attrs = self.attrs
        return {
            "IS_CENTRED": attrs.is_centred,
            "EPS": float(attrs.eps),
            "EPS_AT": attrs.eps_at,
            "OFFSET": float(attrs.weight_offset),
            "HAS_WEIGHT": self.weight is not None,
            "WIDE": WIDE[self.wide],
        }


def _zeros(like: torch.Tensor | None) -> torch.Tensor | None:
    return None if like is None else torch.zeros_like(like, memory_format=torch.contiguous_format)


def _over(rows: int) -> Any:
    return lambda constants: (cdiv(rows, constants["ROWS"]),)
