"""What models do to norms, rotations and recurrences beside the plain form, in spellings composed of independent choices.

As in `attention_variants.py`, a family is a function from nothing to its spellings by name. Norms are over the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from attention_variants import Family, Variant, normal
from torch import Tensor

WIDTH, EPS = 24, 1e-3

# ---- norms of sums ------------------------------------------------------------------------------------------------------

SUMMED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plus": lambda x, y: x + y,
    "scaled": lambda x, y: x + 0.5 * y,
    "torch_add": lambda x, y: torch.add(y, x, alpha=2.0),
    "dropped": lambda x, y: F.dropout(x, 0.1, training=False) + y,
    "gated": lambda x, y: y + x * y.sigmoid(),
    "stacked": lambda x, y: torch.stack((x, y)).sum(0),
    "sum_of_list": lambda x, y: sum((x, y, x * y)),  # type: ignore[dict-item]
    "projected": lambda x, y: x + y @ torch.eye(WIDTH),
}


def _rms(row: Tensor, weight: Tensor) -> Tensor:
    return row * (row.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _layer(row: Tensor, weight: Tensor) -> Tensor:
    mean = row.mean(-1, keepdim=True)
    return (row - mean) / torch.sqrt((row - mean).square().mean(-1, keepdim=True) + EPS) * weight


NORMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms": _rms,
    "layer": _layer,
    "F.layer_norm": lambda row, weight: F.layer_norm(row, (WIDTH,), weight, None, EPS),
    "F.rms_norm": lambda row, weight: F.rms_norm(row, (WIDTH,), weight, EPS),
    "normalize": lambda row, weight: F.normalize(row, dim=-1) * weight,
}


def _of_sum(summed: Any, norm: Any, returns: bool, x: Tensor, y: Tensor, weight: Tensor) -> Any:
    row = summed(x, y)
    out = norm(row, weight)
    return (out, row) if returns else out


def residuals() -> Family:
    """The residual is added inside of the norm, and may go on beside it."""
    inputs = normal(3, 7, WIDTH), normal(3, 7, WIDTH, seed=1), normal(WIDTH)
    return {
        f"{name}-{which}-{'returned' if returns else 'inside'}": Variant(partial(_of_sum, s, norm, returns), inputs)
        for (name, s), (which, norm), returns in product(SUMMED.items(), NORMS.items(), (False, True))
    }


# ---- norms over several tensors -----------------------------------------------------------------------------------------


def _joined(norm: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return norm(torch.cat((x[..., :10], y[..., 10:]), -1), weight)  # type: ignore[no-any-return]


def _joined_and_split(norm: Any, x: Tensor, y: Tensor, weight: Tensor) -> Any:
    return norm(torch.cat((x[..., :10], y[..., 10:]), -1), weight).split((10, WIDTH - 10), -1)


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def _statistics_of_both(ends: str, x: Tensor, y: Tensor, weight: Tensor) -> Any:
    """Root mean square of two tensors as of one, which are never joined."""
    x, y = x[..., :10], y[..., 10:]
    scale = ((_square(x) + _square(y)) / WIDTH + EPS).rsqrt()
    first, second = x * scale * weight[:10], y * scale * weight[10:]
    return torch.cat((first, second), -1) if ends == "joined" else (first, second)


def _means_of_both(ends: str, x: Tensor, y: Tensor, weight: Tensor) -> Any:
    x, y = x[..., :10], y[..., 10:]
    mean = (x.sum(-1, keepdim=True) + y.sum(-1, keepdim=True)) / WIDTH
    scale = ((_square(x - mean) + _square(y - mean)) / WIDTH + EPS).rsqrt()
    first, second = (x - mean) * scale * weight[:10], (y - mean) * scale * weight[10:]
    return torch.cat((first, second), -1) if ends == "joined" else (first, second)


def _variances_of_both(ends: str, x: Tensor, y: Tensor, weight: Tensor) -> Any:
    """The same by the mean of squares without the squared mean."""
    x, y = x[..., :10], y[..., 10:]
    mean = (x.sum(-1, keepdim=True) + y.sum(-1, keepdim=True)) / WIDTH
    scale = ((_square(x) + _square(y)) / WIDTH - mean.square() + EPS).rsqrt()
    first, second = (x - mean) * scale * weight[:10], (y - mean) * scale * weight[10:]
    return torch.cat((first, second), -1) if ends == "joined" else (first, second)


def _means_of_three(ends: str, *parts: Tensor) -> Any:
    mean = sum(each.mean(-1, keepdim=True) for each in parts) / 3
    root = (sum((each - mean).square().mean(-1, keepdim=True) for each in parts) / 3 + EPS).sqrt()
    found = tuple((each - mean) / root for each in parts)
    return torch.cat(found, -1) if ends == "joined" else found


#: Statistics of several tensors, by what they are made of.
NEVER_JOINED: Mapping[str, Callable[..., Any]] = {
    "squares": _statistics_of_both,
    "moments": _means_of_both,
    "variances": _variances_of_both,
    "three": _means_of_three,
}


def _by_the_other(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """A row divided by the root mean square of another."""
    return x * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def several() -> Family:
    """Norms over a concatenation, joined before or never."""
    inputs = normal(3, 7, WIDTH), normal(3, 7, WIDTH, seed=1), normal(WIDTH)
    found = {f"cat-{name}": Variant(partial(_joined, norm), inputs) for name, norm in NORMS.items()}
    found |= {f"cat_split-{name}": Variant(partial(_joined_and_split, norm), inputs) for name, norm in NORMS.items()}
    for name, function in NEVER_JOINED.items():
        given = (*inputs[:2], normal(3, 7, WIDTH, seed=2)) if name == "three" else inputs
        found |= {f"{name}-{ends}": Variant(partial(function, ends), given) for ends in ("joined", "apart")}
    return {**found, "by_the_other": Variant(_by_the_other, inputs)}


# ---- rotations by matrices ----------------------------------------------------------------------------------------------

TOKENS, PAIRS = 11, 8


def _cos_sin() -> tuple[Tensor, Tensor]:
    angles = normal(TOKENS, PAIRS)
    return angles.cos(), angles.sin()


def small_matrices() -> Tensor:
    """[tokens, pairs, 2, 2], a rotation for each pair."""
    cos, sin = _cos_sin()
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


def large_matrices(is_interleaved: bool) -> Tensor:
    """[tokens, features, features], block-diagonal where pairs are neighbours."""
    cos, sin = _cos_sin()
    first = torch.arange(0, 2 * PAIRS, 2) if is_interleaved else torch.arange(PAIRS)
    second = first + (1 if is_interleaved else PAIRS)
    found = torch.zeros(TOKENS, 2 * PAIRS, 2 * PAIRS)
    found[:, first, first], found[:, second, second] = cos, cos
    found[:, first, second], found[:, second, first] = -sin, sin
    return found


SMALL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, r: torch.einsum("...pi,spji->...pj", x, r) if x.dim() == 4 else torch.einsum("bhspi,spji->bhspj", x, r),
    "einsum_letters": lambda x, r: torch.einsum("spji,bhspi->bhspj", r, x),
    "einsum_ellipsis": lambda x, r: torch.einsum("...ji,...i->...j", r, x),
    "matmul": lambda x, r: (r @ x[..., None]).squeeze(-1),
    "torch_matmul": lambda x, r: torch.matmul(r, x.unsqueeze(-1))[..., 0],
    "row": lambda x, r: (x[..., None, :] @ r.mT).squeeze(-2),
    "sum": lambda x, r: (x[..., None, :] * r).sum(-1),
    "columns": lambda x, r: r[..., 0] * x[..., :1] + r[..., 1] * x[..., 1:],
}  # fmt: skip


def _by_small(turned: Any, cuts: str, x: Tensor, matrices: Tensor) -> Tensor:
    if cuts == "neighbours":
        return turned(x.unflatten(-1, (-1, 2)), matrices).flatten(-2)  # type: ignore[no-any-return]
    return turned(x.unflatten(-1, (2, -1)).transpose(-1, -2), matrices).transpose(-1, -2).flatten(-2)  # type: ignore[no-any-return]


LARGE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, r: torch.einsum("bhsi,sji->bhsj", x, r),
    "einsum_ellipsis": lambda x, r: torch.einsum("...ji,...i->...j", r, x),
    "matmul": lambda x, r: (r @ x[..., None]).squeeze(-1),
    "row": lambda x, r: (x[..., None, :] @ r.mT)[..., 0, :],
    "sum": lambda x, r: (x[..., None, :] * r).sum(-1),
}


def swapping(is_interleaved: bool) -> Tensor:
    """[features, features]: ``x @ swapping`` is ``x`` with pairs exchanged, and the first of each negated."""
    found = torch.zeros(2 * PAIRS, 2 * PAIRS)
    first = torch.arange(0, 2 * PAIRS, 2) if is_interleaved else torch.arange(PAIRS)
    second = first + (1 if is_interleaved else PAIRS)
    found[second, first], found[first, second] = -1.0, 1.0
    return found


SWAPPED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, p: x @ p,
    "linear": lambda x, p: F.linear(x, p.T),
    "einsum": lambda x, p: torch.einsum("bhsi,ij->bhsj", x, p),
}


def _by_swap(swapped: Any, repeats: bool, x: Tensor, p: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (each.repeat_interleave(2, -1) if repeats else torch.cat((each, each), -1) for each in (cos, sin))
    return x * cos + swapped(x, p) * sin  # type: ignore[no-any-return]


def rotations() -> Family:
    """Rotations as products with matrices: 2 x 2 for each pair, of all features, or one that exchanges pairs."""
    x = normal(2, 4, TOKENS, 2 * PAIRS)
    found = {
        f"small-{name}-{cuts}": Variant(partial(_by_small, turned, cuts), (x, small_matrices()))
        for (name, turned), cuts in product(SMALL.items(), ("neighbours", "halves"))
    }
    for is_interleaved in (False, True):
        cuts = "neighbours" if is_interleaved else "halves"
        matrices = large_matrices(is_interleaved)
        found |= {f"large-{name}-{cuts}": Variant(turned, (x, matrices)) for name, turned in LARGE.items()}
        given = (x, swapping(is_interleaved), *_cos_sin())
        found |= {
            f"swapped-{name}-{cuts}": Variant(partial(_by_swap, turned, is_interleaved), given)
            for name, turned in SWAPPED.items()
        }
    return found


# ---- recurrences --------------------------------------------------------------------------------------------------------


def _log_space(sums: Any, joined: Any, x: Tensor, gate: Tensor) -> Tensor:
    logs, values = F.logsigmoid(gate), x
    total = sums(logs)
    return joined(total, values)  # type: ignore[no-any-return]


SUMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "method": lambda logs: logs.cumsum(1),
    "torch": lambda logs: torch.cumsum(logs, dim=-2),
    "triangle": lambda logs: torch.ones(logs.shape[1], logs.shape[1], dtype=logs.dtype).tril() @ logs,
}
JOINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda total, values: (total + (values - total).logcumsumexp(1)).exp(),
    "exp_product": lambda total, values: total.exp() * torch.logcumsumexp(values - total, 1).exp(),
    "quotient": lambda total, values: total.exp() * ((values.exp() * (-total).exp()).cumsum(1)),
    "divided": lambda total, values: (values.exp() / total.exp()).cumsum(1) * total.exp(),
    "segsum": lambda total, values: torch.einsum(
        "btsd,bsd->btd",
        (total[:, :, None] - total[:, None])
        .masked_fill(torch.ones(total.shape[1], total.shape[1], dtype=torch.bool).triu(1)[..., None], -torch.inf)
        .exp(),
        values.exp(),
    ),
    "added": lambda total, values: ((values + -total).logcumsumexp(dim=1) + total).exp(),
}  # fmt: skip


def _by_products(joined: str, x: Tensor, gate: Tensor) -> Tensor:
    """With running products in the place of exponentials of running sums."""
    products = gate.sigmoid().cumprod(1)
    if joined == "divided":
        return products * (x / products).cumsum(1)
    return torch.cumsum(x * products.reciprocal(), 1).mul(products)


def log_space() -> Family:
    """``h[t] = a[t] h[t - 1] + b[t]`` without a loop, by sums of logarithms."""
    inputs = normal(2, 16, 17), normal(2, 16, 17, seed=1)
    found = {
        f"{name}-{way}": Variant(partial(_log_space, sums, joined), inputs)
        for (name, sums), (way, joined) in product(SUMS.items(), JOINED.items())
    }
    return found | {f"products-{way}": Variant(partial(_by_products, way), inputs) for way in ("divided", "inverted")}


def _complex_loop(spelled: str, x: Tensor, decay: Tensor, angle: Tensor) -> Tensor:
    real, imag = decay.sigmoid() * angle.cos(), decay.sigmoid() * angle.sin()
    if spelled == "complex":
        turn, state = torch.complex(real, imag), torch.zeros(x.shape[0], x.shape[2], dtype=torch.complex64)
        outs = []
        for t in range(x.shape[1]):
            state = turn * state + x[:, t]
            outs.append(state.real)
        return torch.stack(outs, 1)
    if spelled == "viewed":
        pairs, outs = torch.zeros(x.shape[0], x.shape[2], 2), []
        turn = torch.view_as_complex(torch.stack((real, imag), -1))
        for t in range(x.shape[1]):
            pairs = torch.view_as_real(torch.view_as_complex(pairs) * turn + x[:, t])
            outs.append(pairs[..., 0])
        return torch.stack(outs, 1)
    a, b, outs = torch.zeros(x.shape[0], x.shape[2]), torch.zeros(x.shape[0], x.shape[2]), []
    for t in range(x.shape[1]):
        if spelled == "pairs":
            a, b = real * a - imag * b + x[:, t], imag * a + real * b
        else:
            both = torch.stack((a, b), -1)
            matrix = torch.stack((real, imag, -imag, real), -1).unflatten(-1, (2, 2))
            both = (both[..., None, :] @ matrix).squeeze(-2)
            a, b = both[..., 0] + x[:, t], both[..., 1]
        outs.append(a)
    return torch.stack(outs, 1)


def complex_states() -> Family:
    """A state that is turned and shrinks (S4D, LRU): complex, viewed as pairs, two real ones, or turned by matrices."""
    inputs = normal(2, 16, 17), normal(17), normal(17, seed=1)
    return {
        spelled: Variant(partial(_complex_loop, spelled), inputs)
        for spelled in ("complex", "viewed", "pairs", "matrices")
    }


FAMILIES: Mapping[str, Callable[[], Family]] = {
    "residuals": residuals,
    "several": several,
    "rotations": rotations,
    "log_space": log_space,
    "complex_states": complex_states,
}
