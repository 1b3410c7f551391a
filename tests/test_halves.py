"""Numbers of 16 bits in C++ of ours: PyTorch's own, to the bit."""

from __future__ import annotations

import pytest
import torch

from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.vectors import ELEMENTS, vectors

BODY = """
extern "C" void run(const void* const* x, const int64_t* sizes) {
  const auto* narrow = (const Element*)x[0];
  const auto* wide = (const float*)x[1];
  for (int64_t i = 0; i < sizes[0]; ++i) ((float*)x[2])[i] = static_cast<float>(narrow[i]);
  for (int64_t i = 0; i < sizes[1]; ++i) ((Element*)x[3])[i] = static_cast<Element>(wide[i]);
}
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_widened_and_rounded_as_pytorch_does(dtype: torch.dtype) -> None:
    """Halves between two numbers go to the even one; what is too large is infinite, and NaN stays NaN."""
    narrow = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    known = narrow.float()
    ordered = known[known.isfinite()].sort().values
    between = ordered[:-1] / 2 + ordered[1:] / 2
    near = [torch.nextafter(between, torch.full_like(between, to)) for to in (-torch.inf, torch.inf)]
    most = torch.finfo(torch.float32).max
    wide = torch.cat([known, between, *near, torch.tensor([most, -most]), torch.randn(4096) * 1e-5, torch.randn(4096)])
    widened, rounded = torch.empty_like(known), torch.empty_like(wide, dtype=dtype)
    source = f"{vectors(torch.float32, 8, 1, [dtype])}using Element = {ELEMENTS[dtype]};{BODY}"
    run = calls.function("run", source, ())
    run(calls.addresses([narrow, wide, widened, rounded]), calls.integers([len(narrow), len(wide)]))
    assert torch.equal(widened.isnan(), known.isnan())
    assert torch.equal(widened.nan_to_num(0.0), known.nan_to_num(0.0))
    assert torch.equal(rounded.isnan(), wide.isnan())
    assert torch.equal(rounded.view(torch.int16)[~wide.isnan()], wide.to(dtype).view(torch.int16)[~wide.isnan()])
