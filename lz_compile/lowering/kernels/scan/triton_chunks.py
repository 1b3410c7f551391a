"""What passes from chunk to chunk of a scan, in Triton: the states before all chunks, and gradients.

The recurrence ``S' = total S + writes^T (updates - erases S)`` is sequential in the chunks. A program walks through them for
some columns of one head, with the state in registers. Going back, gradients ``G`` of the states ``S`` follow the same
recurrence with ``writes`` and ``erases`` exchanged, ``D = total D' - erases^T (writes D') + G``: one kernel does both.
Everything else, forward and backward, is products of matrices in all chunks at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lz_compile.lowering.triton_launch import WIDE, cdiv, next_power_of_2, on

#: Columns of a program; the least that a product of tensor cores takes.
COLUMNS, LEAST = 32, 16


@triton.jit
def pass_on(
    total, reading, writing, added, states, count, tokens, rows, columns,
    HAS_TOTAL: tl.constexpr, TOTAL_K: tl.constexpr, HAS_READING: tl.constexpr, HAS_WRITTEN: tl.constexpr,
    IS_BACK: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``states [heads, n + 1, K, V]``, of which one is given: the first; or the last, and the others hold what is added.

    total ``[heads, n, K | 1]``, reading and writing ``[heads, n, tokens, K]``, added ``[heads, n, tokens, V]``, without gaps.
    """
    head = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_state = (k < rows)[:, None] & (v < columns)[None, :]
    place = k[:, None] * columns + v[None, :]
    first = head * (count + 1)
    S = tl.load(states + (first + (count if IS_BACK else 0)) * rows * columns + place, mask=is_state, other=0.0)
    for step in range(count):
        chunk = head * count + (count - 1 - step if IS_BACK else step)
        if HAS_READING:
            operand = reading + chunk * tokens * rows + token[:, None] * rows + k[None, :]
            read = tl.load(operand, mask=(token < tokens)[:, None] & (k < rows)[None, :], other=0.0)
            written = -tl.dot(read, S, input_precision=PRECISION, out_dtype=WIDE)
        if HAS_WRITTEN:
            operand = added + chunk * tokens * columns + token[:, None] * columns + v[None, :]
            more = tl.load(operand, mask=(token < tokens)[:, None] & (v < columns)[None, :], other=0.0)
            written = written + more if HAS_READING else more
        if HAS_TOTAL:
            if TOTAL_K:
                S = S * tl.load(total + chunk * rows + k, mask=k < rows, other=0.0)[:, None]
            else:
                S = S * tl.load(total + chunk)
        if HAS_READING or HAS_WRITTEN:
            operand = writing + chunk * tokens * rows + token[None, :] * rows + k[:, None]
            write = tl.load(operand, mask=(token < tokens)[None, :] & (k < rows)[:, None], other=0.0)
            S += tl.dot(write, written, input_precision=PRECISION, out_dtype=WIDE)
        if IS_BACK:
            target = states + (first + count - 1 - step) * rows * columns + place
            S += tl.load(target, mask=is_state, other=0.0)
        else:
            target = states + (first + step + 1) * rows * columns + place
        tl.store(target, S, mask=is_state)


def states(
    total: torch.Tensor | None,
    writes: torch.Tensor,
    erases: torch.Tensor | None,
    updates: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The states before all chunks, and the last one.

    Shapes:
        total ``[B, H, n, K | 1]``, writes and erases ``[B, H, n, C, K]``, updates ``[B, H, n, C, V]``, state
        ``[B, H, K, V]``, all of one dtype and contiguous; the result ``[B, H, n + 1, K, V]``.
    """
    found = state.new_empty((*state.shape[:2], writes.shape[2] + 1, *state.shape[2:]))
    found[:, :, 0] = state
    _launch(total, erases, writes, updates, found)
    return found


def gradients(
    gradient: torch.Tensor,
    total: torch.Tensor | None,
    writes: torch.Tensor,
    erases: torch.Tensor | None,
    updates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The gradients of the operands of :func:`states`, in their order, from that of its result."""
    before = states(total, writes, erases, updates, state)[:, :, :-1]
    found = gradient.clone(memory_format=torch.contiguous_format)
    _launch(total, None if erases is None else writes, writes if erases is None else erases, None, found)
    behind = found[:, :, 1:]  # the gradients of the states behind each chunk
    written = updates if erases is None else updates - erases @ before
    of_written = writes @ behind
    of_total = None
    if total is not None:
        of_total = (before * behind).sum(4).sum_to_size(total.shape)
    of_erases = None if erases is None else -of_written @ before.mT
    return of_total, written @ behind.mT, of_erases, of_written, found[:, :, 0].contiguous()


def _launch(
    total: torch.Tensor | None,
    reading: torch.Tensor | None,
    writing: torch.Tensor,
    added: torch.Tensor | None,
    found: torch.Tensor,
) -> None:
    batch, heads, _, rows, columns = found.shape
    count, tokens = writing.shape[2:4]
    if found.numel() == 0:
        return
    block = min(COLUMNS, max(LEAST, next_power_of_2(columns)))
    precision = "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"
    with on(found.device):
        pass_on[batch * heads, cdiv(columns, block)](
            found if total is None else total, writing if reading is None else reading, writing,
            found if added is None else added, found, count, tokens, rows, columns,
            HAS_TOTAL=total is not None, TOTAL_K=total is not None and total.shape[3] > 1,
            HAS_READING=reading is not None, HAS_WRITTEN=added is not None, IS_BACK=added is None,
            PRECISION=precision, WIDE=WIDE[found.dtype], TOKENS=max(LEAST, next_power_of_2(tokens)),
            ROWS=max(LEAST, next_power_of_2(rows)), BLOCK=block, num_warps=4,
        )  # fmt: skip
