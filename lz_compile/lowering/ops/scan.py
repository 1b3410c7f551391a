"""Recurrences that are affine in their state: fast weights, gated and delta rules, state space models, moving averages.

A state of ``K`` rows is multiplied by a factor, changed by rank-one updates, and read at every step:

    S_t = decay_t * S_{t-1} + sum_r left_{t,r} (right_{t,r} - erase_{t,r}^T S_{t-1})^T + drive_t
    y_{t,q} = query_{t,q}^T S_t  (``attrs.reads`` is ``after``)  or  query_{t,q}^T S_{t-1}  (``before``)

Canonical layout, in which every kernel takes and returns it:

    state   [B, H, K, V]     the state before the first step; absent: zeros
    decay   [B, H, T, K, V]  the factor of the state before the step; absent: one
    left    [B, H, T, R, K]  rank-one updates: the keys under which is written
    right   [B, H, T, R, V]  and the values that are written, given where ``left`` is
    erase   [B, H, T, R, K]  what is read before the update, to be written over; absent: nothing is
    drive   [B, H, T, K, V]  a dense summand; absent: zero
    query   [B, H, T, Q, K]  what is read; absent: K is 1 and the state itself is the one read (Q is 1)
    result  reads [B, H, T, Q, V] in ``attrs.out_dtype``, and the last state [B, H, K, V] in ``attrs.state_dtype``

In every dimension an operand may have the size 1, which broadcasts; sizes are the largest of all operands. Operands may
have strides of any kind. A decay ``[..., K, 1]`` is one for each key channel (KDA, GLA), ``[..., 1, 1]`` one for each head
(gated delta rule, Mamba-2, RetNet), ``[..., K, V]`` the full diagonal (Mamba-1). Decays are factors, never logarithms: zero,
negative ones and those above one are exact.

Zero times NaN is NaN. Under ``attrs.drops`` a step may also begin without what was there, as a condition selects it: where
the decay is :data:`DROPPED`, the state before the step counts as zero, for the decay and for what is erased. Reads
``before`` the step still see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from lz_compile.lowering.scan_products import product

if TYPE_CHECKING:
    from lz_compile.passes.axes import Size

#: Whether a step reads the state that it leaves behind, or the one that it found.
Reads: TypeAlias = Literal["after", "before"]
#: What a decay is one factor for: nothing (there is none), the whole state, a row, a column, or a single element.
DecayKind: TypeAlias = Literal["none", "scalar", "key", "value", "full"]

VARIANTS = ("delta", "diagonal")
LAYOUT = "BHTKV"
#: What an eager call runs where nothing is better.
EAGER_KERNEL = "torch.scan_sequential"
EXACT_DIMS = ("key_dim", "value_dim", "rank", "reads")
BUCKETED_DIMS = (("length",), ("batch_size", "num_heads"))
TIMELESS_FEATURES: frozenset[str] = frozenset({"drops", "reads_before", "state", "many_steps"})

#: How many steps may be written out one after the other in a compiled graph; more are ``many_steps``.
FEW_STEPS = 4

#: Under ``attrs.drops``, the decay of a step that drops the state. Every floating dtype holds this number, and no model
#: decays by it. Zero would not do: a decay that comes out as zero keeps NaN, as it does in the source.
DROPPED = -57344.0

#: The dimensions of every operand.
OPERANDS: Mapping[str, str] = {
    "state": "BHKV",
    "decay": "BHTKV",
    "left": "BHTRK",
    "right": "BHTRV",
    "erase": "BHTRK",
    "drive": "BHTKV",
    "query": "BHTQK",
}


@dataclass(frozen=True)
class ScanAttrs:
    """The attributes of one scan.

    ``erases`` says that there is an operand ``erase``. ``compute_dtype`` is the widest dtype in which the source keeps its
    state or computes a step; a kernel may round less than that, never more. ``drops`` says that decays may be
    :data:`DROPPED`.
    """

    reads: Reads = "after"
    erases: bool = False
    compute_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    drops: bool = False

    @property
    def variant(self) -> str:
        """``delta`` where a step reads what it writes over, else ``diagonal``: rows and columns do not mix."""
        return "delta" if self.erases else "diagonal"

    def deterministic(self) -> ScanAttrs:
        """The same: nothing is random."""
        return self

    def assuming_finite(self) -> ScanAttrs:
        """The same: NaN stays NaN in every kernel."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Names and values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in values.items()}


@dataclass(frozen=True)
class ScanStructure:
    """Which terms a step has."""

    decay: DecayKind = "none"
    has_state: bool = False
    has_updates: bool = False
    has_erase: bool = False
    has_drive: bool = False
    has_query: bool = False


class ScanSizes(NamedTuple):
    """The sizes of one scan. ``rank`` is 0 where there are no updates."""

    batch: int
    heads: int
    length: int
    key_dim: int
    value_dim: int
    rank: int
    reads: int


@dataclass(frozen=True)
class ScanFacts:
    """Sizes, structure, dtype (the widest of the operands) and device of one scan, for kernel selection."""

    batch: Size
    heads: Size
    length: Size
    key_dim: Size
    value_dim: Size
    rank: Size
    reads: Size
    structure: ScanStructure
    dtype: torch.dtype
    device: str
    needs_grad: bool = False


