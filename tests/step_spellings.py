"""Steps of recurrences, as functions for ``torch._higher_order_ops.scan``, in many spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

B, T, H, K, V = 2, 6, 3, 4, 5


@dataclass(frozen=True)
class Family:
    """A step, the shapes that it carries and is given, and what it must be read as.

    ``masks`` counts how many of the last tensors that it is given are truth values. ``structure`` are the structures of the
    scans that it becomes, in order: kind of decay, ``e`` for erasing, ``b`` for reads before the update.
    """

    step: Callable[..., Any]
    init: tuple[tuple[int, ...], ...]
    given: tuple[tuple[int, ...], ...]
    structure: tuple[str, ...]
    masks: int = 0
    missed: str = ""


FIVE = ((B, H, K), (B, H, K), (B, H, V), (B, H, K), (B, H))
STATE = (B, H, K, V)


def _gates(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sigmoid(a + 2), torch.sigmoid(b)


# ---- delta rules ---------------------------------------------------------------------------------------------------


def kda_einsum(S, x):
    q, k, v, a, b = x
    S = a[..., None] * S
    error = (v - torch.einsum("bhk,bhkv->bhv", k, S)) * b[..., None]
    S = S + torch.einsum("bhk,bhv->bhkv", k, error)
    return S, torch.einsum("bhk,bhkv->bhv", q, S)


def kda_matmul(S, x):
    q, k, v, a, b = x
    S = S * a.unsqueeze(-1)
    error = v.unsqueeze(-2) - k.unsqueeze(-2) @ S
    S = S + k.unsqueeze(-1) @ (b[..., None, None] * error)
    return S, (q.unsqueeze(-2) @ S).squeeze(-2)


def kda_broadcast(S, x):
    q, k, v, a, b = x
    decayed = a[..., None] * S
    read = (k[..., None] * decayed).sum(-2, keepdim=True)
    S = decayed - b[..., None, None] * k[..., None] * read + b[..., None, None] * k[..., None] * v[..., None, :]
    return S, torch.mul(q[..., None], S).sum(-2)


def kda_bmm(S, x):
    q, k, v, a, b = (each.reshape(B * H, -1) for each in x)
    S = S.reshape(B * H, K, V) * a.unsqueeze(2)
    error = b.unsqueeze(1) * (v.unsqueeze(1) - torch.bmm(k.unsqueeze(1), S))
    S = torch.baddbmm(S, k.unsqueeze(2), error)
    return S.view(B, H, K, V), torch.bmm(q.unsqueeze(1), S).view(B, H, V)


def kda_dense(S, x):
    q, k, v, a, b = x
    A = torch.diag_embed(a) - b[..., None, None] * k[..., :, None] * (a * k)[..., None, :]
    S = torch.matmul(A, S) + b[..., None, None] * k[..., :, None] * v[..., None, :]
    return S, (q[..., None, :] @ S)[:, :, 0]


def kda_identity_matrix(S, x):
    q, k, v, a, b = x
    A = torch.eye(K, dtype=S.dtype) - b[..., None, None] * torch.einsum("bhi,bhj->bhij", k, k)
    S = torch.einsum("bhij,bhjv->bhiv", A, a[..., None] * S) + torch.einsum("bhk,bhv->bhkv", k * b[..., None], v)
    return S, torch.einsum("bhk,bhkv->bhv", q, S)


def kda_transposed_state(S, x):
    q, k, v, a, b = x
    S = S * a[..., None, :]
    error = (v - (S @ k[..., None])[..., 0]) * b[..., None]
    S = torch.addcmul(S, error[..., None], k[..., None, :])
    return S, torch.einsum("bhvk,bhk->bhv", S, q)


def kda_lerp(S, x):
    q, k, v, a, b = x
    S = a[..., None] * S
    old = torch.einsum("bhk,bhkv->bhv", k, S)
    new = torch.lerp(old, v, b[..., None])
    S = S - k[..., None] * old[..., None, :] + k[..., None] * new[..., None, :]
    return S, torch.einsum("bhk,bhkv->bhv", q, S)


def kda_in_place(S, x):
    q, k, v, a, b = x
    S = S * a[..., None]
    error = v - torch.einsum("bhk,bhkv->bhv", k, S)
    error *= b[..., None]
    written = k[..., None] * error[..., None, :]
    written += S
    return written, torch.einsum("bhk,bhkv->bhv", q, written)


def kda_gates_inside(S, x):
    q, k, v, a, b = x
    a, b = _gates(a, b)
    k = F.normalize(k, dim=-1)
    S = a[..., None] * S
    S = S + k[..., None] * (b[..., None] * (v - (k[..., None] * S).sum(-2)))[..., None, :]
    y = torch.einsum("bhk,bhkv->bhv", q * K**-0.5, S)
    return S, F.rms_norm(y, (V,)) * F.silu(v)


def spike_kda(carry, x):
    S, o = carry
    q, k, v, a, b, drop = x
    decayed = a[..., None] * S
    error = (v - torch.einsum("bhk,bhkv->bhv", k, decayed)) * b[..., None]
    new = decayed + torch.einsum("bhk,bhv->bhkv", k, error)
    read = torch.einsum("bhk,bhkv->bhv", q, new)
    S = torch.where(drop[:, None, None, None], S, new)
    o = torch.where(drop[:, None, None], o, read)
    return (S, o), o.clone()


def spike_kda_masked_gates(carry, x):
    S, o = carry
    q, k, v, a, b, drop = x
    a = torch.where(drop[:, None, None], 1.0, a)
    b = b.masked_fill(drop[:, None], 0.0)
    S = a[..., None] * S
    S = S + k[..., None] * (b[..., None] * (v - (k[..., None] * S).sum(-2)))[..., None, :]
    o = torch.where(drop[:, None, None], o, torch.einsum("bhk,bhkv->bhv", q, S))
    return (S, o), o.clone()


def spike_kda_arithmetic(carry, x):
    S, o = carry
    q, k, v, a, b, drop = x
    keep = drop.to(S.dtype)[:, None, None]
    decayed = a[..., None] * S
    new = decayed + k[..., None] * (b[..., None] * (v - (k[..., None] * decayed).sum(-2)))[..., None, :]
    o = keep * o + (1 - keep) * torch.einsum("bhk,bhkv->bhv", q, new)
    S = keep[..., None] * S + (1 - keep[..., None]) * new
    return (S, o), o.clone()


def spike_kda_silent_heads(carry, x):
    S, o = carry
    q, k, v, a, b, drop, active = x
    update = ~drop[:, None] & active
    decayed = a[..., None] * S
    new = decayed + k[..., None] * (b[..., None] * (v - (k[..., None] * decayed).sum(-2)))[..., None, :]
    S = torch.where(update[..., None, None], new, S)
    o = torch.where(drop[:, None, None], o, torch.einsum("bhk,bhkv->bhv", q, S))
    return (S, o), o.clone()


def gated_delta(S, x):
    q, k, v, a, b = x
    S = S * a.mean(-1)[..., None, None]
    error = (v - (S * k.unsqueeze(-1)).sum(-2)) * b.unsqueeze(-1)
    S = S + k.unsqueeze(-1) * error.unsqueeze(-2)
    return S, (S * q.unsqueeze(-1)).sum(-2)


def delta(S, x):
    q, k, v, _, b = x
    S = S + torch.einsum("bhk,bhv->bhkv", k, b[..., None] * (v - torch.einsum("bhkv,bhk->bhv", S, k)))
    return S, torch.einsum("bhkv,bhk->bhv", S, q)


def householder_product(S, x):
    q, k, v, a, b = x
    for key in (F.normalize(k, dim=-1), F.normalize(a, dim=-1)):
        S = S + torch.einsum("bhk,bhv->bhkv", key, b[..., None] * (v - torch.einsum("bhkv,bhk->bhv", S, key)))
    return S, torch.einsum("bhkv,bhk->bhv", S, q)


def rwkv7(S, x):
    r, k, v, w, b = x
    S = S * w[..., None, :] - (S @ k[..., None]) @ (k * b[..., None])[..., None, :] + v[..., None] @ k[..., None, :]
    return S, (S @ r[..., None])[..., 0]


# ---- decays --------------------------------------------------------------------------------------------------------


def gla(S, x):
    q, k, v, a, _ = x
    S = a[..., None] * S + k[..., None] * v[..., None, :]
    return S, (q[..., None] * S).sum(-2)


def retention(S, x):
    q, k, v, _, _ = x
    gamma = 1 - torch.exp2(-5.0 - torch.arange(H, dtype=S.dtype))
    S = gamma[:, None, None] * S + torch.einsum("bhk,bhv->bhkv", k, v)
    return S, torch.einsum("bhk,bhkv->bhv", q, S)


def linear_attention(carry, x):
    S, z = carry
    q, k, v, _, _ = x
    q, k = F.elu(q) + 1, F.elu(k) + 1
    S, z = S + torch.einsum("bhk,bhv->bhkv", k, v), z + k
    return (S, z), torch.einsum("bhk,bhkv->bhv", q, S) / (q * z).sum(-1, keepdim=True)


def mamba2(S, x):
    x_t, dt, B_t, C_t = x
    dt = F.softplus(dt)
    A = -torch.linspace(0.5, 2, H, dtype=S.dtype)
    dA = torch.exp(dt * A)
    S = S * dA[..., None, None] + (dt[..., None] * x_t)[..., None] * B_t[:, None, None, :]
    return S, torch.einsum("bhpn,bn->bhp", S, C_t) + 0.5 * x_t


def mamba1(h, x):
    x_t, dt, B_t, C_t = x
    dt = F.softplus(dt)
    A = -torch.linspace(0.1, 3, 7 * K, dtype=h.dtype).reshape(7, K)
    h = h * torch.exp(dt[..., None] * A) + (dt * x_t)[..., None] * B_t[:, None]
    return h, (h @ C_t[..., None]).squeeze(-1) * F.silu(x_t)


def rwkv6(S, x):
    r, k, v, w, _ = x
    kv = k[..., None] * v[..., None, :]
    u = torch.linspace(-1, 1, H * K, dtype=S.dtype).reshape(H, K)
    y = torch.einsum("bhk,bhkv->bhv", r, S + u[..., None] * kv)
    return S * torch.exp(-torch.exp(w))[..., None] + kv, y


def token_shift(carry, x):
    S, last = carry
    q, k, v, a, _ = x
    mixed = torch.lerp(last, k, 0.3)
    S = a[..., None] * S + mixed[..., None] * v[..., None, :]
    return (S, k.clone()), torch.einsum("bhk,bhkv->bhv", q, S)


def rg_lru(h, x):
    x_t, r, i = x
    log_a = -8.0 * torch.sigmoid(r) * F.softplus(torch.linspace(-1, 1, 7, dtype=h.dtype))
    a = torch.exp(log_a)
    h = a * h + torch.sqrt(1 - a**2) * torch.sigmoid(i) * x_t
    return h, h.clone()


def min_gru(h, x):
    x_t, z = x
    z = torch.sigmoid(z)
    h = (1 - z) * h + z * torch.tanh(x_t)
    return h, h * 2


def ema(h, x):
    (x_t,) = x
    h = 0.9 * h + 0.1 * x_t
    return h, h.clone()


def ema_lerp(h, x):
    x_t, a = x
    h = torch.lerp(h, x_t, torch.sigmoid(a))
    return h, torch.tanh(h) * x_t


def two_ema(carry, x):
    fast, slow = carry
    x_t, a = x
    fast = a * fast + (1 - a) * x_t
    slow = 0.99 * slow + 0.01 * fast
    return (fast, slow), fast - slow


def mlstm(carry, x):
    C, n, m = carry
    q, k, v, i, f = x
    log_f = F.logsigmoid(f)
    i = i[..., 0]
    new_m = torch.maximum(log_f + m, i)
    f_gate, i_gate = torch.exp(log_f + m - new_m), torch.exp(i - new_m)
    C = f_gate[..., None, None] * C + i_gate[..., None, None] * (k[..., :, None] @ v[..., None, :])
    n = f_gate[..., None] * n + i_gate[..., None] * k
    norm = torch.maximum((q * n).sum(-1).abs(), torch.exp(-new_m))
    return (C, n, new_m), torch.einsum("bhk,bhkv->bhv", q, C) / norm[..., None]


def lif_and_gla(carry, x):
    S, u = carry
    q, k, v, a, _ = x
    u = 0.9 * u + k
    spike = (u > 1).to(u.dtype)
    u = u * (1 - spike)
    S = torch.sigmoid(a + spike)[..., None] * S + k[..., None] * v[..., None, :]
    return (S, u), torch.einsum("bhk,bhkv->bhv", q, S)


def grouped_queries(S, x):
    q, k, v, a = x
    S = a[..., None] * S + k[..., None] * v[..., None, :]
    return S, torch.einsum("bhgk,bhkv->bhgv", q, S)


def several_reads(S, x):
    q, k, v, a, b = x
    S = a[..., None] * S + k[..., None] * v[..., None, :]
    return S, torch.einsum("bhk,bhkv->bhv", q, S), torch.einsum("bhk,bhkv->bhv", k, S) * b[..., None]


def states_as_results(S, x):
    _, k, v, a, b = x
    S = a[..., None] * S
    S = S + k[..., None] * (b[..., None] * (v - (k[..., None] * S).sum(-2)))[..., None, :]
    return S, S.clone()


# ---- not to be recognised ------------------------------------------------------------------------------------------


def dense_affine(h, x):
    A, x_t = x
    h = (A @ h[..., None])[..., 0] + x_t
    return h, h.clone()


def tanh_rnn(h, x):
    (x_t,) = x
    h = torch.tanh(0.5 * h + x_t)
    return h, h.clone()


def relu_of_the_state(h, x):
    (x_t,) = x
    h = torch.relu(h) + x_t
    return h, h.clone()


def threshold_of_the_state(h, x):
    (x_t,) = x
    h = h + (h > 1).to(h.dtype) + x_t
    return h, h.clone()


def best_path(h, x):
    """A step of Viterbi's algorithm: the best way to each place."""
    (x_t,) = x
    h = (h[:, :, None] + 0.1).max(1).values + x_t
    return h, h.clone()


