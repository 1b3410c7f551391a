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
    for (int64_t i = 0; i < p.K; ++i) {
      states[block * p.K + i] = kState ? load(p.state.at(b, h, 0) + i * p.state.s[3] + j * p.state.s[4], p.state.s[4],
                                              least(kColumns, end - j))
                                       : zero();
    }
  }
  for (int64_t t = 0; t < p.T; ++t) {
    rows.read(p, b, h, t);
    for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
      const Place at{b, h, t, j, least(kColumns, end - j)};
      Block* state = states + block * p.K;
      if (out.checkpoints.data && t % p.chunk == 0) {
        Acc* to = out.checkpoints.at(b, h, t / p.chunk) + j;
        for (int64_t i = 0; i < p.K; ++i) store(to + i * out.checkpoints.s[3], 1, at.count, state[i]);
      }
      advance<true>(p, rows, at, state, state, written, reads);
      OutT* to = out.reads.at(b, h, t) + j * out.reads.s[4];
      for (int64_t q = 0; q < Q; ++q) store(to + q * out.reads.s[3], out.reads.s[4], at.count, reads[q]);
    }
  }
  for (int64_t block = 0, j = first; j < end; ++block, j += kColumns) {
    LastT* to = out.last.at(b, h, 0) + j * out.last.s[4];
    for (int64_t i = 0; i < p.K; ++i)
      store(to + i * out.last.s[3], out.last.s[4], least(kColumns, end - j), states[block * p.K + i]);
  }
}

extern "C" void scan_forward(void* const* pointers, const int64_t* numbers) {
  Problem p;
  Results out;
  Arguments arguments(pointers, numbers);
  arguments.take(p);
  arguments.take(out.reads);
  arguments.take(out.last);
  arguments.take(out.checkpoints);
  const int64_t states = p.blocks() * p.K;
#pragma omp parallel num_threads(p.threads)
  {
    Memory memory(Rows::bytes(p.K) + Memory::padded(states * sizeof(Block)));
    Rows rows(memory, p.K);
    Block* own = memory.take<Block>(states);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < p.B * p.H * p.panels(); ++task) {
      const int64_t head = task / p.panels(), panel = task % p.panels();
      run_panel(p, out, rows, own, head / p.H, head % p.H, panel * p.panel);
    }
  }
}
"""
