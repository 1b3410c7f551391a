"""Kernels that PyTorch cannot look into, as operators whose schema follows from the op: its operands, then its attributes.

A kernel, its backward and its fake are functions of the op's operands and attributes; what stands in a graph takes tensors
(None for those that are not given) and the attributes as text. An op is a module that has ``Operands``, ``Attributes``,
``reference``, ``fake`` and ``DIFFERENTIABLE``, the operands (the first ones) that kernels give gradients of.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import torch

from lz_compile.ground import fingerprint
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.opaque import define, opaque
from lz_compile.lowering.operands import Operands

#: ``kernel(x, attrs)``, with the operands and attributes of an op.
Kernel: TypeAlias = Callable[[Any, Any], Any]
#: ``backward(gradient, x, attrs)``, with one gradient for each result (a tuple where there are several): gradients by the
#: names of the operands; those without one may be left out.
Backward: TypeAlias = Callable[[Any, Any, Any], dict[str, torch.Tensor | None]]


def kernel_operator(
    name: str,
    op: ModuleType,
    kernel: Kernel,
    *,
    backward: Backward | None = None,
    fallback: Kernel | None = None,
    kernel_id: str | None = None,
    is_cuda_graph_safe: bool = False,
    has_fallback: bool = True,
) -> Kernel:
    """``kernel`` as one node of a graph, ``layerzero::<name>``; calls in which it fails are completed.

    Args:
        kernel: changes no operand and returns fresh tensors.
        backward: of the kernel; without one, operands that want a gradient are refused.
        fallback: completes a call in which the kernel fails, by default the op's definition.
        kernel_id: under which name it is retired when it fails, by default ``name``.
        is_cuda_graph_safe: whether CUDA graphs may capture it.
        has_fallback: whether a failing call is completed; what it raises is raised where it is not.
    """
    operator = opaque(
        name,
        _flat(op, kernel),
        _flat(op, op.fake),
        fallback=_flat(op, fresh(op, fallback or op.reference)) if has_fallback else None,
        backward=None if backward is None else _flat_backward(op, backward),
        kernel_id=kernel_id,
        is_cuda_graph_safe=is_cuda_graph_safe,
    )

    numbers, count = _numbers(op), _count(op)

    def call(x: Operands, attrs: Any) -> Any:
        given = _with_tensors(x, numbers) if numbers else x
        found = operator(*given.flat(), encode(attrs))
        return found if count == 1 else tuple([found[place] for place in range(count)])  # of a proxy, too

    return call


def when_called(module: str, name: str = "run") -> Callable[..., Any]:
    """A function of a module that is imported when it is called, as one with kernels in Triton."""

    def run(*given: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*given)

    return run


def call_operator(op_name: str, op: ModuleType, call: Callable[..., Any], **others: Any) -> Callable[..., Any]:
    """Define ``layerzero::<op_name>``, what graphs hold of calls whose kernel is chosen where they run or are traced.

    Args:
        call: takes the op's operands in one object, and ``others``.
        others: parameters by name, with their types.

    Returns:
        what takes the same, and is that operator in a graph that is traced.
    """
    count = len(op.Operands.names)

    def run(*given: Any) -> Any:
        return call(op.Operands(*given[:count]), *given[count:-1])  # the last is for caches: see traced_source

    signature = signed(run, op, {}, {**others, "source": str}, _result(op))
    operator = define(op_name, torch.library.infer_schema(signature, mutates_args=()), run)

    def traced(x: Operands, *said: Any) -> Any:
        return operator(*x.flat(), *said, fingerprint.traced_source())

    return traced


def _numbers(op: ModuleType) -> frozenset[str]:
    """The operands that may be numbers; a graph's operator takes them as tensors."""
    hints = typing.get_type_hints(op.Operands)
    return frozenset(name for name in op.Operands.names if {float, torch.Tensor} <= {*typing.get_args(hints[name])})


