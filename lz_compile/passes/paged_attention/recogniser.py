"""Calls of ``lz.paged_attention``, which graphs hold as the operator ``layerzero::paged_attention``: the op itself.

Which kernel such a call selects by itself is not asked here, but where kernels are chosen (``own_calls.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.lowering.ops import paged_attention as op
from lz_compile.lowering.ops.paged_attention import Operands, PagedAttentionAttrs, PagedAttentionFacts
from lz_compile.passes.formula.axes import Axis, Dims, broadcast_from
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.own_calls import arguments_of
from lz_compile.passes.graph.refusal import RefusedError
from lz_compile.passes.graph.writes import refuse_transformed


@dataclass(frozen=True)
class PagedCall:
    """What a call is given, its attributes and facts, and the axes that each letter of the op's table stands for."""

    given: Mapping[str, fx.Node]
    tensors: Mapping[str, torch.Tensor]
    attrs: PagedAttentionAttrs
    facts: PagedAttentionFacts
    axes: Mapping[str, tuple[Axis, ...]]

    def dims(self, name: str) -> Dims:
        """The axes of an operand's dimensions."""
        return broadcast_from(tuple(self.axes[letter] for letter in _letters(name)), shape_of(self.tensors[name]))


def recognise(node: fx.Node, effects: Effects) -> PagedCall:
    """What one call is.

    Raises:
        RefusedError: it is mapped over a dimension, has nothing to do, or a symbolic number of heads.
    """
    refuse_transformed(effects.ambient(node))
    given, tensors, named = arguments_of(node, Operands, "scale", "softcap", "window", "out_dtype")
    if any(as_size(size) == 0 for each in tensors.values() for size in each.shape):
        raise RefusedError("EMPTY", "there are no queries, or no blocks", "leave the call out")
    sizes = _sizes(tensors)
    if not (isinstance(sizes["Hq"], int) and isinstance(sizes["Hk"], int)):
        raise RefusedError("SYMBOLIC_HEADS", "how many heads share keys is a symbol", "compile with static heads")
    attrs, facts = op.from_operands(Operands(**tensors), sizes, **named)
    return PagedCall(given, tensors, attrs, facts, _axes(sizes, is_ragged=attrs.is_ragged))


def _letters(name: str) -> list[str]:
    return [each.removesuffix("|1") for each in op.SHAPES[name].split()]


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Extents by the letters of the op's table."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for letter, size in zip(_letters(name), tensor.shape, strict=True):
            found.setdefault(letter, as_size(size))
    return found


def _axes(sizes: Mapping[str, Any], *, is_ragged: bool) -> dict[str, tuple[Axis, ...]]:
    """Axes by letter: those of query heads are the cache's times a group, and requests of one query are the queries."""
    axes: dict[str, tuple[Axis, ...]] = {letter: () if size == 1 else (Axis(size),) for letter, size in sizes.items()}
    group = sizes["Hq"] // sizes["Hk"]
    axes["Hq"] = (*axes["Hk"], *(() if group == 1 else (Axis(group),)))
    if not is_ragged:
        axes["T"] = axes["R"]
    return axes
