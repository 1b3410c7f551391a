"""Spellings of blends, put together from independent choices, each with its value in float64; and sums that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]

#: ``w * s + (1 - w) * h``.
CONVEX: Mapping[str, Mix] = {
    "weighted_sum": lambda h, s, w: w * s + (1 - w) * h,
    "host_first": lambda h, s, w: h * (1.0 - w) + s * w,
    "delta": lambda h, s, w: h + w * (s - h),
    "delta_of_seed": lambda h, s, w: s - (1 - w) * (s - h),
    "delta_subtracted": lambda h, s, w: h - w * (h - s),
    "lerp": torch.lerp,
    "lerp_method": lambda h, s, w: h.lerp(s, w),
    "lerp_back": lambda h, s, w: torch.lerp(s, h, 1 - w),
    "addcmul": lambda h, s, w: torch.addcmul(h, w.expand_as(h), s - h),
    "addcmul_of_both": lambda h, s, w: torch.addcmul(w * s, 1 - w, h),
    "multiplied_out": lambda h, s, w: h + w * s - w * h,
    "rsub": lambda h, s, w: torch.rsub(w, 1) * h + w * s,
    "negated": lambda h, s, w: -((w - 1) * h - w * s),
    "methods": lambda h, s, w: s.mul(w).add(h.mul(w.neg().add(1))),
    "sub_with_alpha": lambda h, s, w: torch.sub(s, (1 - w) * (s - h), alpha=1),
    "halved": lambda h, s, w: (2 * w * s + (2 - 2 * w) * h) / 2 + 0.0,
    "in_place": lambda h, s, w: h.clone().mul_(1 - w).add_(w * s),
    "iadd": lambda h, s, w: _iadd((1 - w) * h, w * s),
}
#: ``h + w * s``.
RESIDUAL: Mapping[str, Mix] = {
    "sum": lambda h, s, w: h + w * s,
    "seed_first": lambda h, s, w: s * w + h,
    "addcmul": lambda h, s, w: torch.addcmul(h, w.expand_as(h), s),
    "addcmul_value": lambda h, s, w: torch.addcmul(h, s, 2 * w, value=0.5),
    "subtracted": lambda h, s, w: h - (-w) * s,
    "methods": lambda h, s, w: h.add(s.mul(w)),
    "in_place": lambda h, s, w: h.clone().add_(s * w),
    "divided": lambda h, s, w: h + s * w / 0.5 / 2,
    "scaled_as_it_is_added": lambda h, s, w: torch.add(h, s * w / 2, alpha=2),
}
#: ``m * s + (1 - m) * h`` for a condition; every other way to weigh takes it as a number.
MASKED: Mapping[str, Mix] = {
    "opposite": lambda h, s, m: m * s + ~m * h,
    "logical_not": lambda h, s, m: m * s + torch.logical_not(m) * h,
    "compared": lambda h, s, m: (m == True) * s + (m != True) * h,  # noqa: E712 a tensor is compared
    "compared_with_zero": lambda h, s, m: h * (m == 0) + m * s,
    "integers": lambda h, s, m: m.long() * s + (1 - m.long()) * h,
    "bytes": lambda h, s, m: m.byte() * s + (1 - m.to(torch.uint8)) * h,
    "compared_integers": lambda h, s, m: (m.int() != 0) * s + (m.int() == 0) * h,
    "floats": lambda h, s, m: m.float() * s + (1.0 - m.float()) * h,
    "chosen_numbers": lambda h, s, m: torch.where(m, 1.0, 0.0) * s + torch.where(m, 0.0, 1.0) * h,
    "delta": lambda h, s, m: h + m * (s - h),
}
#: ``w * s + (1 - w) * h`` for ``w = clamp(a, 0, 1)``, the host's weight bounded as well.
BOUNDED: Mapping[str, Mix] = {
    "each": lambda h, s, a: a.clamp(0.0, 1.0) * s + (1 - a).clamp(0.0, 1.0) * h,
    "host_first": lambda h, s, a: torch.clip(1 - a, 0, 1) * h + torch.clamp_max(a.relu(), 1) * s,
    "needless": lambda h, s, a: a.clamp(0, 1) * s + (1 - a.clamp(0, 1)).clamp(0, 1) * h,
    "needless_twice": lambda h, s, a: a.clamp(0, 1).clamp(-1, 2) * s + (1 - F.hardtanh(a, 0.0, 1.0)).relu() * h,
    "shifted": lambda h, s, a: (0.5 + (a - 0.5).clamp(-0.5, 0.5)) * s + (1 - a.clamp(0, 1)) * h,
    "extrema": lambda h, s, a: (
        torch.minimum(a.clamp_min(0), a.new_ones(())) * s + torch.maximum(1 - a, a.new_zeros(())).clamp_max(1) * h
    ),
}
BOUNDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda w: w,
    "clamp": lambda w: w.clamp(0.0, 1.0),
    "clip": lambda w: torch.clip(w, 0, 1),
    "clamp_each": lambda w: torch.clamp_max(torch.clamp_min(w, 0.0), 1.0),
    "hardtanh": lambda w: F.hardtanh(w, 0.0, 1.0),
    "extrema": lambda w: torch.minimum(torch.maximum(w, w.new_zeros(())), w.new_ones(())),
}


def _iadd(first: Tensor, second: Tensor) -> Tensor:
    first += second
    return first


# ---- gates -----------------------------------------------------------------------------------------------------------


def _two_maxima(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    is_largest = x == largest
    second = x.masked_fill(is_largest, -torch.inf).amax(-1)
    return largest.squeeze(-1) - torch.where(is_largest.sum(-1) > 1, largest.squeeze(-1), second)


def _of_topk(x: Tensor) -> Tensor:
    top = torch.topk(x, k=2, dim=1).values
    return top[:, 0] - top[:, 1]


def _of_unbound(x: Tensor) -> Tensor:
    first, second = x.topk(2, dim=-1)[0].unbind(-1)
    return first - second


def _of_three(x: Tensor) -> Tensor:
    top, _ = torch.topk(x, 3, -1)
    return (top[..., :1] - top[..., 1:2]).squeeze(-1)


def _of_diff(x: Tensor) -> Tensor:
    return -torch.diff(x.topk(2).values, dim=-1).squeeze(-1)


def _of_sort(x: Tensor) -> Tensor:
    ordered = torch.sort(x, dim=-1, descending=True).values
    return ordered.select(-1, 0) - ordered.select(-1, 1)


def _of_ascending(x: Tensor) -> Tensor:
    ordered, _ = x.sort(dim=1)
    return ordered[:, -1] - ordered[:, -2]


def _of_scatter(x: Tensor) -> Tensor:
    first, place = x.max(-1, keepdim=True)
    return (first - x.scatter(-1, place, -torch.inf).amax(-1, keepdim=True))[:, 0]


def _of_one_hot(x: Tensor) -> Tensor:
    hot = F.one_hot(x.argmax(-1), x.shape[-1]).bool()
    return x.amax(-1) - torch.where(hot, -torch.inf, x).max(-1).values


def _of_kth(x: Tensor) -> Tensor:
    size = x.shape[-1]
    return x.kthvalue(size).values - x.kthvalue(size - 1).values


#: The largest minus the second largest of ``[N, K]``.
MARGINS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "topk": _of_topk,
    "topk_unbound": _of_unbound,
    "topk_of_three": _of_three,
    "topk_diff": _of_diff,
    "sort": _of_sort,
    "sort_ascending": _of_ascending,
    "two_maxima": _two_maxima,
    "scatter": _of_scatter,
    "one_hot": _of_one_hot,
    "kthvalue": _of_kth,
}
#: Those that sort.
SORTED = frozenset({"topk", "topk_unbound", "topk_of_three", "topk_diff", "sort", "sort_ascending", "kthvalue"})
SIGMOIDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "method": lambda z: z.sigmoid(),
    "exponential": lambda z: 1 / (1 + torch.exp(-z)),
    "tanh": lambda z: 0.5 * (1 + torch.tanh(z / 2)),
    "complement": lambda z: 1 - torch.sigmoid(-z),
}
SLOPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "factored": lambda m: 5.0 * (m - 0.3),
    "multiplied_out": lambda m: 5.0 * m - 1.5,
    "divided": lambda m: (m - 0.3) / 0.2,
}

# ---- shapes ----------------------------------------------------------------------------------------------------------


def _loop(w: Tensor, host: Tensor, axis: int) -> Tensor:
    while w.dim() < host.dim() - axis:
        w = w.unsqueeze(-1)
    return w


def _index(w: Tensor, host: Tensor, axis: int) -> Tensor:
    return w[(slice(None), *(None for _ in range(host.dim() - axis - 1)))]


def _view(w: Tensor, host: Tensor, axis: int) -> Tensor:
    return w.view(*(-1 if dim == axis else 1 for dim in range(host.dim())))


def _expanded(w: Tensor, host: Tensor, axis: int) -> Tensor:
    return _view(w, host, axis).expand_as(host)


#: How a vector along one dimension is brought to the rank of the host.
SPREADS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "loop": _loop,
    "index": _index,
    "view": _view,
    "expanded": _expanded,
}
SHAPES = ((4, 6), (3, 5, 4), (4, 6, 3, 5), (2, 4, 3, 2, 3))


def _without_grad(h: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(h) + h


DETACHED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "method": lambda h: h.detach(),
    "no_grad": _without_grad,
    "data": lambda h: h.data,
    "kept": lambda h: h,
}
MODES = (*("convex", "per_row", "map", "masked", "bounded", "residual", "channel", "confidence", "logit", "soft_gate"),)
#: What is mixed how in a mode, where that is no other way to write a convex blend.
MIXED: Mapping[str, Mapping[str, Mix]] = {"residual": RESIDUAL, "masked": MASKED, "bounded": BOUNDED}
#: The shapes of hosts that are repeated to that of the seed; what writes into the host cannot be spelled with them.
SPREAD: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "whole": lambda shape: shape,
    "for_all_rows": lambda shape: shape[1:],
    "of_one_row": lambda shape: (1, *shape[1:]),
    "by_row": lambda shape: (shape[0], *(1 for _ in shape[1:])),
    "by_last": lambda shape: shape[-1:],
    "number": lambda shape: (),
}
_WHOLE_ONLY = frozenset({"in_place", "iadd", "addcmul"})


@dataclass(frozen=True)
class Spelling:
    """One way to write one blend. Fields that a mode has no use for are ignored."""

    mode: str = "convex"
    mixed: str = "weighted_sum"
    bounds: str = "none"
    spread: str = "loop"
    margin: str = "topk"
    sigmoid: str = "sigmoid"
    slope: str = "factored"
    shape: tuple[int, ...] = (4, 6, 3, 5)
    detached: str = "method"
    is_channels_last: bool = False
    is_sum: bool = False
    is_training: bool = True
    is_log: bool = False
    is_gate_detached: bool = False
    is_host_first: bool = False
    host: str = "whole"

    def inputs(self, seed: int = 0) -> list[Tensor]:
        """Host, seed, alpha, logits."""
        generator = torch.Generator().manual_seed(seed)
        host, grafted = (
            torch.randn(shape, generator=generator) for shape in (SPREAD[self.host](self.shape), self.shape)
        )
        if self.is_channels_last:
            host, grafted = (x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in (host, grafted))
        rows = dict.fromkeys(("per_row", "masked", "bounded"), self.shape[:1])
        shape = {"channel": self.shape[1:2], "map": self.shape, **rows}.get(self.mode, ())
        alpha = torch.rand(shape, generator=generator) * 1.4 - 0.2
        alpha = alpha > 0.5 if self.mode == "masked" else alpha
        logits = torch.randn(self.shape[0], 2 if self.mode == "soft_gate" else 7, generator=generator)
        for tensor in (host, grafted, logits):
            tensor.requires_grad_(self.is_training)
        return [host, grafted, alpha, logits]

    def build(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The function of host, seed, alpha and logits."""
        return self.blend

    def blend(self, host: Tensor, seed: Tensor, alpha: Tensor, logits: Tensor) -> Tensor:
        """The blend."""
        host = DETACHED[self.detached](host)
        seed = seed + torch.tanh(seed) if self.is_sum else seed
        if self.mode == "soft_gate":
            shares = torch.softmax(logits, -1)
            places = (1, 0) if self.is_host_first else (0, 1)
            first, second = (SPREADS[self.spread](shares[:, place], seed, 0) for place in places)
            return first * seed + second * host
        weight = self._weight(seed, alpha, logits)
        mixed = MIXED.get(self.mode, CONVEX)[self.mixed](host, seed, weight)
        if self.mode == "logit":
            return torch.log_softmax(mixed, 1) if self.is_log else mixed.softmax(dim=1)
        return mixed

    def _weight(self, seed: Tensor, alpha: Tensor, logits: Tensor) -> Tensor:
        bound = BOUNDS[self.bounds]
        if self.mode == "confidence":
            logits = logits.detach() if self.is_gate_detached else logits
            gate = SIGMOIDS[self.sigmoid](SLOPES[self.slope](MARGINS[self.margin](logits)))
            return bound(alpha * SPREADS[self.spread](gate, seed, 0))
        alpha = alpha if self.mode in ("masked", "bounded") else bound(alpha)
        return SPREADS[self.spread](alpha, seed, int(self.mode == "channel")) if alpha.dim() == 1 else alpha

    def expected(self) -> dict[str, object]:
        """Attributes of the match."""
        mode = "convex" if self.mode in ("per_row", "map", "masked", "bounded") else self.mode
        normalised = ("log_softmax" if self.is_log else "softmax") if mode == "logit" else "none"
        # of equal maxima, each way to find them without a sort has a gradient of its own
        is_left = self.is_training and not self.is_gate_detached and self.margin not in SORTED
        is_gated = mode == "confidence" and not is_left
        return {
            "mode": mode,
            "is_residual": mode == "residual",
            "has_gate": is_gated,
            "is_sorted": is_gated and self.margin in SORTED,
            "normalised": normalised,
        }


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    """Any spelling."""
    mode = draw(st.sampled_from(MODES))
    mixed = draw(st.sampled_from(sorted(MIXED.get(mode, CONVEX))))
    is_whole = mode == "residual" or mixed in _WHOLE_ONLY
    return Spelling(
        mode=mode,
        mixed=mixed,
        host="whole" if is_whole else draw(st.sampled_from(sorted(SPREAD))),
        bounds=draw(st.sampled_from(sorted(BOUNDS))),
        spread=draw(st.sampled_from(sorted(SPREADS))),
        margin=draw(st.sampled_from(sorted(MARGINS))),
        sigmoid=draw(st.sampled_from(sorted(SIGMOIDS))),
        slope=draw(st.sampled_from(sorted(SLOPES))),
        shape=draw(st.sampled_from(SHAPES)),
        detached=draw(st.sampled_from(sorted(set(DETACHED) - {"kept"}))),
        is_channels_last=draw(st.booleans()),
        is_sum=draw(st.booleans()),
        is_training=draw(st.booleans()),
        is_log=draw(st.booleans()),
        is_gate_detached=draw(st.booleans()),
        is_host_first=draw(st.booleans()),
    )


