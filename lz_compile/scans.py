"""``lz.kda`` and ``lz.linear_scan``: recurrences on tensors, without a loop over time.

Without compiling, a call runs the kernel that is expected to be the fastest here. In a function that is compiled, by
whatever backend, it is one operator, ``layerzero::scan``, for which the kernel is chosen while compiling.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.autograd import forward_ad

from lz_compile.arguments import PLAIN, Arguments, is_plain, remembered
from lz_compile.lowering.ops import scan as scan_op
from lz_compile.lowering.ops.scan import OPERANDS, ScanAttrs, ScanFacts, ScanSizes
from lz_compile.runtime import context as contexts
from lz_compile.runtime import eager, fingerprint, policy

__all__ = ["kda", "linear_scan"]


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
    """
    _check_kda(q, k, v, alpha, beta, initial_state, initial_output, drop_mask, active, scale, head_first)
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
    operands = {
        "state": initial_state,
        "decay": alpha.transpose(1, 2).unsqueeze(-1),
        "left": _by_head(k * beta.unsqueeze(-1)),
        "right": _by_head(v),
        "erase": _by_head(k * alpha),
        "query": _by_head(q if scale is None else q * scale),
    }
    state_dtype = torch.promote_types(v.dtype, torch.float32) if initial_state is None else initial_state.dtype
    reads, last = _scan(operands, v.dtype, state_dtype)
    out = reads.squeeze(3).transpose(1, 2)
    if drop_mask is not None:
        out = _filled_forward(out, drop_mask.bool(), initial_output)
    return (out.transpose(1, 2) if head_first else out), last


