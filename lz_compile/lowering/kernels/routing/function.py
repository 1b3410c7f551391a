"""The value and the gradients of a routed adapter, out of the steps of a kernel, as one operator of a graph.

The operator calls an :class:`torch.autograd.Function`, into which tracing looks: what is left of it in a compiled graph are
the steps, in the forward and in the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from lz_compile.errors import DoubleBackwardError
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.kernel_operator import signed
from lz_compile.lowering.kernels.routing.gradients import Call, Gradients, Tokens, factors
from lz_compile.lowering.kernels.routing.steps import Steps
from lz_compile.lowering.opaque import define
from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import Operands, RoutingAttrs, places

Tensor: TypeAlias = torch.Tensor

#: The operands of products, which autocast casts.
_MULTIPLIED = ("x", "vh", "u", "a_q", "b_q", "weight", "bias")


def operator(name: str, steps: Steps) -> Callable[[Operands, RoutingAttrs], Tensor]:
    """The op's kernel out of ``steps``: over tensors it runs, over proxies it is a call of ``layerzero::<name>``."""

    def run(*given: Any) -> Tensor:
        form: RoutingAttrs = decode(RoutingAttrs, given[-1])
        x = _cast(Operands(*given[:-1]))
        with _without_autocast(x.x):
            found: Tensor = _Routed.apply(steps, form, *x.flat())  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return found

    schema = torch.library.infer_schema(signed(run, op, {}, {"attrs": str}, Tensor), mutates_args=())
    defined = define(name, schema, run)

    def call(x: Operands, attrs: RoutingAttrs) -> Tensor:
        found: Tensor = defined(*x.flat(), encode(attrs))
        return found

    return call


def _cast(x: Operands) -> Operands:
    """The operands of products as autocast gives them to products."""
    if not is_autocast(x.x):
        return x
    dtype = torch.get_autocast_dtype(x.x.device.type)
    given = {name: each for name, each in x.given().items() if name in _MULTIPLIED and each.dtype != torch.float64}
    return replace(x, **{name: each.to(dtype) for name, each in given.items()})


def is_autocast(x: Tensor) -> bool:
    """Whether products of ``x`` are cast: on a meta device, of which autocast knows nothing, they are not."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


class _Routed(torch.autograd.Function):
    """A routed adapter, for autograd. Nothing of a step is kept but what is saved for its backward."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, attrs: RoutingAttrs, *given: Any) -> Tensor:
        o = Operands(*given)
        x, u = o.x, o.u
        tokens = Tokens.of(x, o.num_rollouts)
        place = None if o.rollout is None else places(x, o.rollout, o.num_rollouts).flatten()
        rows = x.reshape(-1, x.shape[2])
        columns = steps.project(rows, o.vh, o.a_q)
        start = None if o.weight is None else torch.nn.functional.linear(rows, o.weight, o.bias)
        addends = [None if o.weight is not None else o.bias, None if o.base is None else o.base.reshape(-1, u.shape[0])]
        if start is None and addends[1] is not None and addends[1].dtype == x.dtype:
            start, addends[1] = addends[1], None
        out = steps.expand(columns, *factors(o.delta, o.gate, place, x.dtype), None, u.T, o.b_q.T, start)
        for addend in addends:
            out = out if addend is None else out + addend
        ctx.call = Call(steps, attrs, tokens, None if o.record is None else (o.record.shape[1], o.record.dtype))
        ctx.save_for_backward(x, o.vh, u, o.delta, o.a_q, o.b_q, o.v, o.weight, o.gate, place, columns)
        return out.to(attrs.out_dtype).view(*x.shape[:2], u.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError("lz.routed_adapter")
        number = Operands.names.index("num_rollouts")
        needed = list(ctx.needs_input_grad[2:])
        found = list(Gradients(ctx.call, ctx.saved_tensors, gradient).of((*needed[:number], *needed[number + 1 :])))
        return None, None, *found[:number], None, *found[number:]
