"""A scan by combining steps pairwise (``lowering/kernels/scan/chunk_prefixes.py``): logarithmic depth, in plain PyTorch.

Where a step erases, it is a matrix ``A = diag(decay) - left^T erase``, and two steps combine by a product of matrices.
Where it does not, ``A`` is diagonal, and everything is by elements: moving averages, RG-LRU and Mamba-1 are no more.

All states of a tile are there at once. Tiles follow one another, each from the state that the one before leaves, and what was
read from a tile is all that is kept of it; what autograd needs is kept for all of them.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.scan import chunk_prefixes
from lz_compile.lowering.kernels.scan.chunk_operands import ChunkOperands, results
from lz_compile.lowering.ops.scan import Operands, ScanAttrs
from lz_compile.lowering.scan_products import product

#: The most tiles, and the fewest steps of one.
TILES, SHORTEST = 4, 64


def scan(x: Operands, attrs: ScanAttrs, shortest: int = SHORTEST) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout (see ``lowering/ops/scan.py``), in tiles of at least ``shortest`` steps.

    Raises:
        ValueError: a step erases and has decays that differ between columns of the state, or a size other than batch and
            heads is symbolic.
    """
    operands = ChunkOperands.of(x, attrs)
    if x.erase is not None and operands.decay is not None and operands.decay.shape[4] != 1:
        raise ValueError(
            f"associative scan: expected one decay for every row of a state that is erased from, received "
            f"{tuple(operands.decay.shape)}"
        )
    has_query = x.query is not None
    tile = max(shortest, -(-operands.length // TILES))
    last, found = operands.state, []
    for start in range(0, operands.length, tile):
        steps = operands.steps(start, min(start + tile, operands.length))
        reads, last = _tile(steps, last, attrs, has_query=has_query)
        found.append(reads)
    if not found:
        found.append(product(operands.query, operands.state.unsqueeze(2)[:, :, :0]))
    return results(found[0] if len(found) == 1 else torch.cat(found, 2), last, operands, attrs)


def _tile(
    operands: ChunkOperands, state: torch.Tensor, attrs: ScanAttrs, *, has_query: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the steps of a tile read, and the state that they leave."""
    factors, times = _factors(operands, attrs)
    before, last = chunk_prefixes.states_before(factors, _summands(operands), state, times)
    states = before if attrs.reads == "before" else torch.cat((before[:, :, 1:], last.unsqueeze(2)), 2)
    return product(operands.query, states) if has_query else states, last


def _factors(operands: ChunkOperands, attrs: ScanAttrs) -> tuple[torch.Tensor, chunk_prefixes.Times]:
    """``A`` of every step, and how two are combined."""
    decay = operands.decay
    if decay is None:
        decay = operands.query.new_ones((1, 1, 1, 1, 1)).expand(1, 1, operands.length, 1, 1)
    if operands.erase is None or operands.left is None:
        return decay, chunk_prefixes.dropping if attrs.drops else chunk_prefixes.diagonal
    one = decay.new_ones((operands.rows,)).diag()
    return one * decay - product(operands.left.transpose(3, 4), operands.erase), chunk_prefixes.matrices


def _summands(operands: ChunkOperands) -> torch.Tensor:
    """``B`` of every step."""
    drive = operands.drive
    if operands.left is None or operands.right is None:
        if drive is not None:
            return drive
        return operands.query.new_zeros((1, 1, 1, 1, 1)).expand(1, 1, operands.length, operands.rows, operands.columns)
    written = product(operands.left.transpose(3, 4), operands.right)
    return written if drive is None else written + drive
