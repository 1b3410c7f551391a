"""FlashInfer's top-k and top-p: the scores that ``top_k_mask_logits`` keeps, and what ``top_p_renorm_probs`` leaves of them.

PyTorch masks, adds, divides and takes the softmax. Tokens are not given: FlashInfer draws by a generator of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lz_compile.lowering.opaque_sampling import sampler
from lz_compile.lowering.ops.sampling import SamplingAttrs, scores

#: Its kernels read as many bytes at once.
_ALIGNMENT = 16


def _fill(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> None:
    from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs

    z = _scores(operands, attrs)
    is_finite = z.amax(-1).isfinite()  # the largest is NaN where anything is
    if attrs.has_top_k or attrs.has_temperature:
        z = top_k_mask_logits(z, _counts(operands, z.shape[-1], is_finite))
    if attrs.result == "scores":
        out.copy_(z)
        return
    probabilities = torch.softmax(z, -1)
    if attrs.has_top_p:
        top_p = torch.where(is_finite, operands["top_p"], 1.0)
        left = top_p_renorm_probs(
            probabilities, top_p.clamp(min=torch.finfo(torch.float32).tiny), is_deterministic=True
        )
        probabilities = torch.where((top_p >= 1)[:, None], probabilities, left)  # it rounds away what is least likely
    out.copy_(probabilities)


def _scores(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs) -> torch.Tensor:
    """Scores ``[N, V]`` as FlashInfer takes them: in float32, or in the dtype of logits that are only masked and selected."""
    logits = operands["logits"]
    is_exact = attrs.result == "scores" and not (attrs.has_bias or attrs.has_temperature)
    dtype = logits.dtype if is_exact else torch.float32
    z = scores(logits, operands.get("bitmask"), operands.get("bias"), operands.get("temperature"), dtype).contiguous()
    return z.clone() if z.data_ptr() % _ALIGNMENT else z


def _counts(operands: Mapping[str, torch.Tensor], vocab: int, is_finite: torch.Tensor) -> torch.Tensor:
    """How many scores of each row are kept, int32 ``[N]``: at temperature zero one, and all of a row without distribution."""
    counts = torch.full_like(is_finite, vocab, dtype=torch.int32)
    if "top_k" in operands:
        counts = torch.where(operands["top_k"] > 0, operands["top_k"], counts)
    if "temperature" in operands:
        counts = torch.where(operands["temperature"] == 0, 1, counts)
    return torch.where(is_finite, counts, vocab)


top_k_scores = sampler("flashinfer_top_k_scores", "flashinfer.top_k_scores", _fill)
top_k_probs = sampler("flashinfer_top_k_probs", "flashinfer.top_k_probs", _fill)
top_p_probs = sampler("flashinfer_top_p_probs", "flashinfer.top_p_probs", _fill)
