"""Norms on CPUs in which a row has the same bits in every batch: C++ of our own that computes one row after the other."""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import norm as op
from lz_compile.lowering.ops.norm import NormAttrs, Operands


def _norm(x: Operands, attrs: NormAttrs) -> torch.Tensor:
    from lz_compile.lowering.cpp import rows

    found = op.fake(x, attrs)
    if not found.numel():
        return found
    acc = rows.wide(torch.promote_types(x.input.dtype, attrs.compute_dtype))
    count, size = x.input.shape
    beside = [None if each is None else each.to(acc).contiguous() for each in (x.weight, x.bias)]
    run = rows.function(_BODY, acc, Stored=x.input.dtype, Out=found.dtype)
    rows.call(
        run,
        [x.input, *beside, found],
        [count, size, *x.input.stride(), attrs.is_centred],
        [attrs.eps, attrs.weight_offset],
    )
    return found


_BODY = """
// Of a row whose end is filled up with zeros; four sums, so that none waits for the other.
template <class Term> INLINE Acc sum_of(const Acc* row, int64_t count, Term term) {
  Vec sum[4] = {Vec(Acc(0)), Vec(Acc(0)), Vec(Acc(0)), Vec(Acc(0))};
  for (int64_t d = 0; d < count; d += 4 * kLanes) {
    for (int v = 0; v < 4; ++v) sum[v] = term(Vec::loadu(row + d + v * kLanes), sum[v]);
  }
  Acc parts[kLanes], total = 0;
  ((sum[0] + sum[1]) + (sum[2] + sum[3])).store(parts);
  for (Acc part : parts) total += part;
  return total;
}

extern "C" void run(const void* const* operands, const int64_t* sizes, const double* shares) {
  const Stored* input = (const Stored*)operands[0];
  const Acc *weight = (const Acc*)operands[1], *bias = (const Acc*)operands[2];
  Out* out = (Out*)operands[3];
  const int64_t count = sizes[0], size = sizes[1], row_stride = sizes[2], stride = sizes[3], is_centred = sizes[4];
  const int64_t threads = count * size < 16384 ? 1 : sizes[5], padded = up_to(size, 4 * kLanes);
  const Acc eps(shares[0]), offset(shares[1]);
#pragma omp parallel num_threads(threads)
  {
    std::vector<Acc> row(padded), factor(padded, Acc(1)), added(padded, Acc(0));
    for (int64_t d = 0; weight && d < size; ++d) factor[d] = weight[d] + offset;
    for (int64_t d = 0; bias && d < size; ++d) added[d] = bias[d];
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; ++r) {
      const Acc* from = numbers(input + r * row_stride, stride, size, row.data());
      if (from != row.data()) std::memcpy(row.data(), from, size * sizeof(Acc));
      if (is_centred) {
        const Acc mean = sum_of(row.data(), padded, [](Vec x, Vec sum) { return sum + x; }) / Acc(size);
        for (int64_t d = 0; d < size; ++d) row[d] -= mean;
      }
      const Acc squares = sum_of(row.data(), padded, [](Vec x, Vec sum) { return at::vec::fmadd(x, x, sum); });
      const Acc scale = Acc(1) / std::sqrt(squares / Acc(size) + eps);
      Out* to = out + r * size;
      for (int64_t d = 0; d < size; ++d) to[d] = static_cast<Out>(row[d] * scale * factor[d] + added[d]);
    }
  }
}
"""

norm = kernel_operator("row_norm", op, _norm, kernel_id="lz.row_norm")
