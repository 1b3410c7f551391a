"""The value and the gradients of a routed adapter, out of the steps of a kernel, as one operator of a graph.

The operator calls an :class:`torch.autograd.Function`, into which tracing looks: what is left of it in a compiled graph are
the steps, in the forward and in the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from lz_compile.errors import DoubleBackwardError
from lz_compile.ground.isolation import is_autocast
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.kernel_operator import signed
from lz_compile.lowering.kernels.routing.steps import Steps, products, scaled, segments
from lz_compile.lowering.opaque import define
from lz_compile.lowering.ops import routing as op
from lz_compile.lowering.ops.routing import EPS, Operands, RoutingAttrs, places

Tensor: TypeAlias = torch.Tensor

#: The operands of products, which autocast casts.
_MULTIPLIED = ("x", "vh", "u", "a_q", "b_q", "weight", "bias")


def operator(name: str, steps: Steps) -> Callable[[Operands, RoutingAttrs], Tensor]:
    """The op's kernel out of ``steps``: over tensors it runs, over proxies it is a call of ``layerzero::<name>``."""

    def run(*given: Any) -> Tensor:
        form: RoutingAttrs = decode(RoutingAttrs, given[-1])
        x = _cast(Operands(*given[:-1]))
        with torch.autocast(x.x.device.type, enabled=False) if is_autocast(x.x) else nullcontext():
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


