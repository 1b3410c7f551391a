"""Values that are overwritten in place as values of their own.

``logits[logits < least] = -inf`` is ``masked_fill``, and ``x.div_(t)`` is ``x / t``, for everyone who reads the tensor
afterwards, if nobody sees the memory by another name.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import Size, as_size, shape_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula import layout
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import Ambient, grad_enabled
from lz_compile.passes.graph.view import Call, hint_of, is_floating, memory_of, read, tensor_of, value_of
from lz_compile.passes.graph.writes import NEW
from lz_compile.passes.loops.roll.piece_values import piece_value
from lz_compile.passes.loops.roll.piece_writes import is_overwritten, store_pieces
from lz_compile.passes.loops.roll.search import LEAST_STEPS
from lz_compile.passes.loops.roll.step_graph import Emitter
from lz_compile.passes.loops.roll.steps import kind_of

#: Calls that order the scores of a row, or select among them.
ORDERING = frozenset({"topk", "sort", "argsort", "msort", "kthvalue"})
MAXIMA = frozenset({"max", "amax"})
#: In-place methods of which every element of the result is a function of that element (and of other tensors).
_ELEMENTWISE = frozenset({"masked_fill", "add", "sub", "mul", "div", "clamp", "exp", "log", "neg"})

#: Calls that a softmax is made of: what graphs with none overwrite piece by piece is no score.
_EXPONENTIAL = frozenset({"softmax", "log_softmax", "exp", "exp2"})

_UNKNOWN = -1


def with_values(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Let what is written in place be a value of its own, where nobody else looks at the memory; how many were.

    Graphs in which nothing is ordered, and nothing is stored that a softmax may read, are left as they are.
    """
    is_ordered = any(node.op.startswith("call") and is_ordering(node) for node in graph.nodes)
    is_scored = any((call := read(node)) is not None and call.name in _EXPONENTIAL for node in graph.nodes)
    spelled = store_pieces(graph, may_edit, _is_computed) if is_scored else 0
    if not is_ordered and not (is_scored and graph.find_nodes(op="call_function", target=operator.setitem)):
        return spelled
    effects = Effects(graph)
    if not effects.has_mutations:
        return 0
    memory, written = _Memory(effects), {node for node, _ in effects.writes_made}
    replaced: list[fx.Node] = []
    for node in list(graph.nodes):
        memory.redirect(node)
        target = node.args[0] if node in written and node.args else None
        value = None
        is_read = is_ordered or node.target is operator.setitem
        if is_read and isinstance(target, fx.Node) and memory.is_unseen(node, target):
            value = _piece_stored(node, target, effects, may_edit) if is_scored else None
            value = value or _out_of_place(node, target, memory, effects.ambient(node), may_edit)
        if value is None or not isinstance(target, fx.Node):
            memory.pass_by(node)
        else:
            memory.replace(node, target, value)
            replaced.append(node)
    for node in reversed(replaced):
        graph.erase_node(node)
    return spelled + len(replaced)


def _is_computed(buffer: fx.Node, count: int) -> bool:
    """Whether a tensor of which so many pieces are overwritten is computed, filled by no loop, and read afterwards."""
    call = read(buffer)
    is_one = call is not None and call.name not in NEW and count < LEAST_STEPS and is_floating(buffer)
    return is_one and not is_overwritten(max(buffer.users))  # else the piece itself is what is read


def _piece_stored(node: fx.Node, target: fx.Node, effects: Effects, may_edit: MayEdit) -> fx.Node | None:
    """A value that is what a store into a piece leaves in ``target``; None where it has no such form."""
    old, ambient = tensor_of(target), effects.ambient(node)
    if node.target is not operator.setitem or old is None or not _is_computed(target, len(effects.writes_to(target))):
        return None
    if ambient.is_transformed or (old.requires_grad and not grad_enabled(ambient)):
        return None
    emit, before = Emitter(node.graph, old.fake_mode, ambient, node), node.prev  # type: ignore[attr-defined]
    with node.graph.inserting_before(node):
        value = piece_value(emit, node, target, effects)
    is_alike = value is not None and kind_of(value) == kind_of(target)
    if value is not None and is_alike and _strides(value_of(value)) == _strides(old) and may_edit(node):
        value.meta = {**node.meta, **value.meta}
        return value
    while node.prev is not before:
        node.graph.erase_node(node.prev)
    return None


