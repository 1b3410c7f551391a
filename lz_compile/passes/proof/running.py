"""The one place that runs calls of a graph in order to learn something.

A part of a graph, the calls that give some values back to what they read, is copied, resized and run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch.utils._python_dispatch import TorchDispatchMode

from lz_compile.ground.isolation import is_isolated
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.snapshot import Was
from lz_compile.passes.graph.view import called, tensors_in, value_of

SCAN = torch.ops.higher_order.scan
#: Calls that give memory as it happens to be: the same in every run, a valid index, and not what zeros written there are.
_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})


#: What two right orders of sums of order one, of made-up inputs in float64, differ by at most.
_PROBED = 1e-9


class NotRunnableError(Exception):
    """Calls that cannot be run on inputs that are made up, and why."""


#: What is called instead of a call, given its operands' values: a function or a method's name, and its arguments.
Adapt: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def no_attribute(path: str) -> Any:
    """For calls that read nothing that a module holds.

    Raises:
        NotRunnableError: always.
    """
    raise NotRunnableError(f"it reads {path}")


def run(
    calls: Iterable[fx.Node | Was],
    values: Mapping[fx.Node, Any],
    *,
    attribute: Callable[[str], Any] = no_attribute,
    adapt: Adapt | None = None,
) -> dict[fx.Node, Any]:
    """Run calls one after the other, inside of :func:`~lz_compile.ground.isolation.isolated`.

    Whoever calls decides what of the surroundings is entered there again: gradient mode, autocast.

    Args:
        calls: nodes in order, as they are or as they were; those that have a value already are left out.
        values: what is given.
        attribute: what a ``get_attr`` stands for.
        adapt: runs something else in the place of a call: another dtype, another device, other sizes.

    Returns:
        all values, those that were given included.

    Raises:
        NotRunnableError: one of them is no call.
        Exception: what a call raises.
    """
    assert is_isolated(), "what is run in order to learn something is isolated from the program around"
    found, calls = dict(values), list(calls)
    nodes = [call.node if isinstance(call, Was) else call for call in calls]
    with _watched(values, nodes):
        for node, call in zip(nodes, calls, strict=True):
            if node not in found:
                found[node] = _result(node, call, found, attribute, adapt)
    return found


def _watched(values: Mapping[fx.Node, Any], nodes: Sequence[fx.Node]) -> AbstractContextManager[Any]:
    tensors = tensors_in([*values.values(), *(value_of(node) for node in nodes)])
    if all(each.device.type == "cpu" for each in tensors):
        return nullcontext()
    return InRange()  # type: ignore[no-untyped-call]  # PyTorch's own


def _result(
    node: fx.Node,
    call: fx.Node | Was,
    values: Mapping[fx.Node, Any],
    attribute: Callable[[str], Any],
    adapt: Adapt | None,
) -> Any:
    if call.op == "get_attr":
        return attribute(str(call.target))
    if call.op not in ("call_function", "call_method"):
        raise NotRunnableError(f"{told(node)} is a {call.op}")
    args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), values.__getitem__)
    target = call.target
    if adapt is not None:
        target, args, kwargs = adapt(call, args, kwargs)
    if target is SCAN and not kwargs:  # the operator traces its step at every call; it computes a plain loop
        return run_steps(*args)
    for each in tensors_in((args, kwargs)):
        with suppress(RuntimeError):  # which the call raises as well, if it matters
            each.grad_fn  # noqa: B018  PyTorch takes a view, of which another one was written to, for a leaf until asked
    result = called(target, args, kwargs)
    if getattr(target, "__name__", str(target)).partition(".")[0] in _UNWRITTEN:
        with torch.no_grad():
            result.fill_(0.6 if result.is_floating_point() else 1)
    return result


# ---- loops -----------------------------------------------------------------------------------------------------------
# A scan as a plain loop: what the operator ``scan`` computes, one step after the other, with PyTorch's own gradients.
# Run eagerly, the operator traces its step (and, for gradients, the step's backward) at every call, which costs seconds.
# What is left to the operator in the end is run by it once, as compiled code runs it.


def run_steps(
    step: Callable[..., Sequence[torch.Tensor]],
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """The last states, and what the steps give, stacked; the arguments are those of ``torch.ops.higher_order.scan``.

    Shapes:
        ``xs`` have time as their first dimension, of at least one step; the result's stacked tensors too.
    """
    if isinstance(step, fx.GraphModule):
        step = step.forward  # calling the module prints what the graph raises
    carried = tuple(init)
    given: list[tuple[torch.Tensor, ...]] = []
    for slices in zip(*(each.unbind(0) for each in xs), strict=True):
        outputs = tuple(step(*carried, *slices, *additional_inputs))
        carried = outputs[: len(carried)]
        given.append(outputs[len(carried) :])
    return (*carried, *(torch.stack(each) for each in zip(*given, strict=True)))


def run_operator(
    step: fx.GraphModule,
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[torch.Tensor | int] = (),
) -> tuple[torch.Tensor, ...]:
    """The same by the operator, out of the graphs that AOTAutograd makes of it and of its backward."""
    operands = [*init, *xs, *additional_inputs]
    handed = [each for each in operands if isinstance(each, torch.Tensor)]

    def scan(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        given = [next(rest) if isinstance(each, torch.Tensor) else each for each in operands]
        end = len(init) + len(xs)
        return tuple(torch.ops.higher_order.scan(step, given[: len(init)], given[len(init) : end], tuple(given[end:])))

    return tuple(aot_function(scan, fw_compiler=nop)(*handed))


Sizes: TypeAlias = Mapping[Axis, int]
#: Puts a node into a graph, given the copies of what it reads.
Copier: TypeAlias = Callable[[fx.Graph, fx.Node, Mapping[fx.Node, fx.Node]], fx.Node]


@dataclass(frozen=True, kw_only=True)
class Subgraph:
    """The calls ``nodes``, in graph order, that give ``outputs``; all else that they read is in ``inputs``.

    ``inputs`` have their axes where anybody asked for them, so have the nodes in ``read``, which spell out sizes;
    ``literal_sizes`` are further numbers that are sizes. ``held`` are the loops and tensors that ``get_attr`` nodes name.
    """

    inputs: Mapping[fx.Node, Dims]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    read: Mapping[fx.Node, Dims] = field(default_factory=dict)
    literal_sizes: Mapping[int, Axis] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)

    def run(self, *values: Any) -> tuple[Any, ...]:
        """The outputs for values of the inputs; see :func:`~lz_compile.passes.proof.running.run`.

        Raises:
            Exception: what the calls raise.
        """
        given = dict(zip(self.inputs, values, strict=True))
        found = run(self.nodes, given, attribute=self.held.__getitem__)
        return tuple(found[node] for node in self.outputs)

    def copied(
        self, copier: Copier | None = None, given: Mapping[fx.Node, fx.Node] | None = None
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A graph of its own, which gives a tuple, and the copy of every node, inputs first.

        Args:
            copier: puts something else in the place of a node.
            given: nodes that are read, and are inputs under another name.
        """
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self.inputs}
        copies.update({older: copies[newer] for older, newer in (given or {}).items()})
        for node in self.nodes:
            copies[node] = copier(graph, node, copies) if copier else graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return graph, copies

    def module(self) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
        """A copy as a function of the inputs, and the copy of every node."""
        graph, copies = self.copied()
        module = fx.GraphModule(dict(self.held), graph)
        return module, dict(zip(copies, module.graph.nodes, strict=False))


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of order one, both computed in float64, are equal but for the order of sums; NaN never is."""
    return one.shape == other.shape and bool(((one - other).abs() <= _PROBED).all())


# ---- values in range -------------------------------------------------------------------------------------------------
# Indices and other values out of range are errors before an accelerator sees them. On a CPU an operator raises. On an
# accelerator it aborts the context, so that the program itself can use the device no more: made-up inputs must not do that.


#: Values, what they must reach and what they must not exceed.
Bounds: TypeAlias = tuple[torch.Tensor, float, float]


class InRange(TorchDispatchMode):
    """Run operators whose values are in range; the others raise.

    Raises:
        IndexError: a value is out of the range that an operator asks for.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What the operator gives."""
        name = func.overloadpacket.__name__.strip("_") if isinstance(func, torch._ops.OpOverload) else ""
        for values, low, high in _BOUNDS[name](*args) if name in _BOUNDS else ():
            is_real = type(values) is torch.Tensor and not values.is_meta and values.numel() > 0
            if is_real and not (values.min().item() >= low and values.max().item() <= high):
                raise IndexError(f"{name} reads a value that is not between {low} and {high}")
        return func(*args, **(kwargs or {}))


def _of_places(input: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> Iterator[Bounds]:
    dim = 0
    for each in indices:
        if each is not None and not each.dtype.is_floating_point and each.dtype not in (torch.bool, torch.uint8):
            yield each, -input.shape[dim], input.shape[dim] - 1
        dim += each.dim() if each is not None and each.dtype in (torch.bool, torch.uint8) else 1


def _of_dimension(input: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> Iterator[Bounds]:
    yield index, 0, (input.shape[dim] if input.dim() else 1) - 1


def _of_chances(input: torch.Tensor, *_: Any) -> Iterator[Bounds]:
    if input.is_floating_point():
        yield input, 0, 1


def _of_weights(input: torch.Tensor, *_: Any) -> Iterator[Bounds]:
    yield input, 0, math.inf
    yield input.sum(-1), torch.finfo(input.dtype).tiny, torch.finfo(input.dtype).max


#: By the operators' names, without underscores around them.
_BOUNDS: Mapping[str, Callable[..., Iterable[Bounds]]] = {
    **dict.fromkeys(("index", "index_put", "index_put_impl", "unsafe_index", "unsafe_index_put"), _of_places),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _of_dimension),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), _of_dimension),
    **dict.fromkeys(
        ("embedding", "embedding_bag", "embedding_bag_forward_only"), lambda x, i, *_: [(i, 0, x.shape[0] - 1)]
    ),
    **dict.fromkeys(("take", "put"), lambda x, index, *_: [(index, -x.numel(), x.numel() - 1)]),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"),
        lambda x, y, _weight, _kind, ignored, *_: [(y[y != ignored], 0, x.shape[min(1, x.dim() - 1)] - 1)],
    ),
    **dict.fromkeys(
        ("multi_margin_loss", "multilabel_margin_loss_forward"), lambda x, y, *_: [(y, 0, x.shape[-1] - 1)]
    ),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), lambda _, index, size, *__: [(index, 0, math.prod(size) - 1)]),
    "bernoulli": _of_chances,
    "multinomial": _of_weights,
    **dict.fromkeys(("poisson", "standard_gamma"), lambda x, *_: [(x, 0, math.inf)]),
    **dict.fromkeys(("assert_async", "functional_assert_async"), lambda x, *_: [(x != 0, 1, 1)]),
}
