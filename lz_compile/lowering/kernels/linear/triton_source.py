"""Products with stored weights in Triton: a weight is read once in its few bits, and its numbers are widened in registers.

Every stored number is exact in 16 bits, and inputs of 16 bits are multiplied with these. What a group's numbers mean is then
found from their sum and that of the input there, so that an input that is not finite may give NaN where the definition gives
infinity. Inputs in float32 are multiplied with the weight that is meant, as are others where a tile would have numbers of two
groups. All sums are in float32, and the same from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from lz_compile.lowering.ops.linear import LinearAttrs, Operands, Packing, fake, groups_of, ordered
from lz_compile.lowering.triton_launch import as_read, cdiv, decoded, format_of, is_interpreted, next_power_of_2, on

#: Rows that take as long as reading the weight, and the least that a tile of any kind has.
FEW_ROWS = LEAST = 16
#: Rows that one tile of more rows has.
SOME_ROWS = 64
#: Operands that there may be none of.
_OPTIONAL = ("scale", "zero", "offset", "bias")

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _number(stored, PLANE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """What is stored as numbers: of packed bytes the lower (plane 0) or the upper four bits.

    Four bits are the last ones of 128 to 143 in bfloat16, and of 1024 to 1039 in float16, which is faster than converting.
    """
    if FORMAT == "packed":
        stored = stored >> 4 if PLANE == 1 else stored & 15
        if tl.bfloat16 == DTYPE:
            return (stored.to(tl.uint16) | 0x4300).to(DTYPE, bitcast=True) - 128.0
        if tl.float16 == DTYPE:
            return (stored.to(tl.uint16) | 0x6400).to(DTYPE, bitcast=True) - 1024.0
    return decoded(stored, FORMAT, DTYPE)


@triton.jit
def _inputs(
    given, start, elements, shift, is_row, given_column,
    IS_PACKED: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The input in the columns of a tile's numbers, those at ``STEP * j`` and those at ``STEP * j + shift``."""
    place = start * STEP + tl.arange(0, STEP * DEPTH).to(tl.int64)[None, :]
    mask = is_row & (place < STEP * elements)
    near = tl.load(given + place * given_column, mask=mask, other=0.0).to(DTYPE)
    far = near
    if STEP == 2:
        near, far = tl.split(tl.reshape(near, (ROWS, DEPTH, 2)))
    elif IS_PACKED:
        far = tl.load(given + (place + shift) * given_column, mask=mask, other=0.0).to(DTYPE)
    return near, far


