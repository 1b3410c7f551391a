"""RMSNorm and LayerNorm in all of their spellings.

The anchor is a statistic of a row, such as a mean of squares. The row is what its polynomial is in; everything pointwise
that follows is an expression in the row and its moments (:mod:`moments`), which is a normalisation if it is
``gain * (row - mean) / sqrt(variance + eps) + shift``, with gain and shift from weights only. The last such result is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from lz_compile.ground.sizes import Size, product, shape_of
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.axes import LayoutError, axes_of, fresh
from lz_compile.passes.formula.edge import Edge
from lz_compile.passes.formula.moments import CALLS, STATISTICS, Moments
from lz_compile.passes.formula.normal_form import NormalForm, normal_form
from lz_compile.passes.graph.effects import Effects, MutatedError
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.norm.emitter import NormEmitter
from lz_compile.passes.norm.search import is_worth_reading, results_of, sources
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rewriting.driver import Driver, Outcome, refusal_of
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.twins import Twins

OP = "norm"
#: Functions of weights that can be written out again.
_OF_WEIGHTS = frozenset({sympy.exp, sympy.log, sympy.tanh})


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
    """Every normalisation of rows in ``graph``, and every statistic that looks like one's, with the reason."""
    missed: list[NearMiss] = []
    driver, stack = Driver(OP), _Stack(effects, Twins(effects))
    for found in driver.walk(graph.nodes, stack.is_statistic, stack.read):
        if isinstance(found, NearMiss):
            missed.append(found)
        else:
            yield found
    yield from (miss for miss in missed if miss.node not in driver.covered)  # one statistic may be read with the next


@dataclass
class _Stack:
    """Normalisations of one graph; equal layers are read once."""

    effects: Effects
    twins: Twins
    followed: dict[fx.Node, list[str]] = field(default_factory=dict)

    def is_statistic(self, node: fx.Node) -> bool:
        """Whether a call is a statistic of rows, or a normalisation."""
        call = self.effects.calls[node]
        if call is None or not (call.name in STATISTICS or call.name in CALLS):
            return False
        source = tensor_of(call.input)
        return source is not None and source.is_floating_point() and 0 not in shape_of(source)

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        results = results_of(self.effects, anchor)
        if not is_worth_reading(self.effects, anchor, results):
            return None

        def is_alike(twin: Match) -> bool:  # followed alike, too: it does not end later than its prototype
            followers = _followers(self.effects, twin.output)
            return anchor in twin.core and followers == self.followed.get(twin.kind.output)

        found = self.twins.read(results[::-1], lambda: _read(self.effects, anchor, results), is_alike)
        if isinstance(found, Match):
            self.followed[found.output] = _followers(self.effects, found.output)
        return found


def _followers(effects: Effects, node: fx.Node) -> list[str]:
    return sorted("" if call is None else call.name for call in map(effects.calls.get, node.users))


def _read(effects: Effects, anchor: fx.Node, results: list[fx.Node]) -> Match | NearMiss | None:
    refused: RefusedError | None = None
    for source in sources(effects, anchor):
        edge = Edge(effects, source)
        wanted = _size(source)
        for output in reversed([each for each in results if _size(each) == wanted and edge.encloses(each)]):
            try:
                return _match(effects, source, output, anchor)
            except (RefusedError, MutatedError) as error:
                refusal = refusal_of(error)
                if refusal.reason.code != "NO_NORM":
                    refused = refused or refusal
            except LayoutError:
                continue
    return None if refused is None else NearMiss.of(OP, anchor, refused)


def _size(node: fx.Node) -> Size:
    return product(shape_of(tensor_of(node)))  # type: ignore[arg-type]


def _match(effects: Effects, source: fx.Node, output: fx.Node, anchor: fx.Node) -> Match:
    """The normalisation of ``source`` that ends in ``output``.

    Raises:
        RefusedError: it is none, with the reason; ``NO_NORM`` where nothing speaks for one.
    """
    dims = fresh(shape_of(tensor_of(output)))  # type: ignore[arg-type]
    moments = Moments(effects, source)
    region = moments.region
    expression = moments.read(output, dims)
    form = normal_form(expression)
    is_read = anchor in {*moments.squared, *region.interior, *_nodes(region)}
    if form is None or not moments.reduced or not moments.squared or not is_read:
        raise RefusedError(
            "NO_NORM", "the result is no normalised row", "divide the row by the root of its mean square"
        )
    form = replace(form, gain=moments.by_leaves(form.gain), shift=moments.by_leaves(form.shift))
    _check_weights(region, form, moments)
    core = find_core(effects, source, output)
    nodes = tuple(node for node in core.nodes if node is not source)
    core = replace(core, nodes=nodes)
    _check(effects, core, region, source, moments)
    return NormEmitter.of(region, moments, form, output, dims, core).match(OP, core)


def _nodes(region: Region) -> set[fx.Node]:
    return {leaf.node for leaf in region.leaves.values()}


def _check_weights(region: Region, form: NormalForm, moments: Moments) -> None:
    """Gain and shift must come from weights: tensors that are given, and are not one per row."""
    rows = set(axes_of(moments.dims)) - set(moments.hidden)
    functions = {each.func for part in (form.gain, form.shift) for each in part.atoms(sympy.Function)}
    if not functions <= _OF_WEIGHTS:
        raise RefusedError(
            "NO_NORM", "a weight is a function of which kernels know nothing", "multiply by it afterwards"
        )
    for symbol in (form.gain.free_symbols | form.shift.free_symbols) & region.leaves.keys():
        leaf = region.leaves[symbol]
        if tensor_of(leaf.node) is None:  # a number
            continue
        is_given = leaf.node.op in ("placeholder", "get_attr")
        own = set(axes_of(leaf.dims))
        if not is_given or (rows and rows <= own) or not own <= set(axes_of(moments.dims)):
            raise RefusedError("NO_NORM", f"{leaf.node.name} is no weight of the row", "multiply by it afterwards")


def _check(effects: Effects, core: Core, region: Region, source: fx.Node, moments: Moments) -> None:
    """Refuse where someone else needs what follows the statistics, a mode changes, or an operand is overwritten."""
    first = min(effects.position[node] for node in moments.squared)
    late = tuple(node for node in core.nodes if effects.position[node] >= first)
    edge = [node for node in {source, *_nodes(region)} if node not in core.nodes]
    readers = {node: region.readers.get(node, core.nodes[0]) for node in edge}
    try:
        replace(core, nodes=late).check(effects, readers)
    except RefusedError as refusal:
        if refusal.reason.code == "INTERIOR_USED":
            refusal.edit = "do not return or reuse the statistics, or what is between them and the result"
        raise
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
