"""The text of the C++ that reads the blocks of a paged cache; its sizes and features are macros."""

from __future__ import annotations

PAGED = """
// Where a query's keys begin and end.
INLINE void range_of(const Request& request, int64_t window, int64_t query, int64_t* low, int64_t* high) {
  *high = request.length - request.queries + query + 1;
  *low = window && *high > window ? *high - window : 0;
  *low = *low < request.least ? request.least : *low;
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

// Memory is read in the order in which it lies there, which processors expect: few keys of all heads, or, where a block has
// one head after the other, all keys of a head. Copies are made where there is memory for them, and then Row is float.
template <class Row>
static void compute(const Part& part, const Request& request, const Numbers& n, const Stored* key_cache,
                    const Stored* value_cache, const float* queries, float cap, float* states, float* scores, float* copies) {
  const int64_t groups = n.heads / n.kv_heads, rows = request.queries * n.heads;
  const int least = kLanes / (groups % 4 == 0 ? 4 : groups % 2 == 0 ? 2 : 1);
  const int few = near_by(n.key[1]), value_ahead = near_by(n.value[1]), key_ahead = few < least ? least : few;
  const int key_step = n.key[1] < n.key[2] ? kTile : key_ahead, value_step = n.value[1] < n.value[2] ? kTile : value_ahead;
  const Stored *places[kTile + kMost + kFirst];
  const Row* copied[kTile];
  for (int t = 0; t < kTile; ++t) copied[t] = reinterpret_cast<const Row*>(copies) + t * kWide;
  auto rows_of = [&](int from, int64_t first, int count, int64_t stride, auto widened) -> Rows<Row> {
    if constexpr (std::is_same_v<Row, Stored>) {
      if (!copies) return {places + from, first};
    }
    for (int t = 0; t < count; ++t) widened(places[from + t] + first, stride, copies + t * kWide);
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
      range_of(request, n.window, query, &first, &last);
      *low = int(first - begin > from ? first - begin : from);
      *high = int(last - begin < to ? last - begin : to);
      return *low < *high;
    };
    int low, high;
    places_of(key_cache, n.key, request, n.slots, begin, places);
    for (int from = 0; from < count; from += key_step) {
      const int rest = count - from < key_step ? count - from : key_step, padded = (rest + least - 1) / least * least;
      for (int64_t head = 0; head < n.kv_heads; ++head) {
        const Rows<Row> keys = rows_of(from, head * n.key[2], rest, n.key[3], widen<kD, kDP>);
        for (int64_t query = 0; query < request.queries; ++query) {
          if (!seen(query, from, from + rest, &low, &high)) continue;
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
      if (!seen(row / n.heads, 0, count, &low, &high)) continue;
      float* weights = scores + row * kTile;
      const int first = low / kLanes * kLanes, last = (high + kLanes - 1) / kLanes * kLanes;
      if (!weigh(states + row * kState, weights, first, low, high, last)) std::memset(weights, 0, kTile * sizeof(float));
    }
    places_of(value_cache, n.value, request, n.slots, begin, places);
    for (int from = 0; from < count; from += value_step) {
      const int rest = count - from < value_step ? count - from : value_step;
      for (int64_t head = 0; head < n.kv_heads; ++head) {
        const Rows<Row> values = rows_of(from, head * n.value[2], rest, n.value[3], widen<kE, kEP>);
        for (int64_t query = 0; query < request.queries; ++query) {
          if (!seen(query, from, from + rest, &low, &high)) continue;
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

// Requests in their places, or what is wrong with them, and where.
static Fault place(const Numbers& n, const int32_t* table, const int32_t* lengths, const int32_t* starts,
                   const int32_t* firsts, std::vector<Request>& requests, int64_t* found) {
  if (starts && starts[0] != 0) {
    found[0] = 0, found[1] = starts[0];
    return kStarts;
  }
  for (int64_t r = 0; r < n.requests; ++r) {
    const int64_t first = starts ? starts[r] : r, next = starts ? starts[r + 1] : r + 1, length = lengths[r];
    found[0] = r;
    if (next < first || next > n.tokens) {
      found[0] = r + 1, found[1] = next;
      return kStarts;
    }
    if (length < 0 || length > n.columns * n.slots) {
      found[1] = length;
      return kLengths;
    }
    int64_t low = length - (next - first) + 1 - n.window;
    const int64_t least = firsts && firsts[r] > 0 ? firsts[r] : 0;
    low = n.window && low > least ? low : least;
    const int32_t* row = table + r * n.columns;
    for (int64_t b = low / n.slots; b * n.slots < length; ++b) {
      if (row[b] < 0 || row[b] >= n.blocks) {
        found[1] = row[b];
        return kTable;
      }
    }
    requests.push_back({first, next - first, length, low, least, row});
  }
  return kNone;
}

extern "C" int32_t paged_attention(const void* const* operands, const int64_t* counts, const double* shares, int64_t* found) {
  Numbers n;
  std::memcpy(&n, counts, sizeof(n));
  const float* given = static_cast<const float*>(operands[0]);
  const auto *key_cache = static_cast<const Stored*>(operands[1]), *value_cache = static_cast<const Stored*>(operands[2]);
  const auto *tables = static_cast<const int32_t*>(operands[3]), *lengths = static_cast<const int32_t*>(operands[4]);
  const auto *starts = static_cast<const int32_t*>(operands[5]);
  const auto *sinks = static_cast<const float*>(operands[6]), *key_scale = static_cast<const float*>(operands[7]);
  const auto *value_scale = static_cast<const float*>(operands[8]);
  float* out = static_cast<float*>(const_cast<void*>(operands[10]));
  int32_t* left_out = static_cast<int32_t*>(const_cast<void*>(operands[11]));
  const auto* firsts = static_cast<const int32_t*>(operands[9]);
  const int64_t groups = n.heads / n.kv_heads;

  std::vector<Request> requests;
  requests.reserve(n.requests);
  const Fault fault = place(n, tables, lengths, starts, firsts, requests, found);
  if (fault != kNone) return fault;

  std::vector<Part> parts;
  std::vector<int64_t> first_part(n.requests + 1, 0);
  int64_t size = 0, most = 0;
  for (int64_t r = 0; r < n.requests; ++r) {
    const Request& request = requests[r];
    first_part[r] = int64_t(parts.size());
    if (request.queries > n.most_queries) {
      left_out[r] = 1;
      continue;
    }
    if (request.queries == 0) continue;
    most = request.queries > most ? request.queries : most;
    const int64_t step = request.length < 4 * kPart ? kPart / 2 : kPart;
    for (int64_t begin = request.first_key / step * step; begin < request.length; begin += step) {
      const int64_t end = begin + step < request.length ? begin + step : request.length;
      parts.push_back({r, begin < request.first_key ? request.first_key : begin, end, size});
      size += request.queries * n.heads * kState;
    }
  }
  first_part[n.requests] = int64_t(parts.size());

  const auto held_states = lines(size), held_queries = lines(n.tokens * n.heads * kDP);
  float *states = held_states[0].numbers, *queries = held_queries[0].numbers;
  for (int64_t row = 0; row < n.tokens * n.heads; ++row) {
    const int64_t head = row % n.heads / groups;
    const float scale = float(shares[0] * (key_scale ? key_scale[head] : 1.0f));
    for (int d = 0; d < kDP; ++d) queries[row * kDP + d] = d < kD ? given[row * kD + d] * scale : 0.0f;
  }
  const bool is_dense = kD == kDP && kE == kEP && n.key[3] == 1 && n.value[3] == 1;
  const int64_t each = int64_t(parts.size()) / (8 * n.threads), chunk = each < 1 ? 1 : each < 4 ? each : 4;
#pragma omp parallel num_threads(n.threads)
  {
    const auto copies = lines(kTile * kWide), scores = lines(most * n.heads * kTile);
#pragma omp for schedule(dynamic, chunk)
    for (int64_t p = 0; p < int64_t(parts.size()); ++p) {
      const Part& part = parts[p];
      const Request& request = requests[part.request];
      // Numbers are widened as they are read, or once, where many rows read them.
      const bool in_place = is_dense && (sizeof(Stored) == 4 || request.queries * groups <= 8);
      const auto run = in_place ? compute<Stored> : compute<float>;
      run(part, request, n, key_cache, value_cache, queries, float(shares[1]), states + part.state, scores[0].numbers,
          in_place ? nullptr : copies[0].numbers);
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < n.requests; ++r) {
      const Request& request = requests[r];
      const int64_t first = first_part[r], last = first_part[r + 1];
      if (first == last) continue;
      for (int64_t row = 0; row < request.queries * n.heads; ++row) {
        const int64_t head = row % n.heads;
        int64_t low, high;
        range_of(request, n.window, row / n.heads, &low, &high);
        if (low >= high) continue;
        float greatest = sinks ? sinks[head] : kNothing;
        for (int64_t p = first; p < last; ++p) {
          const float largest = states[parts[p].state + row * kState + kGreatest];
          greatest = largest > greatest ? largest : greatest;
        }
        float total = sinks ? std::exp(sinks[head] - greatest) : 0.0f;
        float sum[kEP] = {};
        for (int64_t p = first; p < last; ++p) {
          const float* state = states + parts[p].state + row * kState;
          const float own = sum_of(load(state + kTotal));
          if (own == 0.0f) continue;  // it saw none of these keys
          const float factor = std::exp(state[kGreatest] - greatest);
          total += factor * own;
          for (int e = 0; e < kEP; ++e) sum[e] += factor * state[e];
        }
        const float share = (value_scale ? value_scale[head / groups] : 1.0f) / total;
        float* to = out + (request.first_query * n.heads + row) * kE;
        for (int e = 0; e < kE; ++e) to[e] = sum[e] * share;
      }
    }
  }
  return kNone;
}
"""
