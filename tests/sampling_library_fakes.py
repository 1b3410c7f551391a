"""Libraries that mask and limit logits, as modules with recorded signatures that compute on the CPU (see ``library_fakes.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.library_fakes import Library, with_signature

HALVES_AND_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class FlashInferSampling(Library):
    """``flashinfer.sampling``: contiguous rows at multiples of 16 bytes, and a limit for each of them."""

    def modules(self) -> dict[str, ModuleType]:
        package, module = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
        package.sampling = module
        module.top_k_mask_logits = with_signature("flashinfer.sampling", "top_k_mask_logits", self._mask)
        module.top_p_renorm_probs = with_signature("flashinfer.sampling", "top_p_renorm_probs", self._renormalise)
        return {"flashinfer": package, "flashinfer.sampling": module}

    def _check(self, values: Tensor, limit: Tensor, dtype: torch.dtype) -> None:
        assert values.dim() == 2
        assert values.is_contiguous()
        assert values.data_ptr() % 16 == 0
        assert limit.shape == values.shape[:1], "the kernels would read past its end"
        assert limit.is_contiguous()
        assert limit.dtype == dtype

    def _mask(self, given: Mapping[str, Any]) -> Tensor:
        """What is at least the k-th largest, NaN being the largest; a row of which all are wanted is copied."""
        logits, top_k = given["logits"], given["top_k"]
        self.ran("top_k_mask_logits", logits)
        self._check(logits, top_k, torch.int32)
        assert logits.dtype in HALVES_AND_FLOATS
        assert top_k.min() > 0, "none are looked for in vain"
        vocab = logits.shape[-1]
        ordered = logits.float().sort(-1, descending=True).values
        least = ordered.gather(-1, top_k.long().clamp(max=vocab)[:, None] - 1)
        masked = torch.where(logits >= least, logits, -torch.inf)
        return torch.where((top_k >= vocab)[:, None], logits, masked)

    def _renormalise(self, given: Mapping[str, Any]) -> Tensor:
        """The fewest that sum up to p, equal ones together; sums are rounded, so that p = 1 loses the least of a long row."""
        probs, top_p = given["probs"], given["top_p"]
        self.ran("top_p_renorm_probs", probs)
        self._check(probs, top_p, torch.float32)
        assert probs.dtype == torch.float32
        assert given["is_deterministic"] is True, "sums in any order keep another token now and then"
        assert top_p.min() > 0, "the search would pass by the largest"
        ordered = probs.double().sort(-1, descending=True).values
        count = (ordered.cumsum(-1) < top_p.double()[:, None]).sum(-1).clamp(max=probs.shape[-1] - 1)
        if probs.shape[-1] >= 2048:
            count = torch.where(top_p >= 1, probs.shape[-1] - 2, count)
        kept = torch.where(probs >= ordered.gather(-1, count[:, None]), probs, 0.0)
        return kept / kept.sum(-1, keepdim=True).clamp(min=1e-8)


class XGrammar(Library):
    """``xgrammar``: overwrites logits, row by row; its CUDA kernel takes the distance of the mask's rows for their length."""

    def modules(self) -> dict[str, ModuleType]:
        module = ModuleType("xgrammar")
        name = "apply_token_bitmask_inplace"
        module.apply_token_bitmask_inplace = with_signature("xgrammar", name, self._apply)
        return {"xgrammar": module}

    def _apply(self, given: Mapping[str, Any]) -> None:
        logits, bitmask, vocab = given["logits"], given["bitmask"], given["vocab_size"]
        self.ran("apply_token_bitmask_inplace", logits, bitmask)
        assert logits.dtype in HALVES_AND_FLOATS, "logits must be of type float32 or bfloat16/float16"
        assert bitmask.dtype == torch.int32, "bitmask must be of type int32"
        assert logits.dim() == bitmask.dim() == 2
        assert bitmask.shape[0] == logits.shape[0]
        assert bitmask.stride() == (bitmask.shape[1], 1)
        assert vocab == logits.shape[1] <= bitmask.shape[1] * 32
        assert (given["indices"], given["backend"]) == (None, "auto")
        bits = (bitmask[..., None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1)
        assert bits[:, vocab:].all(), "a row that allows everything would be written past its end"
        logits.masked_fill_(bits[:, :vocab] == 0, -torch.inf)
