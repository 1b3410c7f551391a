"""The C++ of scores and clocks, many at a time: logarithm and exponential, the hash of seed and token, clocks."""

from __future__ import annotations

VECTORS = """
// ln(x) for normal x above zero, within 1 ulp or two: Cephes' polynomial.
INLINE Floats logarithm(Floats x) {
  Words bits = (Words)x;
  Ints exponent = (Ints)(bits >> 23) - 126;
  Floats m = (Floats)((bits & 0x007fffffu) | 0x3f000000u);
  Ints is_small = m < 0.707106781186547524f;
  exponent += is_small;  // true is -1
  m = (is_small ? m + m : m) - 1.0f;
  Floats e = __builtin_convertvector(exponent, Floats), z = m * m;
  Floats y = filled(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z - 2.12194440e-4f * e - 0.5f * z;
  return m + y + 0.693359375f * e;
}

// exp(x) for x <= 0; zero below the smallest normal number.
INLINE Floats exponential(Floats x) {
  Ints is_zero = x < -87.3f;
  x = is_zero ? filled(-87.3f) : x;
  Floats n = x * 1.44269504088896341f;
  Ints whole = __builtin_convertvector(n - 0.5f, Ints);  // rounds towards zero, and n is not positive: to the nearest
  n = __builtin_convertvector(whole, Floats);
  x = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = filled(1.9875691500e-4f);
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  y = y * (Floats)(Words)((whole + 127) << 23);
  return is_zero ? Floats{} : y;
}

template <typename Any> INLINE Any mixed(Any x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Keys {
  uint32_t first, second;
  explicit Keys(int64_t seed) {
    first = mixed(uint32_t(seed) ^ 0x9e3779b9u);
    second = mixed(mixed(uint32_t(uint64_t(seed) >> 32) ^ 0x85ebca6bu) ^ first);
  }
};

// 2 ** 32 times the uniform number of a token under a seed.
INLINE Floats uniform(Words token, const Keys& keys) {
  const Words h = mixed(mixed(token + keys.first) ^ keys.second);
  const Floats high = __builtin_convertvector((Ints)(h >> 16), Floats);
  const Floats low = __builtin_convertvector((Ints)(h & 0xffffu), Floats);
  return high * 65536.0f + (low + 0.5f);
}

// No more than log_clock(v), from the bits of 2 ** 32 v: log(-log(1 - v)) > log(v), and a float's bits are less than
// its logarithm.
INLINE Floats least_log_clock(Floats scaled) {
  const Floats bits = __builtin_convertvector((Ints)scaled, Floats);
  return bits * 8.262958e-8f - (159.0f * 0.69314718f + 1e-4f);
}

// What a token's exponential clock shows, as its logarithm: the token whose z minus this is largest is a sample of
// softmax(z).
INLINE Floats log_clock(Floats v) {
  Floats u = 1.0f - v, rest = 1.0f - u;
  Ints is_tiny = rest == 0.0f, is_last = u <= 0.0f;
  Floats safe = is_last ? filled(1.1754944e-38f) : u;
  Floats clock = -logarithm(safe) * (v / (is_tiny ? filled(1.0f) : rest));
  return logarithm(is_tiny ? v : clock);
}
"""
