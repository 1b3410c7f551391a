"""Functions that a compiled graph calls as one node: the way to kernels that PyTorch cannot look into.

``opaque`` registers a function as two operators. ``layerzero::<name>`` is what a graph holds: it refuses inputs that want
a gradient, which the kernel does not compute, and calls ``layerzero::<name>_kernel``. That one is all that is left after
tracing, and so all that compiled code pays for. A function with a backward has a third one, ``layerzero::<name>_backward``:
tracing leaves one of the other two in the forward graph, and that one in the backward graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad

from lz_compile.errors import GradientUnsupportedError, KernelExecutionError, OperatorRedefinedError
from lz_compile.ground import health, hooks

_NAMESPACE = "layerzero"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class _Definition:
    operator: torch._ops.OpOverload
    identity: tuple[Any, ...]
    kernel_id: str | None


_defined: dict[str, _Definition] = {}


def kernel_of(name: str) -> str:
    """Under which name the kernel of ``layerzero::<name>`` is known, also of what tracing leaves of a call of it."""
    plain = name.removesuffix("_kernel")
    known = _defined.get(plain)
    return plain if known is None or known.kernel_id is None else known.kernel_id


def opaque(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    fallback: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    kernel_id: str | None = None,
    is_cuda_graph_safe: bool = False,
    has_exact_strides: bool = False,
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
        backward: takes the gradients of the results and the same parameters, none of them by keyword only. It gives the
            gradients of the first tensors, contiguous and one or several; it runs with gradients recorded for what it
            computes itself. Inputs after those must not want a gradient.
        kernel_id: under which name a failing ``function`` is retired, by default ``name``.
        is_cuda_graph_safe: whether CUDA graphs may capture it; otherwise Inductor leaves it out of them.
        has_exact_strides: whether operands lie as the ``eager_input_vals`` of a call say, lists of tensors included (of which
            PyTorch 2.11 keeps not even the order of strides).

    Raises:
        OperatorRedefinedError: the name stands for other functions already.
        GradientUnsupportedError: (when called) gradients are recorded and an input requires one that nothing computes, or
            it has a tangent.
    """
    identity = (*map(_identity, (function, fake, fallback, backward)), kernel_id, is_cuda_graph_safe, has_exact_strides)
    known = _defined.get(name)
    if known is not None:
        if known.identity != identity:
            raise OperatorRedefinedError(f"{_NAMESPACE}::{name}", function)
        return known.operator
    run = _waiting(function) if fallback is None else guarded(kernel_id or name, function, fallback)
    unsafe = () if is_cuda_graph_safe else (torch.Tag.cudagraph_unsafe,)
    tags = (*unsafe, torch.Tag.needs_exact_strides) if has_exact_strides else unsafe
    kernel = _define_kernel(f"{name}_kernel", function, run, _without_gradients(name, run), fake, tags)
    call = _without_gradients(name, kernel)
    if backward is not None:
        full = f"{name}_backward"
        back = _recording(full, _waiting(backward))
        reverse = _define_kernel(full, backward, back, back, _gradients_like(full, kernel), unsafe)
        pass_autograd(full)
        call = _differentiable(name, kernel, reverse)
        record(f"{name}_kernel", functools.partial(_Recorded.apply, kernel, reverse))
    schema = torch.library.infer_schema(function, mutates_args=())
    operator = define(name, schema, _without_tangents(name, call))
    _defined[name] = _Definition(operator, identity, kernel_id)
    return operator


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def pass_autograd(name: str) -> None:
    """Let calls of ``layerzero::<name>`` go on to what is below autograd, which may ask autograd itself."""
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")


def define(name: str, schema: str, call: Callable[..., Any]) -> torch._ops.OpOverload:
    """The operator ``layerzero::<name>``, whose ``call`` is traced."""
    return _define(name, schema, _TAGS, call, "CompositeImplicitAutograd")


