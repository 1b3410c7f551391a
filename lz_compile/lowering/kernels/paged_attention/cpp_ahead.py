"""The text of the C++ that asks for the memory of keys and values before it is read."""

from __future__ import annotations

AHEAD = """
// The memory of the next tile, whose blocks lie where processors expect nothing. It is asked for in the order in which it
// lies there, evenly while this tile is computed: all at once, or in the order of use, takes half as long again.
struct Run {
  const char *begin, *end;
};
class Ahead {
 public:
  Ahead(const Run* runs, int count) : at_(nullptr), end_(nullptr), run_(runs), last_(runs + count) {}
  // So many bytes in turn `turn`; parts of a line in one turn of several.
  template <int kBytes> INLINE_MEMBER void fetch(int turn) {
    if constexpr (kBytes < kLine) {
      if (turn % (kLine / kBytes) != 0) return;
    }
    if (at_ >= end_) {
      if (run_ == last_) return;
      at_ = run_->begin, end_ = run_->end, ++run_;
    }
    constexpr int kLines = (kBytes + kLine - 1) / kLine;
#pragma GCC unroll 16
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + line * kLine, 0, 2);
    at_ += kLines * kLine;
  }

 private:
  const char *at_, *end_;
  const Run *run_, *last_;
};

// Where so many keys lie, neighbours in one: those of all heads at once, or of one head after the other.
INLINE int runs_of(const Stored* const* places, int count, const int64_t* stride, int64_t heads, int features, Run* runs) {
  const bool is_whole = stride[1] >= stride[2] * heads;
  const int64_t width = is_whole ? stride[2] * heads : features;
  int found = 0;
  for (int64_t head = 0; head < (is_whole ? 1 : heads); ++head) {
    for (int t = 0; t < count; ++t) {
      const Stored* row = places[t] + head * stride[2];
      const char *begin = reinterpret_cast<const char*>(row), *end = reinterpret_cast<const char*>(row + width);
      if (found && runs[found - 1].end == begin) runs[found - 1].end = end;
      else runs[found++] = {begin, end};
    }
  }
  return found;
}
"""
