"""C++ that samples rows of logits: mask, bias and temperature in one pass, thresholds by radix selection, Gumbel noise.

Without truncation a row is read once and nothing is written but its token. With top-k or top-p its scores are kept, and the
smallest score that is taken is found digit by digit (11, 11 and 10 bits) by counts, or sums of probabilities, of what has
a digit: nothing is sorted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import inductor
from lz_compile.lowering.cpp.floats import FLOATS
from lz_compile.lowering.cpp.sampling_source import ROWS, SELECTION, VECTORS
from lz_compile.lowering.cpp.vectors import ELEMENTS
from lz_compile.lowering.ops.sampling import OPERANDS, TIES, SamplingAttrs

#: Beside Inductor's own: no more than the rounding of ``a * b + c`` depends on it.
FLAGS = ("-ffp-contract=fast",)
DTYPES = (torch.float32, torch.bfloat16)
POINTERS = ctypes.c_void_p * (len(OPERANDS) + 1)


@dataclass(frozen=True)
class Program:
    """What the code is written for; each takes a second to compile, so what is asked once for a row is not among it."""

    has_mask: bool
    has_bias: bool
    result: str
    dtype: torch.dtype
    bias_dtype: torch.dtype
    out_dtype: torch.dtype
    lanes: int

    def source(self) -> str:
        """The translation unit."""
        header = (
            "#include <c10/util/BFloat16.h>" if torch.bfloat16 in (self.dtype, self.bias_dtype, self.out_dtype) else ""
        )
        return f"""#include <cstdint>
#include <type_traits>
#include <vector>
{header}
using Logit = {ELEMENTS[self.dtype]};
using Bias = {ELEMENTS[self.bias_dtype]};
using Out = {"int32_t" if self.result == "ids" else ELEMENTS[self.out_dtype]};
#define IS_IDS {int(self.result == "ids")}
constexpr bool kIsScores = {str(self.result == "scores").lower()};
constexpr bool kHasMask = {str(self.has_mask).lower()}, kHasBias = {str(self.has_bias).lower()};
constexpr int kLanes = {self.lanes};
{FLOATS}{VECTORS}{SELECTION}{ROWS}"""


def run(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> None:
    """Fill ``out``, as ``lowering/ops/sampling.py`` says of operands and result; rows must be contiguous in memory.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    function, numbers = prepare(operands, attrs, out)
    tensors = [0 if each is None else each.data_ptr() for each in (*map(operands.get, OPERANDS), out)]
    function(POINTERS(*tensors), numbers)


def prepare(operands: Mapping[str, torch.Tensor], attrs: SamplingAttrs, out: torch.Tensor) -> tuple[Any, Any]:
    """The compiled function, and its second argument: sizes, threads and strides.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    logits = operands["logits"]
    rows, vocab = logits.shape
    lanes = inductor.vector_bits() // 32
    padded = -(-vocab // lanes) * lanes
    threads = max(1, min(torch.get_num_threads(), rows))
    bias = operands.get("bias")
    program = Program(
        "bitmask" in operands,
        bias is not None,
        attrs.result,
        logits.dtype,
        torch.float32 if bias is None else bias.dtype,
        torch.float32 if attrs.result == "ids" else out.dtype,
        lanes,
    )
    given = [*(operands.get(name) for name in OPERANDS), out]
    strides = [0 if each is None or each.shape[0] == 1 else each.stride(0) for each in given]
    ties = [TIES.index(attrs.top_k_ties), TIES.index(attrs.top_p_ties)]
    numbers = [rows, vocab, padded, threads, *ties, *strides]
    return _function(program), (ctypes.c_int64 * len(numbers))(*numbers)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of numbers that the code reads."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.float64) else tensor


@lru_cache(maxsize=64)
def _function(program: Program) -> Any:
    function = inductor.load_cpp(program.source(), FLAGS).sampling
    function.restype = None
    return function
