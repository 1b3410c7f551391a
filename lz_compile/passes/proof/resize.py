"""What was found in a graph at other sizes, as a graph of its own.

Validation must not cost what the model costs. Axes make that possible: every extent of the subgraph is a product of
axes, so the whole of it can be run with, say, 24 keys instead of 4,096, whatever numbers its reshapes spell out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.node import map_aggregate

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.formula.expressions import constant_value, is_constant
from lz_compile.passes.graph.refusal import held_by
from lz_compile.passes.graph.view import Call, hint_of, is_symbolic, known_tensor, needed, read, tensor_of
from lz_compile.passes.proof.running import Sizes, Subgraph


def _of_rows(input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight.to(input.dtype)) * scale


#: What PyTorch's own products with stored weights compute, by name: their kernels take some sizes and dtypes only.
NATIVE: Mapping[str, Callable[..., torch.Tensor]] = {"_weight_int8pack_mm": _of_rows}


class Found(Protocol):
    """What was found in a graph: a match, or what may become one (see :class:`~lz_compile.passes.rewriting.match.Match`)."""

    @property
    def inputs(self) -> Mapping[fx.Node, Dims]:
        """The nodes at the edge."""

    @property
    def core(self) -> tuple[fx.Node, ...]:
        """The nodes between."""

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes that are wanted."""

    @property
    def read(self) -> Mapping[fx.Node, Dims]:
        """The axes of those that spell out sizes."""

    @property
    def literal_sizes(self) -> Mapping[int, Axis]:
        """Further numbers that are sizes."""


_DOWNCASTS = frozenset({"float", "half", "bfloat16"})


def shape(dims: Dims, sizes: Sizes) -> tuple[int, ...]:
    """The extents of ``dims`` under ``sizes``."""
    extents = []
    for dim in dims:
        extent = 1
        for axis in atoms(dim):
            extent *= sizes[axis]
        extents.append(extent)
    return tuple(extents)


def whole(found: Found) -> Subgraph:
    """All that computes the outputs from the inputs, and the in-place writes among it."""
    calls = {node: read(node) for node in dict.fromkeys((*found.core, *found.read))}
    written = [node for node, call in calls.items() if call is not None and (call.is_inplace or call.name == "setitem")]
    given = {*found.inputs, *_overwritten(found.inputs)}
    nodes = tuple(needed([*found.outputs, *written], given, _data_inputs))
    return Subgraph(
        inputs=found.inputs,
        nodes=nodes,
        outputs=found.outputs,
        read=found.read,
        literal_sizes=found.literal_sizes,
        held=held_by(nodes),
    )


def resized(subgraph: Subgraph, sizes: Sizes, dtype: torch.dtype | None = None) -> Subgraph:
    """The same at other sizes; with ``dtype``, every floating dtype in it becomes that.

    Dropout is left out (p = 0), so that two runs can be compared. The bodies of loops keep their sizes.
    """
    copier = partial(_copy, subgraph, sizes, dtype)
    graph, copies = subgraph.copied(copier, _overwritten(subgraph.inputs))
    kept = ("placeholder", "output")
    return Subgraph(
        inputs={copies[node]: dims for node, dims in subgraph.inputs.items()},
        nodes=tuple(node for node in graph.nodes if node.op not in kept),
        outputs=tuple(copies[node] for node in subgraph.outputs),
        held=subgraph.held if dtype is None else {name: _in(value, dtype) for name, value in subgraph.held.items()},
    )


def _in(value: Any, dtype: torch.dtype) -> Any:
    """A tensor, or the body of a loop, in another floating dtype."""
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_real else _body_with_dtype(value, dtype)


def _body_with_dtype(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, fx.GraphModule):
        return value
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in value.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].args, values[node].kwargs = _with_dtype((values[node].args, values[node].kwargs), dtype)
        if node.op == "call_method" and node.target in _DOWNCASTS:
            values[node].target = "double"
    held = {name: _in(each, dtype) for name, each in held_by(value.graph.nodes).items()}
    return fx.GraphModule(held, graph)


def input_left_out(found: Found) -> fx.Node | None:
    """An input of the graph that the outputs are computed of, and the match is not: what it says cancels out."""
    return next((node for node in whole(found).nodes if node.op == "placeholder"), None)


def _overwritten(inputs: Mapping[fx.Node, Dims]) -> dict[fx.Node, fx.Node]:
    """Tensors that were overwritten in place to become an input: whoever reads them later reads that input."""
    found = {}
    for newer in inputs:
        call = read(newer)
        while call is not None and call.is_inplace and isinstance(call.input, fx.Node):
            found[call.input] = newer
            call = read(call.input)
    return {older: newer for older, newer in found.items() if older not in inputs}


