"""Which axis of an attention is a batch, a head, a query or a key, and how a kernel's layout is reached.

Every axis of the probabilities other than the keys is a *row* axis. A row axis that neither key nor value has is a
query position or a head of a group that shares its key (GQA, MQA); one that they have is a batch or a head. That is all
that is needed to bring operands into ``[B, H, S, D]`` and the result back, whatever the model's own layout.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import fx

from lz_compile.lowering.attention_attributes import AttentionAttrs, MaskedRows
from lz_compile.passes.attention.emitter import AttentionEmitter, Roles
from lz_compile.passes.attention.operand import Operand, peel
from lz_compile.passes.attention.probabilities import Probabilities
from lz_compile.passes.attention.recogniser import Weighing
from lz_compile.passes.attention.scores import Scores
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, atoms, axes_of
from lz_compile.passes.formula.contraction import PRODUCTS
from lz_compile.passes.formula.expressions import INFINITY, is_lossless, tidy
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import known_tensor, reached, read, tensor_of, tensor_operands
from lz_compile.passes.masks import finite as masks_finite

#: Calls behind which scores are none any more.
_ENDS = PRODUCTS | {"softmax", "log_softmax"}


def assign_roles(read: Weighing) -> AttentionEmitter:
    """Name the axes of an attention that was read, and choose the dtype that its kernel computes in.

    Raises:
        RefusedError: an axis plays two roles, or a gain depends on query and key together.
    """
    region, inner, found, output = read.region, read.scores, read.probabilities, read.output
    _check_range(region, inner.bias)
    passed: dict[fx.Node, Dims] = {}
    query, key = (peel(region, each, inner.leaf.node, passed) for each in (inner.query, inner.key))
    values = peel(region, read.value, output, passed)
    roles = _roles(region, read, query, key, values)
    scale, query_gain, key_gain = _place_gain(region, inner.gain * query.factor * key.factor, roles)
    if scale is None:
        raise RefusedError("SCALE_BY_SCORE", "the scale of the scores depends on query and key together", "use a bias")
    dtype = _kernel_dtype(inner, query, key, values, output)
    # Operands are scaled instead of scores or probabilities: not in fewer digits
    if not query_gain == key_gain == read.value_gain == 1:
        dtype = torch.promote_types(dtype, known_tensor(inner.leaf.node).dtype)
    keep = sympy.factor(inner.keep * found.keep)
    masked_rows = _masked_rows(region, inner, found)
    # A number that is added to every score goes away in the softmax, except beside a sink, or fills that are compared.
    is_shift_free = found.sinks is None and masked_rows != "fill"
    if inner.distance != 0:
        _check_distances(found, inner, is_shift_free=is_shift_free)
    bias = inner.bias.as_coeff_Add()[1] if is_shift_free else inner.bias
    attrs = AttentionAttrs(
        scale=scale,
        dropout_p=found.dropout_p,
        softcap=inner.softcap,
        masked_rows=masked_rows,
        has_mask=keep != 1,
        has_bias=bias != 0 or inner.distance != 0,
        has_sinks=found.sinks is not None,
        bias_is_finite=inner.floor is not None or masks_finite.is_finite(region, bias),
        bias_can_mask=not masks_finite.is_bounded(region, bias),
        enable_gqa=bool(roles.group),
        selects_masked=bool(keep.free_symbols & region.selecting),
        zeroes_nan=found.zero_rows,
        score_dtype=torch.promote_types(dtype, known_tensor(inner.leaf.node).dtype),
        rounds_bias=(bias != 0 or inner.distance != 0) and _rounds_joined(inner.leaf.node, dtype),
    )
    output_gain = tidy(sympy.expand(read.gain * values.factor))
    floor = inner.floor if bias != 0 else None
    attrs = attrs if floor is None else replace(attrs, rounds_bias=False)
    is_shifted = _is_shifted(region, inner, set(atoms(read.keys)))
    may_vanish = found.is_exponential and (not is_shifted or found.keep != 1)
    return AttentionEmitter(
        region, roles, query, key, values, query_gain, key_gain, keep, bias, output_gain, found.sinks, output,
        read.output_dims, dtype, attrs, passed, floor, inner.fill or sympy.S.Zero,
        found.rounds_masked_rows or (found.is_exponential and not is_shifted), distance=inner.distance,
        value_gain=read.value_gain, may_vanish=may_vanish, product=inner.leaf.node,
    )  # fmt: skip


def _check_range(region: Region, bias: sympy.Expr) -> None:
    """Refuse a mask that may be infinite in the dtype that scores are cast to after it was added."""
    narrowed = bias.free_symbols & region.narrowed
    if narrowed and not masks_finite.is_bounded(region, bias):
        raise RefusedError(
            "MASK_MAY_OVERFLOW",
            f"scores with the mask {region.leaves[min(narrowed, key=str)].node.name} are cast to a dtype of"
            " smaller range, in which a finite mask may be infinite",
            "cast the product before the mask is added",
        )


def _rounds_joined(product: fx.Node, dtype: torch.dtype) -> bool:
    """Whether all that scores are joined with, up to their softmax, gives that dtype: the source rounds a bias with them."""

    def is_end(node: fx.Node) -> bool:
        call = read(node)
        return node is not product and (call is None or call.name in _ENDS)

    found = reached([product], lambda node: () if is_end(node) else node.users)
    joined = [node for node in found if not is_end(node) and (node is product or len(tensor_operands(node)) > 1)]
    return all((tensor := tensor_of(node)) is not None and tensor.dtype == dtype for node in joined)


def _is_shifted(region: Region, inner: Scores, keys: set[Axis]) -> bool:
    """Whether the maximum of a row was subtracted: beside one of scores before their masks, exponentials may all be zero."""
    above = {*reached([leaf.node for leaf in region.leaves_in(inner.shift).values()])}
    masks = region.leaves_in(inner.keep, inner.bias).values()
    return inner.shift != 0 and all(leaf.node in above for leaf in masks if leaf.axes & keys)


def _check_distances(found: Probabilities, inner: Scores, *, is_shift_free: bool) -> None:
    """Refuse what a number that all scores of a row share would change: it is left out where they are distances."""
    if not is_shift_free:
        text = "scores that are distances are compared with others, a sink or fills that differ"
        raise RefusedError("SCORES_ARE_DISTANCES", text, "mask with -inf, and leave sinks out")
    if found.is_exponential and inner.shift == 0:
        text = "exponentials of distances are all zero where every key is far away, and nothing divided by nothing"
        raise RefusedError("SCORES_ARE_DISTANCES", text, "take the softmax of the negative distances")


def _roles(region: Region, read: Weighing, query: Operand, key: Operand, value: Operand) -> Roles:
    inner, found, keys = read.scores, read.probabilities, atoms(read.keys)
    in_query, in_key, in_value = (set(axes_of(operand.dims)) for operand in (query, key, value))
    features = atoms(inner.summed)
    weights = set(axes_of(found.dims))
    order = axes_of(read.output_dims)
    value_features = tuple(axis for axis in order if axis in in_value and axis not in weights)
    rows = [axis for axis in order if axis in weights and axis not in keys]
    if (in_query | in_key | in_value) - {*features, *keys, *value_features, *rows} or len(set(features)) != len(
        features
    ):
        raise RefusedError("AXES_UNCLEAR", "an axis of the operands has no role in an attention", "write it plainly")
    own = [axis for axis in rows if axis in in_query and axis not in in_key and axis not in in_value]
    shared = [axis for axis in rows if axis not in own]
    queries = _query_axis(region, inner, own, set(keys))
    group = tuple(axis for axis in own if axis not in queries)
    shared = [axis for axis in axes_of(found.dims) if axis in shared]
    # A single axis is the heads (of a batch of one), unless query heads share it: then it is the batch (MQA).
    kv_heads = tuple(shared[-1:]) if len(shared) > 1 or not group else ()
    return Roles(tuple(shared[: len(shared) - len(kv_heads)]), kv_heads, group, queries, keys, features, value_features)


def _query_axis(region: Region, inner: Scores, own: list[Axis], keys: set[Axis]) -> tuple[Axis, ...]:
    """Of the axes that only the query has, the query positions: the axis that a mask pairs with the keys, or the largest."""
    if len(own) < 2:
        return tuple(own)
    leaves = [leaf.axes for leaf in region.leaves_in(inner.keep, inner.bias).values()]
    paired = [axis for axis in own if any(axis in axes and keys & axes for axes in leaves)]
    candidates = paired if len(paired) == 1 else own
    sizes = [axis.size if isinstance(axis.size, int) else float("inf") for axis in candidates]
    return (candidates[sizes.index(max(sizes))],)


def _place_gain(region: Region, gain: sympy.Expr, roles: Roles) -> tuple[float | None, sympy.Expr, sympy.Expr]:
    """Split a gain into a number, a factor of the query's rows and one of the keys."""
    number, rest = tidy(sympy.expand(gain)).as_coeff_Mul() if not isinstance(gain, sympy.Add) else (sympy.S.One, gain)
    query_gain, key_gain = sympy.S.One, sympy.S.One
    rows = {axis for group in roles.rows for axis in group}
    for factor in sympy.Mul.make_args(rest):
        axes = region.axes_in(factor)
        if axes <= rows:
            query_gain *= factor
        elif axes <= {*roles.batch, *roles.kv_heads, *roles.keys}:
            key_gain *= factor
        else:
            return None, query_gain, key_gain
    return float(number), query_gain, key_gain


