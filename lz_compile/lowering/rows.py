"""Linears whose rows have bits of their own: rows lie in the lanes of vectors, and every output is one chain of sums.

Sums are made over pieces of the inputs of one size, and then over the pieces: that rounds less than one long chain.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lz_compile.lowering.opaque import opaque

#: Under which name it is known, as kernels are.
KERNEL_ID = "row_linear"


def serves(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_graded: bool) -> bool:
    """Whether :data:`linear` computes a linear. It gives no gradients; ``is_graded`` says whether they are recorded."""
    given = [each for each in (input, weight, bias) if each is not None]
    if any(map(is_traceable_wrapper_subclass, given)):  # sharded ones know no operator of ours
        return False
    is_plain = input.is_floating_point() and {(each.dtype, each.device.type) for each in given} == {
        (input.dtype, "cpu")
    }
    is_usual = weight.dim() == 2 and weight.numel() > 0 and (bias is None or bias.shape == weight.shape[:1])
    return is_plain and is_usual and not (is_graded and any(each.requires_grad for each in given))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from lz_compile.lowering.cpp import rows

    found = _fake_linear(input, weight, bias)
    if not found.numel():
        return found
    flat, acc = input.reshape(-1, input.shape[-1]), rows.wide(input.dtype)
    added = None if bias is None else bias.to(acc).contiguous()
    run = rows.function(_BODY, acc, Stored=input.dtype)
    rows.call(run, [flat, weight, added, found], [*flat.shape, weight.shape[0], *flat.stride(), *weight.stride()])
    return found


def _fake_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


_BODY = """
constexpr int64_t kTerms = 256, kOutputs = 16;

struct Problem { int64_t rows, inputs, outputs, row_stride, stride, output_stride, weight_stride, threads; };

// kOutputs outputs of some rows, whose inputs lie in lanes. Sums of pieces are added to sums.
template <int kVectors>
static void outputs_of(const Problem& p, const Stored* weight, int64_t many, const Acc* lanes, Acc* sums, Acc* copies) {
  constexpr int64_t stride = kVectors * kLanes;
  Acc parts[kOutputs * stride];
  const Acc* items[kOutputs];
  std::memset(sums, 0, many * stride * sizeof(Acc));
  for (int64_t k = 0; k < p.inputs; k += kTerms) {
    const int64_t count = std::min(kTerms, p.inputs - k);
    for (int64_t i = 0; i < many; ++i) {
      const Stored* from = weight + i * p.output_stride + k * p.weight_stride;
      items[i] = numbers(from, p.weight_stride, count, copies + i * kTerms);
    }
    std::memset(parts, 0, many * stride * sizeof(Acc));
    add_items<kVectors>(items, many, lanes + k * stride, stride, count, parts);
    for (int64_t i = 0; i < many * stride; ++i) sums[i] += parts[i];
  }
}

template <int kVectors>
static void linear(const Problem& p, const Stored* input, const Stored* weight, const Acc* bias, Stored* out) {
  constexpr int64_t stride = kVectors * kLanes;
  const int64_t tiles = (p.rows + stride - 1) / stride, groups = (p.outputs + kOutputs - 1) / kOutputs;
  std::vector<Acc> lanes(tiles * stride * p.inputs, Acc(0));
#pragma omp parallel num_threads(p.threads)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < p.rows; ++row) {
      Acc* to = lanes.data() + row / stride * stride * p.inputs + row % stride;
      const Stored* from = input + row * p.row_stride;
      for (int64_t k = 0; k < p.inputs; ++k) to[k * stride] = static_cast<Acc>(from[k * p.stride]);
    }
    std::vector<Acc> copies(kOutputs * kTerms);
    Acc sums[kOutputs * stride];
    // A group of outputs is read once for all rows that follow each other.
#pragma omp for schedule(static)
    for (int64_t task = 0; task < groups * tiles; ++task) {
      const int64_t tile = task % tiles, first = task / tiles * kOutputs, many = std::min(kOutputs, p.outputs - first);
      const Acc* own = lanes.data() + tile * stride * p.inputs;
      outputs_of<kVectors>(p, weight + first * p.output_stride, many, own, sums, copies.data());
      const int64_t rows = std::min(stride, p.rows - tile * stride);
      for (int64_t r = 0; r < rows; ++r) {
        Stored* to = out + (tile * stride + r) * p.outputs + first;
        for (int64_t i = 0; i < many; ++i) {
          to[i] = static_cast<Stored>(sums[i * stride + r] + (bias ? bias[first + i] : Acc(0)));
        }
      }
    }
  }
}

extern "C" void run(const void* const* operands, const int64_t* sizes, const double*) {
  Problem p;
  std::memcpy(&p, sizes, sizeof(p));
  if (p.rows * p.inputs * p.outputs < 65536) p.threads = 1;
  const auto run = p.rows <= kLanes ? linear<1> : linear<2>;
  run(p, (const Stored*)operands[0], (const Stored*)operands[1], (const Acc*)operands[2], (Stored*)operands[3]);
}
"""

#: ``torch.nn.functional.linear``; nothing completes a call, for that would be another one.
linear = opaque(KERNEL_ID, _linear, _fake_linear)
