"""What an op is given: one frozen dataclass per op, whose fields are its operands in the canonical layout.

Kernels, references, adapters and proofs are functions of such an object and the op's attributes: ``f(x, attrs)``. PyTorch
knows the classes as trees, so that whatever maps over tensors maps over them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils import _pytree as pytree
from typing_extensions import Self, dataclass_transform

from lz_compile.ground.sizes import is_one

Kind = TypeVar("Kind", bound="type[Operands]")


class MisfitError(ValueError):
    """Operands, each of a right shape, that are none of the op together; ``operand`` is the one to change."""

    def __init__(self, op: str, operand: str, expected: str, received: object, advice: str = "") -> None:
        self.operand, self.expected, self.received, self.advice = operand, expected, received, advice
        super().__init__(f"{op}: expected {operand} {expected}, received {received}")


class Operands:
    """The operands of an op: fields with a default are optional, None where they are not given."""

    #: All operands, in the op's order. (Dynamo does not look into classes by ``dataclasses.fields``.)
    names: ClassVar[tuple[str, ...]] = ()
    #: Those that need not be given.
    optional: ClassVar[frozenset[str]] = frozenset()
    #: Those of the sizes of each operand, the last one first, as the op's module names them in ``SHAPES``.
    letters: ClassVar[Mapping[str, Sequence[str]]] = {}

    def flat(self) -> tuple[Any, ...]:
        """Every operand in order, None for those that are not given."""
        return tuple([getattr(self, name) for name in self.names])  # a generator costs twice as much, at every call

    def given(self) -> dict[str, Any]:
        """The operands that there are, by name."""
        return {name: each for name, each in zip(self.names, self.flat(), strict=True) if each is not None}

    def has(self, *names: str) -> dict[str, bool]:
        """Which of some optional operands there are, as attributes tell it: ``has_bias``."""
        return {f"has_{name}": getattr(self, name) is not None for name in names}

    def sizes(self, known: Callable[[Any], Any] = lambda size: size) -> Mapping[str, Any]:
        """What is ``known`` of the sizes of tensors, by the letters of the op's ``SHAPES``; what only broadcasts is 1."""
        found: defaultdict[str, Any] = defaultdict(lambda: 1)
        for name, each in self.given().items():
            if isinstance(each, torch.Tensor):
                for dim, size in zip(self.letters[name], reversed(each.shape), strict=False):
                    if not is_one(size):
                        found.setdefault(dim, known(size))
        return found

    def map(self, function: Callable[[Any], Any]) -> Self:
        """The same with a function of every operand that there is in its place."""
        return type(self)(**{name: function(each) for name, each in self.given().items()})

    def wants_gradient(self, *names: str) -> bool:
        """Whether gradients are recorded, and one of these operands (by default of all) requires one."""
        given = self.given()
        wanted = [given[name] for name in names if name in given] if names else list(given.values())
        return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in wanted)

    def wide(self, attrs: Any) -> torch.dtype:
        """What is computed in where nothing is rounded: float32, or the widest of the operands and the source's own steps."""
        found = torch.promote_types(attrs.compute_dtype, torch.float32)
        for each in self.flat():
            dtype = getattr(each, "dtype", found)  # of numbers, and of what is not given, there is none
            found = found if dtype == found else torch.promote_types(found, dtype)
        return found

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The operands that are tensors, without those that are not given."""
        return tuple(each for each in self.flat() if isinstance(each, torch.Tensor))


@dataclass_transform(frozen_default=True)
def operands(cls: Kind) -> Kind:
    """Make a frozen dataclass of a class of operands, and a tree of PyTorch's."""
    made = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]  # it is one now
    made.names = tuple(each.name for each in fields)
    made.optional = frozenset(each.name for each in fields if each.default is not dataclasses.MISSING)
    shapes = vars(sys.modules[cls.__module__]).get("SHAPES", {})
    made.letters = {name: [dim.removesuffix("|1") for dim in reversed(dims.split())] for name, dims in shapes.items()}
    pytree.register_dataclass(made)
    return made  # type: ignore[return-value]  # dataclasses give back the class that they are given
