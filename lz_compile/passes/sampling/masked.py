"""Masks before a softmax that is drawn from, where no filter stands between: a filter without limits."""

from __future__ import annotations

import math

from torch import fx

from lz_compile.ground.sizes import shape_of
from lz_compile.passes.formula.axes import fresh
from lz_compile.passes.graph.effects import Effects
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.sampling.drawn import draws
from lz_compile.passes.sampling.excerpt import Scores
from lz_compile.passes.sampling.filters import Filter
from lz_compile.passes.sampling.kept import Limits
from lz_compile.passes.sampling.logit_processors import logit_processors_of


def masked_softmax(effects: Effects, node: fx.Node) -> Filter | None:
    """The masks, temperature and additions before a softmax that is no weight of a sum, as attention's is; else None."""
    call, tensor = effects.calls[node], tensor_of(node)
    if call is None or call.name != "softmax" or tensor is None or not isinstance(call.get("dim"), int):
        return None
    is_computed = isinstance(call.input, fx.Node) and effects.calls.get(call.input) is not None
    is_drawn = any(draws(effects, user) for user in node.users)
    if not is_computed or not is_drawn or shape_of(tensor)[call.get("dim")] == 1:
        return None
    dims = fresh(shape_of(tensor))
    entry = Scores(call.input, dims, dims[call.get("dim") % len(dims)][0])
    processors = logit_processors_of(effects, entry, {node})
    if not processors.masks and not any(_is_additive_mask(effects, part.node) for part in processors.bias):
        return None
    return Filter(entry, "scores", node, Limits("probs"), frozenset({node}))


def _is_additive_mask(effects: Effects, node: fx.Node) -> bool:
    """Whether what is added to scores is minus infinity somewhere, by what made it."""
    call = effects.calls.get(node)
    if call is None or call.name not in ("where", "masked_fill", "mul"):
        return False
    return any(abs(each) == math.inf for each in call.arguments.values() if isinstance(each, float))
