"""A scan in Triton: step by step (``triton_source.py``), or in chunks, where only what passes from one to the next is.

Triton is imported when a kernel is called.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.scan.chunk_form import CHUNK, ChunkForm
from lz_compile.lowering.kernels.scan.chunked_scan import in_chunks, in_few_steps
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops import scan as op
from lz_compile.lowering.ops.scan import Operands, ScanAttrs, common_dtype, sizes_of
from lz_compile.lowering.scan_products import product

#: The largest tile of a chunk in bytes: its tokens, times their updates, times the rows of the state.
LARGEST_TILE = 64 * 128 * 4
#: The fewest tokens of a chunk.
SHORTEST = 16

# ---- step by step ----------------------------------------------------------------------------------------------------


def _run(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    from lz_compile.lowering.kernels.scan.triton_source import Scan

    return Scan(x, attrs).forward()


def _gradients(
    gradients: tuple[torch.Tensor, torch.Tensor], x: Operands, attrs: ScanAttrs
) -> dict[str, torch.Tensor | None]:
    from lz_compile.lowering.kernels.scan.triton_source import Scan

    return {**Scan(x, attrs).backward(*gradients)}


scan = kernel_operator(
    "triton_scan",
    op,
    _run,
    backward=_gradients,
    fallback=in_few_steps,
    kernel_id="lz.triton_scan",
    is_cuda_graph_safe=True,
)

# ---- in chunks -------------------------------------------------------------------------------------------------------


def chunked_scan(x: Operands, attrs: ScanAttrs, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout, in chunks of at most ``chunk`` steps, a power of two above one.

    Raises:
        ValueError: a decay differs between the columns of the state, or a size other than batch and heads is symbolic.
    """
    sizes = sizes_of(x)
    is_double = torch.float64 in (common_dtype(x), attrs.compute_dtype)
    row_bytes = max(sizes.rank, 1) * sizes.key_dim * (8 if is_double else 4)
    while chunk > SHORTEST and chunk * row_bytes > LARGEST_TILE:
        chunk //= 2
    return in_chunks(x, attrs, chunk, _passed)


def _passed(form: ChunkForm, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``chunked_scan.passed`` gives."""
    batch, heads = state.shape[:2]

    def whole(operand: torch.Tensor | None) -> torch.Tensor | None:
        return None if operand is None else operand.expand(batch, heads, *(-1 for _ in operand.shape[2:])).contiguous()

    operands = (form.total, form.writes, form.erases, form.updates, state)
    states = _chunks_operator(*(whole(each) for each in operands))
    return states[:, :, :-1], states[:, :, -1]


def _states(
    total: torch.Tensor | None,
    writes: torch.Tensor,
    erases: torch.Tensor | None,
    updates: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The states before all chunks and the last one, ``[B, H, n + 1, K, V]``."""
    from lz_compile.lowering.kernels.scan import triton_chunks as scan_chunks

    return scan_chunks.states(total, writes, erases, updates, state)


def _of_states(
    gradient: torch.Tensor,
    total: torch.Tensor | None,
    writes: torch.Tensor,
    erases: torch.Tensor | None,
    updates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from lz_compile.lowering.kernels.scan import triton_chunks as scan_chunks

    with torch.autocast(gradient.device.type, enabled=False):
        of_total, of_writes, of_erases, of_updates, of_state = scan_chunks.gradients(
            gradient, total, writes, erases, updates, state
        )
    of_total = gradient.new_empty(0) if of_total is None else of_total.contiguous()
    of_erases = gradient.new_empty(0) if of_erases is None else of_erases
    return of_total, of_writes, of_erases, of_updates, of_state


def _fake_states(*operands: torch.Tensor) -> torch.Tensor:
    _, writes, *_, state = operands
    return state.new_empty((*state.shape[:2], writes.shape[2] + 1, *state.shape[2:]))


def _looped_states(
    total: torch.Tensor | None,
    writes: torch.Tensor,
    erases: torch.Tensor | None,
    updates: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The same by PyTorch."""
    found = [state]
    for index in range(writes.shape[2]):
        written = updates[:, :, index]
        if erases is not None:
            written = written - product(erases[:, :, index], state)
        kept = state if total is None else state * total[:, :, index].unsqueeze(-1)
        state = kept + product(writes[:, :, index].mT, written)
        found.append(state)
    return torch.stack(found, 2)


_chunks_operator = opaque(
    "triton_scan_chunks",
    _states,
    _fake_states,
    fallback=_looped_states,
    backward=_of_states,
    kernel_id="lz.triton_chunked_scan",
    is_cuda_graph_safe=True,
)
