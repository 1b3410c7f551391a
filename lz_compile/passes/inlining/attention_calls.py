"""What torch's own attention functions compute, written in the torch functions that they consist of.

Each function here has the signature of the one that it spells out, is called with tensors or with proxies, and returns
the attention's output only. ``F.multi_head_attention_forward`` is followed operation by operation, so that spelling it
out alone changes nothing; the two eval-mode fast paths are spelled with the operations of the slow path.

**Source**: torch 2.13, ``torch/nn/functional.py`` and ``aten/src/ATen/native/transformers/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.passes.graph.refusal import RefusedError

REFUSED = "MHA_CALL_NOT_INLINED"
CAUSAL = "causal"  # the mask that the hint stands for; only SDPA is told


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Element 0 of ``F.multi_head_attention_forward``, whose parameters these are.

    Raises:
        RefusedError: keys or values that are appended or given, or a causal hint without its mask.
    """
    _refuse_extra_keys(bias_k=bias_k, bias_v=bias_v, static_k=static_k, static_v=static_v, add_zero_attn=add_zero_attn)
    if is_causal and attn_mask is None:
        raise RefusedError(
            REFUSED, "is_causal is a hint about attn_mask, and there is none", "pass the causal attn_mask"
        )
    is_batched = len(query.shape) == 3
    if not is_batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    projected = _project(query, key, value, weights, in_proj_bias, embed_dim=embed_dim_to_check)
    is_hinted = is_causal and key_padding_mask is None and not need_weights
    mask = CAUSAL if is_hinted else _merged_mask(attn_mask, key_padding_mask, num_heads, query.dtype)
    attend = _attention_by_softmax if need_weights else _attention_by_sdpa
    rows = attend(projected, mask, num_heads, embed_dim_to_check, float(dropout_p) if training else 0.0)
    length, batch = query.shape[:2]
    output = F.linear(rows, out_proj_weight, out_proj_bias).view(length, batch, out_proj_weight.shape[0])
    return output if is_batched else output.squeeze(1)


def _refuse_extra_keys(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            text = f"{name} adds or replaces keys and values after their projection"
            raise RefusedError(REFUSED, text, f"leave {name} out")


def _project(query: Any, key: Any, value: Any, weights: Any, bias: Any, *, embed_dim: int) -> list[Any]:
    """The projections of query, key and value, with one product for those that are the same tensor."""
    if isinstance(weights, tuple):
        biases = _parts(bias, 3 * [embed_dim])
    elif key is value and query is key:
        return _stacked(F.linear(query, weights, bias), 3, embed_dim)
    elif key is value:
        sizes = [embed_dim, 2 * embed_dim]
        (w_q, w_kv), (b_q, b_kv) = _parts(weights, sizes), _parts(bias, sizes)
        return [F.linear(query, w_q, b_q), *_stacked(F.linear(key, w_kv, b_kv), 2, embed_dim)]
    else:
        weights, biases = _parts(weights, 3 * [embed_dim]), _parts(bias, 3 * [embed_dim])
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _parts(packed: Any, sizes: list[int]) -> list[Any]:
    """A parameter in parts of ``sizes``; as many None where there is no parameter."""
    parts = None if packed is None else packed.split(sizes)
    return [None if parts is None else parts[i] for i in range(len(sizes))]


def _stacked(packed: Any, count: int, embed_dim: int) -> list[Any]:
    """The parts of a packed projection, each contiguous."""
    stacked = packed.unflatten(-1, (count, embed_dim)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return [stacked[i] for i in range(count)]


def _merged_mask(attn_mask: Any, key_padding_mask: Any, num_heads: int, dtype: torch.dtype) -> Any:
    """What is added to the scores, broadcastable to ``(N, H, L, S)``; None where there is nothing."""
    merged = None
    if attn_mask is not None:
        bias, is_shared = _additive(attn_mask, dtype), len(attn_mask.shape) == 2
        merged = bias.unsqueeze(0).unsqueeze(0) if is_shared else bias.unflatten(0, (-1, num_heads))
    if key_padding_mask is None:
        return merged
    padding = _additive(key_padding_mask, dtype).unsqueeze(1).unsqueeze(1)
    return padding if merged is None else merged + padding


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    """A floating-point mask as it is; a bool one with ``-inf`` where it is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _heads(projected: Any, num_heads: int, embed_dim: int) -> Any:
    """``(L, N, E)`` as ``(N, H, L, D)``."""
    length, batch = projected.shape[:2]
    return projected.view(length, batch, num_heads, embed_dim // num_heads).permute(1, 2, 0, 3)


def _attention_by_sdpa(projected: list[Any], mask: Any, num_heads: int, embed_dim: int, dropout_p: float) -> Any:
    """Rows of the concatenated heads, ``(L * N, E)``."""
    query, key, value = (_heads(x, num_heads, embed_dim) for x in projected)
    is_causal = mask is CAUSAL
    output = F.scaled_dot_product_attention(query, key, value, None if is_causal else mask, dropout_p, is_causal)
    return output.permute(2, 0, 1, 3).reshape(-1, embed_dim)


def _attention_by_softmax(projected: list[Any], mask: Any, num_heads: int, embed_dim: int, dropout_p: float) -> Any:
    """Rows of the concatenated heads, ``(L * N, E)``, through probabilities that are NaN where all is masked."""
    length, batch = projected[0].shape[:2]
    query, key, value = (_heads(x, num_heads, embed_dim).flatten(0, 1) for x in projected)
    query = query * math.sqrt(1.0 / float(embed_dim // num_heads))
    if mask is None:
        scores = torch.bmm(query, key.transpose(-2, -1))
    else:
        bias = mask.expand(batch, num_heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(bias, query, key.transpose(-2, -1))
    probabilities = F.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        probabilities = F.dropout(probabilities, p=dropout_p)
    return torch.bmm(probabilities, value).transpose(0, 1).reshape(length * batch, embed_dim)


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
    q, k, v = (
        x.unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)
        for x in _project(query, key, value, qkv_weight, qkv_bias, embed_dim=embed_dim)
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


#: What is spelled out, by the function that Dynamo leaves in its graph.
BODIES: Mapping[Any, Callable[..., Any]] = {F.multi_head_attention_forward: multi_head_attention} | {
    getattr(torch, name): body
    for name, body in (
        ("_native_multi_head_attention", native_multi_head_attention),
        ("_transformer_encoder_layer_fwd", transformer_encoder_layer),
    )
    if hasattr(torch, name)  # private names; a torch without them leaves none in its graphs
}
