"""A scan in Triton: step by step (``lowering/triton/scan.py``), or in chunks, where only what passes from one to the next is.

Triton is imported when a kernel is called.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.chunk_form import CHUNK, ChunkForm
from lz_compile.lowering.chunk_operands import sizes_of_shapes
from lz_compile.lowering.kernels.chunked_scan import in_chunks
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.opaque_scan import apart, decoded, fake, fallback, given, of_operands, scan_by, together
from lz_compile.lowering.ops.scan import OPERANDS, ScanAttrs
from lz_compile.lowering.scan_products import product

#: The largest tile of a chunk in bytes: its tokens, times their updates, times the rows of the state.
LARGEST_TILE = 64 * 128 * 4
#: The fewest tokens of a chunk.
SHORTEST = 16

# ---- step by step ----------------------------------------------------------------------------------------------------


def _run(
    state: torch.Tensor,
    decay: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    erase: torch.Tensor,
    drive: torch.Tensor,
    query: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    from lz_compile.lowering.triton.scan import Scan

    form = decoded(attrs)
    return together(Scan(given((state, decay, left, right, erase, drive, query)), form).forward(), form)


def _gradients(
    gradient: torch.Tensor,
    state: torch.Tensor,
    decay: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    erase: torch.Tensor,
    drive: torch.Tensor,
    query: torch.Tensor,
    attrs: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from lz_compile.lowering.triton.scan import Scan

    operands = (state, decay, left, right, erase, drive, query)
    scan = Scan(given(operands), decoded(attrs))
    return of_operands(scan.backward(*apart(gradient.contiguous(), scan.sizes)), operands)


_operator = opaque(
    "triton_scan",
    _run,
    fake,
    fallback=fallback,
    backward=_gradients,
    kernel_id="lz.triton_scan",
    is_cuda_graph_safe=True,
)

scan = scan_by(_operator)

# ---- in chunks -------------------------------------------------------------------------------------------------------


def chunked_scan(
    state: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    left: torch.Tensor | None = None,
    right: torch.Tensor | None = None,
    erase: torch.Tensor | None = None,
    drive: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    *,
    attrs: ScanAttrs,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in the op's canonical layout, in chunks of at most ``chunk`` steps, a power of two above one.

    Raises:
        ValueError: a decay differs between the columns of the state, or a size other than batch and heads is symbolic.
    """
    operands = dict(zip(OPERANDS, (state, decay, left, right, erase, drive, query), strict=True))
    sizes = sizes_of_shapes({name: each for name, each in operands.items() if each is not None})
    is_double = any(each is not None and each.dtype == torch.float64 for each in operands.values())
    row_bytes = sizes["R"] * sizes["K"] * (8 if is_double or attrs.compute_dtype == torch.float64 else 4)
    while chunk > SHORTEST and chunk * row_bytes > LARGEST_TILE:
        chunk //= 2
    return in_chunks(operands, attrs, chunk, _passed)


def _passed(form: ChunkForm, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``chunked_scan.passed`` gives. An operand that there is not has no elements and one dimension."""
    batch, heads = state.shape[:2]

    def whole(operand: torch.Tensor | None) -> torch.Tensor:
        if operand is None:
            return state.new_empty(0)
        return operand.expand(batch, heads, *(-1 for _ in operand.shape[2:])).contiguous()

    operands = (form.total, form.writes, form.erases, form.updates, state)
    states = _chunks_operator(*(whole(each) for each in operands))
    return states[:, :, :-1], states[:, :, -1]


def _states(
    total: torch.Tensor, writes: torch.Tensor, erases: torch.Tensor, updates: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The states before all chunks and the last one, ``[B, H, n + 1, K, V]``."""
    from lz_compile.lowering.triton import scan_chunks

    return scan_chunks.states(_there(total), writes, _there(erases), updates, state)


def _of_states(
    gradient: torch.Tensor,
    total: torch.Tensor,
    writes: torch.Tensor,
    erases: torch.Tensor,
    updates: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from lz_compile.lowering.triton import scan_chunks

    with torch.autocast(gradient.device.type, enabled=False):
        of_total, of_writes, of_erases, of_updates, of_state = scan_chunks.gradients(
            gradient, _there(total), writes, _there(erases), updates, state
        )
    of_total = torch.empty_like(total) if of_total is None else of_total.contiguous()
    of_erases = torch.empty_like(erases) if of_erases is None else of_erases
    return of_total, of_writes, of_erases, of_updates, of_state


def _fake_states(
    total: torch.Tensor, writes: torch.Tensor, erases: torch.Tensor, updates: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    return state.new_empty((*state.shape[:2], writes.shape[2] + 1, *state.shape[2:]))


def _looped_states(
    total: torch.Tensor, writes: torch.Tensor, erases: torch.Tensor, updates: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The same by PyTorch."""
    found = [state]
    for index in range(writes.shape[2]):
        written = updates[:, :, index]
        if erases.dim() > 1:
            written = written - product(erases[:, :, index], state)
        kept = state if total.dim() == 1 else state * total[:, :, index].unsqueeze(-1)
        state = kept + product(writes[:, :, index].mT, written)
        found.append(state)
    return torch.stack(found, 2)


def _there(operand: torch.Tensor) -> torch.Tensor | None:
    return None if operand.dim() == 1 else operand


_chunks_operator = opaque(
    "triton_scan_chunks",
    _states,
    _fake_states,
    fallback=_looped_states,
    backward=_of_states,
    kernel_id="lz.triton_chunked_scan",
    is_cuda_graph_safe=True,
)
