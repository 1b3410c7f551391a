"""Finds what a scan could compute itself, in a graph that Inductor compiles next: what is only made to be scanned.

An operand is followed upwards, with which of its dimensions is batch, head, step, row or column of the state. What has
fewer of these, or is there anyway, is a leaf, which the scan reads; arithmetic in between becomes lines of a :class:`Recipe`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from lz_compile.ground.sizes import is_one, shape_of
from lz_compile.lowering.attributes import encode
from lz_compile.lowering.kernels.scan.cpp_terms import COMPUTED, FUNCTIONS, Line, Recipe, compute_dtype
from lz_compile.lowering.ops.scan import Operands

#: For each dimension of a tensor, which one it is of the scan's: batch, head, step, row or column (0 to 4), or of size one.
Dims: TypeAlias = tuple[int | None, ...]
_Leaves: TypeAlias = dict[tuple[fx.Node, Dims], str]

_STEP, _ROW, _COLUMN = 2, 3, 4
_aten = torch.ops.aten
_ARITHMETIC: Mapping[Any, str] = {
    overload: name
    for name in FUNCTIONS
    for overload in (getattr(getattr(_aten, name), each, None) for each in ("default", "Tensor"))
    if overload is not None
}
_WIDENED = torch.ops.prims.convert_element_type.default
#: What adds and removes dimensions of size one, and may do more.
_RESHAPES = frozenset(
    {
        *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default),
        *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.clone.default, _aten.expand.default),
    }
)
#: What takes longer to compute than to read.
_SLOW = frozenset({_aten.exp.default, _aten.sigmoid.default})
#: Calls whose results are in memory, whoever reads them.
_IN_MEMORY = frozenset(
    {operator.getitem, _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default}
)


class _NotSmallerError(Exception):
    """An operand is not made of smaller tensors, or of those that are there, or not by arithmetic that the scan knows."""


@dataclass
class _Reading:
    """One operand: its leaves (shared with others), its lines, the calls that they stand for, and leaves as large as it.

    Of the last, ``made`` are those that Inductor would not have written to memory; dimensions that leaves have are ``seen``.
    """

    full: frozenset[int]
    dtype: torch.dtype
    leaves: _Leaves
    lines: list[Line] = field(default_factory=list)
    calls: set[fx.Node] = field(default_factory=set)
    made: set[fx.Node] = field(default_factory=set)
    seen: set[int | None] = field(default_factory=set)
    known: dict[tuple[fx.Node, Dims], str] = field(default_factory=dict)

    def value(self, given: Any, dims: Dims) -> str | float:
        """What a line is given for a node or number.

        Raises:
            _NotSmallerError: see there.
        """
        if not isinstance(given, fx.Node):
            return _number(given)
        if (given, dims) not in self.known:
            self.known[given, dims] = self._read(given, dims)
        return self.known[given, dims]

    def _read(self, node: fx.Node, dims: Dims) -> str:
        value = node.meta.get("val")
        if not _is_floating(value):
            raise _NotSmallerError
        leaf, of_leaf = _viewed(node, dims)
        is_whole = frozenset(of_leaf) - {None} == self.full
        if not is_whole or not self._is_computed(leaf, of_leaf):
            if is_whole and not is_one(leaf.meta["val"].stride(of_leaf.index(_COLUMN))):
                raise _NotSmallerError
            if is_whole and leaf.op == "call_function" and leaf.target not in _IN_MEMORY:
                self.made.add(leaf)
            self.seen.update(of_leaf)
            return self.leaves.setdefault((leaf, of_leaf), f"x{len(self.leaves)}")
        self.calls.add(node)
        if node.target is _WIDENED:
            return str(self.value(node.args[0], dims))
        moved = _moved(node, dims)
        if moved is not None:
            return str(self.value(*moved))
        self.lines.append((_ARITHMETIC[node.target], *[self.value(each, _broadcast(each, dims)) for each in node.args]))
        return f"y{len(self.lines) - 1}"

    def _is_computed(self, node: fx.Node, dims: Dims) -> bool:
        """Whether a call becomes a line, or is seen through, whatever it reads."""
        is_shared = len(node.users) > 1 and _ROW not in self.full  # with rows, memory matters more than time
        if node.op != "call_function" or (is_shared and node.target in _SLOW):
            return False
        if node.target is _WIDENED:
            kind, of = node.meta["val"].dtype, node.args[0].meta["val"].dtype  # type: ignore[union-attr]
            return bool(kind == self.dtype and of.is_floating_point and torch.promote_types(of, kind) == kind)
        try:
            if _moved(node, dims) is not None:
                return True
            terms = [each.meta.get("val") if isinstance(each, fx.Node) else _number(each) for each in node.args]
        except _NotSmallerError:
            return False
        is_read = all(isinstance(each, float) or _is_floating(each) for each in terms)
        return node.target in _ARITHMETIC and not node.kwargs and node.meta["val"].dtype == self.dtype and is_read


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _number(given: Any) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
        return float(given)
    raise _NotSmallerError


def _broadcast(operand: Any, dims: Dims) -> Dims:
    """The dimensions of an operand of arithmetic whose result has these."""
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return ()
    own = dims[len(dims) - value.dim() :]
    return tuple(None if is_one(size) else dim for size, dim in zip(shape_of(value), own, strict=True))


def _moved(node: fx.Node, dims: Dims) -> tuple[fx.Node, Dims] | None:
    """What a call shows in another shape, and its dimensions; None where it is no such call.

    Raises:
        _NotSmallerError: it joins dimensions, or cuts them.
    """
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(source, fx.Node) or not isinstance(value, torch.Tensor):
        return None
    if node.target is _aten.permute.default:
        order = [each % len(dims) for each in node.args[1]]  # type: ignore[union-attr, operator]
        return source, tuple(dims[order.index(place)] for place in range(len(dims)))
    if node.target is _aten.expand.default:
        return source, _broadcast(source, dims)
    if node.target not in _RESHAPES:
        return None
    shown = [(size, dim) for size, dim in zip(shape_of(node.meta["val"]), dims, strict=True) if not is_one(size)]
    if [size for size, _ in shown] != [size for size in shape_of(value) if not is_one(size)]:
        raise _NotSmallerError
    left = iter(dim for _, dim in shown)
    return source, tuple(None if is_one(size) else next(left) for size in shape_of(value))


def _viewed(node: fx.Node, dims: Dims) -> tuple[fx.Node, Dims]:
    """The tensor that a leaf is a view of, as far as that is followed."""
    try:
        while node.target is not _aten.clone.default and (seen := _moved(node, dims)) is not None:
            node, dims = seen
    except _NotSmallerError:
        pass  # dimensions are joined there: it is read as it is
    return node, dims


# ---- the change ------------------------------------------------------------------------------------------------------


def compute_while_scanning(module: fx.GraphModule) -> None:
    """Let scans compute what is only made for them, and leave out a last state that nobody reads, in place."""
    given = torch.ops.layerzero.rolled_scan_forward_kernel.default
    # Inputs are written to at last.
    before = itertools.takewhile(lambda node: not _writes(node), list(module.graph.nodes))
    if [node for node in before if node.target is given and _change(node)]:
        module.recompile()


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _change(node: fx.Node) -> bool:
    readings, leaves = _readings(node)
    is_last_read = any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
    if is_last_read and not readings:
        return False
    operands = [None if name in readings else each for name, each in zip(Operands.names, node.args, strict=False)]
    recipe = encode(Recipe(last=is_last_read, **{name: tuple(each.lines) for name, each in readings.items()}))
    with node.graph.inserting_before(node):
        given = [_canonical(each, dims) for each, dims in leaves]
        target = torch.ops.layerzero.computed_scan_forward_kernel.default
        found = node.graph.call_function(target, (*operands, given, recipe, *node.args[len(operands) :]))
    found.meta.update(node.meta)
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)
    calls = {call for each in readings.values() for call in each.calls}
    views = {view for call in calls for view in call.all_input_nodes} - calls
    for call in sorted(calls, reverse=True):
        node.graph.erase_node(call)
    for view in sorted(views):
        _erase_unread(view)
    return True


def _erase_unread(view: fx.Node) -> None:
    """What leaves were seen through, where nobody else looks."""
    while not view.users and view.target in {*_RESHAPES, _aten.permute.default}:
        source = view.all_input_nodes[0]
        source.graph.erase_node(view)
        view = source


def _readings(node: fx.Node) -> tuple[dict[str, _Reading], _Leaves]:
    """The operands that a scan can compute, none of which anybody else reads, and what of."""
    names = list(COMPUTED)
    while True:
        leaves: _Leaves = {}
        found = {name: each for name in names if (each := _reading(node, name, leaves)) is not None}
        calls = {call for each in found.values() for call in each.calls}
        read = {leaf for leaf, _ in leaves} | {call for call in calls if not calls.union([node]).issuperset(call.users)}
        own = [name for name, each in found.items() if read.isdisjoint(each.calls)]
        if own == names:
            break
        names = own
    wide = compute_dtype([each.meta["val"] for each, _ in leaves])
    return (found, leaves) if all(each.dtype == wide for each in found.values()) else ({}, {})


def _reading(node: fx.Node, name: str, leaves: _Leaves) -> _Reading | None:
    operand = node.args[Operands.names.index(name)]
    if not isinstance(operand, fx.Node) or node.args.count(operand) > 1:
        return None
    sizes = shape_of(operand.meta["val"])
    dims = tuple(None if is_one(size) else place for place, size in enumerate(sizes))
    full = frozenset(each for each in dims if each is not None)
    reading = _Reading(full, operand.meta["val"].dtype, leaves)
    # Others would be computed for every column, or for every row, again.
    has_rows = any(node.args[Operands.names.index(each)] is not None for each in ("query", "left"))
    if not {_STEP, _COLUMN} <= full or (_ROW not in full and name != "right" and has_rows):
        return None
    try:
        reading.value(operand, dims)
    except _NotSmallerError:
        return None
    is_made = reading.lines and full <= reading.seen  # not where leaves are expanded: others need not have these sizes
    return reading if is_made and len(reading.made) <= 1 else None


def _canonical(leaf: fx.Node, dims: Dims) -> fx.Node:
    """A leaf as batch, head, step, row and column, with columns side by side."""
    own = [dim for dim in dims if dim is not None]
    found = _called(_aten.squeeze.dims, leaf, [place for place, dim in enumerate(dims) if dim is None])
    found = _called(_aten.permute.default, found, sorted(range(len(own)), key=own.__getitem__))
    for place in range(5):
        if place not in own:
            found = _called(_aten.unsqueeze.default, found, place)
    if _COLUMN in own and not is_one(found.meta["val"].stride(_COLUMN)):
        found = _called(_aten.clone.default, found, memory_format=torch.contiguous_format)
    return found


def _called(target: Any, source: fx.Node, *given: Any, **options: Any) -> fx.Node:
    found = source.graph.call_function(target, (source, *given), options)
    found.meta["val"] = target(source.meta["val"], *given, **options)
    return found
