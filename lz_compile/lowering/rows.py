"""Rows whose bits depend on nothing but themselves: everything is computed in pieces of one size, filled up with zeros.

Which code a library runs, in which order it sums and where its vectors end follows from sizes. Where a row stands in a
piece must not matter either; of a product that is tried once for each size, and where it does, rows are computed one by one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from lz_compile.lowering.kernel_operator import Kernel
from lz_compile.lowering.opaque import opaque

#: Rows of a piece: a multiple of the elements of two vector registers, so that no vector ends within a row.
TILE = 64
#: Rows of a product, most of which are zeros where one row is wanted.
PRODUCT_ROWS = 16
#: Rows by which it is tried whether places matter: by one alone, rounding may hide it.
_PROBES = 16
_same: dict[tuple[Any, ...], bool] = {}


def in_tiles(op: ModuleType, kernel: Kernel, x: Any, attrs: Any) -> torch.Tensor:
    """What a kernel gives for an op of rows (``N`` in its legend), one piece of them after the other."""
    result: torch.Tensor = op.fake(x, attrs)
    count = result.shape[0]
    for start in range(0, count, TILE):
        piece = {
            name: filled_up(each[start : start + TILE], TILE) if _has_rows(op, name, each, count) else each
            for name, each in x.given().items()
        }
        stop = min(start + TILE, count)
        result[start:stop] = kernel(type(x)(**piece), attrs)[: stop - start]
    return result


def _has_rows(op: ModuleType, name: str, operand: Any, count: int) -> bool:
    return isinstance(operand, torch.Tensor) and op.SHAPES[name].split()[0][0] == "N" and operand.shape[0] == count


def filled_up(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor with zeros behind its rows, in memory of its own."""
    found = tensor.new_zeros(rows, *tensor.shape[1:])
    found[: tensor.shape[0]] = tensor
    return found


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right``, ``[M, K]`` and ``[K, N]``, in pieces of the rows of ``left``."""
    if not left.shape[0]:
        return left @ right
    rows = PRODUCT_ROWS if _is_same_everywhere(right, left.dtype) else 1
    pieces = (left[start : start + rows] for start in range(0, left.shape[0], rows))
    return torch.cat([torch.mm(filled_up(piece, rows), right)[: piece.shape[0]] for piece in pieces])


def _is_same_everywhere(right: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits wherever it stands in a piece, whatever is in it: of a size, this is known once."""
    key = (right.shape, right.stride(), dtype, right.device, torch.get_num_threads())
    if key not in _same:
        other = torch.empty_strided(right.shape, right.stride(), dtype=right.dtype, device=right.device)
        other.copy_(_waves(right.shape[0], right.shape[1], 0.37, right))
        rows = _waves(_PROBES, right.shape[0], 0.7, right)
        found = [torch.mm(row.expand(PRODUCT_ROWS, -1).contiguous(), other) for row in rows]
        _same[key] = all(bool((each == each[:1]).all()) for each in found)
    return _same[key]


def _waves(rows: int, columns: int, step: float, like: torch.Tensor) -> torch.Tensor:
    """Numbers without a pattern."""
    found = torch.arange(rows * columns, dtype=torch.float64, device=like.device)
    return found.mul_(step).sin_().to(like.dtype).view(rows, columns)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found = product(input.reshape(-1, input.shape[-1]), weight.t())
    found = found if bias is None else found.add_(bias)
    return found.view(*input.shape[:-1], weight.shape[0])


def _fake_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


#: ``torch.nn.functional.linear`` for inference; nothing completes a call, for that would be another one.
linear = opaque("row_linear", _linear, _fake_linear)
