// f(gate, up) of C columns of activations. Constants: COLS, EPS, NORMED, Activation, QUANTISED, FLOATING.
#include "activation.cuh"
#include "matvec.cuh"

// The rows of block b of those of one matrix, spread as S: matrix `group` of G (gate) and U (up).
template <class G, class U, class S, int C> struct Pairs {
  static constexpr int K = COLS, ROWS = G::ROWS, LPR = S::LANES, R = S::ROWS_PER_LANE;
  static constexpr int N = 32 / LPR, MINE = (C + LPR - 1) / LPR;  // columns that a lane finishes
  Dot<G::TYPE, K, LPR, 1, R, S::DEPTH, C> gate;
  Dot<U::TYPE, K, LPR, 1, R, S::DEPTH, C> up;
  static DEVICE int unit(int b) { return (b * WARPS + threadIdx.x / 32) * R * N + threadIdx.x % 32 / LPR; }
  static DEVICE constexpr int first(int b) { return b * WARPS * R * N; }  // row
  static DEVICE constexpr int blocks() { return (ROWS + first(1) - 1) / first(1); }
  DEVICE void aim(int group, int b) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int row = ROWS % first(1) ? min(unit(b) + r * N, ROWS - 1) : unit(b) + r * N;
      gate.row[r] = G::START + (u64)group * G::STRIDE + row;
      up.row[r] = U::START + (u64)group * U::STRIDE + row;
    }
  }
  DEVICE void prefetch(const u8 *wg, const u8 *wu, int group, int b) {
    aim(group, b);
    gate.point(wg, G::BLOCKS);
    up.point(wu, U::BLOCKS);
    gate.prefetch();
    up.prefetch();
  }
  // put(column, row, value), columns counted from `first_column`; norm(column) is what remains of RMSNorm. The first
  // weights of block `next`, unless it is -1, are on their way behind it.
  template <class Norm, class Epilogue>
  DEVICE void run(const Shared &sh, int group, int b, const Norm &norm_of, const Epilogue &put, const float *gate_bias,
      const float *up_bias, int first_column = 0, int next = -1) {
    const int lane = threadIdx.x % LPR;
    float norm[MINE], g[MINE][R], u[MINE][R];
#pragma unroll
    for (int m = 0; m < MINE; m++) norm[m] = norm_of(C == 1 ? first_column : min(m * LPR + lane, C - 1));
    if constexpr (C == 1) {
      gate.staged = up.staged = K;
#pragma unroll
      for (int i = 0; i < gate.NI; i++) {
        gate.step(i, sh, 0, next >= 0, [&] { aim(group, next); });
        up.step(i, sh, 0, next >= 0, [] {});
      }
      gate.across_lanes();
      up.across_lanes();
    } else gate.run(sh, K);
#pragma unroll
    for (int m = 0; m < MINE; m++)  // before `up` runs, so that the sums of all columns need no registers then
#pragma unroll
      for (int r = 0; r < R; r++) g[m][r] = mul_rn(gate.mine(m * LPR, r), norm[m]);
    if (C > 1) {
      warp_sync();  // else the compiler keeps the staged columns in registers, which do not suffice
      up.run(sh, K);
    }
#pragma unroll
    for (int m = 0; m < MINE; m++)
#pragma unroll
      for (int r = 0; r < R; r++) u[m][r] = mul_rn(up.mine(m * LPR, r), norm[m]);
    gate.clear();
    up.clear();
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const int column = C == 1 ? 0 : m * LPR + lane;
      if (C == 1 ? lane == 0 : column < C)
#pragma unroll
        for (int r = 0; r < R; r++)
          if (ROWS % first(1) == 0 || unit(b) + r * N < ROWS) {
            const int row = unit(b) + r * N;
            if (gate_bias) g[m][r] = add_rn(g[m][r], gate_bias[group * ROWS + row]);
            if (up_bias) u[m][r] = add_rn(u[m][r], up_bias[group * ROWS + row]);
            put(first_column + column, row, activated<Activation>(g[m][r], u[m][r]));
          }
    }
  }
};
