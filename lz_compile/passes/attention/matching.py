"""Every attention of a graph as a match: what was read gets its roles, and masks what they mean. What is none is told.

Whoever asks says what masks mean, and makes the match, since another op may say more of the same attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention import recogniser
from lz_compile.passes.attention.blocks import Blocks, Missed
from lz_compile.passes.attention.called_softmaxes import called_softmaxes
from lz_compile.passes.attention.emitter import AttentionEmitter, Finish
from lz_compile.passes.attention.linear import products_normalised
from lz_compile.passes.attention.lost_rows import UNDECIDED, without_lost_rows
from lz_compile.passes.attention.near_misses import unread, without_softmax
from lz_compile.passes.attention.proven_masks import simplify
from lz_compile.passes.attention.recogniser import OP, SOFTMAX, Weighing, softmaxes_behind
from lz_compile.passes.attention.roles import assign_roles
from lz_compile.passes.attention.sdpa_call import match_sdpa_call
from lz_compile.passes.attention.windows import windowed
from lz_compile.passes.formula import contraction
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, reshaped, told
from lz_compile.passes.graph.view import Call, reached, tensor_of
from lz_compile.passes.masks.constants import hold_the_same
from lz_compile.passes.masks.reading import Masks
from lz_compile.passes.rewriting.core import IF_USED, Core, find_core
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins

_CALL = "scaled_dot_product_attention"
#: Calls that may be the last one of an attention (a division may follow).
_LAST = contraction.PRODUCTS | {"sum", _CALL}


def attentions(graph: fx.Graph, effects: Effects, masks: Masks, finish: Finish) -> Iterator[Outcome]:
    """Every attention in ``graph``, and every softmax over a contraction that is none, with the reason."""
    missed: list[Missed] = []
    driver, twins = Driver(OP), Twins(effects, hold_the_same)

    def once(node: fx.Node) -> Match | NearMiss | None:
        return twins.read((node,), lambda: _read(effects, node, masks, finish))

    for found in driver.walk(graph.nodes, lambda node: _may_be_last(effects, node), once):
        if isinstance(found, NearMiss):
            missed.append(Missed(found, frozenset(softmaxes_behind(effects, found.node))))
        else:
            yield found
    told = Blocks(effects).told(missed)
    yield from told
    driver.covered.update(*(each.softmaxes for each in missed), *(miss.pieces for miss in told))
    others = [*unread(OP, graph, effects, driver.covered), *called_softmaxes(OP, graph, effects)]
    yield from others
    driver.covered.update(each.node for each in others + [each.miss for each in missed])
    others = [*without_softmax(OP, graph, effects, driver.covered)]
    yield from others
    driver.covered.update(each.node for each in others)
    yield from products_normalised(OP, graph, effects, driver.covered)


def _may_be_last(effects: Effects, node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return effects.name(node) in _LAST and tensor is not None and 0 not in shape_of(tensor)


def _read(effects: Effects, node: fx.Node, masks: Masks, finish: Finish) -> Match | NearMiss | None:
    call = effects.calls[node]
    assert call is not None, "an anchor is a call"
    changed = effects.reshaped_after_read(_behind(effects, node), node)
    if changed is not None:
        return _reshaped(effects, call, *changed)
    if call.name == _CALL:
        return match_sdpa_call(effects, call, masks, finish)
    made = partial(_matched, masks=masks, finish=finish)
    found = recogniser.recognise(effects, call, lambda read: made(without_lost_rows(read)), masks.flag)
    if not isinstance(found, NearMiss) or found.reason.code != UNDECIDED:
        return found
    return recogniser.recognise(effects, call, made, masks.flag)


def _matched(read: Weighing, masks: Masks, finish: Finish) -> Match:
    """The match of an attention that was read.

    Raises:
        RefusedError: it is none that a kernel could replace.
    """
    region = read.region
    core = find_core(region.effects, read.scores.leaf.node, read.output)
    emitter = assign_roles(read)
    window = windowed(emitter, masks)
    emitter = window or simplify(emitter, masks)
    flags = [masks.flag(leaf.node) or () for symbol, leaf in region.leaves.items() if symbol.is_integer]
    emitter = replace(emitter, buffers=tuple(dict.fromkeys(itertools.chain(emitter.buffers, *flags))))
    if emitter.floor is not None and emitter.bias != 0 and not emitter.sees_keys and emitter.needs_grad():
        raise RefusedError(
            "FLOORED_GRADIENT",
            "scores are clamped after a mask is added: in rows that it covers, gradients end at the clamp",
            "leave the clamp out, or mask with masked_fill",
        )
    _check_weights(emitter, core)
    core.check(region.effects, {node: region.readers.get(node, core.nodes[0]) for node in emitter.edge()})
    return finish(emitter, core, None) if window is None else window.match(OP, core)


_AVERAGED = "leave it as it is: an average of the scores, as an entropy is one, needs the scores themselves"
_CHOSEN = "leave it as it is: a mask of the highest scores, as of top-k, needs the scores themselves"


def _check_weights(emitter: AttentionEmitter, core: Core) -> None:
    """Refuse operands that are made of the scores, which would be computed beside the kernel: values, weights, masks."""
    effects = emitter.region.effects

    def above(node: fx.Node) -> Iterable[fx.Node]:
        name = effects.name(node) or ""
        return [] if name.endswith("_like") or name.startswith("new_") else inside.intersection(node.all_input_nodes)

    weights, values, inside = emitter.weights(), emitter.value.node, set(core.nodes)
    leaves = emitter.region.leaves_in(emitter.keep, emitter.bias).values()
    masks = {leaf.node for leaf in leaves if leaf.axes & {*emitter.roles.keys}}
    for node in core.nodes:
        if node in {values, *weights, *masks} and core.nodes[0] in reached([node], above):
            does, edit = ("is weighted by", _AVERAGED) if node is values else ("masks", _CHOSEN)
            does, edit = ("weights", IF_USED) if node in weights else (does, edit)
            raise RefusedError("INTERIOR_USED", f"{told(node)} is made of the scores, and {does} what they give", edit)


def _reshaped(effects: Effects, call: Call, node: fx.Node, writer: fx.Node) -> NearMiss | None:
    """A near miss where an attention holds a tensor whose shape, as far as Dynamo tells, is a later one."""
    region = Region(effects)
    is_attention = call.name == _CALL or any(
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
