"""What an additive bias can hold, read off the graph that made it: infinities, masking constants, or neither."""

from __future__ import annotations

import math

import sympy
import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.expressions import INFINITY, Known, constant_value
from lz_compile.passes.graph.view import Call, tensor_of, value_of
from lz_compile.passes.masks.constants import evaluate

_KEEPS = frozenset(
    "transpose t permute view reshape flatten unflatten expand expand_as unsqueeze squeeze contiguous clone getitem select "
    "narrow repeat tile repeat_interleave index_select gather to float type_as view_as triu tril detach "
    "chunk split unbind split_with_sizes flip roll".split()
)
_BOUNDED = _KEEPS | frozenset(
    "mul div add sub neg abs tanh sigmoid embedding index where masked_fill cat stack arange pow pad".split()
)
_PRODUCTS = frozenset("linear addmm matmul bmm baddbmm einsum".split())
_CONSTANT_FILLS = frozenset({"full", "full_like", "new_full", "tensor", "scalar_tensor"})
#: Factors and terms up to this are part of a bias; masking constants are larger, products of two of these are not.
_MODERATE = 30.0
_CONSTANTS = frozenset({"zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones", "arange"})


def is_finite(region: Region, bias: sympy.Expr) -> bool:
    """True only where ``bias`` provably holds no infinity.

    One of its terms may be a mask with the smallest number of its dtype; more of them could overflow when added.
    """
    if bias.has(INFINITY):
        return False
    symbols = bias.free_symbols
    is_sum = all(sympy.diff(bias, symbol) == 1 for symbol in symbols) and bias.as_coeff_Add()[0] >= 0
    if not is_sum or region.expand_masks:  # casts in between, which may overflow, are not seen when masks are expanded
        return not symbols or (bias.is_polynomial(*symbols) and is_bounded(region, bias) and not region.expand_masks)
    large = [symbol for symbol in symbols if not _is_bounded(region, region.leaves[symbol].node)]
    if len(large) > 1:
        return False
    return all(_is_finite(region, region.leaves[symbol].node) for symbol in large)


def is_bounded(region: Region, bias: sympy.Expr) -> bool:
    """True only where ``bias`` is of the order of scores: made from parameters, positions and moderate constants.

    So is a product of features that trained weights project, as the scores of positions in a Conformer are.
    """
    numbers = bias.atoms(sympy.Number)  # fills of masks that were read into the expression, among others
    inverses = [each for each in bias.atoms(sympy.Pow) if each.exp.is_negative and not each.base.has(sympy.exp)]
    return (
        not bias.has(INFINITY, sympy.log)
        and not inverses  # a sigmoid divides by one plus an exponential
        and all(abs(each) <= _MODERATE for each in numbers)
        and all(_is_bounded(region, region.leaves[symbol].node) for symbol in bias.free_symbols)
    )


def _is_bounded(region: Region, node: object, depth: int = 24) -> bool:
    if isinstance(node, (int, float)):
        return abs(node) <= _MODERATE
    if not isinstance(node, fx.Node) or depth == 0:
        return isinstance(node, (str, torch.dtype, torch.device, slice, type(None), type(Ellipsis)))
    tensor, call = tensor_of(node), region.effects.calls.get(node)
    if _is_trained(node):
        return True
    if tensor is not None and not tensor.is_floating_point():
        return True
    value = None if call is None else constant_value(call)
    if value is not None and not region.effects.is_overwritten(node):
        return abs(value) <= _MODERATE
    is_kept = call is not None and (call.name in _KEEPS | _PRODUCTS or layout.rearranges(call))
    if call is None or call.is_inplace or not (is_kept or call.name in _BOUNDED) or region.effects.is_overwritten(node):
        return False
    if call.name == "pow" and not _is_decay(region, call):
        return False
    if call.name == "div":  # a rounding mode takes digits away
        return _is_moderate_divisor(region, call.get("other")) and _is_bounded(region, call.input, depth - 1)
    if call.name == "pad":
        return all(_is_bounded(region, each, depth - 1) for each in (call.input, call.get("value") or 0.0))
    if call.name == "arange" or (call.name in _PRODUCTS and _is_projected(region, call)):
        return True
    if is_kept:  # numbers are sizes and places
        operands = [each for each in call.node.all_input_nodes if not isinstance(value_of(each), torch.SymInt)]
        return all(_is_bounded(region, operand, depth - 1) for operand in operands)
    arguments = [
        item for value in call.arguments.values() for item in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    return all(_is_bounded(region, value, depth - 1) for value in arguments)


def _is_moderate_divisor(region: Region, divisor: object) -> bool:
    """Whether a divisor is a number that is not small: written down, or made of constants alone (`torch.sqrt(size)`)."""
    known = (
        evaluate(region.effects, divisor) if isinstance(divisor, fx.Node) and tensor_of(divisor) is not None else None
    )
    if isinstance(known, Known) and known.value.numel() == 1 and not known.buffers:
        divisor = known.value.item()
    return isinstance(divisor, (int, float)) and abs(divisor) >= 1 / _MODERATE


def _is_trained(node: fx.Node) -> bool:
    """Whether a node is a parameter that is trained: no mask is one."""
    tensor = tensor_of(node)
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def _is_projected(region: Region, call: Call) -> bool:
    """Whether a factor of a product is a trained weight, as it is or turned."""
    for operand in call.node.all_input_nodes:
        inner = region.effects.calls.get(operand)
        source = inner.input if inner is not None and layout.rearranges(inner) else operand
        if isinstance(source, fx.Node) and _is_trained(source) and not region.effects.is_overwritten(source):
            return True
    return False


def _is_finite(region: Region, node: object) -> bool:
    if isinstance(node, (int, float)):
        return not math.isinf(node)
    if not isinstance(node, fx.Node):
        return False
    tensor, call = tensor_of(node), region.effects.calls.get(node)
    if tensor is not None and not tensor.is_floating_point():
        return True
    if call is None or call.is_inplace or region.effects.is_overwritten(node):
        return False
    if call.name in _CONSTANTS:
        return True
    if call.name in _CONSTANT_FILLS:
        value = constant_value(call)
        return value is not None and math.isfinite(value)
    return _is_finite_call(region, call)


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else 0.0


def _is_decay(region: Region, call: Call) -> bool:
    """Powers of a constant between 0 and 1 to whole numbers, as the slopes of ALiBi are."""
    base = region.effects.calls.get(call.input)
    value = call.input if base is None else constant_value(base)
    exponent = tensor_of(call.get("exponent"))
    is_whole = exponent is not None and not exponent.is_floating_point()
    return isinstance(value, (int, float)) and 0 < value <= 1 and is_whole


def _is_finite_call(region: Region, call: Call) -> bool:
    if call.name == "where":
        return all(_is_finite(region, call.get(name)) for name in ("input", "other"))
    if call.name == "masked_fill":
        return all(_is_finite(region, call.get(name)) for name in ("input", "value"))
    if call.name not in _KEEPS:
        return False
    result = tensor_of(call.node)
    source = tensor_of(call.input)
    if result is None or source is None or _largest(result.dtype) < _largest(source.dtype):
        return False
    return _is_finite(region, call.input)
