"""Which axis of an attention is a batch, a head, a query or a key, and how a kernel's layout is reached.

Every axis of the probabilities other than the keys is a *row* axis. A row axis that neither key nor value has is a
query position or a head of a group that shares its key (GQA, MQA); one that they have is a batch or a head. That is all
that is needed to bring operands into ``[B, H, S, D]`` and the result back, whatever the model's own layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.lowering.ops.attention import AttentionAttrs, AttentionFacts, MaskedRows
from lz_compile.passes import masks_finite
from lz_compile.passes.algebra import INFINITY, Leaf, Region, indicators, tidy
from lz_compile.passes.axes import Axis, Dims, atoms, axes_of, product
from lz_compile.passes.builder import Builder
from lz_compile.passes.contraction import Factor
from lz_compile.passes.core import Core
from lz_compile.passes.effects import grad_enabled
from lz_compile.passes.match import Match, RefusedError
from lz_compile.passes.operand import Operand, is_lossless, peel
from lz_compile.passes.probabilities import Probabilities
from lz_compile.passes.scores import Scores
from lz_compile.passes.view import tensor_of, where_of


@dataclass(frozen=True)
class Roles:
    """The axes of an attention by what they mean, most significant first."""

    batch: tuple[Axis, ...]
    kv_heads: tuple[Axis, ...]
    group: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    keys: tuple[Axis, ...]
    features: tuple[Axis, ...]
    value_features: tuple[Axis, ...]

    @property
    def heads(self) -> tuple[Axis, ...]:
        """Query heads: those of the key, each with its group."""
        return self.kv_heads + self.group

    @property
    def rows(self) -> tuple[tuple[Axis, ...], ...]:
        """The groups of axes of a row of scores."""
        return (self.batch, self.heads, self.queries)


@dataclass(frozen=True)
class AttentionEmitter:
    """Brings the operands of one attention into the canonical layout, and the result back."""

    region: Region
    roles: Roles
    query: Operand
    key: Operand
    value: Operand
    query_gain: sympy.Expr
    key_gain: sympy.Expr
    keep: sympy.Expr
    bias: sympy.Expr
    output_gain: sympy.Expr
    sinks: Leaf | None
    output: fx.Node
    output_dims: Dims
    dtype: torch.dtype
    attrs: AttentionAttrs
    passed: Mapping[fx.Node, Dims]
    floor: float | None = None
    fill: sympy.Expr = sympy.S.Zero
    is_undefined_when_masked: bool = False

    def edge(self) -> dict[fx.Node, Dims]:
        """The nodes that the replacement reads, with their axes."""
        found: dict[fx.Node, Dims] = {operand.node: operand.dims for operand in (self.query, self.key, self.value)}
        fill = self.fill if self.attrs.masked_rows == "fill" else sympy.S.Zero
        for expression in (self.query_gain, self.key_gain, self.keep, self.bias, self.output_gain, fill):
            for symbol in expression.free_symbols - {INFINITY}:
                leaf = self.region.leaves[symbol]
                found.setdefault(leaf.node, leaf.dims)
        if self.sinks is not None:
            found.setdefault(self.sinks.node, self.sinks.dims)
        return found

    def operands(self, builder: Builder) -> dict[str, Any]:
        """Query, key, value, and mask, bias or sinks where there are any, in the canonical layout."""
        roles = self.roles
        row_groups = (*roles.rows, ())
        query = self._tensor(builder, self.query, (*roles.rows, roles.features))
        key = self._tensor(builder, self.key, (roles.batch, roles.kv_heads, roles.keys, roles.features))
        value = self._tensor(builder, self.value, (roles.batch, roles.kv_heads, roles.keys, roles.value_features))
        if self.query_gain != 1:
            query = (query * builder.evaluate(self.query_gain, self.region, row_groups, self.dtype)).to(self.dtype)
        if self.key_gain != 1:
            groups = (roles.batch, roles.kv_heads, roles.keys, ())
            key = (key * builder.evaluate(self.key_gain, self.region, groups, self.dtype)).to(self.dtype)
        found = {"query": query, "key": key, "value": value}
        score_groups = (*roles.rows, roles.keys)
        if self.keep != 1:
            found["mask"] = self._mask(builder, score_groups)
        if self.bias != 0:
            found["bias"] = builder.evaluate(self.bias, self.region, score_groups, self._wide())
        if self.floor is not None:
            found["bias"] = found["bias"].clamp(min=self.floor)
        if self.attrs.masked_rows == "fill":
            found["fill"] = self._piecewise(builder, self.fill, score_groups)
        if self.sinks is not None:
            found["sinks"] = self._sinks(builder)
        return found

    def _tensor(self, builder: Builder, operand: Operand, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        value = builder.arrange(builder.value(operand.node), operand.dims, groups, expand=True)
        return value if operand.dtype == self.dtype else value.to(self.dtype)

    def _mask(self, builder: Builder, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        parts = []
        for factor in sympy.Mul.make_args(self.keep):
            flag = next(iter(factor.free_symbols))
            value = builder.arrange(builder.value(self.region.leaves[flag].node), self.region.leaves[flag].dims, groups)
            parts.append(value if factor == flag else torch.logical_not(value))
        mask = parts[0]
        for part in parts[1:]:
            mask = torch.logical_and(mask, part)
        return mask

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.attrs.score_dtype, torch.float32)

    def _piecewise(self, builder: Builder, expression: sympy.Expr, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        """An expression that branches on masks, as nested selections."""
        flags = indicators(expression)
        if not flags:
            return builder.evaluate(expression, self.region, groups, self._wide())
        leaf = self.region.leaves[flags[0]]
        on, off = (
            self._piecewise(builder, sympy.expand(expression.xreplace({flags[0]: value})), groups)
            for value in (sympy.S.One, sympy.S.Zero)
        )
        return torch.where(builder.arrange(builder.value(leaf.node), leaf.dims, groups), on, off)

    def _sinks(self, builder: Builder) -> Any:
        assert self.sinks is not None, "asked for only where there are sinks"
        value = builder.arrange(builder.value(self.sinks.node), self.sinks.dims, (*self.roles.rows, ()))
        return value

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's ``[B, H, S, E]`` in the layout and dtype of the node that it replaces."""
        roles = self.roles
        if self.output_gain != 1:
            value = self._weighted(builder, value)
        target = tensor_of(self.output).dtype  # type: ignore[union-attr]
        if target != self.dtype or self.output_gain != 1:
            value = value.to(target)
        return builder.restore(value, (*roles.rows, roles.value_features), self.output_dims)

    def _weighted(self, builder: Builder, value: Any) -> Any:
        gain = builder.evaluate(self.output_gain, self.region, (*self.roles.rows, ()), self.dtype)
        return value * gain

    def match(self, op: str, core: Core, source_kernel: str | None = None) -> Match:
        """The finished match."""
        operands = {"query": self.query.node, "key": self.key.node, "value": self.value.node}
        biases = {
            self.region.leaves[symbol].node
            for symbol in self.bias.free_symbols
            if sympy.diff(self.bias, symbol).is_number and not masks_finite.is_bounded(self.region, symbol)
        }
        read = dict(self.region.interior) | dict(self.passed)
        return Match(
            op=op,
            attributes=self.attrs,
            facts=self._facts(grad_enabled(core.ambient)),
            inputs=self.edge(),
            operands=operands,
            fills=dict.fromkeys(biases, self.attrs.bias_is_finite or self.region.multiplies_masks),
            masks=self._polarities(),
            rows=self._rows(),
            dropped=self._dropped(),
            selecting=self._selecting(),
            masked_rows_count=not self.is_undefined_when_masked,
            masked_rows_are_finite=self.floor is None
            and (self.keep == 1 or self.attrs.masked_rows in ("mean", "fill", "zero")),
            output=self.output,
            output_dims=self.output_dims,
            core=core.nodes,
            read=read,
            emitter=self,
            ambient=core.ambient,
            where=where_of(self.output),
            source_kernel=source_kernel,
            limited=frozenset((*self.roles.features, *self.roles.value_features)),
        )

    def _selecting(self) -> frozenset[fx.Node]:
        flags = self.keep.free_symbols & self.region.selecting
        return frozenset(self.region.leaves[flag].node for flag in flags)

    def _rows(self) -> dict[fx.Node, tuple[Axis, ...]]:
        """The query, where it is nothing else as well and NaN does not come from exponentials that overflow."""
        rows = {axis for group in self.roles.rows for axis in group}
        own = tuple(axis for axis in axes_of(self.query.dims) if axis in rows)
        is_shared = self.query.node in (self.key.node, self.value.node)
        is_open = self.attrs.nan_is_open or self.is_undefined_when_masked
        return {} if is_shared or is_open or not own else {self.query.node: own}

    def _dropped(self) -> dict[fx.Node, tuple[Axis, ...]]:
        """The key, where a mask selects among its positions, it is nothing else as well, and NaN counts as above."""
        masks = self.keep.free_symbols & self.region.selecting
        is_selected = any(self.region.leaves[flag].axes & set(self.roles.keys) for flag in masks)
        is_shared = self.key.node in (self.query.node, self.value.node)
        if is_shared or self.is_undefined_when_masked or not is_selected:
            return {}
        return {self.key.node: self.roles.keys}

    def _polarities(self) -> dict[fx.Node, bool]:
        """The boolean masks, True for one whose True keeps."""
        factors = [
            (factor, next(iter(factor.free_symbols))) for factor in sympy.Mul.make_args(self.keep) if factor != 1
        ]
        return {self.region.leaves[flag].node: factor == flag for factor, flag in factors}

    def _facts(self, enabled: bool) -> AttentionFacts:
        roles = self.roles
        grads = [tensor_of(node) for node in self.edge()]
        bias = [self.region.leaves[symbol].node for symbol in self.bias.free_symbols]
        return AttentionFacts(
            batch=product(axis.size for axis in roles.batch),
            heads=product(axis.size for axis in roles.heads),
            kv_heads=product(axis.size for axis in roles.kv_heads),
            query_len=product(axis.size for axis in roles.queries),
            key_len=product(axis.size for axis in roles.keys),
            head_dim=product(axis.size for axis in roles.features),
            value_dim=product(axis.size for axis in roles.value_features),
            dtype=self.dtype,
            device=tensor_of(self.output).device.type,  # type: ignore[union-attr]
            needs_grad=enabled and any(tensor is not None and tensor.requires_grad for tensor in grads),
            bias_needs_grad=enabled and any(_requires_grad(node) for node in bias),
        )


