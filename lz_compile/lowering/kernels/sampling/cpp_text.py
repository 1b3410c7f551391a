"""The C++ of a sampling: selection of a threshold without a sort, and the loop over rows."""

from __future__ import annotations

SELECTION = """
// Numbers whose order as unsigned integers is that of floats.
INLINE uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static float unordered(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr int kBins = 2048, kCopies = 4;

// The bin, from the highest down, with which sums reach what is wanted; `reached` becomes the sum above it.
template <typename Weight> static int bin_reaching(const Weight* sums, int bins, Weight wanted, Weight& reached) {
  int lowest = -1;
  Weight before = reached;
  for (int bin = bins - 1; bin >= 0; --bin) {
    if (sums[bin] == 0) continue;
    if (reached + sums[bin] >= wanted) return bin;
    lowest = bin;
    before = reached;
    reached += sums[bin];
  }
  reached = before;  // all of it weighs less, by rounding: the lowest that weighs anything
  return lowest < 0 ? 0 : lowest;
}

// The largest score such that scores at least as large weigh `wanted`; `weigh(i)` is what score i weighs, `count` is a
// multiple of kCopies, `places` memory for as many numbers. Nothing in the loops depends on the data but addresses.
template <typename Weight, typename Weigh>
static float reaching(const float* z, int64_t count, Weight wanted, const Weigh& weigh, uint32_t* places) {
  Weight reached = 0, sums[kCopies][kBins] = {};  // copies, for additions to one bin wait for each other
  for (int64_t i = 0; i < count; i += kCopies)
    for (int copy = 0; copy < kCopies; ++copy) sums[copy][ordered(z[i + copy]) >> 21] += weigh(i + copy);
  for (int copy = 1; copy < kCopies; ++copy)
    for (int bin = 0; bin < kBins; ++bin) sums[0][bin] += sums[copy][bin];
  uint32_t prefix = uint32_t(bin_reaching(sums[0], kBins, wanted, reached)) << 21;
  int64_t left = 0;
  for (int64_t i = 0; i < count; ++i) {
    places[left] = uint32_t(i);
    left += (ordered(z[i]) >> 21) == (prefix >> 21);
  }
  for (int shift = 10; shift >= 0; shift -= 10) {
    const int bins = shift ? kBins : kBins / 2;
    std::memset(sums[0], 0, sizeof(sums[0]));
    for (int64_t n = 0; n < left; ++n) sums[0][(ordered(z[places[n]]) >> shift) & (bins - 1)] += weigh(places[n]);
    prefix |= uint32_t(bin_reaching(sums[0], bins, wanted, reached)) << shift;
    int64_t fewer = 0;
    for (int64_t n = 0; n < left; ++n) {
      const uint32_t place = places[n];
      places[fewer] = place;
      fewer += (ordered(z[place]) >> shift) == (prefix >> shift);
    }
    left = fewer;
  }
  return unordered(prefix);
}

enum class Ties : int64_t { all, first, last, open };

// Of scores that equal `least` those become nothing that are not needed to weigh `wanted`: the last, or the first of them.
// Whether there were such.
template <typename Weight, typename Weigh>
static bool drop_ties(float* z, int64_t count, float least, Weight wanted, const Weigh& weigh, bool keeps_last) {
  Weight above = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (!any(load(z + i) > least)) continue;
    for (int64_t j = i; j < i + kLanes; ++j) above += z[j] > least ? weigh(j) : Weight(0);
  }
  int64_t equal = 0;
  bool has_dropped = false;
  for (int64_t start = 0; start < count; start += kLanes) {
    const int64_t i = keeps_last ? count - kLanes - start : start;
    if (!any(load(z + i) == least)) continue;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t j = i + (keeps_last ? kLanes - 1 - lane : lane);
      if (z[j] != least) continue;
      if (above + Weight(equal) * weigh(j) >= wanted) z[j] = kNothing, has_dropped = true;
      ++equal;
    }
  }
  return has_dropped;
}

static constexpr auto kOne = [](int64_t) { return int64_t(1); };
constexpr int64_t kGroup = 16;  // registers

// The k-th largest of `count` scores. The k-th largest of the maxima of groups is no larger, and few scores are at
// least that.
static float kth_largest(const float* z, int64_t count, int64_t k, float* maxima, uint32_t* places) {
  const int64_t group = kGroup * kLanes, groups = count / group * kLanes;
  if (k > groups) return reaching<int64_t>(z, count, k, kOne, places);
  for (int64_t g = 0; g < groups; g += kLanes) {
    Floats most = load(z + g * kGroup);
    for (int64_t n = 1; n < kGroup; ++n) {
      const Floats x = load(z + g * kGroup + n * kLanes);
      most = x > most ? x : most;
    }
    std::memcpy(maxima + g, &most, sizeof(most));
  }
  const float least = reaching<int64_t>(maxima, groups, k, kOne, places);
  int64_t left = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (!any(load(z + i) >= least)) continue;
    for (int j = 0; j < kLanes; ++j) {
      maxima[left] = z[i + j];
      left += z[i + j] >= least;
    }
  }
  while (left % kCopies) maxima[left++] = kNothing;
  return reaching<int64_t>(maxima, left, k, kOne, places);
}
"""

