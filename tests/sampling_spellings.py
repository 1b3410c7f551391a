"""Spellings of what is done to scores before a draw, put together from independent choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

Step = Callable[[Tensor], Tensor]
Drop = Callable[[Tensor, Tensor], Tensor]
INF = math.inf


def _set(x: Tensor, dropped: Tensor) -> Tensor:
    x = x.clone()
    x[dropped] = -INF
    return x


#: Scores without those that are dropped.
DROPS: Mapping[str, Drop] = {
    "masked_fill": lambda x, dropped: x.masked_fill(dropped, -INF),
    "where": lambda x, dropped: torch.where(~dropped, x, -INF),
    "where_full": lambda x, dropped: torch.where(dropped, torch.full_like(x, -INF), x),
    "where_method": lambda x, dropped: x.where(dropped.logical_not(), torch.tensor(-INF)),
    "in_place": lambda x, dropped: x.clone().masked_fill_(dropped, -INF),
    "assigned": _set,
    "added": lambda x, dropped: x + torch.zeros_like(x).masked_fill(dropped, -INF),
}


def _by_rank(x: Tensor, k: int) -> Tensor:
    return x.argsort(dim=-1, descending=True).argsort(dim=-1) >= k


def _by_places(x: Tensor, k: int) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool).scatter(-1, x.topk(k, dim=-1).indices, False)


#: Which scores are dropped for not being among the ``k`` largest.
TOP_K: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "topk": lambda x, k: x < torch.topk(x, k)[0][..., -1, None],
    "topk_min": lambda x, k: x.topk(k, -1).values.min(-1, keepdim=True).values > x,
    "topk_select": lambda x, k: ~(x >= x.topk(k, dim=-1, largest=True)[0].select(-1, k - 1).unsqueeze(-1)),
    "negated": lambda x, k: -x > (-x).topk(k, -1, largest=False).values[..., -1:],
    "sort": lambda x, k: x < x.sort(dim=-1, descending=True).values[..., k - 1 : k],
    "sort_up": lambda x, k: x < torch.sort(x, -1)[0][..., -k].unsqueeze(-1),
    "kthvalue": lambda x, k: x.lt(x.kthvalue(x.shape[-1] - k + 1, dim=-1, keepdim=True).values),
    "rank": _by_rank,
    "places": _by_places,
}


def _shifted(x: Tensor, p: float) -> Tensor:
    ordered, places = torch.sort(x, descending=True)
    dropped = ordered.softmax(-1).cumsum(-1) > p
    dropped[..., 1:] = dropped[..., :-1].clone()
    dropped[..., 0] = False
    return dropped.scatter(-1, places, dropped)


def _before(x: Tensor, p: float) -> Tensor:
    ordered, places = x.sort(-1, descending=True)
    shares = F.softmax(ordered, dim=-1)
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, places, shares.cumsum(-1) - shares >= p)


def _upwards(x: Tensor, p: float) -> Tensor:
    ordered, places = torch.sort(x, dim=-1, descending=False)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p
    dropped[..., -1:] = 0
    return dropped.scatter(-1, places, dropped)


def _gathered_back(x: Tensor, p: float) -> Tensor:
    places = x.argsort(-1, descending=True)
    shares = x.gather(-1, places).softmax(-1)
    before = F.pad(shares.cumsum(-1)[..., :-1], (1, 0))
    return (before >= p).gather(-1, places.argsort(-1))


def _least(x: Tensor, p: float) -> Tensor:
    ordered = x.softmax(-1).sort(-1, descending=True).values
    count = (ordered.cumsum(-1) < p).sum(-1, keepdim=True)
    return x.softmax(-1) < ordered.gather(-1, count)


#: Which scores are dropped that are not needed to reach ``p``.
TOP_P: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "shifted": _shifted,
    "before": _before,
    "upwards": _upwards,
    "gathered_back": _gathered_back,
    "least": _least,
}

#: Which scores are dropped that are less than ``m`` times as likely as the likeliest.
MIN_P: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "probs": lambda x, m: x.softmax(-1) < m * x.softmax(-1).amax(-1, keepdim=True),
    "max": lambda x, m: (p := F.softmax(x, -1)) < p.max(dim=-1, keepdim=True)[0] * m,
    "scores": lambda x, m: x < x.amax(dim=-1, keepdim=True) + math.log(m),
    "logarithms": lambda x, m: (p := x.log_softmax(-1)) < p.amax(-1, keepdim=True) - (-math.log(m)),
    "ratio": lambda x, m: ((p := x.softmax(-1)) / p.max(-1, keepdim=True).values).lt(m),
}

#: What may be done to scores before.
BEFORE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda x, mask: x,
    "temperature": lambda x, mask: x / 0.7,
    "multiplied": lambda x, mask: x * 1.25,
    "in_place": lambda x, mask: x.clone().div_(0.7),
    "masked": lambda x, mask: x.masked_fill(~mask, -INF) / 0.8,
    "masked_twice": lambda x, mask: torch.where(mask.flatten(0, -2)[0], x.masked_fill(~mask, -INF), -INF),
    "biased": lambda x, mask: (x + torch.linspace(-1, 1, x.shape[-1])) / 1.5,
}

#: What becomes of scores.
AFTER: Mapping[str, Step] = {
    "scores": lambda x: x,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "exponential": lambda x: (x - x.logsumexp(-1, keepdim=True)).exp(),
    "drawn": lambda x: torch.multinomial(F.softmax(x, dim=-1).flatten(0, -2), 1),
    "greedy": lambda x: x.argmax(-1),
}


@dataclass(frozen=True)
class Spelling:
    """One chain: what is done before, filters by name and spelling in order, how they drop, and what comes after."""

    before: str
    filters: tuple[tuple[str, str], ...]
    drop: str
    after: str
    k: int = 9
    p: float = 0.85
    m: float = 0.08

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        """Of scores ``[..., N, V]`` and a mask of the same shape."""
        x = BEFORE[self.before](x, mask)
        for kind, spelled in self.filters:
            spellings, limit = {"top_k": (TOP_K, self.k), "top_p": (TOP_P, self.p), "min_p": (MIN_P, self.m)}[kind]
            x = DROPS[self.drop](x, spellings[spelled](x, limit))  # type: ignore[operator]
        return AFTER[self.after](x)


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    """Any of them."""
    filters = []
    for kind, spelled in (("top_k", TOP_K), ("top_p", TOP_P), ("min_p", MIN_P)):
        if draw(st.booleans()):
            filters.append((kind, draw(st.sampled_from(sorted(spelled)))))
    if not filters:
        filters.append(("top_k", draw(st.sampled_from(sorted(TOP_K)))))
    before, drop, after = (draw(st.sampled_from(sorted(each))) for each in (BEFORE, DROPS, AFTER))
    return Spelling(
        before,
        tuple(filters),
        drop,
        after,
        k=draw(st.integers(1, 30)),
        p=draw(st.sampled_from([0.5, 0.9, 0.95, 0.3])),
        m=draw(st.sampled_from([0.02, 0.1, 0.3])),
    )
