"""Operations that a compiled backward computes again, instead of reading what the forward stored for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy


def recomputed(tensor: Any) -> AbstractContextManager[None]:
    """The operations made inside, where they become nodes of a graph that ``tensor`` is a proxy or a traced tensor of.

    A node says so in its metadata, as those that activation checkpointing makes do, and AOTAutograd's partitioner obeys;
    no graph is nested and nothing is kept out of its cache. Random numbers are the same again: by then they are functions
    of a seed. Operations that simply run, and those that Dynamo traces, are as ever.
    """
    if torch.compiler.is_dynamo_compiling() or not (isinstance(tensor, fx.Proxy) or get_proxy_mode() is not None):
        return nullcontext()
    return _marking()


@contextmanager
def _marking() -> Iterator[None]:
    with traceback.preserve_node_meta():
        traceback.current_meta = {**traceback.current_meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE}
        yield
