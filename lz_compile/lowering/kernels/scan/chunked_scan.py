"""A scan in chunks (``chunk_form.py``), in plain PyTorch that autograd differentiates and Inductor fuses.

Few chunks follow one another in a loop; more of them are combined pairwise, so that depth and nodes stay logarithmic in the
length, at the price of products of ``K x K`` matrices where a step erases.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernels.scan import chunk_prefixes
from lz_compile.lowering.kernels.scan.chunk_form import CHUNK, ChunkForm, chunk_form, without_drive
from lz_compile.lowering.kernels.scan.chunk_operands import ChunkOperands, results
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, factor_kind, reference
from lz_compile.lowering.scan_products import product

#: The most chunks that follow one another in a loop.
LOOPED = 8


def scan(x: Operands, attrs: ScanAttrs, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout (see ``lowering/ops/scan.py``); ``chunk`` is a power of two above one.

    Raises:
        ValueError: a decay differs between the columns of the state, or a size other than batch and heads is symbolic.
    """
    operands = ChunkOperands.of(x, attrs).with_drive_as_update()
    if operands.decay is not None and operands.decay.shape[4] != 1:
        raise ValueError(f"scan in chunks: expected one decay for every row, received {tuple(operands.decay.shape)}")
    driven = None if operands.drive is None else without_drive(operands, attrs.reads)
    rest = operands if driven is None else driven.rest
    chunk = min(chunk, _power_of_two(operands.length))
    form = chunk_form(rest, attrs.reads, chunk)
    states, last = _passed(form, operands.state)
    reads = form.reads(states)[:, :, : operands.length]
    if driven is not None:
        reads, last = reads + driven.reads, last + driven.state
    return results(reads, last, operands, attrs)


def in_few_steps(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in chunks, or step by step where columns have decays of their own, or states are dropped."""
    by_column = factor_kind(x.decay) in ("value", "full")
    return reference(x, attrs) if by_column or attrs.drops else scan(x, attrs)


def _passed(form: ChunkForm, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before the chunks ``[B, H, n, K, V]`` and the last one, from the first."""
    if form.writes.shape[2] > LOOPED:
        factors, summands, times = form.maps()
        return chunk_prefixes.states_before(factors, summands, state, times)
    totals = None if form.total is None else form.total.unsqueeze(4).unbind(2)
    writes, updates = form.writes.transpose(3, 4).unbind(2), form.updates.unbind(2)
    erases = None if form.erases is None else form.erases.unbind(2)
    states = []
    for index in range(form.writes.shape[2]):
        states.append(state)
        written = updates[index] if erases is None else updates[index] - product(erases[index], state)
        kept = state if totals is None else state * totals[index]
        state = kept + product(writes[index], written)
    return torch.stack(states, 2), state


def _power_of_two(length: int) -> int:
    """The smallest one above one that is not below a length."""
    return max(2, 1 << (length - 1).bit_length())
