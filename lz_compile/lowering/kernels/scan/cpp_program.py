"""The C++ of one scan: a loop over its steps, written for the terms, dtypes and wanted gradients that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from lz_compile.lowering.cpp.vectors import ELEMENTS, vectors
from lz_compile.lowering.kernels.scan.cpp_backward import BACKWARD
from lz_compile.lowering.kernels.scan.cpp_forward import FORWARD
from lz_compile.lowering.kernels.scan.cpp_step import AFTER_TERMS, BEFORE_TERMS
from lz_compile.lowering.kernels.scan.cpp_terms import LEAF, Leaf, Recipe, leaves_source, terms_source
from lz_compile.lowering.ops.scan import DIMS, DROPPED, DecayKind

#: A block of columns has at most so many registers: three or four blocks are in use at once.
MAX_VECTORS = 4
#: What a block costs beside its registers, in registers.
BLOCK_COST = 2


@dataclass(frozen=True)
class Program:
    """What the code of a scan depends on.

    Args:
        decay: what there is a factor for.
        drive: what there is a summand for.
        rank: how many updates a step has.
        reads: how many reads a step has.
        has: the operands that there are.
        constant: those that are the same at every step.
        gradients: those whose gradients are computed (of the code of a backward).
        reads_before: a step reads the state that it found.
        drops: a decay may drop the state.
        dtypes: of every operand that there is, by name.
        compute_dtype: of the state while it is computed.
        out_dtype: of what is read.
        state_dtype: of the last state.
        lanes: elements of a vector register.
        vectors: registers of a block of columns.
        recipe: how operands are computed that are not given.
        leaves: what of.
    """

    decay: DecayKind
    drive: DecayKind
    rank: int
    reads: int
    has: frozenset[str]
    constant: frozenset[str]
    gradients: frozenset[str]
    reads_before: bool
    drops: bool
    dtypes: tuple[tuple[str, torch.dtype], ...]
    compute_dtype: torch.dtype
    out_dtype: torch.dtype
    state_dtype: torch.dtype
    lanes: int
    vectors: int
    recipe: Recipe = field(default_factory=Recipe)
    leaves: tuple[Leaf, ...] = ()

    def source(self, *, backward: bool) -> str:
        """C++ with one function: ``scan_backward`` or ``scan_forward``."""
        return _source(self, backward)

    def configuration(self) -> str:
        """The constants and types that the code is written in terms of."""
        dtypes: Mapping[str, torch.dtype] = dict(self.dtypes)
        types = [
            *((f"{name.title()}T", dtypes.get(name, self.compute_dtype)) for name in DIMS),
            ("OutT", self.out_dtype),
            ("LastT", self.state_dtype),
        ]
        flags = {
            "kState": "state" in self.has,
            "kErase": "erase" in self.has,
            "kQuery": "query" in self.has,
            "kBefore": self.reads_before,
            "kDrops": self.drops,
            "kElements": "query" not in self.has and not self.rank,
            "kComputed": bool(self.recipe.given()),
            "kLast": self.recipe.last,
            **{f"kConstant{name.title()}": name in self.constant for name in DIMS},
            **{f"kGrad{name.title()}": name in self.gradients for name in DIMS},
        }
        return "\n".join(
            [
                *(f"using {name} = {ELEMENTS[dtype]};" for name, dtype in types),
                "enum Kind { kNone, kScalar, kKey, kValue, kFull };",
                f"constexpr Kind kDecay = k{self.decay.title()};",
                f"constexpr Kind kDrive = k{self.drive.title()};",
                f"constexpr Acc kDropped = {DROPPED};",
                f"constexpr int64_t R = {self.rank}, R1 = {max(self.rank, 1)}, Q = {self.reads}, Q1 = {max(self.reads, 1)};",
                *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
                leaves_source(self.leaves),
            ]
        )


@lru_cache(maxsize=256)
def _source(program: Program, backward: bool) -> str:
    leaves = [dtype for _, dtype in program.leaves]
    dtypes = [*dict(program.dtypes).values(), *leaves, program.out_dtype, program.state_dtype]
    prelude = vectors(program.compute_dtype, program.lanes, program.vectors, dtypes)
    terms = (LEAF if program.leaves else "", terms_source(program.recipe, program.leaves))
    step = (BEFORE_TERMS, *terms, AFTER_TERMS, BACKWARD if backward else FORWARD)
    return "\n".join((prelude, program.configuration(), *step))


def vectors_for(columns: int, lanes: int) -> int:
    """How many registers a block has, such that few elements go unused and there are few blocks."""
    needed = -(-columns // lanes)

    def cost(count: int) -> int:
        return -(-needed // count) * (count + BLOCK_COST)

    return min(range(min(MAX_VECTORS, max(needed, 1)), 0, -1), key=cost)
