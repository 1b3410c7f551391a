"""Which kernel calls of our own functions in a graph select by themselves, where nobody replaces them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lz_compile.api import eager
from lz_compile.lowering import ops
from lz_compile.passes.graph.view import tensor_of
from lz_compile.passes.rewriting.match import Match
from lz_compile.passes.rewriting.op_calls import CallEmitter


def selects_itself(match: Match) -> bool:
    """Whether what was matched is such a call."""
    return isinstance(match.found.emitter, CallEmitter)


def with_own_kernel(match: Match) -> Match:
    """A match; of such a call, with the kernel that it selects when it is traced as the one that the source calls."""
    if not isinstance(match.found.emitter, CallEmitter):
        return match
    tensors: dict[str, Any] = {name: tensor_of(node) for name, node in match.found.emitter.given.items()}
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    _, facts = eager.problem_of(ops.module(match.op).Operands(**tensors))
    facts = replace(facts, needs_grad=match.found.facts.needs_grad)
    kernel = eager.kernel_for(match.op, match.found.attributes, facts, device)
    own = ops.module(match.op).EAGER_KERNEL
    name = own if kernel is None or kernel.call is None else kernel.kernel_id
    return replace(match, found=replace(match.found, source_kernel=name))
