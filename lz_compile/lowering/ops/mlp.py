"""Activations of an MLP: ``activation(gate + gate_bias) * (up + up_bias)``, or without ``up`` the activation alone.

Canonical layout, in which every kernel takes and returns it:

    gate       [N, F], what the activation is of
    up         [N, F], what it is multiplied by, where ``is_gated``
    gate_bias  [F]
    up_bias    [F]
    result     [N, F] in ``attrs.out_dtype``

With a ``limit`` the gate is at most that, and ``up`` within plus or minus that, both after their biases. ``up_offset`` is
added to ``up`` at last. The products before and after it are not part of the op. Operands may be halves of one tensor:
rows need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.ground.sizes import Size
from lz_compile.lowering import operands as base
from lz_compile.lowering.attributes import OpAttributes
from lz_compile.lowering.operands import MisfitError, operands
from lz_compile.lowering.sample import Asked, Sample, sampler

#: Every activation by name, as a function of one tensor.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
}

LAYOUT = "ND"
EXACT_DIMS = ("intermediate_size",)
TIMELESS_FEATURES: frozenset[str] = frozenset({"limit", "up_offset", *ACTIVATIONS})
BUCKETED_DIMS = (("num_rows",),)


@dataclass(frozen=True)
class MlpAttrs(OpAttributes):
    """The attributes of one activation.

    ``compute_dtype`` is the widest dtype in which the source computes anything before the result; a kernel may round less
    than that, never more. ``is_packed`` says that gate and up are parts of one tensor, ``gate`` first
    unless ``is_up_first``, alternating where ``is_interleaved``: their strides tell the rest.
    """

    activation: str = "silu"
    is_gated: bool = True
    has_gate_bias: bool = False
    has_up_bias: bool = False
    limit: float | None = None
    up_offset: float = 0.0
    is_packed: bool = False
    is_up_first: bool = False
    is_interleaved: bool = False
    compute_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32

    @property
    def has_bias(self) -> bool:
        """Whether anything is added to the gate or to what it is multiplied by."""
        return self.has_gate_bias or self.has_up_bias


Attributes = MlpAttrs
DIFFERENTIABLE = ("gate", "up")


@dataclass(frozen=True)
class MlpFacts:
    """Sizes, dtype (of the gate) and device of one activation, for kernel selection."""

    num_rows: Size
    intermediate_size: Size
    dtype: torch.dtype
    device: str
    needs_grad: bool = False


SHAPES: Mapping[str, str] = {"gate": "N F", "up": "N F", "gate_bias": "F", "up_bias": "F"}
VARIANT_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {"gated": {"is_gated": True}, "plain": {"is_gated": False}}
TYPICAL_SIZES: Mapping[str, tuple[int, ...]] = {"num_rows": (512, 4096), "intermediate_size": (2816, 11008)}


@operands
class Operands(base.Operands):
    """Gate, what it is multiplied by, and their biases; shapes as in the module's legend."""

    gate: torch.Tensor
    up: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None


def from_operands(x: Operands, sizes: Mapping[str, int], **given: Any) -> tuple[MlpAttrs, MlpFacts]:
    """The attributes, of which some are given, and the facts of an activation over tensors (real or fake)."""
    if given.get("activation", "silu") not in ACTIVATIONS:
        raise MisfitError("mlp", "activation", f"as one of {', '.join(ACTIVATIONS)}", given["activation"])
    if x.up is None and x.up_bias is not None:
        raise MisfitError("mlp", "up_bias", "beside up only", "no up")
    dtype = x.gate.dtype
    found = {"compute_dtype": torch.promote_types(dtype, torch.float32), "out_dtype": dtype, **given}
    told = {"is_gated": x.up is not None, **x.has("gate_bias", "up_bias")}
    facts = MlpFacts(sizes["N"], sizes["F"], dtype, x.gate.device.type, x.wants_gradient())
    return MlpAttrs(**{**found, **told}), facts


def fake(x: Operands, attrs: MlpAttrs) -> torch.Tensor:
    """An empty result, contiguous as kernels give it."""
    return x.gate.new_empty(x.gate.shape, dtype=attrs.out_dtype)


def reference(x: Operands, attrs: MlpAttrs) -> torch.Tensor:
    """The definition of the op, in float32 or the wider dtype of its gate (float64 is the ground truth of every test)."""
    wide = torch.promote_types(torch.promote_types(x.gate.dtype, attrs.compute_dtype), torch.float32)
    return compute(x, attrs, wide).to(attrs.out_dtype)


def compute(x: Operands, attrs: MlpAttrs, dtype: torch.dtype) -> torch.Tensor:
    """The op with every step in ``dtype``."""
    gate, up, gate_bias, up_bias = x.map(lambda each: each if each.dtype == dtype else each.to(dtype)).flat()
    gate = gate if gate_bias is None else gate + gate_bias
    gate = gate if attrs.limit is None else gate.clamp(max=attrs.limit)
    result: torch.Tensor = ACTIVATIONS[attrs.activation](gate)
    if up is None:
        return result
    up = up if up_bias is None else up + up_bias
    up = up if attrs.limit is None else up.clamp(min=-attrs.limit, max=attrs.limit)
    found: torch.Tensor = result * (up + attrs.up_offset if attrs.up_offset else up)
    return found


def features(attrs: MlpAttrs, facts: MlpFacts) -> dict[str, str]:
    """What a kernel must support for this activation: feature name (``supports`` in descriptors) and what asks for it."""
    is_wider = attrs.out_dtype.itemsize > facts.dtype.itemsize
    needed = {
        attrs.activation: f"the activation {attrs.activation}",
        "plain": not attrs.is_gated and "no second factor",
        "bias": attrs.has_bias and "a bias",
        "limit": attrs.limit is not None and f"operands limited to {attrs.limit or 0:g}",
        "up_offset": attrs.up_offset != 0 and f"{attrs.up_offset:g} added to the second factor",
        "wide_result": is_wider and f"a {attrs.out_dtype} result of a {facts.dtype} gate",
        "training": facts.needs_grad and "gradients",
    }
    return {name: text for name, text in needed.items() if isinstance(text, str)}


def _written(attrs: MlpAttrs, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    result = ACTIVATIONS[attrs.activation](gate)
    return result if up is None else result * up


@sampler("gated")
def sample(asked: Asked) -> Sample:
    """A problem of given sizes with random inputs."""
    rows, width = asked.of("num_rows", "intermediate_size")
    is_gated = asked.variant == "gated"
    given = tuple(asked.random(rows, width) for _ in range(1 + is_gated))
    return Sample.of(given, Operands, _written, activation="silu" if is_gated else "gelu", compute_dtype=asked.dtype)