Operands: TypeAlias = Mapping[str, torch.Tensor | None]


def sizes_of(operands: Operands) -> ScanSizes:
    """The sizes of a scan over these operands (None or missing: absent), which may be fake tensors or proxies, too.

    Symbolic sizes are not compared, so that no guard is made.

    Raises:
        ValueError: an operand has another number of dimensions, sizes differ, or operands are missing.
    """
    found: dict[str, Any] = {}
    for name, operand in operands.items():
        if operand is None:
            continue
        names = OPERANDS[name]
        if len(operand.shape) != len(names):
            raise ValueError(f"scan: expected {name} with the dimensions {names}, received {tuple(operand.shape)}")
        for dim, size in zip(names, operand.shape, strict=True):
            known = found.setdefault(dim, size)
            if is_one(known):
                found[dim] = size
            elif isinstance(known, int) and isinstance(size, int) and size not in (1, known):
                raise ValueError(
                    f"scan: expected {name} of size 1 or {known} in {dim} of {names}, received {tuple(operand.shape)}"
                )
    _check(operands, found)
    batch, heads, length, rows, columns = (found.get(dim, 1) for dim in "BHTKV")
    return ScanSizes(batch, heads, length, rows, columns, found.get("R", 0), found.get("Q", 1))


def is_one(size: Any) -> bool:
    """Whether an operand broadcasts along a dimension; a symbol never stands for one."""
    return isinstance(size, int) and size == 1


def _check(operands: Operands, sizes: Mapping[str, int]) -> None:
    left, right, erase, query = (operands.get(name) for name in ("left", "right", "erase", "query"))
    if (left is None) != (right is None) or (erase is not None and left is None):
        raise ValueError("scan: expected left and right together, and erase with them only")
    if query is None and not is_one(sizes.get("K", 1)):
        raise ValueError(f"scan: expected a query of a state of {sizes['K']} rows, received none")
    if "T" not in sizes:
        raise ValueError("scan: expected an operand that has steps, received none")


def structure_of(operands: Operands) -> ScanStructure:
    """Which terms a step over these operands has."""
    return ScanStructure(
        decay=_decay_kind(operands.get("decay")),
        has_state=operands.get("state") is not None,
        has_updates=operands.get("left") is not None,
        has_erase=operands.get("erase") is not None,
        has_drive=operands.get("drive") is not None,
        has_query=operands.get("query") is not None,
    )


def _decay_kind(decay: torch.Tensor | None) -> DecayKind:
    if decay is None:
        return "none"
    rows, columns = (not is_one(size) for size in decay.shape[3:])
    if rows:
        return "full" if columns else "key"
    return "value" if columns else "scalar"


def facts_of(operands: Operands) -> ScanFacts:
    """The facts of a scan over tensors.

    Raises:
        ValueError: the operands do not fit together.
    """
    given = [each for each in operands.values() if each is not None]
    sizes = sizes_of(operands)
    return ScanFacts(
        *sizes,
        structure=structure_of(operands),
        dtype=common_dtype(operands),
        device=given[0].device.type,
        needs_grad=torch.is_grad_enabled() and any(each.requires_grad for each in given),
    )


def common_dtype(operands: Operands) -> torch.dtype:
    """The narrowest dtype that holds the values of every operand."""
    dtypes = [each.dtype for each in operands.values() if each is not None]
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found


