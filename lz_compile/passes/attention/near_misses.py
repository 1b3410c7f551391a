"""Softmaxes that look like attention and were read as none: each is told, with what stood in the way.

What looks like attention is a normalisation of something made of a product of two computed tensors, whose result meets
another product. Routers and classifiers do not: they normalise a product with a weight, or pick from the result.

Talking heads mix scores before the softmax, probabilities after it, or both, by a matrix of weights over the heads. The
axis of the keys stays what it is, which tells them from a router, whose weights *make* the axis that its softmax runs over.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar

import sympy
from torch import fx

from lz_compile.ground.records import Reason
from lz_compile.ground.sizes import as_size, shape_of
from lz_compile.passes.attention import scores
from lz_compile.passes.attention.linear import normalises_features
from lz_compile.passes.attention.scores import FAR, is_product, is_weight, mixed_scores, path_to, scores_behind
from lz_compile.passes.attention.sinks import joined
from lz_compile.passes.formula import contraction, layout
from lz_compile.passes.formula.algebra import Region
from lz_compile.passes.formula.arithmetic import CHOICES
from lz_compile.passes.formula.axes import Axis, Dims, LayoutError, atoms, axes_of, fresh
from lz_compile.passes.formula.contraction import is_distance
from lz_compile.passes.formula.pointwise import BENDS, bends, is_exponential, is_moved, is_pointwise, is_read
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.refusal import (
    OUT_OF_PLACE,
    MutatedError,
    NearMiss,
    RefusedError,
    refusal_of,
    told,
    where_of,
)
from lz_compile.passes.graph.view import EMITTED, Call, is_floating, known_tensor, reached, tensor_of

T = TypeVar("T")
_NORMALISED = frozenset({"softmax", "log_softmax"})
_SUMS = frozenset({"sum", "logsumexp"})
#: What picks from probabilities, or measures them, instead of weighing values by them.
_PICKS = frozenset(
    "topk argmax argmin sort argsort multinomial one_hot nll_loss cross_entropy kl_div bincount histc cumsum".split()
)
#: Reasons that are always the same, and what to do about them.
_DISTANCES = (
    Reason("SCORES_ARE_DISTANCES", "the scores are distances between queries and keys, no products"),
    "score by squared distances, as -torch.cdist(q, k) ** 2: of those, kernels take the products",
)
_PLACE_BY_PLACE = (
    Reason("WINDOW_BY_HAND", "the keys of a window are scored, and its values weighed, one by one"),
    "gather them for each query, as key.unfold(2, window, 1) does: products with that are read as a band of all keys",
)
_FROM_OUTSIDE = (
    Reason(
        "SCORES_FROM_OUTSIDE",
        "the scores are an input of this graph: they were computed outside of it, as before a graph break",
    ),
    "have both products in one graph (TORCH_LOGS=graph_breaks says what broke it)",
)
_FEATURES = (
    Reason(
        "FEATURES_NORMALISED",
        "the softmax is of features themselves, as of queries and keys in linear attention: no scores are normalised",
    ),
    "weigh the values by softmax(query @ key^T) where attention is meant; linear attention stays with Inductor",
)
_COMBINED = (
    Reason(
        "PROBABILITIES_COMBINED",
        "parts of the probabilities, as of two heads, are combined before they meet the values",
    ),
    "multiply the values, repeated for each head, by all probabilities, then combine the outputs",
)
_MULTIPLIED = (
    Reason(
        "PROBABILITIES_MULTIPLIED",
        "the probabilities are multiplied by another tensor, over their rows, before any values",
    ),
    "multiply the values first, as r @ (p @ v) in place of (r @ p) @ v",
)
_ONE_KEY = (
    Reason(
        "ONE_KEY", "every query has one key, whose probability is 1 where no mask drops it, a sigmoid beside a sink"
    ),
    "nothing: no kernel does better than Inductor's own code",
)
_WITHOUT_VALUES = (
    Reason("NO_VALUES", "the probabilities meet no values in this graph"),
    "multiply values by them in the same graph",
)


def unread(op: str, graph: fx.Graph, effects: Effects, covered: Collection[fx.Node]) -> Iterator[NearMiss]:
    """A near miss for every normalisation outside of ``covered`` that looks like the one of an attention."""
    for node in graph.nodes:
        call = effects.calls[node]
        if call is None or not _normalises(effects, call) or node in covered or EMITTED in node.meta:
            continue
        tensor = tensor_of(node)
        if tensor is None or tensor_of(call.input) is None or not tensor.dim() or 0 in shape_of(tensor):
            continue
        found = _reason(effects, call, covered)
        if found is not None:
            yield NearMiss(op, node, *found, where_of(node))


def without_softmax(op: str, graph: fx.Graph, effects: Effects, told: Collection[fx.Node]) -> Iterator[NearMiss]:
    """A near miss for values that are weighed by a function of scores that is no softmax, where nothing else was ``told``."""
    for node in () if effects.reshapes else graph.nodes:
        call = effects.calls[node]
        if call is None or call.name not in contraction.PRODUCTS - {"linear", "addmm"} or node in told:
            continue
        found = _answer(_weighed_by, effects, call, told)
        if found:
            names = ", ".join(dict.fromkeys(each.name for each in found))
            text = f"the values are weighed by a function of the scores ({names}) that is read as no softmax"
            edit = "weigh them by softmax(scores) where attention is meant; other weights stay with Inductor"
            yield NearMiss(op, found[-1].node, Reason("NO_SOFTMAX", text), edit, where_of(node))


def _weighed_by(effects: Effects, call: Call, told: Collection[fx.Node]) -> list[Call]:
    """The functions of scores, no affine ones, that a product weighs values by as it sums over the keys."""
    functions = {name: rule for name, rule in BENDS.items() if name not in CHOICES}  # masks choose, and bend nothing
    region = Region(effects, expand_masks=True, functions=functions)
    dims = fresh(shape_of(known_tensor(call.node)))
    outer = contraction.read(region, call, dims)
    if outer is None or not outer.summed:
        return []

    def is_end(node: fx.Node) -> bool:
        each = effects.calls[node]
        return node in told or each is None or not (is_read(each) or layout.rearranges(each))

    for weights, values in ((outer.left, outer.right), (outer.right, outer.left)):
        if scores_behind(region, weights.node, is_end) is None or is_weight(values.node):
            continue
        own, given = ({*axes_of(each.dims)} - {*atoms(outer.summed)} for each in (weights, values))
        if len(own) > 1 and not own & given:  # values that all of a batch share are another layer's weight
            continue
        if region.reaches(
            values.node, _NORMALISED, call.node
        ):  # the other factor weighs: masks by probabilities of classes
            continue
        expression = region.express(weights.node, weights.dims, call.node)
        for product in scores.products_in(region, expression, atoms(outer.summed)):
            goal = region.leaves[product].node
            if any(map(is_weight, goal.all_input_nodes)):
                continue
            path = path_to([weights.node], lambda node: node.all_input_nodes, partial(operator.is_, goal), is_end)
            if path is not None and sympy.diff(expression, product).has(product):
                calls = [each for node in reversed(path[:-1]) if (each := effects.calls[node]) is not None]
                return [each for each in calls if bends(each)] or [x for x in calls if not layout.rearranges(x)]
    return []


def _normalises(effects: Effects, call: Call) -> bool:
    """Whether the call is a softmax, or an exponential that is summed."""
    if call.name in _NORMALISED:
        return True
    return is_exponential(call) and any(effects.name(user) in _SUMS for user in call.node.users)


def _reason(effects: Effects, call: Call, covered: Collection[fx.Node]) -> tuple[Reason, str] | None:
    region = Region(effects)
    dims, keys = _normalised_axes(effects, call)
    inner, refused = _read(region, call, dims, keys) if keys else (None, None)
    after = path_to(
        [call.node],
        lambda node: node.users,
        lambda node: is_product(region, node, call.node),
        lambda node: effects.name(node) in {"", *_PICKS},
    )
    before = scores_behind(region, call.input, lambda node: node in covered or effects.name(node) in _NORMALISED)
    if not keys:
        passed = [each for each in (after or ())[1:-1] if effects.name(each) not in ("getitem", "narrow")]
        is_whole = call.name == "softmax" and all(is_moved(effects.calls.get(each)) for each in passed)
        return _ONE_KEY if is_whole and before is not None and after is not None else None
    if inner is not None:
        if any(is_weight(factor.node) for factor in (inner.query, inner.key)):
            is_mixed = after is not None and _answer(mixed_scores, region, inner, keys)
            if is_mixed or after is None or (before is None and is_weight(inner.key.node)):
                return mixed_refusal("scores") if is_mixed else None
            if before is not None:
                return _through(effects, "scores", before)  # what was read is a bias that a weight makes
        other = _answer(_other_factor, region, after[-1], call.node) if after else None
        if other is not None:
            return mixed_refusal("probabilities") if is_weight(other) else _MULTIPLIED
        if after is not None and _are_combined(effects, call.node):
            return _COMBINED
        if after is not None:
            return _split(effects, call, after[1:]) or _through(effects, "probabilities", after[1:])
        picked = path_to(
            [call.node], lambda node: node.users, lambda node: effects.name(node) in _PICKS, lambda _: False
        )
        return _WITHOUT_VALUES if picked is None else None
    if after is None:
        return _PLACE_BY_PLACE if before is not None and _weighs_by_place(effects, call, before) else None
    if before is None:
        if _answer(normalises_features, region, call.node, after[-1]):
            return _FEATURES
        is_outside = _answer(_is_from_outside, region, call, after[-1])
        return None if not is_outside else _FROM_OUTSIDE if keys == dims[-1] else _FEATURES
    if refused is None and is_distance(effects, before[-1]):
        return _DISTANCES
    return refused or _large(region) or _through(effects, "scores", before)


def _normalised_axes(effects: Effects, call: Call) -> tuple[Dims, tuple[Axis, ...]]:
    """New axes, and those that a softmax runs over, or an exponential is most likely summed over: of keys, no sinks."""
    dims = fresh(shape_of(known_tensor(call.node)))
    dim = call.get("dim") if call.name in _NORMALISED else None
    join = joined(effects, call) if call.name == "softmax" else None
    columns = [] if join is None else [shape_of(known_tensor(each))[-1:] for each in join.get("tensors")]
    return dims, () if columns == [(1,), (1,)] else dims[-1 if dim is None else dim]


def _answer(question: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, None where what it is about cannot be read."""
    try:
        return question(*arguments)
    except (RefusedError, MutatedError, LayoutError):
        return None


