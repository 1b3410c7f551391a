"""Distances between all queries and all keys, of which some make scores instead of products."""

from __future__ import annotations

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula import layout
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of

_REDUCTIONS = frozenset({"sum", "mean", "norm", "linalg_norm", "linalg_vector_norm"})
_POWERS = frozenset({"pow", "square", "abs", "mul", "div", "neg"})


def is_distance(effects: Effects, node: fx.Node) -> bool:
    """Whether a call measures how far the rows of two tensors are apart, each from each."""
    call = effects.calls.get(node)
    if call is None or call.name == "cdist":
        return call is not None
    source = effects.calls.get(call.input) if call.name in _REDUCTIONS else None
    while source is not None and (source.name in _POWERS or layout.rearranges(source)):
        source = effects.calls.get(source.input)
    if source is None or source.name != "sub":
        return False
    tensors = [tensor_of(source.get(name)) for name in ("input", "other")]
    if any(tensor is None for tensor in tensors):
        return False
    first, second = (shape_of(tensor)[::-1] for tensor in tensors if tensor is not None)
    pairs = list(zip(first, second, strict=False))
    return any(a == 1 != b for a, b in pairs) and any(b == 1 != a for a, b in pairs)
