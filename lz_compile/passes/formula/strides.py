"""Whether anybody can tell in which order the elements of a tensor lie."""

from __future__ import annotations

from torch import fx

from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.pointwise import is_pointwise
from lz_compile.passes.graph.view import read

#: Readers to which the strides of what they read make no difference that anyone can see.
_AGNOSTIC = contraction.PRODUCTS | {"contiguous", "layer_norm", "rms_norm", "sum", "mean"}


def strides_matter(node: fx.Node) -> bool:
    """Whether strides of ``node`` matter to someone: a ``view`` that needs them, an output, or who knows what."""
    queue, seen = list(node.users), set()
    while queue:
        user = queue.pop()
        call = None if user in seen else read(user)
        if user in seen or (call is not None and call.name in _AGNOSTIC):
            continue
        seen.add(user)
        if call is None or call.is_inplace or call.name in ("view", "view_as"):
            return True
        if (
            not layout.is_view(call)
            and not is_pointwise(call)
            and call.name not in ("chunk", "split", "unbind", "getitem")
        ):
            return True
        queue.extend(user.users)
    return False
