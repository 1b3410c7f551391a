"""One attention that was read: brings its operands into a kernel's layout, the result back, and says what it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import sympy
import torch
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import Size
from lz_compile.lowering.attention_attributes import AttentionAttrs, AttentionFacts
from lz_compile.lowering.ops.attention import SHAPES, Operands
from lz_compile.passes.attention.operand import Operand
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, axes_of
from lz_compile.passes.formula.expressions import indicators
from lz_compile.passes.graph.view import known_tensor, read, tensor_of
from lz_compile.passes.masks import finite as masks_finite
from lz_compile.passes.masks.meaning import Documents, Implied, Slopes, near
from lz_compile.passes.rewriting.builder import Builder
from lz_compile.passes.rewriting.core import Core, wants_grad
from lz_compile.passes.rewriting.match import Found, Input, Match, Site, TableEmitter, Trial

#: Makes the match of what was read, over a core, given the kernel that the source itself calls: another op may say more.
Finish: TypeAlias = "Callable[[AttentionEmitter, Core, str | None], Match]"


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


#: Scores, and what is one for each row of them, by the letters of the op's legend.
SCORES, ROWS = "B Hq Sq Sk", "B Hq Sq 1"
#: Calls in which every matrix of a batch has keys of its own.
_BATCHED = frozenset({"matmul", "bmm", "baddbmm", "scaled_dot_product_attention"})


@dataclass(frozen=True)
class AttentionEmitter(TableEmitter):
    """Brings the operands of one attention into the canonical layout, and the result back."""

    result_shape: ClassVar = "B Hq Sq E"

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
    sinks: sympy.Expr | None
    output: fx.Node
    output_dims: Dims
    dtype: torch.dtype
    attrs: AttentionAttrs
    passed: Mapping[fx.Node, Dims]
    floor: float | None = None
    fill: sympy.Expr = sympy.S.Zero
    is_undefined_when_masked: bool = False
    slopes: Slopes | None = None
    documents: Documents | None = None
    implied: Mapping[fx.Node, Implied] = field(default_factory=dict)
    buffers: tuple[fx.Node, ...] = ()
    sees_keys: bool = False
    distance: sympy.Expr = sympy.S.Zero
    value_gain: sympy.Expr = sympy.S.One
    may_vanish: bool = False
    product: fx.Node | None = None
    mask_label: str = ""
    mask_reasons: tuple[Reason, ...] = ()

    def weights(self) -> dict[fx.Node, Dims]:
        """What rows and keys are weighted with, sinks included."""
        gains = (self.query_gain, self.key_gain, self.value_gain, self.output_gain, self.sinks or sympy.S.Zero)
        return {leaf.node: leaf.dims for leaf in self.region.leaves_in(*gains).values()}

    def edge(self) -> dict[fx.Node, Dims]:
        """The nodes that the replacement reads, with their axes."""
        found: dict[fx.Node, Dims] = {operand.node: operand.dims for operand in (self.query, self.key, self.value)}
        fill = self.fill if self.attrs.masked_rows == "fill" else sympy.S.Zero
        for node, dims in self.weights().items():
            found.setdefault(node, dims)
        for leaf in self.region.leaves_in(self.keep, self.bias, fill, self.distance).values():
            found.setdefault(leaf.node, leaf.dims)
        pair = () if self.documents is None else (self.documents.query, self.documents.key)
        for each in (self.slopes, *pair):
            if each is not None:
                found.setdefault(each.node, each.dims)
        return found

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """The axes by their roles."""
        roles = self.roles
        found = {"B": roles.batch, "Hq": roles.heads, "Hk": roles.kv_heads, "Sq": roles.queries, "Sk": roles.keys}
        return {**found, "D": roles.features, "E": roles.value_features}

    def lengths(self) -> tuple[Size, Size]:
        """How many queries and keys there are."""
        queries, keys = self.extents("Sq Sk")
        return queries, keys

    def needs_grad(self) -> bool:
        """Whether gradients may be asked of any operand."""
        return wants_grad(self.region.effects.ambient(self.output), self.edge())

    def attributes_at(self, sizes: Mapping[Axis, int]) -> AttentionAttrs:
        """The attributes for a proof at other sizes."""
        queries, keys = (Builder(lambda node: node, sizes=sizes).size(group) for group in self.axes("Sq Sk"))
        # Documents of a proof are random, and reach what they please; a mask tensor can be made to fit any reach.
        has_tensor = any(each.reaches for each in self.implied.values())
        return near(self.attrs if has_tensor else replace(self.attrs, reach=None), queries, keys)

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """What a mask that was proven holds at other sizes; ``given`` is a random tensor in its place."""
        attrs = self.attributes_at(sizes)
        return self.implied[node].value(builder, self.axes(SCORES), attrs, given, sees_keys=self.sees_keys)

    @property
    def flags(self) -> dict[fx.Node, tuple[Dims, bool]]:
        """The boolean masks with their axes, and whether True keeps."""
        leaves, factors = self.region.leaves, sympy.Mul.make_args(self.keep)
        pairs = [(leaves[flag], factor == flag) for factor in factors for flag in factor.free_symbols]
        return {leaf.node: (leaf.dims, keeps) for leaf, keeps in pairs}

    def operands(self, builder: Builder) -> Operands:
        """Query, key, value, and mask, bias or sinks where there are any, in the canonical layout."""
        query, key, value = (self._tensor(builder, name) for name in ("query", "key", "value"))
        squares = None
        if self.distance != 0:
            query, key, squares = self._centred(builder, query, key)
        if self.query_gain != 1:
            query = (query * self._formula(builder, self.query_gain, ROWS, self.dtype)).to(self.dtype)
        if self.key_gain != 1:
            key = (key * self._formula(builder, self.key_gain, "B Hk Sk 1", self.dtype)).to(self.dtype)
        if self.value_gain != 1:
            value = (value * self._formula(builder, self.value_gain, "B Hk Sk 1", self.dtype)).to(self.dtype)
        found = {"query": query, "key": key, "value": value}
        scores = self.axes(SCORES)
        if self.keep != 1:
            found["mask"] = self._mask(builder, scores)
        if self.bias != 0:
            found["bias"] = self._bias(builder, scores, query)
        if self.floor is not None:
            # All that the floor bounds is one number, which swallows scores: no narrower dtype holds it
            wide = found["bias"].to(self._wide())
            found["bias"] = torch.where(wide <= self.floor, torch.finfo(self._wide()).min, wide)
        if squares is not None:
            found["bias"] = found["bias"] + squares if "bias" in found else squares
        if self.attrs.masked_rows == "fill":
            found["fill"] = self._piecewise(builder, self.fill, scores)
        if self.sinks is not None:
            found["sinks"] = self._added(builder, self.sinks, self.axes(ROWS), query)
        if self.slopes is not None:
            linear = self._arranged(builder, "slopes", self.slopes)
            found["slopes"] = linear if self.slopes.factor == 1 else linear * self.slopes.factor
        if self.documents is not None:
            found["query_documents"] = self._arranged(builder, "query_documents", self.documents.query)
            found["key_documents"] = self._arranged(builder, "key_documents", self.documents.key)
        return Operands(**found)

    def _arranged(self, builder: Builder, name: str, given: Leaf | Slopes) -> Any:
        return builder.arrange(builder.value(given.node), given.dims, self.axes(SHAPES[name]))

    def _formula(self, builder: Builder, expression: sympy.Expr, letters: str, dtype: torch.dtype) -> Any:
        return builder.evaluate(expression, self.region.leaves, self.axes(letters), dtype)

    def _centred(self, builder: Builder, query: Any, key: Any) -> tuple[Any, Any, Any]:
        """Query and key as seen from the median of the first keys, and what the squares of the keys add to scores.

        Distances do not change, and numbers stay small: the difference of two large squares has few digits. What a mask
        hides is mostly behind, and may be anything: of one large key, a mean would be large, and all digits lost. (PyTorch's
        own median is not deterministic on a GPU.)
        """
        roles = self.roles
        count = min(keys, 8) if isinstance(keys := self.lengths()[1], int) else 8
        middle = key[:, :, :8].detach().sort(2)[0][:, :, (count - 1) // 2 : count // 2 + 1]
        centre = middle.mean(2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        key = key - centre
        squares = key.to(self._wide()).square().sum(-1)[:, :, None]
        around = centre * float(self.key.factor / self.query.factor)
        if roles.group:
            count = builder.size(roles.group)
            around, squares = (each.repeat_interleave(count, 1) for each in (around, squares))
        weight = self._formula(builder, self.distance, SCORES, self._wide())
        return query - around, key, squares * weight * float(self.key.factor**2)

    def _bias(self, builder: Builder, groups: tuple[tuple[Axis, ...], ...], query: Any) -> Any:
        return self._added(builder, self.bias, groups, query)

    def _added(self, builder: Builder, expression: sympy.Expr, groups: tuple[tuple[Axis, ...], ...], query: Any) -> Any:
        """A bias, or sinks; one number for all, Python's or a tensor's, as a tensor of the rank of scores."""
        value = builder.evaluate(expression, self.region.leaves, groups, self._wide())
        tensors = (tensor_of(leaf.node) for leaf in self.region.leaves_in(expression).values())
        if any(tensor is not None and tensor.dim() for tensor in tensors):
            return value
        return query.new_zeros((1,) * len(groups), dtype=self._wide()) + value

    def _tensor(self, builder: Builder, name: str) -> Any:
        operand: Operand = getattr(self, name)
        value = builder.arrange(builder.value(operand.node), operand.dims, self.axes(SHAPES[name]), expand=True)
        return value if operand.dtype == self.dtype else value.to(self.dtype)

    def _mask(self, builder: Builder, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        parts = []
        for factor in sympy.Mul.make_args(self.keep):
            for flag in factor.free_symbols:  # of an odd number of masks that drop, -1 is a factor, too
                value = self._flag(builder, flag, groups)
                parts.append(value if factor == flag else torch.logical_not(value))
        mask = parts[0]
        for part in parts[1:]:
            mask = torch.logical_and(mask, part)
        return mask

    def _flag(self, builder: Builder, flag: sympy.Symbol, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        leaf = self.region.leaves[flag]
        value = builder.arrange(builder.value(leaf.node), leaf.dims, groups)
        return value if known_tensor(leaf.node).dtype == torch.bool else value != 0

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.attrs.score_dtype, torch.float32)

    def _piecewise(self, builder: Builder, expression: sympy.Expr, groups: tuple[tuple[Axis, ...], ...]) -> Any:
        """An expression that branches on masks, as nested selections."""
        flags = indicators(expression)
        if not flags:
            return builder.evaluate(expression, self.region.leaves, groups, self._wide())
        on, off = (
            self._piecewise(builder, sympy.expand(expression.xreplace({flags[0]: value})), groups)
            for value in (sympy.S.One, sympy.S.Zero)
        )
        flag = self._flag(builder, flags[0], groups)
        if isinstance(on, float):  # of two numbers a tensor would be made that may not hold them
            on = flag.new_full((), on, dtype=self._wide())
        return torch.where(flag, on, off)

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's ``[B, H, S, E]`` in the layout and dtype of the node that it replaces."""
        if self.output_gain != 1:
            value = value * self._formula(builder, self.output_gain, ROWS, self.dtype)
        target = known_tensor(self.output).dtype
        if target != self.dtype or self.output_gain != 1:
            value = value.to(target)
        return super().result(builder, value)

    def match(self, op: str, core: Core, source_kernel: str | None = None) -> Match:
        """The finished match."""
        operands = {"query": self.query.node, "key": self.key.node, "value": self.value.node}
        if self.documents is not None:
            operands |= {"query_documents": self.documents.query.node, "key_documents": self.documents.key.node}
        biases = {
            leaf.node
            for symbol, leaf in self.region.leaves_in(self.bias).items()
            if sympy.diff(self.bias, symbol).is_number and not masks_finite.is_bounded(self.region, symbol)
        }
        # Of what is a query, key or value as well, nothing finite is left where it is infinite.
        biases -= {*(self.implied if self.sees_keys else ()), *operands.values()}
        found = Found(
            self.attrs,
            self._facts(core),
            self._inputs(biases),
            operands,
            self,
            source_kernel=source_kernel,
            buffers=self.buffers,
            masks_mean=self.mask_label,
            notes=self.mask_reasons,
        )
        ties, apart = self._read_twice()
        trial = Trial(
            limited=frozenset((*self.roles.features, *self.roles.value_features)),
            # Of larger operands exponentials are infinite, or all that a mask keeps are zero beside one that it drops.
            largest=4.0 if self.may_vanish else Trial.largest,
            masked_rows_count=not (self.is_undefined_when_masked or self.sees_keys),
            # What SDPA's own backward gives for rows that a finite bias masks completely depends on its implementation.
            masked_rows_are_finite=(source_kernel is None or self.bias == 0)
            and (self.keep == 1 or self.attrs.masked_rows in ("mean", "fill", "zero")),
            ties=ties,
            pinned=frozenset(apart),
        )
        return Match(op, Site.of(core, self.output_dims, {**self.region.interior, **self.passed}), found, trial)

    def _read_twice(self) -> tuple[dict[Axis, Axis], set[Axis]]:
        """Of masks, keys and values that are one tensor: axes that are others by another name, and what differs otherwise."""
        edge, limited = self.edge(), (*self.roles.features, *self.roles.value_features)
        read = [(leaf.node, leaf.dims) for leaf in self.region.leaves_in(self.keep, self.bias).values()]
        read += [(operand.node, operand.dims) for operand in (self.query, self.key, self.value)]
        pairs = [(axes_of(dims), axes_of(edge[node])) for node, dims in read]
        equal = [[axis.size for axis in own] == [axis.size for axis in other] for own, other in pairs]
        cut = (pair for pair, alike in zip(pairs, equal, strict=True) if not alike)
        apart = {axis for own, other in cut for axis in {*own} ^ {*other}}
        ties = dict[Axis, Axis]()
        for pair in (tied for both in itertools.compress(pairs, equal) for tied in zip(*both, strict=True)):
            ends = (ties.get(axis, axis) for axis in pair)
            one, two = sorted(ends, key=lambda axis: (axis in apart, axis in limited))  # what keeps its size is the end
            ties |= {axis: two for axis in (*ties, one) if ties.get(axis, one) is one and axis is not two}
        return ties, apart

    def _inputs(self, biases: Collection[fx.Node]) -> dict[fx.Node, Input]:
        """What the replacement reads, and the masks that it need not read, with what is known of their values."""
        flags, rows, dropped = self.flags, self._rows(), self._dropped()
        selecting = {self.region.leaves[flag].node for flag in self.keep.free_symbols & self.region.selecting}
        is_finite = self.attrs.bias_is_finite or self.region.multiplies_masks
        edge = {**self.edge(), **{node: each.dims for node, each in self.implied.items()}}
        return {
            node: Input(
                dims,
                fill=is_finite if node in biases else None,
                keeps=flags[node][1] if node in flags else None,
                selects=node in selecting,
                rows=rows.get(node, ()),
                dropped=dropped.get(node, ()),
                implied=str(self.implied[node]) if node in self.implied else None,
            )
            for node, dims in edge.items()
        }

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

    def _facts(self, core: Core) -> AttentionFacts:
        bias = [leaf.node for leaf in self.region.leaves_in(self.bias).values()]
        bias += [] if self.slopes is None else [self.slopes.node]
        bias += [] if self.distance == 0 else [self.key.node]
        batch, heads, kv_heads, width, value_width = self.extents("B Hq Hk D E")
        return AttentionFacts(
            batch, heads, kv_heads, *self.lengths(), width, value_width, self.dtype,
            known_tensor(self.output).device.type, core.wants_grad(self.edge()), core.wants_grad(bias),
            self._adds_wider(), self._copies(batch, kv_heads),
        )  # fmt: skip

    def _copies(self, batch: Size, kv_heads: Size) -> int:
        """How many of its keys the source's product reads: each matrix of a batch has its own."""
        call = None if self.product is None else read(self.product)
        if call is None or call.name not in _BATCHED:  # by index notation keys stay as they are
            return 1
        made = math.prod(known_tensor(call.node).shape[:-2])
        is_known = isinstance(made, int) and isinstance(batch, int) and isinstance(kv_heads, int)
        return max(1, made // (batch * kv_heads)) if is_known else 1

    def _adds_wider(self) -> bool:
        """Whether what is added to scores is wider than the operands, as the scores are."""
        if self.attrs.rounds_bias or self._wide().itemsize <= self.dtype.itemsize:
            return False
        if self.slopes is not None or self.distance != 0 or not isinstance(self.bias, sympy.Symbol):
            return self.slopes is not None or self.distance != 0 or self.bias != 0
        return known_tensor(self.region.leaves[self.bias].node).dtype.itemsize > self.dtype.itemsize