def _with_tensors(x: Operands, names: frozenset[str]) -> Operands:
    """Numbers as tensors without dimensions, in float64: as exact as Python's, and nothing is promoted to it."""
    like = next(each for each in x.flat() if hasattr(each, "new_full"))
    given = x.given()
    for name in names & given.keys():
        if isinstance(given[name], (int, float)):
            given[name] = like.new_full((), given[name], dtype=torch.float64)
    return type(x)(**given)


def definition(op: ModuleType) -> Kernel:
    """An op's reference, in the memory layout that its kernels give."""
    return fresh(op, op.reference)


def fresh(op: ModuleType, kernel: Kernel) -> Kernel:
    """What a function gives, in memory of its own that is laid out as by the op's kernels."""

    def run(x: Operands, attrs: Any) -> Any:
        made, found = op.fake(x, attrs), kernel(x, attrs)
        if isinstance(made, torch.Tensor):
            return made.copy_(found)
        return tuple(one.copy_(other) for one, other in zip(made, found, strict=True))

    return run


def asked(op: ModuleType, kernel: Kernel) -> Backward:
    """The backward of a kernel that autograd can see into: it is called once more, and asked."""

    def gradients(gradient: Any, x: Operands, attrs: Any) -> dict[str, torch.Tensor | None]:
        wanted = {name: each.requires_grad_() for name, each in x.given().items() if name in op.DIFFERENTIABLE}
        both = (kernel(x, attrs), gradient)
        results, given = ((each,) if isinstance(each, torch.Tensor) else each for each in both)
        known = [each.requires_grad for each in results]  # a result may be a constant
        reached, of_them = ([*itertools.compress(each, known)] for each in (results, given))
        found = torch.autograd.grad(reached, list(wanted.values()), of_them, materialize_grads=True)
        return {name: each.contiguous() for name, each in zip(wanted, found, strict=True)}

    return gradients


def _flat(op: ModuleType, function: Kernel) -> Callable[..., Any]:
    """The function over operands one by one and attributes as text."""

    def run(*given: Any) -> Any:
        return function(op.Operands(*given[:-1]), decode(op.Attributes, given[-1]))

    return signed(run, op, {}, {"attrs": str}, _result(op))


def _result(op: ModuleType) -> Any:
    """The type of what an op gives: a tensor or a tuple of them."""
    return typing.get_type_hints(op.reference)["return"]


def _count(op: ModuleType) -> int:
    return len(typing.get_args(_result(op))) or 1


def _flat_backward(op: ModuleType, backward: Backward) -> Callable[..., Any]:
    """The same of a backward. A gradient that there is not has no elements."""
    results = _count(op)

    def run(*given: Any) -> Any:
        of_results = given[0] if results == 1 else given[:results]
        found = backward(of_results, op.Operands(*given[results:-1]), decode(op.Attributes, given[-1]))
        each = [found.get(name) for name in op.DIFFERENTIABLE]
        gradients = tuple(given[0].new_empty(0) if one is None else one for one in each)
        return gradients if len(gradients) > 1 else gradients[0]

    count = len(op.DIFFERENTIABLE)
    kind = torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]  # type: ignore[misc]  # as many as there are
    first = {f"gradient_{place}" if place else "gradient": torch.Tensor for place in range(results)}
    return signed(run, op, first, {"attrs": str}, kind)


def signed(
    run: Callable[..., Any], op: ModuleType, first: dict[str, Any], last: dict[str, Any], result: Any
) -> Callable[..., Any]:
    """A function with the signature from which PyTorch reads a schema: an op's operands between some other parameters."""
    hints, numbers = typing.get_type_hints(op.Operands), _numbers(op)
    operands = {name: torch.Tensor | None if name in numbers else hints[name] for name in op.Operands.names}
    kinds = {**first, **operands, **last}
    how = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, how, annotation=kind) for name, kind in kinds.items()]
    run.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return run
