"""Random equivalent spellings of linear layers with a kept and a quarantined adapter, and their reference.

A `Spelling` is one value per choice. `build()` returns a function of `inputs()` that computes the layer spelled that way,
`reference()` its value and all gradients in float64 from the mathematics, `attributes()` what a recogniser must say of it.
Which choices go together is said in `allows`; the Hypothesis strategy `spellings()` draws only combinations that obey it.

All built functions share one code object: call `torch._dynamo.reset()` between two that are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.mlp_spellings import HALF, choice

#: Largest absolute and relative error against the reference, of values of order one.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}
GROUPS, TOKENS, WIDE, OUT, RANK, FEW = 3, 10, 24, 20, 12, 4
SCALE = 0.75
THRESHOLD = 0.2

Masks = Mapping[str, Callable[[Tensor, Tensor], Tensor]]
#: Spellings of "the cosine of a and v is above zero", per token.
MASKS: Masks = {
    "cosine": lambda a, v: F.cosine_similarity(a, v, dim=-1) > 0,
    "cosine_detached": lambda a, v: torch.cosine_similarity(a.detach(), v.expand_as(a), -1, 1e-6).gt(0.0),
    "dot": lambda a, v: (a * v).sum(-1) > 0,
    "matrix_vector": lambda a, v: a @ v > 0,
    "einsum": lambda a, v: torch.einsum("...r,r->...", a, v) > 0,
    "column": lambda a, v: (a @ v[:, None]).squeeze(-1) > 0,
    "normalised": lambda a, v: (F.normalize(a, dim=-1) * F.normalize(v, dim=0)).sum(dim=-1) > 0,
    "clamped": lambda a, v: a @ v / (a.norm(dim=-1) * v.norm()).clamp_min(1e-6) > 0,
    "clamped_apart": lambda a, v: (a * v).sum(-1) / (a.norm(dim=-1).clamp(min=1e-6) * v.norm().clamp(min=1e-6)) > 0,
    "roots": lambda a, v: (a * v).sum(-1) * torch.rsqrt((a * a).sum(-1) + 1e-12) / v.square().sum().sqrt() > 0,
    "turned": lambda a, v: -F.cosine_similarity(a, -v, dim=-1) > 0,
    "zero_first": lambda a, v: torch.lt(torch.zeros(()), F.cosine_similarity(v, a, dim=-1)),
    "complement": lambda a, v: ~(F.cosine_similarity(a, v, dim=-1) <= 0),
}
#: The same with a threshold.
THRESHOLDS: Masks = {
    "cosine": lambda a, v: F.cosine_similarity(a, v, dim=-1, eps=1e-6) > THRESHOLD,
    "difference": lambda a, v: F.cosine_similarity(a, v, dim=-1, eps=1e-6) - THRESHOLD > 0,
    "distance": lambda a, v: 1 - F.cosine_similarity(a, v, dim=-1, eps=1e-6) < 1 - THRESHOLD,
    "multiplied": lambda a, v: a @ v > THRESHOLD * a.norm(dim=-1).clamp_min(1e-6) * v.norm().clamp_min(1e-6),
}
NAMES = ("x", "weight", "bias", "vh", "u", "delta", "a_q", "b_q", "gate", "v", "more")


@dataclass(frozen=True)
class Spelling:
    """One way to write a layer with both adapters; every field is an independent choice within `allows`."""

    dtype: torch.dtype = choice(torch.float32, torch.float64, torch.bfloat16)  # noqa: RUF009 - a field
    #: How the input comes, and what the adapters read.
    layout: str = choice("rollouts", "flattened", "flat", "tokens_first")
    down: str = choice("linear", "matmul", "einsum")
    delta: str = choice("after", "before", "down", "up", "merged", "diagonal", "one_einsum")
    gate: str = choice("none", "broadcast", "expanded", "repeated", "row", "token")
    mask: str = choice("none", *MASKS, *(f"threshold_{name}" for name in THRESHOLDS))
    stopped: str = choice("where", "turned", "arithmetic", "difference", "inside")
    quarantine: str = choice("linear", "matmul", "merged", "one_einsum")
    base: str = choice("linear", "bias", "apart", "none", "given", "frozen")
    order: str = choice("base_kept_quarantine", "adapters_first", "quarantine_first", "inplace", "residual")
    scale: str = choice("none", "delta", "kept", "quarantine", "both")

    # ---- what it means -----------------------------------------------------------------------------------------

    @property
    def threshold(self) -> float:
        """Of the mask's cosine."""
        return THRESHOLD if self.mask.startswith("threshold") else 0.0

    @property
    def _shape(self) -> tuple[int, ...]:
        return {"flat": (GROUPS * TOKENS,), "tokens_first": (TOKENS, GROUPS)}.get(self.layout, (GROUPS, TOKENS))

    def inputs(self, seed: int) -> dict[str, Tensor]:
        """Everything that the function takes, by name; what is trained, the input and the gate want gradients."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float = 1.0, seeks: bool = False) -> Tensor:
            value = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return value.to(self.dtype).requires_grad_(seeks)

        gate = (*self._shape, RANK) if self.gate == "token" else (GROUPS, RANK)
        return {
            "x": random(*self._shape, WIDE, seeks=True),
            "weight": random(OUT, WIDE, scale=WIDE**-0.5),
            "bias": random(OUT),
            "vh": random(RANK, WIDE, scale=WIDE**-0.5),
            "u": random(OUT, RANK, scale=RANK**-0.5),
            "delta": random(RANK, seeks=True),
            "a_q": random(FEW, WIDE, scale=WIDE**-0.5, seeks=True),
            "b_q": random(OUT, FEW, scale=FEW**-0.5, seeks=True),
            "gate": torch.ones(gate, dtype=self.dtype).requires_grad_(self.gate != "none"),
            "v": random(RANK),
            "more": random(*self._shape, OUT, seeks=True),
        }

    def attributes(self) -> dict[str, Any]:
        """What a recogniser must say of it."""
        gates = {"none": "none", "token": "token"}
        return {
            "arm": "none" if self.mask == "none" else "act",
            "gate": gates.get(self.gate, "rollout"),
            "threshold": self.threshold,
        }

    def reference(self, given: Mapping[str, Tensor], upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The value, and the gradient of everything that wants one, in float64.

        Gradients are sums over tokens that are written out: nothing here is detached.
        """
        t = {name: value.detach().double() for name, value in given.items()}
        x, dy = (self._as_rollouts(each) for each in (t["x"], upstream.double()))
        factor = {"delta": SCALE, "kept": SCALE, "both": SCALE}.get(self.scale, 1.0)
        second = SCALE if self.scale in ("quarantine", "both") else 1.0
        a, few = x @ t["vh"].T, x @ t["a_q"].T
        delta = t["delta"] * factor
        flows = torch.ones(GROUPS, TOKENS, 1, dtype=torch.float64)
        if self.mask != "none":
            cosine = (a @ t["v"]) / (a.norm(dim=-1) * t["v"].norm())
            flows = (cosine <= self.threshold).double().unsqueeze(-1)
        y = (a * delta) @ t["u"].T + second * few @ t["b_q"].T
        dx = (dy @ t["u"] * delta * flows) @ t["vh"] + second * (dy @ t["b_q"]) @ t["a_q"]
        if self.base in ("linear", "bias", "apart", "frozen"):
            y, dx = y + x @ t["weight"].T, dx + dy @ t["weight"]
        if self.base in ("bias", "apart"):
            y = y + t["bias"]
        has_more = self.base == "given" or self.order == "residual"
        y = y + self._as_rollouts(t["more"]) if has_more else y
        sent = dy @ t["u"] * a * flows
        by_token = self._restored(sent * delta)
        found = {
            "x": self._restored(dx),
            "delta": sent.sum((0, 1)) * factor,
            "a_q": second * torch.einsum("gse,eq,gsd->qd", dy, t["b_q"], x),
            "b_q": second * torch.einsum("gse,gsq->eq", dy, few),
            "gate": by_token if self.gate == "token" else (sent * delta).sum(1),
            "more": upstream.double(),
        }
        found = {name: value for name, value in found.items() if given[name].requires_grad}
        return self._restored(y), found if has_more else {name: found[name] for name in found if name != "more"}

    def _as_rollouts(self, value: Tensor) -> Tensor:
        if self.layout == "tokens_first":
            return value.transpose(0, 1)
        return value.unflatten(0, (GROUPS, TOKENS)) if self.layout == "flat" else value

    def _restored(self, value: Tensor) -> Tensor:
        if self.layout == "tokens_first":
            return value.transpose(0, 1)
        return value.flatten(0, 1) if self.layout == "flat" else value

    # ---- how it is written -------------------------------------------------------------------------------------

    def build(self) -> Callable[..., Tensor]:
        """The function of `inputs()`."""

        def layer(
            x: Tensor,
            weight: Tensor,
            bias: Tensor,
            vh: Tensor,
            u: Tensor,
            delta: Tensor,
            a_q: Tensor,
            b_q: Tensor,
            gate: Tensor,
            v: Tensor,
            more: Tensor,
        ) -> Tensor:
            tokens = x.reshape(-1, WIDE) if self.layout == "flattened" else x
            kept = self._kept(tokens, vh, u, delta, gate, v)
            second = self._quarantine(tokens, a_q, b_q)
            second = second * SCALE if self.scale in ("quarantine", "both") else second
            base = self._base(tokens, weight, bias, more)
            y = self._summed(base, kept, second)
            y = more.reshape(y.shape) + y if self.order == "residual" else y
            return y.view(*x.shape[:-1], OUT) if self.layout == "flattened" else y

        return layer

    def _kept(self, x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, gate: Tensor, v: Tensor) -> Tensor:
        delta = delta * SCALE if self.scale == "delta" else delta
        if self.delta == "one_einsum":
            kept = torch.einsum("...d,rd,r,er->...e", x, vh, delta, u)
        elif self.delta == "merged":
            kept = F.linear(x, (u * delta) @ vh)
        else:
            kept = self._in_steps(x, vh, u, delta, gate, v)
        kept = kept * SCALE if self.scale in ("kept", "both") else kept
        if self.mask != "none" and self.stopped != "inside":
            kept = self._stop(kept, self._project(x, vh), v)
        return kept

    def _in_steps(self, x: Tensor, vh: Tensor, u: Tensor, delta: Tensor, gate: Tensor, v: Tensor) -> Tensor:
        a = self._project(x, vh * delta[:, None] if self.delta == "down" else vh)
        inner = self._gated(a * delta if self.delta == "before" else a, gate)
        if self.delta == "after":
            inner = inner * delta
        if self.delta == "diagonal":
            inner = inner @ torch.diag(delta)
        if self.mask != "none" and self.stopped == "inside":
            inner = self._stop(inner, self._project(x, vh), v)
        return F.linear(inner, u * delta if self.delta == "up" else u)

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.down == "linear":
            return F.linear(x, weight)
        return x @ weight.T if self.down == "matmul" else torch.einsum("...d,rd->...r", x, weight)

    def _gated(self, a: Tensor, gate: Tensor) -> Tensor:
        if self.gate == "none":
            return a
        if self.gate == "token":
            return a * gate.view_as(a)
        if self.layout == "tokens_first":
            return a * gate
        if self.layout == "rollouts":
            match self.gate:
                case "broadcast":
                    return gate.unsqueeze(1) * a
                case "expanded":
                    return a * gate[:, None, :].expand(GROUPS, TOKENS, RANK)
                case "repeated":
                    return a * gate.repeat_interleave(TOKENS, 0).view(GROUPS, TOKENS, RANK)
                case _:
                    return torch.einsum("gsr,gr->gsr", a, gate)
        match self.gate:
            case "broadcast":
                return (a.view(GROUPS, TOKENS, RANK) * gate.view(GROUPS, 1, RANK)).flatten(0, 1)
            case "expanded":
                return a * gate.unsqueeze(1).expand(-1, TOKENS, -1).reshape(-1, RANK)
            case "repeated":
                return a.mul(gate.repeat_interleave(TOKENS, dim=0))
            case _:
                return torch.einsum("gsr,gr->gsr", a.unflatten(0, (GROUPS, TOKENS)), gate).reshape(-1, RANK)

    def _stop(self, value: Tensor, a: Tensor, v: Tensor) -> Tensor:
        named = self.mask.removeprefix("threshold_")
        mask = (THRESHOLDS if self.threshold else MASKS)[named](a, v).unsqueeze(-1)
        number = mask.to(value.dtype)
        match self.stopped:
            case "where" | "inside":
                return torch.where(mask, value.detach(), value)
            case "turned":
                return value.where(~mask, value.detach())
            case "arithmetic":
                return number * value.detach() + (1 - number) * value
            case _:
                return value - number * (value - value.detach())

    def _quarantine(self, x: Tensor, a_q: Tensor, b_q: Tensor) -> Tensor:
        match self.quarantine:
            case "linear":
                return F.linear(F.linear(x, a_q), b_q)
            case "matmul":
                return x @ a_q.mT @ b_q.mT
            case "merged":
                return F.linear(x, b_q @ a_q)
            case _:
                return torch.einsum("...d,qd,eq->...e", x, a_q, b_q)

    def _base(self, x: Tensor, weight: Tensor, bias: Tensor, more: Tensor) -> Tensor | None:
        match self.base:
            case "linear":
                return F.linear(x, weight)
            case "bias":
                return F.linear(x, weight, bias)
            case "apart":
                return x @ weight.T + bias
            case "frozen":
                return F.linear(x, weight.detach())
            case "given":
                return more.reshape(*x.shape[:-1], OUT)
        return None

    def _summed(self, base: Tensor | None, kept: Tensor, second: Tensor) -> Tensor:
        if base is None:
            return second + kept if self.order == "quarantine_first" else kept + second
        match self.order:
            case "adapters_first":
                return base + (kept + second)
            case "quarantine_first":
                return torch.add(second + base, kept)
            case "inplace":
                y = base.clone()
                y += kept
                return y.add_(second)
        return base + kept + second


def allows(s: Spelling) -> bool:
    """Whether choices go together."""
    whole = s.delta in ("merged", "one_einsum")
    if s.gate != "none" and (whole or (s.gate == "row" and s.layout == "tokens_first")):
        return False
    if s.base == "given" and s.order == "residual":  # both add the same tensor
        return False
    if s.mask == "none":
        return s.stopped == "where"
    if s.stopped == "inside" and (whole or s.delta == "up"):  # delta, which comes behind, would learn all the same
        return False
    if s.order == "inplace" and s.base == "none":
        return False
    return s.dtype not in HALF  # tokens whose cosine is at the threshold differ by rounding


def spellings() -> st.SearchStrategy[Spelling]:
    """Every combination of choices that `allows`."""
    drawn = {each.name: st.sampled_from(each.metadata["options"]) for each in fields(Spelling)}
    return st.builds(Spelling, **drawn).filter(allows)
