"""Products with weights that are stored in few bits: ``input @ dequantised(weight)^T + bias``.

Canonical layout:

    input   [N, K]
    weight  [O, W]; int8, uint8 or float8 with W = K, or uint8 that holds two numbers of four bits, with W = K / 2
    scale   [O or 1, G or 1], what stored numbers are multiplied by; G divides K, and each number serves K / G neighbours
    zero    [O or 1, G or 1], what is subtracted from a stored number before that
    offset  [O or 1, G or 1], what is added after that
    bias    [O]
    codebook [16], what the sixteen numbers of four bits stand for (NF4); without it, for themselves
    order   [K], which column of the input each column of the weight goes with; without it, the same
    result  [N, O] in ``attrs.out_dtype``

The weight that is meant is ``(stored - zero) * scale + offset``, of ``codebook[stored]`` where there is one. Of two numbers
in a byte, ``packing`` says which is where: ``low_first`` has in byte ``j`` the columns ``2 j`` (the lower four bits) and
``2 j + 1``, ``high_first`` the other way round; ``low_half`` has the columns ``j`` (the lower bits) and ``K / 2 + j``,
``high_half`` the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler

#: One number in each element, or two in a byte.
Packing: TypeAlias = Literal["none", "low_first", "high_first", "low_half", "high_half"]

#: Kinds of float8 that kernels read.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Fewer columns than this fill no vector register.
FEW_COLUMNS = 8

LAYOUT = "NK"
EXACT_DIMS = ("in_features", "out_features")
BUCKETED_DIMS = (("num_rows",),)
TIMELESS_FEATURES: frozenset[str] = frozenset({"bias", "zero", "offset"})


@dataclass(frozen=True)
class LinearAttrs(OpAttributes):
    """The attributes of one product with a stored weight.

    ``is_transposed`` says that neighbours in a row of the weight are none in memory. ``compute_dtype`` is the widest dtype in
    which the source computes anything; a kernel may round less, never more. Where the source ``is_native``, PyTorch has it as
    one call.
    """

    packing: Packing = "none"
    is_transposed: bool = False
    has_scale: bool = False
    has_zero: bool = False
    has_offset: bool = False
    has_bias: bool = False
    has_codebook: bool = False
    has_order: bool = False
    is_native: bool = False
    compute_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32


Attributes = LinearAttrs
#: The operands that kernels give gradients of: none; PyTorch's own operations have theirs.
DIFFERENTIABLE: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinearFacts:
    """Sizes, dtypes (of the input and of what is stored) and device of one product, for kernel selection."""

    num_rows: Size
    in_features: Size
    out_features: Size
    groups: int
    dtype: torch.dtype
    stored_dtype: torch.dtype
    device: str
    needs_grad: bool = False


SHAPES: Mapping[str, str] = {
    "input": "N K",
    "weight": "O W",
    **dict.fromkeys(("scale", "zero", "offset"), "O|1 G|1"),
    "bias": "O",
    "codebook": "16",
    "order": "K",
}
#: What the elements of operands are that are no floating-point numbers of 16 bits or more.
KINDS: Mapping[str, str] = {"weight": "bytes", "zero": "real", "order": "int64"}
LENGTHS = ("N",)
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {"quantised": {}}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {"num_rows": (1, 256), "in_features": (4096,), "out_features": (4096,)}


@operands
class Operands(base.Operands):
    """What is multiplied, the stored weight, what its numbers mean, and a bias; shapes as in the module's legend."""

    input: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    codebook: torch.Tensor | None = None
    order: torch.Tensor | None = None


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[LinearAttrs, LinearFacts]:
    """The attributes, of which some are given, and the facts of a product over tensors (real or fake)."""
    packing, columns, groups = given.get("packing", "none"), sizes["K"], sizes["G"]
    wanted = columns if packing == "none" else columns // 2
    if packing != "none" and (columns % 2 or x.weight.dtype != torch.uint8):
        raise MisfitError("linear", "weight", "in uint8, for an even number of columns", f"{x.weight.dtype}, {columns}")
    if sizes["W"] != wanted:
        advice = "Two numbers in a byte are told by packing"
        raise MisfitError(
            "linear", "weight", f"of {wanted} elements in a row for {columns} columns", sizes["W"], advice
        )
    if x.codebook is not None and packing == "none":
        raise MisfitError("linear", "codebook", "for two numbers in a byte", "one in each", "They are told by packing")
    if groups == 0 or columns % groups:
        raise MisfitError("linear", "scale", f"of groups that divide {columns} columns", groups)
    told = x.has("scale", "zero", "offset", "bias", "codebook", "order")
    told["is_transposed"] = x.weight.shape[1] != 1 and x.weight.stride(1) != 1
    dtype = x.input.dtype
    attrs = LinearAttrs(
        **{"compute_dtype": torch.promote_types(dtype, torch.float32), "out_dtype": dtype, **given, **told}
    )
    facts = LinearFacts(
        sizes["N"], columns, sizes["O"], groups, dtype, x.weight.dtype, x.input.device.type, x.wants_gradient()
    )
    return attrs, facts


