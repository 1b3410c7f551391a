"""C++ of a scan, backward: every chunk of steps is computed again from the state before it, then walked back."""

from __future__ import annotations

BACKWARD = """
struct Gradients {
  View<const Acc> checkpoints;
  View<const OutT> reads;
  View<const LastT> last;
  View<Acc> state, decay, left, right, erase, drive, query;
};

// Sums over columns that are still to be made, of each row of the operands that all columns share.
class Sums {
 public:
  Vec *left[R1], *erase[R1], *query[Q1], *decay, *drive;

  static int64_t rows(int64_t K) { return (K + kLanes - 1) / kLanes * kLanes; }
  static int64_t bytes(int64_t K) { return (2 * R1 + Q1 + 2) * Memory::padded(rows(K) * sizeof(Vec)); }
  Sums(Memory& memory, int64_t K) {
    auto take = [&](Vec*& each) {
      each = memory.take<Vec>(rows(K));
      for (Vec* row = each; row != each + rows(K); ++row) *row = Vec{};
    };
    for (auto& each : left) take(each);
    for (auto& each : erase) take(each);
    for (auto& each : query) take(each);
    take(decay);
    take(drive);
  }
};

template <bool kFirst> INLINE void put(Vec& to, const Vec& x) {
  if constexpr (kFirst) to = x;
  else to += x;
}

INLINE void store_sums(Acc* to, int64_t stride, int64_t count, const Vec* sums_of, bool adds) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec found = sums(sums_of + i);
    if (stride == 1 && count - i >= kLanes) {
      LooseVec& target = *reinterpret_cast<LooseVec*>(to + i);
      target = adds ? target + found : found;
      continue;
    }
    for (int64_t lane = 0; lane < least(kLanes, count - i); ++lane) {
      Acc& target = to[(i + lane) * stride];
      target = adds ? target + found[lane] : found[lane];
    }
  }
}

// The gradient of a factor or summand of the state, from that of each of its rows.
template <Kind kind, bool kFirst> class TermGradient {
 public:
  INLINE_MEMBER TermGradient(const View<Acc>& view, Vec* sums_of, const Place& at, int64_t step, bool adds)
      : sums_(sums_of), adds_(adds), all_(zero()) {
    if constexpr (kind == kValue || kind == kFull) {
      to_ = view.at(at.b, at.h, step) + at.column * view.s[4];
      rows_ = view.s[3], columns_ = view.s[4], count_ = at.count;
    }
  }
  INLINE_MEMBER void add_row(int64_t i, const Block& x) {
    if constexpr (kind == kKey) put<kFirst>(sums_[i], folded(x));
    else if constexpr (kind == kFull) store(to_ + i * rows_, columns_, count_, x, adds_);
    else add(all_, x);
  }
  INLINE_MEMBER void finish() {
    if constexpr (kind == kScalar) put<kFirst>(sums_[0], folded(all_));
    if constexpr (kind == kValue) store(to_, columns_, count_, all_, adds_);
  }

 private:
  Vec* sums_;
  bool adds_;
  Block all_;
  Acc* to_ = nullptr;
  int64_t rows_ = 0, columns_ = 0, count_ = 0;
};

// Where gradients of a step go: of operands that are the same at every step, one for each chunk.
struct Target {
  int64_t t, chunk;
  bool is_last;  // of its chunk, and so the first one to be walked back
  template <bool kConstant> int64_t step() const { return kConstant ? chunk : t; }
  template <bool kConstant> bool adds() const { return kConstant && !is_last; }
};

INLINE Block product(const Block& a, const Block& x) {
  Block out = a;
  scale(out, x);
  return out;
}

// Takes the gradient of the state after a step to that of the state before it, for some columns.
template <bool kFirst>
INLINE void reverse(const Problem& p, const Gradients& g, const Rows rows, const Sums sums_of, const Place& at,
                    const Target& target, const Block* before, const Block* after, const Block* written, Block* gradient) {
  Block of_reads[Q1], of_right[R1], put_there[R1];
  const OutT* given = g.reads.at(at.b, at.h, at.t) + at.column * g.reads.s[4];
  for (int64_t q = 0; q < Q; ++q) of_reads[q] = load(given + q * g.reads.s[3], g.reads.s[4], at.count);
  for (int64_t r = 0; r < R; ++r) of_right[r] = zero(), put_there[r] = written[r];
  const DecayTerm decay(p, rows, at);
  TermGradient<kDecay, kFirst> of_decay(g.decay, sums_of.decay, at, target.step<kConstantDecay>(),
                                        target.adds<kConstantDecay>());
  TermGradient<kDrive, kFirst> of_drive(g.drive, sums_of.drive, at, target.step<kConstantDrive>(),
                                        target.adds<kConstantDrive>());
  auto look_back = [&](int64_t i, const Block& x, Block& y) {
    for (int64_t q = 0; q < Q; ++q) {
      if constexpr (kQuery) {
        if constexpr (kGradQuery) put<kFirst>(sums_of.query[q][i], dot(x, of_reads[q]));
        add_product(y, rows.query[q][i], of_reads[q]);
      } else {
        add(y, of_reads[q]);
      }
    }
  };
  auto of_updates = [&](int64_t i, Block& y) {
    if constexpr (!kBefore) look_back(i, after[i], y);
    for (int64_t r = 0; r < R; ++r) {
      if constexpr (kGradLeft) put<kFirst>(sums_of.left[r][i], dot(y, put_there[r]));
      if constexpr (kErase || kGradRight) add_product(of_right[r], rows.left[r][i], y);
    }
    if constexpr (kGradDrive) of_drive.add_row(i, y);
  };
  auto of_state = [&](int64_t i, Block& y) {
    if constexpr (kGradDecay) of_decay.add_row(i, product(y, kept(before[i], decay, i)));
    if constexpr (kDecay != kNone) scale(y, decay[i]);
    if constexpr (kErase) {
      for (int64_t r = 0; r < R; ++r) {
        if constexpr (kGradErase) put<kFirst>(sums_of.erase[r][i], -dot(kept(before[i], decay, i), of_right[r]));
        subtract_product(y, rows.erase[r][i], of_right[r]);
      }
    }
    y = kept(y, decay, i);
    if constexpr (kBefore) look_back(i, before[i], y);
  };
  for (int64_t i = 0; i < p.K; ++i) {
    Block y = gradient[i];
    of_updates(i, y);
    if constexpr (!kErase) of_state(i, y);
    gradient[i] = y;
  }
  if constexpr (kErase) {
    for (int64_t i = 0; i < p.K; ++i) {
      Block y = gradient[i];
      of_state(i, y);
      gradient[i] = y;
    }
  }
  if constexpr (kGradRight) {
    Acc* to = g.right.at(at.b, at.h, target.step<kConstantRight>()) + at.column * g.right.s[4];
    for (int64_t r = 0; r < R; ++r)
      store(to + r * g.right.s[3], g.right.s[4], at.count, of_right[r], target.adds<kConstantRight>());
  }
  if constexpr (kGradDecay) of_decay.finish();
  if constexpr (kGradDrive) of_drive.finish();
}

INLINE void store_rows(const Problem& p, const Gradients& g, const Sums& sums_of, const Place& at, const Target& target,
                       int64_t part) {
  for (int64_t r = 0; r < R; ++r) {
    if constexpr (kGradLeft)
      store_sums(g.left.at(at.b, at.h, target.step<kConstantLeft>(), part) + r * g.left.s[3], g.left.s[4], p.K,
                 sums_of.left[r], target.adds<kConstantLeft>());
    if constexpr (kGradErase)
      store_sums(g.erase.at(at.b, at.h, target.step<kConstantErase>(), part) + r * g.erase.s[3], g.erase.s[4], p.K,
                 sums_of.erase[r], target.adds<kConstantErase>());
  }
  for (int64_t q = 0; q < Q; ++q) {
    if constexpr (kGradQuery)
      store_sums(g.query.at(at.b, at.h, target.step<kConstantQuery>(), part) + q * g.query.s[3], g.query.s[4], p.K,
                 sums_of.query[q], target.adds<kConstantQuery>());
  }
  if constexpr (kGradDecay && (kDecay == kScalar || kDecay == kKey))
    store_sums(g.decay.at(at.b, at.h, target.step<kConstantDecay>(), part), g.decay.s[3], kDecay == kKey ? p.K : 1,
               sums_of.decay, target.adds<kConstantDecay>());
  if constexpr (kGradDrive && (kDrive == kScalar || kDrive == kKey))
    store_sums(g.drive.at(at.b, at.h, target.step<kConstantDrive>(), part), g.drive.s[3], kDrive == kKey ? p.K : 1,
               sums_of.drive, target.adds<kConstantDrive>());
}

// `states` has room for those before, between and after the steps of a chunk, `written` for what its steps write.
static void walk_panel(const Problem& p, const Gradients& g, Rows& rows, Sums& sums_of, Block* states, Block* written,
                       Block* gradient, int64_t b, int64_t h, int64_t first) {
  const int64_t end = least(first + p.panel, p.V), size = p.blocks() * p.K, puts = p.blocks() * R1;
  const int64_t part = first / p.panel;
  auto columns = [&](int64_t j) { return least(kColumns, end - j); };
  for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
    const LastT* from = g.last.at(b, h, 0) + j * g.last.s[4];
    for (int64_t i = 0; i < p.K; ++i)
      gradient[block * p.K + i] = load(from + i * g.last.s[3], g.last.s[4], columns(j));
  }
  for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk) {
    const int64_t start = chunk * p.chunk, stop = least(start + p.chunk, p.T);
    for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
      const Acc* from = g.checkpoints.at(b, h, chunk) + j * g.checkpoints.s[4];
      for (int64_t i = 0; i < p.K; ++i)
        states[block * p.K + i] = load(from + i * g.checkpoints.s[3], g.checkpoints.s[4], columns(j));
    }
    for (int64_t t = start; t < stop; ++t) {
      rows.read(p, b, h, t);
      Block* before = states + (t - start) * size;
      for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
        Block* from = before + block * p.K;
        advance<false>(p, rows, Place{b, h, t, j, columns(j)}, from, from + size,
                       written + (t - start) * puts + block * R1, nullptr);
      }
    }
    for (int64_t t = stop - 1; t >= start; --t) {
      const Target target{t, chunk, t == stop - 1};
      rows.read(p, b, h, t);
      const Block* before = states + (t - start) * size;
      for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
        const Place at{b, h, t, j, columns(j)};
        const Block* from = before + block * p.K;
        const Block* puts_of = written + (t - start) * puts + block * R1;
        if (block == 0) reverse<true>(p, g, rows, sums_of, at, target, from, from + size, puts_of, gradient);
        else reverse<false>(p, g, rows, sums_of, at, target, from, from + size, puts_of, gradient + block * p.K);
      }
      store_rows(p, g, sums_of, Place{b, h, t, first, 0}, target, part);
    }
  }
  if constexpr (kGradState) {
    for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
      Acc* to = g.state.at(b, h, 0) + j * g.state.s[4];
      for (int64_t i = 0; i < p.K; ++i) store(to + i * g.state.s[3], g.state.s[4], columns(j), gradient[block * p.K + i]);
    }
  }
}

extern "C" void scan_backward(void* const* pointers, const int64_t* numbers) {
  Problem p;
  Gradients g;
  Arguments arguments(pointers, numbers);
  arguments.take(p);
  arguments.take(g.checkpoints);
  arguments.take(g.reads);
  arguments.take(g.last);
  arguments.take(g.state); arguments.take(g.decay); arguments.take(g.left); arguments.take(g.right);
  arguments.take(g.erase); arguments.take(g.drive); arguments.take(g.query);
  const int64_t size = p.blocks() * p.K, steps = least(p.chunk, p.T);
  const int64_t states = (steps + 1) * size, written = steps * p.blocks() * R1;
#pragma omp parallel num_threads(p.threads)
  {
    Memory memory(Rows::bytes(p.K) + Sums::bytes(p.K) + Memory::padded(states * sizeof(Block)) +
                  Memory::padded(written * sizeof(Block)) + Memory::padded(size * sizeof(Block)));
    Rows rows(memory, p.K);
    Sums sums_of(memory, p.K);
    Block* own_states = memory.take<Block>(states);
    Block* own_written = memory.take<Block>(written);
    Block* gradient = memory.take<Block>(size);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < p.B * p.H * p.panels(); ++task) {
      const int64_t head = task / p.panels(), panel = task % p.panels();
      walk_panel(p, g, rows, sums_of, own_states, own_written, gradient, head / p.H, head % p.H, panel * p.panel);
    }
  }
}
"""
