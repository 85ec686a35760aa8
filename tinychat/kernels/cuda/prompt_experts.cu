// Prompts: dst (pairs, rows) = the matrix of each pair's expert @ the pair's activations. A pair is (token, chosen
// expert).
#include "halves.cuh"

struct Args {
  float *dst = nullptr;
  const u8 *w = nullptr;
  const u16 *x = nullptr;      // (pairs, padded(columns))
  const int *tiles = nullptr;  // see group_pairs.cu
  const int *order = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int TILE_ROWS = Tile::ROWS * 16 * (WARPS / Tile::SPLIT);
  DYNAMIC_SHARED(pool);
  __shared__ int row_of[Tile::TOKENS];
  const int lane = threadIdx.x % 32, first_row = blockIdx.x * TILE_ROWS + group_of<Tile>() * Tile::ROWS * 16;
  grid_wait();
  const volatile int *tile = a.tiles + 3 * blockIdx.y;  // all are read at once
  const int tiles = *(const volatile int *)a.tiles, expert = tile[1], first = tile[2], count = tile[3];
  if ((int)blockIdx.y >= tiles) return;
  Rows<Weight, Weight::ROWS, Tile> rows;
  rows.point(a.w, expert, first_row);
  if constexpr (Tile::SCALES) rows.share((u8 *)pool + ACTIVATIONS<Tile>, expert, first_row);
  rows.start();
  if (threadIdx.x < Tile::TOKENS) row_of[threadIdx.x] = (int)threadIdx.x < count ? a.order[first + threadIdx.x] : -1;
  __syncthreads();
  multiply<Tile, Weight::COLS>(pool, a.x, row_of, count, rows);
  if (part_of<Tile>()) return;
#pragma unroll
  for (int m = 0; m < Tile::ROWS; m++)
#pragma unroll
    for (int n = 0; n < Tile::TOKENS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = first_row + m * 16 + i / 2 * 8 + lane / 4, t = n * 8 + lane % 4 * 2 + i % 2;
        if (row < Weight::ROWS && t < count) a.dst[(u64)row_of[t] * Weight::ROWS + row] = rows.acc[m][n][i];
      }
}
