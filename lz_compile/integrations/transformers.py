"""Attention of ``transformers`` models: importing this module registers ``attn_implementation="layerzero"``.

Each call of a model's attention selects a kernel like ``lz.attention`` does. Soft caps, sinks, position biases and grouped
heads are operands and attributes of the op; masks are those that the model makes for PyTorch's own function. In a model that
is compiled, by our backend or another, attention is PyTorch's operations, which our backend reads. Continuous batching has
no mask: every request attends to its own keys.

**Source** ``AttentionInterface`` and ``AttentionMaskInterface`` of transformers 5; checked with 5.23.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lz_compile.api import paged_calls
from lz_compile.api.attention_calls import attend
from lz_compile.errors import ArgumentError, IntegrationError
from lz_compile.lowering.bands import Band
from lz_compile.lowering.ops import paged_attention as paged
from lz_compile.lowering.ops.attention import Operands

NAME = "layerzero"
_DOING = "integrations.transformers.attention"
#: What models hand on that changes nothing here: masks say it already, or it is for other kernels.
_KNOWN = frozenset(
    "position_ids cu_seq_lens_q cu_seq_lens_k num_items_in_batch seq_idx cache_position logits_indices "
    "logits_processor_args".split()
)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as models of transformers call it.

    Args:
        module: the model's attention; what it calls ``is_causal`` holds where the argument says nothing.
        query: what looks.
        key: what is looked at; a divisor of the query's heads is enough heads.
        value: what is read.
        attention_mask: boolean (True keeps) or added to the scores; without one, attention of several queries is causal
            where ``is_causal`` says so.
        dropout: probability of dropout.
        scaling: of the scores, by default ``D ** -0.5``.
        is_causal: see ``attention_mask``.
        softcap: scores are ``softcap * tanh(scores / softcap)``.
        s_aux: an extra score of every head that takes part in the softmax and has no value (a sink).
        position_bias: added to the scores.
        sliding_window: how many keys a query sees, with a paged cache; a mask says it otherwise.
        cache: a paged cache, of which keys and values are the newest; requests lie one behind the other.
        **others: what models hand to other implementations; with a paged cache, where each request begins.

    Shapes:
        query ``[B, Hq, Sq, D]``, key ``[B, Hk, Sk, D]``, value ``[B, Hk, Sk, E]``, mask and bias broadcastable to
        ``[B, Hq, Sq, Sk]``, sinks ``[Hq]``; the result is ``[B, Sq, Hq, E]``, with None in the place of probabilities.
        With a paged cache ``B`` is 1.

    Raises:
        ArgumentError: probabilities are asked for, or a tensor is given whose meaning is not known.
    """
    _refuse_unknown(others)
    sinks = None if s_aux is None else s_aux.reshape(1, -1, 1, 1)
    attributes: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap}
    if cache is not None:
        newest = Operands(query, key, value, sinks=sinks)
        paged: torch.Tensor = _over_pages(newest, cache, module.layer_idx, sliding_window, attributes, others)
        return paged, None
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and queries > 1 and attention_mask is None
    if causal and keys > queries:  # a static cache that is being filled: keys beyond the queries are not there yet
        key, value = key[:, :, :queries], value[:, :, :queries]
    mask, bias = _for(key, attention_mask), _for(key, position_bias)
    if mask is not None and mask.dtype != torch.bool:
        if not mask.is_floating_point():
            advice = "Give mask.bool(), if ones keep"
            raise ArgumentError(_DOING, "attention_mask", "boolean (True keeps), or floating-point", mask.dtype, advice)
        bias = mask if bias is None else mask + bias
        mask = None
    out = attend(Operands(query, key, value, mask=mask, bias=bias, sinks=sinks), is_causal=causal, **attributes)
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # where a request begins is data
def _over_pages(
    x: Operands, cache: Any, layer: Any, window: int | None, attributes: Mapping[str, Any], others: dict[str, Any]
) -> torch.Tensor:
    """Each request over its own keys, ``[1, Sq, Hq, E]``; queries that are padding give zero."""
    if x.query.is_cuda and torch.cuda.is_current_stream_capturing():
        advice = "Leave CUDA graphs out (use_cuda_graph=False)"
        raise ArgumentError(
            _DOING, "cache", "outside of a capture, for requests differ from batch to batch", "one", advice
        )
    allocator = cache.layer_to_allocator[layer]
    if allocator.supports_block_table and others["read_index"][allocator.index].numel() and not attributes["dropout_p"]:
        return _in_place(x, allocator, layer, window, attributes, others)
    key, value = cache.update(key_states=x.key, value_states=x.value, layer_idx=layer, kwargs=others)
    starts = [others[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    band = Band(None if window is None else 1 - window, 0, at_end=True)
    out = x.query.new_zeros((1, x.query.shape[2], x.query.shape[1], value.shape[3]))
    for (a, b), (c, d) in zip(*map(itertools.pairwise, starts), strict=True):
        request = Operands(x.query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], sinks=x.sinks)
        out[:, a:b] = attend(request, band=band, **attributes).transpose(1, 2)
    return out


def _in_place(
    x: Operands, allocator: Any, layer: Any, window: int | None, attributes: Mapping[str, Any], others: dict[str, Any]
) -> torch.Tensor:
    """The same over the pages where they lie. Of each page, the table has what the first of its slots says."""
    read, written = (others[name][allocator.index] for name in ("read_index", "write_index"))
    tokens = [each[0].transpose(0, 1) for each in (x.query, x.key, x.value)]
    allocator.update(*tokens[1:], layer, read[:0], written)  # without an index to read by, it writes
    starts, slots = others["cu_seq_lens_k"][allocator.layer_type], allocator.tokens_per_page
    pages = -(-others["max_length_k"][allocator.layer_type] // slots)
    first = starts[:-1, None] + torch.arange(pages, device=starts.device) * slots
    table = (read[first.clamp(max=read.numel() - 1)] // slots).to(torch.int32)
    sinks = None if x.sinks is None else x.sinks.flatten()
    key_cache, value_cache = allocator.get_cache_for_block_table(layer)
    operands = paged.Operands(tokens[0], key_cache, value_cache, table, starts.diff(), others["cu_seq_lens_q"], sinks)
    attrs = paged.PagedAttentionAttrs(attributes["scale"], attributes["softcap"], window, out_dtype=x.query.dtype)
    return paged_calls.run(operands, attrs)[None]


def _for(key: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor | None:
    """What is as wide as the scores, in four dimensions, for the keys that there are.

    It is the tensor itself where nothing is cut: what is read of a mask is known by the mask.
    """
    if scores is None or (scores.dim() == 4 and scores.shape[3] <= key.shape[2]):
        return scores
    return scores[(None,) * (4 - scores.dim())][..., : key.shape[2]]


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    if others.get("output_attentions"):
        raise ArgumentError(
            _DOING, "output_attentions", "False, for no probabilities are kept", True, "Load the model with 'eager'"
        )
    for name, value in others.items():
        if isinstance(value, torch.Tensor) and name not in _KNOWN:
            expected = "absent, for what it changes is not known"
            raise ArgumentError(_DOING, name, expected, "a tensor", "Load the model with 'sdpa' or 'eager'")


def _register() -> None:
    """Make the name known to transformers.

    Raises:
        IntegrationError: transformers is missing, or has no such interfaces.
    """
    try:
        import transformers
        from transformers.generation.continuous_batching import ContinuousBatchingManager
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface, PreTrainedModel
    except ImportError as error:
        raise IntegrationError("transformers", ">=5", f"{error}") from error
    needed = {"mask_function", "attention_mask", "allow_is_causal_skip"}
    checked = getattr(PreTrainedModel, "get_correct_attn_implementation", None)
    batched = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if checked is None or batched is None or not needed.issubset(inspect.signature(sdpa_mask).parameters):
        received = f"{transformers.__version__}, whose attention interfaces are other ones"
        raise IntegrationError("transformers", ">=5, as 5.23 has it", received)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, functools.partial(_mask, sdpa_mask))
    PreTrainedModel.get_correct_attn_implementation = _refusing_others(checked)
    ContinuousBatchingManager.switch_to_cb_friendly_attn = _taking_ours(batched)


def _mask(make: Callable[..., torch.Tensor | None], *args: Any, **given: Any) -> torch.Tensor | None:
    """The mask that PyTorch's attention gets.

    It is always made for a model that drops queries behind the layers whose keys others share, as Gemma 4 does: which place
    a query has is then known by the mask only.
    """
    if getattr(given.get("config"), "num_kv_shared_layers", 0):
        given["allow_is_causal_skip"] = False
    return make(*args, **given)


def _taking_ours(checked: Callable[..., None]) -> Callable[..., None]:
    """The check of continuous batching, which has a list of the names that it takes."""

    @functools.wraps(checked)
    def check(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            checked(self, model, *args, **kwargs)

    return check


def _refusing_others(checked: Callable[..., str]) -> Callable[..., str]:
    """The check of transformers, which lets any registered name pass, also of a model whose attention looks for none."""

    @functools.wraps(checked)
    def check(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        found = checked(model, requested_attention, *args, **kwargs)
        is_asked = model._supports_sdpa or model._supports_attention_backend
        if found == NAME and (not is_asked or _has_classes_of_its_own(type(model))):
            text = f"{type(model).__name__} computes attention by itself, or by one of its own classes"
            advice = 'load it with "eager", and compile it with backend="layerzero", which reads what it computes'
            raise ValueError(f'attn_implementation="{NAME}": {text}; {advice}')
        return found

    return check


def _has_classes_of_its_own(model: type) -> bool:
    """Whether a model's module looks its attention up among classes of its own, as Falcon's does."""
    values = vars(sys.modules[model.__module__]).values()
    return any(isinstance(value, dict) and {"eager", "sdpa"}.issubset(value) for value in values)


_register()
