"""Dynamo graphs to test on, and an independent reading of axes: as index arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import Call, read, tensor_of

Symbols = Mapping[sympy.Symbol, int]


def capture(fn: Callable[..., Any], *inputs: Any, dynamic: bool | Sequence[int] | None = None) -> fx.GraphModule:
    """The first graph that Dynamo makes of ``fn(*inputs)``, with example values; nothing of ours has touched it.

    The inputs are copied, so that an ``fn`` that writes into them leaves the caller's alone.

    Args:
        fn: what to trace.
        inputs: its arguments.
        dynamic: as for ``torch.compile``, or the dimensions that are symbolic in every tensor that has them.
    """
    torch._dynamo.reset()
    copies = [value.clone() if isinstance(value, Tensor) and value.is_leaf else value for value in inputs]
    if isinstance(dynamic, Sequence):
        for value in copies:
            torch._dynamo.mark_dynamic(value, [dim for dim in dynamic if dim < value.dim()])
    wanted = None if isinstance(dynamic, Sequence) else dynamic
    try:
        torch.compile(fn, backend=_stop_with, dynamic=wanted, fullgraph=True)(*copies)
    except _Captured as stopped:
        return stopped.module
    raise AssertionError("Dynamo made no graph")


class _Captured(BaseException):
    """Carries a graph out of Dynamo, past everything that it would do to run it (guards alone take as long again)."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module


def _stop_with(module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    raise _Captured(module)


def outputs_of(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that the graph returns."""
    return list(next(node for node in module.graph.nodes if node.op == "output").args[0])


def output_of(module: fx.GraphModule) -> fx.Node:
    """The node that the graph returns (the first one)."""
    return outputs_of(module)[0]


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    """The tensor inputs, in the order in which Dynamo met them."""
    return [node for node in module.graph.nodes if node.op == "placeholder" and tensor_of(node) is not None]


def in_order(module: fx.GraphModule, named: Mapping[str, Tensor]) -> list[Tensor]:
    """Inputs by their names in the traced function, in the order of :func:`placeholders`; ``named`` is in that of its arguments.

    Dynamo (2.11) names arguments of functions without a file by their places.
    """
    places = {f"args_{place}": value for place, value in enumerate(named.values())}
    return [{**places, **named}[node.name.removeprefix("l_").removesuffix("_")] for node in placeholders(module)]


def parameters_of(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(fn).parameters)


def calls(module: fx.GraphModule) -> list[Call]:
    """Every call in the graph, as the view reads it."""
    return [call for call in map(read, module.graph.nodes) if call is not None]


def call_named(module: fx.GraphModule, name: str) -> Call:
    """The only call of that name."""
    found = [call for call in calls(module) if call.name == name]
    assert len(found) == 1, f"expected one {name}, the graph calls {[call.name for call in calls(module)]}"
    return found[0]


def effects_of(module: fx.GraphModule) -> Effects:
    """The effects of its graph."""
    return Effects(module.graph)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value.clone() if isinstance(value, Tensor) else value
        return value


def run(module: fx.GraphModule, *inputs: Any) -> dict[fx.Node, Any]:
    """The value of every node at the moment it is made, for real inputs in the order of :func:`placeholders`."""
    recorder = _Recorder(module)
    recorder.run(*arguments(module, *inputs))
    return recorder.values


def arguments(module: fx.GraphModule, *inputs: Tensor) -> list[Any]:
    """``inputs`` with the symbolic sizes between them that the graph takes as well."""
    sizes = symbols(module, *inputs)
    tensors = iter(inputs)
    given: list[Any] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        is_size = isinstance(node.meta["example_value"], torch.SymInt)
        given.append(int(sizes[node.meta["example_value"].node.expr]) if is_size else next(tensors))
    return given


def symbols(module: fx.GraphModule, *inputs: Tensor) -> Symbols:
    """The number behind every symbolic size, for real inputs in the order of :func:`placeholders`."""
    found: dict[sympy.Symbol, int] = {}
    for node, value in zip(placeholders(module), inputs, strict=True):
        for extent, size in zip(shape_of(tensor_of(node)), value.shape, strict=True):
            if isinstance(extent, sympy.Symbol):
                found[extent] = size
    return found


def number_of(size: int | sympy.Expr, known: Symbols) -> int:
    """An extent as a number."""
    return size if isinstance(size, int) else int(size.subs(known))


def at(tensor: Tensor, dims: Dims, axes: Sequence[Axis], known: Symbols | None = None) -> Tensor:
    """``tensor`` at every index: one dimension per axis of ``axes``, its own dimensions indexed as ``dims`` say.

    This is what axes mean, by way of index arrays and without any layout operation.
    """
    known = known or {}
    sizes = [number_of(axis.size, known) for axis in axes]
    order = list(axes)
    index = []
    for dim in dims:
        position = torch.zeros([1] * len(sizes), dtype=torch.int64)
        for axis in atoms(dim):
            size = sizes[order.index(axis)]
            spread = [size if other is axis else 1 for other in order]
            position = position * size + torch.arange(size).reshape(spread)
        index.append(position)
    picked = tensor[tuple(index)] if index else tensor
    return picked.expand(sizes)
