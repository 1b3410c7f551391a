"""The text of the C++ loops over keys: where they lie, scores, weights, sums of values."""

from __future__ import annotations

LOOPS = """
constexpr int kTile = 64, kPart = 512, kMost = 16, kLeast = 4, kFirst = 8, kNear = 16384, kLine = 64;
constexpr int kDP = kDV * kLanes, kEP = kEV * kLanes, kWide = kDP > kEP ? kDP : kEP;
constexpr int kState = kEP + 2 * kLanes;  // sums of values, those of weights in lanes, the largest score
constexpr int kTotal = kEP, kGreatest = kEP + kLanes;

// Memory for so many floats, unwritten, in which no register crosses a line.
struct alignas(kLine) Line {
  float numbers[kLine / 4];
};
INLINE std::unique_ptr<Line[]> lines(int64_t count) { return std::unique_ptr<Line[]>(new Line[count * 4 / kLine + 1]); }

// What faults are about, in the order of the op's operands.
enum Fault : int32_t { kNone = 0, kTable = 1, kLengths = 2, kStarts = 3 };

struct Numbers {
  int64_t tokens, heads, kv_heads, requests, columns, blocks, slots, most_queries, window;
  int64_t key[4], value[4];  // strides of blocks, slots, heads, features
  int64_t threads, dims, value_dims;
};
// Query q sees the keys from q + lower to q + upper, of those that there are, from the least on.
struct Request {
  int64_t first_query, queries, length, first_key, least, lower, upper;
  const int32_t* row;
};
struct Part {
  int64_t request, begin, end, state;
};

// One row of a cache as floats, zeros behind it.
template <int kPadded>
INLINE void widen(const Stored* from, int64_t stride, int64_t count, float* to) {
  int j = 0;
  for (; stride == 1 && j + kLanes <= count; j += kLanes) {
    const Floats x = floats_at(from + j);
    std::memcpy(to + j, &x, sizeof(x));
  }
  for (; j < count; ++j) to[j] = number_of(from[j * stride]);
  for (; j < kPadded; ++j) to[j] = 0.0f;
}

// Where the keys of a tile and those behind it lie in a cache, for the first head; after the last one that again.
INLINE void places_of(const Stored* cache, const int64_t* stride, const Request& request, int64_t slots, int64_t begin,
                      const Stored** places) {
  const int64_t rest = request.length - begin;
  const int count = int(rest < kTile + kMost + kFirst ? rest : kTile + kMost + kFirst);
  int64_t slot = begin % slots;
  const int32_t* block = request.row + begin / slots;
  for (int t = 0; t < count; slot = 0, ++block) {
    const Stored* place = cache + int64_t(*block) * stride[0] + slot * stride[1];
    for (; t < count && slot < slots; ++t, ++slot, place += stride[1]) places[t] = place;
  }
  for (int t = count; t < kTile + kMost + kFirst; ++t) places[t] = places[count - 1];
}

// Memory that is read later is asked for: a line for each that is read, since few can be under way at a time. The second
// cache is asked some keys before the first: 0.85 to 0.9 of the time where keys are narrow, as long elsewhere.
struct Ahead {
  const Stored* const* places;  // of those rows; none: nobody asks
  int64_t first;
  INLINE_MEMBER void ask(int t, int d) const {
    if (!places || d * sizeof(Stored) % kLine) return;
    __builtin_prefetch(places[t + kFirst] + first + d, 0, 2);
    __builtin_prefetch(places[t] + first + d);
  }
};

// Rows that a loop reads, one for each key: where they lie, or widened copies of them.
template <class Row> struct Rows {
  const Row* const* places;
  int64_t first;
  INLINE_MEMBER const Row* operator[](int t) const { return places[t] + first; }
};

// Loops over keys are functions of their own: inlined, compilers run out of registers and read queries anew for each key.
#define LOOP static __attribute__((noinline))

// Scores of kRows queries with so many keys, a multiple of kLanes / kRows; each load of keys serves all rows.
template <int kRows, class Row>
LOOP void score(const float* queries, Rows<Row> keys, Ahead ahead, int count, float cap, float* scores) {
  constexpr int kKeys = kLanes / kRows;
  for (int t = 0; t < count; t += kKeys) {
    Floats part[kLanes];
    const Row* at[kKeys];
    for (int j = 0; j < kLanes; ++j) part[j] = Floats{};
    for (int j = 0; j < kKeys; ++j) at[j] = keys[t + j];
#pragma GCC unroll 1
    for (int d = 0; d < kDP; d += kLanes) {
      Floats query[kRows];
      for (int r = 0; r < kRows; ++r) query[r] = load(queries + r * kDP + d);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const Floats key = floats_at(at[j] + d);
        ahead.ask(t + j, d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) part[r * kKeys + j] += query[r] * key;
      }
    }
    Floats found = sums(part);
    if constexpr (kHasCap) found = cap * tangent(found / cap);
    const float* all = reinterpret_cast<float*>(&found);
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kTile + t, all + r * kKeys, kKeys * 4);
  }
}

// Adds what weights take of values, kCount registers of columns of kRows rows.
template <int kRows, int kCount, class Row>
LOOP void add_columns(float* states, const float* weights, Rows<Row> values, Ahead ahead, int column, int count) {
  Floats sum[kRows][kCount];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int e = 0; e < kCount; ++e) sum[r][e] = load(states + r * kState + column + e * kLanes);
  }
  for (int t = 0; t < count; ++t) {
    const Row* value = values[t] + column;
#pragma GCC unroll 16
    for (int e = 0; e < kCount; ++e) {
      const Floats x = floats_at(value + e * kLanes);
      ahead.ask(t, column + e * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][e] += weights[r * kTile + t] * x;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int e = 0; e < kCount; ++e) std::memcpy(states + r * kState + column + e * kLanes, &sum[r][e], sizeof(Floats));
  }
}

template <int kRows, class Row>
INLINE void add_values(float* states, const float* weights, Rows<Row> values, Ahead ahead, int count) {
  constexpr int kColumns = (kLanes == 16 ? 16 : 8) / kRows, kRest = kEV % kColumns;
  int e = 0;
  for (; e + kColumns <= kEV; e += kColumns) add_columns<kRows, kColumns>(states, weights, values, ahead, e * kLanes, count);
  if constexpr (kRest != 0) add_columns<kRows, kRest>(states, weights, values, ahead, e * kLanes, count);
}

// Scores as weights; what was summed up before is scaled to the greatest score so far. False where there is no weight.
INLINE bool weigh(float* state, float* scores, int first, int low, int high, int last) {
  for (int t = first; t < low; ++t) scores[t] = kNothing;
  for (int t = high; t < last; ++t) scores[t] = kNothing;
  Floats most = load(scores + first);
  for (int t = first + kLanes; t < last; t += kLanes) {
    const Floats x = load(scores + t);
    most = x > most ? x : most;
  }
  float& greatest = state[kGreatest];
  Floats total = load(state + kTotal);
  const float found = largest(most), before = greatest;
  if (found > before) {
    greatest = found;
    const float factor = std::exp(before - greatest);
    total *= factor;
    for (int e = 0; e < kEP; ++e) state[e] *= factor;
  }
  if (greatest == kNothing) {  // no weight at all, unless a score is NaN
    for (int t = low; t < high; ++t) state[kTotal] += scores[t] == kNothing ? 0.0f : scores[t];
    return false;
  }
  for (int t = first; t < last; t += kLanes) {
    const Floats w = exponential(load(scores + t) - greatest);
    std::memcpy(scores + t, &w, sizeof(w));
    total += w;
  }
  std::memcpy(state + kTotal, &total, sizeof(total));
  return true;
}

INLINE float sum_of(Floats x) {
  for (int width = kLanes / 2; width; width /= 2) {
    for (int j = 0; j < width; ++j) x[j] += x[j + width];
  }
  return x[0];
}
"""
