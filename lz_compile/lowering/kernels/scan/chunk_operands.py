"""The operands of a scan as chunked kernels want them: one dtype, every step, every row; a dense summand as an update.

Only shapes are looked at, and nothing but functions of tensors is called, so that all of this also runs on the proxies
that append to a graph. There, the sizes of batch and heads may be symbolic; the others must be numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.lowering.ops.scan import DIMS, Operands, ScanAttrs, sizes_of


@dataclass(frozen=True, kw_only=True)
class ChunkOperands(Operands):
    """The operands of a scan in one dtype; all but the first two have every step, rank, row and column.

    Shapes:
        state ``[B, H, K, V]``, always given; decay ``[., ., T, K | 1, V | 1]``; left and erase ``[., ., T, R, K]``, right
        ``[., ., T, R, V]``, drive ``[., ., T, K, V]``, query ``[., ., T, Q, K]``, always given. A dot is the size, or 1.
    """

    state: torch.Tensor
    query: torch.Tensor
    batch: Any
    heads: Any
    length: int

    @classmethod
    def of(cls, x: Operands, attrs: ScanAttrs) -> ChunkOperands:
        """The canonical operands of the op.

        Raises:
            ValueError: a size other than those of batch and heads is symbolic.
        """
        sizes = sizes_of(x).by_dim()
        symbolic = [dim for dim in "TRKVQ" if not isinstance(sizes[dim], int)]
        if symbolic:
            raise ValueError(f"scan in chunks: expected numbers as the sizes {', '.join(symbolic)}, received symbols")
        wide = x.wide(attrs)
        x = x.map(lambda each: each if each.dtype == wide else each.to(wide))
        length = sizes["T"]
        state = x.like.new_zeros((1, 1, 1, 1)) if x.state is None else x.state
        query = x.like.new_ones((1, 1, 1, 1, 1)) if x.query is None else x.query
        found = replace(x, state=state, query=query).given()  # in order, so that every process makes the same graph
        for name, operand in found.items():
            if name not in ("state", "decay"):
                found[name] = operand.expand(-1, -1, length, *(sizes[dim] for dim in DIMS[name][3:]))
        if "decay" in found:
            found["decay"] = found["decay"].expand(-1, -1, length, -1, -1)
        found["state"] = found["state"].expand(*(sizes[dim] for dim in DIMS["state"]))
        return cls(**found, batch=sizes["B"], heads=sizes["H"], length=length)

    @property
    def rows(self) -> int:
        """K."""
        return int(self.state.shape[2])

    @property
    def columns(self) -> int:
        """V."""
        return int(self.state.shape[3])

    def with_drive_as_update(self) -> ChunkOperands:
        """The same, with a summand of one row or one column as one more update; a larger one stays what it is."""
        drive = self.drive
        if drive is None or (self.rows > 1 and self.columns > 1):
            return self
        one = drive.new_ones((1, 1, 1, 1, 1)).expand(1, 1, self.length, 1, 1)
        left, right = (one, drive) if self.rows == 1 else (drive.transpose(3, 4), one)
        if self.left is None or self.right is None:
            return replace(self, left=left, right=right, drive=None)
        erase = None
        if self.erase is not None:
            erase = F.pad(self.erase, (0, 0, 0, 1))
        return replace(
            self, left=self._joined(self.left, left), right=self._joined(self.right, right), erase=erase, drive=None
        )

    def _joined(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        both = [each.expand(self.batch, self.heads, -1, -1, -1) for each in (first, second)]
        return torch.cat(both, 3)

    def padded(self, length: int) -> ChunkOperands:
        """More steps at the end, which change no state."""
        more = length - self.length
        if more == 0:
            return self
        found = {
            name: F.pad(each, (0, 0, 0, 0, 0, more), value=1.0 if name == "decay" else 0.0)
            for name, each in self.given().items()
            if name != "state"
        }
        return replace(self, **found, length=length)

    def steps(self, start: int, stop: int) -> ChunkOperands:
        """Some of the steps."""
        found = {name: each[:, :, start:stop] for name, each in self.given().items() if name != "state"}
        return replace(self, **found, length=stop - start)


def results(
    reads: torch.Tensor, state: torch.Tensor, operands: ChunkOperands, attrs: ScanAttrs
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel returns, from reads ``[., ., >= T, Q, V]`` and the last state ``[., ., K, V]``; contiguous."""
    reads = reads[:, :, : operands.length].expand(operands.batch, operands.heads, -1, -1, -1)
    state = state.expand(operands.batch, operands.heads, -1, -1)
    return reads.to(attrs.out_dtype).contiguous(), state.to(attrs.state_dtype).contiguous()
