// Decode: f(gate, up) of every chosen expert, behind one another in dst, then of the shared expert. Every block chooses
// the experts for itself, and does so for TOGETHER columns of a step, one after the other; the shared expert's weights are
// read once for them, and its blocks come first, since they need not wait to know their weights. The kernel behind may
// start when this one's blocks have seen the router's logits: it reads them before its grid_wait(), or the choice, which
// the first block leaves as soon as it has made it.
#include "gated.cuh"
#include "routing.cuh"

struct Args {
  const float *x = nullptr;  // (columns, COLS)
  float *dst = nullptr;      // (columns, chosen * rows + rows of the shared expert), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const float *router = nullptr;  // its logits, (columns, experts)
  const float *selection_bias = nullptr;
  const float *gain = nullptr;
  const u8 *gate = nullptr;
  const u8 *up = nullptr;
  const int *state = nullptr;
  const u8 *shared_gate = nullptr;
  const u8 *shared_up = nullptr;
  const float *gate_bias = nullptr;  // (experts, rows)
  const float *up_bias = nullptr;
  const float *expert_scale = nullptr;
  u64 *choice = nullptr;  // (columns, chosen), for experts_down
  int *routes = nullptr;  // (ROUTE_SLOTS, ROUTES): the layer's place in the first, for the chosen experts of a token; not of drafts
};

// For experts_down and the host: the experts of `count` columns, and their weights.
DEVICE void leave_choice(const Args &a, int column, int count, const SelectionBias<Choice> &bias) {
  constexpr int TOP = Choice::CHOSEN;
  __shared__ int ids[TOGETHER][TOP];
  __shared__ float weights[TOGETHER][TOP];
  const int warp = threadIdx.x / 32;
  if (warp >= count) return;
  choose<true>(a.router + warp * Choice::EXPERTS, bias, ids[warp], weights[warp]);
  weigh<Choice>(a.expert_scale, ids[warp], weights[warp]);
  leave<Choice>(a.choice + (column + warp) * TOP, ids[warp], weights[warp]);
  if (a.routes)
    for (int k = threadIdx.x % 32; k < TOP; k += 32)
      a.routes[(a.state[POS] + column + warp) % ROUTE_SLOTS * ROUTES + k] = ids[warp][k];
}

// Results of TOGETHER columns as int8 blocks, from value `at` on, in each column's own place.
template <int SIZE> struct PutColumns {
  float *values;  // (TOGETHER, 32)
  u32 *q;
  Scale *s;
  int at;
  DEVICE void operator()(int column, int row, float v) const { values[column * 32 + row % 32] = v; }
  DEVICE void finish(int row) const {
    __syncthreads();
    for (int c = threadIdx.x / 32; c < TOGETHER; c += WARPS)
      put_block<1>(
          values[c * 32 + threadIdx.x % 32], q + c * SIZE / 4, s + c * SIZE / 32, 0, SIZE / 32, (at + row) / 32);
  }
};
template <int SIZE> DEVICE auto columns(const Args &a, float *values, int at) {
  if constexpr (OUT_QUANTISED) return PutColumns<SIZE>{values, a.dst_q, a.dst_s, at};
  else return Put{a.dst + at, nullptr, 1, 0, SIZE};
}

DEVICE void run(Args a) {
  constexpr int TOP = Choice::CHOSEN, FF = Gate::ROWS, SIZE = TOP * FF + SharedGate::ROWS;
  constexpr int SHARED_BLOCKS = Pairs<SharedGate, SharedUp, SharedSpread, 1>::blocks();
  const Shared sh = staging<COLS, QUANTISED, FLOATING, TOGETHER>(nullptr);
  __shared__ int ids[TOGETHER][TOP];
  __shared__ float values[32 * TOGETHER];
  const int b = (int)blockIdx.x - 1 - SHARED_BLOCKS, warp = threadIdx.x / 32;
  const int column = COLUMNS == 1 ? 0 : blockIdx.y * TOGETHER;  // the block's first
  const int count = COLUMNS == 1 ? 1 : min(a.state[COUNT] - column, TOGETHER);
  if (count <= 0) return;
  a.router += column * Choice::EXPERTS;
  if constexpr (OUT_QUANTISED) {
    a.dst_q += column * SIZE / 4;
    a.dst_s += column * SIZE / 32;
  } else a.dst += column * SIZE;
  const Plain x{a.x + column * COLS, COLS};
  Stage<COLS, NORMED, QUANTISED, FLOATING, TOGETHER> stage;
  const auto norm = [&](int c) { return stage.norm(EPS, sh, c); };
  SelectionBias<Choice> bias;
  const bool chooses = blockIdx.x == 0;  // for others
  if ((chooses || b >= 0) && warp < count) bias.load(a.selection_bias);
  if (chooses) {
    grid_wait();
    leave_choice(a, column, count, bias);
    return;
  }
  stage.prefetch(a.gain);
  if (b >= 0) {
    using Rows = Pairs<Gate, Up, Spread, 1>;
    const int slot = b / EXPERT_BLOCKS, part = b % EXPERT_BLOCKS;
    Rows rows;
    static_assert(TOGETHER <= WARPS, "a warp chooses the experts of a column");
    grid_wait();
    stage.load(x);
    if (warp < count) choose<false>(a.router + warp * Choice::EXPERTS, bias, ids[warp], nullptr);
    __syncthreads();
    rows.prefetch(a.gate, a.up, ids[0][slot], part);
    stage.finish(x, sh);
    const auto put = columns<SIZE>(a, values, slot * FF);
#pragma unroll 1
    for (int c = 0; c < count; c++) {
      if (c) rows.prefetch(a.gate, a.up, ids[c][slot], part);
      const Shared own{sh.q + c * COLS / 16, sh.s + c * COLS / 32, sh.f + c * COLS, sh.red};
      rows.run(own, ids[c][slot], part, norm, put, a.gate_bias, a.up_bias, c);
    }
    put.finish(Rows::first(part));
  } else if constexpr (SharedGate::ROWS > 0) {
    using Rows = Pairs<SharedGate, SharedUp, SharedSpread, TOGETHER>;
    const int part = blockIdx.x - 1;
    Rows rows;
    rows.prefetch(a.shared_gate, a.shared_up, 0, part);
    grid_wait();
    stage.load(x);
    stage.finish(x, sh);
    const auto put = columns<SIZE>(a, values, TOP * FF);
    rows.run(sh, 0, part, norm, put, nullptr, nullptr);
    put.finish(Rows::first(part));
  }
}
