"""Random equivalent spellings of gated MLPs and of activations after a projection, and their reference.

A `Spelling` is one value per choice. `build()` returns a function of `inputs()` that computes the activations spelled that
way, `reference()` the same in float64 from the mathematics, `attributes()` what a recogniser must say of it. Which choices
go together is said in `allows`; the Hypothesis strategy `spellings()` draws only combinations that obey it.

All built functions share one code object: call `torch._dynamo.reset()` between two that are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
# Largest absolute and relative error against the reference; values are of order one.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
WIDTH, HIDDEN = 24, 20
LIMIT = 1.25

_ROOT = math.sqrt(2.0)
_SLOPE = math.sqrt(2.0 / math.pi)

Function = Callable[[Tensor], Tensor]

#: Spellings of every activation; the first one is its definition.
ACTIVATIONS: Mapping[str, Mapping[str, Function]] = {
    "silu": {
        "functional": F.silu,
        "module": nn.SiLU(),
        "inplace": lambda z: F.silu(z.clone(), inplace=True),
        "sigmoid": lambda z: z * torch.sigmoid(z),
        "sigmoid_first": lambda z: z.sigmoid().mul(z),
        "expit": lambda z: torch.mul(z, torch.special.expit(z)),
        "quotient": lambda z: z / (1 + torch.exp(-z)),
        "reciprocal": lambda z: z * torch.reciprocal(1.0 + z.neg().exp()),
        "power": lambda z: z * (1 + (-z).exp()) ** -1,
        "tanh": lambda z: 0.5 * z * (1 + torch.tanh(z / 2)),
        "complement": lambda z: z - z * torch.sigmoid(-z),
        "logsigmoid": lambda z: z * torch.exp(F.logsigmoid(z)),
        "softplus": lambda z: z * torch.exp(-F.softplus(-z)),
    },
    "gelu": {
        "functional": F.gelu,
        "module": nn.GELU(),
        "erf": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2.0))),
        "erf_half_last": lambda z: z * 0.5 * (1.0 + torch.erf(z * 0.7071067811865476)),
        "erfc": lambda z: 0.5 * z * torch.erfc(-z / _ROOT),
        "phi": lambda z: z * torch.special.ndtr(z),
        "sum": lambda z: z / 2 + z / 2 * torch.special.erf(z / _ROOT),
    },
    "gelu_tanh": {
        "functional": lambda z: F.gelu(z, approximate="tanh"),
        "module": nn.GELU(approximate="tanh"),
        "new": lambda z: 0.5 * z * (1.0 + torch.tanh(_SLOPE * (z + 0.044715 * torch.pow(z, 3.0)))),
        "fast": lambda z: 0.5 * z * (1.0 + torch.tanh(z * 0.7978845608 * (1.0 + 0.044715 * z * z))),
        "cube": lambda z: z * 0.5 * (1 + (_SLOPE * (z + 0.044715 * z**3)).tanh()),
        "sigmoid": lambda z: z * torch.sigmoid(2 * _SLOPE * (z + 0.044715 * z * z * z)),
    },
    "quick_gelu": {
        "functional": lambda z: z * torch.sigmoid(1.702 * z),
        "quotient": lambda z: z / (1 + torch.exp(-1.702 * z)),
        "scaled_last": lambda z: (z * 1.702).sigmoid() * z,
    },
    "relu": {
        "functional": F.relu,
        "module": nn.ReLU(),
        "method": lambda z: z.relu(),
        "inplace": lambda z: F.relu(z.clone(), inplace=True),
        "clamp": lambda z: z.clamp(min=0),
        "clamp_positional": lambda z: torch.clamp(z, 0.0),
        "clamp_min": lambda z: z.clamp_min(0),
        "clip": lambda z: torch.clip(z, min=0.0),
        "maximum": lambda z: torch.maximum(z, torch.zeros_like(z)),
        "max": lambda z: torch.max(z, torch.zeros_like(z)),
        "where": lambda z: torch.where(z > 0, z, torch.zeros_like(z)),
        "where_number": lambda z: torch.where(z < 0, 0.0, z),
        "mask": lambda z: z * (z > 0),
        "mask_cast": lambda z: z * (z >= 0).to(z.dtype),
        "masked_fill": lambda z: z.masked_fill(z <= 0, 0.0),
        "abs": lambda z: (z + z.abs()) / 2,
        "threshold": lambda z: F.threshold(z, 0.0, 0.0),
        "leaky": lambda z: F.leaky_relu(z, 0.0),
    },
    "relu_squared": {
        "functional": lambda z: torch.square(F.relu(z)),
        "power": lambda z: F.relu(z) ** 2,
        "pow": lambda z: z.clamp(min=0).pow(2),
        "times": lambda z: F.relu(z) * F.relu(z),
        "times_input": lambda z: F.relu(z) * z,
        "where": lambda z: torch.where(z > 0, z * z, torch.zeros_like(z)),
    },
    "sigmoid": {
        "functional": torch.sigmoid,
        "quotient": lambda z: 1 / (1 + torch.exp(-z)),
        "tanh": lambda z: 0.5 * (torch.tanh(0.5 * z) + 1),
        "complement": lambda z: 1 - torch.sigmoid(-z),
    },
    "tanh": {
        "functional": torch.tanh,
        "sigmoid": lambda z: 2 * torch.sigmoid(2 * z) - 1,
    },
    "mish": {
        "functional": F.mish,
        "softplus": lambda z: z * torch.tanh(F.softplus(z)),
        "log1p": lambda z: z * torch.log1p(torch.exp(z)).tanh(),
    },
}
#: Activations that are no MLP without a second factor.
GATES = ("sigmoid", "tanh")
SPLITS = ("chunk", "split", "split_sizes", "tensor_split", "slices", "narrow", "unbind", "select", "interleaved", "glu")


def choice(*options: Any) -> Any:
    """A dataclass field with these options; the first is the plainest and the default."""
    return field(default=options[0], metadata={"options": options})


@dataclass(frozen=True)
class Spelling:
    """One way to write the activations of an MLP; every field is an independent choice within `allows`."""

    activation: str = choice(*ACTIVATIONS)
    spelled: str = "functional"
    is_gated: bool = choice(True, False)
    shape: tuple[int, ...] = choice((5, 7), (11,), (1, 7), (2, 3, 5))
    dtype: torch.dtype = choice(torch.float32, torch.bfloat16, torch.float16, torch.float64)  # noqa: RUF009 - a field
    # Where gate and up come from.
    projection: str = choice("linear", "matmul", "einsum", "addmm", *SPLITS)
    is_up_first: bool = choice(False, True)
    bias: str = choice("none", "inside", "gate", "up", "both", "first", "float32")
    # Between projection and result.
    upcast: str = choice("none", "gate", "both")
    cast_back: str = choice("to", "type_as", "dtype_call")
    product: str = choice("gate_first", "up_first", "torch_mul", "inplace", "distributed")
    layout: str = choice("none", "flat", "transposed", "unsqueezed")
    limit: bool = choice(False, True)
    offset: float = choice(0.0, 1.0)
    scale: float = choice(1.0, 0.75)

    # ---- what it means -----------------------------------------------------------------------------------------

    @property
    def is_packed(self) -> bool:
        """Whether one projection makes both halves."""
        return self.projection in SPLITS

    @property
    def separate_biases(self) -> tuple[bool, bool]:
        """Whether a bias is added to the gate, and to the other row, by an operation of its own next to the activation."""
        return self.bias in ("gate", "both", "float32"), self.is_gated and self.bias in ("up", "both")

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The input, the weights of gate and up, and their biases."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

        weights = [random(HIDDEN, WIDTH) * WIDTH**-0.5 for _ in range(2)]
        bias_dtype = torch.float32 if self.bias == "float32" else self.dtype
        return random(*self.shape, WIDTH), *weights, random(HIDDEN, dtype=bias_dtype), random(HIDDEN, dtype=bias_dtype)  # type: ignore[return-value]

    def reference(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The value in float64."""
        x, gate_weight, up_weight, gate_bias, up_bias = (each.double() for each in (x, *weights))
        has_gate, has_up = self.separate_biases
        if self.bias in ("inside", "first"):
            has_gate = has_up = True
        gate = (x @ gate_weight.T + (gate_bias if has_gate else 0.0)) * self.scale
        gate = gate.clamp(max=LIMIT) if self.limit else gate
        activated = ACTIVATIONS[self.activation]["functional"](gate)
        if not self.is_gated:
            return activated
        up = x @ up_weight.T + (up_bias if has_up else 0.0)
        up = up.clamp(-LIMIT, LIMIT) if self.limit else up
        return activated * (up + self.offset)

    def attributes(self) -> dict[str, Any]:
        """What a recogniser must say of it."""
        found = {"activation": self.activation, "is_gated": self.is_gated, "limit": LIMIT if self.limit else None}
        if self.scale != 1.0:  # what a row becomes before the activation is an operand as it is, with all that is added
            return found
        gate, up = self.separate_biases
        return {**found, "has_gate_bias": gate, "has_up_bias": up, "up_offset": self.offset}

    # ---- how it is written -------------------------------------------------------------------------------------

    def build(self) -> Callable[..., Tensor]:
        """The function of `inputs()`."""

        def activations(
            x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor, up_bias: Tensor
        ) -> Tensor:
            if self.projection == "glu":
                return F.glu(F.linear(x, torch.cat([up_weight, gate_weight])), -1)
            gate, up = self._rows(x, gate_weight, up_weight, gate_bias, up_bias)
            has_gate, has_up = self.separate_biases
            gate = gate + gate_bias.to(x.dtype) if has_gate else gate
            up = up_bias + up if has_up else up
            gate, up = (self._arranged(each) for each in (gate, up))
            gate = gate.float() if self.upcast != "none" else gate
            up = up.to(torch.float32) if self.upcast == "both" else up
            gate = gate * self.scale if self.scale != 1.0 else gate
            if self.limit:
                gate, up = gate.clamp(max=LIMIT), torch.clamp(up, -LIMIT, LIMIT)
            out = ACTIVATIONS[self.activation][self.spelled](gate)
            out = self._cast_back(out, x) if self.upcast == "gate" else out
            out = self._product(out, up + self.offset if self.offset else up) if self.is_gated else out
            out = self._cast_back(out, x) if self.upcast == "both" else out
            return self._restored(out)

        return activations

    def _rows(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        gate_weight, up_weight, gate_bias, up_bias = weights
        if self.is_packed:
            return self._split(x, *weights)
        inside = self.bias in ("inside", "first")
        rows = []
        for weight, bias in ((gate_weight, gate_bias), (up_weight, up_bias)):
            if self.projection == "addmm":
                rows.append(torch.addmm(bias, x, weight.T) if inside else torch.mm(x, weight.t()))
                continue
            if self.projection == "linear":
                rows.append(F.linear(x, weight, bias if inside else None))
                continue
            row = x @ weight.T if self.projection == "matmul" else torch.einsum("...i,oi->...o", x, weight)
            rows.append(row)
        return rows[0], rows[1]

    def _split(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [weights[:2], weights[2:]]
        weight, bias = (torch.stack(pair[::-1] if self.is_up_first else pair) for pair in pairs)
        if self.projection == "interleaved":
            weight, bias = weight.transpose(0, 1), bias.transpose(0, 1)
        weight, bias = weight.reshape(2 * HIDDEN, -1), bias.reshape(-1)
        both = F.linear(x, weight, bias if self.bias == "inside" else None)
        both = both + bias if self.bias == "first" else both
        match self.projection:
            case "chunk":
                first, second = both.chunk(2, dim=-1)
            case "split":
                first, second = torch.split(both, HIDDEN, dim=-1)
            case "split_sizes":
                first, second = both.split([HIDDEN, HIDDEN], -1)
            case "tensor_split":
                first, second = both.tensor_split(2, dim=-1)
            case "slices":
                first, second = both[..., :HIDDEN], both[..., HIDDEN:]
            case "narrow":
                first, second = both.narrow(-1, 0, HIDDEN), both.narrow(-1, HIDDEN, HIDDEN)
            case "unbind":
                first, second = both.unflatten(-1, (2, HIDDEN)).unbind(-2)
            case "select":
                pair = both.view(*both.shape[:-1], 2, HIDDEN)
                first, second = pair[..., 0, :], pair.select(-2, 1)
            case _:
                first, second = both[..., ::2], both[..., 1::2]
        return (second, first) if self.is_up_first else (first, second)

    def _arranged(self, row: Tensor) -> Tensor:
        if self.layout == "flat":
            return row.reshape(-1, HIDDEN)
        if self.layout == "transposed":
            return row.transpose(0, -1)
        return row.unsqueeze(0) if self.layout == "unsqueezed" else row

    def _restored(self, out: Tensor) -> Tensor:
        if self.layout == "flat":
            return out.view(*self.shape, HIDDEN)
        if self.layout == "transposed":
            return out.transpose(0, -1)
        return out.squeeze(0) if self.layout == "unsqueezed" else out

    def _product(self, activated: Tensor, up: Tensor) -> Tensor:
        match self.product:
            case "gate_first":
                return activated * up
            case "up_first":
                return up * activated
            case "torch_mul":
                return torch.mul(activated, up)
            case "inplace":
                out = activated.clone()
                out *= up
                return out
            case _:
                return activated * (0.5 * up) + 0.5 * activated * up

    def _cast_back(self, out: Tensor, x: Tensor) -> Tensor:
        if self.cast_back == "type_as":
            return out.type_as(x)
        return out.to(dtype=x.dtype) if self.cast_back == "dtype_call" else out.to(x.dtype)


def allows(s: Spelling) -> bool:
    """Whether choices go together."""
    plain = Spelling()
    if s.spelled not in ACTIVATIONS[s.activation]:
        return False
    if s.projection == "glu":
        same = ("bias", "upcast", "product", "layout", "limit", "offset", "scale")
        is_plain = all(getattr(s, name) == getattr(plain, name) for name in same)
        return s.activation == "sigmoid" and s.spelled == "functional" and s.is_gated and is_plain
    if not s.is_gated:
        same = ("product", "limit", "offset", "is_up_first")
        is_plain = all(getattr(s, name) == getattr(plain, name) for name in same)
        if s.activation in GATES or not is_plain or s.is_packed or s.upcast == "gate" or s.bias in ("up", "both"):
            return False
    if s.projection == "addmm" and len(s.shape) != 1:
        return False
    if s.bias in ("inside", "first") and s.projection in ("matmul", "einsum"):
        return False
    if (s.bias == "first" or s.is_up_first) and not s.is_packed:
        return False
    if s.bias == "float32" and s.dtype not in HALF:
        return False
    if (s.upcast == "none") != (s.dtype not in HALF) and s.upcast != "none":
        return False
    if s.cast_back != "to" and s.upcast == "none":
        return False
    return not (s.layout == "transposed" and (s.separate_biases != (False, False) and s.projection == "addmm"))


@st.composite
def spellings(draw: st.DrawFn, **fixed: Any) -> Spelling:
    """Spellings that obey `allows`, with some choices fixed; choices that do not fit are put back to their plainest."""
    given = dict(fixed)
    for each in fields(Spelling):
        if each.name in given:
            continue
        if each.name == "spelled":
            given["spelled"] = draw(st.sampled_from(list(ACTIVATIONS[given["activation"]])))
            continue
        options = [option for option in each.metadata["options"] if allows(Spelling(**{**given, each.name: option}))]
        given[each.name] = draw(st.sampled_from(options or [each.default]))
    return Spelling(**given)
