// Prefill: dst (pairs, rows) = the matrix of each pair's expert @ prepared row pair / PAIRS_PER_ROW. A pair is (token, chosen expert).
#include "matmul.cuh"

struct Args {
  const u8 *w = nullptr;
  const u32 *xq = nullptr;
  const F2 *xs = nullptr;
  const u16 *xh = nullptr;
  const int *state = nullptr;
  float *dst = nullptr;
  const int *tiles = nullptr;  // see group_pairs.cu
  const int *order = nullptr;
};

DEVICE void run(const Args &a) {
  grid_wait();
  if ((int)blockIdx.y >= a.tiles[0]) return;
  const int expert = a.tiles[1 + 3 * blockIdx.y], n = a.tiles[3 + 3 * blockIdx.y];
  const int *pairs = a.order + a.tiles[2 + 3 * blockIdx.y];
  matmul<Weight::TYPE, Weight::COLS, Weight::ROWS>(a.w, Weight::BLOCKS, Weight::START + (u64)expert * Weight::STRIDE, a.xq, a.xs, a.xh,
                                                   Weight::COLS, 0, Grouped{n, pairs, PAIRS_PER_ROW}, n, PairOut{a.dst, pairs, Weight::ROWS});
}
