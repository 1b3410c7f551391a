"""``lz.attention``: attention on tensors, without compiling, by the kernel that is the fastest for them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from lz_compile.api import eager
from lz_compile.api.arguments import PLAIN
from lz_compile.api.attention_arguments import Call, check
from lz_compile.ground.isolation import is_autocast
from lz_compile.lowering.ops.attention import positive

Layout = Literal["BHSD", "BSHD"]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    layout: Layout = "BHSD",
) -> torch.Tensor:
    """``softmax(scale * query @ key^T, keys) @ value`` by the kernel that is expected to be the fastest here.

    Rows that hold NaN, or whose every key is masked, give what the kernel gives; PyTorch's gives zero for the latter. In
    a function that is compiled this is a call of ``scaled_dot_product_attention``, for which our backend chooses.

    Args:
        query: what looks.
        key: what is looked at; a divisor of the query's heads is enough heads.
        value: what is read.
        causal: query ``i`` sees the keys up to ``i`` only (as ``scaled_dot_product_attention`` has it, also where there are
            more keys than queries); a mask comes on top.
        mask: boolean (True keeps) or added to the scores, broadcastable to ``[B, Hq, Sq, Sk]``. One of
            integers, as tokenizers give it, is refused: give ``mask.bool()``.
        scale: of the scores, by default ``D ** -0.5``.
        dropout_p: probability of dropout, whether in training or not.
        layout: of query, key, value and result. It is not guessed from sizes: a wrong guess would be silently wrong.

    Shapes:
        query ``[B, Hq, Sq, D]``, key ``[B, Hk, Sk, D]``, value ``[B, Hk, Sk, E]``; the result is ``[B, Hq, Sq, E]``. In
        layout ``BSHD`` the two middle dimensions of each change places.

    Raises:
        ArgumentError: the tensors are no attention's, the layout has another name, or the mask is of integers.
        KernelExecutionError: the kernel failed, and ``fallback_enabled`` is off; otherwise PyTorch's completes the call.
        NoKernelFoundError: no kernel can run, and ``fallback_enabled`` is off.

    **Source** Vaswani et al., *Attention Is All You Need*, 2017, equation 1.
    """
    call = Call(query, key, value, mask, causal, scale, dropout_p, layout)
    if (
        torch.compiler.is_dynamo_compiling()
        or type(query) not in PLAIN
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return _written_out(call)
    try:
        if torch._C._is_any_autocast_enabled():
            call = _cast(call)
        return eager.plan(call)(*call[:4])
    except (AttributeError, TypeError, IndexError, RuntimeError):  # no tensor, no key, or not dense: said by its name
        check(call)
        raise


def _written_out(call: Call) -> torch.Tensor:
    """The call of PyTorch's function that is traced, or that tensors of another kind understand."""
    query, key, value, mask, causal, scale, dropout_p, layout = call
    check(call, isinstance(query, torch.Tensor) and is_autocast(query))
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if causal and mask is not None:
        causal, mask = False, _with_causality(mask, query.shape[2], key.shape[2])
    if causal and scale is not None and scale <= 0:
        query, scale = positive(query, scale)
    is_grouped = False
    if query.shape[1] != key.shape[1]:  # a branch: a symbolic comparison is no flag
        is_grouped = True
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2) if layout == "BSHD" else out


def _with_causality(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    keep = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, -torch.inf)


def _cast(call: Call) -> Call:
    """The tensors as autocast gives them to ``scaled_dot_product_attention``, which not every kernel hears of."""
    if not is_autocast(call.query):
        return call
    dtype = torch.get_autocast_dtype(call.query.device.type)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = None if call.mask is None else cast(call.mask)
    return call._replace(query=cast(call.query), key=cast(call.key), value=cast(call.value), mask=mask)
