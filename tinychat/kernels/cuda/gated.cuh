// f(gate, up) of one token's activations. Constants: COLS, EPS, NORMED, Activation, QUANTISED, FLOATING.
#include "activation.cuh"
#include "matvec.cuh"

// By block b of those of one matrix: put(row, value) for its rows in matrix `group` of G (gate) and U (up), spread as
// S. LATE: the weights to read are known only after the wait, so the caller waits and loads the activations; else they
// come after the weights.
template <class G, class U, class S, bool LATE, class Epilogue>
DEVICE void gated(const u8 *wg, const u8 *wu, int group, int b, Stage<COLS, NORMED, QUANTISED, FLOATING> &stage,
    const float *src, Shared sh, const Epilogue &put, const float *gate_bias = nullptr, const float *up_bias = nullptr) {
  constexpr int K = COLS, ROWS = G::ROWS, LPR = S::LANES, R = S::ROWS_PER_LANE;
  Dot<G::TYPE, K, LPR, 1, R, S::DEPTH> gate;
  Dot<U::TYPE, K, LPR, 1, R, S::DEPTH> up;
  constexpr int N = 32 / LPR;
  const int unit = (b * WARPS + threadIdx.x / 32) * R * N + threadIdx.x % 32 / LPR;
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int row = unit + r * N < ROWS ? unit + r * N : ROWS - 1;
    gate.row[r] = G::START + (u64)group * G::STRIDE + row;
    up.row[r] = U::START + (u64)group * U::STRIDE + row;
  }
  gate.point(wg, G::BLOCKS);
  up.point(wu, U::BLOCKS);
  gate.prefetch();
  up.prefetch();
  if (!LATE) {  // weights known beforehand: the step's input comes after them
    grid_wait();
    stage.load(Plain{src});
  }
  stage.finish(Plain{src}, sh);
  const float norm = stage.norm(EPS, sh);
  gate.run(sh, K / 32);
  up.run(sh, K / 32);
  if (threadIdx.x % LPR == 0)
#pragma unroll
    for (int r = 0; r < R; r++)
      if (unit + r * N < ROWS) {
        const int row = unit + r * N;
        float g = gate.acc[r] * norm, u = up.acc[r] * norm;
        if (gate_bias) g += gate_bias[group * ROWS + row];
        if (up_bias) u += up_bias[group * ROWS + row];
        put(row, activated<Activation>(g, u));
      }
  put.finish(b * WARPS * R * N);
}
