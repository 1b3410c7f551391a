"""A scan cut into chunks: everything that can be computed in all chunks at once, as products of matrices.

Within a chunk, what is written under the keys solves a triangular system (the UT form of the WY representation). With ``S``
the state before the chunk, and ``E`` what the erasing rows see of the keys of earlier tokens,

    (I + E) D = right - erase S        reads = query S + Q D        S' = total S + left^T D

where ``erase``, ``query`` and ``left`` carry the decays to the chunk's limits (``chunk_products.py``). The system is solved
by substitution: powers of ``E`` cancel one another and lose every digit where keys are alike. A step that is not finite is
seen by no earlier one (``triangles.py``).

**Source**: Yang et al., Parallelizing linear transformers with the delta rule over sequence length (2024), eq. 7 to 10; Kimi
Team, Kimi Linear (2025), section 3, for decays by channel. Both factor decays through logarithms, which this does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from lz_compile.lowering.kernels.scan import chunk_prefixes
from lz_compile.lowering.kernels.scan.chunk_operands import ChunkOperands
from lz_compile.lowering.kernels.scan.chunk_products import Rows, seen
from lz_compile.lowering.kernels.scan.triangles import lower_product
from lz_compile.lowering.ops.scan import Reads
from lz_compile.lowering.scan_products import product, solved

#: Tokens of a chunk, where there are as many.
CHUNK = 64


@dataclass(frozen=True)
class ChunkForm:
    """``n`` chunks of ``C`` tokens, where ``D = updates - erases S``.

    ``reads = queries S + pairs D`` and ``S' = total S + writes^T D``.

    Shapes:
        total ``[., ., n, K | 1]`` (None: one), writes and erases ``[., ., n, C * R, K]``, updates ``[., ., n, C * R, V]``,
        queries ``[., ., n, C * Q, K]``, pairs ``[., ., n, C * Q, C * R]``, in which tokens see themselves if ``reads_own``.
    """

    total: torch.Tensor | None
    writes: torch.Tensor
    erases: torch.Tensor | None
    updates: torch.Tensor
    queries: torch.Tensor
    pairs: torch.Tensor
    reads_per_step: int
    reads_own: bool

    def reads(self, states: torch.Tensor) -> torch.Tensor:
        """What is read, ``[., ., n * C, Q, V]``, from the states before the chunks ``[B, H, n, K, V]``."""
        written = self.updates if self.erases is None else self.updates - product(self.erases, states)
        tokens = self.pairs.shape[3] // self.reads_per_step
        found = product(self.queries, states) + lower_product(self.pairs, written, tokens, self.reads_own)
        result: torch.Tensor = found.unflatten(3, (-1, self.reads_per_step)).flatten(2, 3)
        return result

    def maps(self) -> tuple[torch.Tensor, torch.Tensor, chunk_prefixes.Times]:
        """Every chunk as a map ``S' = A S + B``, and how such maps are combined."""
        written = self.writes.transpose(3, 4)
        total = self.writes.new_ones((1, 1, 1, 1)) if self.total is None else self.total
        if self.erases is None:
            count = self.writes.shape[2]
            factors = total.unsqueeze(4).expand(-1, -1, count, -1, -1)
            return factors, product(written, self.updates), chunk_prefixes.diagonal
        one = written.new_ones((self.writes.shape[4],)).diag()
        factors = one * total.unsqueeze(4) - product(written, self.erases)
        return factors, product(written, self.updates), chunk_prefixes.matrices


def chunk_form(operands: ChunkOperands, reads: Reads, chunk: int) -> ChunkForm:
    """Operands without a dense summand, in chunks of ``chunk`` tokens, a power of two above one; the last is filled up."""
    length, operands = operands.length, operands.padded(max(1, -(-operands.length // chunk)) * chunk)
    left, right = operands.left, operands.right
    if left is None or right is None:
        one = operands.query.new_zeros((1, 1, 1, 1, 1))
        left = one.expand(1, 1, operands.length, 1, operands.rows)
        right = one.expand(1, 1, operands.length, 1, operands.columns)
    decay = None if operands.decay is None else operands.decay.squeeze(4)
    query, erase = operands.query, operands.erase
    if decay is not None:
        left, query = _spread(left, decay), _spread(query, decay)
        erase = None if erase is None else _spread(erase, decay)
    rows = [_read_rows(query, left, decay, reads, chunk)]
    if erase is not None:
        rows.append(Rows(_cut(erase, chunk)))
    columns = _cut(left, chunk)
    found = seen(None if decay is None else _cut(decay, chunk), tuple(rows), columns)
    updates, erases = _cut(right, chunk).flatten(3, 4), None
    if erase is not None:
        pairs, reading = (_of_steps(each[1], length, chunk) for each in (found.pairs, found.rows))
        updates, erases = (solved(pairs, each) for each in (updates, reading))
    return ChunkForm(
        found.total,
        found.columns,
        erases,
        updates,
        found.rows[0],
        found.pairs[0],
        int(operands.query.shape[3]),
        reads == "after",
    )


def _read_rows(query: torch.Tensor, left: torch.Tensor, decay: torch.Tensor | None, reads: Reads, chunk: int) -> Rows:
    """Queries as rows that read the state before the step: behind it they also see the step's own update."""
    if reads == "before":
        return Rows(_cut(query, chunk))
    own = product(query, left.transpose(3, 4))
    before = query if decay is None else query * decay.unsqueeze(3)
    return Rows(_cut(before, chunk), _cut(own, chunk))


def _of_steps(rows: torch.Tensor, length: int, chunk: int) -> torch.Tensor:
    """Erasing rows ``[., ., n, C * R, .]``, zero behind the last step, however that ends."""
    count = rows.shape[2] * chunk
    if count == length:
        return rows
    is_step = F.pad(rows.new_ones((length,)), (0, count - length)).unflatten(0, (-1, chunk)) != 0
    is_kept = is_step.unsqueeze(2).expand(-1, -1, rows.shape[3] // chunk).flatten(1, 2)
    return torch.where(is_kept.unsqueeze(2), rows, 0.0)


def _cut(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """Time as chunks and tokens, in dimensions 2 and 3."""
    found: torch.Tensor = tensor.unflatten(2, (-1, chunk))
    return found


def _spread(tensor: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Over the batch and heads of the decays."""
    sizes = [
        wide if isinstance(own, int) and own == 1 else -1
        for own, wide in zip(tensor.shape[:2], decay.shape[:2], strict=True)
    ]
    return tensor.expand(*sizes, -1, -1, -1)


# ---- a dense summand -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Driven:
    """A scan without its dense summand, and what that adds to reads and to the last state."""

    rest: ChunkOperands
    reads: torch.Tensor
    state: torch.Tensor


def without_drive(operands: ChunkOperands, reads: Reads) -> Driven:
    """The scan is linear: what the summand alone leaves in the state is a scan by elements; erasing rows see that too.

    Time and memory are those of all states.
    """
    drive = operands.drive
    assert drive is not None, "there is a dense summand"
    decay = operands.decay
    if decay is None:
        decay = drive.new_ones((1, 1, 1, 1, 1)).expand(1, 1, operands.length, 1, 1)
    state = torch.zeros_like(operands.state)
    before, last = chunk_prefixes.states_before(decay, drive, state, chunk_prefixes.diagonal)
    right = operands.right
    if operands.erase is not None and right is not None:
        right = right - product(operands.erase, before)
    after = torch.cat((before[:, :, 1:], last.unsqueeze(2)), 2)
    seen_states = before if reads == "before" else after
    return Driven(replace(operands, right=right, drive=None), product(operands.query, seen_states), last)
