"""C++ that samples rows of logits: mask, bias and temperature in one pass, thresholds by radix selection, Gumbel noise.

Without truncation a row is read once and nothing is written but its token. With top-k or top-p its scores are kept, and the
smallest score that is taken is found digit by digit (11, 11 and 10 bits) by counts, or sums of probabilities, of what has
a digit: nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.floats import floats
from lz_compile.lowering.cpp.vectors import ELEMENTS, halves
from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.kernels.sampling.cpp_text import ROWS, SELECTION
from lz_compile.lowering.kernels.sampling.cpp_vectors import VECTORS
from lz_compile.lowering.ops import sampling as op
from lz_compile.lowering.ops.sampling import TIES, Operands, SamplingAttrs, fake

#: Beside Inductor's own: no more than the rounding of ``a * b + c`` depends on it.
FLAGS = ("-ffp-contract=fast",)
DTYPES = (torch.float32, torch.bfloat16)


@lru_cache(maxsize=64)
def _function(*kinds: Any) -> Any:
    return calls.function("sampling", source(*kinds), FLAGS)


def source(
    result: str, dtype: torch.dtype, bias_dtype: torch.dtype | None, out_dtype: torch.dtype, has_mask: bool, lanes: int
) -> str:
    """The translation unit; each takes a second to compile, so nothing is written for what is asked once for a row."""
    kinds = (dtype, bias_dtype or torch.float32, torch.float32 if result == "ids" else out_dtype)
    has = calls.truths(kIsScores=result == "scores", kHasMask=has_mask, kHasBias=bias_dtype is not None)
    return f"""#include <type_traits>
#include <vector>
{floats(lanes)}{halves(kinds)}
using Logit = {ELEMENTS[kinds[0]]};
using Bias = {ELEMENTS[kinds[1]]};
using Out = {"int32_t" if result == "ids" else ELEMENTS[kinds[2]]};
#define IS_IDS {int(result == "ids")}
{has}{VECTORS}{SELECTION}{ROWS}"""


def _sampling(x: Operands, attrs: SamplingAttrs) -> torch.Tensor:
    """The op over operands of any dtype that lie anywhere in memory."""
    out = fake(x, attrs)
    written = out if out.dtype in (*DTYPES, torch.int32) else out.float()
    x = x.map(_readable)
    function, numbers = prepare(x, attrs, written)
    function(calls.addresses([*vars(x).values(), written]), numbers)
    return written.to(out.dtype)


def _bound(x: Operands, attrs: SamplingAttrs) -> Callable[[Operands], torch.Tensor] | None:
    """One call of C++ for operands that lie in memory like these; None where the code does not read or write such."""
    empty = fake(x, attrs)
    is_known = all(_readable(each) is each for each in x.tensors) and empty.dtype in (*DTYPES, torch.int32)
    if not is_known or not x.logits.numel():
        return None
    shape, dtype = empty.shape, empty.dtype
    prepared: list[tuple[Any, Any]] = []

    def run(x: Operands) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device="cpu")
        # Here, where a missing compiler is seen to. Several threads may come by, and all find the same.
        if not prepared:
            prepared.append(prepare(x, attrs, out))
        function, numbers = prepared[0]
        function(calls.addresses([*vars(x).values(), out]), numbers)
        return out

    return run


def prepare(x: Operands, attrs: SamplingAttrs, out: torch.Tensor) -> tuple[Any, Any]:
    """The compiled function, and its second argument: sizes, threads and strides."""
    rows, vocab = x.logits.shape
    lanes = cpp_builds.vector_bits() // 32
    padded = -(-vocab // lanes) * lanes
    threads = max(1, min(torch.get_num_threads(), rows))
    bias_dtype = None if x.bias is None else x.bias.dtype
    function = _function(attrs.result, x.logits.dtype, bias_dtype, out.dtype, x.bitmask is not None, lanes)
    strides = [0 if each is None or each.shape[0] == 1 else each.stride(0) for each in (*x.flat(), out)]
    ties = [TIES.index(attrs.top_k_ties), TIES.index(attrs.top_p_ties)]
    return function, calls.integers([rows, vocab, padded, threads, *ties, *strides])


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same in a dtype that the code reads, with rows that are contiguous in memory; these may lie anywhere."""
    is_flat = tensor.dim() == 1 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    rows = tensor if is_flat else tensor.contiguous()
    return rows.float() if rows.dtype in (torch.float16, torch.float64) else rows


sampling = kernel_operator("cpp_sampling", op, _sampling, kernel_id="lz.cpp_sampling")
sampling.bind = _bound  # type: ignore[attr-defined]  # what eager calls look for
