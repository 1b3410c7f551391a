"""Gated blends on CPUs in C++: the two largest logits of a row in one pass, and its blend while the row is in the cache."""

from __future__ import annotations

import math
import platform
from functools import lru_cache
from typing import Any

import torch

from lz_compile.lowering import cpp_builds
from lz_compile.lowering.attributes import decode, encode
from lz_compile.lowering.cpp import calls
from lz_compile.lowering.cpp.floats import floats
from lz_compile.lowering.cpp.vectors import ELEMENTS, halves
from lz_compile.lowering.kernels.blend import torch_blend
from lz_compile.lowering.opaque import opaque
from lz_compile.lowering.ops.blend import BlendAttrs, Operands, Scalar, fake, reference

_ID = "lz.cpp_blend"
_READ = (torch.float32, torch.bfloat16)
#: Beside Inductor's own: no more than the rounding of ``a * b + c`` depends on it.
FLAGS = ("-ffp-contract=fast",)
#: Elements of a row and of all, below which a thread is not worth its start.
THREAD_WORK = 1 << 14
#: Bytes of a result from which on it is written past the caches; half of what a core's caches hold.
STREAMED_BYTES = 1 << 20
#: Instructions of x86 that write a register past the caches, by its floats.
_STREAMS = {16: "__builtin_ia32_movntps512", 8: "__builtin_ia32_movntps256"}
_WHAT = {"forward": 0, "residual": 1, "backward": 2, "margins": 3}


def source(dtype: torch.dtype, logit_dtype: torch.dtype, lanes: int) -> str:
    """The translation unit for elements, logits, and registers of so many floats."""
    is_streamed = dtype == torch.float32 and platform.machine() in ("x86_64", "AMD64")
    stream = _STREAMS.get(lanes) if is_streamed else None
    return f"""{floats(lanes)}{halves((dtype, logit_dtype))}
using Element = {ELEMENTS[dtype]};
using Logit = {ELEMENTS[logit_dtype]};
{f"#define STREAM {stream}" if stream else ""}
{_ROWS}"""


