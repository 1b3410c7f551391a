"""Where gradients of the kept adapter stop: nowhere, or for the tokens of a mask.

``where(m, kept.detach(), kept)`` is ``m * stopped + (1 - m) * kept``, and so is every other way to spell it. The value must
be that of the adapter; only what flows back may depend on the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.routing.roles import Adapter

_NEAR = 1e-9


@dataclass(frozen=True)
class Kept:
    """An adapter, its number, and where gradients stop: where ``mask`` is (not, with ``is_inverted``) set."""

    adapter: Adapter
    coefficient: float
    mask: sympy.Symbol | None = None
    is_inverted: bool = False


def kept_of(adapters: Sequence[Adapter]) -> Kept:
    """The one adapter that terms of the same tensors are.

    Raises:
        RefusedError: they are none, or their gradients are not simply kept or stopped.
    """
    masks = {mask for each in adapters for mask in each.masks}
    if len(masks) > 1 or any(len(each.masks) > 1 for each in adapters):
        raise RefusedError(
            "MASK_GENERAL",
            "the kept adapter is chosen by several masks",
            "detach it where one cosine is above a threshold",
        )
    flowing = [each for each in adapters if not each.is_detached]
    if len({each.detached for each in flowing}) > 1:
        raise RefusedError(
            "PARTLY_DETACHED",
            "some tensors of the kept adapter are detached for some tokens, others are not",
            "detach the adapter's whole result: torch.where(m, kept.detach(), kept)",
        )
    flows = [sum(each.coefficient for each in flowing if bool(each.masks) == masked) for masked in (False, True)]
    values = [sum(each.coefficient for each in adapters if bool(each.masks) == masked) for masked in (False, True)]
    first = (flowing or adapters)[0]
    if abs(values[1]) > _NEAR:
        raise RefusedError(
            "VALUE_MASKED", "the mask changes the value of the kept adapter", "let the mask stop gradients only"
        )
    if not flowing or (_same(flows[0], values[0]) and _same(flows[1], 0)):
        return Kept(first, values[0])
    mask = next(iter(masks), None)
    if mask is not None and _same(flows[0], values[0]) and _same(flows[1], -values[0]):
        return Kept(first, values[0], mask)
    if mask is not None and _same(flows[0], 0) and _same(flows[1], values[0]):
        return Kept(first, values[0], mask, is_inverted=True)
    raise RefusedError(
        "GRADIENT_SCALED",
        f"the kept adapter is {values[0]:g} times its tensors, its gradient {flows[0]:g} times",
        "let gradients flow as they are, or stop them",
    )


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * max(1.0, abs(other))
