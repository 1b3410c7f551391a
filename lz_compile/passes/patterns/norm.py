"""RMSNorm and LayerNorm in all of their spellings.

The anchor is a statistic of a row, such as a mean of squares. The row is what its polynomial is in; everything pointwise
that follows is an expression in the row and its moments (:mod:`moments`), which is a normalisation if it is
``gain * (row - mean) / sqrt(variance + eps) + shift``, with gain and shift from weights only. The last such result is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from lz_compile.passes import layout
from lz_compile.passes.algebra import Region, is_cast, is_pointwise
from lz_compile.passes.axes import LayoutError, axes_of, fresh, shape_of
from lz_compile.passes.builder import EMITTED
from lz_compile.passes.core import Core, find_core, is_dead
from lz_compile.passes.effects import Effects, MutatedError
from lz_compile.passes.match import Match, NearMiss, RefusedError
from lz_compile.passes.moments import CALLS, FUNCTIONS, STATISTICS, Moments
from lz_compile.passes.norm_emitter import NormEmitter
from lz_compile.passes.normal_form import NormalForm, normal_form
from lz_compile.passes.twins import Twins
from lz_compile.passes.view import Call, tensor_of, where_of

OP = "norm"
#: How many operations may lie between a row and its statistic, and how many results of a statistic are looked at.
_BEFORE, _AFTER = 6, 24
_ROOTS = frozenset({"rsqrt", "sqrt", "std", "norm", "linalg_norm", "linalg_vector_norm", "normalize"}) | CALLS.keys()


def recognise(graph: fx.Graph, effects: Effects) -> Iterator[Match | NearMiss]:
    """Every normalisation of rows in ``graph``, and every statistic that looks like one's, with the reason."""
    covered: set[fx.Node] = set()
    twins = _Stack(effects)
    for node in graph.nodes:
        call = effects.calls[node]
        if call is None or node in covered or EMITTED in node.meta:
            continue
        source = tensor_of(call.input)
        is_anchor = call.name in STATISTICS or call.name in CALLS
        if not is_anchor or source is None or not source.is_floating_point() or 0 in shape_of(source):
            continue
        found = twins.read(node)
        if isinstance(found, Match):
            covered.update(found.core)
        if found is not None:
            yield found


@dataclass
class _Stack:
    """Normalisations of one graph; equal layers are read once."""

    effects: Effects
    twins: Twins = field(init=False)
    followed: dict[fx.Node, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.twins = Twins(self.effects)

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        results = _results(self.effects, anchor)
        for candidate in reversed(results):
            twin = self.twins.find(candidate)
            if twin is not None and anchor in twin.core and self._is_followed_alike(twin):
                return twin
        with self.twins.watch() as look:
            found = _read(self.effects, anchor, results)
        if isinstance(found, Match):
            self.followed[found.output] = _followers(self.effects, found.output)
            self.twins.remember(found, found.output, look)
        return found

    def _is_followed_alike(self, twin: Match) -> bool:
        """Whether what reads the result looks the same, so that it does not end later than its prototype."""
        return _followers(self.effects, twin.output) == self.followed.get(twin.kind.output)


def _followers(effects: Effects, node: fx.Node) -> list[str]:
    return sorted("" if call is None else call.name for call in map(effects.calls.get, node.users))


def _read(effects: Effects, anchor: fx.Node, results: list[fx.Node]) -> Match | NearMiss | None:
    refused: RefusedError | None = None
    for source in _sources(effects, anchor):
        for output in reversed(results):
            try:
                return _match(effects, source, output, anchor)
            except RefusedError as refusal:
                refused = refused or refusal
            except MutatedError as error:
                refused = refused or RefusedError("OPERAND_MUTATED", f"a value is {error}", "use its out-of-place form")
            except LayoutError:
                continue
    is_norm = any(call is not None and call.name in _ROOTS for call in map(effects.calls.get, (anchor, *results)))
    if refused is None or not is_norm or refused.reason.code == "NO_NORM":
        return None
    return NearMiss(OP, anchor, refused.reason, refused.edit, where_of(anchor))


def _sources(effects: Effects, anchor: fx.Node) -> list[fx.Node]:
    """What the row may be: tensors before the anchor, behind pointwise operations; the nearest first, before any cast."""
    call = effects.calls[anchor]
    assert call is not None, "an anchor is a call"
    if call.name in CALLS:
        return [call.input]
    found: dict[fx.Node, None] = {}
    level = [call.input]
    for _ in range(_BEFORE):
        following: list[fx.Node] = []
        for node in level:
            found.setdefault(_behind_casts(effects, node))
            inner = effects.calls.get(node)
            if inner is not None and (is_pointwise(inner) or layout.rearranges(inner)):
                following += [each for each in node.all_input_nodes if tensor_of(each) is not None]
        level = following
    return [node for node in found if tensor_of(node).is_floating_point()]  # type: ignore[union-attr]


def _behind_casts(effects: Effects, node: fx.Node) -> fx.Node:
    """The tensor of which ``node`` is another precision."""
    while True:
        call, tensor = effects.calls.get(node), tensor_of(node)
        source = tensor_of(call.input) if call is not None else None
        if call is None or source is None or tensor is None or not is_cast(call) or not source.is_floating_point():
            return node
        if source.dtype.itemsize > tensor.dtype.itemsize:  # a narrowing cast rounds the row itself
            return node
        node = call.input


def _results(effects: Effects, anchor: fx.Node) -> list[fx.Node]:
    """What is computed from a statistic by pointwise operations, in graph order."""
    found, queue = {anchor}, [anchor]
    while queue and len(found) < _AFTER:
        for user in queue.pop(0).users:
            if user not in found and _is_read(effects.calls.get(user)) and not is_dead(user):
                found.add(user)
                queue.append(user)
    tensors = {node: tensor_of(node) for node in found}
    floating = [node for node, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()]
    return sorted(floating, key=effects.position.__getitem__)


def _is_read(call: Call | None) -> bool:
    return call is not None and (
        is_pointwise(call) or layout.rearranges(call) or call.name in STATISTICS or call.name in FUNCTIONS
    )


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
    rows = set(axes_of(moments.dims)) - set(moments.reduced)
    for symbol in (form.gain.free_symbols | form.shift.free_symbols) & region.leaves.keys():
        leaf = region.leaves[symbol]
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
    replace(core, nodes=late).check(effects, readers)
    if any(effects.ambient(node) != core.ambient for node in core.nodes):
        raise RefusedError("MODE_CHANGES_INSIDE", "autocast or gradient mode changes inside", "change it outside")
