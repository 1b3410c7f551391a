"""``torch.vmap`` over the first dimension of elementwise arithmetic, as that arithmetic.

Dynamo spells a vmap out as calls that add a hidden dimension and remove it again. Elementwise functions of tensors of equal
rank do the same with and without: the hidden dimension is then one like any other. ``associative_scan`` is made of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import readable
from lz_compile.passes.graph.modes import faking
from lz_compile.passes.graph.view import Call, called, read, tensor_of, value_of

_BEGINS, _ENDS, _ENTERS, _LEAVES = (
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
    "_add_batch_dim",
    "_remove_batch_dim",
)
_SCAFFOLD = frozenset({_BEGINS, _ENDS, "lazy_load_decompositions"})


def unbatch(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Spell such regions out, in place, where they begin at a node that may be edited; how many there were."""
    if not any(_name(node) == _BEGINS for node in graph.nodes):
        return 0
    effects = Effects(graph)
    found = [region for region in _regions(graph) if _is_elementwise(region) and may_edit(region[0])]
    for region in found:
        ambient = effects.ambient(region[0])
        for node in region:
            _spell_out(node, ambient)
        for node in reversed(region):
            if _name(node) in _SCAFFOLD or _name(node) in (_ENTERS, _LEAVES):
                graph.erase_node(node)
    return len(found)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes from where a vmap begins to where it ends, of those that hold no other and lie in no other.

    What is handed to an inner one has a dimension that only the outer one knows.
    """
    region: list[fx.Node] = []
    depth, is_alone = 0, True
    for node in graph.nodes:
        if _name(node) == _BEGINS:
            is_alone = depth == 0
            depth += 1
        if depth:
            region.append(node)
        if _name(node) == _ENDS:
            depth -= 1
            if depth == 0:
                if is_alone:
                    yield region
                region = []


def _is_elementwise(region: Sequence[fx.Node]) -> bool:
    """Whether everything in a region maps equal elements of tensors of one rank."""
    rank: dict[fx.Node, int] = {}
    entered = [node for node in region if _name(node) == _ENTERS]
    ranks = {tensor.dim() - 1 for node in entered if (tensor := tensor_of(node.args[0])) is not None}
    if len(ranks) != 1 or any(node.args[1] != 0 for node in entered):
        return False
    (common,) = ranks
    for node in region:
        if _name(node) in _SCAFFOLD:
            continue
        if _name(node) == _ENTERS:
            rank[node] = common
        elif _name(node) == _LEAVES:
            if node.args[0] not in rank or node.args[3] != 0:
                return False
        elif _maps(read(node), rank, common):
            rank[node] = common
        else:
            return False
    inside = set(region)
    return not any(user not in inside for node in rank for user in node.users)


def _maps(call: Call | None, rank: dict[fx.Node, int], common: int) -> bool:
    """Whether a call is pointwise, and reads nothing with more dimensions than what it is mapped over."""
    if call is None or call.is_inplace or not is_pointwise(call):
        return False
    operands = call.node.all_input_nodes
    outside = [tensor_of(node) for node in operands if node not in rank]
    is_given = all(tensor is not None and tensor.dim() <= common for tensor in outside)
    return is_given and any(node in rank for node in operands)


def _spell_out(node: fx.Node, ambient: Any) -> None:
    if _name(node) in (_ENTERS, _LEAVES):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    elif _name(node) not in _SCAFFOLD:
        given = fx.map_arg((node.args, node.kwargs), value_of)
        mode = next(tensor.fake_mode for tensor in map(tensor_of, node.all_input_nodes) if tensor is not None)  # type: ignore[attr-defined]
        with faking(mode, ambient):
            args, kwargs = pytree.tree_map(readable, given)
            node.meta["example_value"] = called(node.target, args, kwargs)