ROWS = """
struct Row {
  const Logit* logits;
  const uint32_t* mask;
  const Bias* bias;
  float inverse;  // of the temperature
  int64_t vocab;

  // Scores of kLanes tokens from `i` on; nothing where a token is masked.
  INLINE Floats at(const Row& row, int64_t i) {
    Floats z = load(row.logits + i);
    if constexpr (kHasBias) z += load(row.bias + i);
    z *= row.inverse;
    if constexpr (kHasMask) {
      const Words bits = (words(row.mask[i >> 5]) >> (counting(0) + uint32_t(i & 31))) & 1u;
      z = (Ints)bits != 0 ? z : filled(kNothing);
    }
    return z;
  }
  // The last, incomplete ones, from a copy with nothing behind them.
  static Floats rest(const Row& row, int64_t i) {
    Floats z = filled(kNothing);
    for (int j = 0; i + j < row.vocab; ++j) {
      const int64_t token = i + j;
      if constexpr (kHasMask) {
        if (!(row.mask[token >> 5] >> (token & 31) & 1u)) continue;
      }
      float x = float(row.logits[token]);
      if constexpr (kHasBias) x += float(row.bias[token]);
      z[j] = x * row.inverse;
    }
    return z;
  }
  INLINE Floats from(const Row& row, int64_t i) { return i + kLanes <= row.vocab ? at(row, i) : rest(row, i); }
};

struct Best {  // of each lane
  Floats value = filled(kNothing);
  Ints place = Ints{} - 1;
  INLINE void see(Best& best, Floats y, int64_t i) {
    const Ints is_more = y > best.value;
    best.value = is_more ? y : best.value;
    best.place = is_more ? (Ints)counting(uint32_t(i)) : best.place;
  }
  // What a draw sees of scores: most are out of the race before their clocks are read.
  INLINE void race(Best& best, Floats z, int64_t i, const Keys& keys) {
    const Floats scaled = uniform(counting(uint32_t(i)), keys);
    if (any(z - least_log_clock(scaled) > best.value)) see(best, z - log_clock(scaled * 2.3283064365386963e-10f), i);
  }
  static int32_t token(const Best& best) {
    float value = kNothing;
    int32_t found = -1;
    for (int j = 0; j < kLanes; ++j) {
      const bool is_first = best.value[j] == value && best.place[j] >= 0 && best.place[j] < found;
      if (best.value[j] > value || is_first) value = best.value[j], found = best.place[j];
    }
    return found;
  }
};

static int32_t sample_whole(const Row& row, const Keys* keys) {
  Best best;
  Ints is_bad{};
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Floats z = Row::from(row, i);
    is_bad |= (z != z) | (z > 3.4028234e38f);
    if (keys) Best::race(best, z, i, *keys);
    else Best::see(best, z, i);
  }
  return any(is_bad) ? -1 : Best::token(best);
}

static int32_t sample_kept(const float* z, int64_t padded, float least, const Keys* keys) {
  Best best;
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats x = load(z + i);
    const Ints is_kept = x >= least;
    if (!any(is_kept)) continue;
    const Floats left = is_kept ? x : filled(kNothing);
    if (keys) Best::race(best, left, i, *keys);
    else Best::see(best, left, i);
  }
  return Best::token(best);
}

struct Limits {
  int64_t top_k;
  double top_p;
  float min_p;
  Ties top_k_ties, top_p_ties;
};

// The smallest score that is kept, of scores `z` whose largest is `most`; what equals it and is not kept is nothing in `z`
// from then on. NaN where ties are open, and what equals it is dropped. `weights` and `places` are memory.
static float least_kept(
    float* z, float* weights, uint32_t* places, int64_t padded, float most, const Limits& limits) {
  float least = kNothing, dropped = kNothing;
  if (limits.top_k > 0 && limits.top_k < padded) {
    least = kth_largest(z, padded, limits.top_k, weights, places);
    if (limits.top_k_ties != Ties::all &&
        drop_ties(z, padded, least, limits.top_k, kOne, limits.top_k_ties == Ties::last))
      dropped = least;
  }
  if (limits.top_p < 1) {
    double total = 0;
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats x = load(z + i);
      const Floats e = x >= least ? exponential(x - most) : Floats{};
      std::memcpy(weights + i, &e, sizeof(e));
      float sum = 0;
      for (int j = 0; j < kLanes; ++j) sum += e[j];
      total += sum;
    }
    const auto weigh = [weights](int64_t i) { return double(weights[i]); };
    const double share = limits.top_p * total, wanted = share > 0 ? share : std::numeric_limits<double>::min();
    const float found = reaching<double>(z, padded, wanted, weigh, places);
    if (limits.top_p_ties != Ties::all &&
        drop_ties(z, padded, found, wanted, weigh, limits.top_p_ties == Ties::last))
      dropped = found;
    least = found > least ? found : least;
  }
  if (limits.min_p > 0) {
    const float found = most + std::log(limits.min_p);
    least = found > least ? found : least;
  }
  const bool is_open = limits.top_k_ties == Ties::open || limits.top_p_ties == Ties::open;
  if (is_open && dropped > kNothing && dropped == least) return std::numeric_limits<float>::quiet_NaN();
  return least == kNothing ? -3.4028234e38f : least;
}

// Scores into `z`, up to a whole number of registers; their largest, or NaN where one is no number or infinite.
static float scores_of(const Row& row, float* z, int64_t padded) {
  Floats most = filled(kNothing);
  Ints is_bad{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats x = Row::from(row, i);
    is_bad |= (x != x) | (x > 3.4028234e38f);
    most = x > most ? x : most;
    std::memcpy(z + i, &x, sizeof(x));
  }
  return any(is_bad) ? std::numeric_limits<float>::quiet_NaN() : largest(most);
}

INLINE void put(Out* out, Floats y, int64_t count) {
  if (count < kLanes) {
    for (int64_t j = 0; j < count; ++j) out[j] = Out(y[j]);
  } else if constexpr (std::is_same_v<Out, float>) {
    std::memcpy(out, &y, sizeof(y));
  } else {
    for (int j = 0; j < kLanes; ++j) out[j] = Out(y[j]);
  }
}

// Scores, or probabilities, of which `z` holds the parts then.
static void write_row(Out* out, float* z, int64_t vocab, int64_t padded, float most, float least) {
  if (kIsScores) {
    for (int64_t i = 0; i < vocab; i += kLanes) {
      const Floats x = load(z + i);
      put(out + i, x >= least ? x : filled(kNothing), vocab - i);
    }
    return;
  }
  Floats sums{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats x = load(z + i);
    const Ints is_kept = x >= least;
    Floats e{};
    if (any(is_kept)) {  // few are, under most limits
      e = is_kept ? exponential(x - most) : e;
      sums += e;
    }
    std::memcpy(z + i, &e, sizeof(e));
  }
  double total = 0;
  for (int j = 0; j < kLanes; ++j) total += sums[j];
  const float factor = float(1 / total);
  for (int64_t i = 0; i < vocab; i += kLanes) put(out + i, load(z + i) * factor, vocab - i);
}

// Of a thread, kept: what is asked for anew is paid for page by page.
static float* memory_of(int64_t count) {
  static thread_local std::vector<float> held;
  if (int64_t(held.size()) < count) held.resize(count);
  return held.data();
}

extern "C" void sampling(void** tensors, const int64_t* numbers) {
  const auto* logits = (const Logit*)tensors[0];
  const auto* mask = (const uint32_t*)tensors[1];
  const auto* bias = (const Bias*)tensors[2];
  const auto* temperature = (const float*)tensors[3];
  const auto* top_k = (const int32_t*)tensors[4];
  const auto* top_p = (const float*)tensors[5];
  const auto* min_p = (const float*)tensors[6];
  const auto* seeds = (const int64_t*)tensors[7];
  auto* out = (Out*)tensors[8];
  const int64_t rows = numbers[0], vocab = numbers[1], padded = numbers[2], threads = numbers[3];
  const auto top_k_ties = top_k ? Ties(numbers[4]) : Ties::all, top_p_ties = top_p ? Ties(numbers[5]) : Ties::all;
  const int64_t* strides = numbers + 6;  // of rows, for each of the first nine tensors
  const bool truncates = top_k || top_p || min_p;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t n = 0; n < rows; ++n) {
    const float t = temperature ? temperature[n * strides[3]] : 1.0f;
    const bool is_greedy = t == 0 || (!seeds && top_k_ties <= Ties::first && top_p_ties <= Ties::first);
    const Row row{logits + n * strides[0], mask + n * strides[1], bias + n * strides[2], t == 0 ? 1.0f : 1 / t, vocab};
#if IS_IDS
    const Keys keys(seeds ? seeds[n * strides[7]] : 0);
    if (!truncates || is_greedy) {
      out[n] = sample_whole(row, is_greedy ? nullptr : &keys);
      continue;
    }
#endif
    float* z = memory_of(3 * padded);
    const float most = scores_of(row, z, padded);
    const Limits limits{
        top_k ? top_k[n * strides[4]] : 0,
        top_p ? double(top_p[n * strides[5]]) : 1.0,
        min_p ? min_p[n * strides[6]] : 0.0f,
        top_k_ties,
        top_p_ties};
    const bool is_bad = !(most > kNothing);
    auto* places = (uint32_t*)(z + 2 * padded);
    const float least = is_bad ? 0.0f : t == 0 ? most : least_kept(z, z + padded, places, padded, most, limits);
#if IS_IDS
    out[n] = is_bad ? -1 : sample_kept(z, padded, least, seeds ? &keys : nullptr);
#else
    Out* to = out + n * strides[8];
    if (is_bad || !(least > kNothing)) {
      const bool is_given = kIsScores && is_bad && top_k_ties != Ties::open && top_p_ties != Ties::open;
      for (int64_t i = 0; i < vocab; ++i) to[i] = Out(is_given ? z[i] : std::numeric_limits<float>::quiet_NaN());
    } else {
      write_row(to, z, vocab, padded, most, least);
    }
#endif
  }
}
"""
