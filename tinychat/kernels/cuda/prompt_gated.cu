// Prompts: f(gate @ x, up @ x) as halves, in the order the next product reads. GROUPED: of (token, chosen expert)
// pairs, a block per tile of pairs of one expert; else of tokens. A block makes TILE_ROWS rows.
#include "activation.cuh"
#include "halves.cuh"

struct Args {
  u16 *dst = nullptr;  // (pairs or tokens, padded(rows))
  const u8 *gate = nullptr;
  const u8 *up = nullptr;
  const u16 *x = nullptr;  // (tokens, padded(columns))
  const int *state = nullptr;
  const int *tiles = nullptr;  // see group_pairs.cu
  const int *order = nullptr;
  const float *gate_bias = nullptr;  // (experts, rows)
  const float *up_bias = nullptr;
  const float *counts = nullptr;  // (tokens): results are multiplied by theirs
};

DEVICE void run(const Args &a) {
  constexpr int TILE_ROWS = Tile::ROWS * 16 * (WARPS / Tile::SPLIT), PITCH = padded(Gate::ROWS);
  DYNAMIC_SHARED(pool);
  __shared__ int row_of[Tile::TOKENS], out_of[Tile::TOKENS];
  const int lane = threadIdx.x % 32, first_row = blockIdx.x * TILE_ROWS + group_of<Tile>() * Tile::ROWS * 16;
  int expert = 0, first = blockIdx.y * Tile::TOKENS, count = 0;
  if (GROUPED) {
    grid_wait();
    const volatile int *tile = a.tiles + 3 * blockIdx.y;  // all are read at once
    const int tiles = *(const volatile int *)a.tiles;
    expert = tile[1];
    first = tile[2];
    count = tile[3];
    if ((int)blockIdx.y >= tiles) return;
  } else count = min(Tile::TOKENS, a.state[COUNT] - first);
  if (count <= 0) return;
  Rows<Gate, Gate::ROWS, Tile> gate;
  Rows<Up, Up::ROWS, Tile> up;
  gate.point(a.gate, expert, first_row);
  up.point(a.up, expert, first_row);
  if constexpr (Tile::SCALES)
    up.share(gate.share((u8 *)pool + ACTIVATIONS<Tile>, expert, first_row), expert, first_row);
  gate.start();
  up.start();
  if (!GROUPED) grid_wait();
  if (threadIdx.x < Tile::TOKENS) {
    const int t = threadIdx.x, pair = t >= count ? -1 : GROUPED ? a.order[first + t] : first + t;
    out_of[t] = pair;
    row_of[t] = pair < 0 ? -1 : pair / PAIRS_PER_ROW;
  }
  __syncthreads();
  multiply<Tile, Gate::COLS>(pool, a.x, row_of, count, gate, up);
  if (part_of<Tile>()) return;
#pragma unroll
  for (int m = 0; m < Tile::ROWS; m++)
#pragma unroll
    for (int n = 0; n < Tile::TOKENS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = first_row + m * 16 + i * 8 + lane / 4, mine = n * 8 + lane % 4 * 2 + row % 2;
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float g = gate.acc[m][n][2 * i + j], u = up.acc[m][n][2 * i + j];
          if (a.gate_bias && row < Gate::ROWS) g += a.gate_bias[expert * Gate::ROWS + row];
          if (a.up_bias && row < Gate::ROWS) u += a.up_bias[expert * Gate::ROWS + row];
          v[j] = row < Gate::ROWS ? activated<Activation>(g, u) : 0;  // the padding must be zeros
          const int t = n * 8 + lane % 4 * 2 + j;
          if (a.counts && t < count) v[j] *= a.counts[out_of[t]];
        }
        const u32 two = pair_of_rows(v[0], v[1]);
        if (mine < count && row < PITCH) *(u32 *)(a.dst + (u64)out_of[mine] * PITCH + place(row & ~1)) = two;
      }
}
