"""A language model of Kimi Delta Attention whose decay and write gain are modulated by spikes.

Every head keeps a matrix that maps keys to values (fast weights). A token lets it decay, erases what the matrix holds for
its key, and writes its value there:

    S_t = diag(a_t) S_{t-1} - b_t k_t ((a_t * k_t)^T S_{t-1}) + b_t k_t v_t^T        o_t = S_t^T q_t

``a_t`` and ``b_t`` depend on the token and on the spikes of leaky integrate-and-fire neurons. A dropped token changes
nothing and repeats the last output; a head without a spike changes nothing and is still read.

Shape suffixes:
    B  batch       H  heads                 P  spiking neurons of a head
    T  positions   K  width of keys         C  channels
    V  width of values                      L  positions, padded to a power of two

**Source** Kimi Team, Kimi Linear (2025), section 3.1; Neftci et al., Surrogate gradient learning in spiking neural
networks (2019); Blelloch, Prefix sums and their applications (1990).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mode: TypeAlias = Literal["auto", "scan", "sequential"]


@dataclass(frozen=True)
class SpikeKDAConfig:
    """Sizes and modes.

    ``kda_mode``: ``sequential`` runs the recurrence token by token, ``scan`` composes the tokens' transitions in a parallel
    prefix scan, ``auto`` scans on accelerators from ``kda_scan_min_len`` tokens on. ``scan_tile`` positions are read out
    at a time.
    """

    vocabulary: int = 256
    channels: int = 64
    layers: int = 2
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    neurons: int = 8
    mlp_width: int = 128
    leak: float = 0.8
    threshold: float = 0.5
    surrogate_slope: float = 4.0
    kda_mode: Mode = "auto"
    kda_scan_min_len: int = 64
    scan_tile: int = 64


class KDAState(NamedTuple):
    """What a layer carries on: potentials ``[B, H, P]``, fast weights ``[B, H, K, V]`` and the last output ``[B, H, V]``."""

    potential: Tensor
    weights: Tensor
    output: Tensor


class MaskedLinear(nn.Linear):
    """A projection whose weights are partly off: the mask of mixed-sparsity training, changed between steps."""

    mask: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.register_buffer("mask", torch.ones(outputs, inputs, dtype=torch.bool))

    @torch.no_grad()
    def keep_largest(self, share: float) -> None:
        """Keep this share (0 to 1) of the weights, those of the largest magnitude."""
        kept = max(1, round(share * self.weight.numel()))
        order = self.weight.abs().flatten().argsort(descending=True)
        self.mask.view(-1).fill_(False)
        self.mask.view(-1)[order[:kept]] = True

    def forward(self, x: Tensor) -> Tensor:
        """The product with what is on of the weights; what is off gets no gradient."""
        return F.linear(x, self.weight * self.mask)


def spike(potential: Tensor, threshold: float, slope: float) -> Tensor:
    """One where the potential reaches the threshold, else zero; the gradient is that of a sigmoid of this slope."""
    soft = torch.sigmoid(slope * (potential - threshold))
    return (potential >= threshold).to(potential.dtype) + (soft - soft.detach())


class SpikeKDA(nn.Module):
    """The attention layer."""

    def __init__(self, config: SpikeKDAConfig) -> None:
        super().__init__()
        self.config = config
        channels, heads, keys, values = config.channels, config.heads, config.key_dim, config.value_dim
        self.query = MaskedLinear(channels, heads * keys)
        self.key = MaskedLinear(channels, heads * keys)
        self.value = MaskedLinear(channels, heads * values)
        self.decay = nn.Linear(channels, heads * keys)
        self.gain = nn.Linear(channels, heads)
        self.current = MaskedLinear(channels, heads * config.neurons)
        self.decay_spikes = nn.Parameter(torch.randn(heads, config.neurons, keys) / config.neurons**0.5)
        self.gain_spikes = nn.Parameter(torch.randn(heads, config.neurons) / config.neurons**0.5)
        self.output = MaskedLinear(heads * values, channels)
        nn.init.constant_(self.decay.bias, 3.0)

    def initial_state(self, x_BTC: Tensor) -> KDAState:
        """Nothing was seen yet."""
        config, batch = self.config, x_BTC.shape[0]
        return KDAState(
            x_BTC.new_zeros(batch, config.heads, config.neurons),
            x_BTC.new_zeros(batch, config.heads, config.key_dim, config.value_dim),
            x_BTC.new_zeros(batch, config.heads, config.value_dim),
        )

    def forward(
        self, x_BTC: Tensor, drop_BT: Tensor | None = None, state: KDAState | None = None
    ) -> tuple[Tensor, KDAState]:
        """The layer over a sequence.

        Args:
            x_BTC: the input.
            drop_BT: True for tokens that are left out.
            state: what an earlier part of the sequence left.
        """
        state = state or self.initial_state(x_BTC)
        spikes_BTHP, potential = self._spikes(x_BTC, state.potential)
        q_BTHK = F.normalize(self._heads(self.query(x_BTC)), dim=-1)
        k_BTHK = F.normalize(self._heads(self.key(x_BTC)), dim=-1)
        v_BTHV = self._heads(self.value(x_BTC))
        a_BTHK = torch.sigmoid(
            self._heads(self.decay(x_BTC)) + torch.einsum("bthp,hpk->bthk", spikes_BTHP, self.decay_spikes)
        )
        b_BTH = torch.sigmoid(self.gain(x_BTC) + torch.einsum("bthp,hp->bth", spikes_BTHP, self.gain_spikes))
        idle_BTH = spikes_BTHP.detach().amax(-1) == 0
        drop_BT = torch.zeros_like(idle_BTH[..., 0]) if drop_BT is None else drop_BT
        idle_BTH = idle_BTH | drop_BT[..., None]
        a_BTHK = torch.where(idle_BTH[..., None], 1.0, a_BTHK)
        b_BTH = torch.where(idle_BTH, 0.0, b_BTH)
        run = parallel if self._is_parallel(x_BTC) else sequential
        o_BTHV, weights = run(
            q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTH, drop_BT, state.weights, state.output, self.config.scan_tile
        )
        y_BTC: Tensor = self.output(o_BTHV.flatten(2))
        return y_BTC, KDAState(potential, weights, o_BTHV[:, -1])

    def stream(
        self, x_BC: Tensor, state: KDAState | None = None, drop_B: Tensor | None = None
    ) -> tuple[Tensor, KDAState]:
        """One token: the output ``[B, C]`` and the state to pass with the next token."""
        drop_B1 = None if drop_B is None else drop_B[:, None]
        y_B1C, state = self(x_BC[:, None], drop_B1, state)
        return y_B1C[:, 0], state

    def _is_parallel(self, x_BTC: Tensor) -> bool:
        config, length = self.config, x_BTC.shape[1]
        is_worth_it = x_BTC.device.type != "cpu" and length >= config.kda_scan_min_len
        return config.kda_mode == "scan" or (config.kda_mode == "auto" and is_worth_it)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        x_BTHD: Tensor = x_BTC.unflatten(-1, (self.config.heads, -1))
        return x_BTHD

    def _spikes(self, x_BTC: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        """Leaky integrate-and-fire: what reaches the threshold fires, and loses that much."""
        config = self.config
        current_BTHP = self._heads(self.current(x_BTC))
        fired = []
        for t in range(x_BTC.shape[1]):
            potential = config.leak * potential + current_BTHP[:, t]
            fired.append(spike(potential, config.threshold, config.surrogate_slope))
            potential = potential - config.threshold * fired[-1].detach()
        return torch.stack(fired, 1), potential


def sequential(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTH: Tensor,
    drop_BT: Tensor,
    s_BHKV: Tensor,
    o_BHV: Tensor,
    tile: int = 0,
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: outputs ``[B, T, H, V]`` and the last fast weights. ``tile`` is unused."""
    outputs = []
    for t in range(q_BTHK.shape[1]):
        k_BHK, b_BHK1 = k_BTHK[:, t], b_BTH[:, t, :, None, None]
        decayed = a_BTHK[:, t, :, :, None] * s_BHKV
        held_BHV = torch.einsum("bhk,bhkv->bhv", k_BHK, decayed)
        s_BHKV = decayed + b_BHK1 * k_BHK[..., None] * (v_BTHV[:, t] - held_BHV)[:, :, None, :]
        read_BHV = torch.einsum("bhk,bhkv->bhv", q_BTHK[:, t], s_BHKV)
        o_BHV = torch.where(drop_BT[:, t, None, None], o_BHV, read_BHV)
        outputs.append(o_BHV)
    return torch.stack(outputs, 1), s_BHKV


