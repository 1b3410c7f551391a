"""Softmaxes that look like attention and were read as none: each is told, with what stood in the way.

What looks like attention is a normalisation of something made of a product of two computed tensors, whose result meets
another product. Routers and classifiers do not: they normalise a product with a weight, or pick from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import fx

from lz_compile.passes import contraction, layout
from lz_compile.passes.algebra import Region, is_pointwise
from lz_compile.passes.attention import scores
from lz_compile.passes.axes import LayoutError, atoms, fresh, shape_of
from lz_compile.passes.builder import EMITTED
from lz_compile.passes.effects import Effects, MutatedError
from lz_compile.passes.match import NearMiss, RefusedError
from lz_compile.passes.view import Call, tensor_of, where_of
from lz_compile.reasons import Reason

_NORMALISED = frozenset({"softmax", "log_softmax"})
_EXPONENTIALS = frozenset({"exp", "exp2"})
_SUMS = frozenset({"sum", "logsumexp"})
#: What picks from probabilities, or measures them, instead of weighing values by them.
_PICKS = frozenset(
    "topk argmax argmin sort argsort multinomial one_hot nll_loss cross_entropy kl_div bincount histc cumsum".split()
)
#: How far from a softmax its scores and its values are looked for, in nodes.
_FAR = 64
#: A weight is a matrix; what was made of parameters and has more dimensions may be learned queries.
_WEIGHT_RANK = 2


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


def _normalises(effects: Effects, call: Call) -> bool:
    """Whether the call is a softmax, or an exponential that is summed."""
    if call.name in _NORMALISED:
        return True
    users = [effects.calls.get(user) for user in call.node.users]
    return call.name in _EXPONENTIALS and any(user is not None and user.name in _SUMS for user in users)


def _reason(effects: Effects, call: Call, covered: Collection[fx.Node]) -> tuple[Reason, str] | None:
    region = Region(effects)
    inner, refused = _read(region, call)
    after = _path(
        [call.node], lambda node: node.users, lambda node: _is_product(region, node, call.node), _picks(effects)
    )
    if inner is not None:
        if any(_is_weight(factor.node) for factor in (inner.query, inner.key)):
            return None
        if after is not None:
            return _through(effects, "probabilities", after[1:])
        is_picked = _path([call.node], lambda node: node.users, _is_pick(effects), lambda _node: False) is not None
        return None if is_picked else _without_values()
    before = _scores_behind(region, call.input, lambda node: node in covered or _normalised(effects, node))
    if before is None or after is None:
        return None
    return refused or _through(effects, "scores", before)


def _read(region: Region, call: Call) -> tuple[scores.Scores | None, tuple[Reason, str] | None]:
    """The scores that are normalised, or why there are none."""
    dims = fresh(shape_of(tensor_of(call.node)))  # type: ignore[arg-type]
    dim = call.get("dim") if call.name in _NORMALISED else None
    if region.effects.reshapes:
        return None, None
    try:
        expression = region.express(call.input, dims, call.node)
        return scores.read(region, expression, atoms(dims[-1 if dim is None else dim])), None
    except RefusedError as refusal:
        return None, (refusal.reason, refusal.edit)
    except MutatedError as error:
        text = f"a value is {error}"
        return None, (Reason("OPERAND_MUTATED", text), "use the out-of-place form of that operation")
    except LayoutError as error:
        text = f"the dimensions do not come apart into axes: {error}"
        return None, (Reason("LAYOUT_UNCLEAR", text), "reshape along whole heads and positions")


def _without_values() -> tuple[Reason, str]:
    reason = Reason("NO_VALUES", "the probabilities meet no values in this graph")
    return reason, "multiply values by them in the same graph"


def _through(effects: Effects, what: str, path: list[fx.Node]) -> tuple[Reason, str]:
    """What the scores, or the probabilities, pass through between their products."""
    calls = [effects.calls[node] for node in path[:-1]]
    names = [c.name for c in calls if c is not None and not is_pointwise(c) and not layout.rearranges(c)]
    names = names or [c.name for c in calls if c is not None and not layout.rearranges(c)]
    text = f"the {what} pass through {', '.join(dict.fromkeys(names)) or 'a layout'}, which has no reading here"
    edit = "scale, mask, bias or cap the scores" if what == "scores" else "multiply the values by the softmax itself"
    return Reason(f"{what.upper()}_NOT_READ", text), edit


def _path(
    start: list[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]],
    is_goal: Callable[[fx.Node], bool],
    is_end: Callable[[fx.Node], bool],
) -> list[fx.Node] | None:
    """The shortest way from ``start`` to a goal, past floating-point values (and tuples) only, not far."""
    previous: dict[fx.Node, fx.Node | None] = dict.fromkeys(start)
    queue = list(start)
    while queue and len(previous) < _FAR:
        node = queue.pop(0)
        if is_goal(node):
            path = [node]
            while (parent := previous[path[-1]]) is not None:
                path.append(parent)
            return path[::-1]
        if is_end(node):
            continue
        for each in following(node):
            tensor = tensor_of(each)
            if each not in previous and (tensor is None or tensor.is_floating_point()):
                previous[each] = node
                queue.append(each)
    return None


def _is_product(region: Region, node: fx.Node, besides: fx.Node | None = None) -> bool:
    call = region.effects.calls.get(node)
    if call is None or node is besides:
        return False
    is_call = call.name in contraction.PRODUCTS or call.name == "scaled_dot_product_attention"
    return is_call or (call.name == "sum" and contraction.is_product_sum(region, call))


def _factors(effects: Effects, node: fx.Node) -> list[fx.Node]:
    call = effects.calls[node]
    given = [] if call is None else [call.get(name) for name in ("batch1", "batch2")]
    return [x for x in given if isinstance(x, fx.Node)] or list(node.all_input_nodes)


def has_scores(region: Region, node: fx.Node) -> bool:
    """Whether ``node`` was made, in any way, of a product of two computed tensors, no product with a weight between."""
    return _scores_behind(region, node, lambda _: False) is not None


def _scores_behind(region: Region, node: fx.Node, is_end: Callable[[fx.Node], bool]) -> list[fx.Node] | None:
    return _path(
        [node],
        lambda each: each.all_input_nodes,
        lambda each: _is_product(region, each) and not any(map(_is_weight, _factors(region.effects, each))),
        lambda each: is_end(each) or _is_product(region, each),
    )


def _normalised(effects: Effects, node: fx.Node) -> bool:
    call = effects.calls.get(node)
    return call is not None and call.name in _NORMALISED


def _picks(effects: Effects) -> Callable[[fx.Node], bool]:
    return lambda node: effects.calls.get(node) is None or _is_pick(effects)(node)


def _is_pick(effects: Effects) -> Callable[[fx.Node], bool]:
    def is_pick(node: fx.Node) -> bool:
        call = effects.calls.get(node)
        return call is not None and call.name in _PICKS

    return is_pick


def _is_weight(node: fx.Node) -> bool:
    """Whether a factor is a parameter, or a matrix that was made of parameters alone."""
    source = node
    while source.op != "placeholder" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if isinstance(tensor_of(source), torch.nn.Parameter):
        return True
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() > _WEIGHT_RANK:
        return False
    seen, queue = {node}, [node]
    while queue and len(seen) < _FAR:
        current = queue.pop()
        if current.op == "placeholder" and not isinstance(tensor_of(current), torch.nn.Parameter):
            return False
        queue.extend(each for each in current.all_input_nodes if each not in seen)
        seen.update(current.all_input_nodes)
    return not queue and any(each.op == "placeholder" for each in seen)