def _kernel_dtype(inner: Scores, query: Operand, key: Operand, value: Operand, output: fx.Node) -> torch.dtype:
    """The narrowest dtype in which a kernel rounds nowhere more than the source does."""
    entered = known_tensor(output).dtype  # autocast may have multiplied in another one than the operand has
    if all(is_lossless(operand.dtype, entered) for operand in (query, key, value)):
        return entered
    scores = known_tensor(inner.leaf.node).dtype
    return torch.promote_types(entered, scores)


def _masked_rows(region: Region, inner: Scores, found: Probabilities) -> MaskedRows:
    """What a row without any kept key comes to in the source."""
    mode = _before_nan_to_num(region, inner, found)
    if found.is_masked_again and mode == "fill":
        text = "probabilities are masked again where fills of masked scores may count"
        raise RefusedError("PROBABILITIES_CHANGED", text, "mask the scores with -inf")
    if found.is_masked_again and not (mode == "nan" and region.multiplies_masks):  # NaN times zero stays
        return "zero"
    return "zero" if found.zero_rows and mode == "nan" else mode


def _before_nan_to_num(region: Region, inner: Scores, found: Probabilities) -> MaskedRows:
    if inner.fill is None or found.keep != 1:
        return "mean" if inner.floor is not None and found.keep == 1 else "nan"
    if all(fill.coeff(INFINITY) != 0 for fill in inner.fills):
        return "mean" if inner.floor is not None else "nan"
    values = {float(fill) for fill in inner.fills if fill.is_number}
    is_uniform = len(inner.fills) == len(values) == 1
    lowest = torch.finfo(known_tensor(inner.leaf.node).dtype).min
    if is_uniform and (masks_finite.is_bounded(region, inner.bias) or min(values) <= 0.99 * lowest):
        return "mean"
    return "fill"
