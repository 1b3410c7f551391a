"""Calls of ``lz.kda`` and ``lz.linear_scan``.

Which kernel such a call selects by itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size
from lz_compile.lowering.ops import scan as scan_op
from lz_compile.lowering.ops.scan import DIMS, RESULTS, Operands, ScanAttrs
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import where_of
from lz_compile.passes.graph.writes import refuse_transformed
from lz_compile.passes.rewriting.core import wants_grad
from lz_compile.passes.rewriting.match import Found, Input, Match, Outcome, Site, Trial
from lz_compile.passes.rewriting.op_calls import CallEmitter, arguments_of, op_calls
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
    outputs = _outputs(node, effects, given)
    x = Operands(**tensors)
    wide = torch.promote_types(scan_op.common_dtype(x), torch.float32)
    attrs = ScanAttrs("after", "erase" in given, wide, named["out_dtype"], named["state_dtype"])
    axes = {letter: Axis(as_size(size)) for letter, size in scan_op.sizes_of(x).by_dim().items()}
    scales = _scales(given, axes["K"])
    inputs = {
        each: Input(_dims(name, tensors[name], axes), scale=scales.get(each, 1.0)) for name, each in given.items()
    }
    ambient = effects.ambient(node)
    sizes: dict[str, Any] = {name: as_size(size) for name, size in scan_op.sizes_of(x)._asdict().items()}
    needs_grad = wants_grad(ambient, given.values())
    facts = replace(scan_op.facts_of(x), **sizes, needs_grad=needs_grad)
    places = {place: tuple(axes[letter] for letter in letters) for place, letters in enumerate(RESULTS)}
    dims = {each: tuple(() if axis.size == 1 else (axis,) for axis in places[place]) for each, place in outputs.items()}
    output, *others = sorted(outputs)
    emitter = CallEmitter(given, attrs, Operands, tuple(outputs[each] for each in (output, *others)))
    formula = f"{_ERASING if attrs.erases else _PLAIN}; y[q,v] = sum over k of query[q,k] S[k,v]"
    return Match(
        OP,
        Site(
            output=output,
            output_dims=dims[output],
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
    found: dict[fx.Node, int] = {}
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            raise RefusedError("SCAN_USED_WHOLE", f"{told(user)} takes all results of a scan", "unpack them")
        found[user] = user.args[1] % 2
    read = {user: place for user, place in found.items() if user.users}
    check_written(node, given.values(), max(read or found), effects)
    return read or found


def _dims(name: str, tensor: torch.Tensor, axes: Mapping[str, Axis]) -> Dims:
    """Every dimension of an operand is one axis, or broadcasts."""
    sizes = [as_size(size) for size in tensor.shape]
    return tuple(() if size == 1 else (axes[letter],) for letter, size in zip(DIMS[name], sizes, strict=True))


def _scales(given: Mapping[str, fx.Node], keys: Axis) -> dict[fx.Node, float]:
    """For keys that erase: their length is about one, or a state would grow."""
    size = keys.size if isinstance(keys.size, int) else 64
    return {given[name]: size**-0.5 for name in ("left", "erase") if "erase" in given}
