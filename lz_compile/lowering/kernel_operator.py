"""Kernels that PyTorch cannot look into, as operators whose schema follows from the op: its operands, then its attributes.

A kernel, its backward and its fake are functions of the op's operands and attributes; what stands in a graph takes tensors
(None for those that are not given) and the attributes as text. An op is a module that has ``Operands``, ``Attributes``,
``reference``, ``fake`` and ``DIFFERENTIABLE``, the operands (the first ones) that kernels give gradients of.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.operands import Operands

#: ``kernel(x, attrs)``, with the operands and attributes of an op.
Kernel: TypeAlias = Callable[[Any, Any], Any]
#: ``backward(gradient, x, attrs)``: gradients by the names of the operands; those without one may be left out.
Backward: TypeAlias = Callable[[torch.Tensor, Any, Any], dict[str, torch.Tensor | None]]


def kernel_operator(
    name: str,
    op: ModuleType,
    kernel: Kernel,
    *,
    backward: Backward | None = None,
    kernel_id: str | None = None,
    is_cuda_graph_safe: bool = False,
    has_fallback: bool = True,
) -> Kernel:
    """``kernel`` as one node of a graph, ``layerzero::<name>``; the op's definition completes a call in which it fails.

    Args:
        name: of the operator.
        op: module of the op.
        kernel: changes no operand and returns a fresh tensor.
        backward: of the kernel; without one, operands that want a gradient are refused.
        kernel_id: under which name it is retired when it fails, by default ``name``.
        is_cuda_graph_safe: whether CUDA graphs may capture it.
        has_fallback: whether a failing call is completed; what it raises is raised where it is not.
    """
    operator = opaque(
        name,
        _flat(op, kernel),
        _flat(op, op.fake),
        fallback=_flat(op, definition(op)) if has_fallback else None,
        backward=None if backward is None else _flat_backward(op, backward),
        kernel_id=kernel_id,
        is_cuda_graph_safe=is_cuda_graph_safe,
    )

    numbers = frozenset(name for name, kind in _kinds(op).items() if kind is _NUMBER)

    def call(x: Operands, attrs: Any) -> Any:
        given = _with_tensors(x, numbers) if numbers else x
        return operator(*given.flat(), encode(attrs))

    return call


#: The annotation, in a schema, of an operand that may be a number: a graph's operator takes it as a tensor.
_NUMBER = torch.Tensor | None


def _kinds(op: ModuleType) -> dict[str, Any]:
    """What a schema says of the operands."""
    hints = typing.get_type_hints(op.Operands)
    kinds = {name: hints[name] for name in op.Operands.names}
    return {
        name: _NUMBER if {float, torch.Tensor} <= {*typing.get_args(kind)} else kind for name, kind in kinds.items()
    }


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
    return lambda x, attrs: op.fake(x, attrs).copy_(op.reference(x, attrs))


def asked(op: ModuleType, kernel: Kernel) -> Backward:
    """The backward of a kernel that autograd can see into: it is called once more, and asked."""

    def gradients(gradient: torch.Tensor, x: Operands, attrs: Any) -> dict[str, torch.Tensor | None]:
        wanted = {name: each.requires_grad_() for name, each in x.given().items() if name in op.DIFFERENTIABLE}
        found = torch.autograd.grad(kernel(x, attrs), list(wanted.values()), gradient)
        return {name: each.contiguous() for name, each in zip(wanted, found, strict=True)}

    return gradients


def _flat(op: ModuleType, function: Kernel) -> Callable[..., Any]:
    """The function over operands one by one and attributes as text."""

    def run(*given: Any) -> Any:
        return function(op.Operands(*given[:-1]), decode(op.Attributes, given[-1]))

    return signed(run, op, {}, {"attrs": str}, torch.Tensor)


def _flat_backward(op: ModuleType, backward: Backward) -> Callable[..., Any]:
    """The same of a backward. A gradient that there is not has no elements."""

    def run(gradient: torch.Tensor, *given: Any) -> Any:
        found = backward(gradient, op.Operands(*given[:-1]), decode(op.Attributes, given[-1]))
        each = [found.get(name) for name in op.DIFFERENTIABLE]
        gradients = tuple(gradient.new_empty(0) if one is None else one for one in each)
        return gradients if len(gradients) > 1 else gradients[0]

    count = len(op.DIFFERENTIABLE)
    kind = torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]  # type: ignore[misc]  # as many as there are
    return signed(run, op, {"gradient": torch.Tensor}, {"attrs": str}, kind)


def signed(
    run: Callable[..., Any], op: ModuleType, first: dict[str, Any], last: dict[str, Any], result: Any
) -> Callable[..., Any]:
    """A function with the signature from which PyTorch reads a schema: an op's operands between some other parameters."""
    kinds = {**first, **_kinds(op), **last}
    how = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, how, annotation=kind) for name, kind in kinds.items()]
    run.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return run