def linear_scan(
    decay: torch.Tensor | float,
    drive: torch.Tensor | None = None,
    *,
    initial: torch.Tensor | None = None,
    dim: int = 1,
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
    _check_linear_scan(decay, drive, initial, dim)
    whole = decay if drive is None else drive
    assert isinstance(whole, torch.Tensor), "it was checked"
    factor = decay if isinstance(decay, torch.Tensor) else whole.new_full((), float(decay))
    shape, dim = tuple(whole.shape), dim % whole.dim()
    rest = (*shape[:dim], *shape[dim + 1 :])
    given = [each for each in (factor, drive, initial) if each is not None]
    wide = reduce(torch.promote_types, (each.dtype for each in given))
    columns = _Columns(shape, dim)
    operands = {
        "decay": columns.of(_of_rank(factor, len(shape))),
        "drive": None if drive is None else columns.of(drive),
    }
    if initial is not None:
        operands["state"] = columns.of(_of_rank(initial, len(rest)).unsqueeze(dim))[:, :, 0]
    reads, last = _scan(operands, wide, wide)
    return columns.restored(reads), last.reshape(rest)


class _Columns:
    """A shape as batch, head, step and columns, in the op's canonical layout: time may be anywhere.

    The dimension after time (or before it, where there is none after) is that of columns.
    """

    def __init__(self, shape: Sequence[int], dim: int) -> None:
        self._shape = tuple(shape)
        before, after = [*range(dim)], [*range(dim + 1, len(shape))]
        columns = after[-1:] if after else before[-1:]
        self._groups = (before if after else before[:-1], after[:-1], [dim], columns)
        self._order = [position for group in self._groups for position in group]
        self._is_ordered = self._order == [*range(len(shape))]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[B, H, T, 1, V]`` of a tensor of this rank, where groups of dimensions that broadcast do so still."""
        sizes = list(tensor.shape)
        for group in self._groups:
            if len(group) > 1 and not all([_is_one(sizes[position]) for position in group]):  # noqa: C419  # quicker
                for position in group:
                    sizes[position] = self._shape[position]
        if tuple(sizes) != tuple(tensor.shape):
            tensor = tensor.expand(sizes)
        first, second, time, columns = (_product([sizes[position] for position in group]) for group in self._groups)
        ordered = tensor if self._is_ordered else tensor.permute(self._order)
        return ordered.reshape(first, second, time, 1, columns)

    def restored(self, reads: torch.Tensor) -> torch.Tensor:
        """The inverse, of ``[B, H, T, 1, V]``."""
        whole = reads.reshape([self._shape[position] for position in self._order])
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


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


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
def _check_kda(
    q: Any,
    k: Any,
    v: Any,
    alpha: Any,
    beta: Any,
    state: Any,
    output: Any,
    dropped: Any,
    active: Any,
    scale: Any,
    heads: Any,
) -> None:
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


# ---- choosing and running --------------------------------------------------------------------------------------------


def _scan(
    operands: Mapping[str, torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan over canonical operands, reads after the step."""
    given = [operands.get(name) for name in OPERANDS]
    if torch.compiler.is_dynamo_compiling():
        found = torch.ops.layerzero.scan.default(*given, out_dtype, state_dtype, fingerprint.traced_source())
        return found[0], found[1]
    if any(type(each) not in PLAIN for each in given if each is not None):
        return _own(*given, attrs=_attributes(given, out_dtype, state_dtype))
    return _selected(given, out_dtype, state_dtype)


def _operator(
    state: torch.Tensor | None,
    decay: torch.Tensor | None,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    erase: torch.Tensor | None,
    drive: torch.Tensor | None,
    query: torch.Tensor | None,
    out_dtype: torch.dtype,
    state_dtype: torch.dtype,
    source: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator that graphs hold: which kernel it is, is decided where it runs, or where it is traced."""
    del source  # for caches: see traced_source
    operands = (state, decay, left, right, erase, drive, query)
    given = Arguments("linear_scan or kda")
    for name, each in zip(OPERANDS, operands, strict=True):
        given.tensor(name, each, kind="inexact", optional=True)
    return _selected(operands, out_dtype, state_dtype)


def _selected(
    operands: Sequence[torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor]
    if not is_plain(*operands):
        found = _bind(operands, out_dtype, state_dtype, is_traced=True)(*operands)
        return found
    names = (out_dtype, state_dtype, torch.is_grad_enabled(), *[eager.layout(each) for each in operands])
    found = eager.bound("scan", names, partial(_bind, operands, out_dtype, state_dtype))(*operands)
    return found


def _bind(
    operands: Sequence[torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype, is_traced: bool = False
) -> Callable[..., Any]:
    """The scan over operands like these, by the kernel that is chosen for them."""
    attrs = _attributes(operands, out_dtype, state_dtype)
    own = partial(_own, attrs=attrs)
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    facts = facts_of_call(dict(zip(OPERANDS, operands, strict=True)))
    if is_transformed or 0 in (facts.batch, facts.heads, facts.length, facts.key_dim, facts.value_dim):
        return own
    device = next(each.device for each in operands if each is not None)
    kernel = eager.kernel_for("scan", attrs, facts, device)
    if kernel is None or kernel.call is None:
        return own
    bind = None if is_traced or facts.needs_grad else getattr(kernel.call, "bind", None)
    call = partial(_called, kernel.call, attrs) if bind is None else bind(attrs)
    return eager.guarded(kernel, call, own, fallback_enabled=policy.current().settings.fallback_enabled)


def _attributes(operands: Sequence[torch.Tensor | None], out_dtype: torch.dtype, state_dtype: torch.dtype) -> ScanAttrs:
    named = dict(zip(OPERANDS, operands, strict=True))
    wide = torch.promote_types(scan_op.common_dtype(named), torch.float32)
    return ScanAttrs("after", named["erase"] is not None, wide, out_dtype, state_dtype)


def _own(*operands: torch.Tensor | None, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    return scan_op.reference(*operands, attrs=attrs)


def _called(
    call: Callable[..., Any], attrs: ScanAttrs, *operands: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel, which is not given what there is not."""
    given = {name: each for name, each in zip(OPERANDS, operands, strict=True) if each is not None}
    reads, last = call(**given, attrs=attrs)
    return reads, last


def facts_of_call(operands: Mapping[str, torch.Tensor | None]) -> ScanFacts:
    """What a call selects its kernel by: a number for every size, also while it is traced."""
    found = scan_op.facts_of(operands)
    return ScanFacts(
        *ScanSizes._make(map(contexts.known_size, scan_op.sizes_of(operands))),
        structure=found.structure,
        dtype=found.dtype,
        device=found.device,
        needs_grad=found.needs_grad,
    )


_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")
_LIBRARY.define(
    "scan" + torch.library.infer_schema(_operator, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("scan", _operator, "CompositeImplicitAutograd")
