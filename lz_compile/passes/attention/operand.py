"""The tensor behind an operand: past layout changes, lossless casts and constant factors."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Dims, LayoutError
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.formula.expressions import is_lossless, number, specialised
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of


@dataclass(frozen=True)
class Operand:
    """``factor * tensor``, the tensor as ``node`` with axes ``dims``; ``entered`` is the dtype it was multiplied in."""

    node: fx.Node
    dims: Dims
    factor: sympy.Expr
    entered: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """As of the tensor."""
        tensor = known_tensor(self.node)
        return tensor.dtype


def peel(region: Region, factor: Factor, reader: fx.Node, passed: dict[fx.Node, Dims]) -> Operand:
    """Walk up from a factor of a contraction; every node walked through is noted in ``passed``."""
    effects = region.effects
    node, dims, scale = region.seen_by(reader, factor.node), factor.dims, sympy.S.One
    tensor = tensor_of(node)
    if tensor is None or not tensor.is_floating_point():
        raise RefusedError(
            "DTYPE_UNSUPPORTED", f"{told(node)} is no floating-point tensor", "use floating-point operands"
        )
    entered = tensor.dtype
    while True:
        call = effects.calls[node]
        if call is None or call.is_inplace or effects.ambient(node) != effects.ambient(reader):
            break
        if effects.is_opaque(node, reader):  # overwritten since it was made: it is what it is, whatever made it
            break
        step = _step(region, call, dims)
        if step is None:
            break
        passed.setdefault(node, dims)
        reader = node
        node, dims, constant = step
        scale = scale * constant
    return Operand(node, dims, scale, entered)


def _step(region: Region, call: Call, dims: Dims) -> tuple[fx.Node, Dims, sympy.Expr] | None:
    source = tensor_of(call.input)
    result = tensor_of(call.node)
    if source is None or result is None or source.device != result.device:
        return None
    inner = region.seen_by(call.node, call.input)
    if call.name in ("to", "float", "double", "half", "bfloat16", "type_as", "type"):
        return (inner, dims, sympy.S.One) if is_lossless(source.dtype, result.dtype) else None
    if call.name == "dropout" and (not call.get("training", True) or specialised(call.get("p", 0.5)) == 0):
        return inner, dims, sympy.S.One
    if call.name in ("mul", "div") and source.dtype == result.dtype and source.shape == result.shape:
        constant = call.get("other")
        if isinstance(constant, (int, float)) and constant not in (0, float("inf"), float("-inf")):
            return inner, dims, number(constant) if call.name == "mul" else 1 / number(constant)
        return None
    try:
        read = layout.read_input_dims(call, dims)
    except LayoutError:
        return None
    return None if read is None else (inner, read, sympy.S.One)
