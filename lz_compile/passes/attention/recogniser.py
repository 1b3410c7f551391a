"""Attention: a softmax of a contraction, contracted again over the same axis.

The anchor is the *second* contraction. Read upwards from it, one factor is a softmax over the axis that is summed
(:mod:`probabilities`), whose scores are affine in a first contraction (:mod:`scores`). Axes then say what is a query, a
key, a head or a batch (:mod:`roles`); no layout or operand order is listed anywhere.

An attention that is computed block by block, by hand, is told as one: each block of keys has exponentials of its own, which
are not divided by their sum. What a piece lacks, the whole does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.ground.sizes import Shape, Size, shape_of
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.passes.attention.emitter import AttentionEmitter, Finish, Roles
from lz_compile.passes.attention.near_misses import unread
from lz_compile.passes.attention.operand import Operand
from lz_compile.passes.attention.proven_masks import simplify
from lz_compile.passes.attention.reading import OP, SCORES, SOFTMAX, Reader
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, axes_of, broadcast_from, fresh, regroup
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import OUT_OF_PLACE, MutatedError, NearMiss, RefusedError, refusal_of, reshaped
from lz_compile.passes.graph.view import Call, known_tensor, reached, tensor_of, where_of
from lz_compile.passes.masks import finite as masks_finite
from lz_compile.passes.masks.meaning import Meanings
from lz_compile.passes.rewriting.core import find_core
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins

#: Calls that may be the last one of an attention (a division may follow).
_LAST = contraction.PRODUCTS | {"sum", "scaled_dot_product_attention"}


def recognise(graph: fx.Graph, effects: Effects, masks: Meanings, finish: Finish) -> Iterator[Outcome]:
    """Every attention in ``graph``, and every softmax over a contraction that is none, with the reason."""
    missed: list[Missed] = []
    driver, twins = Driver(OP), Twins(effects, masks.hold_the_same)

    def once(node: fx.Node) -> Match | NearMiss | None:
        return twins.read((node,), lambda: _read_unless_reshaped(effects, node, masks, finish))

    for found in driver.walk(graph.nodes, lambda node: _may_be_last(effects, node), once):
        if isinstance(found, NearMiss):
            missed.append(Missed(found, frozenset(_softmaxes_behind(effects, found.node))))
        else:
            yield found
    told = Blocks(effects).told(missed)
    yield from told
    driver.covered.update(*(each.softmaxes for each in missed), *(miss.pieces for miss in told))
    yield from unread(OP, graph, effects, driver.covered)


def _may_be_last(effects: Effects, node: fx.Node) -> bool:
    call, tensor = effects.calls[node], tensor_of(node)
    return call is not None and call.name in _LAST and tensor is not None and 0 not in shape_of(tensor)


def _read_unless_reshaped(effects: Effects, node: fx.Node, masks: Meanings, finish: Finish) -> Match | NearMiss | None:
    call = effects.calls[node]
    assert call is not None, "an anchor is a call"
    found = effects.reshaped_after_read(_behind(effects, call.node), call.node)
    if found is not None:
        return _reshaped(effects, call, *found)
    return _read(effects, call, masks, finish)  # who asks for matches asks for theirs


def _read(effects: Effects, call: Call, masks: Meanings, finish: Finish) -> Match | NearMiss | None:
    if call.name == "scaled_dot_product_attention":
        return match_sdpa_call(effects, call, masks, finish)
    refused: NearMiss | None = None
    for expand_masks in (False, True):
        region = Region(effects, expand_masks=expand_masks)
        try:
            found = Reader(region, call, masks, finish).match()
        except RefusedError as refusal:
            refused = refused or NearMiss.of(OP, call.node, refusal)
        except MutatedError as error:
            return NearMiss.of(OP, call.node, refusal_of(error, OUT_OF_PLACE))
        except LayoutError as error:
            return refused or _unclear(region, call, error)
        else:
            return found or refused
    return refused


def _unclear(region: Region, call: Call, error: LayoutError) -> NearMiss | None:
    """A near miss where a softmax over a product could not be read for its layout."""
    operands = call.node.all_input_nodes
    if not any(all(region.reaches(node, goal, call.node) for goal in (SOFTMAX, SCORES)) for node in operands):
        return None
    reason = Reason("LAYOUT_UNCLEAR", f"the dimensions do not come apart into axes: {error}")
    return NearMiss(OP, call.node, reason, "reshape along whole heads and positions", where_of(call.node))


def _reshaped(effects: Effects, call: Call, node: fx.Node, writer: fx.Node) -> NearMiss | None:
    """A near miss where an attention holds a tensor whose shape, as far as Dynamo tells, is a later one."""
    region = Region(effects)
    is_attention = call.name == "scaled_dot_product_attention" or any(
        region.reaches(operand, SOFTMAX, call.node) for operand in call.node.all_input_nodes
    )
    return NearMiss.of(OP, call.node, reshaped(node, writer)) if is_attention else None


def _behind(effects: Effects, node: fx.Node) -> set[fx.Node]:
    """What an attention that ends at ``node`` may consist of: everything up to the second product from there."""
    if not effects.reshapes:
        return set()
    found: set[fx.Node] = set()
    queue = [(node, 0)]
    while queue:
        current, products = queue.pop()
        call = effects.calls.get(current)
        if current in found or call is None:
            continue
        found.add(current)
        products += call.name in _LAST - {"sum"}
        if products <= 2:
            queue.extend((operand, products) for operand in current.all_input_nodes)
    return found


def _softmaxes_behind(effects: Effects, node: fx.Node) -> set[fx.Node]:
    """Softmaxes that a refused contraction has been blamed for already."""

    def above(each: fx.Node) -> list[fx.Node]:
        return [] if effects.name(each) in contraction.PRODUCTS else each.all_input_nodes

    return {each for each in reached(node.all_input_nodes, above, 64) if effects.name(each) in SOFTMAX}


SOURCE = "torch.sdpa"
#: What the source calls where a mask that it passes was proven: not the kernel of that name without the mask.
MASKED_SOURCE = "torch.sdpa with a mask"


def match_sdpa_call(effects: Effects, call: Call, masks: Meanings, finish: Finish) -> Match | None:
    """The attention that a call of SDPA computes; None where an argument is no tensor or no constant."""
    nodes = [call.get(name) for name in ("query", "key", "value")]
    tensors = [tensor_of(node) for node in nodes]
    dropout_p, is_causal = call.get("dropout_p", 0.0), call.get("is_causal", False)
    if any(tensor is None for tensor in tensors) or not isinstance(dropout_p, (int, float)):
        return None
    if not isinstance(is_causal, bool):
        return None
    shapes = [shape_of(tensor) for tensor in tensors if tensor is not None]
    region = Region(effects)
    roles, dims = _roles(shapes, bool(call.get("enable_gqa", False)))
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
    query, key, value = (
        Operand(node, dim, sympy.S.One, tensor.dtype)
        for node, dim, tensor in zip(nodes, dims, tensors, strict=True)
        if tensor is not None
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
        passed={},
    )
    simple = simplify(emitter, masks)
    source = SOURCE if not simple.implied else MASKED_SOURCE
    core = find_core(effects, call.node, call.node)
    return finish(simple, core, source)


def _roles(shapes: list[Shape], enable_gqa: bool) -> tuple[Roles, list[Dims]]:
    """Axes for query ``[..., H, S, D]``, key and value; leading dimensions of one broadcast."""
    query, key, value = shapes
    longest = max(shapes, key=len)
    leading = fresh([_widest(position, shapes) for position in range(-len(longest), -2)])
    features, queries, keys, value_features = fresh((query[-1], query[-2], key[-2], value[-1]))
    has_heads = len(longest) > 3
    heads = leading[-1] if has_heads else ()
    batch = tuple(axis for dim in (leading[:-1] if has_heads else leading) for axis in dim)
    kv_heads: tuple[Axis, ...] = heads
    group: tuple[Axis, ...] = ()
    if enable_gqa and has_heads and key[-3] != query[-3]:
        ratio = query[-3] / key[-3] if not isinstance(query[-3], int) else query[-3] // key[-3]
        kv_heads, group = regroup(heads, (key[-3], ratio))
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


#: Calls that put blocks together, besides arithmetic.
_JOINTS = frozenset(
    {"stack", "cat", "sum", "amax", "max", "logsumexp", "logaddexp", "sigmoid", "softmax", "unbind", "chunk", "split"}
)
#: How many nodes behind a piece, or before it, are looked at.
_FAR = 512
#: How many nodes behind a softmax are looked at for its scores.
_NEAR = 16


@dataclass(frozen=True)
class Missed:
    """A product of values that was refused, and what its weights come from: calls of softmax, exponentials."""

    miss: NearMiss
    softmaxes: frozenset[fx.Node]


@dataclass(frozen=True)
class Blocks:
    """Tells the pieces of attentions by blocks as one."""

    effects: Effects

    def told(self, missed: Sequence[Missed]) -> list[NearMiss]:
        """All that was refused, with every attention by blocks in the place of what it consists of."""
        pieces = [each for each in missed if self._is_piece(each)]
        wholes = list(self._wholes([each.miss for each in pieces]))
        known = frozenset[fx.Node]().union(*(whole.pieces for whole in wholes))
        rest = [each.miss for each in missed if not each.softmaxes & known and each.miss.node not in known]
        return [*wholes, *rest]

    def _is_piece(self, missed: Missed) -> bool:
        code = missed.miss.reason.code
        return code == "NOT_NORMALISED" or (
            code == "INTERIOR_USED" and any(map(self._is_summed_beside, missed.softmaxes))
        )

    def _wholes(self, pieces: Sequence[NearMiss]) -> Iterator[NearMiss]:
        left = [(piece, self._joints(piece.node)) for piece in pieces]
        while left:
            first, nodes = left.pop(0)
            count = 1
            while (more := next((each for each in left if nodes & each[1]), None)) is not None:
                left.remove(more)
                nodes, count = nodes | more[1], count + 1
            is_loop = any(map(_is_loop, nodes))
            if count > 1 or is_loop:
                yield self._whole(first, nodes, "a loop over blocks" if is_loop else f"{count} blocks")

    def _whole(self, first: NearMiss, joints: set[fx.Node], blocks: str) -> NearMiss:
        text = f"an attention is computed in {blocks}, whose exponentials are put together afterwards"
        edit = "write plain attention, softmax(q @ k.T) @ v: kernels go over blocks by themselves"
        pieces = frozenset((*joints, *self._behind(joints)))
        return replace(first, reason=Reason("ATTENTION_BY_BLOCKS", text), edit=edit, pieces=pieces, is_whole=True)

    def _joints(self, product: fx.Node) -> set[fx.Node]:
        """What a product of values is put together with others by, up to and including a division, and layouts behind it."""
        found, queue = {product}, [(product, False)]
        while queue and len(found) < _FAR:
            node, is_divided = queue.pop()
            for user in node.users:
                call = self.effects.calls.get(user)
                if user in found or call is None:
                    continue
                if is_divided and not (call.name in ("cat", "stack") or layout.rearranges(call)):
                    continue
                if is_divided or self._may_join(call):
                    found.add(user)
                    queue.append((user, is_divided or call.name == "div"))
        return found

    def _behind(self, joints: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """What is put together, up to the products of queries and keys: the running maximum is among it."""

        def joined(node: fx.Node) -> Iterator[fx.Node]:
            calls = map(self.effects.calls.get, node.all_input_nodes)
            return (call.node for call in calls if call is not None and self._may_join(call))

        return reached((each for joint in joints for each in joined(joint)), joined, _FAR)

    def _may_join(self, call: Call) -> bool:
        return is_pointwise(call) or layout.rearranges(call) or call.name in _JOINTS or _is_loop(call.node)

    def _is_summed_beside(self, softmax: fx.Node) -> bool:
        """Whether the logarithm of the sum of the same exponentials is computed, too."""

        def above(node: fx.Node) -> list[fx.Node]:
            call = self.effects.calls.get(node)
            is_passed = call is not None and (is_pointwise(call) or layout.rearranges(call))
            return node.all_input_nodes if is_passed else []

        near = reached(softmax.all_input_nodes, above, _NEAR)
        calls = (self.effects.calls.get(user) for node in near for user in node.users)
        return any(call is not None and call.name == "logsumexp" for call in calls)


def _is_loop(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and "scan" in node.target.name()
