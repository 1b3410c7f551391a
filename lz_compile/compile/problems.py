"""The problem that a match is, for the choice of its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lz_compile.ground import events
from lz_compile.ground.isolation import isolated
from lz_compile.ground.sizes import Size, SymbolicSize, as_size, range_of, symbolic_size
from lz_compile.ground.store import Store
from lz_compile.lowering import configured, inductor
from lz_compile.passes.attention.sdpa_call import COPIED_SOURCE, SOURCE
from lz_compile.passes.formula.axes import atoms, axes_of
from lz_compile.passes.graph.modes import ambient_context
from lz_compile.passes.graph.view import tensor_of, value_of
from lz_compile.passes.proof.cases import Case, inputs_of
from lz_compile.passes.proof.resize import resized, whole
from lz_compile.passes.proof.running import Sizes, Subgraph
from lz_compile.passes.proof.sizes import representative_sizes
from lz_compile.passes.proof.validate import verdict_key
from lz_compile.passes.rewriting.match import Match
from lz_compile.runtime.problem.context import UNKNOWN_SIZE, SelectionContext, of_facts, sizes_of

if TYPE_CHECKING:
    import sympy

    from lz_compile.passes.rewriting.match import Match


def of_match(match: Match, *, deterministic: bool = False, is_cuda_graph_capturing: bool = False) -> SelectionContext:
    """The context of a match, from its facts and the fake tensors of its operands; adds no guard.

    Args:
        match: what was recognised.
        deterministic: kernels must give the same bits for the same inputs (also where torch itself is set so).
        is_cuda_graph_capturing: the compiled graph will be captured.
    """
    facts = match.found.facts
    tensors = [tensor for tensor in map(tensor_of, match.found.operands.values()) if tensor is not None]
    device = next((tensor.device for tensor in tensors if tensor.device.type == facts.device), facts.device)
    context = of_facts(
        match.op, match.found.attributes, facts, device=device, tensors=tensors, deterministic=deterministic
    )
    return replace(
        context,
        is_last_dim_contiguous=_is_last_dim_contiguous(match),
        is_cuda_graph_capturing=is_cuda_graph_capturing,
    )


@dataclass(frozen=True)
class Asked:
    """Whether Inductor's own patterns make PyTorch's fused attention of a match."""

    is_fused: bool


def left_as(match: Match) -> str | None:
    """The kernel that Inductor makes of a match by itself, as its own patterns say; None if they do not know it.

    A call of SDPA over copies of keys stays one: what they take is told by the facts.
    Not asked where there is dropout, which a proof's excerpt leaves out, nor of other devices, where no answer was
    ever held against what Inductor does.
    """
    if match.found.source_kernel == COPIED_SOURCE and match.found.facts.device == "cpu":
        return SOURCE
    is_asked = match.op == "attention" and match.found.facts.device == "cpu" and match.found.source_kernel is None
    if not is_asked or "dropout_p" in match.found.attributes.to_dict():
        return None
    sizes = representative_sizes(match)
    with isolated() as outside, outside.entered():
        try:
            source = resized(whole(match), sizes)
            facts = verdict_key(match, source, f"inductor {configured.settings_digest()}", None)
            found = Store("patterns").recall(facts, Asked, lambda: Asked(_is_fused(match, source, sizes)))
        except Exception as error:  # noqa: BLE001 a question that nobody can answer costs a choice by less, and says so
            events.record("INDUCTOR_NOT_ASKED", f"what Inductor makes of the attention at {match.site.where}", error)
            return None
    return "torch.sdpa" if found.is_fused else None


def _is_fused(match: Match, source: Subgraph, sizes: Sizes) -> bool:
    inputs, device = inputs_of(match, sizes, Case("plain")), torch.device(match.found.facts.device)

    def run(*values: Any) -> Any:
        with ExitStack() as stack:
            for manager in ambient_context(match.site.ambient):
                stack.enter_context(manager)
            return source.run(*values)

    return inductor.fuses_attention(run, inputs, device, match.found.facts.needs_grad)


def _is_last_dim_contiguous(match: Match) -> bool:
    """Whether the features of query, key and value each lie next to one another in memory.

    The features of query and key are the axes that these two share and value does not; those of value are the axes that
    it shares with the result and not with query.
    """
    roles = [match.found.operands.get(name) for name in ("query", "key", "value")]
    if any(node is None or node not in match.inputs for node in roles):
        return True
    query, key, value = (match.inputs[node] for node in roles if node is not None)
    features = (set(axes_of(query)) & set(axes_of(key))) - set(axes_of(value))
    value_features = (set(axes_of(value)) & set(axes_of(match.site.output_dims))) - set(axes_of(query))
    wanted = (features, features, value_features)
    return all(_is_innermost(match, node, axes) for node, axes in zip(roles, wanted, strict=True))


def _is_innermost(match: Match, node: Any, axes: set[Any]) -> bool:
    """Whether a dimension of stride one ends with one of ``axes``."""
    tensor = tensor_of(node)
    if tensor is None or not axes:
        return True
    return any(
        as_size(stride) == 1 and set(atoms(dim)[-1:]) & axes
        for stride, dim in zip(tensor.stride(), match.inputs[node], strict=True)
    )


# ---- symbolic sizes: their ranges, the dims that they give, and questions that become guards of Dynamo ---------------


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


def _number(size: sympy.Expr, numbers: Mapping[sympy.Symbol, int]) -> int:
    """A size at these numbers: none is below zero, and it is zero where they make it a quotient by zero."""
    try:
        return max(int(size.xreplace(numbers)), 0)
    except ZeroDivisionError:
        return 0


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
        return {name: size if isinstance(size, int) else _number(size, numbers) for name, size in self.sizes.items()}

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
    sizes: dict[str, Size] = sizes_of(match.op, match.found.facts)
    wanted = {symbol for size in sizes.values() if not isinstance(size, int) for symbol in size.free_symbols}
    if not wanted:
        return None
    found: dict[str, Symbol] = {}
    for node in match.site.output.graph.nodes:
        if len(found) == len(wanted) or node is match.site.output:
            break
        value = value_of(node)
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            _add(size, wanted, found)
    tensors = [tensor for tensor in map(tensor_of, match.found.operands.values()) if tensor is not None]
    for symbol in wanted:
        if str(symbol) not in found:  # no node shows it by itself, as u0 in a length of 2 * u0
            found[str(symbol)] = _symbol(symbol, None, symbolic_size(symbol, tensors))
    hidden = {name: symbol for name, symbol in found.items() if symbol.size is None}
    return SymbolicSizes({name: symbol for name, symbol in found.items() if name not in hidden}, sizes, hidden)


def _add(size: Any, wanted: set[Any], found: dict[str, Symbol]) -> None:
    if not isinstance(size, torch.SymInt):
        return
    expression = as_size(size)
    if isinstance(expression, int) or expression not in wanted or str(expression) in found:
        return
    found[str(expression)] = _symbol(expression, size, range_of(size))


def _symbol(expression: sympy.Symbol, size: torch.SymInt | None, known: SymbolicSize) -> Symbol:
    guess = UNKNOWN_SIZE if known.upper is None else min(UNKNOWN_SIZE, known.upper)
    hint = max(known.lower, guess) if known.hint is None else known.hint
    return Symbol(expression, None if known.hint is None else size, hint, known.lower, known.upper)
