"""Puts new nodes into a graph: plain torch functions on proxies become nodes with complete metadata.

A kernel is one Python function over tensors. Called with :class:`torch.fx.Proxy` arguments it appends its operations to
a graph; called with tensors it runs. The builder also speaks axes: it brings any tensor whose axes are known into a
requested layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from lz_compile.passes.algebra import INFINITY, Leaf, Region
from lz_compile.passes.axes import Axis, Dims, Size, atoms, product
from lz_compile.passes.effects import Ambient, ambient_context
from lz_compile.passes.view import tensor_of

Groups = Sequence[Sequence[Axis]]


class _Tracer(GraphAppendingTracer):
    """Gives every new node its example value (and thereby shape, dtype and strides) as soon as it is made."""

    def __init__(self, graph: fx.Graph, finish: Callable[[fx.Node], None]) -> None:
        super().__init__(graph)
        self._finish = finish

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self._finish(node)
        return node


class Builder:
    """Appends nodes to ``graph`` at its insertion point.

    Args:
        graph: where nodes go.
        template: the node being replaced; its source position and modes are those of the new nodes.
        ambient: the modes that the new nodes will run under.
        values: the graph's proxy or tensor for each node outside (identity where ``graph`` is the node's own).
        extent: the size of an axis, as an ``int`` or as a proxy of a symbolic number.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        template: fx.Node,
        ambient: Ambient,
        values: Mapping[fx.Node, fx.Node] | None = None,
        sizes: Mapping[Axis, int] | None = None,
        shape_sources: Mapping[fx.Node, Dims] | None = None,
    ) -> None:
        self.graph = graph
        self.created: list[fx.Node] = []
        self._template = template
        self._ambient = ambient
        self._values = values
        self._sizes = sizes
        self._shape_sources = shape_sources or {}
        self._extents: dict[Axis, Any] = {}
        self._tracer = _Tracer(graph, self._finish)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The value of an existing node."""
        return fx.Proxy(node if self._values is None else self._values[node], self._tracer)

    def _finish(self, node: fx.Node) -> None:
        self.created.append(node)
        if self._values is not None:  # a validation graph runs at once and needs no metadata
            return
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self._template.meta:
                node.meta[key] = self._template.meta[key]
        node.meta["example_value"] = self._fake(node)

    def _fake(self, node: fx.Node) -> Any:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        fake_mode = tensor_of(self._template).fake_mode  # type: ignore[union-attr]
        with ExitStack() as stack:
            for manager in ambient_context(self._ambient):
                stack.enter_context(manager)
            stack.enter_context(fake_mode)
            args, kwargs = arguments
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    # ---- sizes ------------------------------------------------------------------------------------------------

    def extent(self, axis: Axis) -> Any:
        """The size of an axis: an ``int``, or a proxy where it is symbolic."""
        if self._sizes is not None:
            return self._sizes[axis]
        if isinstance(axis.size, int):
            return axis.size
        if axis not in self._extents:
            self._extents[axis] = self._symbolic(axis)
        return self._extents[axis]

    def _symbolic(self, axis: Axis) -> fx.Proxy:
        for node, dims in self._shape_sources.items():
            for position, dim in enumerate(dims):
                own = atoms(dim)
                if axis not in own or tensor_of(node) is None:
                    continue
                others = [other.size for other in own if other is not axis]
                if all(isinstance(other, int) for other in others):
                    size = self.proxy(node).size(position)
                    divisor = product(others)
                    return size if divisor == 1 else operator.floordiv(size, divisor)
        raise LookupError(f"no tensor at the edge of the match has the symbolic extent {axis.size} on a dimension of its own")

    def size(self, axes: Sequence[Axis]) -> Any:
        """The product of the sizes of ``axes``."""
        return _product([self.extent(axis) for axis in atoms(axes)])

    # ---- layout -----------------------------------------------------------------------------------------------

    def arrange(self, value: Any, dims: Dims, groups: Groups, *, expand: bool = False) -> Any:
        """``value`` with axes ``dims`` as a tensor with one dimension per group.

        Axes that a group has and the value lacks have size one; with ``expand``, or where a group is present in part
        only, they are repeated.
        """
        flat = [axis for dim in dims for axis in atoms(dim)]
        wanted = [atoms(group) for group in groups]
        order = [flat.index(axis) for group in wanted for axis in group if axis in flat]
        if len(order) != len(flat):
            raise LookupError(f"axes {flat} do not all belong to the groups {wanted}")
        if not _is_flat(dims):
            value = value.reshape([self.extent(axis) for axis in flat])
        if order != list(range(len(order))):
            value = value.permute(order)
        return self._spread(value, [[(axis, axis in flat) for axis in group] for group in wanted], expand)

    def _spread(self, value: Any, groups: list[list[tuple[Axis, bool]]], expand: bool) -> Any:
        """Insert, repeat and merge dimensions of a value that has one dimension per owned axis, in group order."""
        given: list[list[Any]] = []
        full: list[list[Any]] = []
        for group in groups:
            if not group or not (expand or any(owned for _, owned in group)):
                given.append([1])
                full.append([1])
                continue
            given.append([self.extent(axis) if owned else 1 for axis, owned in group])
            full.append([self.extent(axis) for axis, _ in group])
        if any(not owned for group in groups for _, owned in group) or not all(groups):
            value = value.reshape([size for sizes in given for size in sizes])
        if any(len(group) > 0 and not owned for group, sizes in zip(groups, full, strict=True) if sizes != [1] for _, owned in group):
            value = value.expand([size for sizes in full for size in sizes])
        if any(len(sizes) > 1 for sizes in full):
            value = value.reshape([_product(sizes) for sizes in full])
        return value

    def restore(self, value: Any, groups: Groups, dims: Dims) -> Any:
        """The inverse of :meth:`arrange`: from one dimension per group to a tensor with axes ``dims``."""
        flat = [axis for group in groups for axis in atoms(group)]
        if not all(len(atoms(group)) == 1 for group in groups):
            value = value.reshape([self.extent(axis) for axis in flat])
        order = [flat.index(axis) for dim in dims for axis in atoms(dim)]
        if order != list(range(len(order))):
            value = value.permute(order)
        if not _is_flat(dims):
            value = value.reshape([self.size(dim) for dim in dims])
        return value

    # ---- expressions ------------------------------------------------------------------------------------------

    def evaluate(self, expression: sympy.Expr, region: Region, groups: Groups, dtype: torch.dtype) -> Any:
        """An expression over leaves as tensor operations, every leaf arranged (broadcastable) to ``groups``."""
        if isinstance(expression, sympy.Symbol):
            if expression is INFINITY:
                return float("inf")
            return self._leaf_value(region.leaves[expression], groups, dtype)
        if not expression.free_symbols:
            return float(expression)
        operands = [self.evaluate(argument, region, groups, dtype) for argument in expression.args]
        if isinstance(expression, (sympy.Add, sympy.Mul)):
            combine = operator.add if isinstance(expression, sympy.Add) else operator.mul
            operands.sort(key=lambda operand: isinstance(operand, float))
            result = operands[0]
            for operand in operands[1:]:
                result = combine(result, operand)
            return result
        if isinstance(expression, sympy.Pow):
            return torch.pow(*operands)
        function = _FUNCTIONS.get(expression.func)
        if function is None:
            raise LookupError(f"no torch function for {expression.func}")
        return function(*operands)

    def _leaf_value(self, leaf: Leaf, groups: Groups, dtype: torch.dtype) -> Any:
        value = self.proxy(leaf.node)
        tensor = tensor_of(leaf.node)
        if tensor is None:
            return value
        arranged = self.arrange(value, leaf.dims, groups) if tensor.dim() else value
        return arranged.to(dtype) if tensor.dtype == torch.bool else arranged


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    sympy.tanh: torch.tanh,
}


def _is_flat(dims: Dims) -> bool:
    """Whether every dimension is exactly one axis (no merged ones, none of size one)."""
    return all(len(atoms(dim)) == 1 for dim in dims)


def _product(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = size if isinstance(total, int) and total == 1 else total * size
    return total

