// Decode: f(gate, up) of every chosen expert, behind one another in dst, then of the shared expert. Every block
// chooses the experts for itself. The kernel behind may start when this one's blocks have seen the router's logits: it
// reads them before its grid_wait(). In a verify step an expert's rows are read once for all columns that have chosen it
// (quantised weights; else a block has one column, and the experts that several choose come from the cache).
#include "gated.cuh"
#include "routing.cuh"
#include "tiles.cuh"

struct Args {
  const float *x = nullptr;  // (columns, COLS)
  const V4 *x_q = nullptr;   // the same where TILED
  const Scale *x_s = nullptr;
  const float *norms = nullptr;  // (columns): what remains of RMSNorm there
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
};

// The C columns of a verify step: ROUTED_BLOCKS blocks for the chosen experts, the others for the shared one.
template <int C> DEVICE void tiled(const Args &a) {
  constexpr int TOP = Choice::CHOSEN, FF = Gate::ROWS, SIZE = TOP * FF + SharedGate::ROWS;
  DYNAMIC_SHARED(pool);
  __shared__ float values[32 * C];
  __shared__ Chosen<Choice, C> chosen;
  const Quantised input{a.x_q, a.x_s};
  // f(gate, up) of matrix `expert`, in slot `slot` of a column's results
  const auto made = [&](int column, int expert, int row, float gate, float up) {
    const float norm = a.norms[column];
    float g = mul_rn(gate, norm), u = mul_rn(up, norm);
    if (expert >= 0 && a.gate_bias) g += a.gate_bias[expert * FF + row];
    if (expert >= 0 && a.up_bias) u += a.up_bias[expert * FF + row];
    return activated<Activation>(g, u);
  };
  const auto keep = [&](int column, int slot, int row, float v) {
    if constexpr (OUT_QUANTISED) values[column * 32 + row % 32] = v;
    else a.dst[column * SIZE + slot * FF + row] = v;
  };
  const auto block_done = [&](int column, int slot, int row) {  // by a warp
    if constexpr (OUT_QUANTISED)
      put_block<1>(values[column * 32 + threadIdx.x % 32], a.dst_q + column * SIZE / 4, a.dst_s + column * SIZE / 32, 0,
          SIZE / 32, (slot * FF + row) / 32);
  };
  constexpr int UNIT = OUT_QUANTISED && TILE == 1 ? 2 : 1;
  if (blockIdx.x < ROUTED_BLOCKS) {
    Tiles<Gate, Up, Spread, C, UNIT, true, true> tiles;
    grid_wait();
    chosen.decide(a.router, a.selection_bias, nullptr, a.state[COUNT]);
    tiles.matrices = chosen.experts;
    tiles.all = chosen.count * tiles.OF_MATRIX;
    tiles.begin(pool, a.gate, a.up, blockIdx.x, ROUTED_BLOCKS);
    tiles.begin(input);
    tiles.run(
        input,
        [&](int which, int column, int row, float gate, float up) {
          const int slot = chosen.slots[which][column];
          if (slot >= 0) keep(column, slot, row, made(column, chosen.experts[which], row, gate, up));
        },
        [&](int which, int row) {
          if constexpr (!OUT_QUANTISED) return;
          __syncthreads();
          for (int c = threadIdx.x / 32; c < C; c += WARPS)
            if (chosen.slots[which][c] >= 0) block_done(c, chosen.slots[which][c], row);
        },
        blockIdx.x);
  } else if constexpr (SharedGate::ROWS > 0) {
    Tiles<SharedGate, SharedUp, SharedSpread, C, UNIT, true> tiles;
    const int b = blockIdx.x - ROUTED_BLOCKS;
    tiles.begin(pool, a.shared_gate, a.shared_up, b, gridDim.x - ROUTED_BLOCKS);
    grid_wait();
    tiles.begin(input);
    tiles.run(
        input, [&](int, int column, int row, float gate, float up) { keep(column, TOP, row, made(column, -1, row, gate, up)); },
        [&](int, int row) {
          if constexpr (!OUT_QUANTISED) return;
          __syncthreads();
          for (int c = threadIdx.x / 32; c < C; c += WARPS) block_done(c, TOP, row);
        },
        b);
  }
}

DEVICE void run(Args a) {
  if constexpr (TILED) return tiled<COLUMNS>(a);
  constexpr int TOP = Choice::CHOSEN, FF = Gate::ROWS, ROUTED = EXPERT_BLOCKS * TOP, SIZE = TOP * FF + SharedGate::ROWS;
  const Shared sh = staging<COLS, QUANTISED, FLOATING, 1>(nullptr);
  __shared__ int ids[TOP];
  __shared__ float weights[TOP], values[32];
  const int b = blockIdx.x, column = COLUMNS == 1 ? 0 : blockIdx.y;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.x += column * COLS;
  a.router += column * Choice::EXPERTS;
  if constexpr (OUT_QUANTISED) {
    a.dst_q += column * SIZE / 4;
    a.dst_s += column * SIZE / 32;
  } else a.dst += column * SIZE;
  Stage<COLS, NORMED, QUANTISED, FLOATING, 1> stage;
  stage.prefetch(a.gain);
  if (b < ROUTED) {
    const int slot = b / EXPERT_BLOCKS;
    grid_wait();
    stage.load(Plain{a.x});
    if (threadIdx.x < 32) choose<Choice>(a.router, a.selection_bias, nullptr, ids, weights);
    __syncthreads();
    gated<Gate, Up, Spread, true>(
        a.gate, a.up, ids[slot], b % EXPERT_BLOCKS, stage, Plain{a.x}, sh, results<OUT_QUANTISED, SIZE, 1>(a, values, slot * FF),
        a.gate_bias, a.up_bias);
  } else if constexpr (SharedGate::ROWS > 0) {
    gated<SharedGate, SharedUp, SharedSpread, false>(
        a.shared_gate, a.shared_up, 0, b - ROUTED, stage, Plain{a.x}, sh, results<OUT_QUANTISED, SIZE, 1>(a, values, TOP * FF));
  }
}
