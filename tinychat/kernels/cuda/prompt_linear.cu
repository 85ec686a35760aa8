// Prompts: weights over the same activations. A block makes TILE_ROWS rows of one of them for Tile::TOKENS
// tokens. GROUPS: matrices of a weight over activations of their own, whose results stand GROUP_PITCH values apart.
#include "halves.cuh"

struct Args {
  void *dst[PARTS] = {};  // per weight (tokens, pitch) from `start` on, floats or halves
  const u8 *w[PARTS] = {};
  const float *bias[PARTS] = {};
  const u16 *x = nullptr;  // (tokens, GROUPS, padded(columns))
  const int *state = nullptr;
};

DEVICE float capped(float v) { return SOFTCAP == 0 ? v : SOFTCAP * tanhf(v / (SOFTCAP == 0 ? 1 : SOFTCAP)); }

// Part P's tile of rows number `tile` for the `number_of_tile`-th tokens.
template <class P> DEVICE void part(const Args &a, int number, int tile, int number_of_tile) {
  constexpr int TILE_ROWS = Tile::ROWS * 16 * (WARPS / Tile::SPLIT);
  DYNAMIC_SHARED(pool);
  __shared__ int row_of[Tile::TOKENS];
  const int lane = threadIdx.x % 32, first_row = tile * TILE_ROWS + group_of<Tile>() * Tile::ROWS * 16;
  const int tokens = (ALL_KEYS ? a.state[POS] : 0) + a.state[COUNT], first = number_of_tile * Tile::TOKENS,
            count = min(Tile::TOKENS, tokens - first);
  Rows<typename P::Weight, P::TOTAL, Tile> rows;
  const int group = GROUPS > 1 ? blockIdx.z : 0;
  rows.point(a.w[number], group, first_row);
  rows.start();
  if (threadIdx.x < Tile::TOKENS)
    row_of[threadIdx.x] = (int)threadIdx.x < count ? (first + (int)threadIdx.x) * GROUPS + group : -1;
  grid_wait();
  __syncthreads();
  multiply<Tile, P::Weight::COLS>(pool, a.x, row_of, count, rows);
  if (part_of<Tile>()) return;
#pragma unroll
  for (int m = 0; m < Tile::ROWS; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      constexpr int N = Tile::TOKENS / 8;
      const int row = first_row + m * 16 + i * 8 + lane / 4, t = lane % 4 * 2;
      if (HALF) {
#pragma unroll
        for (int n = 0; n < N; n++) {
          const u32 two = pair_of_rows(rows.acc[m][n][2 * i], rows.acc[m][n][2 * i + 1]);
          const int mine = n * 8 + t + row % 2;
          const int at = P::START + group * GROUP_PITCH + (row & ~1);
          if (mine < count && row < P::TOTAL)
            *(u32 *)((u16 *)a.dst[number] + (u64)(first + mine) * P::PITCH + (PLACED ? place(at) : at)) = two;
        }
      } else {
        float *dst = (float *)a.dst[number] + (u64)(first + t) * P::PITCH + P::START + row, before[N][2];
        const int there = row < P::TOTAL ? count - t : 0;
        const float bias = a.bias[number] && there > 0 ? a.bias[number][row] : 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int j = 0; j < 2; j++) before[n][j] = ADD && n * 8 + j < there ? dst[(n * 8 + j) * (u64)P::PITCH] : 0;
        if (ADD) warp_sync();  // all are read before one is written: else each store waits for a load of its own
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int j = 0; j < 2; j++)
            if (n * 8 + j < there)
              dst[(n * 8 + j) * (u64)P::PITCH] = before[n][j] + capped(SCALE * (rows.acc[m][n][2 * i + j] + bias));
      }
    }
}

template <class... P> DEVICE void parts(const Args &a, int number_of_tile, List<P...>) {
  int number = 0;
  ((P::FIRST_TILE <= (int)blockIdx.x && (int)blockIdx.x < P::FIRST_TILE + P::TILES
           ? part<P>(a, number, blockIdx.x - P::FIRST_TILE, number_of_tile)
           : (void)0,
       number++),
      ...);
}

DEVICE void run(const Args &a) {
  const int tokens = (ALL_KEYS ? a.state[POS] : 0) + a.state[COUNT];
  for (int i = blockIdx.y; i * Tile::TOKENS < tokens; i += gridDim.y) {
    parts(a, i, Parts());
    __syncthreads();
  }
}
