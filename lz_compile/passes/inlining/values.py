"""Values that are overwritten in place as values of their own, ahead of everything that reads a graph.

``x.div_(t)`` is ``x / t``, ``x += y`` is ``x + y``, ``logits[logits < least] = -inf`` is ``masked_fill`` and
``torch.mul(a, b, out=x)`` is ``a * b``, for everyone who reads the tensor afterwards, by whichever name
(:mod:`memory`). What was read before stays what it was. A piece that is overwritten is told by all of the tensor: as
arithmetic on it where that is scores (:mod:`piece_values`), else as a ``cat``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import Size, shape_of, strides_of
from lz_compile.passes.editing.edit import MayEdit, anywhere
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.layout import single_cut
from lz_compile.passes.formula.moves import order_in_memory
from lz_compile.passes.formula.pointwise import is_exponential
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.emitter import Emitter
from lz_compile.passes.graph.gradients import is_made_attached
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.view import is_floating, known_tensor, memory_of, read, tensor_of
from lz_compile.passes.graph.writes import ACTIVATIONS, NEW
from lz_compile.passes.inlining.memory import Cut, Memories, View, split_dim, undone
from lz_compile.passes.inlining.out_of_place import forgets, forms
from lz_compile.passes.loops.roll.piece_values import piece_value
from lz_compile.passes.loops.roll.piece_writes import is_overwritten, store_pieces
from lz_compile.passes.loops.roll.steps import kind_of
from lz_compile.passes.loops.roll.worthwhile import LEAST_STEPS
from lz_compile.passes.sampling.ordering import ORDERING

#: With nothing else written, and nothing to be read besides, graphs of convolutions are left alone: a proof runs them all.
_READ_IN_PLACE = ACTIVATIONS | {"add", "dropout", "batch_norm"}
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
#: Calls that a softmax is made of: what graphs with none overwrite piece by piece is no score.
_EXPONENTIAL = frozenset({"softmax", "log_softmax", "exp"})
#: Calls that begin, or end, what is recognised besides: norms, rotations, draws.
_READ = frozenset("rsqrt sqrt var var_mean std norm linalg_vector_norm neg view_as_complex cosine_similarity".split())


def with_values(graph: fx.Graph, may_edit: MayEdit = anywhere) -> int:
    """Let what is written in place be a value of its own, where nobody else holds the memory; how many calls were changed.

    Graphs that nobody would read otherwise are left as they are.
    """
    calls = [call for node in graph.nodes if (call := read(node)) is not None]
    names = {"exp" if is_exponential(call) else call.name for call in calls}
    written = {call.name for call in calls if call.is_inplace or call.name == "setitem" or "out" in call.arguments}
    is_scored = not names.isdisjoint(_EXPONENTIAL)
    if not written or (
        names & _CONVOLUTIONS and written <= _READ_IN_PLACE and names.isdisjoint(_READ | _EXPONENTIAL | ORDERING)
    ):
        return 0
    spelled = store_pieces(graph, may_edit, _is_read_whole) if is_scored else 0
    effects = Effects(graph)
    if not effects.has_mutations:
        return spelled
    stage = _Stage(graph, effects, may_edit, is_scored=is_scored)
    pieces = stage.spell_out_pieces()
    if pieces:
        stage = _Stage(graph, Effects(graph), may_edit, is_scored=is_scored)
    return spelled + pieces + stage.run()


def _is_computed(buffer: fx.Node, count: int) -> bool:
    """Whether a tensor of which so many pieces are overwritten is computed, and filled by no loop."""
    call = read(buffer)
    return call is not None and call.name not in NEW and count < LEAST_STEPS and is_floating(buffer)


def _is_read_whole(buffer: fx.Node, count: int) -> bool:
    """Whether such a tensor is read afterwards, and not a piece of it alone."""
    return _is_computed(buffer, count) and not is_overwritten(max(buffer.users))


class _Stage:
    """One graph, whose calls are passed one by one."""

    def __init__(self, graph: fx.Graph, effects: Effects, may_edit: MayEdit, *, is_scored: bool) -> None:
        self.graph = graph
        self.effects = effects
        self.may_edit = may_edit
        self.is_scored = is_scored
        self.memories = Memories(effects)
        self.bare = self._named_bare()
        #: A piece of it is written to that has no value: all is read as it is.
        self.uneven = {
            view.memory
            for _, target in effects.writes_made
            if (view := self.memories.view(target)) is not None and not (view.memory.stays or _is_even(view))
        }
        roots = {_root(view) for _, target in effects.writes_made if (view := self.memories.view(target)) is not None}
        self.swept = {root.memory for root in roots if _is_swept(root.made, effects.writes_to(root.made))}
        self.mode = next(
            (tensor.fake_mode for node in graph.nodes if (tensor := tensor_of(node)) is not None),  # type: ignore[attr-defined]
            None,
        )

    def run(self) -> int:
        """Replace what can be; how many writes were."""
        targets: dict[fx.Node, list[fx.Node]] = {}
        for writer, target in self.effects.writes_made:
            targets.setdefault(writer, []).append(target)
        replaced = []
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                self.memories.enter(node, self._emitter(node))
                if len(targets.get(node, ())) == 1 and self._replaced(node, targets[node][0]):
                    replaced.append(node)
                else:
                    self.memories.keep(node, self._emitter(node))
        for node in reversed(replaced):
            self.graph.erase_node(node)
        return len(replaced)

    def spell_out_pieces(self) -> int:
        """Let each view that is written through concern one dimension, where it can; how many are spelled otherwise now.

        ``x[:, 1:, 0]`` is ``x[..., 0][:, 1:]``, and ``x.view(B, T // 2, 2)`` is ``x.unflatten(1, (T // 2, 2))``. A piece of
        scores is told as arithmetic.
        """
        made: dict[fx.Node, None] = {}
        for node, target in self.effects.writes_made:
            view = self.memories.view(target)
            if view is None or view.memory.stays or not (view.memory in self.swept or not self.is_scored):
                continue
            if self._is_cut_rarely(_root(view)):
                made.update(dict.fromkeys((node, *(each.made for each in view.above() if each.cut() is None))))
        return sum([self._spelled_out(node) for node in made])

    def _spelled_out(self, node: fx.Node) -> bool:
        (dim, last), *others = _cuts(node) or [(0, None)]
        split = _split(node)
        if not (others or split) or not self.may_edit(node):
            return False
        if split:
            node.op, node.target, node.args, node.kwargs = "call_method", "unflatten", (node.args[0], *split), {}
            return True
        emit, source = self._emitter(node), node.args[0]
        with self.graph.inserting_before(node):
            for other, each in reversed(others):
                source = emit.call(operator.getitem, source, (*[layout.WHOLE] * other, each))
        node.args = (source, (*[layout.WHOLE] * dim, last), *node.args[2:])
        return True

    def _emitter(self, node: fx.Node) -> Emitter:
        return Emitter(self.graph, self.mode, self.effects.ambient(node), node)

    def _replaced(self, node: fx.Node, target: fx.Node) -> bool:
        """Let a value take the place of what a call writes into ``target``, a name of the graph as it was."""
        view, ambient = self.memories.view(target), self.effects.ambient(node)
        if view is None or ambient.is_transformed or not self._may_differ(node, view):
            return False
        place = self.effects.position[node]
        whole = next((each for each in view.tensors() if self.memories.home(each, place) is not None), None)
        if whole is None or view.memory in self.uneven:
            return False
        if all(each.last <= place for each in view.memory.views):  # nobody would notice, but for a gradient of zeros
            return view.memory.version > 0 and self.may_edit(node)
        self.memories.now(whole.made, self._emitter(node))  # a view of the last value stays, whatever becomes of this
        before = node.prev
        if whole is view:
            value = self._piece(node, view) or self._out_of_place(node, view) or self._stored(node, view)
        else:
            value = self._out_of_place(node, view, is_piece=True) or self._stored(node, view, is_piece=True)
            value = None if value is None else self._joined(node, view, whole, value)
        if value is None or not self.may_edit(node):
            self._erase_behind(before, node)
            return False
        self._note_as_made(view)
        value.meta = {**node.meta, **value.meta}
        self.memories.replace(whole, value)
        return True

    def _erase_behind(self, before: fx.Node, node: fx.Node) -> None:
        """Take back what was tried in vain."""
        while node.prev is not before:
            self.graph.erase_node(node.prev)

    def _may_differ(self, node: fx.Node, view: View) -> bool:
        """Whether a tensor may be another one from here on: it has its gradient by what is written."""
        old = tensor_of(view.made)
        if old is None or old.is_complex() or view.memory.stays:
            return False
        return not old.requires_grad or grad_enabled(self.effects.ambient(node))

    def _note_as_made(self, view: View) -> None:
        """What Dynamo notes for memory has a gradient once something with one is written to it; it has none before."""
        for name in [] if view.memory.version else self.bare.get(_root(view), ()):
            name.meta["example_value"] = known_tensor(name).detach()

    def _named_bare(self) -> dict[View, list[fx.Node]]:
        """By the root of memory that was made without a gradient: its names until it is written to, if they have one."""
        targets = dict.fromkeys(target for _, target in self.effects.writes_made)
        roots = {_root(view) for each in targets if (view := self.memories.view(each)) is not None}
        found = {}
        for root in roots:
            tensor = tensor_of(root.made)
            if tensor is not None and tensor.requires_grad and not is_made_attached(root.made, self.effects):
                names = [name for view in root.memory.views for name in view.names if tensor_of(name) is not None]
                ahead = [name for name in names if self.effects.overwritten_after(root.made, root.made, name) is None]
                found[root] = [name for name in ahead if not self.effects.writes(name, root.made)]
        return found

    # ---- the whole tensor ---------------------------------------------------------------------------------------------

    def _out_of_place(self, node: fx.Node, view: View, *, is_piece: bool = False) -> fx.Node | None:
        """A value that is what a call leaves in a tensor, and lies in memory as that does; None where it has no form.

        Where what is left is put into another tensor as a ``is_piece``, it may lie anyhow.
        """
        old = known_tensor(view.made)
        emit, target = self._emitter(node), self.memories.now(view.made, self._emitter(node))
        is_graded = known_tensor(target).requires_grad and not self._is_bare(node, view)
        for name, arguments, named in () if is_graded and forgets(node) else forms(node, target, old, emit):
            before = node.prev
            value = _cast(emit.call(name, *arguments, **named), old, emit)
            if value is not None and (is_piece or self._lies_alike(value, old, node, view)):
                return value
            self._erase_behind(before, node)
        return None

    def _is_bare(self, node: fx.Node, view: View) -> bool:
        """Whether memory that was made without a gradient has none yet: nothing was written to it, not in place either."""
        root = _root(view)
        is_written = view.memory.version or self.effects.overwritten_after(root.made, root.made, node)
        return root in self.bare and not is_written

    def _lies_alike(self, value: fx.Node, old: torch.Tensor, node: fx.Node, view: View) -> bool:
        new = known_tensor(value)
        if (new.dtype, new.device, shape_of(new)) != (old.dtype, old.device, shape_of(old)):
            return False
        if _strides(new) == _strides(old):
            return not _has_odd_strides(old)
        if order_in_memory(old) is not None or view.memory.version or any(map(layout.is_returned, view.names)):
            return False
        readers = self.memories.readers(view, self.effects.position[node])
        return not any(read(user) is None or read(user).name == "view" for user in readers)  # type: ignore[union-attr]

    # ---- a piece of it -------------------------------------------------------------------------------------------------

    def _piece(self, node: fx.Node, view: View) -> fx.Node | None:
        """What a store into a piece of scores leaves of all of them, as arithmetic; None where it has no such form."""
        target = node.args[0] if node.target is operator.setitem else None
        if not self.is_scored or view.memory in self.swept or not isinstance(target, fx.Node):
            return None
        if not self._is_cut_rarely(view):
            return None
        value, old = piece_value(self._emitter(node), node, target, self.effects), known_tensor(target)
        is_alike = value is not None and kind_of(value) == kind_of(target)
        return value if is_alike and _strides(known_tensor(value)) == _strides(old) else None

    def _stored(self, node: fx.Node, view: View, *, is_piece: bool = False) -> fx.Node | None:
        """What a tensor is with another one stored into a slice of it."""
        old = known_tensor(view.made)
        if (
            node.target is not operator.setitem
            or not isinstance(node.args[2], fx.Node)
            or not self._is_cut_rarely(view)
        ):
            return None
        found = single_cut(node.args[1], old)
        if found is None:
            return None
        dim, places, drops = found
        piece = slice(places.start, places.stop, places.step)
        return self._put(node, (view, dim, piece, drops), node.args[2], is_piece=is_piece)

    def _joined(self, node: fx.Node, view: View, whole: View, value: fx.Node) -> fx.Node | None:
        """What ``whole`` is with a value in the place of a view of it, which may be a piece of a piece."""
        while view is not whole:
            cut = view.cut()
            if view.shows_all and view.parent is not None:
                value, view = undone(view, value, self._emitter(node)), view.parent
            elif cut is None or not self._is_cut_rarely(cut[0]):
                return None
            else:
                view, put = cut[0], self._put(node, cut, value, is_piece=cut[0] is not whole)
                if put is None:
                    return None
                value = put
        return value if self._lies_alike(value, known_tensor(whole.made), node, whole) else None

    def _put(self, node: fx.Node, place: Cut, value: fx.Node, *, is_piece: bool) -> fx.Node | None:
        """A tensor with a value in the place of a slice along one dimension, which it drops or has."""
        view, dim, cut, drops = place
        old, new, emit = known_tensor(view.made), tensor_of(value), self._emitter(node)
        size, shape = shape_of(old)[dim], [*shape_of(old)]
        shape[dim : dim + 1] = [] if drops else [len(range(cut.start, cut.stop, cut.step))]
        if new is None or new.device != old.device or [*shape_of(new)] != shape or cut.start >= cut.stop:
            return None
        target = self.memories.now(view.made, emit)
        part = emit.call("unsqueeze", value, dim) if drops else value
        part = part if new.dtype == old.dtype else emit.call("to", part, old.dtype)
        is_cat = is_piece or order_in_memory(old) in (None, [*range(old.dim())])
        if cut.step != 1 or not is_cat:  # it lies in memory as the target does
            joined = emit.call(torch.slice_scatter, target, part, dim, cut.start, cut.stop, cut.step)
        else:
            ends = [each for each in (slice(0, cut.start), slice(cut.stop, size)) if each.start < each.stop]
            parts = [emit.call(operator.getitem, target, (*[slice(None)] * dim, each)) for each in ends]
            parts.insert(min(cut.start, 1), part)
            joined = emit.call(torch.cat, parts, dim)
        return joined if is_piece or self._lies_alike(joined, old, node, view) else None

    def _is_cut_rarely(self, view: View) -> bool:
        """Whether it is computed, and has fewer pieces written than a loop has steps, or is swept over."""
        is_swept = view.memory in self.swept
        return _is_computed(view.made, 0 if is_swept else len(self.effects.writes_to(view.made)))


def _cuts(node: fx.Node) -> list[tuple[int, Any]]:
    """What a subscript selects, by dimension; none where it is more than slices and numbers, or this is no subscript."""
    source = tensor_of(node.args[0]) if node.target in (operator.getitem, operator.setitem) else None
    elements = () if source is None else layout.elements_of(node.args[1], source) or ()
    is_plain = all(isinstance(each, (int, slice)) for each in elements)
    return [(dim, each) for dim, each in enumerate(elements) if each != layout.WHOLE] if is_plain else []


def _split(node: fx.Node) -> tuple[int, tuple[int, ...]] | None:
    """The dimension that a call splits, and into which; None where it does something else."""
    call, new = read(node), tensor_of(node)
    source = None if call is None or call.name not in ("view", "reshape") else tensor_of(call.input)
    if source is None or new is None or source.dtype != new.dtype:
        return None
    dim = split_dim(shape_of(source), shape_of(new))
    sizes = () if dim is None else shape_of(new)[dim : dim + 1 + new.dim() - source.dim()]
    return None if dim is None or not all(isinstance(size, int) for size in sizes) else (dim, tuple(sizes))


def _is_even(view: View) -> bool:
    """Whether a view is all of some memory, or pieces of pieces of it."""
    return all(each.parent is None or each.shows_all or each.cut() is not None for each in view.tensors())


def _is_swept(root: fx.Node, writes: Sequence[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether a tensor is written to as a sweep in logarithmic depth does: up and down, in other pieces each time.

    A loop over one of its dimensions writes as often as that is long, or into every element once.
    """
    whole = tensor_of(root)
    shape = () if whole is None else whole.shape
    new = [each for each in writes if not _stores_back(*each)]
    pieces = [tensor_of(node.args[2] if node.target is operator.setitem else target) for node, target in new]
    known = [each for each in pieces if each is not None]
    if not all(isinstance(size, int) for tensor in (shape, *(each.shape for each in known)) for size in tensor):
        return False
    places = {(_place(target), repr(node.args[1:2]) * (node.target is operator.setitem)) for node, target in new}
    is_short = len(places) == len(new) <= 2 * math.log2(max((1, *shape)))
    return is_short and sum(math.prod(each.shape) for each in known) > math.prod(shape)


def _stores_back(node: fx.Node, target: fx.Node) -> bool:
    """Whether what is stored lies there already: ``x[i] += y`` stores the piece that it has overwritten."""
    return node.target is operator.setitem and memory_of(node.args[2]) == memory_of(target)


def _place(piece: fx.Node) -> str:
    """Where a piece lies, as text: symbolic offsets and strides have no hash."""
    tensor = known_tensor(piece)
    return repr((tensor.storage_offset(), *tensor.shape, *tensor.stride()))


def _root(view: View) -> View:
    return [*view.above()][-1]


def _cast(value: fx.Node, old: torch.Tensor, emit: Emitter) -> fx.Node | None:
    """A value in the dtype of the tensor that it takes the place of."""
    new = tensor_of(value)
    if new is None:
        return None
    return value if new.dtype == old.dtype else emit.call("to", value, old.dtype)


def _has_odd_strides(tensor: torch.Tensor) -> bool:
    """Whether dimensions of one element have strides of their own, by which what follows is laid out.

    Operators (2.13) give a new tensor others there than their fakes say, one that is overwritten keeps its own.
    """
    shape, strides = shape_of(tensor), _strides(tensor)
    if 1 not in shape or not all(isinstance(each, int) for each in (*shape, *strides)):
        return False
    return tensor.is_contiguous() and tensor.stride() != torch.empty(tensor.shape, device="meta").stride()


def _strides(tensor: torch.Tensor) -> list[Size]:
    return [stride if isinstance(stride, int) else sympy.expand(stride) for stride in strides_of(tensor)]
