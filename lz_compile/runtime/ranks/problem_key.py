"""What makes two problems one for the ranks of a job: the same op, device, dtype, features and bucket of sizes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from lz_compile.lowering import ops
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.policy.resolved import Policy
from lz_compile.runtime.problem.context import SymbolicDim

_SYMBOL = re.compile(r"\b[a-z]\w*", re.IGNORECASE)


@dataclass(frozen=True)
class ProblemKey:
    """The key of a problem in the job's store, its kind of device, and what its symbols are called here and there."""

    key: str
    kind: str
    names: Mapping[str, str]


def key_of(problem: Problem, policy: Policy) -> ProblemKey:
    """The key of a problem under a policy.

    Sizes that are bucketed count as the power of two at or above them: ranks with uneven data agree. Symbols count by their
    place. Which kernels there are is no part of it: a rank that lacks one is to agree with the others, on another one.
    What surrounds a match is none either, for only a rank that measures knows it. Attributes are, since what proves wrong for
    some of them must not move others on.
    """
    context = problem.context
    bucketed = {name for names in ops.module(context.op).BUCKETED_DIMS for name in names}
    names: dict[str, str] = {}
    dims = {}
    for name, dim in sorted(context.dims.items()):
        if isinstance(dim, SymbolicDim):
            dims[name] = _SYMBOL.sub(lambda found: names.setdefault(found[0], f"n{len(names)}"), dim.name)
        else:
            dims[name] = str(1 << max(dim - 1, 0).bit_length() if name in bucketed else dim)
    parts = [
        context.operation,
        context.hardware.kind(),
        context.dtype_name,
        dims,
        sorted(context.features),
        [context.layout, context.attn_mask_type, context.is_last_dim_contiguous, context.has_custom_scale],
        [context.is_training, context.requires_deterministic, context.is_cuda_graph_capturing, context.fusable],
        [problem.source_kernel, problem.left_as, problem.is_eager],
        _SYMBOL.sub(lambda found: names.get(found[0], found[0]), problem.attributes),
        policy.wishes,
    ]
    key = hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]
    return ProblemKey(key, context.hardware.kind(), names)
