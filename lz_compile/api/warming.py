"""``lz.warmup``: kernels are chosen and run once, so that libraries are imported and compiled before it matters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import torch

from lz_compile.api import eager
from lz_compile.api.arguments import Arguments
from lz_compile.api.attention import Layout, attention
from lz_compile.api.given import check_operation
from lz_compile.api.sampled import SizedProblem, Sizes, grid
from lz_compile.errors import ArgumentError
from lz_compile.ground.isolation import isolated
from lz_compile.lowering import ops
from lz_compile.runtime.choose.problem import Problem
from lz_compile.runtime.kernels.kernel import KernelSpec
from lz_compile.runtime.policy import policy
from lz_compile.runtime.problem import context as contexts
from lz_compile.runtime.ranks.agree import decide


def warmup(
    operation: str = "attention",
    shapes: Sequence[tuple[int, int, int, int]] = (),
    dtype: torch.dtype = torch.float32,
    *,
    sizes: Sizes | None = None,
    device: torch.device | str | None = None,
    layout: Layout = "BHSD",
) -> None:
    """Choose and run kernels once, so that libraries are imported and compiled before it matters.

    The kernel is the one that an eager call runs; of ops without eager calls (``rope``, ``mlp``), the one that is chosen in
    compiled functions, where that is a kernel and not Inductor's code. What is not shipped with this package is proven first.

    Args:
        operation: an op (all of its variants), or a variant, as ``attention.causal``.
        shapes: of query, key and value of attention, in ``layout``.
        dtype: of the tensors.
        sizes: one or several of each of the op's sizes by name, as ``{"num_rows": (1, 512), "hidden_size": 4096}``; every
            combination is run, on random operands.
        device: by default the accelerator, or the CPU where there is none.
        layout: ``BHSD`` or ``BSHD``, of ``shapes``.

    Raises:
        UnknownOperationError: there is no such operation.
        ArgumentError: there is no such size, or shapes are given for another op than attention.
    """
    check_operation("warming up", operation)
    arguments = Arguments("warmup")
    where = arguments.device("device", device)
    arguments.floating_dtype("dtype", dtype)
    arguments.one_of("layout", layout, get_args(Layout))
    if not isinstance(shapes, Sequence):
        raise arguments.wrong("shapes", "as several of four sizes, [(1, 8, 128, 64)]", repr(shapes))
    is_attention = operation.partition(".")[0] == "attention"
    if (len(shapes) or layout != "BHSD") and not is_attention:
        names = ", ".join(contexts.dim_names(operation.partition(".")[0]))
        raise ArgumentError("warmup", "shapes and layout", "for attention only", operation, f"Give sizes, by {names}")
    for shape in shapes:
        if not isinstance(shape, Sequence) or len(shape) != 4:
            raise arguments.wrong("shapes", "as several of four sizes, [(1, 8, 128, 64)]", repr(shape))
        for size in shape:
            arguments.number("shapes", size, 0, whole=True)
    with torch.no_grad(), isolated():
        variants = [True, False] if operation == "attention" else [operation == "attention.causal"]
        for shape, causal in itertools.product(shapes, variants):
            tensor = torch.zeros(shape, dtype=dtype, device=where)
            attention(tensor, tensor, tensor, causal=causal, layout=layout)
        for problem in [] if sizes is None else grid("warmup", operation, [dtype], sizes):
            _run(problem, where)


def _run(problem: SizedProblem, device: torch.device) -> None:
    sample = problem.sample(device)
    kernel = _kernel(problem.op, sample, device)
    if kernel is None or kernel.call is None:
        return
    if not kernel.is_shipped:
        from lz_compile.passes.proof import eager_proof  # which chooses kernels in turn

        seen: list[Any] = []

        def noting(x: Any, attrs: Any) -> Any:
            seen.append(x)
            return ops.module(problem.op).reference(x, attrs)

        sample.with_kernel(noting)(*sample.inputs)
        if eager_proof.why_not(kernel, problem.op, sample.attrs, seen[0].given()) is not None:
            return  # which is an event
    sample.with_kernel(kernel.call)(*sample.inputs)


def _kernel(op: str, sample: Any, device: torch.device) -> KernelSpec | None:
    """What runs the problem, imported; None where nothing but PyTorch's own operations or Inductor's code does."""
    attrs, facts = sample.attrs, sample.facts
    if hasattr(ops.module(op), "EAGER_KERNEL"):
        return eager.kernel_for(op, attrs, facts, device)
    problem = Problem(contexts.of_facts(op, attrs, facts, device=device))
    decision = decide(problem, policy.current(), why_not=lambda kernel: kernel.load(waits=True))
    return next((each for each in decision.ranking if each.load(waits=True) is None), None)
