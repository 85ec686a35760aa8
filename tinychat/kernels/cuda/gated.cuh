// f(gate, up) of C columns of activations. Constants: COLS, EPS, NORMED, Activation, QUANTISED, FLOATING.
#include "activation.cuh"
#include "matvec.cuh"

// By block b of those of one matrix: put(column, row, value) for its rows in matrix `group` of G (gate) and U (up), spread as
// S. LATE: the weights to read are known only after the wait, so the caller waits and loads the activations; else they
// come after the weights.
template <class G, class U, class S, bool LATE, int C, class Epilogue>
DEVICE void gated(const u8 *wg, const u8 *wu, int group, int b, Stage<COLS, NORMED, QUANTISED, FLOATING, C> &stage,
    const Plain &src, Shared sh, const Epilogue &put, const float *gate_bias = nullptr, const float *up_bias = nullptr) {
  constexpr int K = COLS, ROWS = G::ROWS, LPR = S::LANES, R = S::ROWS_PER_LANE;
  Dot<G::TYPE, K, LPR, 1, R, S::DEPTH, C> gate;
  Dot<U::TYPE, K, LPR, 1, R, S::DEPTH, C> up;
  constexpr int N = 32 / LPR, MINE = (C + LPR - 1) / LPR;  // columns that a lane finishes
  const int lane = threadIdx.x % LPR;
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
    stage.load(src);
  }
  stage.finish(src, sh);
  float norm[MINE];
#pragma unroll
  for (int m = 0; m < MINE; m++) norm[m] = stage.norm(EPS, sh, C == 1 ? 0 : min(m * LPR + lane, C - 1));
  gate.run(sh, K);
  float g[MINE][R];  // before `up` runs, so that the sums of all columns need no registers then
#pragma unroll
  for (int m = 0; m < MINE; m++)
#pragma unroll
    for (int r = 0; r < R; r++) g[m][r] = mul_rn(gate.mine(m * LPR, r), norm[m]);
  if (C > 1) warp_sync();  // else the compiler keeps the staged columns in registers, which do not suffice
  up.run(sh, K);
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    const int column = C == 1 ? 0 : m * LPR + lane;
    if (C == 1 ? lane == 0 : column < C)
#pragma unroll
      for (int r = 0; r < R; r++)
        if (unit + r * N < ROWS) {
          const int row = unit + r * N;
          float u = mul_rn(up.mine(m * LPR, r), norm[m]);
          if (gate_bias) g[m][r] += gate_bias[group * ROWS + row];
          if (up_bias) u += up_bias[group * ROWS + row];
          put(column, row, activated<Activation>(g[m][r], u));
        }
  }
  put.finish(b * WARPS * R * N);
}
