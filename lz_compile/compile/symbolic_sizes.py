"""Symbolic sizes of a match: their ranges, the dims that they give, and questions that become guards of Dynamo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.ground.sizes import Size, as_size
from lz_compile.lowering import frames
from lz_compile.passes.graph.view import tensor_of, value_of
from lz_compile.runtime.problem.context import UNKNOWN_SIZE, sizes_of

if TYPE_CHECKING:
    import sympy

    from lz_compile.passes.rewriting.match import Match


@dataclass(frozen=True)
class Symbol:
    """One symbol: the size that the graph was traced with and its range (``upper`` None: without end).

    ``is_declared`` says that the user declared the range: no guard may cut it. ``size`` is None where nothing can be asked,
    because data decides the size; ``hint`` is then a guess.
    """

    expression: sympy.Symbol
    size: torch.SymInt | None
    hint: int
    lower: int
    upper: int | None

    @property
    def name(self) -> str:
        """As torch prints it (``s77``)."""
        return str(self.expression)

    @property
    def is_declared(self) -> bool:
        """Whether the range is the user's: every symbol is 2 or more, and has an end only where one was declared."""
        return self.upper is not None or self.lower > 2

    def is_below(self, edge: int) -> bool:
        """Whether the size is below ``edge``: asked of torch, so that the answer becomes a guard of the compiled code."""
        assert self.size is not None, f"{self.name} < {edge} is asked of a size that data decides"
        return bool(self.size < edge)


@dataclass(frozen=True)
class SymbolicSizes:
    """The sizes of a match over its symbols: those that can be asked about, and those that are ``hidden`` (data decides)."""

    symbols: Mapping[str, Symbol]
    sizes: Mapping[str, Size]
    hidden: Mapping[str, Symbol] = field(default_factory=dict)

    def at(self, values: Mapping[str, int]) -> dict[str, int]:
        """Every size as a number, with the symbols at ``values``, the others as they were traced."""
        known = {**self.symbols, **self.hidden}
        numbers = {symbol.expression: values.get(name, symbol.hint) for name, symbol in known.items()}
        return {name: s if isinstance(s, int) else max(int(s.xreplace(numbers)), 0) for name, s in self.sizes.items()}

    def names_in(self, dims: tuple[str, ...]) -> list[str]:
        """The symbols that the sizes of some dims depend on."""
        found: dict[str, None] = {}
        for dim in dims:
            size = self.sizes[dim]
            if not isinstance(size, int):
                found.update(dict.fromkeys(sorted(str(symbol) for symbol in size.free_symbols)))
        return list(found)


def symbolic_sizes(match: Match) -> SymbolicSizes | None:
    """The sizes of a match, None where all of them are numbers."""
    sizes: dict[str, Size] = sizes_of(match.op, match.facts)
    wanted = {symbol for size in sizes.values() if not isinstance(size, int) for symbol in size.free_symbols}
    if not wanted:
        return None
    found: dict[str, Symbol] = {}
    for node in match.output.graph.nodes:
        if len(found) == len(wanted) or node is match.output:
            break
        value = value_of(node)
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            _add(size, wanted, found)
    tensors = [tensor for tensor in map(tensor_of, match.operands.values()) if tensor is not None]
    for symbol in wanted:
        if str(symbol) not in found:  # no node shows it by itself, as u0 in a length of 2 * u0
            found[str(symbol)] = _symbol(symbol, None, frames.symbolic_size(symbol, tensors))
    hidden = {name: symbol for name, symbol in found.items() if symbol.size is None}
    return SymbolicSizes({name: symbol for name, symbol in found.items() if name not in hidden}, sizes, hidden)


def _add(size: Any, wanted: set[Any], found: dict[str, Symbol]) -> None:
    if not isinstance(size, torch.SymInt):
        return
    expression = as_size(size)
    if isinstance(expression, int) or expression not in wanted or str(expression) in found:
        return
    found[str(expression)] = _symbol(expression, size, frames.range_of(size))


def _symbol(expression: sympy.Symbol, size: torch.SymInt | None, known: frames.SymbolicSize) -> Symbol:
    guess = UNKNOWN_SIZE if known.upper is None else min(UNKNOWN_SIZE, known.upper)
    hint = max(known.lower, guess) if known.hint is None else known.hint
    return Symbol(expression, None if known.hint is None else size, hint, known.lower, known.upper)
