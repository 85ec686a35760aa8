// Decode: f(gate, up) of every chosen expert, behind one another in dst, then of the shared expert. Every block
// chooses the experts for itself. The kernel behind may start when this one's blocks have seen the router's logits: it
// reads them before its grid_wait().
#include "gated.cuh"
#include "routing.cuh"

struct Args {
  const float *x = nullptr;
  float *dst = nullptr;  // (chosen * rows + rows of the shared expert), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const float *router = nullptr;  // its logits
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

DEVICE void run(const Args &a) {
  constexpr int TOP = Choice::CHOSEN, FF = Gate::ROWS, ROUTED = EXPERT_BLOCKS * TOP, SIZE = TOP * FF + SharedGate::ROWS;
  const Shared sh = staging<COLS, QUANTISED, FLOATING>(nullptr);
  __shared__ int ids[TOP];
  __shared__ float weights[TOP], values[32];
  const int b = blockIdx.x;
  Stage<COLS, NORMED, QUANTISED, FLOATING> stage;
  stage.prefetch(a.gain);
  if (b < ROUTED) {
    const int slot = b / EXPERT_BLOCKS;
    grid_wait();
    stage.load(Plain{a.x});
    if (threadIdx.x < 32) choose<Choice>(a.router, a.selection_bias, nullptr, ids, weights);
    __syncthreads();
    gated<Gate, Up, Spread, true>(
        a.gate, a.up, ids[slot], b % EXPERT_BLOCKS, stage, a.x, sh, results<OUT_QUANTISED, SIZE>(a, values, slot * FF),
        a.gate_bias, a.up_bias);
  } else if constexpr (SharedGate::ROWS > 0) {
    gated<SharedGate, SharedUp, SharedSpread, false>(
        a.shared_gate, a.shared_up, 0, b - ROUTED, stage, a.x, sh, results<OUT_QUANTISED, SIZE>(a, values, TOP * FF));
  }
}
