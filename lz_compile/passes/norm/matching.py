"""Every normalisation of a graph as a match: what was read, with what becomes superfluous. What is none is told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.norm import NormAttrs, NormFacts, Operands
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, axes_of
from lz_compile.passes.formula.expressions import is_cast
from lz_compile.passes.formula.moments import CALLS, Moments, is_statistic
from lz_compile.passes.formula.normal_form import NormalForm
from lz_compile.passes.formula.statistics import row_of
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import NearMiss, RefusedError, told
from lz_compile.passes.graph.view import known_tensor, tensor_of
from lz_compile.passes.norm import recogniser
from lz_compile.passes.norm.recogniser import OP, Normalised
from lz_compile.passes.rewriting.builder import Builder, Groups
from lz_compile.passes.rewriting.core import Core, find_core
from lz_compile.passes.rewriting.match import Cell, Driver, Found, Input, Match, Outcome, Site, TableEmitter, Trial
from lz_compile.passes.rewriting.twins import Twins


def matches(graph: fx.Graph, effects: Effects) -> Iterator[Outcome]:
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
        if call is None or not is_statistic(call):
            return False
        source = tensor_of(row_of(call))
        return source is not None and source.is_floating_point() and 0 not in shape_of(source)

    def read(self, anchor: fx.Node) -> Match | NearMiss | None:
        results = recogniser.results_of(self.effects, anchor)
        if not recogniser.is_worth_reading(self.effects, anchor, results):
            return None

        def is_alike(twin: Match) -> bool:  # followed alike, too: it does not end later than its prototype
            followers = _followers(self.effects, twin.site.output)
            return anchor in twin.core and followers == self.followed.get(twin.kind.site.output)

        def once() -> Match | NearMiss | None:
            return recogniser.recognise(self.effects, anchor, results, _matched)

        found = self.twins.read(results[::-1], once, is_alike)
        if isinstance(found, Match):
            self.followed[found.site.output] = _followers(self.effects, found.site.output)
        return found


def _followers(effects: Effects, node: fx.Node) -> list[str]:
    return sorted("" if call is None else call.name for call in map(effects.calls.get, node.users))


def _matched(read: Normalised) -> Match:
    """The match of a normalisation that was read.

    Raises:
        RefusedError: someone else needs a value of it, a mode changes, or an operand is overwritten.
    """
    source = read.moments.source
    core = find_core(read.moments.effects, source, read.output, is_operand=True)
    core = replace(core, nodes=tuple(node for node in core.nodes if node is not source))
    _check_surroundings(read, core)
    return NormEmitter.of(read, core).match(OP, core)


def _check_surroundings(read: Normalised, core: Core) -> None:
    """Refuse where someone else needs what follows the statistics, a mode changes, or an operand is overwritten."""
    moments, effects, region = read.moments, read.moments.effects, read.moments.region
    first = min(effects.position[node] for node in moments.squared)
    late = tuple(node for node in core.nodes if effects.position[node] >= first)
    edge = {moments.source, *recogniser.leaf_nodes(region)} - {*core.nodes}
    readers = {node: region.readers.get(node, core.nodes[0]) for node in edge} | {moments.source: core.nodes[0]}
    try:
        replace(core, nodes=late).check(effects, readers)
    except RefusedError as refusal:
        if refusal.reason.code == "INTERIOR_USED":
            refusal.edit = "do not return or reuse the statistics, or what is between them and the result"
        raise
    stopped = next((node for node in core.nodes if (call := effects.calls[node]) and layout.stops_gradient(call)), None)
    if stopped is not None and grad_enabled(core.ambient):
        text = f"{told(stopped)} stops the gradient of a statistic, through which a kernel differentiates"
        raise RefusedError("STATISTIC_DETACHED", text, "let gradients through, or normalise under no_grad()")
    core.check_modes(effects)


@dataclass(frozen=True)
class NormEmitter(TableEmitter):
    """``after_gain * op(input, weight, bias) + after_shift``; the last two hold what no kernel takes as weights.

    ``rows`` and ``hidden`` are the axes of ``input``: those that stay by themselves, and those that are normalised over.
    """

    kind: ClassVar = Operands
    result_shape: ClassVar = "N D"

    region: Region
    source: Leaf
    rows: tuple[Axis, ...]
    hidden: tuple[Axis, ...]
    weight: sympy.Expr
    bias: sympy.Expr
    after_gain: sympy.Expr
    after_shift: sympy.Expr
    output: fx.Node
    output_dims: Dims
    attrs: NormAttrs
    #: Axes that statistics reduce in the place of hidden ones.
    ties: Mapping[Axis, Axis]
    #: Axes that keep their sizes in proofs.
    pinned: frozenset[Axis]

    @classmethod
    def of(cls, read: Normalised, core: Core) -> NormEmitter:
        """What was read, with gain and shift told apart into operands of kernels and what comes after."""
        moments, form, output = read.moments, read.form, read.output
        region = moments.region
        own = axes_of(moments.dims)
        hidden = tuple(axis for axis in own if axis in moments.hidden)
        # A weight has one number for each element of a row, and the same for all rows.
        takes_gain, takes_shift = ({*hidden} == region.axes_in(each) for each in (form.gain, form.shift))
        takes_shift = takes_shift and (takes_gain or form.gain == 1)
        offset, weight = _without_offset(form.gain) if takes_gain else (0.0, sympy.S.One)
        after_gain = sympy.S.One if takes_gain else form.gain
        after_shift = sympy.S.Zero if takes_shift else form.shift
        bias = form.shift if takes_shift else sympy.S.Zero
        target = tensor_of(output).dtype  # type: ignore[union-attr]
        is_last = after_gain == 1 and after_shift == 0
        attrs = NormAttrs(
            is_centred=form.is_centred,
            eps=form.eps,
            eps_at=form.eps_at,
            has_weight=takes_gain,
            has_bias=bool(takes_shift),
            weight_offset=offset,
            compute_dtype=_compute_dtype(region, moments),
            rounded_to=_rounded_to(region, form, moments, core),
            out_dtype=target if is_last else torch.promote_types(target, torch.float32),
        )
        source = Leaf(moments.source, moments.dims)
        rows = tuple(axis for axis in own if axis not in moments.hidden)
        after = after_gain, after_shift, output, read.output_dims
        return cls(
            region,
            source,
            rows,
            hidden,
            weight,
            bias,
            *after,
            attrs,
            moments.ties,
            frozenset((*hidden, *moments.counted)),
        )

    def edge(self) -> dict[fx.Node, Dims]:
        """The nodes that the replacement reads, with their axes."""
        found = {self.source.node: self.source.dims}
        for leaf in self.region.leaves_in(self.weight, self.bias, self.after_gain, self.after_shift).values():
            found.setdefault(leaf.node, leaf.dims)
        return found

    @property
    def runs(self) -> dict[str, tuple[Axis, ...]]:
        """Rows, and what is normalised over."""
        return {"N": self.rows, "D": self.hidden}

    def table(self) -> dict[str, Cell]:
        """Input, and weight and bias where there are any."""
        found = {"input": Cell(self.source, self.groups, is_whole=True)}
        if self.attrs.has_weight:
            found["weight"] = self._formula(self.weight, (self.hidden,))
        if self.attrs.has_bias:
            found["bias"] = self._formula(self.bias, (self.hidden,))
        return found

    def result(self, builder: Builder, value: Any) -> Any:
        """The kernel's ``[N, D]`` in the layout and dtype of the node that it replaces."""
        target = tensor_of(self.output).dtype  # type: ignore[union-attr]
        if self.after_gain == 1 and self.after_shift == 0:
            return builder.restore(value, self.groups, self.output_dims)
        each = tuple((axis,) for axis in (*self.rows, *self.hidden))
        value = builder.restore(value, self.groups, each)
        if self.after_gain != 1:
            value = value * self._formula(self.after_gain, each).value(builder)
        if self.after_shift != 0:
            value = value + self._formula(self.after_shift, each).value(builder)
        return builder.restore(value.to(target), each, self.output_dims)

    def _formula(self, expression: sympy.Expr, groups: Groups) -> Cell:
        kinds = [tensor_of(leaf.node) for leaf in self.region.leaves_in(expression).values()]
        wide = torch.promote_types(torch.float32, self.attrs.out_dtype)
        for kind in kinds:
            wide = wide if kind is None else torch.promote_types(wide, kind.dtype)
        return Cell(expression, groups, region=self.region, dtype=wide)

    def _is_one_call(self, core: Core) -> bool:
        """Whether the source calls PyTorch's kernel itself, and nothing else happens but moving and casting."""
        calls = [call for call in map(self.region.effects.calls.get, core.nodes) if call is not None]
        others = [call for call in calls if call.name not in ("layer_norm", "rms_norm")]
        is_plain = all(layout.rearranges(call) or is_cast(call) or call.name == "dropout" for call in others)
        return len(others) == len(calls) - 1 and is_plain

    def match(self, op: str, core: Core) -> Match:
        """The finished match."""
        inputs = {node: Input(dims) for node, dims in self.edge().items()}
        source_dtype = known_tensor(self.source.node).dtype
        eps = math.sqrt(self.attrs.eps) if self.attrs.eps_at == "inside" else self.attrs.eps
        tiny = max(torch.finfo(source_dtype).tiny, torch.finfo(self.attrs.compute_dtype).tiny ** 0.5)
        device = known_tensor(self.output).device.type
        rows, width = self.extents("N D")
        facts = NormFacts(rows, width, source_dtype, device, core.wants_grad(inputs))
        own = "torch.norm" if self._is_one_call(core) else None
        magnitudes = (eps,) if eps > tiny else ()
        return Match(
            op,
            Site.of(core, self.output_dims, self.region.interior),
            Found(self.attrs, facts, inputs, {"input": self.source.node}, self, source_kernel=own),
            Trial(pinned=self.pinned, ties=self.ties, magnitudes=magnitudes, masked_rows_count=False),
        )


