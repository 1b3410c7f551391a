"""Reads the blend that ends in a node in axes: host, seed, weights, gate, and the nodes that it makes superfluous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.lowering.ops.blend import BlendAttrs, Mode
from lz_compile.passes.blend.bounds import BoundReader
from lz_compile.passes.blend.emitter import BlendEmitter, MarginEmitter, Weights, group, reached, shared_inputs
from lz_compile.passes.blend.form import Form, Forms
from lz_compile.passes.blend.gate import Gate, is_margin, is_zero, logits_of, margin_in
from lz_compile.passes.blend.terms import CASTS, is_count
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh, resolve
from lz_compile.passes.formula.expressions import reduce_indicators
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import Call, known_tensor, needed, tensor_of
from lz_compile.passes.rewriting.core import Core, core_between
from lz_compile.passes.rewriting.match import Match

OP = "blend"
_SOFTMAX = frozenset({"softmax", "log_softmax"})


@dataclass(frozen=True)
class Blend:
    """What was read of a blend, in the axes ``dims`` of its anchor.

    ``again`` are the nodes of values that are computed more than once, and ``edges`` what these are computed from. With
    ``has_bounds`` both weights are held within bounds.
    """

    anchor: fx.Node
    dims: Dims
    region: Region
    seed: Leaf
    host: Leaf
    weights: Weights
    form: Form
    is_gated: bool
    edges: Mapping[fx.Node, Dims]
    again: frozenset[fx.Node]
    has_bounds: bool = False

    def inputs_of(self, leaf: Leaf) -> list[fx.Node]:
        """The nodes at the edge from which a leaf is computed."""
        return (
            [node for node in self.edges if node in reached(leaf.node, self.edges)]
            if leaf.node in self.again
            else [leaf.node]
        )


def read_blend(effects: Effects, forms: Forms, anchor: fx.Node, form: Form) -> Match:
    """The blend that ends in ``anchor``, or in the softmax after it.

    Raises:
        RefusedError: it is none that could be replaced, with the reason.
        MutatedError: an alias of a value was overwritten before it is read.
        LayoutError: a layout has no exact form in axes.
    """
    if not form.is_strict:
        raise _unequal(form)
    found = _read(effects, forms, anchor, form)
    if not form.is_isolated:
        raise RefusedError(
            "HOST_NOT_DETACHED",
            f"gradients flow to the host {form.host.name} as well as to the seed {form.seed.name}",
            f"blend with {form.host.name}.detach()",
        )
    kinds = [found]
    if found.weights.gate is not None and not found.has_bounds:
        kinds.append(replace(found, weights=replace(found.weights, gate=None)))
    for blend in kinds:
        for output in (_softmax_after(effects, anchor), anchor):
            if output is None:
                continue
            try:
                return _finish(effects, blend, output)
            except (RefusedError, LayoutError):
                if output is anchor and blend is kinds[-1]:
                    raise
    raise AssertionError("the last one is returned or raises")


def read_margin(effects: Effects, forms: Forms, anchor: fx.Node) -> Match:
    """The difference of the two largest logits that ends in ``anchor``.

    Raises:
        RefusedError: the ordered values are used otherwise, too.
        MutatedError: an alias of a value was overwritten before it is read.
        LayoutError: it is no margin that is found by sorting.
    """
    tensor, gates = tensor_of(anchor), forms.gates
    if tensor is None or gates is None:
        raise LayoutError("no margin")
    dims = fresh(shape_of(tensor))
    region = Region(effects, expand_masks=True, stops=gates.ranks)
    expression = region.express(anchor, dims)
    logits = logits_of(region, gates.ranks)
    is_it = logits is not None and is_margin(margin_in(expression, region, gates.ranks))
    if logits is None or not is_it or not logits.is_sorted or len(region.leaves) > len(logits.ranks):
        raise LayoutError("no margin that is found by sorting")
    inside = {*region.interior, *logits.nodes}
    core = _core(effects, {logits.node: anchor}, inside, anchor)
    attrs = BlendAttrs(
        mode="margin",
        has_gate=True,
        is_distinct=logits.is_distinct,
        is_sorted=True,
        is_differentiated=core.wants_grad([logits.node]),
        compute_dtype=tensor.dtype,
        out_dtype=tensor.dtype,
    )
    return MarginEmitter(logits, anchor, dims, attrs).match(OP, core, region.interior)


def _read(effects: Effects, forms: Forms, anchor: fx.Node, form: Form) -> Blend:
    """The two tensors and their weights, over the axes of the anchor."""
    dims = fresh(shape_of(known_tensor(anchor)))
    bounds, stops = BoundReader(effects, form.bounds), _Stops(forms, frozenset({form.seed, form.host, *form.factors}))
    functions = {**dict.fromkeys(CASTS, _counted), **bounds.functions}
    region = Region(effects, expand_masks=True, stops=stops, functions=functions)
    expression = region.express(anchor, dims)
    alike = _alike(forms, region)
    first = {symbol: symbols[0] for symbols in alike for symbol in symbols}
    expression = reduce_indicators(expression.xreplace(first))
    seed, host = (_only_leaf(forms, region, alike, node, dims) for node in (form.seed, form.host))
    of_seed, of_host = (sympy.expand(expression.coeff(symbol, 1)) for symbol in (seed, host))
    rest = sympy.expand(expression - of_seed * seed - of_host * host)
    if not is_zero(rest) or {seed, host} & (of_seed.free_symbols | of_host.free_symbols):
        raise LayoutError("no sum of two tensors")
    expected = sympy.S.One if form.is_residual else 1 - of_seed
    if not form.is_soft and not is_zero(of_host - expected):
        raise LayoutError("the weights are along different dimensions")
    leaves = {symbols[0]: [region.leaves[symbol] for symbol in symbols] for symbols in alike}
    gate, is_gated = _gate(forms, leaves, of_seed, (region.leaves[seed], region.leaves[host]))
    weights = Weights(region, of_seed, of_host if form.is_soft else None, gate)
    used = {seed, host, *((of_seed.free_symbols | of_host.free_symbols) if gate is None else ())}
    copies = {
        symbol: shared_inputs(effects, [leaf.node for leaf in same], same[0].dims)
        for symbol, same in leaves.items()
        if symbol in used and len(same) > 1
    }
    edges = {node: own for found in copies.values() for node, own in found.items()}
    repeated = [leaf.node for symbol in copies for leaf in leaves[symbol]]
    if gate is None:
        edges, repeated = {**edges, **bounds.sources}, [*repeated, *bounds.read]
    else:
        for node, own in bounds.read.items():
            gate.region.express(node, own)
    again = frozenset(needed(repeated, edges))
    tensors = region.leaves[seed], region.leaves[host]
    return Blend(anchor, dims, region, *tensors, weights, form, is_gated, edges, again, bool(bounds.read))


def _counted(region: Region, call: Call, dims: Dims) -> sympy.Expr | None:
    """A condition as zero or one."""
    return region.operand(call, "input", dims) if is_count(call) else None


def _unequal(form: Form) -> RefusedError:
    """Why weights that would add up to one in exact arithmetic and without bounds do not."""
    if form.integers:
        dtypes = ", ".join(sorted(map(str, form.integers)))
        return RefusedError(
            "WEIGHT_IS_INTEGER",
            f"the weights are sums in {dtypes}, which wrap around where they are large",
            "make a weight a floating-point number, or a condition, before it is taken from one",
        )
    return RefusedError(
        "WEIGHTS_BOUNDED_APART",
        "the weights add up to one only where no bound is reached: one is bounded in another way than the other",
        "bound the seed's weight w, and weigh the host by 1 - w",
    )


@dataclass(frozen=True)
class _Stops:
    """Where reading stops: at some nodes, and at others that compute the same."""

    forms: Forms
    nodes: frozenset[fx.Node]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self.forms.sums.first(node) in self.nodes


def _alike(forms: Forms, region: Region) -> list[list[sympy.Symbol]]:
    """The leaves of a region, those of equal values together."""
    found: dict[tuple[fx.Node, Dims], list[sympy.Symbol]] = {}
    for symbol, leaf in region.leaves.items():
        found.setdefault((forms.sums.first(leaf.node), resolve(leaf.dims)), []).append(symbol)
    return list(found.values())


def _only_leaf(
    forms: Forms, region: Region, alike: list[list[sympy.Symbol]], node: fx.Node, dims: Dims
) -> sympy.Symbol:
    symbols = [each[0] for each in alike if forms.sums.first(region.leaves[each[0]].node) is node]
    if len(symbols) != 1 or not region.leaves[symbols[0]].axes <= frozenset(axes_of(dims)):
        raise LayoutError(f"{told(node)} is read along different dimensions")
    return symbols[0]


def _gate(
    forms: Forms, leaves: Mapping[sympy.Symbol, list[Leaf]], weight: sympy.Expr, tensors: tuple[Leaf, ...]
) -> tuple[Gate | None, bool]:
    """The gate in a weight, and whether there is any, of whatever form."""
    gates = forms.gates
    if gates is None:
        return None, False
    symbols = weight.free_symbols & leaves.keys()
    if not any(gates.depends(leaves[symbol][0].node) for symbol in symbols):
        return None, False
    return gates.read(weight, leaves, tensors), True


def _softmax_after(effects: Effects, anchor: fx.Node) -> fx.Node | None:
    """The softmax that is all that reads a blend."""
    users = list(anchor.users)
    call = effects.calls.get(users[0]) if len(users) == 1 else None
    if call is None or call.name not in _SOFTMAX or call.input is not anchor or call.get("dtype") is not None:
        return None
    return call.node if isinstance(call.get("dim"), int) else None


# ---- core and attributes ---------------------------------------------------------------------------------------------


def _finish(effects: Effects, blend: Blend, output: fx.Node) -> Match:
    anchor, weights = blend.anchor, blend.weights
    gate, channels = weights.gate, set[Axis]()
    if output is not anchor:
        call = effects.calls[output]
        assert call is not None, "a softmax is a call"
        channels = set(atoms(blend.dims[call.get("dim") % len(blend.dims)]))
        if not channels:
            raise LayoutError("a softmax over one number")
    rows = None if gate is None else set(axes_of(gate.logits.dims)) - set(atoms(gate.logits.classes))
    groups = group(output, blend.dims, weights.axes, rows, channels)
    if groups is None:
        raise LayoutError("the weights are along dimensions that are not next to one another")
    inside = {anchor, *blend.region.interior, *blend.again}
    tensors = [each for leaf in (blend.seed, blend.host) for each in blend.inputs_of(leaf)]
    edges = dict.fromkeys(tensors, anchor)
    read = dict(blend.region.interior)
    if gate is not None:
        inside |= {*gate.region.interior, *gate.logits.nodes}
        edges = {gate.logits.node: anchor, **edges}
        read = {**gate.region.interior, **read}
    stops = {leaf.node for leaf in weights.leaves} - blend.again
    core = _core(effects, edges, inside - stops, output)
    is_differentiated = gate is not None and not gate.logits.is_detached and core.wants_grad([gate.logits.node])
    if gate is not None and is_differentiated and not gate.logits.is_sorted:
        raise LayoutError("equal maxima share a gradient, each source in its own way")
    attrs = BlendAttrs(
        mode=_mode(blend, output),
        is_residual=blend.form.is_residual,
        has_gate=gate is not None,
        has_host_weight=weights.host is not None,
        is_distinct=gate is not None and gate.logits.is_distinct,
        is_sorted=gate is not None and gate.logits.is_sorted,
        is_differentiated=is_differentiated,
        normalised=effects.calls[output].name if output is not anchor else "none",  # type: ignore[union-attr,arg-type]
        compute_dtype=core.widest(),
        out_dtype=known_tensor(output).dtype,
    )
    emitter = BlendEmitter(blend.host, blend.seed, weights, groups, output, blend.dims, attrs, blend.edges, blend.again)
    return emitter.match(OP, core, {**read, output: blend.dims})


def _mode(blend: Blend, output: fx.Node) -> Mode:
    """The name of a blend: by what follows it, by its gate, and by the axes of its weight."""
    if output is not blend.anchor:
        return "logit"
    if blend.form.is_soft:
        return "soft_gate"
    if blend.is_gated:
        return "confidence"
    if blend.form.is_residual:
        return "residual"
    axes = [set(atoms(dim)) & blend.weights.axes for dim in blend.dims]
    is_channel = len(axes) > 1 and not axes[0] and sum(map(bool, axes)) == 1
    return "channel" if is_channel else "convex"


def _core(effects: Effects, edges: Mapping[fx.Node, fx.Node], inside: set[fx.Node], output: fx.Node) -> Core:
    """The nodes between the edges and the output.

    Raises:
        RefusedError: someone else needs one of them, a mode changes, or an operand is overwritten.
    """
    core = core_between(effects, edges, inside, output)
    core.check(effects, edges, if_used="use the blend only, and compute what else is needed apart")
    return core
