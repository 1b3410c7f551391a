"""What stands beside the scores of a row: one more that has no value, and what is subtracted from all of them.

The first is a column of ``cat(s, t)`` under a softmax or a logsumexp. The second keeps exponentials from overflowing: a
softmax does not see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.formula.expressions import constant_value, is_cast
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, known_tensor, tensor_of, tensor_operands


def without_column(effects: Effects, leaf: Leaf) -> fx.Node | None:
    """The softmax over scores with one column more, where the leaf is that without this column."""
    call = effects.calls[leaf.node]
    if call is None or _dropped(call) is None or tensor_of(call.input) is None:
        return None
    whole = effects.calls.get(call.input)
    while whole is not None and (whole.name == "dropout" or is_cast(whole)):
        whole = effects.calls.get(whole.input)
    if whole is None or whole.name != "softmax" or joined(effects, whole) is None:
        return None
    sizes, kept = shape_of(known_tensor(whole.node)), shape_of(known_tensor(leaf.node))
    return whole.node if sizes[:-1] == kept[:-1] and sizes[-1] - kept[-1] == 1 else None


def joined(effects: Effects, call: Call) -> Call | None:
    """The concatenation that a call is of, behind casts and ``x - x.max(...)``, which a softmax does not see."""
    if not isinstance(call.input, fx.Node):
        return None
    found = effects.calls.get(_through_shift(effects, call.input))
    while found is not None and is_cast(found):
        found = effects.calls.get(_through_shift(effects, found.input))
    return found if found is not None and found.name == "cat" else None


def _dropped(call: Call) -> int | None:
    """Which of two parts a call leaves out that takes all columns but one: the second, or the first (0) if that is one."""
    index = call.arguments.get("#1") if call.name == "getitem" else None
    last = index[-1] if isinstance(index, tuple) and index else index
    if call.name == "narrow":
        last = slice(call.get("start"), None)
    if not isinstance(last, slice) or last.step not in (None, 1) or not isinstance(last.start, int | None):
        return None
    if last.start == 1:  # an end would count the column
        return 0 if last.stop is None else None
    return 1 if last.start in (None, 0) else None


def _through_shift(effects: Effects, node: fx.Node) -> fx.Node:
    call = effects.calls.get(node)
    if call is not None and call.name == "sub" and isinstance(call.get("other"), fx.Node):
        shift = effects.calls.get(call.get("other"))
        while shift is not None and shift.name in ("getitem", "getattr", "detach"):
            shift = effects.calls.get(shift.input)
        is_of_rows = shape_of(known_tensor(call.get("other")))[-1:] == (1,)
        if shift is not None and shift.name in ("max", "amax") and shift.input is call.input and is_of_rows:
            return call.input  # type: ignore[no-any-return]
    return node


def beside_column(region: Region, leaf: Leaf, whole: Call) -> tuple[sympy.Expr, sympy.Symbol]:
    """Scores and sink of the softmax ``whole``, of which the leaf is all but one column.

    Raises:
        RefusedError: what is dropped is no column that was appended.
    """
    behind, call = region.effects.calls[leaf.node], joined(region.effects, whole)
    place = None if behind is None else _dropped(behind)
    assert place is not None, "a column is dropped"
    assert call is not None, "it was appended"
    region.interior.setdefault(leaf.node, leaf.dims)  # its slice may spell out the number of keys
    return _parted(region, call, leaf.dims, place)


def beside_sum(region: Region, total: Call, dims: Dims) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Scores, with ``dims``, and sink of a logsumexp of both; None where it is of scores alone."""
    call, shift = region.effects.calls.get(total.input), None
    if call is not None and call.name == "sub" and call.get("alpha", 1) == 1:
        shift, call = call.get("other"), region.effects.calls.get(call.input)
    if total.name != "logsumexp" or call is None or call.name != "cat":
        return None
    dim, parts = total.get("dim"), call.get("tensors")
    places = [i for i, part in enumerate(parts) if shape_of(known_tensor(part))[-1] == 1]
    if dim not in (-1, [-1], (-1,), len(dims) - 1, [len(dims) - 1], (len(dims) - 1,)) or not places:
        return None
    scores, column = _parted(region, call, dims, places[-1])
    if shift is None:
        return scores, column
    if tensor_of(shift) is None or shape_of(known_tensor(shift)) != shape_of(known_tensor(parts[places[-1]])):
        return None  # no number of each row is taken off
    less = region.express(shift, (*dims[:-1], ()), total.input)
    return scores - less, column - less


