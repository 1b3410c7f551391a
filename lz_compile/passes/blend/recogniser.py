"""Blends of a seed with a detached host, in all of their spellings, and margins of logits that are found by sorting.

The anchor is the last operation of a sum of two products. Its terms say whether it can be a blend (:mod:`form`); what
can is read again in axes. In a graph that records gradients the host must want none; where nothing does, the weights must be
given: what a network computed them from is a gate of its own. What becomes superfluous is asked of what was found
(:mod:`matching`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import sympy
from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.blend.bounds import BoundReader
from lz_compile.passes.blend.form import Form, Forms
from lz_compile.passes.blend.gate import Gate, Logits, is_margin, is_zero, logits_of, margin_in
from lz_compile.passes.blend.terms import CASTS, is_count
from lz_compile.passes.formula import layout
from lz_compile.passes.formula.algebra import Leaf, Region
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, broadcast_from, fresh, resolve
from lz_compile.passes.formula.expressions import is_cast, reduce_indicators
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.modes import grad_enabled
from lz_compile.passes.graph.refusal import RefusedError, told
from lz_compile.passes.graph.view import Call, known_tensor, needed, tensor_of

OP = "blend"
_SOFTMAX = frozenset({"softmax", "log_softmax"})


@dataclass(frozen=True)
class Weights:
    """What a blend is weighed by, as expressions over the leaves of a region."""

    region: Region
    seed: sympy.Expr
    host: sympy.Expr | None
    gate: Gate | None

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors that are read for them, without the logits."""
        pairs = [(self.region, each) for each in (self.seed, self.host) if each is not None and self.gate is None]
        if self.gate is not None:
            parts = (self.gate.alpha, self.gate.gain, self.gate.offset, self.gate.low, self.gate.high)
            pairs = [(self.gate.region, each) for each in parts if each is not None]
        leaves = [leaf for region, expression in pairs for leaf in region.leaves_in(expression).values()]
        return list({(leaf.node, leaf.dims): leaf for leaf in leaves}.values())

    @property
    def axes(self) -> set[Axis]:
        """Everything that alpha depends on; not the gate."""
        return {axis for leaf in self.leaves for axis in atoms(leaf.axes)}


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
            [node for node in self.edges if node in edges_behind(leaf.node, self.edges)]
            if leaf.node in self.again
            else [leaf.node]
        )


@dataclass(frozen=True)
class Margin:
    """The difference of the two largest of some logits, ``output``, as far as it is read in ``region``."""

    logits: Logits
    region: Region
    output: fx.Node
    output_dims: Dims


#: What is made of a blend that was found, and of the node with its result.
Made = TypeVar("Made")


def read_blend(
    effects: Effects, forms: Forms, made: Callable[[Blend, fx.Node], Made], anchor: fx.Node, form: Form
) -> Made:
    """What is ``made`` of the blend that ends in ``anchor``, or in the softmax after it.

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
                return made(blend, output)
            except (RefusedError, LayoutError):
                if output is anchor and blend is kinds[-1]:
                    raise
    raise AssertionError("the last one is returned or raises")


def read_margin(effects: Effects, forms: Forms, anchor: fx.Node) -> Margin:
    """The difference of the two largest logits that ends in ``anchor``.

    Raises:
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
    return Margin(logits, region, anchor, dims)