#: What would be a blend but for its arithmetic or its bounds: functions of host, seed, alpha and an integer, and the reason.
NEARLY: Mapping[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], str]] = {
    "integer": (lambda h, s, a, k: k * s + (1 - k) * h, "WEIGHT_IS_INTEGER"),
    "byte": (lambda h, s, a, k: k.byte() * s + (1 - k.byte()) * h, "WEIGHT_IS_INTEGER"),
    "wrapping_byte": (lambda h, s, a, k: (a > 0).byte() * s - ((a > 0).byte() - 1) * h, "WEIGHT_IS_INTEGER"),
    "host_bounded": (lambda h, s, a, k: a * s + (1 - a).clamp(0, 1) * h, "WEIGHTS_BOUNDED_APART"),
    "seed_bounded": (lambda h, s, a, k: a.clamp(0, 1) * s + (1 - a) * h, "WEIGHTS_BOUNDED_APART"),
    "bounded_on_one_side": (
        lambda h, s, a, k: a.clamp(0, 1) * s + (1 - a).clamp(min=0) * h,
        "WEIGHTS_BOUNDED_APART",
    ),
}
#: Functions of host, seed, alpha and a vector ``[C]`` that are no blends, whatever is detached.
DIFFERENT: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda h, s, a, v: h + s,
    "difference": lambda h, s, a, v: s - h,
    "weights_that_add_up_to_two": lambda h, s, a, v: a * s + (2 - a) * h,
    "weights_of_two_kinds": lambda h, s, a, v: a * s + (1 - v[:, None, None]) * h,
    "squared_complement": lambda h, s, a, v: a * s + (1 - a * a) * h,
    "scaled_host": lambda h, s, a, v: s + a * h,
    "both_scaled": lambda h, s, a, v: a * s + a * h,
    "product": lambda h, s, a, v: a * s * h + (1 - a) * h,
    "chosen_tensors": lambda h, s, a, v: torch.where(h > a, s, h),  # what is not chosen may be NaN
    "bounded_to_less": lambda h, s, a, v: a.clamp(0, 0.5) * s + (1 - a.clamp(0, 1)) * s.tanh() * h,
    "bounded_along_another_axis": lambda h, s, a, v: (
        v.clamp(0, 1)[:, None, None] * s + (1 - v).clamp(0, 1)[None, :, None] * h
    ),
    "different_axes": lambda h, s, a, v: v[:, None, None] * s + (1 - v[None, :, None]) * h,
}
