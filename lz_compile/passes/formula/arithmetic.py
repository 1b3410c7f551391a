"""What arithmetic computes in any algebra whose values add and multiply: a line for each operation.

Sums of products of a loop's step, terms of a blend, expressions over leaves and numbers by cases are such algebras. Each says
how it reads an operand; what is made of operands stands here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arithmetic:
    """``of(*operands, *factors)``: values by their parameters, in the order of these, and numbers that are one by default."""

    of: Callable[..., Any]
    operands: tuple[str, ...] = ("input", "other")
    factors: tuple[str, ...] = ()


_SCALED = ("alpha",)
ARITHMETIC: Mapping[str, Arithmetic] = {
    "add": Arithmetic(lambda x, y, alpha: x + alpha * y, factors=_SCALED),
    "sub": Arithmetic(lambda x, y, alpha: x - alpha * y, factors=_SCALED),
    "rsub": Arithmetic(lambda x, y, alpha: y - alpha * x, factors=_SCALED),
    "mul": Arithmetic(lambda x, y: x * y),
    "neg": Arithmetic(lambda x: -x, ("input",)),
    "square": Arithmetic(lambda x: x * x, ("input",)),
    "addcmul": Arithmetic(lambda x, y, z, value: x + value * (y * z), ("input", "tensor1", "tensor2"), ("value",)),
    "lerp": Arithmetic(lambda x, y, weight: x + weight * (y - x), ("input", "end", "weight")),
}

#: Choices by a condition, which is zero or one.
CHOICES: Mapping[str, Arithmetic] = {
    "where": Arithmetic(lambda c, x, y: c * x + (1 - c) * y, ("condition", "input", "other")),
    "masked_fill": Arithmetic(lambda x, c, y: c * y + (1 - c) * x, ("input", "mask", "value")),
}

_OR = Arithmetic(lambda x, y: x + y - x * y)
_XOR = Arithmetic(lambda x, y: x + y - 2 * (x * y))
#: Truth values, as numbers that are zero or one.
LOGIC: Mapping[str, Arithmetic] = {
    "not": Arithmetic(lambda x: 1 - x, ("input",)),
    "and": ARITHMETIC["mul"],
    "mul": ARITHMETIC["mul"],
    "or": _OR,
    "add": _OR,
    **dict.fromkeys(("xor", "logical_xor", "bitwise_xor"), _XOR),
}
