"""Calls that are an attention already: their arguments say what all others are read for."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from lz_compile.ground.sizes import Shape, Size, shape_of
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.passes.attention.emitter import AttentionEmitter, Finish, Roles
from lz_compile.passes.attention.operand import Operand, peel
from lz_compile.passes.attention.proven_masks import simplify
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, axes_of, broadcast_from, fresh, quotient
from lz_compile.passes.formula.contraction import Factor
from lz_compile.passes.formula.expressions import specialised
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of
from lz_compile.passes.masks import finite as masks_finite
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.rewriting.core import find_core
from lz_compile.passes.rewriting.match import Match

SOURCE = "torch.sdpa"
#: What the source calls where a mask that it passes was proven: not the kernel of that name without the mask.
MASKED_SOURCE = "torch.sdpa with a mask"
#: The same where it passes keys and values that it repeated for the heads that share them.
COPIED_SOURCE = "torch.sdpa of copies"


def match_sdpa_call(effects: Effects, call: Call, masks: Masks, finish: Finish) -> Match | None:
    """The attention that a call of SDPA computes; None where an argument is no tensor or no constant.

    Raises:
        RefusedError: the call is inside of a transform.
    """
    nodes = [call.get(name) for name in ("query", "key", "value")]
    tensors = [tensor_of(node) for node in nodes]
    dropout_p, is_causal = specialised(call.get("dropout_p", 0.0)), call.get("is_causal", False)
    if any(tensor is None for tensor in tensors) or not isinstance(dropout_p, (int, float)):
        return None
    if not isinstance(is_causal, bool):
        return None
    shapes = [shape_of(tensor) for tensor in tensors if tensor is not None]
    region = Region(effects)
    roles, dims = _roles(shapes, bool(call.get("enable_gqa", False)))
    query, key, value = (
        Operand(node, dim, sympy.S.One, tensor.dtype)
        for node, dim, tensor in zip(nodes, dims, tensors, strict=True)
        if tensor is not None
    )
    passed: dict[fx.Node, Dims] = {}
    shared = _before_repeats(region, call, (key, value), roles, passed)
    if shared is not None:
        (key, value), roles = shared
    keep, bias = _mask(region, call, (*_leading(roles, dims[0]), roles.queries, roles.keys))
    scale, gain = _scale(region, call, shapes[0])
    attrs = AttentionAttrs(
        scale=scale,
        is_causal=is_causal,
        dropout_p=float(dropout_p),
        masked_rows="zero" if keep != 1 or bias != 0 else "nan",
        has_mask=keep != 1,
        has_bias=bias != 0,
        bias_is_finite=masks_finite.is_finite(region, bias),
        bias_can_mask=not masks_finite.is_bounded(region, bias),
        enable_gqa=bool(roles.group),
        nan_is_open=True,
        score_dtype=torch.promote_types(tensors[0].dtype, torch.float32),  # type: ignore[union-attr]  # all are tensors
        rounds_bias=bias != 0 and known_tensor(call.get("attn_mask")).dtype == known_tensor(call.node).dtype,
    )
    output_dims = (*_leading(roles, dims[0]), roles.queries, roles.value_features)
    emitter = AttentionEmitter(
        region=region,
        roles=roles,
        query=query,
        key=key,
        value=value,
        query_gain=gain,
        key_gain=sympy.S.One,
        keep=keep,
        bias=bias,
        output_gain=sympy.S.One,
        sinks=None,
        output=call.node,
        output_dims=output_dims,
        dtype=known_tensor(call.node).dtype,
        attrs=attrs,
        passed=passed if shared is not None else {},
        product=None if shared is None else call.node,
    )
    simple = simplify(emitter, masks)
    source = MASKED_SOURCE if simple.implied else SOURCE if shared is None else COPIED_SOURCE
    core = find_core(effects, call.node, call.node)
    core.check(effects, {})
    return finish(simple, core, source)


def _before_repeats(
    region: Region, call: Call, operands: tuple[Operand, Operand], roles: Roles, passed: dict[fx.Node, Dims]
) -> tuple[tuple[Operand, Operand], Roles] | None:
    """Key and value as they are before a source repeats them for the heads that share them.

    None where it does not, and where they are overwritten before the call.
    """
    if roles.group or not roles.kv_heads:
        return None
    try:
        key, value = (peel(region, Factor(each.node, each.dims), call.node, passed) for each in operands)
        core = find_core(region.effects, call.node, call.node)
        core.check(region.effects, {each.node: region.readers[each.node] for each in (key, value)})
    except (MutatedError, RefusedError):
        return None
    given, heads = ({*axes_of(each.dims)} for each in operands), axes_of((roles.kv_heads,))
    gone = [before - {*axes_of(each.dims)} for before, each in zip(given, (key, value), strict=True)]
    kept = tuple(axis for axis in heads if axis not in gone[0])
    is_repeated = gone[0] == gone[1] == {*heads[len(kept) :]} and heads[: len(kept)] == kept != heads
    if not is_repeated or any(each.factor != 1 or each.dtype != each.entered for each in (key, value)):
        return None
    return (key, value), replace(roles, kv_heads=kept, group=heads[len(kept) :])


def _roles(shapes: list[Shape], enable_gqa: bool) -> tuple[Roles, list[Dims]]:
    """Axes for query ``[..., H, S, D]``, key and value; leading dimensions of one broadcast."""
    query, key, value = shapes
    longest = max(shapes, key=len)
    leading = fresh([_widest(position, shapes) for position in range(-len(longest), -2)])
    features, queries, keys, value_features = fresh((query[-1], query[-2], key[-2], value[-1]))
    has_heads = len(longest) > 3 or enable_gqa
    heads = leading[-1] if has_heads else ()
    batch = tuple(axis for dim in (leading[:-1] if has_heads else leading) for axis in dim)
    kv_heads: tuple[Axis, ...] = heads
    group: tuple[Axis, ...] = ()
    if enable_gqa and has_heads and key[-3] != query[-3]:
        ratio = quotient(query[-3], key[-3]) or FloorDiv(query[-3], key[-3])  # which the call demands to be exact
        kv_heads, group = fresh((key[-3], ratio))
        heads[0].parts = (*kv_heads, *group)
    roles = Roles(batch, kv_heads, group, queries, keys, features, value_features)
    lead = (*leading[:-1], kv_heads) if has_heads else leading
    return roles, [
        (*broadcast_from(leading, query[:-2]), queries, features),
        (*broadcast_from(lead, key[:-2]), keys, features),
        (*broadcast_from(lead, value[:-2]), keys, value_features),
    ]


def _widest(position: int, shapes: list[Shape]) -> Size:
    sizes = [shape[position] for shape in shapes if len(shape) >= -position]
    return next((size for size in sizes if size != 1), 1)


def _leading(roles: Roles, query: Dims) -> Dims:
    return query[:-2] if axes_of(query[:-2]) == (*roles.batch, *roles.heads) else (roles.batch, roles.heads)


def _mask(region: Region, call: Call, dims: Dims) -> tuple[sympy.Expr, sympy.Expr]:
    mask = call.get("attn_mask")
    tensor = tensor_of(mask)
    if tensor is None or not isinstance(mask, fx.Node):
        return sympy.S.One, sympy.S.Zero
    symbol = region.leaf(mask, broadcast_from(dims, shape_of(tensor)))
    return (symbol, sympy.S.Zero) if tensor.dtype == torch.bool else (sympy.S.One, symbol)


def _scale(region: Region, call: Call, query: Shape) -> tuple[float | None, sympy.Expr]:
    scale = call.get("scale")
    if isinstance(scale, (int, float)):
        return float(scale), sympy.S.One
    if isinstance(scale, fx.Node):
        return 1.0, region.leaf(scale, ())
    size = query[-1]
    return (float(size) ** -0.5 if isinstance(size, int) else None), sympy.S.One