class _Routed(torch.autograd.Function):
    """A routed adapter, for autograd. Nothing of a step is kept but what is saved for its backward."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, attrs: RoutingAttrs, *given: Any) -> Tensor:
        o = Operands(*given)
        x, u = o.x, o.u
        tokens = Tokens(x.shape[0], x.shape[1], o.count)
        place = None if o.rollout is None else places(x, o.rollout, o.num_rollouts).flatten()
        rows = x.flatten(0, 1)
        columns = steps.project(rows, o.vh, o.a_q)
        start = None if o.weight is None else torch.nn.functional.linear(rows, o.weight, o.bias)
        addends = [None if o.weight is not None else o.bias, None if o.base is None else o.base.flatten(0, 1)]
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


# ---- gradients, each by as few passes as there can be: see lowering/ops/routing.py -----------------------------------


class Tokens(NamedTuple):
    """Tokens are ``groups`` times ``length``, or packed and of ``rollouts`` rollouts."""

    groups: int
    length: int
    rollouts: int


class Call(NamedTuple):
    """What is known of a call beside its tensors: of a record, the number of columns and the dtype."""

    steps: Steps
    attrs: RoutingAttrs
    tokens: Tokens
    record: tuple[int, torch.dtype] | None


def factors(
    delta: Tensor, gate: Tensor | None, place: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """``delta`` times the gate as the rows ``[K, R]`` of :func:`~.steps.expand`, and where a token finds its own."""
    wide = torch.promote_types(torch.promote_types(delta.dtype, dtype), torch.float32)
    rows = delta.to(wide).unsqueeze(0)
    if gate is None:
        return rows, None
    if gate.dim() == 3:
        return rows * gate.flatten(0, 1), None
    if place is None:
        return rows * gate, None
    return torch.cat((rows * gate, rows)), place


class Gradients:
    """Of one call, from what its forward saved and the gradient of its result ``[G, S, E]``."""

    def __init__(self, call: Call, saved: Sequence[Tensor | None], gradient: Tensor) -> None:
        self.steps, self.attrs, self.tokens, self.record = call
        x, vh, u, delta, a_q, b_q, self.v, self.weight, self.gate, self.place, columns = saved
        assert x is not None and columns is not None, "x is given"  # noqa: PT018 one claim
        assert vh is not None and u is not None and delta is not None, "an adapter is given"  # noqa: PT018 one claim
        assert a_q is not None and b_q is not None, "a quarantine is given"  # noqa: PT018 one claim
        self.x, self.vh, self.u, self.delta, self.a_q, self.b_q = x, vh, u, delta, a_q, b_q
        self.gradient, self.rank = gradient, vh.shape[0]
        self.rows, self.dy = x.flatten(0, 1), gradient.flatten(0, 1).to(x.dtype)
        self.a, self.q = columns[:, : self.rank], columns[:, self.rank :]
        self.wide = torch.promote_types(torch.promote_types(delta.dtype, x.dtype), torch.float32)

    def of(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """In the order of the operands that are tensors, None for those that need none."""
        ways: dict[str, Callable[[], Tensor]] = {
            "x": self._of_x,
            "vh": lambda: self._scaled(self.dk).T @ self.rows,
            "u": lambda: self.dy.T @ self._scaled(self.a),
            "delta": self._of_delta,
            "a_q": lambda: self.columns[:, self.rank :].T @ self.rows,
            "b_q": self._of_b_q,
            "weight": lambda: self.dy.T @ self.rows,
            "bias": lambda: self.dy.sum(0),
            "base": lambda: self.gradient,
            "gate": self._of_gate,
            "record": self._of_record,
        }
        names = (name for name in Operands.names if name != "num_rollouts")
        pairs = zip(names, needed, strict=True)
        return [ways[name]() if is_needed and name in ways else None for name, is_needed in pairs]

    # ---- what is shared --------------------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> Tensor:
        """The gradients of both projections, before delta and gate, ``[N, R + Q]``: one pass over that of the result."""
        return self.steps.project(self.dy, self.u.T, self.b_q.T)

    @property
    def dk(self) -> Tensor:
        """Of the kept adapter."""
        return self.columns[:, : self.rank]

    @cached_property
    def direction(self) -> Tensor:
        """What is compared with, in what sums are in."""
        assert self.v is not None, "an arm has a direction"
        return self.v.to(self.wide)

    @cached_property
    def cosines_of_tokens(self) -> Tensor:
        """Of every token's projection with the direction, ``[N]``."""
        return self.steps.cosines(self.a, self.direction)

    @cached_property
    def keep(self) -> Tensor | None:
        """The tokens whose kept adapter is not detached, None for all."""
        return ~(self.cosines_of_tokens > self.attrs.threshold) if self.attrs.arm == "act" else None

    @cached_property
    def sums(self) -> Tensor:
        """What each rollout (and at last the tokens of none) sends to delta times its gate, or one sum of all."""
        return self._sums(self.keep)

    def _sums(self, keep: Tensor | None) -> Tensor:
        count, length = self.tokens.rollouts + (self.place is not None), self.tokens.length
        if self.attrs.arm != "grad" and self.record is None and (self.gate is None or self.gate.dim() == 3):
            count, length, place = 1, self.tokens.groups * self.tokens.length, None
        else:
            place = self.place
        if self.gate is None or self.gate.dim() == 2:
            return self.steps.sums(self.dk, self.a, place, keep, count, length)
        return segments(products(self.dk, self.a, keep) * self.gate.flatten(0, 1), place, count, length)

    @cached_property
    def by_rollout(self) -> Tensor:
        """What each rollout sends to delta."""
        return self._gated(self.sums)

    def _gated(self, sums: Tensor) -> Tensor:
        if self.gate is None or self.gate.dim() == 3:
            return sums
        if self.place is None:
            return sums * self.gate
        return torch.cat((sums[:-1] * self.gate, sums[-1:]))

    @cached_property
    def decided(self) -> tuple[Tensor, Tensor]:
        """The gradient of delta where it is routed by rollout, and the rollouts' cosines."""
        rollouts = self.by_rollout[: self.tokens.rollouts]
        passed, found = self.steps.decide(rollouts, self.direction, self.attrs.threshold)
        return (passed if self.place is None else passed + self.by_rollout[-1]), found

    # ---- one by one ------------------------------------------------------------------------------------------------

    def _of_x(self) -> Tensor:
        start = None if self.weight is None else self.dy @ self.weight
        rows, place = factors(self.delta, self.gate, self.place, self.x.dtype)
        found = self.steps.expand(self.columns, rows, place, self.keep, self.vh, self.a_q, start)
        return found.view(self.x.shape)

    def _scaled(self, columns: Tensor) -> Tensor:
        rows, place = factors(self.delta, self.gate, self.place, self.x.dtype)
        return scaled(columns, rows, place, self.keep).to(self.x.dtype)

    def _of_delta(self) -> Tensor:
        found = self.decided[0] if self.attrs.arm == "grad" else self.by_rollout.sum(0)
        return found.to(self.delta.dtype)

    def _of_b_q(self) -> Tensor:
        # MKL took 0.8 of the time of dy^T @ q at 2,048 tokens and 32 columns.
        return (self.q.T @ self.dy).T.contiguous()

    def _of_gate(self) -> Tensor:
        assert self.gate is not None, "what has a gradient is given"
        if self.gate.dim() == 2:
            found = self.sums[: self.tokens.rollouts] * self.delta.to(self.wide)
        else:
            found = products(self.dk, self.a, self.keep) * self.delta.to(self.wide)
        return found.view(self.gate.shape).to(self.gate.dtype)

    def _of_record(self) -> Tensor:
        """See :data:`~lz_compile.lowering.ops.routing.COLUMNS`."""
        assert self.record is not None, "what has a gradient is given"
        count, (width, dtype) = self.tokens.rollouts, self.record
        total = (self.by_rollout if self.keep is None else self._gated(self._sums(None)))[:count]
        passed = self.by_rollout[:count].norm(dim=1)
        if self.attrs.arm == "act":
            found, flagged = self._means(self.cosines_of_tokens), self._means((~self._kept()).to(self.wide))
        else:
            found = total.new_zeros(count) if self.v is None else self._cosines(total)
            flagged = (found > self.attrs.threshold).to(self.wide)
            flagged = flagged if self.attrs.arm == "grad" else torch.zeros_like(flagged)
            passed = torch.where(flagged > 0, 0.0, passed)
        figures = torch.stack((found, flagged, total.norm(dim=1), passed, torch.ones_like(passed)), 1)
        return (figures if width == figures.shape[1] else torch.cat((figures, total), 1)).to(dtype)

    def _cosines(self, total: Tensor) -> Tensor:
        return self.decided[1] if self.attrs.arm == "grad" else self.steps.cosines(total, self.direction)

    def _kept(self) -> Tensor:
        assert self.keep is not None, "the act arm leaves out tokens"
        return self.keep

    def _means(self, of_tokens: Tensor) -> Tensor:
        ones = torch.ones_like(of_tokens).unsqueeze(1)
        count = self.tokens.rollouts + (self.place is not None)
        both = torch.cat((of_tokens.unsqueeze(1), ones), 1)
        total = segments(both, self.place, count, self.tokens.length)[: self.tokens.rollouts]
        return total[:, 0] / total[:, 1].clamp_min(EPS)
