"""Rotary position embedding in all of its spellings.

The anchor is the last node: a sum, a join of features, or a cast of one. Behind it, a tensor is looked for of which
features are taken apart; the result is an embedding if it is a rotation of that tensor's pairs (:mod:`rotations`). Graphs are
read from their end, so that the widest subgraph is found first: with the features that are not turned, and the final cast.
What that is to a kernel is asked of what was found (:mod:`matching`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from lz_compile.ground.sizes import product, shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import LayoutError
from lz_compile.passes.formula.expressions import Values, is_cast
from lz_compile.passes.formula.layout import SPLITS
from lz_compile.passes.formula.moments import CALLS, STATISTICS
from lz_compile.passes.formula.parts import is_read, may_turn
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import MutatedError, RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.graph.writes import NEW
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rope.rotations import Rotation, check, read

#: How many operations may lie between a tensor and what is made of its features.
_BEHIND = 16
_MANY = 80
_APART = SPLITS | {*"getitem narrow select view_as_complex flip roll index_select gather take_along_dim".split()}
_PRODUCTS = frozenset({"mul", "addcmul"})


def sources(effects: Effects, output: fx.Node) -> list[fx.Node]:
    """What may be turned: tensors of which features are taken apart behind ``output``, the nearest first."""
    uses: dict[fx.Node, int] = {output: 1}
    level, apart = [output], set()
    for _ in range(_BEHIND):
        following: dict[fx.Node, None] = {}
        for node in level:
            call = effects.calls[node]
            if call is None or not is_read(call):
                continue
            if call.name in _APART and isinstance(call.input, fx.Node):
                apart.add(call.input)
            if call.name == "sum" and isinstance(call.input, fx.Node):
                apart.update(call.input.all_input_nodes)  # the factors: pairs and rotation matrices
            if may_turn(call):
                apart.update(node.all_input_nodes)
            for operand in node.all_input_nodes:
                if operand not in uses and (tensor_of(operand) is not None or effects.name(operand) in SPLITS):
                    following[operand] = None
                uses[operand] = uses.get(operand, 0) + 1
        level = list(following)
        if not level or len(uses) > _MANY:
            break
    count = product(shape_of(tensor_of(output)))  # type: ignore[arg-type]
    order = sorted(uses, key=effects.position.__getitem__) if apart else []
    found: dict[fx.Node, None] = {}
    for node in uses if apart else ():
        tensor = tensor_of(node)
        is_taken = node in apart or uses[node] > 1
        if not is_taken or node is output or tensor is None or not tensor.is_floating_point() or tensor.dim() < 2:
            continue
        if product(shape_of(tensor)) == count and _is_apart(effects, node, order):
            found.update(dict.fromkeys((_narrower(effects, node), node)))
    return list(found)


def _is_apart(effects: Effects, source: fx.Node, order: list[fx.Node]) -> bool:
    """Whether features are taken apart of what is computed from ``source``, and multiplied."""
    made, names, is_matrix = {source}, set(), False
    for node in order:
        if node is not source and not made.isdisjoint(node.all_input_nodes):
            made.add(node)
            call = effects.calls[node]
            names.add("" if call is None else call.name)
            is_matrix |= may_turn(call)
    return is_matrix or (not names.isdisjoint(_APART | {"sum"}) and not names.isdisjoint(_PRODUCTS))


def _is_normalised(effects: Effects, node: fx.Node, depth: int = 8) -> bool:
    """Whether a tensor is a normalised one: its wider copy belongs to the norm, whose kernel writes it directly."""
    call = effects.calls[node]
    if call is None or depth == 0:
        return False
    if call.name in CALLS or call.name in STATISTICS:
        return True
    is_passed = is_pointwise(call) or layout.rearranges(call)
    return is_passed and any(_is_normalised(effects, operand, depth - 1) for operand in node.all_input_nodes)


def _narrower(effects: Effects, node: fx.Node) -> fx.Node:
    """The tensor of fewer bytes that ``node`` is another precision and layout of, ``node`` itself where there is none."""
    found, inner = node, node
    while True:
        call = effects.calls[inner]
        source, tensor = tensor_of(call.input) if call is not None else None, tensor_of(inner)
        if call is None or source is None or tensor is None or not source.is_floating_point():
            return found
        if not is_cast(call) and not (layout.is_view(call) and call.name not in ("getitem", "getattr")):
            return found
        if source.dtype.itemsize > tensor.dtype.itemsize:
            return found
        inner = call.input
        if source.dtype.itemsize < tensor.dtype.itemsize:
            if _is_normalised(effects, inner):
                return found
            found = inner


def recognise(effects: Effects, output: fx.Node, known: Values) -> Iterator[tuple[Rotation, Core]]:
    """The rotation that ends in ``output``, and its nodes, by each tensor that it may be one of.

    ``known`` gives the values of constants.
    """
    for source in sources(effects, output):
        try:
            core = find_core(effects, source, output, is_operand=True)
            # A new tensor only takes its shape of another one.
            nodes = tuple(node for node in core.nodes if node is not source and effects.name(node) not in NEW)
            if not nodes or not all(is_read(effects.calls[node]) for node in nodes):
                continue
            rotation = read(effects, source, output, known)
            if rotation is None:
                continue
            check(rotation)
        except (RefusedError, MutatedError, LayoutError):
            continue
        yield rotation, replace(core, nodes=nodes)
