"""Problems of any op by its sizes, with random operands: what ``lz.tune`` measures and ``lz.warmup`` runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lz_compile.api.arguments import Arguments
from lz_compile.api.given import check_operation
from lz_compile.errors import ArgumentError, nearest
from lz_compile.lowering import ops
from lz_compile.runtime.problem import context as contexts

#: One number, or several, for each size by its name.
Sizes: TypeAlias = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class SizedProblem:
    """An operation at given sizes in a dtype."""

    operation: str
    dtype: torch.dtype
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={self.sizes[name]}" for name in contexts.dim_names(self.op))
        return f"{self.operation} {contexts.name_of(self.dtype)} {sizes}"

    @property
    def op(self) -> str:
        """The operation without its variant."""
        return self.operation.partition(".")[0]

    def sample(self, device: torch.device, *, training: bool = False, **details: Any) -> Any:
        """The op's own sample."""
        variant = self.operation.partition(".")[2]
        named = {"variant": variant, **details} if variant else details
        return ops.module(self.op).sample(self.sizes, self.dtype, device, is_training=training, **named)


def grid(function: str, operation: str, dtypes: Sequence[torch.dtype], sizes: Sizes) -> list[SizedProblem]:
    """Every combination of sizes, of every variant of an operation; sizes that are not given are the op's typical ones.

    Raises:
        UnknownOperationError: there is no such operation.
        ArgumentError: it has no such size, a size is no whole number above 0, or a dtype is none of numbers.
    """
    check_operation("tuning" if function == "tune" else "warming up", operation)
    arguments = Arguments(function)
    for dtype in dtypes:
        arguments.floating_dtype("dtype", dtype)
    arguments.instance("sizes", sizes, Mapping, "as one or several numbers by name, {'seq_len_q': (128, 512)}")
    op = operation.partition(".")[0]
    module, names = ops.module(op), contexts.dim_names(op)
    for name, size in sizes.items():
        if name not in names:
            known = ", ".join(names)
            raise ArgumentError(
                function, "sizes", f"by the names that {op} has, {known}", f"'{name}'{nearest(name, names)}"
            )
        if (
            isinstance(size, (str, bytes, torch.Tensor))
            or not isinstance(size, (int, Iterable))
            or not (several := _several(size))
        ):
            raise arguments.wrong(name, "as a whole number or several", repr(size))
        for each in several:
            arguments.number(name, each, 1, whole=True)
    chosen = {**module.TYPICAL_SIZES, **{name: _several(size) for name, size in sizes.items()}}
    follow: Mapping[str, str] = getattr(module, "SIZES_FOLLOW", {})

    def whole(combination: Sequence[int]) -> dict[str, int]:
        found = dict(zip(chosen, combination, strict=True))
        return {name: found[name] if name in found else found[follow[name]] for name in names}

    combinations = [whole(each) for each in itertools.product(*chosen.values())]
    variants = [] if "." in operation else [f"{op}.{variant}" for variant in contexts.variants(op)]
    return [
        SizedProblem(each, dtype, combination)
        for dtype in dtypes
        for each in variants or [operation]
        for combination in combinations
    ]


def _several(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)
