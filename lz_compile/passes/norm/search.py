"""Where a normalisation of rows may begin and end: from a statistic to the tensors before it, and to what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.calls import is_cast
from lz_compile.passes.formula.edge import behind_casts
from lz_compile.passes.formula.moments import CALLS, FUNCTIONS, STATISTICS
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, is_floating, tensor_of
from lz_compile.passes.graph.walks import reached
from lz_compile.passes.rewriting.core import is_dead

#: How many operations may lie between a row and its statistic, how many results of a statistic are looked at, and how
#: many tensors are tried as the row.
_BEFORE, _AFTER, _SOURCES = 6, 24, 8
#: What the squares that are averaged may be computed by at last.
_SQUARES = frozenset({"pow", "square", "mul", "div"})
_ROOTS = frozenset({"rsqrt", "sqrt", "std", "norm", "linalg_norm", "linalg_vector_norm", "normalize"}) | CALLS.keys()


def is_worth_reading(effects: Effects, anchor: fx.Node, results: list[fx.Node]) -> bool:
    """Whether what is reduced may be squares, and a root is taken of it."""
    calls = [call for call in map(effects.calls.get, (anchor, *results)) if call is not None]
    if not any(call.name in _ROOTS or (call.name == "pow" and not _is_whole(call.get("exponent"))) for call in calls):
        return False
    inner = effects.calls.get(calls[0].input)
    while inner is not None and (is_cast(inner) or layout.rearranges(inner)):
        inner = effects.calls.get(inner.input)
    return calls[0].name not in ("mean", "sum") or (inner is not None and inner.name in _SQUARES)


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent == int(exponent)


def sources(effects: Effects, anchor: fx.Node) -> Iterator[fx.Node]:
    """What the row may be, the likeliest first; looks no further than it is asked."""
    return islice(_sources(effects, anchor), _SOURCES)


def _sources(effects: Effects, anchor: fx.Node) -> Iterator[fx.Node]:
    """What the row may be: tensors before the anchor, behind pointwise operations; the nearest first, before any cast.

    What is centred comes before the centred: the tensor whose mean was subtracted.
    """
    call = effects.calls[anchor]
    assert call is not None, "an anchor is a call"
    seen: set[fx.Node] = set()
    level = [call.input]
    for depth in range(_BEFORE):
        following: list[fx.Node] = []
        for node in level:
            inner = effects.calls.get(behind_casts(effects, node))
            if inner is not None and (is_pointwise(inner) or layout.rearranges(inner) or inner.name in FUNCTIONS):
                operands = [each for each in inner.node.all_input_nodes if tensor_of(each) is not None]
                following += operands
            else:
                operands = []
            is_square = depth == 0 and call.name in ("mean", "sum")  # a mean of the row itself is no second moment
            found = [] if call.name in CALLS else [_averaged(effects, each) for each in operands]
            for each in (*found, None if is_square else node):
                source = None if each is None else behind_casts(effects, each)
                if source is not None and source not in seen and is_floating(source):
                    seen.add(source)
                    yield source
        level = following if call.name not in CALLS else []


def _averaged(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The tensor whose mean ``node`` is."""
    call = effects.calls.get(node)
    while call is not None and (is_cast(call) or layout.rearranges(call) or call.name == "getitem"):
        call = effects.calls.get(call.input)
    return call.input if call is not None and call.name in ("mean", "sum", "var_mean", "std_mean") else None


def results_of(effects: Effects, anchor: fx.Node) -> list[fx.Node]:
    """What is computed from a statistic by pointwise operations, in graph order."""

    def users(node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if _is_read(effects.calls.get(user)) and not is_dead(user))

    found = filter(is_floating, reached([anchor], users, _AFTER))
    return sorted(found, key=effects.position.__getitem__)


def _is_read(call: Call | None) -> bool:
    return call is not None and (
        is_pointwise(call) or layout.rearranges(call) or call.name in STATISTICS or call.name in FUNCTIONS
    )