def _parted(region: Region, call: Call, dims: Dims, place: int) -> tuple[sympy.Expr, sympy.Symbol]:
    parts = call.get("tensors")
    if len(parts) != 2 or call.get("dim", 0) % len(dims) != len(dims) - 1:
        raise RefusedError("SINK_NOT_UNDERSTOOD", "the extra column is not one column of keys", "append one column")
    column = tensor_of(parts[place])
    if column is None or shape_of(column)[-1] != 1:
        raise RefusedError("SINK_NOT_UNDERSTOOD", "more than one column is appended to the scores", "append one column")
    return region.express(parts[1 - place], dims, call.node), region.leaf(parts[place], (*dims[:-1], ()))


# ---- what is subtracted ------------------------------------------------------------------------------------------


def without_shift(
    region: Region, expression: sympy.Expr, keys: tuple[Axis, ...], sinks: sympy.Expr | None
) -> sympy.Expr:
    """Drop a subtracted row maximum: softmax does not change when a row is shifted."""
    shifts = {}
    beside = _Beside.of(region, sinks)
    for symbol, leaf in region.leaves_in(expression).items():
        if leaf.axes & set(atoms(keys)) or not _is_maximum(region, leaf.node, leaf.dims, beside):
            continue
        if sympy.expand(sympy.diff(expression, symbol)).is_number:
            shifts[symbol] = sympy.S.Zero
    return expression.xreplace(shifts) if shifts else expression


@dataclass(frozen=True)
class _Beside:
    """What a row's maximum may be taken of as well: the tensors that a sink is made of, and numbers up to ``largest``."""

    columns: frozenset[fx.Node] = frozenset()
    largest: float = 0.0

    @classmethod
    def of(cls, region: Region, sinks: sympy.Expr | None) -> _Beside:
        """Beside these sinks: under a larger number than theirs, exponentials of usual scores are zero."""
        if sinks is None:
            return cls()
        shown = (_shown(region, leaf.node) for leaf in region.leaves_in(sinks).values())
        return cls(frozenset(shown), max(0.0, float(sinks.as_coeff_Add()[0])))

    def has(self, region: Region, node: fx.Node, dims: Dims) -> bool:
        """Whether ``node`` is one of these."""
        shown = _shown(region, node)
        call = region.effects.calls.get(shown)
        value = None if call is None else constant_value(call)
        if value is not None and len(dims) == len(shape_of(known_tensor(shown))):
            region.interior.setdefault(shown, dims)
        return shown in self.columns or (value is not None and value <= self.largest)


#: Calls behind which a row's maximum is one still.
_SAME_ROW = frozenset({"detach", "getitem", "getattr", "unsqueeze", "contiguous", "clone", "relu"})
#: Calls that give the larger of two tensors.
_LARGER = frozenset({"maximum", "max", "fmax", "clamp", "clamp_min"})


def _is_maximum(region: Region, node: fx.Node, dims: Dims, beside: _Beside) -> bool:
    """Whether a node with these ``dims`` is the largest of a row, or of a row and what may stand ``beside`` it."""
    call = region.effects.calls.get(node)
    while call is not None and (call.name in _SAME_ROW or _is_bounded(call)):
        call = region.effects.calls.get(call.input)
    sides = tensor_operands(call.node) if call and call.name in _LARGER and call.get("max") is None else []
    if len(sides) > 1:
        return any(beside.has(region, x, dims) for x in sides) and any(
            _is_maximum(region, x, dims, beside) for x in sides
        )
    if call is None or call.name not in ("amax", "max"):
        return False
    cat, sizes = joined(region.effects, call), shape_of(known_tensor(node))
    for part in () if cat is None else cat.get("tensors"):
        *rows, width = shape_of(known_tensor(part))
        if width == 1 and [*sizes[: len(rows)]] == rows:
            region.interior.setdefault(part, (*dims[: len(rows)], ()))  # its layout may spell out sizes
    return True


def _shown(region: Region, node: fx.Node) -> fx.Node:
    """What a node shows in another layout."""
    while (call := region.effects.calls.get(node)) is not None and layout.rearranges(call):
        node = call.input
    return node


def _is_bounded(call: Call) -> bool:
    """Whether a maximum is at least zero, or less: under a larger bound, exponentials of usual scores are zero."""
    least = call.get("min") if call.name in ("clamp", "clamp_min") else None
    return isinstance(least, int | float) and least <= 0 and call.get("max") is None
