"""FlashInfer's top-k and top-p: the scores that ``top_k_mask_logits`` keeps, and what ``top_p_renorm_probs`` leaves of them.

PyTorch masks, adds, divides and takes the softmax. Tokens are not given: FlashInfer draws by a generator of its own.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import Operands, SamplingAttrs, scores

#: Its kernels read as many bytes at once.
_ALIGNMENT = 16


def _kept(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs

    if not x.logits.numel():
        return op.fake(x, attrs)
    z = _scores(x, attrs)
    is_finite = z.amax(-1).isfinite()  # the largest is NaN where anything is
    if x.top_k is not None or x.temperature is not None:
        z = top_k_mask_logits(z, _counts(x, z.shape[-1], is_finite))
    if attrs.result == "scores":
        return z.to(attrs.out_dtype)
    probabilities = torch.softmax(z, -1)
    if x.top_p is not None:
        top_p = torch.where(is_finite, x.top_p, 1.0)
        left = top_p_renorm_probs(
            probabilities, top_p.clamp(min=torch.finfo(torch.float32).tiny), is_deterministic=True
        )
        probabilities = torch.where((top_p >= 1)[:, None], probabilities, left)  # it rounds away what is least likely
    return probabilities.to(attrs.out_dtype)


def _scores(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """Scores ``[N, V]`` as FlashInfer takes them: in float32, or in the dtype of logits that are only masked and selected."""
    is_exact = attrs.result == "scores" and x.bias is None and x.temperature is None
    z = scores(x, x.logits.dtype if is_exact else torch.float32).contiguous()
    return z.clone() if z.data_ptr() % _ALIGNMENT else z


def _counts(x: Operands, vocab: int, is_finite: torch.Tensor) -> torch.Tensor:
    """How many scores of each row are kept, int32 ``[N]``: at temperature zero one, and all of a row without distribution."""
    counts = torch.full_like(is_finite, vocab, dtype=torch.int32)
    if x.top_k is not None:
        counts = torch.where(x.top_k > 0, x.top_k, counts)
    if x.temperature is not None:
        counts = torch.where(x.temperature == 0, 1, counts)
    return torch.where(is_finite, counts, vocab)


top_k_scores = kernel_operator("flashinfer_top_k_scores", op, _kept, kernel_id="flashinfer.top_k_scores")
top_k_probs = kernel_operator("flashinfer_top_k_probs", op, _kept, kernel_id="flashinfer.top_k_probs")
top_p_probs = kernel_operator("flashinfer_top_p_probs", op, _kept, kernel_id="flashinfer.top_p_probs")
