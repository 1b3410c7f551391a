"""The op vocabulary: one module per op, named like it.

What each has, and some have:

    Operands              what it is given, in one canonical layout; LAYOUT names that
    Attributes            its attributes, which operators of a graph encode as text
    SHAPES                the dimensions of operands: equal letters are equal sizes, ``X|1`` broadcasts, a number is that size
    KINDS                 what operands are that are no tensors of floating-point numbers of 16 bits or more
    LENGTHS               dimensions that differ from call to call: a proof holds up to a bound of theirs
    DIFFERENTIABLE        the operands, the first ones, that opaque kernels give gradients of
    VARIANT_ATTRIBUTES    the variants of the operation, with what makes each
    EAGER_KERNEL          what an eager call runs where nothing is better; without one there are no eager calls
    EXACT_DIMS            sizes that a measurement must have exactly
    BUCKETED_DIMS         those that it may differ in within a bucket; a product is one size
    TIMELESS_FEATURES     features that cost no time
    TYPICAL_SIZES         that are measured where no others are asked for; SIZES_FOLLOW: those that are another's then

and the functions ``reference``, ``fake``, ``from_operands``, ``features`` and ``sample`` (see CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Every op there is."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def module(op: str) -> Any:
    """The module that defines an op."""
    return importlib.import_module(f"{__name__}.{op}")
