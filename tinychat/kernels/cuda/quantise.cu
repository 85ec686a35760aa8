// A verify step: the columns of the input of products in tensor cores (tiles.cuh) as int8 blocks, with the bits that
// the kernels of single steps give them: a vector a thread. NORMED: times the gain; what is left of RMSNorm a block
// more of each column makes, as the threads of the single step's kernel do.
#include "matvec.cuh"

struct Args {
  const float *src = nullptr;  // (columns, COLS)
  const float *gain = nullptr;
  V4 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  float *norms = nullptr;  // (columns)
};

DEVICE void run(const Args &a) {
  grid_launch();  // what comes behind reads weights only before its wait
  constexpr int N = COLS / 4, PIECES = (N + THREADS - 1) / THREADS;
  const int column = blockIdx.x, piece = blockIdx.y;
  const Plain input{a.src + column * COLS};
  if (NORMED && piece == PIECES) {
    __shared__ float red[32];
    grid_wait();
    F4 x[PIECES];
    float ss = 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int at = threadIdx.x + i * THREADS;
      x[i] = at < N ? input(0, 4 * at) : F4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) ss = add_rn(ss, squares(x[i]));
    ss = warps_sum(ss, red);
    if (threadIdx.x == 0) a.norms[column] = rsqrt_(ss / COLS + EPS);
  } else {
    const int at = threadIdx.x + piece * THREADS;
    const V4 g = NORMED && at < N ? ldc16(a.gain + 4 * at) : V4{};
    grid_wait();
    F4 v = at < N ? input(0, 4 * at) : F4{0, 0, 0, 0};
    if (NORMED) v = times(v, F4{unbits(g.x), unbits(g.y), unbits(g.z), unbits(g.w)});
    stage_codes<COLS, COLUMNS>(Shared{a.dst_q, a.dst_s, nullptr, nullptr}, column, at, v);
  }
}