def reference(
    state: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    left: torch.Tensor | None = None,
    right: torch.Tensor | None = None,
    erase: torch.Tensor | None = None,
    drive: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    *,
    attrs: ScanAttrs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of the op, step by step, in float32 or the widest dtype of its operands (float64: the ground truth).

    Shapes:
        as in the module's legend.

    Raises:
        ValueError: the operands do not fit together.
    """
    given = {
        "state": state,
        "decay": decay,
        "left": left,
        "right": right,
        "erase": erase,
        "drive": drive,
        "query": query,
    }
    sizes = sizes_of(given)
    wide = torch.promote_types(torch.promote_types(common_dtype(given), attrs.compute_dtype), torch.float32)
    operands = {name: each.to(wide) for name, each in given.items() if each is not None}
    steps = {name: _expanded(name, each, sizes).unbind(2) for name, each in operands.items() if name != "state"}
    like = next(iter(operands.values()))
    shape = (sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim)
    current = operands["state"].expand(shape) if "state" in operands else like.new_zeros(shape)
    reads = []
    for time in range(sizes.length):
        step = {name: each[time] for name, each in steps.items()}
        following = advance(kept(current, step["decay"]) if attrs.drops else current, step)
        reads.append(read(current if attrs.reads == "before" else following, step.get("query")))
        current = following
    out = torch.stack(reads, 2) if reads else like.new_zeros((*shape[:2], 0, sizes.reads, sizes.value_dim))
    return out.to(attrs.out_dtype), current.to(attrs.state_dtype)


def _expanded(name: str, operand: torch.Tensor, sizes: ScanSizes) -> torch.Tensor:
    """All steps, and all rows where products sum over them."""
    rows = sizes.key_dim if name in ("erase", "query") else operand.shape[-1]
    return operand.expand(*operand.shape[:2], sizes.length, operand.shape[3], rows)


def advance(state: torch.Tensor, step: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The state after one step, whose operands have no time: ``decay [B, H, K, V]``, ``left [B, H, R, K]`` and so on."""
    found = state * step["decay"] if "decay" in step else state
    if "left" in step:
        written = step["right"]
        if "erase" in step:
            written = written - product(step["erase"], state)
        found = found + _outer(step["left"], written)
    return found + step["drive"] if "drive" in step else found


def kept(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The state, zero where the decay drops it."""
    return torch.where(decay == DROPPED, 0.0, state)


def _outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left^T @ right``, ``[B, H, K, V]``, where the ranks of either may be one and broadcast."""
    if left.shape[2] == right.shape[2]:
        return product(left.transpose(2, 3), right)
    return (left.unsqueeze(4) * right.unsqueeze(3)).sum(2)


def read(state: torch.Tensor, query: torch.Tensor | None) -> torch.Tensor:
    """What a query ``[B, H, Q, K]`` reads: ``[B, H, Q, V]``."""
    return state if query is None else product(query, state)


def features(attrs: ScanAttrs, facts: ScanFacts) -> dict[str, str]:
    """What a kernel must support for this scan: feature name (``supports`` in descriptors) and what asks for it."""
    structure = facts.structure
    is_short = isinstance(facts.length, int) and facts.length <= FEW_STEPS
    widths = (facts.key_dim, facts.value_dim, facts.rank, facts.reads)
    needed = {
        "state": structure.has_state and "a state to start from",
        f"{structure.decay}_decay": structure.decay != "none" and f"a decay of kind {structure.decay}",
        "updates": structure.has_updates and "rank-one updates",
        "rank": structure.has_updates and facts.rank != 1 and f"{facts.rank} rank-one updates in a step",
        "erase": structure.has_erase and "updates that read what they write over",
        "drive": structure.has_drive and "a dense summand",
        "drops": attrs.drops and "states that a condition drops, NaN included",
        "query": structure.has_query and "reads by a query",
        "trajectory": not structure.has_query and "every state as a result",
        "queries": structure.has_query and facts.reads != 1 and f"{facts.reads} reads in a step",
        "reads_before": attrs.reads == "before" and "reads of the state before the step",
        "many_steps": not is_short and f"{facts.length} steps",
        "symbolic_length": not isinstance(facts.length, int) and "a symbolic number of steps",
        "symbolic_widths": not all(isinstance(size, int) for size in widths) and "symbolic widths of the state",
        "training": facts.needs_grad and "gradients",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


@dataclass(frozen=True)
class Sample:
    """A problem to measure: a function of ``inputs`` for a kernel, and the same as a model's source would spell it."""

    inputs: tuple[torch.Tensor, ...]
    attrs: ScanAttrs
    facts: ScanFacts

    def with_kernel(self, call: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        """The problem with a kernel over the canonical operands."""

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return call(**_canonical(*inputs, erases=self.attrs.erases), attrs=self.attrs)[0]

        return run

    def as_written(self) -> Callable[..., torch.Tensor]:
        """The problem as models spell it: a loop over time, with products that broadcast."""

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            operands = _canonical(*inputs, erases=self.attrs.erases)
            query, right = operands["query"], operands["right"]
            state = right.new_zeros((*right.shape[:2], query.shape[4], right.shape[4]))
            outputs = []
            for time in range(query.shape[2]):
                step = {name: each[:, :, time] for name, each in operands.items()}
                state = advance(state, step)
                outputs.append(step["query"] @ state)
            return torch.stack(outputs, 2)

        return run


def _canonical(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, *, erases: bool
) -> dict[str, torch.Tensor]:
    """The operands of the delta rule with a decay for every channel, or of gated linear attention."""
    operands = {"query": query, "left": key, "right": value, "decay": decay.unsqueeze(-1)}
    return {**operands, "erase": key * decay.unsqueeze(3)} if erases else operands


def sample(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    variant: str = "delta",
    is_training: bool = False,
) -> Sample:
    """A problem of given sizes (by the names that descriptors use) with random inputs."""

    def random(last: str, count: str) -> torch.Tensor:
        shape = [sizes[name] for name in ("batch_size", "num_heads", "length", count, last)]
        return torch.randn(shape, device=device, dtype=torch.float32)

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).requires_grad_(is_training)

    query, value = given(random("key_dim", "reads")), given(random("value_dim", "rank"))
    key = given(torch.nn.functional.normalize(random("key_dim", "rank"), dim=-1) * sizes["rank"] ** -0.5)
    decay = given(torch.sigmoid(random("key_dim", "rank")[:, :, :, 0] + 2))
    erases = variant == "delta"
    attrs = ScanAttrs(erases=erases, out_dtype=dtype, state_dtype=dtype)
    operands = _canonical(query, key, value, decay, erases=erases)
    return Sample((query, key, value, decay), attrs, facts_of(operands))