def _out_of_place(
    node: fx.Node, target: fx.Node, memory: _Memory, ambient: Ambient, may_edit: MayEdit
) -> fx.Node | None:
    """A value that is what a call leaves in ``target``, and lies in memory as that does; None where it has no such form."""
    call, old = read(node), tensor_of(target)
    if call is None or old is None or not _may_differ(call, old, grad_enabled(ambient)):
        return None
    is_free = not _is_dense(old) and not any(map(layout.is_returned, memory.names_of(target, node)))
    emit = Emitter(node.graph, old.fake_mode, ambient, node)  # type: ignore[attr-defined]
    for name, arguments in _spellings(call):
        with node.graph.inserting_before(node):
            value = emit.call(name, *arguments, **call.node.kwargs)
        new = value_of(value)
        if new.dtype == old.dtype and (is_free or _strides(new) == _strides(old)) and may_edit(node):
            value.meta = {**node.meta, **value.meta}
            return value
        node.graph.erase_node(value)
    return None


def _spellings(call: Call) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The same out of place; what is filled keeps its strides in the second form."""
    is_store = call.node.target is operator.setitem
    name = "masked_fill" if is_store else str(call.node.target).removesuffix("_")
    yield name, call.node.args
    if name == "masked_fill" and len(call.node.args) == 3 and not isinstance(call.node.args[2], fx.Node):
        target, mask, value = call.node.args
        yield torch.where, (mask, value, target)


def _strides(tensor: torch.Tensor) -> list[Size]:
    strides = map(as_size, tensor.stride())
    return [stride if isinstance(stride, int) else sympy.expand(stride) for stride in strides]


def is_ordering(node: fx.Node) -> bool:
    """Whether a call orders the scores of a row, or selects among them."""
    return getattr(node.target, "__name__", node.target) in ORDERING


def ordered_dim(call: Call) -> int | None:
    """The dimension along which a call orders scores, or finds their maximum; None for others, and for single elements."""
    source = tensor_of(call.input)
    if call.name not in ORDERING | MAXIMA | {"argmax"} or source is None or not source.dim():
        return None
    dim = call.get("dim")
    if call.name not in MAXIMA:
        position = {"topk": "#2", "sort": "#1", "argsort": "#1", "kthvalue": "#2", "argmax": "#1"}.get(call.name, "")
        given = call.arguments.get(position)
        default = None if call.name == "argmax" else -1
        dim = dim if dim is not None else given if isinstance(given, int) and not isinstance(given, bool) else default
        dim = 0 if call.name == "msort" else dim
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int):
        return None
    place = dim % source.dim()
    return place if shape_of(source)[place] != 1 else None


def _may_differ(call: Call, tensor: torch.Tensor, is_graded: bool) -> bool:
    """Whether it is a write that has a form without one: of the whole tensor, in its dtype, with its gradient."""
    if call.node.meta.get("example_value", tensor) is None:
        return False
    if tensor.requires_grad and not is_graded:  # the tensor keeps its gradient, which a new one would not have
        return False
    if call.node.target is operator.setitem:
        mask, value = call.node.args[1:]
        chosen = tensor_of(mask)
        is_whole = chosen is not None and chosen.dtype == torch.bool and shape_of(chosen) == shape_of(tensor)
        return is_whole and _holds(tensor.dtype, value)
    if call.node.op != "call_method" or not call.is_inplace:
        return False
    if call.name == "scatter":
        return True
    if call.name not in _ELEMENTWISE or call.node.kwargs or not tensor.dim():
        return False
    others = [each for each in map(tensor_of, call.node.args[1:]) if each is not None]
    kinds = {each.dtype for each in others if each.dim()} - {torch.bool}
    return tensor.is_floating_point() and kinds <= {tensor.dtype}


def _holds(kind: torch.dtype, value: object) -> bool:
    """Whether a number is one of a dtype, so that filling with it is assigning it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return isinstance(value, bool)
    if kind.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(kind).max
    return isinstance(value, int) and abs(value) <= (1 if kind == torch.bool else torch.iinfo(kind).max)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements lie side by side, in whichever order."""
    expected = 1.0
    sides = [(_known(stride), _known(extent)) for stride, extent in zip(tensor.stride(), shape_of(tensor), strict=True)]
    for stride, extent in sorted(side for side in sides if side[1] != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _known(size: Any) -> float:
    """A size, or what a symbolic one was traced with: asking it would guard it."""
    return size if isinstance(size, int) else hint_of(size)


class _Tensor:
    """A tensor that was overwritten, as what it is now: ``names`` are what is read for it in the graph as it was."""

    def __init__(self, names: list[fx.Node], last: int) -> None:
        self.names = names
        #: Where the last of them is read.
        self.last = last
        self.value = names[0]


class _Memory:
    """Who shares memory with whom, by what made a tensor and by what Dynamo says of it (``out=``, ``.data``).

    The calls of a graph are passed one by one.
    """

    def __init__(self, effects: Effects) -> None:
        self._position = dict(effects.position)
        self._names = {node: _names(effects, node) for node in effects.calls}
        self._last: dict[fx.Node, int] = {}
        for node, place in self._position.items():
            self._last.update(dict.fromkeys(node.all_input_nodes, place))
        self._held = {
            name for node, names in self._names.items() if node.op in ("placeholder", "get_attr") for name in names
        }
        #: Of each memory the nodes that were passed, those that are read the longest first.
        self._readers: dict[Any, list[tuple[int, int, fx.Node]]] = {}
        self._tensors: dict[fx.Node, _Tensor] = {}

    def redirect(self, node: fx.Node) -> None:
        """Let a call read what became of its operands."""
        if any(operand in self._tensors for operand in node.all_input_nodes):

            def now(operand: fx.Node) -> fx.Node:
                return self._tensors[operand].value if operand in self._tensors else operand

            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), now)

    def pass_by(self, node: fx.Node) -> None:
        """A call stays as it is."""
        for name in self._names[node]:
            heapq.heappush(self._readers.setdefault(name, []), (-self._last.get(node, -1), self._position[node], node))

    def replace(self, writer: fx.Node, target: fx.Node, value: fx.Node) -> None:
        """A value takes the place of what was written into ``target``; later views of that are views of it."""
        found = self._tensors.get(target) or _Tensor([target], self._last[target])
        found.names.append(writer)
        found.last = max(found.last, self._last.get(writer, -1))
        found.value = value
        for name in (target, writer, value):
            self._tensors[name] = found
        self._names[value], self._last[value] = self._names[target], found.last
        self._position[value] = self._position[writer]
        self.pass_by(value)

    def names_of(self, target: fx.Node, writer: fx.Node) -> list[fx.Node]:
        """The nodes that are read in the graph as it was where what was written is read."""
        found = self._tensors.get(target)
        return [writer, *([target] if found is None else found.names)]

    def is_unseen(self, writer: fx.Node, target: fx.Node) -> bool:
        """Whether nobody reads the memory after a write but by the name of what was written."""
        names = self._names[target]
        if _UNKNOWN in names or not self._held.isdisjoint(names):  # others hold it
            return False
        at = self._position[writer]
        return not any(self._last_other(name, target) > at for name in names)

    def _last_other(self, name: Any, target: fx.Node) -> int:
        """Where memory is read last by way of any node that was passed but ``target``."""
        readers, own, last = self._readers.get(name, []), [], -1
        while readers:
            node = readers[0][2]
            if node is target:
                own.append(heapq.heappop(readers))
            elif node in self._tensors and self._tensors[node].value is not node:
                heapq.heappop(readers)
            else:
                last = -readers[0][0]
                break
        for each in own:
            heapq.heappush(readers, each)
        return last


def _names(effects: Effects, node: fx.Node) -> set[Any]:
    """What memory may be told by: the node that made it, and the storages of the tensors in it."""
    example = node.meta.get("example_value")
    several = example if isinstance(example, (tuple, list)) else (example,)
    tensors = [each for each in several if isinstance(each, torch.Tensor)]
    return {_storage(each) for each in tensors} | ({effects.owner(node)} if tensors else set())


def _storage(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    return _UNKNOWN if memory is None else memory