def _requires_grad(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.requires_grad


def assign_roles(
    region: Region,
    inner: Scores,
    found: Probabilities,
    keys: tuple[Axis, ...],
    value: Factor,
    output: fx.Node,
    output_dims: Dims,
    gain: sympy.Expr,
) -> AttentionEmitter:
    """Name the axes of an attention that was read, and choose the dtype that its kernel computes in.

    Raises:
        RefusedError: an axis plays two roles, or a gain depends on query and key together.
    """
    reader = inner.leaf.node
    passed: dict[fx.Node, Dims] = {}
    query = peel(region, inner.query, reader, passed)
    key = peel(region, inner.key, reader, passed)
    values = peel(region, value, output, passed)
    roles = _roles(region, inner, found, atoms(keys), query, key, values, output_dims)
    scale, query_gain, key_gain = _place_gain(region, inner.gain * query.factor * key.factor, query, key, roles)
    if scale is None:
        raise RefusedError("SCALE_BY_SCORE", "the scale of the scores depends on query and key together", "use a bias")
    dtype = _kernel_dtype(inner, query, key, values, output)
    if query_gain != 1 or key_gain != 1:  # the operands are scaled instead of the scores: not in fewer digits
        dtype = _score_dtype(inner, dtype)
    keep = sympy.factor(inner.keep * found.keep)
    bias = inner.bias
    attrs = AttentionAttrs(
        scale=scale,
        dropout_p=found.dropout_p,
        softcap=inner.softcap,
        masked_rows=_masked_rows(region, inner, found),
        has_mask=keep != 1,
        has_bias=bias != 0,
        has_sinks=found.sinks is not None,
        bias_is_finite=inner.is_floored or masks_finite.is_finite(region, bias),
        bias_can_mask=not masks_finite.is_bounded(region, bias),
        enable_gqa=bool(roles.group),
        selects_masked=bool(keep.free_symbols & region.selecting),
        zeroes_nan=found.zero_rows,
        score_dtype=_score_dtype(inner, dtype),
    )
    output_gain = tidy(sympy.expand(gain * values.factor))
    floor = torch.finfo(torch.float32).min if inner.is_floored and bias != 0 else None
    return AttentionEmitter(
        region, roles, query, key, values, query_gain, key_gain, keep, bias, output_gain, found.sinks, output,
        output_dims, dtype, attrs, passed, floor, inner.fill or sympy.S.Zero,
        found.rounds_masked_rows or (found.is_exponential and not inner.is_shifted),
    )  # fmt: skip


def _roles(
    region: Region,
    inner: Scores,
    found: Probabilities,
    keys: tuple[Axis, ...],
    query: Operand,
    key: Operand,
    value: Operand,
    output_dims: Dims,
) -> Roles:
    in_query, in_key, in_value = (set(axes_of(operand.dims)) for operand in (query, key, value))
    features = atoms(inner.summed)
    weights = set(axes_of(found.dims))
    order = axes_of(output_dims)
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
    leaves = [region.leaves[s].axes for e in (inner.keep, inner.bias) for s in e.free_symbols if s in region.leaves]
    paired = [axis for axis in own if any(axis in axes and keys & axes for axes in leaves)]
    candidates = paired if len(paired) == 1 else own
    sizes = [axis.size if isinstance(axis.size, int) else float("inf") for axis in candidates]
    return (candidates[sizes.index(max(sizes))],)


def _place_gain(
    region: Region, gain: sympy.Expr, query: Operand, key: Operand, roles: Roles
) -> tuple[float | None, sympy.Expr, sympy.Expr]:
    """Split a gain into a number, a factor of the query's rows and one of the keys."""
    number, rest = tidy(sympy.expand(gain)).as_coeff_Mul() if not isinstance(gain, sympy.Add) else (sympy.S.One, gain)
    query_gain, key_gain = sympy.S.One, sympy.S.One
    rows = {axis for group in roles.rows for axis in group}
    for factor in sympy.Mul.make_args(rest):
        axes = {axis for symbol in factor.free_symbols for axis in region.leaves[symbol].axes}
        if axes <= rows:
            query_gain *= factor
        elif axes <= {*roles.batch, *roles.kv_heads, *roles.keys}:
            key_gain *= factor
        else:
            return None, query_gain, key_gain
    return float(number), query_gain, key_gain


def _kernel_dtype(inner: Scores, query: Operand, key: Operand, value: Operand, output: fx.Node) -> torch.dtype:
    """The narrowest dtype in which a kernel rounds nowhere more than the source does."""
    weights = tensor_of(output).dtype  # type: ignore[union-attr]
    if value.entered != weights:  # autocast multiplied in another dtype than the operand has
        entered = weights
    else:
        entered = value.entered
    if all(is_lossless(operand.dtype, entered) for operand in (query, key, value)):
        return entered
    scores = tensor_of(inner.leaf.node).dtype  # type: ignore[union-attr]
    return torch.promote_types(entered, scores)


def _score_dtype(inner: Scores, dtype: torch.dtype) -> torch.dtype:
    scores = tensor_of(inner.leaf.node).dtype  # type: ignore[union-attr]
    return torch.promote_types(dtype, scores)


def _masked_rows(region: Region, inner: Scores, found: Probabilities) -> MaskedRows:
    """What a row without any kept key comes to in the source."""
    mode = _before_nan_to_num(region, inner, found)
    return "zero" if found.zero_rows and mode == "nan" else mode


def _before_nan_to_num(region: Region, inner: Scores, found: Probabilities) -> MaskedRows:
    if inner.fill is None or found.keep != 1:
        return "mean" if inner.is_floored and found.keep == 1 else "nan"
    if all(fill.coeff(INFINITY) != 0 for fill in inner.fills):
        return "mean" if inner.is_floored else "nan"
    values = {float(fill) for fill in inner.fills if fill.is_number}
    is_uniform = len(inner.fills) == len(values) == 1
    lowest = torch.finfo(tensor_of(inner.leaf.node).dtype).min  # type: ignore[union-attr]
    if is_uniform and (masks_finite.is_bounded(region, inner.bias) or min(values) <= 0.99 * lowest):
        return "mean"
    return "fill"
