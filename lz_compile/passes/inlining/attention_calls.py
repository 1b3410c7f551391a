"""What torch's own attention functions compute, as the torch functions that they consist of.

Each function here has the signature of the one that it spells out, is called with tensors or with proxies, and returns
the attention's output only. ``F.multi_head_attention_forward`` is written in Python and runs as it is; the two eval-mode
fast paths are not, and are spelled with the operations of the slow path.

**Source**: torch 2.13, ``torch/nn/functional.py`` and ``aten/src/ATen/native/transformers/``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.passes.graph.refusal import RefusedError

REFUSED = "MHA_CALL_NOT_INLINED"


def _forward() -> Callable[..., Any]:
    """``F.multi_head_attention_forward`` itself, to be called with proxies.

    It asks neither whether its arguments are a kind of tensor that wants the call as a whole, nor whether they are tensors.
    Made where it is called: what cannot be (a wrapped function, say) costs the spelling, not the import.
    """
    function = F.multi_head_attention_forward
    answers = {
        "has_torch_function": lambda _: False,
        "_none_or_dtype": lambda mask: None if mask is None else mask.dtype,
    }
    return FunctionType(function.__code__, vars(F) | answers, argdefs=function.__defaults__)


@wraps(F.multi_head_attention_forward)
def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Element 0 of ``F.multi_head_attention_forward``.

    Raises:
        RefusedError: keys or values that are appended or given, or a causal hint without its mask.
    """
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    for name in ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn"):
        if given.get(name) is not None and given[name] is not False:
            text = f"{name} adds or replaces keys and values after their projection"
            raise RefusedError(REFUSED, text, f"leave {name} out")
    if given.get("is_causal") and given.get("attn_mask") is None:
        text = "is_causal is a hint about attn_mask, and there is none"
        raise RefusedError(REFUSED, text, "pass the causal attn_mask")
    return _forward()(**given)[0]


def native_multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """Element 0 of ``torch._native_multi_head_attention``; here a mask is True, or not zero, where it hides a key.

    Raises:
        RefusedError: a mask without a known ``mask_type`` (0 for queries and keys, 1 for keys, 2 for all dimensions).
    """
    if mask is not None and mask_type not in (0, 1, 2):
        raise RefusedError(REFUSED, f"mask_type {mask_type} of a mask is not documented", "pass mask_type 0, 1 or 2")
    project = vars(F)["_in_projection_packed"]  # with one product for those that are the same tensor
    q, k, v = (
        x.unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)
        for x in project(query, key, value, qkv_weight, qkv_bias)
    )
    if mask is None:
        output = F.scaled_dot_product_attention(q, k, v)
    else:
        is_hidden = mask if mask.dtype == torch.bool else mask.to(torch.bool)
        if mask_type == 1:
            is_hidden = is_hidden.unsqueeze(1).unsqueeze(1)
        scores = torch.matmul(q * math.sqrt(num_head / embed_dim), k.transpose(-2, -1))
        output = torch.matmul(F.softmax(scores.masked_fill(is_hidden, -math.inf), dim=-1), v)
    return F.linear(output.transpose(1, 2).flatten(-2), proj_weight, proj_bias)


def transformer_encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """``torch._transformer_encoder_layer_fwd``: attention and feed-forward with residuals and norms around them."""

    def attention(x: Any) -> Any:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, mask_type=mask_type)

    def feed_forward(x: Any) -> Any:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        # aten._addmm_activation has the exact GELU on a CPU, the tanh approximation on accelerators
        approximate = "none" if src.device.type == "cpu" else "tanh"
        hidden = F.gelu(hidden, approximate=approximate) if use_gelu else F.relu(hidden)
        return F.linear(hidden, ffn_weight_2, ffn_bias_2)

    first = (norm_weight_1, norm_bias_1, eps)
    second = (norm_weight_2, norm_bias_2, eps)
    if norm_first:
        x = src + attention(F.layer_norm(src, (embed_dim,), *first))
        return x + feed_forward(F.layer_norm(x, (embed_dim,), *second))
    x = F.layer_norm(src + attention(src), (embed_dim,), *first)
    return F.layer_norm(x + feed_forward(x), (embed_dim,), *second)


def softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """The softmax of what is smallest."""
    return F.softmax(-input, dim, _stacklevel, dtype)


#: What is spelled out as torch itself has it, by the function that Dynamo leaves in its graph.
CALLED: Mapping[Any, Callable[..., Any]] = {F.multi_head_attention_forward: multi_head_attention, F.softmin: softmin}
#: All that is spelled out.
BODIES: Mapping[Any, Callable[..., Any]] = {**CALLED} | {
    getattr(torch, name): body
    for name, body in (
        ("_native_multi_head_attention", native_multi_head_attention),
        ("_transformer_encoder_layer_fwd", transformer_encoder_layer),
    )
    if hasattr(torch, name)  # private names; a torch without them leaves none in its graphs
}
