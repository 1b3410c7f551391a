"""Activations of an MLP in Triton (see ``lowering/triton/mlp.py``), which is imported when it is called."""

from __future__ import annotations

import torch

from lz_compile.lowering.encoded_attributes import decode, encode
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.mlp import MlpAttrs, reference


def mlp(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    attrs: MlpAttrs,
) -> torch.Tensor:
    """Activations in the op's canonical layout (see ``lowering/ops/mlp.py``), without biases and limits."""
    assert gate_bias is None, "lz.triton_mlp is given a bias"
    assert up_bias is None, "lz.triton_mlp is given a bias"
    assert (attrs.limit, attrs.up_offset) == (None, 0.0), "lz.triton_mlp is asked for a limit or an offset"
    result: torch.Tensor = _plain(gate, encode(attrs)) if up is None else _gated(gate, up, encode(attrs))
    return result


def _run_gated(gate: torch.Tensor, up: torch.Tensor, attrs: str) -> torch.Tensor:
    from lz_compile.lowering.triton.mlp import forward

    return forward(gate, up, decode(MlpAttrs, attrs))


def _fake_gated(gate: torch.Tensor, up: torch.Tensor, attrs: str) -> torch.Tensor:
    return gate.new_empty(gate.shape, dtype=decode(MlpAttrs, attrs).out_dtype)


def _fallback_gated(gate: torch.Tensor, up: torch.Tensor, attrs: str) -> torch.Tensor:
    return reference(gate, up, attrs=decode(MlpAttrs, attrs)).contiguous()


def _gradients_gated(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, attrs: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up."""
    from lz_compile.lowering.triton.mlp import backward

    of_gate, of_up = backward(gradient, gate, up, decode(MlpAttrs, attrs))
    assert of_up is not None, "what the activation is multiplied by has a gradient"
    return of_gate, of_up


def _run_plain(gate: torch.Tensor, attrs: str) -> torch.Tensor:
    from lz_compile.lowering.triton.mlp import forward

    return forward(gate, None, decode(MlpAttrs, attrs))


def _fake_plain(gate: torch.Tensor, attrs: str) -> torch.Tensor:
    return gate.new_empty(gate.shape, dtype=decode(MlpAttrs, attrs).out_dtype)


def _fallback_plain(gate: torch.Tensor, attrs: str) -> torch.Tensor:
    return reference(gate, attrs=decode(MlpAttrs, attrs)).contiguous()


def _gradient_plain(gradient: torch.Tensor, gate: torch.Tensor, attrs: str) -> torch.Tensor:
    """Of the gate."""
    from lz_compile.lowering.triton.mlp import backward

    return backward(gradient, gate, None, decode(MlpAttrs, attrs))[0]


_KERNEL = "lz.triton_mlp"
_gated = opaque(
    "triton_gated_activation",
    _run_gated,
    _fake_gated,
    fallback=_fallback_gated,
    backward=_gradients_gated,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
_plain = opaque(
    "triton_activation",
    _run_plain,
    _fake_plain,
    fallback=_fallback_plain,
    backward=_gradient_plain,
    kernel_id=_KERNEL,
    is_cuda_graph_safe=True,
)