def _read(effects: Effects, forms: Forms, anchor: fx.Node, form: Form) -> Blend:
    """The two tensors and their weights, over the axes of the anchor."""
    dims = fresh(shape_of(known_tensor(anchor)))
    bounds, stops = BoundReader(effects, form.bounds), _Stops(forms, frozenset({form.seed, form.host, *form.factors}))
    functions = {**dict.fromkeys(CASTS, _counted), **bounds.functions}
    region = Region(effects, expand_masks=True, stops=stops, functions=functions)
    written, alike = region.express(anchor, dims), _alike(forms, region)
    written = written.xreplace({symbol: symbols[0] for symbols in alike for symbol in symbols})
    expression = reduce_indicators(written)
    seed, host = (_only_leaf(forms, region, alike, node, dims) for node in (form.seed, form.host))
    of_seed, of_host = (sympy.expand(expression.coeff(symbol, 1)) for symbol in (seed, host))
    rest = sympy.expand(expression - of_seed * seed - of_host * host)
    if not is_zero(rest) or {seed, host} & (of_seed.free_symbols | of_host.free_symbols):
        raise LayoutError("no sum of two tensors")
    if not form.is_soft and not is_zero(of_host - (1 if form.is_residual else 1 - of_seed)):
        raise LayoutError("the weights are along different dimensions")
    leaves = {symbols[0]: [region.leaves[symbol] for symbol in symbols] for symbols in alike}
    records = grad_enabled(effects.ambient(anchor))
    gate, is_gated = _gate(forms, leaves, of_seed, (region.leaves[seed], region.leaves[host]), records=records)
    both = [(written.diff(seed), of_seed), (written.diff(host), of_host)]
    seed_weight, host_weight = (own if sympy.expand(own) == known else known for own, known in both)
    is_rest = host_weight.is_Add and host_weight == 1 - seed_weight and not of_seed.as_coeff_Add()[0]  # not of 1 - a
    is_told = form.is_soft or not (form.is_residual or of_seed.is_number or is_rest)
    weights = Weights(region, seed_weight, host_weight if is_told else None, gate)
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
    forms: Forms,
    leaves: Mapping[sympy.Symbol, list[Leaf]],
    weight: sympy.Expr,
    tensors: tuple[Leaf, ...],
    *,
    records: bool,
) -> tuple[Gate | None, bool]:
    """The gate in a weight, and whether there is any, of whatever form."""
    gates = forms.gates
    if gates is None:
        return None, False
    symbols = weight.free_symbols & leaves.keys()
    if not any(gates.depends(leaves[symbol][0].node) for symbol in symbols):
        return None, False
    return gates.read(weight, leaves, tensors, records=records), True


def _softmax_after(effects: Effects, anchor: fx.Node) -> fx.Node | None:
    """The softmax that is all that reads a blend."""
    users = list(anchor.users)
    call = effects.calls.get(users[0]) if len(users) == 1 else None
    if call is None or call.name not in _SOFTMAX or call.input is not anchor or call.get("dtype") is not None:
        return None
    return call.node if isinstance(call.get("dim"), int) else None


# ---- values that are computed again ----------------------------------------------------------------------------------


def shared_inputs(effects: Effects, nodes: Sequence[fx.Node], dims: Dims) -> dict[fx.Node, Dims]:
    """The nodes from which several, that compute the same, are computed, with their dims.

    Raises:
        LayoutError: they spell out sizes, which differ in a proof.
    """
    if len(set(nodes)) == 1:
        return {nodes[0]: dims}
    calls = [effects.calls[node] for node in nodes]
    found: dict[fx.Node, Dims] = {}
    call = calls[0]
    assert call is not None, "what is computed twice is a call"
    for operands in zip(*(_operands(each) for each in calls if each is not None), strict=True):
        for node, own in shared_inputs(effects, operands, _dims_of(call, operands[0], dims)).items():
            if resolve(found.setdefault(node, own)) != resolve(own):
                raise LayoutError(f"{told(node)} is read along different dimensions")
    return found


def _operands(call: Call) -> list[fx.Node]:
    """The nodes that a call is given, in the order of its parameters' names, which equal calls have in common."""
    found = list[fx.Node]()
    fx.map_arg([value for _, value in sorted(call.arguments.items())], found.append)
    return found


def _dims_of(call: Call, operand: fx.Node, dims: Dims) -> Dims:
    """The dims of an operand, given those of the result."""
    tensor = tensor_of(operand)
    if tensor is None:
        return ()
    if is_cast(call) or call.name == "detach":
        return dims
    if not layout.rearranges(call):
        return broadcast_from(dims, shape_of(tensor))
    read = None if call.name in layout.SIZED else layout.read_input_dims(call, dims)
    if read is None:
        raise LayoutError(f"{told(call.node)} spells out sizes, or picks")
    return read


def edges_behind(node: fx.Node, edges: Mapping[fx.Node, Dims]) -> set[fx.Node]:
    """The edges from which a node is computed."""
    return {each for inner in needed([node], edges) for each in inner.all_input_nodes if each in edges}
