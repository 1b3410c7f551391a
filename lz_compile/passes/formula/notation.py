"""Index notation as ``einsum`` has it: which dimensions of which tensors have one index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from lz_compile.passes.graph.view import Call, known_tensor, tensor_of


@dataclass(frozen=True)
class Notation:
    """The tensors of an ``einsum``, the labels of their dimensions, and those of the result."""

    operands: tuple[fx.Node, ...]
    labels: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]


def notation(call: Call) -> Notation | None:
    """What an ``einsum`` says; None where it is given otherwise than by an equation and tensors."""
    equation, operands = call.input, [value for name, value in call.arguments.items() if name != "input"]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or any(tensor_of(operand) is None for operand in operands):
        return None
    labels, result = _parse(equation, [known_tensor(operand).dim() for operand in operands])
    return Notation(tuple(operands), tuple(map(tuple, labels)), tuple(result))


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Labels per operand and of the result; the dims of an ellipsis are labelled ``.0``, ``.1``, ... from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    labels = [_labels(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if not arrow:
        plain = [label for term in labels for label in term if not label.startswith(".")]
        output = "..." * ("..." in inputs) + "".join(sorted(label for label in set(plain) if plain.count(label) == 1))
    hidden = max((sum(label.startswith(".") for label in term) for term in labels), default=0)
    return labels, _labels(output, len(output.replace("...", "")) + (hidden if "..." in output else 0))


def _labels(term: str, rank: int) -> list[str]:
    head, dots, tail = term.partition("...")
    count = rank - len(head) - len(tail)
    return list(head) + ([f".{count - 1 - i}" for i in range(count)] if dots else []) + list(tail)
