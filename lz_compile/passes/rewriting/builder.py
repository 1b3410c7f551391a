"""Puts new nodes into a graph: plain torch functions on proxies become nodes with complete metadata.

A kernel is one Python function over tensors. Called with :class:`torch.fx.Proxy` arguments it appends its operations to
a graph; called with tensors it runs. The builder also speaks axes: it brings any tensor whose axes are known into a
requested layout.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lz_compile.ground.sizes import as_size
from lz_compile.passes.formula.algebra import Leaf
from lz_compile.passes.formula.axes import Axis, Dims, atoms
from lz_compile.passes.formula.expressions import INFINITY
from lz_compile.passes.formula.pointwise import FUNCTIONS
from lz_compile.passes.graph.emitter import provenance
from lz_compile.passes.graph.modes import Ambient, faking
from lz_compile.passes.graph.refusal import hold
from lz_compile.passes.graph.view import called, known_tensor, tensor_of
from lz_compile.passes.rewriting.proxies import NumberProxy, TensorProxy, check_lengths

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

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return (NumberProxy if tensor_of(node) is None else TensorProxy)(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(obj.node.meta["example_value"])

    def subgraph(self, name: str, function: Callable[..., Any], parameters: Sequence[str]) -> fx.Proxy:
        """A function for a higher-order operator to call: a graph of its own beside the graph, and the node that names it."""
        body = fx.Graph()
        tracer = GraphAppendingTracer(body)
        body.output(function(*(fx.Proxy(body.placeholder(each), tracer) for each in parameters)).node)
        path = hold(self.graph.owning_module, name, fx.GraphModule(torch.nn.Module(), body))
        return self.create_proxy("get_attr", path, (), {})


#: Calls that make a tensor of numbers alone.
_MAKING = frozenset(
    (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros)
)


class Making(TorchFunctionMode):
    """A kernel may make tensors of its own, as by ``torch.arange``: without a proxy among operands they become nodes, too."""

    def __init__(self, builder: GraphBuilder) -> None:
        super().__init__()
        self._builder = builder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._builder.made(function, args, kwargs) if function in _MAKING else function(*args, **kwargs)


class Builder:
    """Speaks axes over tensors, or over proxies that append to a graph at its insertion point.

    Args:
        values: what each node at the edge of the match is, a proxy or a tensor.
        sizes: the extent of every axis that is not to have its own (to run a match at other sizes).
        shape_sources: nodes with known dims, where symbolic extents may be read from.
    """

    def __init__(
        self,
        values: Callable[[fx.Node], Any],
        *,
        sizes: Mapping[Axis, int] | None = None,
        shape_sources: Mapping[fx.Node, Dims] | None = None,
    ) -> None:
        self.value = values
        self.sizes = sizes
        self._shape_sources = shape_sources or {}
        self._extents: dict[Axis, Any] = {}

    def over(self, values: Callable[[fx.Node], Any]) -> Builder:
        """The builder over other values."""
        changed = copy.copy(self)
        changed.value = values
        return changed

    # ---- sizes ------------------------------------------------------------------------------------------------

    def extent(self, axis: Axis) -> Any:
        """The size of an axis: an ``int``, or a proxy where it is symbolic."""
        if self.sizes is not None:
            if axis not in self.sizes:  # a tensor that is several operands has its axes noted once: equals are alike
                axis = next((other for other in self.sizes if other.size == axis.size), axis)
            return self.sizes[axis]
        if isinstance(axis.size, int):
            return axis.size
        if axis not in self._extents:
            self._extents[axis] = self._symbolic(axis)
        return self._extents[axis]

    def _symbolic(self, axis: Axis) -> Any:
        shown = [
            (node, at, atoms(dim))
            for node, dims in self._shape_sources.items()
            if tensor_of(node) is not None
            for at, dim in enumerate(dims)
        ]
        alone = {own[0] for *_, own in shown if len(own) == 1}
        for node, position, own in shown:
            others = [other for other in own if other is not axis]
            if axis not in own or (others and axis in alone):
                continue
            if all(isinstance(other.size, int) or other in alone for other in others):
                size = self.value(node).size(position)
                divisor = self.size(others)
                return size if not others else operator.floordiv(size, divisor)
        raise LookupError(
            f"no tensor at the edge of the match has the symbolic extent {axis.size} on a dimension of its own"
        )

    def size(self, axes: Sequence[Axis]) -> Any:
        """The product of the sizes of ``axes``."""
        return _product([self.extent(axis) for axis in atoms(axes)])

    # ---- layout -----------------------------------------------------------------------------------------------

    def arrange(self, value: Any, dims: Dims, groups: Groups, *, expand: bool = False) -> Any:
        """``value`` with axes ``dims`` as a tensor with one dimension per group.

        Axes that a group has and the value lacks have size one; with ``expand``, or where a group is present in part
        only, they are repeated.
        """
        wanted = [atoms(group) for group in groups]
        if len(dims) == len(wanted):
            pairs = [(atoms(dim), group) for dim, group in zip(dims, wanted, strict=True)]
            if all(own == group or not (own or (expand and group)) for own, group in pairs):
                return value
        flat = [axis for dim in dims for axis in atoms(dim)]
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
        present = [bool(group) and (expand or any(owned for _, owned in group)) for group in groups]
        missing = [
            axis for group, is_there in zip(groups, present, strict=True) if is_there for axis, own in group if not own
        ]
        given: list[Any] = []
        full: list[Any] = []
        for group, is_there in zip(groups, present, strict=True):
            given.extend([self.extent(axis) if owned else 1 for axis, owned in group] if is_there else [1])
            full.extend([self.extent(axis) for axis, _ in group] if is_there else [1])
        if missing or not all(present):
            value = value.reshape(given)
        if missing:
            value = value.expand(full)
        if any(len(group) > 1 for group, is_there in zip(groups, present, strict=True) if is_there):
            merged = [
                self.size([axis for axis, _ in g]) if is_there else 1
                for g, is_there in zip(groups, present, strict=True)
            ]
            value = value.reshape(merged)
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

    def evaluate(
        self,
        expression: sympy.Expr,
        leaves: Mapping[sympy.Symbol, Leaf],
        groups: Groups,
        dtype: torch.dtype,
        read: Callable[[Leaf, Groups], Any] | None = None,
    ) -> Any:
        """An expression over leaves as tensor operations, every leaf arranged (broadcastable) to ``groups``.

        A single leaf keeps its dtype; where something is computed, it is computed in ``dtype``.
        """
        if expression in leaves:
            return (read or self._leaf_value)(leaves[expression], groups)
        if expression is INFINITY:
            return math.inf
        if not expression.free_symbols:
            return float(expression)
        power = _power_of_two(expression)
        arguments = expression.args if power is None else (power,)
        operands = [self.evaluate(argument, leaves, groups, dtype, read) for argument in arguments]
        operands = [
            operand.to(dtype) if each in leaves and tensor_of(leaves[each].node) is not None else operand
            for each, operand in zip(arguments, operands, strict=True)
        ]
        if power is not None:
            return torch.exp2(*operands)
        if isinstance(expression, (sympy.Add, sympy.Mul)):
            combine = operator.add if isinstance(expression, sympy.Add) else operator.mul
            operands.sort(key=lambda operand: isinstance(operand, float))
            result = operands[0]
            for operand in operands[1:]:
                result = combine(result, operand)
            return result
        if isinstance(expression, sympy.Pow):
            return operator.pow(*operands)
        function = FUNCTIONS.get(expression.func)
        if function is None:
            raise LookupError(f"no torch function for {expression.func}")
        return function(*operands)

    def _leaf_value(self, leaf: Leaf, groups: Groups) -> Any:
        value = self.value(leaf.node)
        tensor = tensor_of(leaf.node)
        return value if tensor is None or not tensor.dim() else self.arrange(value, leaf.dims, groups)


def _power_of_two(expression: sympy.Expr) -> sympy.Expr | None:
    """``x`` of ``exp(x * log(2))`` for whole multiples, as ``exp2`` and ``ldexp`` are read: those powers are exact."""
    if not isinstance(expression, sympy.exp):
        return None
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expression.args[0])]
    shares = [float(coefficient) / math.log(2.0) for coefficient, _ in terms]
    if not all(math.isclose(share, round(share), rel_tol=1e-12) for share in shares):
        return None
    return sympy.Add(*(round(share) * rest for share, (_, rest) in zip(shares, terms, strict=True)))


def _is_flat(dims: Dims) -> bool:
    """Whether every dimension is exactly one axis (no merged ones, none of size one)."""
    return all(len(atoms(dim)) == 1 for dim in dims)


def _product(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = size if isinstance(total, int) and total == 1 else total * size
    return total


class GraphBuilder(Builder):
    """A builder that appends nodes to ``graph``, with complete metadata.

    Args:
        graph: where nodes go, at its insertion point.
        template: the node being replaced; its source position is that of the new nodes.
        ambient: the modes that the new nodes will run under.
        shape_sources: nodes with known dims, where symbolic extents may be read from.
        renamed: the nodes to take instead of others (see :class:`~lz_compile.passes.rewriting.match.Match`).
    """

    def __init__(
        self,
        graph: fx.Graph,
        template: fx.Node,
        ambient: Ambient,
        shape_sources: Mapping[fx.Node, Dims],
        renamed: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
    ) -> None:
        self.created: list[fx.Node] = []
        self._is_faking = False
        self._template = template
        self._ambient = ambient
        self._tracer = _Tracer(graph, self._finish)
        super().__init__(lambda node: TensorProxy(renamed.get(node, node), self._tracer), shape_sources=shape_sources)

    def _symbolic(self, axis: Axis) -> Any:
        for node in self._tracer.graph.nodes:
            if node is self._template:
                break
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and as_size(value) == axis.size:
                return self.value(node)
        return super()._symbolic(axis)

    def made(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor of numbers alone as a node, or as such where an example value is computed."""
        is_node = not self._is_faking
        return (
            self._tracer.create_proxy("call_function", function, args, kwargs) if is_node else function(*args, **kwargs)
        )

    def _finish(self, node: fx.Node) -> None:
        self.created.append(node)
        check_lengths(node)
        node.meta.update(provenance(self._template))
        if node.op != "get_attr":
            self._is_faking = True
            try:
                node.meta["example_value"] = self._fake(node)
            finally:
                self._is_faking = False

    def _example(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "example_value" not in node.meta:  # a graph, not a tensor
            return operator.attrgetter(str(node.target))(self._tracer.graph.owning_module)
        return node.meta["example_value"]

    def _fake(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._example)
        fake_mode = known_tensor(self._template).fake_mode  # type: ignore[attr-defined]
        with faking(fake_mode, self._ambient):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return _without_autograd(node.target, args, kwargs)
            return called(node.target, args, kwargs)


def _without_autograd(operator: torch._ops.HigherOrderOperator, args: Any, kwargs: Any) -> Any:
    """The example values of a higher-order operator: its autograd would trace graphs, in another fake mode than theirs."""
    wants_grad = torch.is_grad_enabled() and any(
        isinstance(operand, torch.Tensor) and operand.requires_grad for operand in pytree.tree_leaves((args, kwargs))
    )
    with torch.no_grad():
        outputs = operator(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda output: output.requires_grad_(wants_grad), outputs)
