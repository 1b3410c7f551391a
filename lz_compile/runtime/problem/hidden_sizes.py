"""Sizes that a decision depends on but cannot ask about, and sizes of which nothing is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lz_compile.runtime.problem.buckets import REACH, Sample, tree
from lz_compile.runtime.problem.decision_tree import Node

#: Compilations of a function that questions leave to other reasons to compile it again (dtype, gradients, modules).
SPARE_COMPILES = 2


class Unanswerable(Exception):
    """A question about a size that no guard can, or should, answer; the text says why. The decision is then taken without."""


def compiles_are_scarce() -> bool:
    """Whether Dynamo has compiled the present function so often that no more guards can be afforded.

    Past its limit it runs a function eagerly without a word.
    """
    from lz_compile.lowering import frames

    left = frames.compiles_left()
    return left is not None and left < SPARE_COMPILES


def grown(
    samples: Sequence[Sample],
    spoken_of: Sequence[bool],
    names: Sequence[str],
    incumbent: str,
    margin: float,
    preference: Sequence[str],
) -> Node:
    """The decision tree over symbols. Where nothing is known of any kernel, far from all that is, it names none.

    Args:
        samples: one for each point.
        spoken_of: whether a measurement or prior speaks of a point.
        names: the symbols.
        incumbent: the kernel to take where no other is better.
        margin: by how much another must be.
        preference: of kernels that are equally fast, the first one is taken.
    """
    known = [sample for sample, is_known in zip(samples, spoken_of, strict=True) if is_known]
    is_everywhere = len(known) in (0, len(samples))
    reach = math.inf if is_everywhere else REACH
    return tree(samples if is_everywhere else known, names, incumbent, margin, preference=preference, reach=reach)
