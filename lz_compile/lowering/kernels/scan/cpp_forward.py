"""C++ of a scan, forward: reads, the last state, and the state before every chunk of steps."""

from __future__ import annotations

FORWARD = """
struct Results {
  View<OutT> reads;
  View<LastT> last;
  View<Acc> checkpoints;
};

static void run_panel(const Problem& p, const Results& out, Rows& rows, Block* states, int64_t b, int64_t h, int64_t first) {
  const int64_t end = least(first + p.panel, p.V);
  Block written[R1], reads[Q1];
  for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
    for (int64_t i = 0; i < p.rows(); ++i) {
      states[block * p.rows() + i] = kState ? load(p.state.at(b, h, 0) + i * p.state.s[3] + j * p.state.s[4], p.state.s[4],
                                              least(kColumns, end - j))
                                       : zero();
    }
  }
  for (int64_t t = 0; t < p.T; ++t) {
    rows.read(p, b, h, t);
    for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
      const Place at{b, h, t, j, least(kColumns, end - j)};
      Block* state = states + block * p.rows();
      if (out.checkpoints.data && t % p.chunk == 0) {
        Acc* to = out.checkpoints.at(b, h, t / p.chunk) + j;
        for (int64_t i = 0; i < p.rows(); ++i) store(to + i * out.checkpoints.s[3], 1, at.count, state[i]);
      }
      advance<true>(p, rows, at, state, state, written, reads);
      OutT* to = out.reads.at(b, h, t) + j * out.reads.s[4];
      for (int64_t q = 0; q < Q; ++q) store(to + q * out.reads.s[3], out.reads.s[4], at.count, reads[q]);
    }
  }
  for (int64_t block = 0, j = first; kLast && j < end; ++block, j += kColumns) {
    LastT* to = out.last.at(b, h, 0) + j * out.last.s[4];
    for (int64_t i = 0; i < p.rows(); ++i)
      store(to + i * out.last.s[3], out.last.s[4], least(kColumns, end - j), states[block * p.rows() + i]);
  }
}

// Columns of a factor or summand that walks through the steps. Nothing here may be read through a pointer more than once,
// or the compiler would read it again after every store.
template <Kind kind, class T> class Walk {
 public:
  INLINE_MEMBER Walk(const View<const T>& view, int64_t b, int64_t h, int64_t j)
      : at_(kind == kNone ? nullptr : view.at(b, h, 0) + (varies(kind) ? j * view.s[4] : 0)),
        step_(view.s[2]), columns_(view.s[4]) {}
  template <bool kWhole> INLINE_MEMBER auto next(int64_t count) {
    const T* at = at_;
    at_ += step_;
    if constexpr (varies(kind)) return load(at, kWhole ? 1 : columns_, kWhole ? kColumns : count);
    else return static_cast<Acc>(*at);
  }

 private:
  const T* at_;
  int64_t step_, columns_;
};

// All steps of one block of columns of a state without keys, which stays in registers. `kWhole`: no column is missing, and
// all are side by side.
template <bool kWhole>
static void run_block(const Problem& p, const Results& out, int64_t b, int64_t h, int64_t j) {
  const int64_t count = least(kColumns, p.V - j), columns = out.reads.s[4], step = out.reads.s[2];
  const int64_t steps = p.T, chunk = p.chunk;
  Walk<kDecay, DecayT> decay(p.decay, b, h, j);
  Walk<kDrive, DriveT> drive(p.drive, b, h, j);
  OutT* to = out.reads.at(b, h, 0) + j * columns;
  Block x = kState ? load(p.state.at(b, h, 0) + j * p.state.s[4], p.state.s[4], count) : zero();
  const auto show = [&] { store(to, kWhole ? 1 : columns, kWhole ? kColumns : count, x); };
  for (int64_t start = 0; start < steps; start += chunk) {
    if (out.checkpoints.data) store(out.checkpoints.at(b, h, start / chunk) + j, 1, count, x);
    for (int64_t left = least(chunk, steps - start); left > 0; --left, to += step) {
      if constexpr (kBefore) show();
      if constexpr (kDecay != kNone) {
        const auto factor = decay.template next<kWhole>(count);
        if constexpr (kDrops) clear(x, factor, kDropped);
        scale(x, factor);
      }
      if constexpr (kDrive != kNone) add(x, drive.template next<kWhole>(count));
      if constexpr (!kBefore) show();
    }
  }
  if constexpr (kLast) store(out.last.at(b, h, 0) + j * out.last.s[4], out.last.s[4], count, x);
}

static bool is_whole(const Problem& p, const Results& out, int64_t j) {
  return p.V - j >= kColumns && out.reads.s[4] == 1 && (!varies(kDecay) || p.decay.s[4] == 1) &&
         (!varies(kDrive) || p.drive.s[4] == 1);
}

static void run(const Problem& p, const Results& out, Rows& rows, Block* states, int64_t b, int64_t h, int64_t j) {
  if constexpr (kElements && !kComputed) {
    if (p.blocks() == 1) return is_whole(p, out, j) ? run_block<true>(p, out, b, h, j) : run_block<false>(p, out, b, h, j);
  }
  run_panel(p, out, rows, states, b, h, j);
}

extern "C" void scan_forward(void* const* pointers, const int64_t* numbers) {
  Problem p;
  Results out;
  Arguments arguments(pointers, numbers);
  arguments.take(p);
  arguments.take(out.reads);
  arguments.take(out.last);
  arguments.take(out.checkpoints);
  p.leaves.take(arguments);
  const int64_t states = p.blocks() * p.K;
#pragma omp parallel num_threads(p.threads)
  {
    Memory memory(Rows::bytes(p.K) + Memory::padded(states * sizeof(Block)));
    Rows rows(memory, p.K);
    Block* own = memory.take<Block>(states);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < p.B * p.H * p.panels(); ++task) {
      const int64_t head = task / p.panels(), panel = task % p.panels();
      run(p, out, rows, own, head / p.H, head % p.H, panel * p.panel);
    }
  }
}
"""
