"""The largest and the second largest along a dimension, or a difference of both, whatever they were found by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from lz_compile.passes.axes import Dims
from lz_compile.passes.view import tensor_of


@dataclass(frozen=True)
class Rank:
    """``largest * first + second * second largest`` of ``source`` along ``dim``; ``nodes`` are all that it is made of.

    With ``is_distinct`` the second largest is the largest of those that differ from the largest. ``is_spelled`` says that
    the source names the number of elements, ``inserted`` are dimensions of one that the value has besides.
    """

    source: fx.Node
    dim: int
    first: int
    second: int
    keeps_dim: bool
    nodes: frozenset[fx.Node]
    inserted: tuple[int, ...] = ()
    is_distinct: bool = False
    is_sorted: bool = False
    is_spelled: bool = False

    def of_source(self, dims: Dims, classes: Dims) -> Dims:
        """The dims of the source, given those of this value, and those of the class dimension."""
        dims = tuple(dim for place, dim in enumerate(dims) if place not in self.inserted)
        rest = (*dims[: self.dim], *dims[self.dim + self.keeps_dim :])
        return (*rest[: self.dim], *classes, *rest[self.dim :])


def rank_of(node: fx.Node) -> int:
    """How many dimensions a tensor has."""
    tensor = tensor_of(node)
    assert tensor is not None, f"{node.name} is no tensor"
    return tensor.dim()