def square_of_the_state(h, x):
    (x_t,) = x
    h = h * h * 0.1 + x_t
    return h, h.clone()


def lstm(carry, x):
    h, c = carry
    (x_t,) = x
    i, f, g, o = (x_t + torch.cat([h, h, h, h], -1)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h.clone()


def coupled(carry, x):
    u, w = carry
    x_t, a = x
    u, w = a * u + 0.1 * w + x_t, a * w - 0.1 * u
    return (u, w), u + w


def coupled_unequally(carry, x):
    u, w = carry
    x_t, a = x
    u = a * u + 0.1 * w + x_t
    return (u, 0.5 * w - 0.1 * u.sum(-1, keepdim=True)), u.clone()


def rolled_state(h, x):
    (x_t,) = x
    h = 0.9 * torch.roll(h, 1, -1) + x_t
    return h, h.clone()


def two_sided(S, x):
    q, k, v, _, _ = x
    S = S - k[..., None] * (k[..., None] * S).sum(-2, keepdim=True) - (S * v[..., None, :]).sum(-1, keepdim=True)
    return S, torch.einsum("bhk,bhkv->bhv", q, S)


_VECTOR = ((B, 7),)
KNOWN: Mapping[str, Family] = {
    "kda_einsum": Family(kda_einsum, (STATE,), FIVE, ("key e",)),
    "kda_matmul": Family(kda_matmul, (STATE,), FIVE, ("key e",)),
    "kda_broadcast": Family(kda_broadcast, (STATE,), FIVE, ("key e",)),
    "kda_bmm": Family(kda_bmm, (STATE,), FIVE, ("key e",)),
    "kda_dense": Family(kda_dense, (STATE,), FIVE, ("key e",)),
    "kda_identity_matrix": Family(kda_identity_matrix, (STATE,), FIVE, ("key e",)),
    "kda_transposed_state": Family(kda_transposed_state, ((B, H, V, K),), FIVE, ("key e",)),
    "kda_lerp": Family(kda_lerp, (STATE,), FIVE, ("key e",)),
    "kda_in_place": Family(kda_in_place, (STATE,), FIVE, ("key e",)),
    "kda_gates_inside": Family(kda_gates_inside, (STATE,), FIVE, ("key e",)),
    "spike_kda": Family(spike_kda, (STATE, (B, H, V)), (*FIVE, (B,)), ("key e", "scalar"), masks=1),
    "spike_kda_masked_gates": Family(
        spike_kda_masked_gates, (STATE, (B, H, V)), (*FIVE, (B,)), ("key e", "scalar"), masks=1
    ),
    "spike_kda_arithmetic": Family(
        spike_kda_arithmetic, (STATE, (B, H, V)), (*FIVE, (B,)), ("key e", "scalar"), masks=1
    ),
    "spike_kda_silent_heads": Family(
        spike_kda_silent_heads, (STATE, (B, H, V)), (*FIVE, (B,), (B, H)), ("key e", "scalar"), masks=2
    ),
    "gated_delta": Family(gated_delta, (STATE,), FIVE, ("scalar e",)),
    "delta": Family(delta, (STATE,), FIVE, ("none e",)),
    "householder_product": Family(householder_product, (STATE,), FIVE, ("none e",)),
    "rwkv7": Family(rwkv7, ((B, H, V, K),), FIVE, ("key e",)),
    "gla": Family(gla, (STATE,), FIVE, ("key",)),
    "retention": Family(retention, (STATE,), FIVE, ("scalar",)),
    "linear_attention": Family(linear_attention, (STATE, (B, H, K)), FIVE, ("none", "none")),
    "mamba2": Family(mamba2, ((B, H, V, K),), ((B, H, V), (B, H), (B, K), (B, K)), ("scalar",)),
    "mamba1": Family(mamba1, ((B, 7, K),), ((B, 7), (B, 7), (B, K), (B, K)), ("full",)),
    "rwkv6": Family(rwkv6, (STATE,), FIVE, ("key b",)),
    "token_shift": Family(token_shift, (STATE, (B, H, K)), FIVE, ("key",)),
    "rg_lru": Family(rg_lru, _VECTOR, ((B, 7),) * 3, ("value",)),
    "min_gru": Family(min_gru, _VECTOR, ((B, 7),) * 2, ("value",)),
    "ema": Family(ema, _VECTOR, ((B, 7),), ("scalar",)),
    "ema_lerp": Family(ema_lerp, _VECTOR, ((B, 7),) * 2, ("value",)),
    "two_ema": Family(two_ema, _VECTOR * 2, ((B, 7),) * 2, ("value", "scalar")),
    "mlstm": Family(mlstm, (STATE, (B, H, K), (B, H)), FIVE, ("scalar", "scalar"), missed="maximum of the state"),
    "lif_and_gla": Family(lif_and_gla, (STATE, (B, H, K)), FIVE, ("key",), missed="gt of the state"),
    "grouped_queries": Family(grouped_queries, (STATE,), ((B, H, 2, K), (B, H, K), (B, H, V), (B, H, K)), ("key",)),
    "several_reads": Family(several_reads, (STATE,), FIVE, ("key",)),
    "states_as_results": Family(states_as_results, (STATE,), FIVE, ("key e",)),
}
UNKNOWN: Mapping[str, tuple[Family, str]] = {
    "dense_affine": (Family(dense_affine, ((B, 7),), ((B, 7, 7), (B, 7)), ()), "its transition is dense"),
    "tanh_rnn": (Family(tanh_rnn, _VECTOR, ((B, 7),), ()), "not affine in its state: tanh of the state"),
    "relu_of_the_state": (Family(relu_of_the_state, _VECTOR, ((B, 7),), ()), "not affine in its state: relu of"),
    "threshold_of_the_state": (Family(threshold_of_the_state, _VECTOR, ((B, 7),), ()), "gt of the state"),
    "best_path": (Family(best_path, _VECTOR, ((B, 7),), ()), "not affine in its state: max of the state"),
    "square_of_the_state": (Family(square_of_the_state, _VECTOR, ((B, 7),), ()), "mul of the state"),
    "lstm": (Family(lstm, _VECTOR * 2, ((B, 28),), ()), "not affine in its state: sigmoid of the state"),
    "coupled_unequally": (Family(coupled_unequally, ((B, 7), (B, 1)), ((B, 7),) * 2, ()), "depend on each other"),
    "rolled_state": (Family(rolled_state, _VECTOR, ((B, 7),), ()), "roll of the state"),
    "two_sided": (Family(two_sided, (STATE,), FIVE, ()), "multiplied from both sides"),
}


def inputs(
    family: Family, dtype: torch.dtype = torch.float64, *, length: int = T, grad: bool = False, seed: int = 0
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """First states and what the steps are given, with values of a size that lets no state grow."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5).to(dtype).requires_grad_(grad)

    init = tuple(random(*shape) for shape in family.init)
    numbers = len(family.given) - family.masks
    given = [random(length, *shape) for shape in family.given[:numbers]]
    given += [torch.rand((length, *shape), generator=generator) < 0.4 for shape in family.given[numbers:]]
    return init, tuple(given)
