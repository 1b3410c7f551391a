"""Functions of single ops on tensors: norms, rotary embedding, ALiBi, projections and gated MLPs.

Without compiling, a norm runs the kernel that is expected to be the fastest here, PyTorch's own where nothing is better; the
other functions are PyTorch's own operations. In a function that is compiled, by whatever backend, a call is the plain PyTorch
code that it stands for; ours recognises norms, rotations and gated MLPs there and chooses, with what surrounds them in view.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from lz_compile.errors import nearest
from lz_compile.lowering.ops import mlp
from lz_compile.lowering.ops.norm import NormAttrs, NormFacts
from lz_compile.runtime import eager, health, policy

__all__ = ["ACTIVATIONS", "Activation", "alibi", "embedding", "layer_norm", "linear", "mlp_fused", "rms_norm", "rope"]

Activation: TypeAlias = Literal[
    "silu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu_squared",
    "sigmoid",
    "tanh",
    "mish",
    "identity",
]
#: What a gate passes through.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {**mlp.ACTIVATIONS, "identity": lambda x: x}

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def rms_norm(input: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """``input / sqrt(mean(input ** 2) + eps) * weight`` over the last dimension, in float32 at least and rounded once.

    Args:
        input: rows.
        weight: one factor for each element of a row; None for none.
        eps: added to the mean of squares.

    Shapes:
        input ``[..., D]``, weight ``[D]``; the result is like the input.

    Raises:
        ValueError: the input is no row of floating-point numbers, or the weight is not one for each element.
    """
    _check_floating("rms_norm", "an input", input)
    if not input.dim():
        raise ValueError("lz.rms_norm: expected an input [..., D], received a tensor without dimensions. Give it a row")
    _check_weight("rms_norm", "weight", weight, input.shape[-1:])
    return _norm(input, (input.shape[-1],), weight, None, eps, is_centred=False)


def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``(input - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions.

    Args:
        input: rows.
        normalized_shape: the last dimensions of the input, which are normalised together.
        weight: one factor for each element; None for none.
        bias: one summand for each element; None for none.
        eps: added to the variance.

    Shapes:
        input ``[..., *normalized_shape]``, weight and bias ``normalized_shape``; the result is like the input.

    Raises:
        ValueError: the input is not of floating-point numbers, or the shapes do not fit.
    """
    _check_floating("layer_norm", "an input", input)
    given_shape = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    shape = tuple(operator.index(size) for size in given_shape)
    if not shape:
        raise ValueError("lz.layer_norm: expected one dimension at least, received (). Name the dimensions of a row")
    if tuple(input.shape[input.dim() - len(shape) :]) != shape:
        raise ValueError(f"lz.layer_norm: expected an input that ends in {shape}, received {tuple(input.shape)}")
    for name, given in (("weight", weight), ("bias", bias)):
        _check_weight("layer_norm", name, given, shape)
    return _norm(input, shape, weight, bias, eps, is_centred=True)


