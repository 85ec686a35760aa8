// Decode: f(gate, up) of every chosen expert, behind one another in dst, then of the shared expert. Every block
// chooses the experts for itself, for one column of the step: experts that several columns choose come from the cache. The kernel behind may start when this one's blocks have seen the router's logits: it
// reads them before its grid_wait().
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
};

DEVICE void run(Args a) {
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
