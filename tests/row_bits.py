"""Whether a kernel gives a row the same bits in every batch: problems of each op, cut into batches, chunks and paddings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lz_compile.lowering import ops
from lz_compile.lowering.attention_attributes import AttentionAttrs
from lz_compile.lowering.bands import Band
from lz_compile.lowering.ops import attention, scan
from lz_compile.runtime.kernels.kernel import KernelSpec

#: Rows, or sequences, of a batch; how many of them are computed in another one, and where these begin.
ALL = 33
BATCHES = ((1, 0), (1, 5), (1, 32), (8, 0), (8, 13), (33, 0))
THREADS = (1, 2)
#: Sizes of an op's problem; odd ones, where vectors end within a row.
SIZES: dict[str, dict[str, int]] = {
    "attention": {"batch_size": ALL, "num_heads": 4, "num_kv_heads": 2, "seq_len_q": 5, "seq_len_k": 5, "head_dim": 40, "value_dim": 40},
    "norm": {"num_rows": ALL, "hidden_size": 1001},
    "mlp": {"num_rows": ALL, "intermediate_size": 1001},
    "sampling": {"num_rows": ALL, "vocab_size": 5003},
    "scan": {"batch_size": ALL, "num_heads": 2, "length": 19, "key_dim": 12, "value_dim": 20, "rank": 1, "reads": 1},
    "linear": {"num_rows": ALL, "in_features": 136, "out_features": 72},
    "paged_attention": {"num_requests": ALL, "num_queries": ALL, "block_size": 16, "seq_len_k": 150, "num_heads": 4, "num_kv_heads": 2, "head_dim": 40, "value_dim": 40},
}  # fmt: skip
_FIRST = {"attention": "B", "scan": "B", "paged_attention": "TR"}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": ({"variant": "full"}, {"variant": "causal"}, {"mask": "bool"}, {"mask": "float"}),
    "norm": ({"variant": "rms"}, {"variant": "layer"}),
    "mlp": ({"variant": "gated"}, {"variant": "plain"}),
    "sampling": ({"variant": "ids"}, {"variant": "probs"}),
    "scan": ({"variant": "diagonal"}, {"variant": "delta"}),
    "linear": ({},),
    "paged_attention": ({"variant": "decode"},),
}


def differences(spec: KernelSpec, dtype: torch.dtype) -> list[str]:
    """What changes the bits of a row: none for a kernel that is what it says."""
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            return [*_of_batches(spec, dtype), *_of_chunks(spec, dtype)]
    finally:
        torch.set_num_threads(before)


def _of_batches(spec: KernelSpec, dtype: torch.dtype) -> Iterator[str]:
    op = spec.operation.partition(".")[0]
    for case in CASES[op]:
        torch.manual_seed(0)
        problem = ops.module(op).sample(SIZES[op], dtype, torch.device("cpu"), **case)
        seen: list[Any] = []
        problem.with_kernel(partial(_noting, seen, ops.module(op).reference))(*problem.inputs)
        whole = _run(spec, seen[0], problem.attrs, 1)
        for threads, (count, first) in itertools.product(THREADS, BATCHES):
            rows = slice(first, first + count)
            found = _run(spec, _cut(op, seen[0], rows), problem.attrs, threads)
            if not all(map(torch.equal, found, [each[rows] for each in whole])):
                yield f"{case}: rows {first} to {first + count} of {ALL}, {threads} threads"


def _noting(seen: list[Any], reference: Callable[..., Any], x: Any, attrs: Any) -> Any:
    seen.append(x)
    return reference(x, attrs)


def _cut(op: str, x: Any, rows: slice) -> Any:
    shapes = getattr(ops.module(op), "SHAPES", None) or scan.DIMS

    def part(name: str, each: Any) -> Any:
        is_rows = name in shapes and shapes[name][0] in _FIRST.get(op, "N") and each.shape[:1] == (ALL,)
        return each[rows].contiguous() if is_rows else each

    return type(x)(**{name: part(name, each) for name, each in x.given().items()})


def _run(spec: KernelSpec, x: Any, attrs: Any, threads: int) -> tuple[torch.Tensor, ...]:
    torch.set_num_threads(threads)
    assert spec.call is not None
    found = spec.call(x, attrs)
    return found if isinstance(found, tuple) else (found,)


def _of_chunks(spec: KernelSpec, dtype: torch.dtype) -> Iterator[str]:
    """Of a prefill in chunks, and of padding: for ops that look along a sequence."""
    of: dict[str, Callable[[KernelSpec, torch.dtype], Iterator[str]]] = {"attention": _of_prompts, "scan": _of_steps}
    yield from of.get(spec.operation.partition(".")[0], lambda *_: iter(()))(spec, dtype)


def _of_prompts(spec: KernelSpec, dtype: torch.dtype) -> Iterator[str]:
    torch.manual_seed(0)
    length = 150  # more than a block of keys
    query, key, value = (torch.randn(2, heads, length, 40).to(dtype) for heads in (4, 2, 2))
    causal = AttentionAttrs(enable_gqa=True, band=Band(None, 0))
    whole = _run(spec, attention.Operands(query, key, value), causal, 1)[0]
    at_end = dataclasses.replace(causal, band=Band(None, 0, at_end=True))
    for threads, (first, last) in itertools.product(
        THREADS, ((0, 1), (0, 17), (0, 149), (17, 64), (64, 149), (149, 150))
    ):
        x = attention.Operands(query[:, :, first:last], key[:, :, :last], value[:, :, :last])
        found = _run(spec, x, at_end, threads)[0]
        if not torch.equal(found, whole[:, :, first:last]):
            yield f"queries {first} to {last} of a prefill of {length}, {threads} threads"
    keep = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    for (before, behind), threads in itertools.product(((0, 1), (0, 200), (1, 0), (77, 13)), THREADS):
        mask = F.pad(keep, (before, behind))
        padded = [F.pad(each, (0, 0, before, behind), value=3.0) for each in (key, value)]
        attrs = AttentionAttrs(enable_gqa=True, has_mask=True)
        found = _run(spec, attention.Operands(query, *padded, mask=mask), attrs, threads)[0]
        if not torch.equal(found, whole):
            yield f"{before} keys of padding before and {behind} behind, {threads} threads"


def _of_steps(spec: KernelSpec, dtype: torch.dtype) -> Iterator[str]:
    for variant in ("diagonal", "delta"):
        torch.manual_seed(0)
        problem = scan.sample({**SIZES["scan"], "batch_size": 3}, dtype, torch.device("cpu"), variant=variant)
        x = problem.operands(*problem.inputs)
        attrs = dataclasses.replace(problem.attrs, state_dtype=torch.float32)  # a state that is rounded is another one
        whole, end = _run(spec, x, attrs, 1)
        for threads, cut in itertools.product(THREADS, (1, 7, 18)):
            head, state = _run(spec, _steps(x, slice(0, cut), None), attrs, threads)
            tail, last = _run(spec, _steps(x, slice(cut, None), state), attrs, threads)
            if not (torch.equal(torch.cat([head, tail], 2), whole) and torch.equal(last, end)):
                yield f"{variant}: a chunk of {cut} steps, {threads} threads"


def _steps(x: Any, steps: slice, state: torch.Tensor | None) -> Any:
    given = {name: each[:, :, steps] if "T" in scan.DIMS[name] else each for name, each in x.given().items()}
    return type(x)(**given | ({} if state is None else {"state": state}))
