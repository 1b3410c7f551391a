"""Calls of ``lz.kda`` and ``lz.linear_scan``.

Which kernel such a call selects by itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from lz_compile.ground.sizes import Size, as_size, shape_of
from lz_compile.lowering.ops import scan as scan_op
from lz_compile.lowering.ops.scan import DIMS, RESULTS, Operands, ScanSizes
from lz_compile.passes.formula.axes import broadcast_from, fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.own_calls import arguments_of
from lz_compile.passes.graph.refusal import where_of
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.loops.recurrence.step_trace import results_of
from lz_compile.passes.rewriting.core import wants_grad
from lz_compile.passes.rewriting.match import Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, op_calls
from lz_compile.passes.scan.recogniser import OP, check_written

_ERASING = "S[k,v] <- decay S[k,v] + left[k] (right[v] - sum over k' of erase[k'] S[k',v])"
_PLAIN = "S[k,v] <- decay S[k,v] + left[k] right[v] + drive[k,v]"


def scan_calls(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every such call whose results are taken apart."""
    return op_calls(OP, graph, effects, _call_match)


def _call_match(node: fx.Node, effects: Effects) -> Match:
    """The match of one call.

    Raises:
        RefusedError: its results are not taken apart, it is mapped over a dimension, or an operand is overwritten.
    """
    given, tensors, named = arguments_of(node, Operands, "out_dtype", "state_dtype")
    outputs, ambient = _outputs(node, effects, given), effects.ambient(node)
    attrs, facts = scan_op.from_operands(Operands(**tensors), {}, **named)
    sizes: dict[str, Any] = {name: as_size(getattr(facts, name)) for name in ScanSizes._fields}
    axes = dict(zip(ScanSizes(**sizes).by_dim(), fresh([*sizes.values()]), strict=True))
    inputs = {
        each: Input(
            broadcast_from(tuple(map(axes.__getitem__, DIMS[name])), shape_of(tensors[name])),
            scale=_length(sizes["key_dim"]) if attrs.erases and name in ("left", "erase") else 1.0,
        )
        for name, each in given.items()
    }
    facts = replace(facts, **sizes, needs_grad=wants_grad(ambient, given.values()))
    output, *others = sorted(outputs)
    emitter = CallEmitter(given, attrs, Operands, tuple(outputs[each] for each in (output, *others)))
    formula = f"{_ERASING if attrs.erases else _PLAIN}; y[q,v] = sum over k of query[q,k] S[k,v]"
    return Match(
        OP,
        Site(
            output=output,
            output_dims=tuple(map(axes.__getitem__, RESULTS[outputs[output]])),
            core=(node, *others, output),
            ambient=ambient,
            where=where_of(node),
            extra_outputs=tuple(others),
        ),
        Found(attrs, facts, inputs, {}, emitter, formula),
        Trial(masked_rows_count=False),
    )


def _outputs(node: fx.Node, effects: Effects, given: Mapping[str, fx.Node]) -> dict[fx.Node, int]:
    """The nodes that pick a result, with its place."""
    refuse_transformed(effects.ambient(node))
    found = {user: place % 2 for place, users in results_of(node).items() for user in users}
    read = {user: place for user, place in found.items() if user.users}
    check_written(node, given.values(), max(read or found), effects)
    return read or found


def _length(keys: Size) -> float:
    """Of keys that erase, so that they are about one long, or a state would grow."""
    return float((keys if isinstance(keys, int) else 64) ** -0.5)
