"""Functions of single ops on tensors: norms, rotary embedding, ALiBi, projections and gated MLPs.

Without compiling, a norm runs the kernel that is expected to be the fastest here, PyTorch's own where nothing is better; the
other functions are PyTorch's own operations. In a function that is compiled, by whatever backend, a call is the plain PyTorch
code that it stands for; ours recognises norms, rotations and gated MLPs there and chooses, with what surrounds them in view.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F

from lz_compile.api.arguments import Arguments, remembered
from lz_compile.api.norm_calls import Norm, norm
from lz_compile.ground import events
from lz_compile.ground.isolation import is_autocast
from lz_compile.lowering import rows
from lz_compile.lowering.ops import mlp
from lz_compile.runtime.policy import policy

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


def rms_norm(input: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """``input / sqrt(mean(input ** 2) + eps) * weight`` over the last dimension, in float32 at least and rounded once.

    Args:
        input: rows.
        weight: one factor for each element of a row; None for none.
        eps: added to the mean of squares.

    Shapes:
        input ``[..., D]``, weight ``[D]``; the result is like the input.

    Raises:
        ArgumentError: the input is no row of floating-point numbers, or the weight is not one for each element.

    **Source** Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019.
    """
    _check_rms_norm(input, weight, eps)
    return norm(Norm((input.shape[-1],), eps, is_centred=False), input, weight, None)


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
        ArgumentError: the input is not of floating-point numbers, or the shapes do not fit.

    **Source** Ba, Kiros and Hinton, *Layer Normalization*, 2016.
    """
    shape = _whole(normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,))
    _check_layer_norm(input, shape, weight, bias, eps)
    return norm(Norm(shape, eps, is_centred=True), input, weight, bias)


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
        ArgumentError: input and tables are not of floating-point numbers, or the tables do not fit.

    **Source** Su et al., *RoFormer*, 2021, equation 34.
    """
    _check_rope(input, cos, sin, interleaved, rotary_dim)
    length = input.shape[-1]
    turned = length if rotary_dim is None else rotary_dim
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
        ArgumentError: there are more queries than keys or fewer than none, or slopes is no vector of floating-point numbers.

    **Source** Press, Smith and Lewis, *Train Short, Test Long*, 2022.
    """
    keys = queries if keys is None else keys
    _check_alibi(slopes, queries, keys)
    rows = torch.arange(keys - queries, keys, device=slopes.device)
    columns = torch.arange(keys, device=slopes.device)
    wide = torch.promote_types(slopes.dtype, torch.float32)  # half precision holds no long distance
    return (slopes[:, None, None].to(wide) * (columns[None, :] - rows[:, None]).to(wide)).to(slopes.dtype)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``input @ weight^T + bias`` by PyTorch's GEMM library.

    With ``deterministic: "batch_invariant"``, on a CPU and without gradients, it is computed so that a row has the same bits
    in every batch; elsewhere an event says that it is not.

    Shapes:
        input ``[..., I]``, weight ``[O, I]``, bias ``[O]``; the result is ``[..., O]``.

    Raises:
        ArgumentError: the tensors do not fit together.
    """
    _check_linear(input, weight, bias)
    if torch.compiler.is_dynamo_compiling() or not _rows_have_own_bits():
        return F.linear(input, weight, bias)
    if not is_autocast(input) and rows.serves(input, weight, bias, is_graded=torch.is_grad_enabled()):
        result: torch.Tensor = rows.linear(input, weight, bias)
        return result
    _tell_dependent("lz.linear, with gradients, under autocast or on this device,")
    return F.linear(input, weight, bias)


def _rows_have_own_bits() -> bool:
    return policy.current().settings.deterministic == "batch_invariant"


@cache
def _tell_dependent(what: str) -> None:
    events.record("NOT_BATCH_INVARIANT", f"{what} is not covered: a row may have other bits in another batch")


def embedding(input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The rows of ``weight`` that ``input`` names; PyTorch's lookup is the only kernel so far.

    Shapes:
        input ``[...]`` of integers, weight ``[V, D]``; the result is ``[..., D]``.

    Raises:
        ArgumentError: the tensors do not fit together, or (on a CPU, where it is not compiled) there is no such row.
    """
    _check_embedding(input, weight, padding_idx)
    if torch.compiler.is_dynamo_compiling():
        return F.embedding(input, weight, padding_idx)
    try:
        return F.embedding(input, weight, padding_idx)
    except IndexError as error:
        low, high = map(int, input.aminmax())
        wanted = f"of rows 0 to {weight.shape[0] - 1} of weight"
        raise Arguments("embedding").wrong("input", wanted, f"{low} to {high}") from error


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
        ArgumentError: there is no such activation, a bias without its weight, or the tensors do not fit together.

    **Source** Shazeer, *GLU Variants Improve Transformer*, 2020.
    """
    _check_mlp(activation, input, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    if not torch.compiler.is_dynamo_compiling() and _rows_have_own_bits():
        _tell_dependent("lz.mlp_fused in code that is not compiled")
    function = ACTIVATIONS[activation]
    hidden = function(F.linear(input, gate_weight, gate_bias))
    if up_weight is not None:
        hidden = hidden * F.linear(input, up_weight, up_bias)
    return F.linear(hidden, down_weight, down_bias)


def _whole(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Whatever counts as whole numbers, as such."""
    try:
        return tuple(operator.index(size) for size in sizes)
    except TypeError as error:
        wrong = Arguments("layer_norm").wrong(
            "normalized_shape", "as whole numbers", sizes, "Name the dimensions of a row"
        )
        raise wrong from error


