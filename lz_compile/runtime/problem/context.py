"""What a kernel is chosen for: device, dtype, sizes, features and surroundings of one call or match of an operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch

from lz_compile.ground.hardware import Hardware, hardware
from lz_compile.ground.records import Record, plain
from lz_compile.ground.sizes import Size, range_of, symbolic_size
from lz_compile.lowering import ops

#: Our ops' names of sizes, and those that descriptors, rules and reports use.
_DIM_NAMES: Mapping[str, str] = {
    "batch": "batch_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "query_len": "seq_len_q",
    "key_len": "seq_len_k",
}
#: The hint of a size that nothing is known of while compiling (as Inductor's ``unbacked_symint_fallback``).
UNKNOWN_SIZE = 8192


@dataclass(frozen=True)
class SymbolicDim:
    """A size that is a symbol while compiling.

    ``hint`` is the size that the graph was traced with; every size from ``lower`` to ``upper`` (None: without end) may
    come. ``name`` is the expression (``s77``), ``divisor`` a number that divides it whatever the symbol's value.
    """

    hint: int
    lower: int = 0
    upper: int | None = None
    name: str = ""
    divisor: int = 1

    def __str__(self) -> str:
        return f"{self.name or 'a symbol'} ({self.lower} to {'any' if self.upper is None else self.upper})"

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        return {"hint": self.hint, "lower": self.lower, "upper": self.upper, "name": self.name}


Dim: TypeAlias = "int | SymbolicDim"


def hint(dim: Dim) -> int:
    """The size itself, or the one that it was traced with."""
    return dim if isinstance(dim, int) else dim.hint


def known_size(size: int | torch.SymInt | torch.Tensor) -> int:
    """A tensor's size, or while tracing the one to choose for."""
    if isinstance(size, int):
        return size
    if isinstance(size, torch.Tensor):  # while ``torch.jit.trace`` records it
        return int(size)
    known = range_of(size)
    return UNKNOWN_SIZE if known.hint is None else known.hint


def lower(dim: Dim) -> int:
    """The smallest size that may come."""
    return dim if isinstance(dim, int) else dim.lower


def upper(dim: Dim) -> int | None:
    """The largest size that may come; None where there is no largest."""
    return dim if isinstance(dim, int) else dim.upper


@dataclass(frozen=True)
class SelectionContext(Record):
    """One problem to choose a kernel for.

    ``operation`` is an op with its variant (``attention.causal``); ``features`` names what a kernel must support and what
    asks for it; ``layout`` is that of the operands, ``attn_mask_type`` one of ``none``, ``bool`` and ``float``.
    ``memory_headroom_bytes`` is what a kernel may use beside its operands and result (None: whatever it likes). ``fusable``
    are the ops directly before this one, which a kernel may compute along. ``copies`` is how many a source makes of what
    heads share, which leaving it alone pays for.
    """

    operation: str
    hardware: Hardware
    dtype: torch.dtype
    dims: Mapping[str, Dim]
    features: Mapping[str, str] = field(default_factory=dict)
    layout: str = "BHSD"
    is_last_dim_contiguous: bool = True
    attn_mask_type: str = "none"
    has_custom_scale: bool = False
    is_training: bool = False
    requires_deterministic: bool = False
    requires_batch_invariant: bool = False
    is_cuda_graph_capturing: bool = False
    memory_headroom_bytes: int | None = None
    fusable: tuple[str, ...] = ()
    copies: int = 1

    @property
    def op(self) -> str:
        """The operation without its variant."""
        return self.operation.partition(".")[0]

    @property
    def dtype_name(self) -> str:
        """``float16`` for ``torch.float16``."""
        return name_of(self.dtype)

    @property
    def device_type(self) -> str:
        """As torch calls it."""
        return "cuda" if self.hardware.platform == "rocm" else self.hardware.platform

    def hints(self) -> dict[str, int]:
        """Every size as a number: a symbolic one as it was traced."""
        return {name: hint(dim) for name, dim in self.dims.items()}

    def sizes(self) -> dict[str, int]:
        """Every size and ``dtype_bytes`` as numbers, the largest that may come where that is known."""
        largest = {name: upper(dim) for name, dim in self.dims.items()}
        found = {name: hint(self.dims[name]) if size is None else size for name, size in largest.items()}
        return {**found, "dtype_bytes": self.dtype.itemsize}

    def to_dict(self) -> dict[str, Any]:
        """As stable JSON."""
        dims, features = (dict(sorted(each.items())) for each in (self.dims, self.features))
        told = {**super().to_dict(), "dtype": self.dtype_name, "dims": plain(dims), "features": features}
        rare = {"fusable": self.fusable, "requires_batch_invariant": self.requires_batch_invariant}
        rare |= {"copies": self.copies > 1}
        return {name: value for name, value in told.items() if rare.get(name, True)}