def parallel(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTH: Tensor,
    drop_BT: Tensor,
    s_BHKV: Tensor,
    o_BHV: Tensor,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """The same by a parallel prefix scan over the tokens' transitions, read out ``tile`` positions at a time."""
    length = q_BTHK.shape[1]
    transitions, writes = updates(k_BTHK, v_BTHV, a_BTHK, b_BTH)
    before, added = exclusive_prefixes(transitions, writes)
    tiles = []
    for start in range(0, length, tile):
        now = slice(start, min(start + tile, length))
        states = before[:, :, now] @ s_BHKV[:, :, None] + added[:, :, now]
        states = transitions[:, :, now] @ states + writes[:, :, now]
        tiles.append(torch.einsum("bthk,bhtkv->bthv", q_BTHK[:, now], states))
    o_BTHV = torch.cat(tiles, 1)
    return forward_fill(o_BTHV, drop_BT, o_BHV), states[:, :, -1]


def updates(k_BTHK: Tensor, v_BTHV: Tensor, a_BTHK: Tensor, b_BTH: Tensor) -> tuple[Tensor, Tensor]:
    """Every token's transition ``[B, H, T, K, K]`` and write ``[B, H, T, K, V]``."""
    k_BHTK, a_BHTK = k_BTHK.transpose(1, 2), a_BTHK.transpose(1, 2)
    gained = b_BTH.transpose(1, 2)[..., None] * k_BHTK
    transitions = torch.diag_embed(a_BHTK) - gained[..., :, None] * (a_BHTK * k_BHTK)[..., None, :]
    return transitions, gained[..., :, None] * v_BTHV.transpose(1, 2)[..., None, :]


def exclusive_prefixes(transitions: Tensor, writes: Tensor) -> tuple[Tensor, Tensor]:
    """The composition of all transitions before each position, by an up-sweep and a down-sweep (Blelloch).

    Shapes:
        transitions ``[B, H, T, K, K]`` and writes ``[B, H, T, K, V]``; the results have the same.
    """
    length, width = transitions.shape[2:4]
    padded = 1 << max(0, length - 1).bit_length()
    eye = torch.eye(width, dtype=transitions.dtype, device=transitions.device)
    rest = padded - length
    a = torch.cat((transitions, eye.expand(*transitions.shape[:2], rest, width, width)), 2)
    b = torch.cat((writes, writes.new_zeros(*writes.shape[:2], rest, *writes.shape[3:])), 2)
    levels = []
    while a.shape[2] > 1:  # up: of each pair, the first is kept for the way down
        levels.append((a[:, :, ::2], b[:, :, ::2]))
        first_a, first_b, second_a, second_b = a[:, :, ::2], b[:, :, ::2], a[:, :, 1::2], b[:, :, 1::2]
        a, b = second_a @ first_a, second_a @ first_b + second_b
    a, b = eye.expand_as(a), torch.zeros_like(b)
    for first_a, first_b in reversed(levels):  # down: before the second of a pair comes the first
        a = torch.stack((a, first_a @ a), 3).flatten(2, 3)
        b = torch.stack((b, first_a @ b + first_b), 3).flatten(2, 3)
    return a[:, :, :length], b[:, :, :length]


def forward_fill(o_BTHV: Tensor, drop_BT: Tensor, o_BHV: Tensor) -> Tensor:
    """The last output that was not dropped, at every position; ``o_BHV`` before the first one."""
    length = o_BTHV.shape[1]
    positions = torch.arange(1, length + 1, device=drop_BT.device)
    last_BT = torch.where(drop_BT, 0, positions).cummax(1).values
    index = last_BT[..., None, None].expand_as(o_BTHV)
    return torch.cat((o_BHV[:, None], o_BTHV), 1).gather(1, index)


class Layer(nn.Module):
    """Attention, then an MLP; both read a normed input and add to the residual."""

    def __init__(self, config: SpikeKDAConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.channels)
        self.attention = SpikeKDA(config)
        self.mlp_norm = nn.RMSNorm(config.channels)
        self.up = MaskedLinear(config.channels, config.mlp_width)
        self.down = MaskedLinear(config.mlp_width, config.channels)

    def forward(self, x_BTC: Tensor, drop_BT: Tensor | None, state: KDAState | None) -> tuple[Tensor, KDAState]:
        """The residual stream after this layer, and the layer's state."""
        attended, state = self.attention(self.attention_norm(x_BTC), drop_BT, state)
        x_BTC = x_BTC + attended
        return x_BTC + self.down(F.silu(self.up(self.mlp_norm(x_BTC)))), state


class SpikeKDALM(nn.Module):
    """Logits of the next token."""

    def __init__(self, config: SpikeKDAConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or SpikeKDAConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.channels)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.channels)
        self.head = nn.Linear(config.channels, config.vocabulary, bias=False)

    def forward(
        self, ids_BT: Tensor, drop_BT: Tensor | None = None, states: list[KDAState] | None = None
    ) -> tuple[Tensor, list[KDAState]]:
        """Logits ``[B, T, vocabulary]`` and the states of the layers after the last token."""
        x_BTC = self.embedding(ids_BT)
        after = []
        for index, layer in enumerate(self.layers):
            x_BTC, state = layer(x_BTC, drop_BT, None if states is None else states[index])
            after.append(state)
        return self.head(self.norm(x_BTC)), after

    def stream(self, ids_B: Tensor, states: list[KDAState] | None = None) -> tuple[Tensor, list[KDAState]]:
        """One token: logits ``[B, vocabulary]`` and the states to pass with the next."""
        logits, states = self(ids_B[:, None], None, states)
        return logits[:, 0], states