# ---- what fits -------------------------------------------------------------------------------------------------------


@remembered
def _check_rms_norm(input: Any, weight: Any, eps: Any) -> None:
    given = Arguments("rms_norm")
    given.tensor("input", input, "... D")
    given.tensor("weight", weight, "D", "real", optional=True)
    given.number("eps", eps, 0.0)


@remembered
def _check_layer_norm(input: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> None:
    given = Arguments("layer_norm")
    if not shape:
        raise given.wrong("normalized_shape", "of one dimension at least", shape, "Name the dimensions of a row")
    given.tensor("input", input)
    if tuple(input.shape[max(input.dim() - len(shape), 0) :]) != shape:
        raise given.wrong(
            "input", f"that ends in {shape}", tuple(input.shape), "normalized_shape is its last dimensions"
        )
    for name, each in (("weight", weight), ("bias", bias)):
        given.tensor(name, each, kind="real", optional=True)
        if each is not None and tuple(each.shape) != shape:
            raise given.wrong(name, f"of shape {shape}", tuple(each.shape), "Give one number for each element of a row")
    given.number("eps", eps, 0.0)


@remembered
def _check_rope(input: Any, cos: Any, sin: Any, interleaved: Any, rotary_dim: Any) -> None:
    given = Arguments("rope")
    given.flag("interleaved", interleaved)
    given.tensor("input", input, "... D")
    given.tensor("cos", cos, "... C")
    given.tensor("sin", sin, "... C")
    length = input.shape[-1]
    given.number("rotary_dim", rotary_dim, 0, length, whole=True, optional=True)
    turned = length if rotary_dim is None else rotary_dim
    if turned % 2:
        name, found = ("input", length) if rotary_dim is None else ("rotary_dim", rotary_dim)
        raise given.wrong(name, "with an even number of features that are turned", found, "Pass rotary_dim")
    fits = cos.shape == sin.shape and cos.shape[-1] in (turned, turned // 2)
    if not fits:
        expected = f"and sin of equal shape that end in {turned} (or {turned // 2}, one for each pair)"
        found = f"{tuple(cos.shape)} and {tuple(sin.shape)} for an input of {length} features"
        raise given.wrong("cos", expected, found, "Pass rotary_dim where not all of them are turned")
    rows_of = cos[..., 0] if turned else cos.new_empty(cos.shape[:-1])
    given.broadcasts("cos", rows_of, input.shape[:-1], "the rows of input, ")


@remembered
def _check_alibi(slopes: Any, queries: Any, keys: Any) -> None:
    given = Arguments("alibi")
    given.tensor("slopes", slopes, "H")
    given.number("keys", keys, 0, whole=True)
    given.number("queries", queries, 0, keys, whole=True)


@remembered
def _check_linear(input: Any, weight: Any, bias: Any) -> None:
    given = Arguments("linear")
    given.tensor("input", input, "... I")
    given.tensor("weight", weight, "O I")
    given.tensor("bias", bias, "O", optional=True)
    if not is_autocast(input):
        given.equal_dtypes("input", input, weight=weight, bias=bias)


@remembered
def _check_embedding(input: Any, weight: Any, padding_idx: Any) -> None:
    given = Arguments("embedding")
    given.tensor("input", input, kind="index")
    given.tensor("weight", weight, "V D")
    rows = weight.shape[0]
    given.number("padding_idx", padding_idx, -rows, rows - 1, whole=True, optional=True)


#: The tensors of an MLP, in the order of a call, with their dimensions.
_MLP = {
    "input": "... I",
    "gate_weight": "H I",
    "up_weight": "H I",
    "down_weight": "O H",
    "gate_bias": "H",
    "up_bias": "H",
    "down_bias": "O",
}


@remembered
def _check_mlp(activation: Any, *tensors: Any) -> None:
    given, named = Arguments("mlp_fused"), dict(zip(_MLP, tensors, strict=True))
    given.one_of("activation", activation, list(ACTIVATIONS))
    for name, dims in _MLP.items():
        given.tensor(name, named[name], dims, optional=name in ("up_weight", "gate_bias", "up_bias", "down_bias"))
    if named["up_weight"] is None and named["up_bias"] is not None:
        raise given.wrong("up_bias", "with up_weight", "it alone", "Leave it out")
    input = named.pop("input")
    if not is_autocast(input):
        given.equal_dtypes("input", input, **named)