def _without_offset(gain: sympy.Expr) -> tuple[float, sympy.Expr]:
    """``(1.0, w)`` for ``1 + w``, where the rest is a tensor as it is given."""
    number, rest = gain.as_coeff_Add()
    return (float(number), rest) if rest.is_Symbol else (0.0, gain)


def _compute_dtype(region: Region, moments: Moments) -> torch.dtype:
    """The dtype in which squares are summed; calls that normalise by themselves use float32 at least."""
    node = moments.squared[0]
    tensor = tensor_of(node)
    if tensor is None:  # a pair of statistics
        tensor = tensor_of(moments.source)
    assert tensor is not None, "a statistic is of a tensor"
    is_wide = region.effects.name(node) in CALLS.keys() - {"normalize"}
    return torch.promote_types(tensor.dtype, torch.float32) if is_wide else tensor.dtype


def _rounded_to(region: Region, form: NormalForm, moments: Moments, core: Core) -> torch.dtype:
    """The narrowest dtype that the normalised row passes through before the first weight."""
    narrowest = _compute_dtype(region, moments)
    position = region.effects.position
    has_weights = bool(region.leaves_in(form.gain, form.shift))
    for node in core.nodes:
        tensor = tensor_of(node)
        if tensor is None or position[node] <= position[moments.squared[0]] or not tensor.is_floating_point():
            continue
        if has_weights and any(_is_given(moments, operand) for operand in node.all_input_nodes):
            break
        if tensor.dtype.itemsize < narrowest.itemsize:
            narrowest = tensor.dtype
    return narrowest


def _is_given(moments: Moments, node: fx.Node) -> bool:
    """Whether a tensor is a weight, or computed from weights alone."""
    return tensor_of(node) is not None and not moments.edge.depends(node) and moments.edge.is_weight(node)
