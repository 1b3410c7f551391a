"""The value and the gradients of a routed adapter, out of the steps of a kernel, as one operator of a graph.

The operator calls an :class:`torch.autograd.Function`, into which tracing looks: what is left of it in a compiled graph are
the steps, in the forward and in the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from lz_compile.errors import DoubleBackwardError
from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.ops.routing import RoutingAttrs, places
from lz_compile.lowering.routing_gradients import Call, Gradients, Tokens, factors
from lz_compile.lowering.routing_steps import Steps

Tensor: TypeAlias = torch.Tensor

_LIBRARY = torch.library.Library("layerzero", "FRAGMENT")


def operator(name: str, steps: Steps) -> Callable[..., Tensor]:
    """The op's kernel out of ``steps``: over tensors it runs, over proxies it is a call of ``layerzero::<name>``."""

    def run(
        x: Tensor,
        vh: Tensor,
        u: Tensor,
        delta: Tensor,
        a_q: Tensor,
        b_q: Tensor,
        v: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        base: Tensor | None,
        gate: Tensor | None,
        rollout: Tensor | None,
        num_rollouts: int | None,
        record: Tensor | None,
        attrs: str,
    ) -> Tensor:
        form: RoutingAttrs = decode(RoutingAttrs, attrs)
        given = _cast(x, vh, u, a_q, b_q, weight, bias)
        x, vh, u, a_q, b_q, weight, bias = given  # type: ignore[assignment]  # None stays None
        with _without_autocast(x):
            found: Tensor = _Routed.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                steps, form, num_rollouts, x, vh, u, delta, a_q, b_q, v, weight, bias, base, gate, rollout, record
            )
        return found

    schema = torch.library.infer_schema(run, mutates_args=())
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeImplicitAutograd")
    defined = getattr(torch.ops.layerzero, name).default

    def call(*operands: Any, attrs: RoutingAttrs) -> Tensor:
        found: Tensor = defined(*operands, _text(attrs))
        return found

    return call


@lru_cache(maxsize=1024)
def _text(attrs: RoutingAttrs) -> str:
    return encode(attrs)


def _cast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The operands of products as autocast gives them to products."""
    given = [x, *others]
    if not is_autocast(x):
        return given
    dtype = torch.get_autocast_dtype(x.device.type)
    return [each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in given]


def is_autocast(x: Tensor) -> bool:
    """Whether products of ``x`` are cast: on a meta device, of which autocast knows nothing, they are not."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


class _Routed(torch.autograd.Function):
    """A routed adapter, for autograd. Nothing of a step is kept but what is saved for its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        steps: Steps,
        attrs: RoutingAttrs,
        num_rollouts: int | None,
        x: Tensor,
        vh: Tensor,
        u: Tensor,
        delta: Tensor,
        a_q: Tensor,
        b_q: Tensor,
        v: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        base: Tensor | None,
        gate: Tensor | None,
        rollout: Tensor | None,
        record: Tensor | None,
    ) -> Tensor:
        tokens = Tokens.of(x, num_rollouts)
        place = None if rollout is None else places(x, rollout, num_rollouts).flatten()
        rows = x.reshape(-1, x.shape[2])
        columns = steps.project(rows, vh, a_q)
        start = None if weight is None else torch.nn.functional.linear(rows, weight, bias)
        addends = [None if weight is not None else bias, None if base is None else base.reshape(-1, u.shape[0])]
        if start is None and addends[1] is not None and addends[1].dtype == x.dtype:
            start, addends[1] = addends[1], None
        out = steps.expand(columns, *factors(delta, gate, place, x.dtype), None, u.T, b_q.T, start)
        for addend in addends:
            out = out if addend is None else out + addend
        ctx.call = Call(steps, attrs, tokens, None if record is None else (record.shape[1], record.dtype))
        ctx.save_for_backward(x, vh, u, delta, a_q, b_q, v, weight, gate, place, columns)
        return out.to(attrs.out_dtype).view(*x.shape[:2], u.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError("lz.routed_adapter")
        found = Gradients(ctx.call, ctx.saved_tensors, gradient).of(ctx.needs_input_grad[3:])
        return None, None, None, *found
