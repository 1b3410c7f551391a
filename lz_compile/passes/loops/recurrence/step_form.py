"""A step of a scan read as algebra: what depends on which state, and what is a sum of products of a state.

States that depend on each other are one *component*; components are in the order in which they can be computed. A value
that depends on states belongs to the last component among theirs, and is read as a sum of products in the states of that
one. What earlier components give is a tensor there like any other, and so is what has no simpler form and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from lz_compile.passes.graph.refusal import told
from lz_compile.passes.graph.view import needed
from lz_compile.passes.loops.recurrence.index_sum import Dims, IndexSum, dims_of
from lz_compile.passes.loops.recurrence.index_terms import Atom, SizedError, UnreadableError
from lz_compile.passes.loops.recurrence.step_rules import (
    LOGICAL,
    OF_TRUTH_VALUES,
    RULES,
    Rule,
    cancelled,
    name_of,
    shape_of,
)
from lz_compile.passes.loops.recurrence.step_sizes import elements
from lz_compile.passes.loops.recurrence.step_trace import FREE, Step, homes, is_delay, is_tensor, prepare

aten = torch.ops.aten
_STORAGE = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit"})
#: How often a state may turn out to be in finer pieces than it was read in.
_MOST_CUTS = 4


@dataclass(eq=False)
class StepForm:
    """What was read.

    ``home`` is the component of every node (:data:`FREE`: none), ``values`` are those that have a form in their component,
    ``atoms`` the nodes behind atoms, and ``reasons`` say of the others that depend on states what is in the way. ``outer``
    are values as other components see them, ``delays`` the components that depend on nothing of their own, and ``indicators``
    the inputs that hold nothing but zeros and ones. ``cuts`` are the sizes of the indices of states whose dimensions are
    products of several, ``multiples`` name the nodes that have a symbolic size as a factor.
    """

    step: Step
    components: tuple[tuple[int, ...], ...]
    home: Mapping[fx.Node, int]
    delays: frozenset[int]
    indicators: frozenset[fx.Node] = frozenset()
    cuts: Mapping[fx.Node, Dims] = field(default_factory=dict)
    values: dict[fx.Node, IndexSum] = field(default_factory=dict)
    outer: dict[fx.Node, IndexSum] = field(default_factory=dict)
    atoms: dict[Atom, fx.Node] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    multiples: set[str] = field(default_factory=set)

    def is_atom(self, node: fx.Node) -> bool:
        """Whether other components take a value as it is, and do not compute it themselves, as they do sizes."""
        if not isinstance(node.meta["val"], torch.Tensor):
            return False
        value = (self.values if self.home[node] == FREE else self.outer).get(node)
        return value is None or any(self.atoms.get(atom) is node for atom in value.atoms)

    def state_atom(self, state: int) -> Atom:
        """The atom of a state before the step."""
        return Atom(self.step.states[state].name, "state")

    def with_atom(self, node: fx.Node, atom: Atom, wanted: fx.Node) -> IndexSum | None:
        """The value of ``wanted`` with ``node`` as an atom of its own, where that has a form."""
        known = {each: value for each, value in self.values.items() if self.home[each] == FREE}
        known[node] = IndexSum.of_cut_atom(
            atom, self.values[node].dims if node in self.values else dims_of(shape_of(node))
        )
        form = StepForm(self.step, self.components, self.home, self.delays, cuts=self.cuts, values=known)
        form.outer = dict(self.outer)
        form.read(needed([wanted], {node}), fixed={node})
        return form.values.get(wanted)

    # ---- reading ------------------------------------------------------------------------------------------------

    def read(self, nodes: Sequence[fx.Node], fixed: set[fx.Node] | None = None) -> None:
        """Read these, in the order of the graph."""
        for node in nodes:
            if node in (fixed or ()) or node.op == "output" or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if node in self.values and self.home[node] == FREE:
                continue
            if node in self.step.states and self.home[node] != FREE:
                dims = self.cuts.get(node, dims_of(shape_of(node)))
                self.values[node] = IndexSum.of_cut_atom(Atom(node.name, "state"), dims)
            elif node.op != "call_function":
                self._keep(node)
            else:
                self._read_call(node)

    def _read_call(self, node: fx.Node) -> None:
        is_free = self.home[node] == FREE
        try:
            value = self._by_rule(node)
        except UnreadableError as error:
            if is_free:
                self._keep(node)
            else:
                self.reasons[node] = str(error)
            return
        if is_free and (_is_contraction(value) or _chooses(node, value)):
            self._keep(node)
        else:
            self.values[node] = value

    def _keep(self, node: fx.Node) -> None:
        """As an atom, where it is a tensor of real numbers or truth values."""
        value = node.meta["val"]
        if value.dtype == torch.bool or value.is_floating_point():
            self.values[node] = self._atom(node)

    def _by_rule(self, node: fx.Node) -> IndexSum:
        rule = _rule(node)
        name = name_of(node) or node.name
        is_state = self.home[node] != FREE
        if rule is None:
            raise UnreadableError(f"{name} of {self._source(node)}" if is_state else name)
        arguments = self._arguments(node, partial(self._operand, node))
        try:
            value = rule(node, *arguments[0], **arguments[1])
        except (TypeError, UnreadableError) as error:
            if isinstance(error, SizedError) or any(isinstance(x, fx.Node) and not is_tensor(x) for x in node.args):
                self.multiples.add(node.name)
                raise UnreadableError(f"{name} has a symbolic size as an argument or a factor") from error
            if isinstance(error, UnreadableError):
                raise
            raise UnreadableError(f"{name} with unusual arguments") from error
        for atom in cancelled(node, arguments, value):
            lost = self.step.names.get(self.atoms.get(atom, node), atom.name)
            raise UnreadableError(f"{name}, out of which {lost} cancels: NaN in it and its gradient do not")
        if value.shape != shape_of(node):
            value = value.expanded(shape_of(node))
        if any(len(term.of("state")) > 1 for term in value.terms):
            raise UnreadableError(f"{name} of {self._source(node)} with itself")
        return value

    def _arguments(self, node: fx.Node, read: Callable[[fx.Node], IndexSum]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with sums in the place of tensors, without those that say only where and how to store."""

        def argument(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [argument(each) for each in value]
            return read(value) if is_tensor(value) else value

        kwargs = {name: argument(each) for name, each in node.kwargs.items() if name not in _STORAGE}
        return tuple(map(argument, node.args)), kwargs

    def _operand(self, reader: fx.Node, value: fx.Node) -> IndexSum:
        if self.home[value] not in (FREE, self.home[reader]):
            return self._outer(value)
        found = self.values.get(value)
        if found is None:
            raise UnreadableError(self.reasons.get(value, f"{value.name} has no form"))
        return found

    def _outer(self, node: fx.Node) -> IndexSum:
        """A value of an earlier component as later ones see it: what is only larger than what it is made of is no atom."""
        if node not in self.outer:
            try:
                value = self._outer_by_rule(node)
            except UnreadableError:
                value = self._atom(node)
            self.outer[node] = value
        return self.outer[node]

    def _outer_by_rule(self, node: fx.Node) -> IndexSum:
        size = elements(node)
        operands = [each for each in node.all_input_nodes if self.home[each] != FREE]
        sizes = [elements(each) for each in operands if is_tensor(each)]
        is_read = node in self.values and self.home[node] not in self.delays
        rule = _rule(node) if node.op == "call_function" else None
        if rule is None or (is_read and size <= max(sizes, default=size)):
            raise UnreadableError("a value of its own")
        args, kwargs = self._arguments(node, self._outer_operand)
        value = rule(node, *args, **kwargs)
        if _is_contraction(value) or cancelled(node, (args, kwargs), value):
            raise UnreadableError("a sum of its own")
        return value if value.shape == shape_of(node) else value.expanded(shape_of(node))

    def _outer_operand(self, value: fx.Node) -> IndexSum:
        found = self.values.get(value) if self.home[value] == FREE else self._outer(value)
        if found is None:
            raise UnreadableError(f"{value.name} has no form")
        return found

    def _source(self, node: fx.Node) -> str:
        """What a value that depends on a state is computed from, in words."""
        states = [self.step.names[self.step.states[i]] for i in sorted(self._states(node))]
        return f"the state {states[0]}" if len(states) == 1 else f"the states {', '.join(states)}"

    def _states(self, node: fx.Node) -> set[int]:
        inputs = set(needed([node], ()))
        return {
            i for i, state in enumerate(self.step.states) if state in inputs and self.home[state] == self.home[node]
        }

    def _atom(self, node: fx.Node) -> IndexSum:
        value = node.meta["val"]
        is_mask = value.dtype == torch.bool or node in self.indicators
        if is_mask or value.is_floating_point():
            atom = Atom(node.name, "mask" if is_mask else "given")
            self.atoms[atom] = node
            return IndexSum.of_atom(atom, shape_of(node))
        raise UnreadableError(f"{told(node)}, which is of {value.dtype}")


def read_step(step: Step, indicators: frozenset[fx.Node] = frozenset()) -> StepForm:
    """Read a step; ``indicators`` are inputs that hold nothing but zeros and ones."""
    components, home = homes(step)
    if prepare(step, home):
        components, home = homes(step)
    delays = frozenset(i for i, states in enumerate(components) if is_delay(step, states))
    cuts: dict[fx.Node, Dims] = {}
    for _ in range(_MOST_CUTS):
        form = StepForm(step, components, home, delays, indicators, cuts)
        form.read(list(step.graph.nodes))
        finer = _finer(step, form.values)
        if not finer:
            break
        cuts |= finer
    return form


def _finer(step: Step, values: Mapping[fx.Node, IndexSum]) -> dict[fx.Node, Dims]:
    """The states whose dimensions a step takes apart, and in which pieces."""
    pairs = zip(step.states, step.carried, strict=True)
    both = ((state, values[state].dims, values[new].dims) for state, new in pairs if {state, new} <= values.keys())
    return {state: after for state, before, after in both if before != after}


def _rule(node: fx.Node) -> Rule | None:
    """The rule of a call, as far as it holds for the numbers that it gives."""
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        rule = RULES.get(node.target)
        return LOGICAL.get(node.target) or (rule if rule in OF_TRUTH_VALUES else None)
    return RULES.get(node.target) if dtype.is_floating_point else None


def _is_contraction(value: IndexSum) -> bool:
    """Whether something is summed over, other than a product with an identity."""
    sums = any(term.bound for term in value.terms)
    return sums and not any(atom.kind == "identity" for atom in value.atoms)


def _chooses(node: fx.Node, value: IndexSum) -> bool:
    """Whether conditions decide what numbers a value holds, and it is no larger than what it is made of.

    It is computed as it is written then: what gradients are of a condition that leaves out NaN, no sum of products says.
    """
    sizes = (elements(each) for each in node.all_input_nodes if is_tensor(each))
    return value.has("mask") and value.has("given") and elements(node) <= max(sizes, default=0)
