"""What models do to an attention beside scaling and masking it, each in many spellings composed of independent choices.

A family is a function from nothing to its spellings by name; a `Variant` is a function with its inputs. Query, key and value
are [b, h, s, d] unless a spelling says otherwise. What each family comes to is said in `test_attention_variants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 19, 23, 8
SCALE = 0.3


class Variant(NamedTuple):
    """A function and arguments for it."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]


Family = Mapping[str, Variant]


def some(family: Family, count: int, of: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Names of ``count`` spellings, evenly spread over those that ``of`` takes."""
    names = [name for name in family if of(name)]
    step = max(len(names) // count, 1) | 1  # odd, so that no choice of two is always the same
    return [names[i * step % len(names)] for i in range(count)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that are the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape)))


def qkv(queries: int = QUERIES, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    return tuple(normal(BATCH, HEADS, n, WIDTH, seed=i) for i, n in enumerate((queries, keys, keys)))  # type: ignore[return-value]


# ---- heads mixed ------------------------------------------------------------------------------------------------------

WEIGHT = nn.Parameter(normal(HEADS, HEADS) / 2 + torch.eye(HEADS))
OFFSET = nn.Parameter(normal(HEADS))

MIXERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda x: torch.einsum("gh,bhij->bgij", WEIGHT, x),
    "einsum_last": lambda x: torch.einsum("bhij,hg->bgij", x, WEIGHT),
    "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), WEIGHT).permute(0, 3, 1, 2),
    "linear_biased": lambda x: F.linear(x.permute(0, 2, 3, 1), WEIGHT, OFFSET).permute(0, 3, 1, 2),
    "convolution": lambda x: F.conv2d(x, WEIGHT[:, :, None, None]),
    "convolution_biased": lambda x: F.conv2d(x, WEIGHT[:, :, None, None], OFFSET),
    "matmul": lambda x: (WEIGHT @ x.flatten(2)).view(x.shape),
    "matmul_last": lambda x: (x.movedim(1, -1) @ WEIGHT).movedim(-1, 1),
    "tensordot": lambda x: torch.tensordot(x, WEIGHT, dims=([1], [0])).permute(0, 3, 1, 2),
    "broadcast": lambda x: (x[:, None] * WEIGHT[:, :, None, None]).sum(2),
}  # fmt: skip


def _mixed(before: Any, after: Any, norms: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    weights = (before(scores) if before else scores).softmax(-1)
    weights = after(weights) if after else weights
    if norms:
        weights = F.layer_norm(weights.movedim(1, -1), (HEADS,)).movedim(-1, 1)
    return weights @ v


def mixed_heads() -> Family:
    """CaiT mixes before and after the softmax, DeepViT after it with a norm behind, talking heads anywhere."""
    found = {}
    for (name, mixer), where in product(MIXERS.items(), ("before", "after", "both", "after_normed")):
        before, after = mixer if where in ("before", "both") else None, mixer if where != "before" else None
        found[f"{name}-{where}"] = Variant(partial(_mixed, before, after, where == "after_normed"), qkv())
    return found


# ---- distances --------------------------------------------------------------------------------------------------------


def _apart(q: Tensor, k: Tensor) -> Tensor:
    return q[..., :, None, :] - k[..., None, :, :]


def _opened(q: Tensor, k: Tensor) -> Tensor:
    return q.square().sum(-1, keepdim=True) - 2 * (q @ k.mT) + k.square().sum(-1)[..., None, :]


SQUARES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist_pow": lambda q, k: torch.cdist(q, k) ** 2,
    "cdist_square": lambda q, k: torch.cdist(q, k, p=2.0).square(),
    "cdist_times": lambda q, k: torch.cdist(q, k) * torch.cdist(q, k),
    "pow_sum": lambda q, k: _apart(q, k).pow(2).sum(-1),
    "square_sum": lambda q, k: _apart(q, k).square().sum(dim=-1),
    "key_first": lambda q, k: ((k.unsqueeze(-3) - q.unsqueeze(-2)) ** 2).sum(-1),
    "times_sum": lambda q, k: (_apart(q, k) * _apart(q, k)).sum(-1),
    "einsum": lambda q, k: torch.einsum("bhijd,bhijd->bhij", _apart(q, k), _apart(q, k)),
    "norm_pow": lambda q, k: _apart(q, k).norm(dim=-1) ** 2,
    "vector_norm": lambda q, k: torch.linalg.vector_norm(_apart(q, k), dim=-1).square(),
    "mean": lambda q, k: _apart(q, k).pow(2).mean(-1) * WIDTH,
    "opened": _opened,
    "opened_baddbmm": lambda q, k: torch.baddbmm(
        k.square().sum(-1)[..., None, :].flatten(0, 1), q.flatten(0, 1), k.mT.flatten(0, 1), alpha=-2.0
    ).unflatten(0, q.shape[:2]),
}  # fmt: skip
SCORED: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "negative": lambda squares, q, k: -squares,
    "scaled": lambda squares, q, k: squares * -0.25,
    "divided": lambda squares, q, k: -squares / (2 * 1.7**2),
    "per_head": lambda squares, q, k: -squares * OFFSET.exp()[:, None, None],
    "beside_products": lambda squares, q, k: q @ k.mT * SCALE - 0.5 * squares,
    "masked": lambda squares, q, k: (-squares).masked_fill(
        torch.ones(squares.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
    ),
}  # fmt: skip


def _by_distance(squares: Any, scored: Any, softmax: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(scored(squares(q, k), q, k)) @ v  # type: ignore[no-any-return]


def distances() -> Family:
    """Scores that are negative squared distances: the softmax of a Gaussian kernel (L2 attention, point attention)."""
    softmaxes = {
        "softmax": lambda s: s.softmax(-1),
        "kernel": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    }
    return {
        "-".join(names): Variant(partial(_by_distance, *each), qkv())
        for names, each in _combined(SQUARES, SCORED, softmaxes)
    }


def _combined(*choices: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Names and values of all combinations."""
    for pairs in product(*(choice.items() for choice in choices)):
        yield tuple(name for name, _ in pairs), tuple(value for _, value in pairs)


# ---- windows ------------------------------------------------------------------------------------------------------------

LENGTH, WINDOW = 24, 5


def _strided(x: Tensor, count: int) -> Tensor:
    x = x.contiguous()
    steps = x.stride()
    return x.as_strided((*x.shape[:2], count, WINDOW, x.shape[-1]), (*steps[:2], steps[2], steps[2], steps[3]))


#: From padded keys [b, h, count + WINDOW - 1, d] to those of each query, [b, h, count, WINDOW, d].
WINDOWED: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "unfold": lambda x, count: x.unfold(2, WINDOW, 1).transpose(-1, -2),
    "unfold_moved": lambda x, count: x.unfold(-2, WINDOW, 1).movedim(-1, -2),
    "as_strided": _strided,
    "slices": lambda x, count: torch.stack([x[:, :, i : i + count] for i in range(WINDOW)], 3),
    "slices_cat": lambda x, count: torch.cat([x[:, :, None, i : i + count] for i in range(WINDOW)], 2).transpose(2, 3),
    "narrow": lambda x, count: torch.stack([x.narrow(2, i, count) for i in range(WINDOW)], dim=-2),
    "index": lambda x, count: x[:, :, torch.arange(count)[:, None] + torch.arange(WINDOW)],
}
PADDED: Mapping[str, tuple[int, int]] = {"centred": (2, 2), "causal": (4, 0), "ahead": (0, 4)}


