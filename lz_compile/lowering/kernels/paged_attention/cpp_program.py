"""The text of the C++ that reads the blocks of a paged cache; its sizes and features are macros."""

from __future__ import annotations

PAGED = """
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
    const int64_t upper = length - (next - first), lower = n.window ? upper + 1 - n.window : -length;
    requests.push_back({first, next - first, length, low, least, lower, upper, row});
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

  Parts parts;
  for (int64_t r = 0; r < n.requests; ++r) {
    if (requests[r].queries > n.most_queries) {
      left_out[r] = 1;
      parts.close();
    } else {
      parts.add(requests[r], n.heads);
    }
  }

  const auto held_states = lines(parts.size), held_queries = lines(n.tokens * n.heads * kDP);
  float *states = held_states[0].numbers, *queries = held_queries[0].numbers;
  for (int64_t row = 0; row < n.tokens * n.heads; ++row) {
    const int64_t head = row % n.heads / groups;
    const float scale = float(shares[0] * (key_scale ? key_scale[head] : 1.0f));
    for (int d = 0; d < kDP; ++d) queries[row * kDP + d] = d < n.dims ? given[row * n.dims + d] * scale : 0.0f;
  }
#pragma omp parallel num_threads(n.threads)
  {
    const auto copies = lines(kTile * kWide), scores = lines(parts.most * kTile);
#pragma omp for schedule(dynamic, parts.chunk(n.threads))
    for (int64_t p = 0; p < int64_t(parts.all.size()); ++p) {
      const Part& part = parts.all[p];
      const Request& request = requests[part.request];
      const bool in_place = is_in_place(n, request);
      const auto run = in_place ? compute<Stored> : compute<float>;
      run(part, request, n, key_cache, value_cache, queries, float(shares[1]), states + part.state, scores[0].numbers,
          in_place ? nullptr : copies[0].numbers, {}, nullptr);
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < n.requests; ++r) {
      const Request& request = requests[r];
      if (parts.first[r] == parts.first[r + 1]) continue;
      for (int64_t row = 0; row < request.queries * n.heads; ++row) {
        const int64_t head = row % n.heads;
        int64_t low, high;
        range_of(request, row / n.heads, &low, &high);
        if (low >= high) continue;
        float sum[kEP] = {}, greatest;
        const float total = join(parts, r, states, row, sinks ? sinks + head : nullptr, sum, greatest);
        const float share = (value_scale ? value_scale[head / groups] : 1.0f) / total;
        float* to = out + (request.first_query * n.heads + row) * n.value_dims;
        for (int e = 0; e < n.value_dims; ++e) to[e] = sum[e] * share;
      }
    }
  }
  return kNone;
}
"""
