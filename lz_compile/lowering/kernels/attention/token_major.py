"""Attention with tokens before heads, as most libraries, our own tiles and models that join their heads have it.

The same op in another layout, as operators of a graph take it (see ``lowering/kernel_operator.py``):

    query  [B, Sq, Hq, D]       key  [B, Sk, Hk, D]       value  [B, Sk, Hk, E]      result  [B, Sq, Hq, E], contiguous

Everything else is as in ``lowering/ops/attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.kernel_operator import Kernel
from lz_compile.lowering.operands import operands
from lz_compile.lowering.ops import attention as canonical

Attributes = AttentionAttrs
DIFFERENTIABLE = canonical.DIFFERENTIABLE
#: An empty result: its sizes come in the order of the query's.
fake = canonical.fake


@operands
class Operands(canonical.Operands):
    """The op's with tokens before heads.

    ``seed`` are two numbers from 0 to 1 that decide what dropout drops, and ``rows`` the queries of a tile, where a kernel
    asks for them.
    """

    seed: torch.Tensor | None = None
    rows: int | None = None


def reference(x: Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """What completes a call in which a kernel fails."""
    return by_pytorch(turned(x, canonical.Operands), attrs).transpose(1, 2)


def by_pytorch(x: canonical.Operands, attrs: AttentionAttrs) -> torch.Tensor:
    """Attention in the op's canonical layout by SDPA where it can, which stores no scores."""
    from lz_compile.lowering.kernels.attention import blocked, torch_sdpa

    needs_more = attrs.softcap is not None or x.sinks is not None or x.fill is not None
    return blocked.attention(x, attrs) if needs_more else torch_sdpa.attention(x, attrs)


def through(kernel: Kernel, kind: type[Operands] = Operands) -> Callable[..., Any]:
    """A kernel over tokens (operands of ``kind``) as one over the op's canonical operands: views, nothing is moved."""

    def attention(x: canonical.Operands, attrs: AttentionAttrs, **further: Any) -> torch.Tensor:
        """Attention in the op's canonical layout (see ``lowering/ops/attention.py``); ``further`` operands of tokens."""
        found: torch.Tensor = kernel(turned(x, kind, **further), attrs).transpose(1, 2)
        return found

    return attention


def turned(x: canonical.Operands, kind: Any, **further: Any) -> Any:
    """Tokens before heads, or heads before tokens again."""
    given = {name: each for name, each in x.given().items() if name in kind.names}
    return kind(**{**given, **{name: given[name].transpose(1, 2) for name in ("query", "key", "value")}, **further})