_ROWS = """
template <typename Any> INLINE void store(Any* at, Floats x) {
  if constexpr (sizeof(Any) == 4) {
    std::memcpy(at, &x, sizeof(x));
  } else {
    for (int j = 0; j < kLanes; ++j) at[j] = Any(x[j]);
  }
}

struct Two {  // the two largest, of each lane
  Floats first = filled(kNothing), second = first;
  Ints is_nan{};
  INLINE_MEMBER void see(Floats x) {
    is_nan |= x != x;
    add(x);
  }
  INLINE_MEMBER void add(Floats x) {
    const Floats less = x < first ? x : first;
    first = x > first ? x : first;
    second = less > second ? less : second;
  }
  INLINE_MEMBER void merge(const Two& other) {
    is_nan |= other.is_nan;
    add(other.first);
    second = other.second > second ? other.second : second;
  }
  template <int kDistance> INLINE_MEMBER void fold() {  // into every lane, those that are known to be numbers
    if constexpr (kDistance > 0) {
      merge({crossed<kDistance>(first), crossed<kDistance>(second)});
      fold<kDistance / 2>();
    }
  }
};

INLINE Floats few(const Logit* row, int64_t count) {
  Floats x = filled(kNothing);
  for (int j = 0; j < count; ++j) x[j] = float(row[j]);
  return x;
}
INLINE Floats last(const Logit* at, int count) {  // of a register, whose other lanes were seen before
  const Ints places = (Ints)counting(0);
  return places < kLanes - count ? filled(kNothing) : load(at);
}

// The largest less the second largest; NaN if any is NaN, as sorting has it, and infinities less themselves.
static float margin_of(const Logit* row, int64_t classes) {
  constexpr int kChains = 4;  // what is seen waits for what was seen before
  Two chains[kChains];
  int64_t i = 0;
  for (; i + kChains * kLanes <= classes; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) chains[chain].see(load(row + i + chain * kLanes));
  for (; i + kLanes <= classes; i += kLanes) chains[0].see(load(row + i));
  if (i < classes) chains[1].see(classes < kLanes ? few(row, classes) : last(row + classes - kLanes, classes - i));
  for (int chain = 1; chain < kChains; ++chain) chains[0].merge(chains[chain]);
  if (any(chains[0].is_nan)) return std::numeric_limits<float>::quiet_NaN();
  chains[0].fold<kLanes / 2>();
  return chains[0].first[0] - chains[0].second[0];
}

INLINE float held(float x, float low, float high) {
  x = x < low ? low : x;  // NaN stays NaN
  return x > high ? high : x;
}
INLINE Floats held(Floats x, float low, float high) {
  x = x < low ? filled(low) : x;
  return x > high ? filled(high) : x;
}

template <int kWhat, typename Any> INLINE Any mixed(Any weight, Any seed, Any host) {
  return kWhat == 2 ? weight * seed : kWhat == 1 ? host + weight * seed : weight * seed + (1.0f - weight) * host;
}

// One stretch of a row. A large result goes past the caches, which then need not fetch what it overwrites.
template <int kWhat, typename Weight>
INLINE void blend(
    const Element* host, const Element* seed, Element* out, int64_t count, const Weight& weight, bool is_large) {
  int64_t i = 0;
  const auto one = [&] {
    const float h = kWhat == 2 ? 0.0f : float(host[i]);
    out[i] = Element(mixed<kWhat>(weight.one(i), float(seed[i]), h));
  };
  const auto many = [&] { return mixed<kWhat>(weight.many(i), load(seed + i), kWhat == 2 ? Floats{} : load(host + i)); };
#if defined(STREAM)
  if (is_large) {
    for (; i < count && (uintptr_t)(out + i) % sizeof(Floats); ++i) one();
    for (; i + kLanes <= count; i += kLanes) STREAM(out + i, many());
  }
#endif
  for (; i + kLanes <= count; i += kLanes) store(out + i, many());
  for (; i < count; ++i) one();
}

struct Same {
  float value;
  INLINE_MEMBER Floats many(int64_t) const { return filled(value); }
  INLINE_MEMBER float one(int64_t) const { return value; }
};
struct Own {  // of each channel
  const float* alpha;
  float gate, low, high;
  INLINE_MEMBER Floats many(int64_t i) const { return held(load(alpha + i) * gate, low, high); }
  INLINE_MEMBER float one(int64_t i) const { return held(alpha[i] * gate, low, high); }
};

static void fence() {
#if defined(STREAM)
  __builtin_ia32_sfence();
#endif
}

template <int kWhat> static void rows_of(void** tensors, const int64_t* numbers) {
  const auto* host = (const Element*)tensors[0];
  const auto* seed = (const Element*)tensors[1];
  const auto* alpha = (const float*)tensors[2];
  const auto* logits = (const Logit*)tensors[3];
  const auto* constants = (const float*)tensors[4];
  auto* out = (Element*)tensors[5];
  const int64_t rows = numbers[0], channels = numbers[1], inner = numbers[2], classes = numbers[3], stride = numbers[4];
  const int64_t row_step = numbers[5], channel_step = numbers[6], host_step = numbers[7], threads = numbers[8];
  const bool is_large = numbers[10];
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for nowait
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t begin = n * channels * inner;
      const float margin = margin_of(logits + n * stride, classes);
      if constexpr (kWhat == 3) {
        ((float*)tensors[5])[n] = margin;
      } else {
        const float gate = 1.0f / (1.0f + std::exp(constants[1] - constants[0] * margin));
        const float low = constants[2], high = constants[3];
        const float* own = alpha + n * row_step;
        const Element* row = host + n * host_step;
        if (channel_step && inner == 1) {
          const Own weight{own, gate, low, high};
          blend<kWhat>(kWhat == 2 ? nullptr : row, seed + begin, out + begin, channels, weight, is_large);
        } else {
          const int64_t parts = channel_step ? channels : 1, size = channels * inner / parts;
          for (int64_t c = 0; c < parts; ++c) {
            const Same weight{held(own[c * channel_step] * gate, low, high)};
            const int64_t at = begin + c * size;
            blend<kWhat>(kWhat == 2 ? nullptr : row + c * size, seed + at, out + at, size, weight, is_large);
          }
        }
      }
    }
    fence();
  }
}

extern "C" void gated_blend(void** tensors, const int64_t* numbers) {
  switch (numbers[9]) {
    case 0: return rows_of<0>(tensors, numbers);
    case 1: return rows_of<1>(tensors, numbers);
    case 2: return rows_of<2>(tensors, numbers);
    default: return rows_of<3>(tensors, numbers);
  }
}
"""


