"""Calls that order the scores of a row, or select among them."""

from __future__ import annotations

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.graph.view import Call, tensor_of

ORDERING = frozenset({"topk", "sort", "argsort", "msort", "kthvalue"})
MAXIMA = frozenset({"max", "amax"})


def is_ordering(node: fx.Node) -> bool:
    """Whether a call orders the scores of a row, or selects among them."""
    return getattr(node.target, "__name__", node.target) in ORDERING


def ordered_dim(call: Call) -> int | None:
    """The dimension along which a call orders scores, or finds their maximum; None for others, and for single elements."""
    source = tensor_of(call.input)
    if call.name not in ORDERING | MAXIMA | {"argmax"} or source is None or not source.dim():
        return None
    dim = call.get("dim")
    if dim is None and call.name in ORDERING:
        dim = 0 if call.name == "msort" else -1
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int):
        return None
    place = dim % source.dim()
    return place if shape_of(source)[place] != 1 else None