def _define_kernel(
    name: str,
    function: Callable[..., Any],
    run: Callable[..., Any],
    checked: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...],
) -> torch._ops.OpOverload:
    """What tracing leaves in a graph, with the signature of ``function``; ``run`` is called where no gradient is recorded."""
    schema = torch.library.infer_schema(function, mutates_args=())
    operator = _define(name, schema, (*_TAGS, *tags), checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    operator.directly = _directly(name, operator, run)  # type: ignore[attr-defined]  # what Inductor's code calls
    return operator


def _directly(name: str, operator: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """``operator`` without PyTorch's dispatcher, which takes longer than some kernels, where nobody but it is on the way."""
    dispatched = _without_tangents(name, operator)

    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or _profiler_enabled()
            or _len_torch_dispatch_stack()
        ):
            return dispatched(*args, **kwargs)
        return run(*args, **kwargs)

    return call


def _define(
    name: str, schema: str, tags: tuple[torch.Tag, ...], call: Callable[..., Any], dispatch_key: str
) -> torch._ops.OpOverload:
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, call, dispatch_key)
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def _waiting(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``; with ``LAYERZERO_DEBUG``, errors of the device are raised by the call that caused them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if hooks.is_debugging():
            health.wait(args, kwargs, result)
        return result

    return call


def _without_gradients(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, refusing tensors that require a gradient: its result would silently have none."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_gradients(name, (*args, *kwargs.values()))
        return call(*args, **kwargs)

    return checked


def _refuse_gradients(name: str, operands: tuple[Any, ...], first: int = 0) -> None:
    for position, operand in enumerate(operands[first:], first):
        tensors = operand if isinstance(operand, (list, tuple)) else (operand,)
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            raise GradientUnsupportedError(f"{_NAMESPACE}::{name}", position)


def _without_tangents(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, refusing tensors that have a tangent: its result would silently have none."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_forward():
            for position, operand in enumerate((*args, *kwargs.values())):
                if any(map(_has_tangent, operand if isinstance(operand, (list, tuple)) else (operand,))):
                    raise GradientUnsupportedError(f"{_NAMESPACE}::{name}", position, is_forward=True)
        return call(*args, **kwargs)

    return checked


def is_forward() -> bool:
    """Whether derivatives are computed in forward mode, also by ``torch.func.jvp``."""
    return forward_ad._current_level >= 0 and not torch.is_inference_mode_enabled()


def _has_tangent(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and forward_ad.unpack_dual(operand).tangent is not None


# ---- gradients -------------------------------------------------------------------------------------------------------


def _differentiable(name: str, kernel: torch._ops.OpOverload, backward: torch._ops.OpOverload) -> Callable[..., Any]:
    """``kernel`` with the gradients that ``backward`` gives; those of other inputs are refused."""
    count = len(backward._schema.returns)

    def call(*operands: Any) -> Any:
        if not torch.is_grad_enabled():
            return kernel(*operands)
        _refuse_gradients(name, operands, first=count)
        if not any(isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands[:count]):
            return kernel(*operands)
        return _Recorded.apply(kernel, backward, *operands)  # type: ignore[no-untyped-call]

    return call


class _Recorded(torch.autograd.Function):
    """A call of a kernel, for autograd."""

    @staticmethod
    def forward(ctx: Any, kernel: torch._ops.OpOverload, backward: torch._ops.OpOverload, *operands: Any) -> Any:
        _keep(ctx, backward, operands)
        return kernel(*operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_kept(ctx, gradients)


def _keep(ctx: Any, backward: torch._ops.OpOverload, operands: tuple[Any, ...]) -> None:
    ctx.operator = backward
    ctx.save_for_backward(*(operand for operand in operands if isinstance(operand, torch.Tensor)))
    ctx.constants = [None if isinstance(operand, torch.Tensor) else (operand,) for operand in operands]


def _kept(ctx: Any, of_results: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """The gradients of all operands, from those that :func:`_keep` kept."""
    tensors = iter(ctx.saved_tensors)
    operands = [next(tensors) if constant is None else constant[0] for constant in ctx.constants]
    found = ctx.operator(*of_results, *operands)
    gradients = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    there = (None if operand is None else each for each, operand in zip(gradients, operands, strict=False))
    return *there, *(None for _ in operands[len(gradients) :])


def record(name: str, apply: Callable[..., Any]) -> None:
    """Gradients in graphs that were traced once already, to be measured, and hold a kernel instead of its operator.

    ``apply`` (of an autograd function) takes what the kernel takes. Where nothing wants a gradient the call goes straight on,
    in half the time that ``torch.library.register_autograd`` needs for that.
    """
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def run(keys: Any, *operands: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in operands):
            return apply(*operands)
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *operands)

    _LIBRARY.impl(name, run, "Autograd", with_keyset=True)


def _recording(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, which may ask autograd; its operator falls through that, or nothing below would be recorded."""

    def run(*operands: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_gradients(name, operands)
        with torch.enable_grad():
            return backward(*(each.detach() if isinstance(each, torch.Tensor) else each for each in operands))

    return run


def _gradients_like(name: str, kernel: torch._ops.OpOverload) -> Callable[..., Any]:
    """Empty gradients of as many operands as the operator gives some of, from those of the kernel's results."""

    def fake(*given: Any) -> Any:
        results = len(kernel._schema.returns)
        count = len(getattr(getattr(torch.ops, _NAMESPACE), name).default._schema.returns)
        found = tuple(
            given[0].new_empty(0) if each is None else torch.empty_like(each, memory_format=torch.contiguous_format)
            for each in given[results : results + count]
        )
        return found[0] if count == 1 else found

    return fake


def guarded(kernel_id: str, function: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which is retired when it fails; ``fallback`` completes that call, and every one after it.

    Raises:
        KernelExecutionError: (when called) it failed, and falling back is switched off.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if health.retired(kernel_id) is not None:
            return fallback(*args, **kwargs)
        return health.guarded(kernel_id, function, complete, *args, **kwargs)

    def complete(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]  # function's: that is when this is called
        if error is not None and not hooks.falls_back():
            raise KernelExecutionError(kernel_id, error) from error
        return fallback(*args, **kwargs)

    return run


def _identity(function: Any) -> Any:
    """What makes two functions equal: their code and what it closes over (a module that is imported again is no change)."""
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(_identity(cell.cell_contents) for cell in function.__closure__ or ())
    defaults: Mapping[str, Any] = function.__kwdefaults__ or {}
    return (
        function.__module__,
        function.__qualname__,
        function.__code__,
        function.__defaults__,
        tuple(sorted(defaults.items())),
        cells,
    )
