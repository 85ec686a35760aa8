// A verify step: each column of the input of products in tensor cores (tiles.cuh) as int8 blocks, a thread block per
// column, with the bits that the kernels of single steps give it. NORMED: times the gain; the rest of RMSNorm is left
// in `norms`.
#include "matvec.cuh"

struct Args {
  const float *src = nullptr;  // (columns, COLS)
  const float *gain = nullptr;
  V4 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  float *norms = nullptr;  // (columns)
};

DEVICE void run(const Args &a) {
  grid_launch();
  __shared__ float red[32];
  const int column = blockIdx.x;
  const Shared to{a.dst_q + column, a.dst_s + column, nullptr, red};
  Stage<COLS, NORMED, true, false, 1, COLUMNS> stage;
  stage.prefetch(a.gain);
  grid_wait();
  const Plain input{a.src + column * COLS};
  stage.load(input);
  stage.finish(input, to);
  if (NORMED && threadIdx.x == 0) a.norms[column] = stage.norm(EPS, to, 0);
}