def name_of(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


@cache
def dim_names(op: str) -> tuple[str, ...]:
    """The names of an op's sizes, as descriptors, rules and reports use them."""
    return tuple(_DIM_NAMES.get(name, name) for name in size_fields(op))


def sizes_of(op: str, facts: Any) -> dict[str, Size]:
    """The sizes in an op's facts by their names in a context: numbers, or expressions over symbols."""
    return {_DIM_NAMES.get(name, name): getattr(facts, name) for name in size_fields(op)}


@cache
def operations() -> tuple[str, ...]:
    """Every operation: each op and its variants."""
    return tuple(name for op in ops.names() for name in (op, *(f"{op}.{variant}" for variant in variants(op))))


@cache
def variants(op: str) -> tuple[str, ...]:
    """The variants of an op, as ``causal`` and ``full`` of attention; its attributes say which one they are."""
    return tuple(getattr(ops.module(op), "VARIANT_ATTRIBUTES", ()))


def _operation(op: str, attributes: Any) -> str:
    return f"{op}.{attributes.variant}" if variants(op) else op


@cache
def size_fields(op: str) -> tuple[str, ...]:
    """The fields of an op's facts that are sizes."""
    return tuple(name for name, kind in _field_names(op, "Facts").items() if kind == "Size")


def _field_names(op: str, suffix: str) -> dict[str, Any]:
    """The fields, and their types as written, of an op's attributes (``Attrs``) or ``Facts``."""
    owned = (value for name, value in vars(ops.module(op)).items() if name.endswith(suffix) and is_dataclass(value))
    return {each.name: each.type for kind in owned for each in fields(kind)}


# ---- from facts ----------------------------------------------------------------------------------------------------


def of_facts(
    op: str,
    attributes: Any,
    facts: Any,
    *,
    device: torch.device | str | None = None,
    tensors: Sequence[torch.Tensor] | None = None,
    deterministic: bool = False,
) -> SelectionContext:
    """The context of an op with these attributes and facts; ``tensors`` know what may be known of symbolic sizes."""
    dims = {name: _dim(size, tensors or ()) for name, size in sizes_of(op, facts).items()}
    return SelectionContext(
        operation=_operation(op, attributes),
        hardware=hardware(facts.device if device is None else device),
        dtype=facts.dtype,
        dims=dims,
        features=ops.module(op).features(attributes, facts),
        layout=ops.module(op).LAYOUT,
        attn_mask_type=_mask_type(attributes),
        has_custom_scale=_has_custom_scale(attributes, dims),
        is_training=bool(getattr(facts, "needs_grad", False)),
        requires_deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        copies=getattr(facts, "copies", 1),
    )


def _dim(size: Size, tensors: Sequence[torch.Tensor]) -> Dim:
    if isinstance(size, int):
        return size

    known = symbolic_size(size, tensors)
    least, most = known.lower, known.upper
    if least == most:
        return least
    guess = UNKNOWN_SIZE if most is None else min(UNKNOWN_SIZE, most)
    found = max(least, guess) if known.hint is None else known.hint
    coefficient = size.as_coeff_Mul()[0]
    divisor = int(coefficient) if coefficient.is_Integer and coefficient > 0 else 1
    return SymbolicDim(found, least, most, str(size), divisor)


def _mask_type(attributes: Any) -> str:
    if not hasattr(attributes, "has_mask"):  # an op without masks: its bias is none, either
        return "none"
    if getattr(attributes, "has_bias", False):
        return "float"
    return "bool" if getattr(attributes, "has_mask", False) else "none"


def _has_custom_scale(attributes: Any, dims: Mapping[str, Dim]) -> bool:
    """Whether an attention's scale is another than ``head_dim ** -0.5``."""
    scale, head_dim = getattr(attributes, "scale", None), dims.get("head_dim")
    if scale is None:
        return False
    if not isinstance(head_dim, int) or head_dim == 0:
        return True
    return abs(float(scale) * math.sqrt(head_dim) - 1.0) > 1e-6


class Symbols(Protocol):
    """What a selection asks of the symbolic sizes of a match (``compile/problems.py``)."""

    @property
    def symbols(self) -> Mapping[str, Any]:
        """Every symbol that can be asked about, by name."""

    @property
    def hidden(self) -> Mapping[str, Any]:
        """Every symbol that cannot, because data decides it."""

    def at(self, values: Mapping[str, int]) -> dict[str, int]:
        """Every size, with the symbols at ``values``."""

    def names_in(self, dims: tuple[str, ...]) -> list[str]:
        """The symbols that the sizes of some dims depend on."""
