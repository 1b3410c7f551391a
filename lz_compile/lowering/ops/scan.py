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
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from lz_compile.ground.sizes import Size, is_one
from lz_compile.lowering import operands as base
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler
from lz_compile.lowering.scan_products import outer, product

#: Whether a step reads the state that it leaves behind, or the one that it found.
Reads: TypeAlias = Literal["after", "before"]
#: What a decay is one factor for: nothing (there is none), the whole state, a row, a column, or a single element.
DecayKind: TypeAlias = Literal["none", "scalar", "key", "value", "full"]

LAYOUT = "BHTKV"
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
DIMS: Mapping[str, str] = {
    "state": "BHKV",
    "decay": "BHTKV",
    "left": "BHTRK",
    "right": "BHTRV",
    "erase": "BHTRK",
    "drive": "BHTKV",
    "query": "BHTQK",
}
#: And of both results.
RESULTS = ("BHTQV", "BHKV")


@dataclass(frozen=True)
class ScanAttrs(OpAttributes):
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


Attributes = ScanAttrs
DIFFERENTIABLE = tuple(DIMS)


@dataclass(frozen=True)
class ScanStructure:
    """Which terms a step has."""

    decay: DecayKind = "none"
    has_state: bool = False
    has_updates: bool = False
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

    def by_dim(self) -> dict[str, int]:
        """By the letters of dimensions."""
        return dict(zip("BHTKVRQ", self, strict=True))


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


#: The same, as every op says it: all dimensions broadcast.
SHAPES: Mapping[str, str] = {name: " ".join(f"{dim}|1" for dim in dims) for name, dims in DIMS.items()}
LENGTHS = ("T",)
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {"delta": {"erases": True}, "diagonal": {"erases": False}}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {
    "batch_size": (1,),
    "num_heads": (8,),
    "length": (512, 2048),
    "key_dim": (64,),
    "value_dim": (64,),
    "rank": (1,),
    "reads": (1,),
}


@operands
class Operands(base.Operands):
    """What a scan is over, of which something has steps; shapes as in the module's legend."""

    state: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    erase: torch.Tensor | None = None
    drive: torch.Tensor | None = None
    query: torch.Tensor | None = None

    @property
    def like(self) -> Any:
        """One of those that there are, on whose device results are made."""
        return next(iter(self.given().values()))


def sizes_of(x: Operands) -> ScanSizes:
    """The sizes of a scan over these operands, which may be fake tensors or proxies, too.

    Symbolic sizes are not compared, so that no guard is made.

    Raises:
        ValueError: an operand has another number of dimensions, sizes differ, or operands are missing.
    """
    found: dict[str, Any] = {}
    for name, operand in x.given().items():
        names, shape = DIMS[name], tuple(operand.shape)
        if len(shape) != len(names):
            raise MisfitError("scan", name, f"with the dimensions {names}", shape)
        for dim, size in zip(names, shape, strict=True):
            known = found.setdefault(dim, size)
            if is_one(known) or not (isinstance(known, int) or is_one(size)):  # a number is known rather than a symbol
                found[dim] = size
            elif isinstance(known, int) and isinstance(size, int) and size not in (1, known):
                raise MisfitError("scan", name, f"of size 1 or {known} in {dim} of {names}", shape)
    _check(x, found)
    batch, heads, length, rows, columns = (found.get(dim, 1) for dim in "BHTKV")
    return ScanSizes(batch, heads, length, rows, columns, found.get("R", 0), found.get("Q", 1))


def _check(x: Operands, sizes: Mapping[str, int]) -> None:
    if (x.left is None) != (x.right is None) or (x.erase is not None and x.left is None):
        raise MisfitError("scan", "left and right", "together, and erase with them only", "some of them")
    if x.query is None and not is_one(sizes.get("K", 1)):
        raise MisfitError("scan", "a query", f"of a state of {sizes['K']} rows", "none")
    if "T" not in sizes:
        raise MisfitError("scan", "an operand", "that has steps", "none")


def factor_kind(operand: torch.Tensor | None) -> DecayKind:
    """What a decay, or a summand, has one number for."""
    if operand is None:
        return "none"
    return kind_of(*(not is_one(size) for size in operand.shape[3:]))


def kind_of(has_rows: bool, has_columns: bool) -> DecayKind:
    """The kind of what differs from row to row of the state, from column to column, from both or from neither."""
    if has_rows:
        return "full" if has_columns else "key"
    return "value" if has_columns else "scalar"


