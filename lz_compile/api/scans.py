"""``lz.kda`` and ``lz.linear_scan``: recurrences on tensors, without a loop over time.

Without compiling, a call runs the kernel that is expected to be the fastest here. In a function that is compiled, by
whatever backend, it is one operator, ``layerzero::scan``, for which the kernel is chosen while compiling.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import Arguments, is_plain, remembered
from lz_compile.api.scan_calls import Run, by_address, is_view, scan
from lz_compile.ground.sizes import is_one
from lz_compile.lowering.ops.scan import Operands


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    initial_output: torch.Tensor | None = None,
    drop_mask: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    scale: float | None = None,
    head_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention: a matrix of fast weights decays, forgets and learns at every token, and is read.

    ``S_t = diag(alpha_t) S_{t-1} - beta_t k_t ((alpha_t * k_t)^T S_{t-1}) + beta_t k_t v_t^T``, ``o_t = scale * S_t^T q_t``.
    With one ``alpha`` for a head it is the gated delta rule, with ``alpha`` of one the delta rule.

    To go on with a sequence, token by token or in parts, pass the final state as ``initial_state`` (and, if tokens are
    dropped, the last output as ``initial_output``).

    Args:
        q: queries.
        k: keys, usually of length one.
        v: values.
        alpha: decays, as factors: any number, zero included.
        beta: how much of a token is written; with keys of length one, at 1 what was there is replaced.
        initial_state: the fast weights before the first token, by default zeros.
        initial_output: what a dropped first token repeats, by default zeros.
        drop_mask: True for tokens that change nothing and repeat the output before them.
        active: zero or False for heads that a token leaves as they are; they are read all the same.
        scale: of the outputs, by default 1.
        head_first: heads come before time.

    Shapes:
        q, k ``[B, T, H, K]``, v ``[B, T, H, V]``, alpha ``[B, T, H, K]`` or ``[B, T, H]``, beta ``[B, T, H]``, drop_mask
        ``[B, T]``, active ``[B, T, H]``, initial_state ``[B, H, K, V]``, initial_output ``[B, H, V]``. The result is the
        outputs ``[B, T, H, V]`` in the dtype of v and the final state ``[B, H, K, V]``, in float32 or that of
        ``initial_state``. With ``head_first`` T and H change places in all of them (drop_mask has no heads).

    Raises:
        ArgumentError: an argument is no such tensor or number, or does not fit the others.

    **Source** Kimi Team, *Kimi Linear*, 2025; the gated delta rule: Yang, Kautz and Hatamizadeh, 2024.
    """
    given = (q, k, v, alpha, beta, initial_state, initial_output, drop_mask, active)
    if _is_signed(given, scale, head_first):
        options = (type(scale), scale, type(head_first), head_first)
        names = ("kda", *options, torch.is_grad_enabled(), *[eager.layout(each) for each in given])
        return eager.bound("scan", names, partial(_bind_kda, given, scale, head_first))(*given)
    _check_kda(*given, scale, head_first)
    return _kda(*given, scale=scale, head_first=head_first)


class _Tokens(NamedTuple):
    """What a delta rule is over, with time before heads; ``alpha`` as in :func:`kda`, or one for each head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor

    def operands(self, state: torch.Tensor | None, scale: float | None) -> Operands:
        alpha = self.alpha.unsqueeze(-1) if self.alpha.dim() == 3 else self.alpha
        return Operands(
            state,
            decay=alpha.transpose(1, 2).unsqueeze(-1),
            left=_by_head(self.k * self.beta.unsqueeze(-1)),
            right=_by_head(self.v),
            erase=_by_head(self.k * alpha),
            query=_by_head(self.q if scale is None else self.q * scale),
        )

    def dtypes(self, state: torch.Tensor | None) -> tuple[torch.dtype, torch.dtype]:
        dtype = self.v.dtype
        return dtype, torch.promote_types(dtype, torch.float32) if state is None else state.dtype


def _kda(*given: Any, scale: float | None, head_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over tensors that were checked, in the order of :func:`kda`."""
    q, k, v, alpha, beta, initial_state, initial_output, drop_mask, active = given
    if head_first:
        q, k, v, alpha, beta = (each.transpose(1, 2) for each in (q, k, v, alpha, beta))
        active = None if active is None else active.transpose(1, 2)
    alpha = alpha.unsqueeze(-1) if alpha.dim() == 3 else alpha
    skipped = None if active is None else active == 0
    if drop_mask is not None:
        dropped = drop_mask.bool().unsqueeze(-1)
        skipped = dropped if skipped is None else skipped | dropped
        q = torch.where(dropped.unsqueeze(-1), 0.0, q)
    if skipped is not None:  # selected before anything is multiplied: zero times NaN is NaN, in gradients, too
        beta = torch.where(skipped, 0.0, beta)
        rows = skipped.unsqueeze(-1)
        alpha, k, v = torch.where(rows, 1.0, alpha), torch.where(rows, 0.0, k), torch.where(rows, 0.0, v)
    tokens = _Tokens(q, k, v, alpha, beta)
    reads, last = scan(tokens.operands(initial_state, scale), *tokens.dtypes(initial_state))
    out = reads.squeeze(3).transpose(1, 2)
    if drop_mask is not None:
        out = _filled_forward(out, drop_mask.bool(), initial_output)
    return (out.transpose(1, 2) if head_first else out), last