def _data_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose values matter, not those that are a size, or only lend a shape or a dtype."""
    call = read(node)
    if call is None:
        return []
    if call.name == "getitem":
        return [each for each in _values(node) if each is call.input or tensor_of(each) is not None]
    if call.name in layout.SIZED or call.name in ("type_as", "to", "dropout") or is_constant(call):
        return [call.input] if isinstance(call.input, fx.Node) and not is_constant(call) else []
    return _values(node)


def _values(node: fx.Node) -> list[fx.Node]:
    """What a node reads, but for sizes."""
    return [each for each in node.all_input_nodes if not is_symbolic(each)]


def _copy(
    match: Subgraph,
    sizes: Sizes,
    dtype: torch.dtype | None,
    graph: fx.Graph,
    node: fx.Node,
    values: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    call = read(node)
    if call is not None and call.name in layout.SIZED and node in match.read:
        return _resized(graph, match, call, values[call.input], sizes)
    example = tensor_of(node)
    kind = None if example is None else example.dtype if dtype is None else _with_dtype(example.dtype, dtype)
    if call is not None and is_constant(call) and example is not None and node in match.read:
        extents = shape(match.read[node], sizes)
        return graph.call_function(
            torch.full, (extents, constant_value(call) or 0), {"dtype": kind, "device": example.device}
        )
    if call is not None and call.name in ("type_as", "to") and example is not None and len(node.all_input_nodes) > 1:
        return graph.call_method("to", (values[call.input], example.device, kind))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else hint_of(n))
    if call is not None and call.name == "dropout":
        return graph.call_function(torch.nn.functional.dropout, (args[0], 0.0))
    if call is not None and call.name == "narrow" and node in match.read:
        extents, position = shape(match.read[node], sizes), call.get("dim")
        return graph.call_method("narrow", (values[call.input], position, call.get("start"), extents[position]))
    if call is not None:
        args = _with_extents(graph, call, args, shape(match.read[node], sizes) if node in match.read else None)
    if match.literal_sizes:
        args, kwargs = _with_sizes((args, kwargs), {size: sizes[axis] for size, axis in match.literal_sizes.items()})
    target = node.target
    if call is not None and call.name == "scaled_dot_product_attention":
        named = dict(fx.map_arg({**call.arguments, "dropout_p": 0.0}, values.__getitem__))
        args, kwargs = tuple(named.pop(name) for name in ("query", "key", "value")), named
        width = known_tensor(call.get("query")).shape[-1]
        if named.get("scale") is None and isinstance(width, int):  # that of the real width, whatever it is here
            named["scale"] = width**-0.5
    if dtype is not None:
        args, kwargs = _with_dtype((args, kwargs), dtype)
        if node.op == "call_method" and target in _DOWNCASTS:
            target = "double"
    if call is not None and call.name in NATIVE:
        return graph.call_function(NATIVE[call.name], args, kwargs)
    return graph.create_node(node.op, target, args, kwargs)


def _with_extents(graph: fx.Graph, call: Call, args: tuple[Any, ...], extents: tuple[int, ...] | None) -> Any:
    """The arguments of a call whose result has these extents, if they are known."""
    if call.name == "arange" and len(args) == 1 and extents is not None:
        return extents
    if call.name == "getitem" and isinstance(args[1], (tuple, slice)) and not _picks(call):
        return args[0], _index(call, extents)
    if call.name == "view_as_complex":  # which strides it takes is no part of what it computes
        return (graph.call_method("contiguous", (args[0],)),)
    return args


def _picks(call: Call) -> bool:
    """Whether a ``getitem`` looks something up in a tensor."""
    return any(tensor_of(each) is not None for each in call.node.all_input_nodes if each is not call.input)


def _with_sizes(value: Any, sizes: Mapping[int, int]) -> Any:
    def changed(leaf: Any) -> Any:
        return sizes.get(leaf, leaf) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf

    return map_aggregate(value, changed)


def _index(call: Call, extents: tuple[int, ...] | None) -> Any:
    """The index of a ``getitem``; a leading slice ends where the resized result does, if its extents are known."""
    given = call.arguments["#1"]
    items = list(given) if isinstance(given, tuple) else [given]
    is_plain = all(item is None or item is Ellipsis or isinstance(item, slice) for item in items)
    if extents is not None and is_plain:
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        items[at : at + 1] = [slice(None)] * (len(extents) - len(items) + (at < len(items)))
        items = [_cut(item, extent) for item, extent in zip(items, extents, strict=True)]
    items = [slice(None) if _has_node(item) else item for item in items]
    return tuple(items) if isinstance(given, tuple) or len(items) > 1 else items[0]


def _cut(item: slice | None, extent: int) -> slice | None:
    """A slice from the start up to a number, or of so many at the end, as one of ``extent``; others stay."""
    if item is not None and item.stop is None and isinstance(item.start, int) and item.start < 0 and item.step is None:
        return slice(-extent, None)
    if item is None or item.start not in (None, 0) or item.step not in (None, 1):
        return item
    is_counted = isinstance(item.stop, fx.Node) or (isinstance(item.stop, int) and item.stop >= 0)
    return slice(extent) if is_counted else item


def _has_node(item: Any) -> bool:
    return isinstance(item, slice) and any(isinstance(part, fx.Node) for part in (item.start, item.stop, item.step))


def _with_dtype(value: Any, dtype: torch.dtype) -> Any:
    def changed(leaf: Any) -> Any:
        return dtype if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    return map_aggregate(value, changed)


def _resized(graph: fx.Graph, match: Subgraph, call: Call, source: fx.Node, sizes: Sizes) -> fx.Node:
    dims = match.read[call.node]
    extents = shape(dims, sizes)
    if call.name in ("expand", "expand_as"):
        return graph.call_method("expand", (source, *extents))
    if call.name in ("repeat", "tile", "repeat_interleave"):
        inner = layout.read_input_dims(call, dims)
        assert inner is not None, "a repeat that was read before"
        before = (1,) * (len(extents) - len(inner)) + shape(inner, sizes)
        times = [after // old for after, old in zip(extents, before, strict=True)]
        if call.name != "repeat_interleave":
            return graph.call_method("repeat", (source, *times))
        position = call.get("dim") % len(extents)
        return graph.call_method("repeat_interleave", (source, times[position], position))
    return graph.call_method("reshape", (source, *extents))
