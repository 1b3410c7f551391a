"""Which kernel calls of ``lz.kda`` and ``lz.linear_scan`` in a graph select by themselves, where nobody replaces them."""

from __future__ import annotations

from dataclasses import replace

from lz_compile.lowering.ops.scan import EAGER_KERNEL
from lz_compile.passes.match import Match
from lz_compile.passes.patterns.scan_call import ScanCallEmitter
from lz_compile.passes.view import tensor_of
from lz_compile.runtime import eager
from lz_compile.scans import facts_of_call


def selects_itself(match: Match) -> bool:
    """Whether what was matched is such a call."""
    return isinstance(match.emitter, ScanCallEmitter)


def with_own_kernel(match: Match) -> Match:
    """A match; of such a call, with the kernel that it selects when it is traced as the one that the source calls."""
    if not isinstance(match.emitter, ScanCallEmitter):
        return match
    tensors = {name: tensor_of(node) for name, node in match.emitter.given.items()}
    facts = replace(facts_of_call(tensors), needs_grad=match.facts.needs_grad)
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    kernel = eager.kernel_for(match.op, match.attributes, facts, device)
    return replace(match, source_kernel=EAGER_KERNEL if kernel is None or kernel.call is None else kernel.kernel_id)