def fake(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    """An empty result, contiguous."""
    return x.input.new_empty((x.input.shape[0], x.weight.shape[0]), dtype=attrs.out_dtype)


def reference(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the wider dtype of its input.

    Shapes:
        as in the module's legend.
    """
    wide = torch.promote_types(torch.promote_types(x.input.dtype, attrs.compute_dtype), torch.float32)
    bias = None if x.bias is None else x.bias.to(wide)
    return torch.nn.functional.linear(ordered(x).to(wide), dequantised(x, attrs, wide), bias).to(attrs.out_dtype)


def ordered(x: Operands) -> torch.Tensor:
    """The input with its columns in the order of the weight's."""
    return x.input if x.order is None else x.input.index_select(1, x.order)


def dequantised(x: Operands, attrs: LinearAttrs, dtype: torch.dtype) -> torch.Tensor:
    """The weight that is meant, ``[O, K]``."""
    numbers = unpacked(x.weight, attrs.packing)
    found: torch.Tensor = numbers.to(dtype) if x.codebook is None else x.codebook.to(dtype)[numbers.long()]
    found = found.unflatten(1, (groups_of(x), -1))
    if x.zero is not None:
        found = found - x.zero.to(dtype)[..., None]
    if x.scale is not None:
        found = found * x.scale.to(dtype)[..., None]
    if x.offset is not None:
        found = found + x.offset.to(dtype)[..., None]
    return found.flatten(1)


def groups_of(x: Operands) -> int:
    """How many groups a row of the weight has."""
    return max((each.shape[1] for each in (x.scale, x.zero, x.offset) if each is not None), default=1)


def unpacked(weight: torch.Tensor, packing: Packing) -> torch.Tensor:
    """A number in each element, ``[O, K]``."""
    if packing == "none":
        return weight
    parts = [weight & 15, weight >> 4]
    if packing.startswith("high"):
        parts.reverse()
    return torch.stack(parts, -1).flatten(1) if packing.endswith("first") else torch.cat(parts, -1)


def packed(numbers: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Numbers from 0 to 15 ``[O, K]``, two in a byte."""
    if packing.endswith("first"):
        first, second = numbers[:, ::2], numbers[:, 1::2]
    else:
        first, second = numbers.chunk(2, -1)
    low, high = (first, second) if packing.startswith("low") else (second, first)
    return (low | (high << 4)).to(torch.uint8)


def features(attrs: LinearAttrs, facts: LinearFacts) -> dict[str, str]:
    """What a kernel must support for this product: feature name (``supports`` in descriptors) and what asks for it."""
    stored = str(facts.stored_dtype).removeprefix("torch.")
    is_four = attrs.packing != "none"
    needed = {
        "int8": facts.stored_dtype == torch.int8 and "a weight in int8",
        "uint8": facts.stored_dtype == torch.uint8 and not is_four and "a weight in uint8",
        "float8": facts.stored_dtype in FLOAT8 and f"a weight in {stored}",
        "other_weight": facts.stored_dtype not in (torch.int8, torch.uint8, *FLOAT8) and f"a weight in {stored}",
        "int4": is_four and f"two numbers of a weight in a byte ({attrs.packing})",
        "small_groups": facts.groups > 1
        and facts.in_features // facts.groups < FEW_COLUMNS
        and f"groups of {facts.in_features // facts.groups} columns",
        "groups": facts.groups > 1 and f"{facts.groups} groups in a row",
        "transposed": attrs.is_transposed and "a weight whose rows lie apart in memory",
        "scale": attrs.has_scale and "a scale",
        "zero": attrs.has_zero and "zero points",
        "offset": attrs.has_offset and "offsets",
        "bias": attrs.has_bias and "a bias",
        "codebook": attrs.has_codebook and "a table of what sixteen numbers stand for",
        "order": attrs.has_order and "columns of a weight in another order than those of its input",
        "native": attrs.is_native and "a source that is one call of PyTorch's",
        "wide_compute": attrs.compute_dtype == torch.float64 != facts.dtype and "steps in float64",
        "training": facts.needs_grad and "gradients",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


@sampler("quantised")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with random inputs: int8, a scale for each row."""
    rows, columns, out = asked.of("num_rows", "in_features", "out_features")
    weight = torch.randint(-127, 128, (out, columns), device=asked.device, dtype=torch.int8)
    scale = (torch.rand(out, 1, device=asked.device) / 127).to(asked.dtype)
    return Sample.of((asked.random(rows, columns), weight, scale), Operands, _written)


def _written(attrs: LinearAttrs, given: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(given, weight.to(given.dtype) * scale).to(attrs.out_dtype)