def _read(
    region: Region, call: Call, dims: Dims, keys: tuple[Axis, ...]
) -> tuple[scores.Scores | None, tuple[Reason, str] | None]:
    """The scores that are normalised over ``keys``, or why there are none."""
    if region.effects.reshapes:
        return None, None
    try:
        return scores.read(region, region.scores_of(call, dims), keys), None
    except (RefusedError, MutatedError) as error:
        refusal = refusal_of(error, OUT_OF_PLACE)
        return None, (refusal.reason, refusal.edit)
    except LayoutError as error:
        text = f"the dimensions do not come apart into axes: {error}"
        return None, (Reason("LAYOUT_UNCLEAR", text), "reshape along whole heads and positions")


def _large(region: Region) -> tuple[Reason, str] | None:
    """What of the scores was read no further, where anything was not."""
    node = next((leaf.node for leaf in region.leaves.values() if leaf.kind == "large"), None)
    if node is None:
        return None
    text = f"{told(node)} has more than {region.most_parts:,} parts when it is multiplied out, and is read no further"
    return Reason("SCORES_LARGE", text), "compute what scales, masks or biases the scores as one tensor before"


def _weighs_by_place(effects: Effects, call: Call, scores: list[fx.Node]) -> bool:
    """Whether scores are put together of one for each place, and each weighs a tensor of its own."""
    taken = {each for node in _pieces(effects, call.node) for each in node.users}
    weighed = [each for each in taken if effects.name(each) == "mul"]
    return any(effects.name(each) in ("stack", "cat") for each in scores) and len(weighed) > 1


