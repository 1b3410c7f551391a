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
import triton

from lz_compile.lowering.ops.scan import OPERANDS, Operands, ScanAttrs, ScanSizes, common_dtype, sizes_of
from lz_compile.lowering.triton import scan_kernels
from lz_compile.lowering.triton.launch import WIDE, on

#: Elements of the state that a program holds, by preference, and those that a warp does.
TILE, WARP_TILE = 1024, 1024
#: Steps of a span.
SPAN = 32


@dataclass(frozen=True)
class Scan:
    """One scan over canonical operands with any strides (None: absent)."""

    operands: Operands
    attrs: ScanAttrs
    tile: int = TILE
    span: int = SPAN

    @cached_property
    def sizes(self) -> ScanSizes:
        """Of the scan."""
        return sizes_of(self.operands)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the state."""
        return torch.promote_types(
            torch.promote_types(common_dtype(self.operands), self.attrs.compute_dtype), torch.float32
        )

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads and the last state, contiguous."""
        sizes = self.sizes
        reads = self._empty(
            (sizes.batch, sizes.heads, sizes.length, sizes.reads, sizes.value_dim), self.attrs.out_dtype
        )
        last = self._empty((sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim), self.attrs.state_dtype)
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
        gradients = (found.get(name, kept) for name in OPERANDS)
        given = (of_reads.contiguous(), of_last.contiguous(), *tensors, states, kept, *gradients)
        self._launch(scan_kernels.backward, given, strides, {"SPAN": self.span})
        return {name: self._of_operand(name, found[name]) for name in found if self.operands.get(name) is not None}

    def _of_operand(self, name: str, found: torch.Tensor) -> torch.Tensor:
        """A gradient summed over programs and over everything that its operand broadcasts over."""
        operand = self.operands[name]
        assert operand is not None, name
        found = found.sum(0) if found.dim() > operand.dim() else found
        return found.sum_to_size(operand.shape).to(operand.dtype).contiguous()

    def _gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what the backward kernel writes; what sums over columns has a summand for each program in front."""
        sizes = self.sizes
        steps = (sizes.batch, sizes.heads, sizes.length)
        parts = triton.cdiv(sizes.value_dim, self._block)
        found: dict[str, tuple[int, ...]] = {"state": (*steps[:2], sizes.key_dim, sizes.value_dim)}
        found["query"] = (parts, *steps, sizes.reads, sizes.key_dim)
        for name in ("decay", "drive"):
            operand = self.operands.get(name)
            if operand is not None:
                shape = (*steps, *operand.shape[3:])
                found[name] = shape if operand.shape[4] > 1 else (parts, *shape)
        if sizes.rank:
            found["left"] = (parts, *steps, sizes.rank, sizes.key_dim)
            found["right"] = (*steps, sizes.rank, sizes.value_dim)
        if self.operands.get("erase") is not None:
            found["erase"] = found["left"]
        return found

    @cached_property
    def _arguments(self) -> tuple[list[torch.Tensor], list[int]]:
        """The operands with every step, and their strides; absent ones are never read."""
        sizes = self.sizes
        like = next(each for each in self.operands.values() if each is not None)
        full = dict(zip("BHTKVRQ", sizes, strict=True))
        tensors, strides = [], []
        for name, dims in OPERANDS.items():
            operand = self.operands.get(name)
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
        """Columns of a program."""
        rows = triton.next_power_of_2(self.sizes.key_dim)
        block: int = max(1, min(triton.next_power_of_2(self.sizes.value_dim), self.tile // rows))
        return block

    def _launch(self, kernel: Any, tensors: Any, strides: list[int], more: dict[str, int]) -> None:
        sizes, block = self.sizes, self._block
        programs = sizes.batch * sizes.heads
        if programs * sizes.key_dim * sizes.value_dim == 0:
            return
        rows = triton.next_power_of_2(sizes.key_dim)
        first = tensors[0]
        with on(first.device):
            kernel[programs, triton.cdiv(sizes.value_dim, block)](
                *tensors, sizes.heads, sizes.length, sizes.key_dim, sizes.value_dim, *strides, **self._constants,
                **more, ROWS=rows, BLOCK=block, num_warps=min(max(rows * block // WARP_TILE, 1), 8),
            )  # fmt: skip

    @property
    def _constants(self) -> dict[str, Any]:
        given = self.operands
        parts: dict[str, Any] = {}
        for name in ("decay", "drive"):
            operand = given.get(name)
            parts[f"HAS_{name.upper()}"] = operand is not None
            for index, dim in ((3, "K"), (4, "V")):
                parts[f"{name.upper()}_{dim}"] = operand is not None and operand.shape[index] > 1
        return {
            **parts,
            "DROPS": self.attrs.drops,
            "HAS_STATE": given.get("state") is not None,
            "RANK": self.sizes.rank,
            "ERASES": given.get("erase") is not None,
            "READS": self.sizes.reads,
            "READS_BEFORE": self.attrs.reads == "before",
            "WIDE": WIDE[self.wide],
        }

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        like = next(each for each in self.operands.values() if each is not None)
        return like.new_empty(shape, dtype=dtype)
