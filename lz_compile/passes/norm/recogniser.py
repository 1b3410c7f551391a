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
from lz_compile.passes.formula.axes import LayoutError, fresh
from lz_compile.passes.formula.edge import Edge
from lz_compile.passes.formula.moments import CALLS, MEAN_SQUARE, ROW, STATISTICS, Moments
from lz_compile.passes.formula.normal_form import normal_form
from lz_compile.passes.graph.effects import Effects, MutatedError
from lz_compile.passes.graph.refusal import NearMiss, RefusedError
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.norm.conditions import check_surroundings, check_weights, leaf_nodes
from lz_compile.passes.norm.emitter import NormEmitter
from lz_compile.passes.norm.search import is_worth_reading, results_of, sources
from lz_compile.passes.rewriting.core import find_core
from lz_compile.passes.rewriting.driver import Driver, Outcome, refusal_of
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.twins import Twins

OP = "norm"


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
    refused = refused or _of_several(effects, anchor, results)
    return None if refused is None else NearMiss.of(OP, anchor, refused)


def _of_several(effects: Effects, anchor: fx.Node, results: list[fx.Node]) -> RefusedError | None:
    """Why a row that is divided by a root of squares of its own and of another tensor is no normalised one."""
    for source in sources(effects, anchor):
        for output in (each for each in reversed(results) if _size(each) == _size(source)):
            moments = Moments(effects, source)
            try:
                expression = moments.read(output, fresh(shape_of(tensor_of(output))))  # type: ignore[arg-type]
            except (RefusedError, MutatedError, LayoutError):
                continue
            other = _beside_squares(expression, moments) if expression.has(ROW) else None
            if other is not None and effects.position[other] > effects.position[anchor]:  # told once, by the first
                text = f"{source.name} is divided by a root of its own squares together with {other.name}, another tensor's"
                edit = "normalise the concatenation of both, and split the result"
                return RefusedError("SEVERAL_TENSORS", text, edit)
    return None


def _beside_squares(expression: sympy.Expr, moments: Moments) -> fx.Node | None:
    """A statistic of another tensor that stands under the same root as the squares of the row."""
    roots = [power.base for power in expression.atoms(sympy.Pow) if not power.exp.is_integer]
    symbols = {symbol for base in roots if base.has(MEAN_SQUARE) for symbol in base.free_symbols}
    nodes = (moments.region.leaves[symbol].node for symbol in symbols & moments.region.leaves.keys())
    calls = {node: moments.effects.calls.get(node) for node in nodes}
    return next((node for node, call in calls.items() if call is not None and call.name in STATISTICS), None)


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
    is_read = anchor in {*moments.squared, *region.interior, *leaf_nodes(region)}
    if form is None or not moments.reduced or not moments.squared or not is_read:
        raise RefusedError(
            "NO_NORM", "the result is no normalised row", "divide the row by the root of its mean square"
        )
    form = replace(form, gain=moments.by_leaves(form.gain), shift=moments.by_leaves(form.shift))
    check_weights(region, form, moments)
    core = find_core(effects, source, output)
    nodes = tuple(node for node in core.nodes if node is not source)
    core = replace(core, nodes=nodes)
    check_surroundings(effects, core, region, source, moments)
    return NormEmitter.of(region, moments, form, output, dims, core).match(OP, core)