def _pieces(effects: Effects, node: fx.Node) -> set[fx.Node]:
    """The parts that are taken of a tensor, one by one."""
    found: set[fx.Node] = set()
    for user in node.users:
        if effects.name(user) in ("getitem", "select", "narrow", "unbind", "chunk", "split", "unsqueeze"):
            found |= {user} | _pieces(effects, user)
    return found


#: What takes probabilities apart, and what brings parts together.
_TAKEN_APART = frozenset({"chunk", "split", "tensor_split", "unbind", "getitem", "select", "narrow"})
_TOGETHER = frozenset({"add", "sub", "rsub", "lerp", "addcmul"})


def _are_combined(effects: Effects, softmax: fx.Node) -> bool:
    """Whether parts of the probabilities are added, or one subtracted from another: differential attention by heads."""

    def passes(node: fx.Node) -> bool:
        call = effects.calls.get(node)
        return call is not None and (is_pointwise(call) or layout.rearranges(call))

    def parts(node: fx.Node) -> set[fx.Node]:
        users = [user for user in node.users if passes(user) or effects.name(user) in _TAKEN_APART]
        below = {user for user in users if effects.name(user) in _TAKEN_APART and tensor_of(user) is not None}
        return below.union(*(parts(user) for user in users if user not in below))

    followed = [{*reached([part], lambda node: filter(passes, node.users), FAR)} for part in parts(softmax)]
    met = [node for node in set().union(*followed) if effects.name(node) in _TOGETHER]
    return any(sum(node in each for each in followed) > 1 for node in met)


