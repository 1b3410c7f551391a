"""C++ of one step of a scan, forward: what the passes in both directions share. Terms of the state come in between."""

from __future__ import annotations

BEFORE_TERMS = """
struct Problem {
  int64_t B, H, T, K, V, chunk, panel, threads;
  View<const StateT> state;
  View<const DecayT> decay;
  View<const LeftT> left;
  View<const RightT> right;
  View<const EraseT> erase;
  View<const DriveT> drive;
  View<const QueryT> query;
  Leaves leaves;
  int64_t panels() const { return (V + panel - 1) / panel; }
  int64_t blocks() const { return (panel + kColumns - 1) / kColumns; }
  int64_t chunks() const { return (T + chunk - 1) / chunk; }
  // Rows of the state: one, and known to the compiler, where there are no keys.
  INLINE_MEMBER int64_t rows() const {
    if constexpr (kElements) return 1;
    else return K;
  }
};

// Reads views off the arguments in the order in which they were put there.
class Arguments {
 public:
  Arguments(void* const* pointers, const int64_t* numbers) : pointers_(pointers), numbers_(numbers) {}
  int64_t number() { return *numbers_++; }
  template <class T> void take(View<T>& view) {
    view.data = static_cast<T*>(const_cast<void*>(static_cast<const void*>(*pointers_++)));
    view.s = numbers_;
    numbers_ += 6;
  }
  void take(Problem& p) {
    for (int64_t* each : {&p.B, &p.H, &p.T, &p.K, &p.V, &p.chunk, &p.panel, &p.threads}) *each = number();
    take(p.state); take(p.decay); take(p.left); take(p.right); take(p.erase); take(p.drive); take(p.query);
  }

 private:
  void* const* pointers_;
  const int64_t* numbers_;
};

// Where a block of columns is, and how many of them there are.
struct Place { int64_t b, h, t, column, count; };

// What all columns share of the operands of one step, in memory where there is one element next to the other.
class Rows {
 public:
  const Acc* left[R1];
  const Acc* erase[R1];
  const Acc* query[Q1];
  const Acc* decay;
  const Acc* drive;

  static int64_t bytes(int64_t K) { return (2 * R1 + Q1 + 2) * Memory::padded(K * sizeof(Acc)); }
  Rows(Memory& memory, int64_t K) {
    for (auto& each : left_) each = memory.take<Acc>(K);
    for (auto& each : erase_) each = memory.take<Acc>(K);
    for (auto& each : query_) each = memory.take<Acc>(K);
    decay_ = memory.take<Acc>(K);
    drive_ = memory.take<Acc>(K);
  }
  INLINE_MEMBER void read(const Problem& p, int64_t b, int64_t h, int64_t t) {
    for (int64_t r = 0; r < R; ++r) {
      left[r] = row(p.left.at(b, h, t) + r * p.left.s[3], p.left.s[4], p.K, left_[r]);
      if constexpr (kErase) erase[r] = row(p.erase.at(b, h, t) + r * p.erase.s[3], p.erase.s[4], p.K, erase_[r]);
    }
    if constexpr (kQuery) {
      for (int64_t q = 0; q < Q; ++q)
        query[q] = row(p.query.at(b, h, t) + q * p.query.s[3], p.query.s[4], p.K, query_[q]);
    }
    if constexpr (kDecay == kScalar || kDecay == kKey)
      decay = row(p.decay.at(b, h, t), p.decay.s[3], kDecay == kKey ? p.K : 1, decay_);
    if constexpr (kDrive == kScalar || kDrive == kKey)
      drive = row(p.drive.at(b, h, t), p.drive.s[3], kDrive == kKey ? p.K : 1, drive_);
  }

 private:
  Acc *left_[R1], *erase_[R1], *query_[Q1], *decay_, *drive_;
};

constexpr bool varies(Kind kind) { return kind == kValue || kind == kFull; }

// A factor or summand of the state, for one row of it.
template <Kind kind, class T> class Term {
 public:
  INLINE_MEMBER Term(const View<const T>& view, const Acc* shared, const Place& at) : shared_(shared) {
    if constexpr (varies(kind)) {
      from_ = view.at(at.b, at.h, at.t) + at.column * view.s[4];
      rows_ = view.s[3], columns_ = view.s[4], count_ = at.count;
    }
    if constexpr (kind == kValue) block_ = load(from_, columns_, count_);
  }
  INLINE_MEMBER auto operator[](int64_t i) const {
    if constexpr (kind == kScalar) return shared_[0];
    else if constexpr (kind == kKey) return shared_[i];
    else if constexpr (kind == kValue) return block_;
    else return load(from_ + i * rows_, columns_, count_);
  }

 private:
  const Acc* shared_;
  const T* from_ = nullptr;
  int64_t rows_ = 0, columns_ = 0, count_ = 0;
  Block block_;
};

"""

AFTER_TERMS = """
// What a row of the state adds to what is read of it.
INLINE void look(const Rows& rows, int64_t i, const Block& x, Block* found) {
  if constexpr (kQuery) {
    for (int64_t q = 0; q < Q; ++q) add_product(found[q], rows.query[q][i], x);
  } else {
    found[0] = x;
  }
}

// One row of a state, or of its gradient, without what the decay drops.
template <class D> INLINE Block kept(Block x, const D& decay, int64_t i) {
  if constexpr (kDrops) clear(x, decay[i], kDropped);
  return x;
}

// Takes the columns of a state one step on; `written` is what is put under each key, `reads` what the queries find.
template <bool kReads>
INLINE void advance(const Problem& p, const Rows rows, const Place& at, const Block* from, Block* to, Block* written,
                    Block* reads) {
  Block put[R1], found[Q1];
  const DecayTerm decay(p, rows, at);
  const RightTerm right(p, rows, at);
  for (int64_t r = 0; r < R; ++r) {
    put[r] = right[r];
    if constexpr (kErase) {
      Block even = zero(), odd = zero();
      int64_t i = 0;
      for (; i + 1 < p.rows(); i += 2) {
        add_product(even, rows.erase[r][i], kept(from[i], decay, i));
        add_product(odd, rows.erase[r][i + 1], kept(from[i + 1], decay, i + 1));
      }
      if (i < p.rows()) add_product(even, rows.erase[r][i], kept(from[i], decay, i));
      add(even, odd);
      subtract(put[r], even);
    }
  }
  for (int64_t q = 0; q < Q; ++q) found[q] = zero();
  const DriveTerm drive(p, rows, at);
  for (int64_t i = 0; i < p.rows(); ++i) {
    Block x = from[i];
    if constexpr (kReads && kBefore) look(rows, i, x, found);
    if constexpr (kDecay != kNone) x = kept(x, decay, i), scale(x, decay[i]);
    for (int64_t r = 0; r < R; ++r) add_product(x, rows.left[r][i], put[r]);
    if constexpr (kDrive != kNone) add(x, drive[i]);
    to[i] = x;
    if constexpr (kReads && !kBefore) look(rows, i, x, found);
  }
  for (int64_t r = 0; r < R; ++r) written[r] = put[r];
  if constexpr (kReads) for (int64_t q = 0; q < Q; ++q) reads[q] = found[q];
}
"""
