"""Queries and keys that are multiplied by matrices of each position, which are given: a rotation, as likely as not.

What a matrix turns is read off its values, which are known of buffers alone: those are guarded. Of an input nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.axes import axes_of, fresh
from lz_compile.passes.formula.parts import may_turn
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import known_tensor, tensor_of, tensor_operands


def turned_alike(
    op: str, effects: Effects, covered: Container[fx.Node], is_known: Callable[[fx.Node], bool]
) -> Iterator[NearMiss]:
    """Every product of two tensors that were multiplied by the same given matrices, one for each position."""
    for node, call in effects.calls.items():
        if call is None or call.name not in contraction.PRODUCTS:
            continue
        sides = [_turned(effects, each, is_known) for each in tensor_operands(node)]
        products = [product for product, _ in filter(None, sides)]
        if len(sides) == len(products) == 2 and len({given for _, given in filter(None, sides)}) == 1:
            if any(each in covered for each in products):
                continue
            (_, given), *_ = filter(None, sides)
            width = shape_of(known_tensor(given))[-1]
            text = (
                f"queries and keys are multiplied by {told(given)}, a matrix of {width} x {width} for each position, whose "
                f"values are not known: as a rotation of pairs it would be {width} times less to read"
            )
            edit = "give cos and sin instead (x * cos + rotate_half(x) * sin), or register the matrices as a buffer"
            yield NearMiss.of(op, products[0], RefusedError("MATRICES_GIVEN", text, edit))


def _turned(effects: Effects, node: fx.Node, is_known: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node] | None:
    """The product behind layouts and factors that multiplies features by a matrix for each row, and where it is given."""
    call = effects.calls.get(node)
    while call is not None and (layout.rearranges(call) or is_pointwise(call)):
        operands = tensor_operands(call.node)
        if len(operands) != 1:
            return None
        (node,) = operands
        call = effects.calls.get(node)
    if call is None or not may_turn(call):
        return None
    product = contraction.factors(call, fresh(shape_of(known_tensor(node))))
    if product is None or len(product.factors) != 2 or len(product.summed) != 1:
        return None
    for (matrix, dims), (_, others) in (product.factors, product.factors[::-1]):
        features = {axis for dim in dims[-2:] for axis in dim}
        positions = set(axes_of(dims[:-2]))
        is_turning = len(features) == 2 and features & set(axes_of(others)) == set(product.summed)
        if is_turning and positions and positions <= set(axes_of(others)) and not is_known(matrix):
            given = _given(effects, matrix)
            return None if given is None else (node, given)
    return None


def _given(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The input that matrices are taken of, None where they are computed, or trained."""
    call = effects.calls.get(node)
    while call is not None and (layout.rearranges(call) or call.name in ("index_select", "select")):
        node = call.input
        call = effects.calls.get(node)
    tensor = tensor_of(node) if call is None else None  # a call may give several
    is_trained = isinstance(tensor, torch.nn.Parameter) or (tensor is not None and tensor.requires_grad)
    return None if tensor is None or is_trained or tensor.dim() < 3 else node