def _call(
    what: str,
    host: torch.Tensor | None,
    seed: torch.Tensor,
    alpha: torch.Tensor | None,
    logits: torch.Tensor,
    numbers: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    host_step = 0
    if host is not None:
        host = host if host.stride(0) else host[:1]  # one row for all
        host = (host if host.dtype == seed.dtype else host.to(seed.dtype)).contiguous()
        host_step = host.stride(0) if host.shape[0] > 1 else 0
    seed = seed if what == "margins" else seed.contiguous()
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, channels, inner = seed.shape
    row_step = channel_step = 0
    if alpha is not None:
        alpha = alpha.float().contiguous()
        if alpha.dim():
            row_step, channel_step = (0 if alpha.shape[dim] == 1 else alpha.stride(dim) for dim in (0, 1))
    classes = logits.shape[1]
    threads = max(1, min(torch.get_num_threads(), rows, rows * (channels * inner + classes) // THREAD_WORK))
    tensors = (host, seed, alpha, logits, None if numbers is None else numbers.float(), out)
    numbers_of_rows = [rows, channels, inner, classes, logits.stride(0), row_step, channel_step, host_step]
    numbers_of_call = [threads, _WHAT[what], out.nbytes >= STREAMED_BYTES]
    function = _function(seed.dtype, logits.dtype)
    function(calls.addresses(tensors), calls.integers([*numbers_of_rows, *numbers_of_call]))


@lru_cache(maxsize=16)
def _function(dtype: torch.dtype, logit_dtype: torch.dtype) -> Any:
    return calls.function("gated_blend", source(dtype, logit_dtype, cpp_builds.vector_bits() // 32), FLAGS)


def blend(x: Operands, attrs: BlendAttrs) -> torch.Tensor:
    """A blend in the op's canonical layout (see ``lowering/ops/blend.py``); PyTorch's for other dtypes."""
    tensors = [each for each in (x.seed, x.logits) if each is not None]
    is_wide = torch.float64 in (attrs.compute_dtype, attrs.out_dtype)
    if is_wide or any(each.dtype not in _READ for each in tensors):
        return torch_blend.blend(x, attrs)
    assert x.host_weight is None, f"{_ID} is given a weight for the host"
    assert (attrs.normalised, attrs.is_distinct) == ("none", False), f"{_ID} is asked for a softmax"
    assert x.logits is not None, f"{_ID} is given no logits"
    if attrs.mode == "margin":
        margin: torch.Tensor = _margin(x.logits, encode(attrs))
        return margin
    host, seed = x.pair
    weight = seed.new_full((), x.alpha) if isinstance(x.alpha, (int, float)) else x.alpha
    wide = torch.promote_types(attrs.compute_dtype, torch.float32)
    bounds = (-math.inf if x.low is None else x.low, math.inf if x.high is None else x.high)
    numbers = torch.stack([_number(each, seed, wide) for each in (x.gain, x.offset, *bounds)])
    found: torch.Tensor = _operator(seed, host, weight.detach(), x.logits.detach(), numbers, encode(attrs))
    return found


def _number(value: Scalar, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return like.new_full((), value, dtype=dtype)
    return value.detach().to(dtype)


# ---- the operators, of whose operands the seed alone has a gradient ---------------------------------------------------


def _run(
    seed: torch.Tensor, host: torch.Tensor, alpha: torch.Tensor, logits: torch.Tensor, numbers: torch.Tensor, attrs: str
) -> torch.Tensor:
    assert logits.shape[0] == seed.shape[0], "every row has logits"
    whole, given = host if host.shape == seed.shape else host.expand(seed.shape), decode(BlendAttrs, attrs)
    out = torch.empty_like(seed, dtype=given.out_dtype, memory_format=torch.contiguous_format)
    _call("residual" if given.is_residual else "forward", whole, seed, alpha, logits, numbers, out)
    return out


def _fake(seed: torch.Tensor, *others: Any) -> torch.Tensor:
    return seed.new_empty(seed.shape, dtype=decode(BlendAttrs, others[-1]).out_dtype)


def _fallback(seed: torch.Tensor, host: torch.Tensor, *others: Any) -> torch.Tensor:
    alpha, logits, numbers, attrs = others
    x = Operands(host, seed, alpha, None, logits, *numbers.unbind())
    return reference(x, decode(BlendAttrs, attrs)).contiguous()


def _gradient(
    gradient: torch.Tensor,
    seed: torch.Tensor,
    host: torch.Tensor,
    alpha: torch.Tensor,
    logits: torch.Tensor,
    numbers: torch.Tensor,
    attrs: str,
) -> torch.Tensor:
    out = torch.empty_like(gradient, dtype=seed.dtype, memory_format=torch.contiguous_format)
    _call("backward", None, gradient.to(seed.dtype), alpha, logits, numbers, out)
    return out


def _run_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.float32)
    _call("margins", None, logits[:, :, None], None, logits, None, out)
    return out.to(decode(BlendAttrs, attrs).out_dtype)


def _fake_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    return fake(Operands(logits=logits), decode(BlendAttrs, attrs))


def _fallback_margin(logits: torch.Tensor, attrs: str) -> torch.Tensor:
    return reference(Operands(logits=logits), decode(BlendAttrs, attrs)).contiguous()


_operator = opaque("cpp_blend", _run, _fake, fallback=_fallback, backward=_gradient, kernel_id=_ID)
_margin = opaque("cpp_blend_margin", _run_margin, _fake_margin, fallback=_fallback_margin, kernel_id=_ID)
