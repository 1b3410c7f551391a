"""Every rotary embedding of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.parts import may_turn
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.masks.constants import Constants, hold_the_same
from lz_compile.passes.rewriting.core import Core
from lz_compile.passes.rewriting.match import Driver, Match, Outcome
from lz_compile.passes.rewriting.twins import Twins
from lz_compile.passes.rope import recogniser
from lz_compile.passes.rope.emitter import RopeEmitter
from lz_compile.passes.rope.rotations import Rotation

OP = "rope"
_LAST = frozenset({"add", "sub", "addcmul", "cat", "stack", "view_as_real", "sum"})


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every rotary embedding in ``graph``, and every one that is there but cannot be replaced, with the reason."""
    twins, known = Twins(effects, hold_the_same), Constants(effects).value

    def once(node: fx.Node) -> Match | NearMiss | None:
        return twins.read((node,), lambda: read(node)) if recogniser.sources(effects, node) else None

    def read(node: fx.Node) -> Match | NearMiss | None:
        found = recogniser.recognise(effects, node, known)
        return None if found is None else _checked(effects, *found)

    return Driver(OP).walk(reversed(graph.nodes), lambda node: _may_be_last(effects, node), once)


def _may_be_last(effects: Effects, node: fx.Node) -> bool:
    call, tensor = effects.calls[node], tensor_of(node)
    if call is None or tensor is None or not tensor.is_floating_point() or tensor.dim() < 2 or call.is_inplace:
        return False
    if 0 in shape_of(tensor) or not node.users:
        return False
    return call.name in _LAST or may_turn(call) or (is_cast(call) and _rounds(call))


def _rounds(call: Call) -> bool:
    """Whether a cast is to a narrower dtype; others are not part of what was computed before."""
    source, result = tensor_of(call.input), tensor_of(call.node)
    return source is not None and result is not None and source.dtype.itemsize > result.dtype.itemsize


def _checked(effects: Effects, rotation: Rotation, core: Core) -> Match | NearMiss:
    emitter = RopeEmitter.of(rotation, core)
    readers = {node: rotation.region.readers.get(node, core.nodes[0]) for node in emitter.edge()}
    try:
        core.check(effects, readers)
        _check_tables(emitter, core)
    except RefusedError as refusal:
        edit = "use the result of the rotation only" if refusal.reason.code == "INTERIOR_USED" else refusal.edit
        return NearMiss.of(OP, rotation.output, refusal, edit)
    return emitter.match(OP, core)


def _check_tables(emitter: RopeEmitter, core: Core) -> None:
    """Refuse complex tables that are learned: proofs compare real gradients."""
    for node in emitter.edge():
        tensor = tensor_of(node)
        if tensor is not None and tensor.is_complex() and tensor.requires_grad and grad_enabled(core.ambient):
            raise RefusedError("COMPLEX_GRADIENT", f"{told(node)} is complex and needs a gradient", "learn real tables")
