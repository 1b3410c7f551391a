"""The text of C++ that goes over the keys of a few queries in parts, and joins these; sizes and features are macros."""

from __future__ import annotations

PARTS = """
// Where a query's keys begin and end.
INLINE void range_of(const Request& request, int64_t query, int64_t* low, int64_t* high) {
  const int64_t first = query + request.lower, last = query + request.upper + 1;
  *high = last < request.length ? last : request.length;
  *low = first < request.least ? request.least : first;
}

// The rows of a group of queries that share keys, in fours, twos and ones: f.template operator()<kRows>(first row).
template <class Function>
INLINE void in_rows(int64_t count, Function f) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) f.template operator()<4>(row);
  if (row + 2 <= count) f.template operator()<2>(row), row += 2;
  if (row < count) f.template operator()<1>(row);
}

// How many keys are read at a time, and asked for ahead: as many as stay in the first cache beside queries and sums.
INLINE int near_by(int64_t stride) {
  int count = kMost;
  while (count > kLeast && count * stride * int64_t(sizeof(Stored)) > kNear) count /= 2;
  return count;
}

// What lies over the scores of a request: a mask, a bias, slopes of one. Strides are of queries, heads and keys.
struct Over {
  const uint8_t* keep;
  const float *bias, *slopes;
  int64_t keep_at[3], bias_at[3], slopes_at;

  // A finite fill that is added hides a key from rows that see another one: its weight is zero. Such rows are open.
  INLINE_MEMBER bool hides(int64_t query, int64_t head, int64_t key, bool is_open) const {
    if (keep && !keep[query * keep_at[0] + head * keep_at[1] + key * keep_at[2]]) return true;
    return is_open && bias && bias[query * bias_at[0] + head * bias_at[1] + key * bias_at[2]] < -1e38f;
  }
  bool opens(int64_t query, int64_t head, int64_t low, int64_t high) const {
    for (int64_t t = low; t < high; ++t) {
      const float added = bias[query * bias_at[0] + head * bias_at[1] + t * bias_at[2]];
      if (added > -1e30f && !hides(query, head, t, false)) return true;
    }
    return false;
  }
  bool shows(int64_t query, int64_t head, int64_t low, int64_t high, bool is_open) const {
    for (int64_t t = low; t < high; ++t) {
      if (!hides(query, head, t, is_open)) return true;
    }
    return false;
  }
  // Scores of the keys from begin + low on, the first of which is that of begin.
  INLINE_MEMBER void apply(float* scores, int64_t query, int64_t head, int64_t begin, int low, int high) const {
    if (bias) {
      const float* own = bias + query * bias_at[0] + head * bias_at[1] + begin * bias_at[2];
      for (int t = low; t < high; ++t) scores[t] += own[t * bias_at[2]];
    }
    if (slopes) {
      const float slope = slopes[head * slopes_at];
      for (int t = low; t < high; ++t) scores[t] += slope * float(begin + t - query);
    }
    if (keep) {
      const uint8_t* own = keep + query * keep_at[0] + head * keep_at[1] + begin * keep_at[2];
      for (int t = low; t < high; ++t) scores[t] = own[t * keep_at[2]] ? scores[t] : kNothing;
    }
  }
};

// Memory is read in the order in which it lies there, which processors expect: few keys of all heads, or, where a block has
// one head after the other, all keys of a head. Copies are made where there is memory for them, and then Row is float.
template <class Row>
static void compute(const Part& part, const Request& request, const Numbers& n, const Stored* key_cache,
                    const Stored* value_cache, const float* queries, float cap, float* states, float* scores, float* copies,
                    const Over& over, const uint8_t* open) {
  const int64_t groups = n.heads / n.kv_heads, rows = request.queries * n.heads;
  const int least = kLanes / (groups % 4 == 0 ? 4 : groups % 2 == 0 ? 2 : 1);
  const int few = near_by(n.key[1]), value_ahead = near_by(n.value[1]), key_ahead = few < least ? least : few;
  const int key_step = n.key[1] < n.key[2] ? kTile : key_ahead, value_step = n.value[1] < n.value[2] ? kTile : value_ahead;
  const Stored *places[kTile + kMost + kFirst];
  const Row* copied[kTile];
  std::vector<uint8_t> shown(kHasOver ? request.queries * n.kv_heads : 0);
  for (int t = 0; t < kTile; ++t) copied[t] = reinterpret_cast<const Row*>(copies) + t * kWide;
  auto rows_of = [&](int from, int64_t first, int count, int64_t stride, int64_t size, auto widened) -> Rows<Row> {
    if constexpr (std::is_same_v<Row, Stored>) {
      if (!copies) return {places + from, first};
    }
    for (int t = 0; t < count; ++t) widened(places[from + t] + first, stride, size, copies + t * kWide);
    return {copied, 0};
  };
  for (int64_t row = 0; row < rows; ++row) {
    float* state = states + row * kState;
    std::memset(state, 0, kState * sizeof(float));
    state[kGreatest] = kNothing;
  }
  for (int64_t begin = part.begin; begin < part.end; begin += kTile) {
    const int count = int(part.end - begin < kTile ? part.end - begin : kTile);
    auto seen = [&](int64_t query, int from, int to, int* low, int* high) {
      int64_t first, last;
      range_of(request, query, &first, &last);
      *low = int(first - begin > from ? first - begin : from);
      *high = int(last - begin < to ? last - begin : to);
      return *low < *high;
    };
    int low, high;
    // Of each head that keys have, and each query: whether one of its rows sees any of these keys.
    const auto sees = [&](int64_t query, int64_t head) { return !kHasOver || shown[query * n.kv_heads + head]; };
    const auto is_read = [&](int64_t head) {
      int64_t query = 0;
      while (query < request.queries && !sees(query, head)) ++query;
      return query < request.queries;
    };
    if constexpr (kHasOver) {
      bool any = false;
      for (int64_t i = 0; i < request.queries * n.kv_heads; ++i) {
        const int64_t query = i / n.kv_heads, first = i % n.kv_heads * groups;
        shown[i] = false;
        if (!seen(query, 0, count, &low, &high)) continue;
        for (int64_t head = first; head < first + groups && !shown[i]; ++head) {
          shown[i] = over.shows(query, head, begin + low, begin + high, open[query * n.heads + head]);
        }
        any |= shown[i];
      }
      if (!any) continue;
    }
    places_of(key_cache, n.key, request, n.slots, begin, places);
    for (int from = 0; from < count; from += key_step) {
      const int rest = count - from < key_step ? count - from : key_step, padded = (rest + least - 1) / least * least;
      for (int64_t head = 0; head < n.kv_heads; ++head) {
        if (!is_read(head)) continue;
        const Rows<Row> keys = rows_of(from, head * n.key[2], rest, n.key[3], n.dims, widen<kDP>);
        for (int64_t query = 0; query < request.queries; ++query) {
          if (!sees(query, head) || !seen(query, from, from + rest, &low, &high)) continue;
          const int64_t first = query * n.heads + head * groups;
          const float* own = queries + (request.first_query * n.heads + first) * kDP;
          in_rows(groups, [&]<int kRows>(int64_t row) {
            const Ahead ahead{query || row ? nullptr : places + from + key_ahead, head * n.key[2]};
            score<kRows>(own + row * kDP, keys, ahead, padded, cap, scores + (first + row) * kTile + from);
          });
        }
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t query = row / n.heads, head = row % n.heads;
      if (!sees(query, head / groups) || !seen(query, 0, count, &low, &high)) continue;
      float* weights = scores + row * kTile;
      if constexpr (kHasOver) over.apply(weights, query, head, begin, low, high);
      const int first = low / kLanes * kLanes, last = (high + kLanes - 1) / kLanes * kLanes;
      if (!weigh(states + row * kState, weights, first, low, high, last)) std::memset(weights, 0, kTile * sizeof(float));
    }
    places_of(value_cache, n.value, request, n.slots, begin, places);
    for (int from = 0; from < count; from += value_step) {
      const int rest = count - from < value_step ? count - from : value_step;
      for (int64_t head = 0; head < n.kv_heads; ++head) {
        if (!is_read(head)) continue;
        const Rows<Row> values = rows_of(from, head * n.value[2], rest, n.value[3], n.value_dims, widen<kEP>);
        for (int64_t query = 0; query < request.queries; ++query) {
          if (!sees(query, head) || !seen(query, from, from + rest, &low, &high)) continue;
          const int64_t first = query * n.heads + head * groups;
          in_rows(groups, [&]<int kRows>(int64_t row) {
            const float* weights = scores + (first + row) * kTile + low;
            const Ahead ahead{query || row ? nullptr : places + low + value_ahead, head * n.value[2]};
            const Rows<Row> own{values.places + (low - from), values.first};
            add_values<kRows>(states + (first + row) * kState, weights, own, ahead, high - low);
          });
        }
      }
    }
  }
}

// How requests are cut into parts, by their own lengths alone.
struct Parts {
  std::vector<Part> all;
  std::vector<int64_t> first{0};  // of each request, and one behind the last
  int64_t size = 0, most = 0;     // floats of all states, and the most rows of a request

  void add(const Request& request, int64_t heads) {
    const int64_t r = int64_t(first.size()) - 1, rows = request.queries * heads;
    const int64_t step = request.length < 4 * kPart ? kPart / 2 : kPart;
    most = rows > most ? rows : most;
    for (int64_t begin = request.first_key / step * step; rows && begin < request.length; begin += step) {
      const int64_t end = begin + step < request.length ? begin + step : request.length;
      all.push_back({r, begin < request.first_key ? request.first_key : begin, end, size});
      size += rows * kState;
    }
    close();
  }
  void close() { first.push_back(int64_t(all.size())); }
  // How many a thread takes at a time.
  int64_t chunk(int64_t threads) const {
    const int64_t each = int64_t(all.size()) / (8 * threads);
    return each < 1 ? 1 : each < 4 ? each : 4;
  }
};

// What all parts of a row come to, weighed against each other: values into sum; the total of weights (zero without a key),
// and the greatest score.
INLINE float join(const Parts& parts, int64_t request, const float* states, int64_t row, const float* sink, float* sum,
                  float& greatest) {
  const int64_t first = parts.first[request], last = parts.first[request + 1];
  if (sink && *sink == kNothing) sink = nullptr;
  greatest = sink ? *sink : kNothing;
  for (int64_t p = first; p < last; ++p) {
    const float largest = states[parts.all[p].state + row * kState + kGreatest];
    greatest = largest > greatest ? largest : greatest;
  }
  float total = sink ? std::exp(*sink - greatest) : 0.0f;
  for (int64_t p = first; p < last; ++p) {
    const float* state = states + parts.all[p].state + row * kState;
    const float own = sum_of(load(state + kTotal));
    if (own == 0.0f) continue;  // it saw none of these keys
    const float factor = std::exp(state[kGreatest] - greatest);
    total += factor * own;
    for (int e = 0; e < kEP; ++e) sum[e] += factor * state[e];
  }
  return total;
}

// Whether numbers are widened as they are read, or once, where many rows read them.
INLINE bool is_in_place(const Numbers& n, const Request& request) {
  const bool is_dense = n.dims == kDP && n.value_dims == kEP && n.key[3] == 1 && n.value[3] == 1;
  return is_dense && (sizeof(Stored) == 4 || request.queries * (n.heads / n.kv_heads) <= 8);
}
"""