@triton.jit
def _meant(
    found, sums, group, is_out, scale, zero, offset, scale_group, zero_group, offset_group,
    HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """What stored numbers mean (``sums`` is 1 then), or the sum of their products with an input whose sum is ``sums``."""
    if HAS_ZERO:
        found -= sums * tl.load(zero + group * zero_group, mask=is_out, other=0).to(tl.float32)
    if HAS_SCALE:
        found *= tl.load(scale + group * scale_group, mask=is_out, other=0).to(tl.float32)
    if HAS_OFFSET:
        found += sums * tl.load(offset + group * offset_group, mask=is_out, other=0).to(tl.float32)
    return found


@triton.jit
def _group_of(
    start, away, elements, size, HAS_GROUPS: tl.constexpr, IS_CUT: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """The group of a tile's columns, or of each of them."""
    column = start * STEP + away
    if IS_CUT:
        column = (tl.minimum(start + tl.arange(0, DEPTH), elements - 1) * STEP + away)[:, None]
    return column // size if HAS_GROUPS else 0


@triton.jit
def _product(
    given, weight, scale, zero, offset, is_row, is_out, elements, shift, size,
    given_column, weight_column, scale_group, zero_group, offset_group,
    HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GROUPS: tl.constexpr,
    IS_CUT: tl.constexpr, IS_MEANT: tl.constexpr, IS_HIGH: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows times rows of the weight. Byte ``j`` has numbers of the columns ``STEP * j`` and ``STEP * j + shift``."""
    HAS_SUMS: tl.constexpr = (HAS_ZERO or HAS_OFFSET) and not IS_MEANT
    total, sums = tl.zeros((ROWS, OUTS), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, elements, DEPTH):
        place = start + tl.arange(0, DEPTH).to(tl.int64)
        is_place = place < elements
        stored = tl.load(weight + place[:, None] * weight_column, mask=is_place[:, None] & is_out, other=0)
        near, far = _inputs(
            given, start, elements, shift, is_row, given_column, FORMAT == "packed", STEP, DTYPE, ROWS, DEPTH
        )
        found, part = tl.zeros_like(total), tl.zeros_like(sums)
        for plane in tl.static_range(2 if FORMAT == "packed" else 1):
            away = shift if (plane == 1) != IS_HIGH else 0
            x = far if (plane == 1) != IS_HIGH else near
            w = _number(stored, plane, FORMAT, DTYPE)
            group = _group_of(start, away, elements, size, HAS_GROUPS, IS_CUT, STEP, DEPTH)
            if HAS_SUMS:
                part += tl.sum(x.to(tl.float32), 1)[:, None]
            if IS_MEANT:
                w = _meant(
                    w, 1.0, group, is_out, scale, zero, offset, scale_group, zero_group, offset_group,
                    HAS_SCALE, HAS_ZERO, HAS_OFFSET,
                )  # fmt: skip
            if IS_MEANT or not HAS_GROUPS:
                total = tl.dot(x, w, total, input_precision="ieee")
            else:
                found = tl.dot(x, w, found, input_precision="ieee")
                if STEP == 1 or plane == 1:  # both numbers of a byte are of one group where they are neighbours
                    total += _meant(
                        found, part, group, is_out, scale, zero, offset, scale_group, zero_group, offset_group,
                        HAS_SCALE, HAS_ZERO, HAS_OFFSET,
                    )  # fmt: skip
                    found, part = tl.zeros_like(total), tl.zeros_like(sums)
        sums += part
    if not IS_MEANT and not HAS_GROUPS:
        total = _meant(total, sums, 0, is_out, scale, zero, offset, 0, 0, 0, HAS_SCALE, HAS_ZERO, HAS_OFFSET)
    return total


@triton.jit
def multiply(
    given, weight, scale, zero, offset, bias, result, rows, outs, elements, shift, size,
    given_row, given_column, weight_row, weight_column, scale_row, scale_group, zero_row, zero_group,
    offset_row, offset_group, bias_row,
    HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GROUPS: tl.constexpr, IS_CUT: tl.constexpr, IS_MEANT: tl.constexpr, IS_HIGH: tl.constexpr, STEP: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of the result; those that read the same rows of the weight are neighbours."""
    tiles = tl.cdiv(rows, ROWS)
    row = ((tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    out = ((tl.program_id(0) // tiles).to(tl.int64) * OUTS + tl.arange(0, OUTS))[None, :]
    is_row, is_out = row < rows, out < outs
    total = _product(
        given + row * given_row, weight + out * weight_row, scale + out * scale_row, zero + out * zero_row,
        offset + out * offset_row, is_row, is_out, elements, shift, size,
        given_column, weight_column, scale_group, zero_group, offset_group,
        HAS_SCALE, HAS_ZERO, HAS_OFFSET, HAS_GROUPS, IS_CUT, IS_MEANT, IS_HIGH, STEP, FORMAT, DTYPE, ROWS, OUTS, DEPTH,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + out * bias_row, mask=is_out, other=0).to(tl.float32)
    tl.store(result + row * outs + out, total.to(result.dtype.element_ty), mask=is_row & is_out)


def run(x: Operands, attrs: LinearAttrs) -> torch.Tensor:
    """The op (see ``lowering/ops/linear.py``), over operands that lie anywhere in memory."""
    x = replace(x, input=ordered(x), order=None)
    out = fake(x, attrs)
    if not out.numel():
        return out
    (rows, columns), (outs, elements), groups = x.input.shape, x.weight.shape, groups_of(x)
    weight = as_read(x.weight)
    others = [x.scale, x.zero, x.offset, x.bias]
    strides = [*x.input.stride(), *weight.stride()]
    for each in others[:3]:
        strides += (0, 0) if each is None else map(_stride, each.shape, each.stride())
    constants = constants_of(x, attrs)
    with on(out.device):
        multiply[(cdiv(rows, constants["ROWS"]) * cdiv(outs, constants["OUTS"]),)](
            x.input, weight, *[x.input if each is None else each for each in others], out,
            rows, outs, elements, elements if constants["STEP"] == 1 else 1, columns // groups,
            *strides, 0 if x.bias is None else x.bias.stride(0), **constants,
        )  # fmt: skip
    return out


def _stride(size: int, stride: int) -> int:
    """From one number to the next, the same one where there is one for all."""
    return stride if size > 1 else 0


def constants_of(x: Operands, attrs: LinearAttrs) -> dict[str, Any]:
    """What the kernel is compiled for, which follows from shapes and dtypes alone."""
    has = tuple(getattr(x, name) is not None for name in _OPTIONAL)
    format = format_of(x.weight.dtype, x.weight.device)
    sizes = (*x.input.shape, x.weight.shape[1], groups_of(x))
    return dict(_constants(*sizes, x.input.dtype, format, has, attrs.packing))


@lru_cache(maxsize=1024)
def _constants(
    rows: int, columns: int, elements: int, groups: int, dtype: torch.dtype, format: str, has: tuple[bool, ...],
    packing: Packing,
) -> Mapping[str, Any]:  # fmt: skip
    size, step = columns // groups, 2 if packing.endswith("first") else 1
    is_few, is_some, is_packed = rows <= FEW_ROWS, rows <= SOME_ROWS, packing != "none"
    is_meant = dtype not in _DTYPES
    # Registers do for these.
    depth = (64 if is_packed or not is_some else 256 if is_few else 128) // (4 if is_meant else 1)
    depth = min(depth, max(LEAST, next_power_of_2(elements)))
    if groups > 1:
        depth = 1 if size % step else math.gcd(depth, size // step, elements)
    is_cut = depth < LEAST
    is_meant = is_meant or is_cut
    return {
        **{f"HAS_{name.upper()}": is_there for name, is_there in zip(_OPTIONAL, has, strict=True)},
        "HAS_GROUPS": groups > 1,
        "IS_CUT": is_cut,
        "IS_MEANT": is_meant,
        "IS_HIGH": packing.startswith("high"),
        "STEP": step,
        "FORMAT": "packed" if is_packed else format,
        "DTYPE": tl.float32 if is_meant or is_interpreted() else _DTYPES[dtype],
        "ROWS": LEAST if is_few else 64 if is_packed or is_meant or is_some else 128,
        "OUTS": 32 if is_few and not is_packed else 64 if is_meant or is_some else 128,
        "DEPTH": max(depth, LEAST),
        "num_warps": 1 if is_few and is_packed else 4,
        "num_stages": 2 if is_cut else 3,
    }
