"""Counting in kernels, which are called with tensors and, to write a graph, with proxies."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def arange(like: Any, length: Any) -> torch.Tensor:
    """``0`` to before ``length`` on the device of a tensor; ``torch.arange`` itself takes no proxies."""
    if not isinstance(like, fx.Proxy):
        return torch.arange(length, device=like.device)
    tracer: Any = like.tracer
    found: torch.Tensor = tracer.create_proxy("call_function", torch.arange, (length,), {"device": like.device})
    return found
