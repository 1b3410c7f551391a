"""How most matches are put into a kernel's form: by a table that says what each operand is, over which axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from lz_compile.lowering.operands import Operands
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims
from lz_compile.passes.rewriting.builder import Builder, Groups


@dataclass(frozen=True)
class Cell:
    """One operand: a tensor, or a formula of the leaves of ``region``, as a tensor with one dimension per group of axes.

    Axes of a group that a tensor lacks are repeated where it ``is_whole``, and its gradient ends here where it
    ``is_detached``. A formula is computed in ``dtype``.
    """

    what: Leaf | sympy.Expr
    groups: Groups
    is_whole: bool = False
    is_detached: bool = False
    region: Region | None = None
    dtype: torch.dtype = torch.float32

    def value(self, builder: Builder) -> Any:
        """The operand in its canonical layout."""
        if isinstance(self.what, Leaf):
            given = builder.value(self.what.node)
            value = builder.arrange(given, self.what.dims, self.groups, expand=self.is_whole)
            return value.detach() if self.is_detached else value
        assert self.region is not None, "a formula speaks of the leaves of a region"
        return builder.evaluate(self.what, self.region, self.groups, self.dtype)


class TableEmitter:
    """What is alike in emitters: operands by :meth:`table`, and a result that only moves.

    The attributes are the same at all sizes, and imply nothing about the values of inputs. What is different overrides it.
    """

    kind: ClassVar[type[Operands]]
    attrs: Any
    output_dims: Dims

    def table(self) -> Mapping[str, Cell]:
        """What each operand is.

        Raises:
            NotImplementedError: the emitter has no table, and makes its operands itself.
        """
        raise NotImplementedError(f"{type(self).__name__} has no table of operands")

    @property
    def groups(self) -> Groups:
        """The axes of the kernel's result, one group for each of its dimensions.

        Raises:
            NotImplementedError: the emitter has no such groups, and makes its result itself.
        """
        raise NotImplementedError(f"{type(self).__name__} has no groups of axes")

    def operands(self, builder: Builder) -> Any:
        """The op's operands in its canonical layout, in the order of the table."""
        return self.kind(**{name: cell.value(builder) for name, cell in self.table().items()})

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's result in the layout of the node that it replaces."""
        return builder.restore(value, self.groups, self.output_dims)

    def attributes_at(self, _sizes: Mapping[Axis, int]) -> Any:
        """The attributes for a proof at other sizes: the same."""
        return self.attrs

    def implied_value(self, node: fx.Node, builder: Builder, given: torch.Tensor, sizes: Mapping[Axis, int]) -> Any:
        """Nothing is implied here.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"{node.name} is implied by no attribute")