def _is_from_outside(region: Region, call: Call, product: fx.Node) -> bool:
    """Whether values are weighed for every query by a softmax of what was made of inputs of the graph, element by element."""
    last, tensor = region.effects.calls[product], tensor_of(product)
    outer = None if last is None or tensor is None else contraction.read(region, last, fresh(shape_of(tensor)))
    if outer is None or any(is_weight(factor.node) for factor in (outer.left, outer.right)):
        return False
    is_left = region.reaches(outer.left.node, _NORMALISED | {"exp"}, outer.call.node)
    weights, values = (outer.left, outer.right) if is_left else (outer.right, outer.left)
    sources = _made_of(region.effects, call.input)
    rows, columns = (set(axes_of(each.dims)) - {*atoms(outer.summed)} for each in (weights, values))
    return (  # a number for each key is no value: an expectation, as of bins that a classifier chooses from
        bool(rows - columns and columns - rows)
        and all(node.op == "placeholder" for node in sources)
        and any(_is_whole(node, call.node) and not is_weight(node) for node in sources)
    )


def _made_of(effects: Effects, node: fx.Node) -> set[fx.Node]:
    """What a value is computed from, behind pointwise and layout operations that read floating-point values."""

    def above(each: fx.Node) -> list[fx.Node]:
        call = effects.calls.get(each)
        is_passed = call is not None and (is_pointwise(call) or layout.rearranges(call))
        return each.all_input_nodes if is_passed and is_floating(each) else []

    return {each for each in reached([node], above, FAR) if is_floating(each) and not above(each)}


def _is_whole(node: fx.Node, scores: fx.Node) -> bool:
    """Whether a tensor has an element for every score."""
    given, wanted = (tensor_of(each) for each in (node, scores))
    return given is not None and wanted is not None and shape_of(given) == shape_of(wanted)


