"""A scan in Triton, step by step, with gradients, for every structure that a step may have.

The state stays in registers: every program holds some columns of one head's, and columns do not mix. The backward keeps the
state before every span of steps and computes those inside of a span once more, so that its memory is linear in the length
over the span. What sums over columns is summed by program first, in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lz_compile.lowering.kernels.scan import triton_kernels as scan_kernels
from lz_compile.lowering.ops.scan import DIMS, Operands, ScanAttrs, ScanSizes, fake, sizes_of
from lz_compile.lowering.triton_launch import WIDE, cdiv, next_power_of_2, on

#: Elements of the state that a program holds, by preference, and those that a warp does.
TILE, WARP_TILE = 1024, 1024
#: Steps of a span.
SPAN = 32


@dataclass(frozen=True)
class Scan:
    """One scan over canonical operands with any strides."""

    x: Operands
    attrs: ScanAttrs
    tile: int = TILE
    span: int = SPAN

    @cached_property
    def sizes(self) -> ScanSizes:
        """Of the scan."""
        return sizes_of(self.x)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the state."""
        return self.x.wide(self.attrs)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads and the last state, contiguous."""
        reads, last = fake(self.x, self.attrs)
        tensors, strides = self._arguments
        self._launch(scan_kernels.forward, (*tensors, reads, last), strides, {})
        return reads, last

    def backward(self, of_reads: torch.Tensor, of_last: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients of the operands that there are, each of its operand's shape and dtype, contiguous."""
        sizes, wide = self.sizes, self.wide
        batch, heads, length = sizes[:3]
        state = (batch, heads, sizes.key_dim, sizes.value_dim)
        spans = -(-length // self.span)
        kept = self._empty((batch * heads, spans, *state[2:]), wide)
        states = self._empty((batch * heads, self.span, *state[2:]), wide)
        found = {name: self._empty(shape, wide) for name, shape in self._gradient_shapes().items()}
        tensors, strides = self._arguments
        gradients = (found.get(name, kept) for name in DIMS)
        given = (of_reads.contiguous(), of_last.contiguous(), *tensors, states, kept, *gradients)
        self._launch(scan_kernels.backward, given, strides, {"SPAN": self.span})
        return {name: self._of_operand(name, found[name]) for name in self.x.given()}

    def _of_operand(self, name: str, found: torch.Tensor) -> torch.Tensor:
        """A gradient summed over programs and over everything that its operand broadcasts over."""
        operand = self.x.given()[name]
        found = found.sum(0) if found.dim() > operand.dim() else found
        return found.sum_to_size(operand.shape).to(operand.dtype).contiguous()

    def _gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what the backward kernel writes; what sums over columns has a summand for each program in front."""
        sizes = self.sizes
        steps = (sizes.batch, sizes.heads, sizes.length)
        parts = cdiv(sizes.value_dim, self._block)
        found: dict[str, tuple[int, ...]] = {"state": (*steps[:2], sizes.key_dim, sizes.value_dim)}
        found["query"] = (parts, *steps, sizes.reads, sizes.key_dim)
        for name in ("decay", "drive"):
            operand = getattr(self.x, name)
            if operand is not None:
                shape = (*steps, *operand.shape[3:])
                found[name] = shape if operand.shape[4] > 1 else (parts, *shape)
        if sizes.rank:
            found["left"] = (parts, *steps, sizes.rank, sizes.key_dim)
            found["right"] = (*steps, sizes.rank, sizes.value_dim)
        if self.x.erase is not None:
            found["erase"] = found["left"]
        return found

    @cached_property
    def _arguments(self) -> tuple[list[torch.Tensor], list[int]]:
        """The operands with every step, and their strides; absent ones are never read."""
        like, full = self.x.like, self.sizes.by_dim()
        tensors, strides = [], []
        for name, dims in DIMS.items():
            operand = getattr(self.x, name)
            if name == "query" and operand is None:
                operand = like.new_ones((1, 1, 1, 1, 1))
            if operand is None:
                tensors.append(like)
                strides += [0] * len(dims)
                continue
            is_part = name in ("decay", "drive")  # whose last two dimensions stay what they are
            kept = len(dims) - 2 if is_part else len(dims)
            expanded = operand.expand(*(full[dim] for dim in dims[:kept]), *operand.shape[kept:])
            tensors.append(expanded)
            strides += expanded.stride()
        return tensors, strides

    @property
    def _block(self) -> int:
        rows = next_power_of_2(self.sizes.key_dim)
        return max(1, min(next_power_of_2(self.sizes.value_dim), self.tile // rows))

    def _launch(self, kernel: Any, tensors: Any, strides: list[int], more: dict[str, int]) -> None:
        sizes, block = self.sizes, self._block
        programs = sizes.batch * sizes.heads
        if programs * sizes.key_dim * sizes.value_dim == 0:
            return
        rows = next_power_of_2(sizes.key_dim)
        first = tensors[0]
        with on(first.device):
            kernel[programs, cdiv(sizes.value_dim, block)](
                *tensors, sizes.heads, sizes.length, sizes.key_dim, sizes.value_dim, *strides, **self._constants,
                **more, ROWS=rows, BLOCK=block, num_warps=min(max(rows * block // WARP_TILE, 1), 8),
            )  # fmt: skip

    @property
    def _constants(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name in ("decay", "drive"):
            operand = getattr(self.x, name)
            parts[f"HAS_{name.upper()}"] = operand is not None
            for index, dim in ((3, "K"), (4, "V")):
                parts[f"{name.upper()}_{dim}"] = operand is not None and operand.shape[index] > 1
        return {
            **parts,
            "DROPS": self.attrs.drops,
            "HAS_STATE": self.x.state is not None,
            "RANK": self.sizes.rank,
            "ERASES": self.x.erase is not None,
            "READS": self.sizes.reads,
            "READS_BEFORE": self.attrs.reads == "before",
            "WIDE": WIDE[self.wide],
        }

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found: torch.Tensor = self.x.like.new_empty(shape, dtype=dtype)
        return found


def forward(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The op (see ``lowering/ops/scan.py``)."""
    return Scan(x, attrs).forward()


def backward(gradients: tuple[torch.Tensor, torch.Tensor], x: Operands, attrs: ScanAttrs) -> dict[str, torch.Tensor]:
    """The gradients of its operands, from those of its results."""
    return Scan(x, attrs).backward(*gradients)
