"""Rows that lose every key and are then set to zero, as SDPA itself does: the condition says so of the masks, or of scores.

What a condition says is found by cases: of a row all of whose scores are dropped, of one that keeps some, and of one that
keeps all. A score that is kept is some finite number, one that is dropped is minus infinity.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.attention.recogniser import Weighing
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Dims, LayoutError, atoms, broadcast_from
from lz_compile.passes.formula.contraction import reduction_dims
from lz_compile.passes.formula.expressions import INFINITY, indicators, is_cast, number, reduce_indicators, tidy
from lz_compile.passes.graph.refusal import MutatedError, RefusedError, told
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.masks import finite as masks_finite

#: The code of a refusal after which masks are to be read as what they are made of; if that fails, too, as any weight of rows.
UNDECIDED = "ROWS_CHOSEN"
#: Some finite score, and how many of something, or how much, there are where there are any.
_SCORE, _AMOUNT = sympy.Symbol("score", real=True), sympy.Symbol("amount", positive=True)
_COUNT = sympy.Symbol("count", positive=True, integer=True)
_YES, _NO = sympy.S.One, sympy.S.Zero
#: A row that lost every score first, and rows that did not.
_ROWS: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (1,))


def _truth(holds: Any) -> sympy.Expr:
    if holds not in (sympy.true, sympy.false, True, False):
        raise LayoutError(f"{holds} is not decided")
    return _YES if holds else _NO


def _counted(values: list[sympy.Expr]) -> sympy.Expr:
    if not all(value.is_nonnegative for value in values):
        raise LayoutError("a sum of more than truth values")
    some = _COUNT if all(value.is_integer for value in values) else _AMOUNT
    return some if any(value != 0 for value in values) else _NO


_REDUCED: Mapping[str, Callable[[list[sympy.Expr]], sympy.Expr]] = {
    "any": lambda values: _truth(any(value != 0 for value in values)),
    "all": lambda values: _truth(all(value != 0 for value in values)),
    **dict.fromkeys(("amax", "max"), lambda values: sympy.Max(*values)),
    **dict.fromkeys(("amin", "min"), lambda values: sympy.Min(*values)),
    **dict.fromkeys(("sum", "count_nonzero"), _counted),
}
_TRUTHS: Mapping[str, Callable[..., sympy.Expr]] = {
    "eq": lambda x, y: _truth(sympy.Eq(x, y)),
    "ne": lambda x, y: 1 - _truth(sympy.Eq(x, y)),
    "gt": lambda x, y: _truth(x > y),
    "ge": lambda x, y: _truth(x >= y),
    "lt": lambda x, y: _truth(x < y),
    "le": lambda x, y: _truth(x <= y),
    "isneginf": lambda x: _truth(x == -sympy.oo),
    "isinf": lambda x: _truth(x in (-sympy.oo, sympy.oo)),
    "isfinite": lambda x: _truth(x not in (-sympy.oo, sympy.oo)),
    "not": lambda x: _truth(x == 0),
    "and": lambda x, y: _truth(x != 0 and y != 0),
    "or": lambda x, y: _truth(x != 0 or y != 0),
}


def without_lost_rows(read: Weighing) -> Weighing:
    """The attention without a factor that is zero in rows that lost every score, and one in all others.

    Raises:
        RefusedError: a factor may be one, which masks say only once they are read as what they are made of, if then.
    """
    undecided = None
    for flag in indicators(read.gain):
        kept, lost = (tidy(sympy.expand(read.gain.xreplace({flag: value}))) for value in (_YES, _NO))
        if 0 not in (kept, lost):
            continue
        says = _Condition(read).says(flag)
        if says == (_YES if lost == 0 else _NO):
            found = replace(read.probabilities, is_masked_again=True)
            return replace(read, gain=kept if lost == 0 else lost, probabilities=found)
        undecided = flag if says is None else undecided
    if undecided is not None:
        text = f"rows are chosen by {told(read.region.leaves[undecided].node)}"
        raise RefusedError(UNDECIDED, text, "choose rows by whether the mask keeps any of their scores")
    return read


@dataclass(frozen=True)
class _Condition:
    """Reads conditions on the rows of an attention."""

    read: Weighing

    def says(self, flag: sympy.Symbol) -> sympy.Expr | None:
        """One where a condition tells that a row keeps a score, zero where that it lost all; None where neither."""
        leaf = self.read.region.leaves[flag]
        if leaf.axes & set(atoms(self.read.keys)):
            return None
        try:
            lost, *kept = (self._value(leaf.node, leaf.dims, cells) for cells in _ROWS)
        except (LayoutError, MutatedError, TypeError):  # sympy compares no infinity with what may be one
            return None
        return kept[0] if kept[0] == kept[1] and {kept[0], lost} == {_YES, _NO} else None

    def _value(self, node: Any, dims: Dims, cells: tuple[int, ...]) -> sympy.Expr:
        """What a node is in a row of such cells, or in the one cell where its dims hold the keys."""
        if not isinstance(node, fx.Node):
            return _extended(number(node))
        found = self._known(node, dims, cells[0]) if _holds(dims, self.read.keys) else None
        call = self.read.region.effects.calls[node]
        if found is not None or call is None:
            return _decided(found)
        if call.name == "getitem" and call.arguments.get("#1") == 0:
            call = self.read.region.effects.calls[call.input] or call
        if call.name in _REDUCED and (inner := reduction_dims(call, dims, atoms(self.read.keys))) is not None:
            return _REDUCED[call.name]([self._value(self._seen(call, call.input), inner[0], (cell,)) for cell in cells])
        source = dims if is_cast(call) else layout.read_input_dims(call, dims)
        if source is not None:
            return self._value(self._seen(call, call.input), source, cells)
        return _decided(_TRUTHS.get(call.name))(*self._operands(call, dims, cells))

    def _seen(self, call: Call, operand: Any) -> Any:
        return self.read.region.seen_by(call.node, operand) if isinstance(operand, fx.Node) else operand

    def _operands(self, call: Call, dims: Dims, cells: tuple[int, ...]) -> Iterator[sympy.Expr]:
        for operand in (self._seen(call, each) for each in (call.input, call.get("other")) if each is not None):
            tensor = tensor_of(operand)
            yield self._value(operand, () if tensor is None else broadcast_from(dims, shape_of(tensor)), cells)

    def _known(self, node: fx.Node, dims: Dims, cell: int) -> sympy.Expr | None:
        """What is known of a value where the masks keep a score, or drop it: the same for all that they may hold."""
        region, inner = self.read.region, self.read.scores
        expression = reduce_indicators(region.express(node, dims))
        scores = reduce_indicators(self.read.probabilities.scores)
        if expression in (scores, inner.bias if inner.keep == 1 else scores):
            return _SCORE if cell else -sympy.oo
        keep = inner.keep * self.read.probabilities.keep
        others = [each for each in region.leaves_in(expression) if each not in keep.free_symbols]
        if not keep.free_symbols or any(not _is_finite(self.read, each) for each in others):
            return None
        flags, found = indicators(keep), set()
        for values in itertools.product((_NO, _YES), repeat=len(flags)):
            chosen = dict(zip(flags, values, strict=True))
            if keep.xreplace(chosen) == cell:
                found.add(_extended(reduce_indicators(expression.xreplace(chosen))))
        return found.pop() if len(found) == 1 else None


def _holds(dims: Dims, keys: Any) -> bool:
    return bool({axis for dim in dims for axis in atoms(dim)} & set(atoms(keys)))


def _is_finite(read: Weighing, symbol: sympy.Symbol) -> bool:
    return symbol == read.region.leaf(read.scores.leaf.node, read.scores.leaf.dims) or (
        not symbol.is_integer and masks_finite.is_bounded(read.region, symbol)
    )


def _extended(value: sympy.Expr) -> sympy.Expr:
    """A value with infinities as sympy has them."""
    infinite = value.coeff(INFINITY) if value.has(INFINITY) else _NO
    if infinite != 0 and not infinite.is_number:
        raise LayoutError(f"{value} may be infinite")
    return infinite * sympy.oo if infinite != 0 else value


def _decided(found: Any) -> Any:
    if found is None:
        raise LayoutError("the condition is made of something else")
    return found
