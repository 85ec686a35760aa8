// Prefill: dst (tokens, OUT_PITCH) = or += weight @ prepared activations (+ bias), for a matrix per blockIdx.z.
#include "matmul.cuh"

struct Args {
  const u8 *w = nullptr;
  const u32 *xq = nullptr;
  const F2 *xs = nullptr;
  const u16 *xh = nullptr;
  const int *state = nullptr;
  float *dst = nullptr;
  u16 *dst_half = nullptr;  // in place of dst where HALF
  const float *bias = nullptr;
};

// Where the results go from value `at` of dst on.
DEVICE auto results(const Args &a, u64 at) {
  if constexpr (HALF) return HalfOut{a.dst_half + at, OUT_PITCH, SCALE};
  else if constexpr (ADD) return AddOut{a.dst + at, OUT_PITCH, a.bias};
  else return Out{a.dst + at, OUT_PITCH, a.bias};
}

DEVICE void run(const Args &a) {
  const int first = blockIdx.y * TILE_TOKENS, g = blockIdx.z;
  if (first >= a.state[COUNT]) return;
  grid_wait();
  const int n = min(TILE_TOKENS, a.state[COUNT] - first);
  matmul<Weight::TYPE, Weight::COLS, Weight::ROWS>(a.w, Weight::BLOCKS, Weight::START + (u64)g * Weight::STRIDE, a.xq, a.xs, a.xh,
                                                   IN_PITCH, g * Weight::COLS, Dense{n, first}, n,
                                                   results(a, (u64)first * OUT_PITCH + g * OUT_STEP));
}