def _bind_kda(given: tuple[Any, ...], scale: float | None, head_first: bool) -> Run:
    """The call for arguments like these, which are checked here."""
    _check_kda(*given, scale, head_first)
    own = partial(_kda, scale=scale, head_first=head_first)
    state, *others = given[5:]
    if head_first or any(each is not None for each in others):
        return own
    tokens = _Tokens(*given[:5])
    is_by_head = tokens.alpha.dim() == 3

    def called(run: Run, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, alpha, beta, state, *_ = given
        left, erase = k * beta.unsqueeze(-1), k * (alpha.unsqueeze(-1) if is_by_head else alpha)
        return run(state, alpha, left, v, erase, None, q if scale is None else q * scale)

    return by_address(tokens.operands(state, scale), tokens.dtypes(state), (tokens.v.shape, None), called, own)


def linear_scan(
    decay: torch.Tensor | float, drive: torch.Tensor | None = None, *, initial: torch.Tensor | None = None, dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h_t = decay_t * h_{t-1} + drive_t`` at every ``t``, by elements: moving averages, RG-LRU, diagonal state spaces.

    Args:
        decay: the factor of what came before, as a number or a tensor: any number, zero included.
        drive: what is added; without it the decay has all dimensions.
        initial: the state before the first step, by default zeros.
        dim: of time.

    Shapes:
        drive ``[..., T, ...]`` with T at ``dim``; decay broadcastable to it; initial broadcastable to the drive without T.
        The result is all states, in the shape of the drive, and the last one, without T.

    Raises:
        ArgumentError: an argument is no such tensor or number, does not fit the others, or there is no such dimension.
    """
    given: tuple[Any, ...] = (decay, drive, initial)
    if isinstance(decay, torch.Tensor) and _is_signed(given, dim):
        names = ("linear_scan", type(dim), dim, torch.is_grad_enabled(), *[eager.layout(each) for each in given])
        return eager.bound("scan", names, partial(_bind_linear_scan, given, dim))(*given)
    _check_linear_scan(*given, dim)
    return _linear_scan(*given, dim=dim)


def _linear_scan(
    decay: torch.Tensor | float, drive: torch.Tensor | None, initial: torch.Tensor | None, *, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of arguments that were checked."""
    x, columns, dtype = _columns_of(decay, drive, initial, dim)
    reads, last = scan(x, dtype, dtype)
    return columns.restored(reads), last.reshape(columns.rest)


def _columns_of(
    decay: torch.Tensor | float, drive: torch.Tensor | None, initial: torch.Tensor | None, dim: int
) -> tuple[Operands, _Columns, torch.dtype]:
    """The op's operands, how they are laid out, and the dtype of results."""
    whole = decay if drive is None else drive
    assert isinstance(whole, torch.Tensor), "it was checked"
    factor = decay if isinstance(decay, torch.Tensor) else whole.new_full((), float(decay))
    shape, dim = tuple(whole.shape), dim % whole.dim()
    given = [each for each in (factor, drive, initial) if each is not None]
    wide = reduce(torch.promote_types, (each.dtype for each in given))
    columns = _Columns(shape, dim)
    x = Operands(
        decay=columns.of(_of_rank(factor, len(shape))),
        drive=None if drive is None else columns.of(drive),
        state=None if initial is None else columns.of(_of_rank(initial, len(columns.rest)).unsqueeze(dim))[:, :, 0],
    )
    return x, columns, wide


def _bind_linear_scan(given: tuple[Any, ...], dim: int) -> Run:
    """The call for arguments like these, which are checked here."""
    _check_linear_scan(*given, dim)
    own = partial(_linear_scan, dim=dim)
    decay, drive, initial = given
    x, columns, dtype = _columns_of(decay, drive, initial, dim)
    if not all(is_view(*pair) for pair in zip((x.decay, x.drive, x.state), given, strict=True)):
        return own
    reads = columns.shape if columns.is_flat else None

    def called(
        run: Run, decay: torch.Tensor, drive: torch.Tensor | None, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = run(initial, decay, None, None, None, drive, None)
        return found if reads is not None else (columns.restored(found[0].transpose(1, 2)), found[1])

    return by_address(x, (dtype, dtype), (reads, columns.rest), called, own)


class _Columns:
    """A shape as batch, head, step and columns, in the op's canonical layout: time may be anywhere.

    The dimension after time (or before it, where there is none after) is that of columns. ``rest`` is the shape without time.
    """

    def __init__(self, shape: Sequence[int], dim: int) -> None:
        self.shape = tuple(shape)
        self.rest = (*shape[:dim], *shape[dim + 1 :])
        before, after = [*range(dim)], [*range(dim + 1, len(shape))]
        columns = after[-1:] if after else before[-1:]
        self._groups = (before if after else before[:-1], after[:-1], [dim], columns)
        self._order = [position for group in self._groups for position in group]
        self._is_ordered = self._order == [*range(len(shape))]
        #: Whether ``[B, T, H, V]`` in memory, as kernels leave it, is the shape.
        self.is_flat = self._is_ordered and all(shape[position] == 1 for position in self._groups[1])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[B, H, T, 1, V]`` of a tensor of this rank, where groups of dimensions that broadcast do so still."""
        sizes = list(tensor.shape)
        for group in self._groups:
            if len(group) > 1 and not all([is_one(sizes[position]) for position in group]):  # noqa: C419  # quicker
                for position in group:
                    sizes[position] = self.shape[position]
        if tuple(sizes) != tuple(tensor.shape):
            tensor = tensor.expand(sizes)
        first, second, time, columns = (_product([sizes[position] for position in group]) for group in self._groups)
        ordered = tensor if self._is_ordered else tensor.permute(self._order)
        return ordered.reshape(first, second, time, 1, columns)

    def restored(self, reads: torch.Tensor) -> torch.Tensor:
        """The inverse, of ``[B, H, T, 1, V]``."""
        whole = reads.reshape([self.shape[position] for position in self._order])
        if self._is_ordered:
            return whole
        return whole.permute([self._order.index(position) for position in range(len(self._order))])


def _product(sizes: Sequence[Any]) -> Any:
    return sizes[0] if len(sizes) == 1 else reduce(operator.mul, sizes, 1)


def _of_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """With dimensions of size one in front."""
    if tensor.dim() == rank:
        return tensor
    return tensor.reshape((*(1,) * (rank - tensor.dim()), *tensor.shape))


@remembered
def _check_linear_scan(decay: Any, drive: Any, initial: Any, dim: Any) -> None:
    given = Arguments("linear_scan")
    given.tensor("drive", drive, kind="inexact", optional=True)
    if isinstance(decay, torch.Tensor) or drive is None:
        given.tensor("decay", decay, kind="inexact")
    else:
        given.number("decay", decay)
    given.tensor("initial", initial, kind="inexact", optional=True)
    name, whole = ("decay", decay) if drive is None else ("drive", drive)
    given.number("dim", dim, whole=True)
    if not -whole.dim() <= dim < whole.dim():
        raise given.wrong(
            "dim", f"as a dimension of {name}, of which there are {whole.dim()}", dim, "Give that of time"
        )
    shape, dim = tuple(whole.shape), dim % whole.dim()
    if isinstance(decay, torch.Tensor):
        given.broadcasts("decay", decay, shape)
    if initial is not None:
        given.broadcasts("initial", initial, (*shape[:dim], *shape[dim + 1 :]))


# ---- delta rule ------------------------------------------------------------------------------------------------------


@remembered
def _check_kda(*arguments: Any) -> None:
    q, k, v, alpha, beta, state, output, dropped, active, scale, heads = arguments
    given = Arguments("kda")
    given.flag("head_first", heads)
    order = "B H T" if heads else "B T H"
    given.tensor("q", q, f"{order} K")
    given.tensor("k", k, f"{order} K")
    given.tensor("v", v, f"{order} V")
    has_keys = not isinstance(alpha, torch.Tensor) or alpha.dim() != 3
    given.tensor("alpha", alpha, f"{order} K|1" if has_keys else order)
    given.tensor("beta", beta, order)
    given.tensor("initial_state", state, "B H K V", optional=True)
    given.tensor("initial_output", output, "B H V", optional=True)
    given.tensor("drop_mask", dropped, "B T", "real", optional=True)
    given.tensor("active", active, order, "real", optional=True)
    given.number("scale", scale, optional=True)


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, H, T, 1, D]`` of ``[B, T, H, D]``."""
    return tensor.transpose(1, 2).unsqueeze(3)


def _filled_forward(out: torch.Tensor, dropped: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """The outputs ``[B, T, H, V]``, where a dropped token ``[B, T]`` repeats the one before it, at last ``first``."""
    before = torch.zeros_like(out[:, :1]) if first is None else first.unsqueeze(1).to(out.dtype)
    positions = torch.arange(1, out.shape[1] + 1, device=out.device)
    latest = torch.where(dropped, 0, positions).cummax(1).values
    rows = torch.arange(out.shape[0], device=out.device).unsqueeze(1)
    return torch.cat((before, out), 1)[rows, latest]


def _is_signed(given: Sequence[Any], *options: Any) -> bool:
    """Whether a call may be bound: plain tensors, and numbers by which it is found again."""
    return is_plain(*given) and all([type(each) in _OPTIONS for each in options])  # noqa: C419  # a generator costs more


_OPTIONS = (type(None), bool, int, float)
