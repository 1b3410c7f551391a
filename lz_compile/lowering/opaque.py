"""Functions that a compiled graph calls as one node: the way to kernels that PyTorch cannot look into.

``opaque`` registers a function as two operators. ``layerzero::<name>`` is what a graph holds: it refuses inputs that want
a gradient, which the kernel does not compute, and calls ``layerzero::<name>_kernel``. That one is all that is left after
tracing, and so all that compiled code pays for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from lz_compile.errors import GradientUnsupportedError, KernelExecutionError, OperatorRedefinedError

_NAMESPACE = "layerzero"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class _Definition:
    operator: torch._ops.OpOverload
    identity: tuple[Any, ...]


_defined: dict[str, _Definition] = {}


def opaque(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    fallback: Callable[..., Any] | None = None,
    kernel_id: str | None = None,
    is_cuda_graph_safe: bool = False,
) -> Callable[..., Any]:
    """``function`` as one node of a compiled graph: called with tensors it runs, called with proxies it adds a call.

    Defining a name again with equal functions gives the same operator. Every process that runs a graph with the node must
    have defined it, also where the graph's code comes from a cache.

    Args:
        name: the operator is ``layerzero::<name>``.
        function: takes tensors and constants, all with type annotations, changes no input and returns fresh tensors.
        fake: the same parameters; gives empty tensors with the shapes, dtypes and strides of the results.
        fallback: the same parameters and results; it completes a call in which ``function`` raises, and runs instead of it
            once that is retired.
        kernel_id: under which name a failing ``function`` is retired, by default ``name``.
        is_cuda_graph_safe: whether CUDA graphs may capture it; otherwise Inductor leaves it out of them.

    Raises:
        OperatorRedefinedError: the name stands for other functions already.
        GradientUnsupportedError: (when called) gradients are recorded and an input requires one.
    """
    identity = (*map(_identity, (function, fake, fallback)), kernel_id, is_cuda_graph_safe)
    known = _defined.get(name)
    if known is not None:
        if known.identity != identity:
            raise OperatorRedefinedError(f"{_NAMESPACE}::{name}", function)
        return known.operator
    run = function if fallback is None else _guarded(kernel_id or name, function, fallback)
    schema = torch.library.infer_schema(function, mutates_args=())
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    kernel = _define(
        f"{name}_kernel",
        schema,
        (*tags, *(() if is_cuda_graph_safe else (torch.Tag.cudagraph_unsafe,))),
        _without_gradients(name, run),
        "CompositeExplicitAutograd",
    )
    torch.library.register_fake(f"{_NAMESPACE}::{name}_kernel", fake, lib=_LIBRARY)
    operator = _define(name, schema, tags, _without_gradients(name, kernel), "CompositeImplicitAutograd")
    _defined[name] = _Definition(operator, identity)
    return operator


def _define(
    name: str, schema: str, tags: tuple[torch.Tag, ...], call: Callable[..., Any], dispatch_key: str
) -> torch._ops.OpOverload:
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, call, dispatch_key)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def _without_gradients(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, refusing tensors that require a gradient: its result would silently have none."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_gradients(name, (*args, *kwargs.values()))
        return call(*args, **kwargs)

    return checked


def _refuse_gradients(name: str, operands: tuple[Any, ...]) -> None:
    for position, operand in enumerate(operands):
        tensors = operand if isinstance(operand, (list, tuple)) else (operand,)
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            raise GradientUnsupportedError(f"{_NAMESPACE}::{name}", position)


def _guarded(kernel_id: str, function: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        from lz_compile.runtime import health

        if health.retired(kernel_id) is not None:
            return fallback(*args, **kwargs)
        return health.guarded(kernel_id, function, complete, *args, **kwargs)

    def complete(*args: Any, **kwargs: Any) -> Any:
        from lz_compile.runtime import policy

        error = sys.exc_info()[1]  # function's: that is when this is called
        if error is not None and not policy.current().settings.fallback_enabled:
            raise KernelExecutionError(kernel_id, error) from error
        return fallback(*args, **kwargs)

    return run


def _identity(function: Callable[..., Any] | None) -> Any:
    """What makes two functions equal: their code and what it closes over (a module that is imported again is no change)."""
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    defaults: Mapping[str, Any] = function.__kwdefaults__ or {}
    return (
        function.__module__,
        function.__qualname__,
        function.__code__,
        function.__defaults__,
        tuple(sorted(defaults.items())),
        cells,
    )