def facts_of(x: Operands) -> ScanFacts:
    """The facts of a scan over tensors; raises what :func:`sizes_of` does."""
    return ScanFacts(
        *sizes_of(x),
        structure=ScanStructure(
            factor_kind(x.decay), has_updates=x.left is not None, **x.has("state", "drive", "query")
        ),
        dtype=common_dtype(x),
        device=x.like.device.type,
        needs_grad=x.wants_gradient(),
    )


def common_dtype(x: Operands) -> torch.dtype:
    """The narrowest dtype that holds the values of every operand."""
    dtypes: list[torch.dtype] = [each.dtype for each in x.given().values()]
    return reduce(torch.promote_types, dtypes)


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[ScanAttrs, ScanFacts]:
    """The attributes, of which some are given, and the facts of a scan over tensors (real or fake)."""
    if not x.given():
        raise MisfitError("scan", "operands", "one of which has steps", "none")
    facts = facts_of(x)
    wide = torch.promote_types(facts.dtype, torch.float32)
    found = {"compute_dtype": wide, "out_dtype": facts.dtype, "state_dtype": facts.dtype, **given}
    return ScanAttrs(**{**found, "erases": x.erase is not None}), facts


def fake(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty results, contiguous."""
    sizes = sizes_of(x).by_dim()
    reads, last = ([sizes[dim] for dim in dims] for dims in RESULTS)
    return x.like.new_empty(reads, dtype=attrs.out_dtype), x.like.new_empty(last, dtype=attrs.state_dtype)


def reference(x: Operands, attrs: ScanAttrs) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of the op, step by step, in float32 or the widest dtype of its operands (float64: the ground truth)."""
    sizes = sizes_of(x)
    wide = torch.promote_types(torch.promote_types(common_dtype(x), attrs.compute_dtype), torch.float32)
    x = x.map(lambda each: each.to(wide))
    steps = {name: _expanded(name, each, sizes).unbind(2) for name, each in x.given().items() if name != "state"}
    shape = (sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim)
    current = x.like.new_zeros(shape) if x.state is None else x.state.expand(shape)
    reads = []
    for time in range(sizes.length):
        step = {name: each[time] for name, each in steps.items()}
        following = advance(kept(current, step["decay"]) if attrs.drops else current, step)
        reads.append(read(current if attrs.reads == "before" else following, step.get("query")))
        current = following
    out = torch.stack(reads, 2) if reads else x.like.new_zeros((*shape[:2], 0, sizes.reads, sizes.value_dim))
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
        found = found + outer(step["left"], written)
    return found + step["drive"] if "drive" in step else found


def kept(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The state, zero where the decay drops it."""
    return torch.where(decay == DROPPED, 0.0, state)


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
        "erase": attrs.erases and "updates that read what they write over",
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


class ScanSample(Sample):
    """A problem to measure, of which the reads are looked at, not the last state."""

    def with_kernel(self, call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        """The problem with a kernel over the canonical operands."""
        return super().with_kernel(lambda x, attrs: call(x, attrs)[0])


def _written(attrs: ScanAttrs, *inputs: torch.Tensor) -> torch.Tensor:
    """The op as models spell it: a loop over time, with products that broadcast."""
    given = _canonical(*inputs, erases=attrs.erases).given()
    query, right = given["query"], given["right"]
    state = right.new_zeros((*right.shape[:2], query.shape[4], right.shape[4]))
    outputs = []
    for time in range(query.shape[2]):
        step = {name: each[:, :, time] for name, each in given.items()}
        state = advance(state, step)
        outputs.append(step["query"] @ state)
    return torch.stack(outputs, 2)


def _canonical(*inputs: torch.Tensor, erases: bool) -> Operands:
    """The operands of the delta rule with a decay for every channel, or of gated linear attention."""
    query, key, value, decay = inputs
    erase = key * decay.unsqueeze(3) if erases else None
    return Operands(decay=decay.unsqueeze(-1), left=key, right=value, erase=erase, query=query)


@sampler("delta")
def sample(asked: Asked) -> ScanSample:
    """A problem of given sizes with random inputs."""

    def random(last: str, count: str) -> torch.Tensor:
        shape = asked.of("batch_size", "num_heads", "length", count, last)
        return torch.randn(shape, device=asked.device, dtype=torch.float32)

    query, value = asked.given(random("key_dim", "reads")), asked.given(random("value_dim", "rank"))
    key = torch.nn.functional.normalize(random("key_dim", "rank"), dim=-1) * asked.sizes["rank"] ** -0.5
    decay = asked.given(torch.sigmoid(random("key_dim", "rank")[:, :, :, 0] + 2))
    operands = partial(_canonical, erases=asked.variant == "delta")
    return ScanSample.of((query, asked.given(key), value, decay), operands, _written)
