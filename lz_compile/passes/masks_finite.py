"""Whether an additive mask can hold ``-inf``: read off the graph that made it."""

from __future__ import annotations

import math

import sympy
from torch import fx

from lz_compile.passes.algebra import INFINITY, Region
from lz_compile.passes.view import Call, tensor_of

_KEEPS = frozenset(
    "transpose t permute view reshape flatten unflatten expand expand_as unsqueeze squeeze contiguous clone getitem select "
    "narrow repeat tile repeat_interleave index_select gather to float type_as triu tril detach".split()
)
_CONSTANT_FILLS = {"full": "#1", "full_like": "#1", "new_full": "#2", "tensor": "input", "scalar_tensor": "input"}
_CONSTANTS = frozenset({"zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones", "arange"})


def is_finite(region: Region, bias: sympy.Expr) -> bool:
    """True only where every leaf of ``bias`` provably holds no infinity (one leaf at most: sums may overflow)."""
    symbols = bias.free_symbols
    if bias.has(INFINITY) or len(symbols) > 1 or (symbols and sympy.diff(bias, *symbols) != 1):
        return False
    return all(_is_finite(region, region.leaves[symbol].node) for symbol in symbols)


def _is_finite(region: Region, node: object) -> bool:
    if isinstance(node, (int, float)):
        return not math.isinf(node)
    if not isinstance(node, fx.Node):
        return False
    tensor, call = tensor_of(node), region.effects.calls.get(node)
    if tensor is not None and not tensor.is_floating_point():
        return True
    if call is None or call.is_inplace:
        return False
    if call.name in _CONSTANTS:
        return True
    if call.name in _CONSTANT_FILLS:
        return _is_finite(region, call.get("fill_value", call.arguments.get(_CONSTANT_FILLS[call.name])))
    return _is_finite_call(region, call)


def _is_finite_call(region: Region, call: Call) -> bool:
    if call.name == "where":
        return all(_is_finite(region, call.get(name)) for name in ("input", "other"))
    if call.name == "masked_fill":
        return all(_is_finite(region, call.get(name)) for name in ("input", "value"))
    if call.name not in _KEEPS:
        return False
    result = tensor_of(call.node)
    source = tensor_of(call.input)
    if result is None or source is None or result.dtype.itemsize < source.dtype.itemsize:
        return False
    return _is_finite(region, call.input)