def _by_window(windowed: Any, pad: tuple[int, int], masks: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[2]
    keys, values = (windowed(F.pad(x, (0, 0, *pad)), count) for x in (k, v))
    scores = torch.einsum("bhsd,bhswd->bhsw", q, keys) * SCALE
    if masks:
        at = torch.arange(count)[:, None] + torch.arange(WINDOW) - pad[0]
        scores = scores.masked_fill((at < 0) | (at >= count), -torch.inf)
    return torch.einsum("bhsw,bhswd->bhsd", scores.softmax(-1), values)


def _by_products(pad: tuple[int, int], masks: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No keys are gathered: a score, and a weighted value, for each place of the window."""
    count = q.shape[2]
    keys, values = (F.pad(x, (0, 0, *pad)) for x in (k, v))
    scores = torch.stack([(q * keys[:, :, i : i + count]).sum(-1) for i in range(WINDOW)], -1) * SCALE
    if masks:
        at = torch.arange(count)[:, None] + torch.arange(WINDOW) - pad[0]
        scores = scores.masked_fill((at < 0) | (at >= count), -torch.inf)
    weights = scores.softmax(-1)
    return sum(weights[..., i : i + 1] * values[:, :, i : i + count] for i in range(WINDOW))  # type: ignore[return-value]


def windows() -> Family:
    """Each query sees the keys around it, or before it, which are gathered for it."""
    found = {}
    for (pads, pad), masks in product(PADDED.items(), (False, True)):
        ending = f"{pads}-{'masked' if masks else 'zeros'}"
        for name, windowed in WINDOWED.items():
            found[f"{name}-{ending}"] = Variant(partial(_by_window, windowed, pad, masks), qkv(LENGTH, LENGTH))
        found[f"products-{ending}"] = Variant(partial(_by_products, pad, masks), qkv(LENGTH, LENGTH))
    return found


# ---- blocks that see their neighbours -----------------------------------------------------------------------------------

BLOCK, COUNT = 6, 4


def _rolled(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[:, :, :1]), x[:, :, :-1]), 2)


def _by_pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1]


NEIGHBOURS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "cat_zeros": lambda x: torch.cat((_rolled(x), x), -2),
    "cat_pad": lambda x: torch.cat((_by_pad(x), x), -2),
    "unfold": lambda x: (
        F.pad(x.flatten(2, 3), (0, 0, BLOCK, 0)).unfold(2, 2 * BLOCK, BLOCK).transpose(-1, -2)
    ),
    "as_strided": lambda x: _overlapping(F.pad(x.flatten(2, 3), (0, 0, BLOCK, 0)).contiguous()),
}  # fmt: skip


def _overlapping(x: Tensor) -> Tensor:
    steps = x.stride()
    return x.as_strided(
        (*x.shape[:2], COUNT, 2 * BLOCK, x.shape[-1]), (*steps[:2], steps[2] * BLOCK, steps[2], steps[3])
    )


def _by_blocks(around: Any, masks: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query, key, value = (x.unflatten(2, (COUNT, BLOCK)) for x in (q, k, v))
    key, value = around(key), around(value)
    scores = query @ key.mT * SCALE
    if masks:
        scores = scores.masked_fill(torch.ones(BLOCK, 2 * BLOCK, dtype=torch.bool).triu(BLOCK + 1), -torch.inf)
    return (scores.softmax(-1) @ value).flatten(2, 3)


def blocks() -> Family:
    """Blocks of queries that see their own keys and those of the block before (Longformer, local attention)."""
    return {
        f"{name}-{'causal' if masks else 'full'}": Variant(partial(_by_blocks, around, masks), qkv(LENGTH, LENGTH))
        for (name, around), masks in product(NEIGHBOURS.items(), (False, True))
    }


# ---- relative positions -------------------------------------------------------------------------------------------------


def _skew_pad(x: Tensor) -> Tensor:
    """Transformer-XL, with as many positions as keys."""
    return F.pad(x, (1, 0)).view(*x.shape[:2], x.shape[-1] + 1, x.shape[-2])[:, :, 1:].view_as(x)


def _skew_cat(x: Tensor) -> Tensor:
    zeros = torch.zeros(*x.shape[:-1], 1)
    return torch.cat((zeros, x), -1).reshape(*x.shape[:2], x.shape[-1] + 1, x.shape[-2])[:, :, 1:].reshape(x.shape)


def _skew_around(x: Tensor) -> Tensor:
    """Conformer: of 2 n - 1 positions, those that each query sees."""
    rows, columns = x.shape[-2:]
    padded = F.pad(x, (1, 0)).reshape(*x.shape[:2], columns + 1, rows)
    return padded[:, :, 1:].reshape(x.shape)[..., : columns // 2 + 1]


def _skew_index(x: Tensor) -> Tensor:
    """XLNet: a reshape, a slice and a selection."""
    rows, columns = x.shape[-2:]
    turned = x.reshape(*x.shape[:2], columns, rows)[:, :, 1:].reshape(*x.shape[:2], rows, columns - 1)
    return turned.index_select(3, torch.arange(columns // 2 + 1))


def _skew_strided(x: Tensor) -> Tensor:
    rows, columns = x.shape[-2:]
    return x.contiguous().as_strided(
        (*x.shape[:2], rows, columns // 2 + 1), (*x.stride()[:2], columns - 1, 1), rows - 1
    )


SKEWS: Mapping[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "pad": (_skew_pad, False),
    "cat": (_skew_cat, False),
    "around": (_skew_around, True),
    "index": (_skew_index, True),
    "strided": (_skew_strided, True),
}
BIASED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "content_first": lambda content, shifted: (content + shifted) * SCALE,
    "shifted_first": lambda content, shifted: (shifted + content) / WIDTH**0.5,
    "torch_add": lambda content, shifted: torch.add(content * SCALE, shifted, alpha=SCALE),
    "causal": lambda content, shifted: ((content + shifted) * SCALE).masked_fill(
        torch.ones(content.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
    ),
    "shifted_only": lambda content, shifted: shifted * SCALE,
}  # fmt: skip


def _by_shift(skew: Any, biased: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, u: Tensor, w: Tensor) -> Tensor:
    content = (q + u[:, None]) @ k.mT
    shifted = skew((q + w[:, None]) @ table.mT)
    return biased(content, shifted).softmax(-1) @ v  # type: ignore[no-any-return]


def relative_positions() -> Family:
    """Transformer-XL, Conformer, XLNet: scores of positions, shifted row by row, beside those of contents."""
    found = {}
    for (name, (skew, is_long)), (way, biased) in product(SKEWS.items(), BIASED.items()):
        count = 2 * LENGTH - 1 if is_long else LENGTH
        others = normal(HEADS, count, WIDTH), normal(HEADS, WIDTH, seed=1), normal(HEADS, WIDTH, seed=2)
        inputs = (*qkv(LENGTH, LENGTH), *others)
        found[f"{name}-{way}"] = Variant(partial(_by_shift, skew, biased), inputs)
    return found


SPAN = 8


def _places() -> Tensor:
    return (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + SPAN).clamp(0, 2 * SPAN - 1)


GATHERED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, at: x.gather(-1, at.expand(*x.shape[:2], -1, -1)),
    "torch_gather": lambda x, at: torch.gather(x, dim=-1, index=at[None, None].expand(*x.shape[:2], LENGTH, LENGTH)),
    "take_along_dim": lambda x, at: torch.take_along_dim(x, at[None, None], -1),
    "flat": lambda x, at: x.flatten(0, 1).gather(2, at.expand(BATCH * HEADS, -1, -1)).view(BATCH, HEADS, LENGTH, LENGTH),
}  # fmt: skip
TERMS = ("c2p", "p2c", "both")


def _disentangled(
    gathered: Any, terms: str, flat: bool, q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pq: Tensor
) -> Tensor:
    scale = (WIDTH * (1 + len(terms))) ** -0.5
    bias = 0
    if terms != "p2c":
        bias = bias + gathered(q @ pk.mT * scale, _places())
    if terms != "c2p":
        bias = bias + gathered(k @ pq.mT * scale, _places().mT).mT
    if flat:
        content = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT / (WIDTH * 3) ** 0.5)
        scores = (content + bias.flatten(0, 1)).view(BATCH, HEADS, LENGTH, LENGTH)  # type: ignore[attr-defined]
    else:
        scores = q @ k.mT * scale + bias
    mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) @ v


def disentangled() -> Family:
    """DeBERTa: content to position and position to content, gathered by distance."""
    tables = normal(HEADS, 2 * SPAN, WIDTH, seed=1), normal(HEADS, 2 * SPAN, WIDTH, seed=2)
    return {
        f"{name}-{terms}-{'flat' if flat else 'heads'}": Variant(
            partial(_disentangled, gathered, terms, flat), (*qkv(LENGTH, LENGTH), *tables)
        )
        for (name, gathered), terms, flat in product(GATHERED.items(), TERMS, (False, True))
    }


# ---- packed projections -------------------------------------------------------------------------------------------------

#: Where the axis of three is among that of heads and that of features.
LAYOUTS = {"outside": (0, 1, 2), "between": (1, 0, 2), "inside": (1, 2, 0), "features_first": (0, 2, 1)}
TAKEN: Mapping[str, Callable[[Tensor, int], Any]] = {
    "unbind": lambda x, dim: x.unbind(dim),
    "select": lambda x, dim: [x.select(dim, i) for i in range(3)],
    "chunk": lambda x, dim: [each.squeeze(dim) for each in x.chunk(3, dim)],
    "split": lambda x, dim: [each.squeeze(dim) for each in x.split(1, dim)],
    "moved": lambda x, dim: list(x.movedim(dim, 0)),
    "narrow": lambda x, dim: [x.narrow(dim, i, 1).squeeze(dim) for i in range(3)],
}


def _packed(layout: tuple[int, ...], taken: Any, order: tuple[int, ...], x: Tensor, weight: Tensor) -> Tensor:
    sizes, names = (3, HEADS, WIDTH), [layout.index(i) for i in range(3)]
    whole = F.linear(x, weight).unflatten(-1, tuple(sizes[i] for i in layout))
    parts = taken(whole, 2 + names[0])
    heads_first = names[1] < names[2]
    parts = [each.transpose(1, 2) if heads_first else each.permute(0, 3, 1, 2) for each in parts]
    query, key, value = (parts[i] for i in order)
    return (query @ key.mT * SCALE).softmax(-1) @ value


def packed() -> Family:
    """One projection for query, key and value, in any order and interleaving."""
    inputs = normal(BATCH, LENGTH, 16), normal(3 * HEADS * WIDTH, 16) / 4
    return {
        f"{place}-{name}-{''.join('qkv'[i] for i in order)}": Variant(partial(_packed, layout, taken, order), inputs)
        for (place, layout), (name, taken), order in product(LAYOUTS.items(), TAKEN.items(), permutations(range(3)))
    }


FAMILIES: Mapping[str, Callable[[], Family]] = {
    "mixed_heads": mixed_heads,
    "distances": distances,
    "windows": windows,
    "blocks": blocks,
    "relative_positions": relative_positions,
    "disentangled": disentangled,
    "packed": packed,
}