def rope(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """Rotary position embedding: pairs of features are turned by the angles of ``cos`` and ``sin``.

    Args:
        input: queries or keys.
        cos: cosines, one for each feature that is turned or one for each pair.
        sin: sines likewise.
        interleaved: feature ``2i`` is turned with its neighbour, else feature ``i`` with ``i + rotary_dim / 2``.
        rotary_dim: how many features are turned, the first ones; by default all.

    Shapes:
        input ``[..., D]``; cos and sin broadcastable to ``[..., rotary_dim]`` or ``[..., rotary_dim / 2]``; the result is
        like the input.

    Raises:
        ValueError: input and tables are not of floating-point numbers, or the tables do not fit.
    """
    for name, given in (("an input", input), ("cos", cos), ("sin", sin)):
        _check_floating("rope", name, given)
    if not input.dim():
        raise ValueError("lz.rope: expected an input [..., D], received a tensor without dimensions. Give it features")
    length = input.shape[-1]
    turned = length if rotary_dim is None else rotary_dim
    fits = cos.shape == sin.shape and cos.dim() > 0 and cos.shape[-1] in (turned, turned // 2)
    if turned > length or turned % 2 or not fits or not _broadcasts(cos.shape[:-1], input.shape[:-1]):
        raise ValueError(
            f"lz.rope: expected cos and sin of equal shape that end in {turned} (or {turned // 2}, one for each pair) and "
            f"broadcast to {tuple(input.shape)}, "
            f"received {tuple(cos.shape)} and {tuple(sin.shape)} for an input of {length} features. Pass rotary_dim where "
            "not all of them are turned"
        )
    part = input if turned == length else input[..., :turned]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    if cos.shape[-1] == turned:
        halves = (-second, first)
        rotated = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
        out = part * cos + rotated * sin
    else:
        halves = (first * cos - second * sin, second * cos + first * sin)
        out = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    out = out.to(input.dtype)
    return out if turned == length else torch.cat((out, input[..., turned:]), -1)


def alibi(slopes: torch.Tensor, queries: int, keys: int | None = None) -> torch.Tensor:
    """The bias of attention with linear biases: ``slopes * (key position - query position)``.

    The last query is at the position of the last key, as where the keys before are a cache.

    Args:
        slopes: one for each head.
        queries: how many there are.
        keys: how many there are, by default as many.

    Shapes:
        slopes ``[H]``; the result is ``[H, queries, keys]`` in the dtype of the slopes, to be added to scores.

    Raises:
        ValueError: there are more queries than keys or fewer than none, or slopes is no vector of floating-point numbers.
    """
    _check_floating("alibi", "slopes", slopes)
    keys = queries if keys is None else keys
    if slopes.dim() != 1 or not 0 <= queries <= keys:
        raise ValueError(
            "lz.alibi: expected slopes [H] and no more queries than keys, none negative, "
            f"received slopes {tuple(slopes.shape)}, {queries} queries and {keys} keys"
        )
    rows = torch.arange(keys - queries, keys, device=slopes.device)
    columns = torch.arange(keys, device=slopes.device)
    wide = torch.promote_types(slopes.dtype, torch.float32)  # half precision holds no long distance
    return (slopes[:, None, None].to(wide) * (columns[None, :] - rows[:, None]).to(wide)).to(slopes.dtype)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``input @ weight^T + bias``; PyTorch's GEMM library is the only kernel so far.

    Shapes:
        input ``[..., I]``, weight ``[O, I]``, bias ``[O]``; the result is ``[..., O]``.
    """
    return F.linear(input, weight, bias)


def embedding(input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The rows of ``weight`` that ``input`` names; PyTorch's lookup is the only kernel so far.

    Shapes:
        input ``[...]`` of integers, weight ``[V, D]``; the result is ``[..., D]``.
    """
    return F.embedding(input, weight, padding_idx)


def mlp_fused(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    down_weight: torch.Tensor,
    *,
    activation: Activation = "silu",
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(activation(input @ gate^T) * (input @ up^T)) @ down^T``; without ``up_weight`` an MLP that has no gate.

    Args:
        input: rows.
        gate_weight: of the projection that passes through the activation.
        up_weight: of the projection that it multiplies; None for an MLP without a gate.
        down_weight: of the projection back.
        activation: a key of :data:`ACTIVATIONS`.
        gate_bias: of the first projection.
        up_bias: of the second one.
        down_bias: of the last one.

    Shapes:
        input ``[..., I]``, gate and up ``[F, I]``, down ``[O, F]``; the result is ``[..., O]``.

    Raises:
        ValueError: there is no such activation, or a bias without its weight.
    """
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        hint = nearest(activation, [*ACTIVATIONS]) if isinstance(activation, str) else ""
        raise ValueError(f"lz.mlp_fused: no activation '{activation}'{hint}; valid are {', '.join(ACTIVATIONS)}")
    function = ACTIVATIONS[activation]
    if up_weight is None and up_bias is not None:
        raise ValueError("lz.mlp_fused: received up_bias without up_weight")
    if up_weight is not None and up_weight.shape != gate_weight.shape:
        raise ValueError(
            f"lz.mlp_fused: expected gate and up weights of equal shape, received {tuple(gate_weight.shape)} and "
            f"{tuple(up_weight.shape)}"
        )
    hidden = function(F.linear(input, gate_weight, gate_bias))
    if up_weight is not None:
        hidden = hidden * F.linear(input, up_weight, up_bias)
    return F.linear(hidden, down_weight, down_bias)


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centred: bool,
) -> torch.Tensor:
    own = partial(_own_norm, shape=shape, eps=eps, is_centred=is_centred)
    given = [each for each in (input, weight, bias) if each is not None]
    is_alike = all(each.device == input.device and each.is_floating_point() for each in given)
    has_choice = is_alike and 0 not in input.shape and not _is_traced(input, weight, bias)
    if not has_choice or not eager.has_choice("norm", input.device.type):
        return own(input, weight, bias)
    hidden = math.prod(shape)
    wide = reduce(torch.promote_types, (each.dtype for each in given), torch.float32)
    attrs = NormAttrs(
        is_centred=is_centred,
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
        compute_dtype=wide,
        rounded_to=wide,
        out_dtype=input.dtype,
    )
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    facts = NormFacts(input.numel() // hidden, hidden, input.dtype, input.device.type, needs_grad)
    kernel = eager.kernel_for("norm", attrs, facts, input.device)
    if kernel is None or kernel.call is None:
        return own(input, weight, bias)
    run = partial(_through, kernel.call, attrs, hidden)
    return _guarded(kernel.kernel_id, run, own, input, weight, bias)


def _own_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    shape: tuple[int, ...],
    eps: float,
    is_centred: bool,
) -> torch.Tensor:
    """PyTorch's function; weights in another dtype are multiplied before the result is rounded."""
    wide = input.dtype
    for each in (weight, bias):
        wide = wide if each is None else torch.promote_types(wide, each.dtype)
    given = (each if each is None or each.dtype == wide else each.to(wide) for each in (input, weight, bias))
    rows, factor, summand = given
    assert rows is not None, "the input is given"
    if is_centred:
        return F.layer_norm(rows, shape, factor, summand, eps).to(input.dtype)
    return F.rms_norm(rows, shape, factor, eps).to(input.dtype)


def _through(
    call: Callable[..., torch.Tensor],
    attrs: NormAttrs,
    hidden: int,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A kernel over the op's canonical operands."""
    weights = {name: each.flatten() for name, each in (("weight", weight), ("bias", bias)) if each is not None}
    return call(input=input.reshape(-1, hidden), **weights, attrs=attrs).reshape(input.shape)


# ---- all of them -----------------------------------------------------------------------------------------------------


def _is_traced(*given: torch.Tensor | None) -> bool:
    """Whether a compiler or a transform looks on, or a tensor is of a kind that only PyTorch's own functions know."""
    is_transformed = forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    is_plain = all(type(each) in _PLAIN for each in given if each is not None)
    return torch.compiler.is_dynamo_compiling() or is_transformed or not is_plain


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape can be broadcast to another one."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(own in (1, other) for own, other in pairs)


def _guarded(kernel_id: str, run: Callable[..., Any], own: Callable[..., Any], *operands: Any) -> torch.Tensor:
    """A kernel that is retired if it fails; the call is then completed by PyTorch's own."""

    def complete(*operands: Any) -> Any:
        eager.forget()
        return own(*operands)

    enabled = policy.current().settings.fallback_enabled
    result: torch.Tensor = health.guarded(kernel_id, run, complete, *operands, fallback_enabled=enabled)
    return result


def _check_floating(function: str, name: str, given: torch.Tensor) -> None:
    if not given.is_floating_point():
        raise ValueError(
            f"lz.{function}: expected {name} of floating-point numbers, received {given.dtype}. Cast it, as by .float()"
        )


def _check_weight(function: str, name: str, weight: torch.Tensor | None, shape: Sequence[int]) -> None:
    if weight is not None and tuple(weight.shape) != tuple(shape):
        raise ValueError(
            f"lz.{function}: expected {name} of shape {tuple(shape)}, received {tuple(weight.shape)}. "
            "Give one number for each element of a row"
        )
