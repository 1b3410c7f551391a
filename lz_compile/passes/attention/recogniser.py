"""Attention: a softmax of a contraction, contracted again over the same axis.

The anchor is the *second* contraction. Read upwards from it, one factor is a softmax over the axis that is summed
(:mod:`probabilities`), whose scores are affine in a first contraction (:mod:`scores`). Axes then say what is a query, a
key, a head or a batch (:mod:`roles`); no layout or operand order is listed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.ground.reasons import Reason
from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention.blocks import Blocks, Missed
from lz_compile.passes.attention.near_misses import OUT_OF_PLACE, unread
from lz_compile.passes.attention.reading import OP, SCORES, SOFTMAX, Reader
from lz_compile.passes.attention.sdpa_call import match_sdpa_call
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.graph.effects import Effects, MutatedError
from lz_compile.passes.graph.modules import told
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import Call, tensor_of, where_of
from lz_compile.passes.graph.walks import reached
from lz_compile.passes.masks.meaning import Meanings
from lz_compile.passes.rewriting.driver import Driver, Outcome, refusal_of
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.twins import Twins

#: Calls that may be the last one of an attention (a division may follow).
_LAST = contraction.PRODUCTS | {"sum", "scaled_dot_product_attention"}


def recognise(graph: fx.Graph, effects: Effects, masks: Meanings) -> Iterator[Outcome]:
    """Every attention in ``graph``, and every softmax over a contraction that is none, with the reason."""
    missed: list[Missed] = []
    driver, twins = Driver(OP), Twins(effects, masks.hold_the_same)

    def once(node: fx.Node) -> Match | NearMiss | None:
        return twins.read((node,), lambda: _read_unless_reshaped(effects, node, masks))

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


def _read_unless_reshaped(effects: Effects, node: fx.Node, masks: Meanings) -> Match | NearMiss | None:
    call = effects.calls[node]
    assert call is not None, "an anchor is a call"
    reshaped = effects.reshaped_after_read(_behind(effects, call.node), call.node)
    if reshaped is not None:
        return _reshaped(effects, call, *reshaped)
    found = _read(effects, call, masks)
    if isinstance(found, Match):
        reshaped = effects.reshaped_after_read(found.core, found.output)
        return found if reshaped is None else _reshaped(effects, call, *reshaped)
    return found


def _read(effects: Effects, call: Call, masks: Meanings) -> Match | NearMiss | None:
    if call.name == "scaled_dot_product_attention":
        return match_sdpa_call(effects, call, masks)
    refused: NearMiss | None = None
    for expand_masks, expand_inplace in ((False, True), (True, True), (False, False)):
        region = Region(effects, expand_masks=expand_masks, expand_inplace=expand_inplace)
        try:
            found = Reader(region, call, masks).match()
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
    if not is_attention:
        return None
    reason = Reason("OPERAND_RESHAPED", f"{told(node)} changes its shape in place by {told(writer)}, after it is read")
    edit = f"use the out-of-place form of {str(writer.target).rstrip('_')}"
    return NearMiss(OP, call.node, reason, edit, where_of(call.node))


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