def _split(effects: Effects, softmax: Call, path: list[fx.Node]) -> tuple[Reason, str] | None:
    """How probabilities are taken apart, whole rows of them, before they meet values; None where they are not."""
    name = effects.name(path[0])
    part = next((tensor for each in path if (tensor := tensor_of(each)) is not None), None)
    whole = known_tensor(softmax.node)
    if name not in _TAKEN_APART or part is None or part.dim() > whole.dim():
        return None
    dim = softmax.get("dim")
    keys = (-1 if dim is None else dim % whole.dim() - whole.dim()) if softmax.name in _NORMALISED else -1
    if -keys > part.dim() or as_size(part.shape[keys]) != as_size(whole.shape[keys]):
        return None
    text = f"the probabilities are split by {name}, as into heads, and each part weighs values of its own"
    edit = "split the queries (and the keys, where heads are split) instead, and take a softmax for each part"
    return Reason("PROBABILITIES_SPLIT", text), edit


def _through(effects: Effects, what: str, path: list[fx.Node]) -> tuple[Reason, str]:
    """What the scores, or the probabilities, pass through between their products."""
    calls = [effects.calls[node] for node in path[:-1]]
    if any(call is not None and is_pointwise_convolution(call) for call in calls):
        return mixed_refusal(what)
    names = [c.name for c in calls if c is not None and not is_pointwise(c) and not layout.rearranges(c)]
    names = names or [c.name for c in calls if c is not None and _answer(_is_unread, effects, c)]
    names = names or [c.name for c in calls if c is not None and not layout.rearranges(c)]
    between = ", ".join(dict.fromkeys(names)) or "a layout"
    text = f"the {what} pass through {between}, which has no reading here"
    edit = f"multiply the values by the softmax itself, without {between} in between, and read it nowhere else"
    edit = "scale, mask, bias or cap the scores" if what == "scores" else edit
    return Reason(f"{what.upper()}_NOT_READ", text), edit


def _is_unread(effects: Effects, call: Call) -> bool:
    """Whether a call has a reading by its name, and none with these operands: a clamp at a number that scores reach, say."""
    if tensor_of(call.node) is None or (call.name == "getitem" and tensor_of(call.input) is None):
        return call.name != "getitem"  # several results, of which one is taken
    region = Region(effects)
    leaf = region.leaves.get(region.express(call.node, fresh(shape_of(known_tensor(call.node)))))
    return leaf is not None and leaf.node is call.node


_EDIT = "mix the heads of the output instead; as it is, no kernel can do better than Inductor's own code"
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})


def mixed_refusal(what: str) -> tuple[Reason, str]:
    """Why ``what`` ("scores" or "probabilities") of an attention is none of a kernel's, and what to do about it."""
    place = "before the softmax" if what == "scores" else "before they meet the values"
    return Reason("HEADS_MIXED", f"the {what} of different heads are mixed by weights {place}"), _EDIT


def is_pointwise_convolution(call: Call) -> bool:
    """Whether a call is a convolution over single elements, which mixes channels: of scores, those are the heads."""
    weight = tensor_of(call.get("weight"))
    return call.name in _CONVOLUTIONS and weight is not None and all(size == 1 for size in shape_of(weight)[2:])


def _other_factor(region: Region, product: fx.Node, softmax: fx.Node) -> fx.Node | None:
    """What a product multiplies with what came from ``softmax``, where it leaves the axis that this runs over as it is."""
    call, tensor = region.effects.calls[product], tensor_of(product)
    normalised = region.effects.calls[softmax]
    dim = None if normalised is None else normalised.get("dim")
    outer = None if call is None or tensor is None else contraction.read(region, call, fresh(shape_of(tensor)))
    if outer is None or dim is None:
        return None
    for other, weights in ((outer.left, outer.right), (outer.right, outer.left)):
        for leaf in region.leaves_in(region.express(weights.node, weights.dims, product)).values():
            if leaf.node is softmax and not set(atoms(leaf.dims[dim])) & set(atoms(outer.summed)):
                return other.node
    return None
