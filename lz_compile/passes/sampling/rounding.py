"""What rounding decides, a kernel would decide otherwise: filters of scores in half precision."""

from __future__ import annotations

import torch
from torch import fx

from lz_compile.passes.formula import layout
from lz_compile.passes.formula.calls import is_cast, is_constant
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.view import Call, tensor_of
from lz_compile.passes.sampling.excerpt import Excerpt
from lz_compile.passes.sampling.kept import Limits
from lz_compile.passes.sampling.stores import MAXIMA, ORDERING

_SELECTIONS = frozenset(
    {"masked_fill", "where", "neg", "clone", "min", "amin", "gather", "scatter", "take_along_dim", "getitem"}
)


def is_choice(node: fx.Node) -> bool:
    """Whether a value says which tokens are meant: a comparison, or places."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.dtype in (torch.bool, torch.int64)


def check_dtypes(found: Excerpt, limits: Limits) -> None:
    """Refuse sums and quotients of probabilities that are rounded to half precision: who is kept hangs on that.

    Raises:
        RefusedError: there are such.
    """
    tensors = [tensor_of(node) for node in found.core]
    halves = [each for each in tensors if each is not None and each.is_floating_point() and each.dtype.itemsize < 4]
    if halves and (limits.top_p is not None or limits.min_p is not None):
        raise RefusedError(
            "SUMS_IN_HALF",
            f"probabilities are compared in {halves[0].dtype}, whose rounding decides which tokens are kept",
            "take the softmax of scores in float32",
        )


def check_rounding(effects: Effects, found: Excerpt) -> None:
    """Refuse choices among values that were rounded to fewer bits than the scores have: more of them are equal.

    Raises:
        RefusedError: there are such.
    """
    rounded: dict[fx.Node, torch.dtype] = {}
    own = tensor_of(found.entry.node)
    for node in found.core:
        tensor = tensor_of(node)
        before = next((rounded[each] for each in node.all_input_nodes if each in rounded), None)
        if before is None and tensor is not None and tensor.is_floating_point() and own is not None:
            is_narrow = tensor.dtype.itemsize < max(own.dtype.itemsize, 4)
            before = tensor.dtype if is_narrow and not _is_exact(effects.calls[node], own.dtype) else None
        if before is None:
            continue
        rounded[node] = before
        if is_choice(node):
            raise RefusedError(
                "SUMS_IN_HALF",
                f"which tokens are kept is decided by values in {before}, and rounding makes some of them equal",
                "compare the scores themselves",
            )


def _is_exact(call: Call | None, kind: torch.dtype) -> bool:
    """Whether a call gives values that it was given, or known ones, in the dtype that these had."""
    tensor = None if call is None else tensor_of(call.node)
    if call is None or tensor is None or tensor.dtype != kind:
        return False
    is_same = layout.rearranges(call) or is_cast(call) or is_constant(call)
    return is_same or call.name in ORDERING | MAXIMA | _SELECTIONS
