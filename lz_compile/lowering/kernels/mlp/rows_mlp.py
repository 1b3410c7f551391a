"""Activations on CPUs in which a row has the same bits in every batch: C++ of our own, whose vectors are always whole.

Libraries compute what is left behind the last whole vector by other code, and where that begins depends on the batch.
"""

from __future__ import annotations

import torch

from lz_compile.lowering.kernel_operator import kernel_operator
from lz_compile.lowering.ops import mlp as op
from lz_compile.lowering.ops.mlp import MlpAttrs, Operands

#: Every activation of the op over a vector.
_ACTIVATIONS = {
    "silu": "x / (one + x.neg().exp())",
    "gelu": "Vec(Acc(0.5)) * x * (one + (x * Vec(Acc(0.70710678118654752440))).erf())",
    "gelu_tanh": "Vec(Acc(0.5)) * x * (one + (Vec(Acc(0.7978845608028654)) * (x + Vec(Acc(0.044715)) * x * x * x)).tanh())",
    "quick_gelu": "x / (one + (Vec(Acc(-1.702)) * x).exp())",
    "relu": "at::vec::maximum(x, Vec(Acc(0)))",
    "relu_squared": "at::vec::maximum(x, Vec(Acc(0))) * at::vec::maximum(x, Vec(Acc(0)))",
    "sigmoid": "one / (one + x.neg().exp())",
    "tanh": "x.tanh()",
    "mish": "mish(x)",
}


def _mlp(x: Operands, attrs: MlpAttrs) -> torch.Tensor:
    from lz_compile.lowering.cpp import rows

    found = op.fake(x, attrs)
    if not found.numel():
        return found
    acc = rows.wide(torch.promote_types(x.gate.dtype, attrs.compute_dtype))
    count, size = x.gate.shape
    up = x.up if x.up is None or x.up.dtype == x.gate.dtype else x.up.to(x.gate.dtype if acc == x.gate.dtype else acc)
    gate = x.gate if up is None or up.dtype == x.gate.dtype else x.gate.to(acc)
    beside = [None if each is None else each.to(acc).contiguous() for each in (x.gate_bias, x.up_bias)]
    limit = torch.inf if attrs.limit is None else attrs.limit
    body = _BODY.replace("ACTIVATION", _ACTIVATIONS[attrs.activation])
    run = rows.function(body, acc, Stored=gate.dtype, Out=found.dtype)
    strides = [*gate.stride(), *((0, 0) if up is None else up.stride())]
    rows.call(run, [gate, up, *beside, found], [count, size, *strides], [limit, attrs.up_offset])
    return found


_BODY = """
INLINE Vec mish(Vec x) {  // x * tanh(log(1 + e^x)); e^20 is large enough for a factor of one
  const Vec e = at::vec::minimum(x, Vec(Acc(20))).exp(), y = e * (e + Vec(Acc(2)));
  return x * (y / (y + Vec(Acc(2))));
}
INLINE Vec activation(Vec x) {
  const Vec one{Acc(1)};
  (void)one;
  return ACTIVATION;
}
constexpr int64_t kChunk = 64 * kLanes;

// A piece of a row with its bias, in whole vectors: where it is, or copied.
INLINE const Acc* biased(const Stored* from, int64_t stride, int64_t count, const Acc* bias, Acc* copy) {
  const Acc* found = numbers(from, stride, count, copy);
  if (found != copy && !bias && count % kLanes == 0) return found;
  if (found != copy) std::memcpy(copy, found, count * sizeof(Acc));
  for (int64_t i = count; i % kLanes; ++i) copy[i] = 0;
  for (int64_t i = 0; bias && i < count; ++i) copy[i] += bias[i];
  return copy;
}

extern "C" void run(const void* const* operands, const int64_t* sizes, const double* shares) {
  const Stored *gate = (const Stored*)operands[0], *up = (const Stored*)operands[1];
  const Acc *gate_bias = (const Acc*)operands[2], *up_bias = (const Acc*)operands[3];
  Out* out = (Out*)operands[4];
  const int64_t count = sizes[0], size = sizes[1], pieces = (size + kChunk - 1) / kChunk;
  const int64_t threads = count * size < 8192 ? 1 : sizes[6];
  const bool is_limited = shares[0] != std::numeric_limits<double>::infinity();
  const Vec limit{Acc(shares[0])}, least{Acc(-shares[0])}, offset{Acc(shares[1])};
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t task = 0; task < count * pieces; ++task) {
    const int64_t r = task / pieces, first = task % pieces * kChunk, width = std::min(kChunk, size - first);
    alignas(64) Acc copies[2][kChunk], results[kChunk];
    const Acc *gates, *ups = nullptr;
    const Stored* from = gate + r * sizes[2] + first * sizes[3];
    gates = biased(from, sizes[3], width, gate_bias ? gate_bias + first : nullptr, copies[0]);
    from = up + r * sizes[4] + first * sizes[5];
    if (up) ups = biased(from, sizes[5], width, up_bias ? up_bias + first : nullptr, copies[1]);
    Out* to = out + r * size + first;
    const bool in_place = std::is_same_v<Out, Acc> && width % kLanes == 0;
    Acc* made = in_place ? reinterpret_cast<Acc*>(to) : results;
    for (int64_t i = 0; i < width; i += kLanes) {
      Vec x = Vec::loadu(gates + i);
      if (is_limited) x = at::vec::minimum(x, limit);
      x = activation(x);
      if (up) {
        Vec y = Vec::loadu(ups + i);
        if (is_limited) y = at::vec::maximum(at::vec::minimum(y, limit), least);
        x = x * (y + offset);
      }
      x.store(made + i);
    }
    if (in_place) continue;
    for (int64_t i = 0; i < width; ++i) to[i] = static_cast<Out>(results[i]);
  }
}
"""

mlp = kernel_operator("row_mlp", op, _mlp, kernel_id="lz.row_mlp")
