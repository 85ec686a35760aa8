// Decode: dst = f(gate @ n, up @ n), n = RMSNorm(x), or x. A block that takes rows twice has the next ones on their way
// while it finishes the first.
#include "gated.cuh"
#include "tiles.cuh"

struct Args {
  const float *x = nullptr;  // (columns, COLS)
  const V4 *x_q = nullptr;   // the same of quantised matrices, where there are several columns
  const Scale *x_s = nullptr;
  const float *norms = nullptr;  // (columns): what remains of RMSNorm there
  float *dst = nullptr;          // (columns, rows), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const float *gain = nullptr;
  const u8 *gate = nullptr;
  const u8 *up = nullptr;
  const int *state = nullptr;
  float *halves = nullptr;  // (rows / 32, columns, 32): results of int8 blocks that two thread blocks make
  int *tickets = nullptr;   // (rows / 32): those that have made their half
};

// Half of an int8 block's rows, from `row` on, are made: the thread block that comes second quantises.
template <int C, class Put> DEVICE void finish_half(const Args &a, const Put &put, float *values, int row) {
  __shared__ bool second;
  const int unit = row / 32, i = threadIdx.x, at = i / 16 * 32 + i % 16, mine = row % 32;
  volatile float *halves = a.halves + unit * 32 * C;
  __syncthreads();
  if (i < 16 * C) halves[at + mine] = values[at + mine];
  __syncthreads();
  if (i == 0) {
    fence();
    second = atomicAdd(&a.tickets[unit], 1) == 1;
    if (second) a.tickets[unit] = 0;
    fence();
  }
  __syncthreads();
  if (!second) return;
  if (i < 16 * C) values[at + 16 - mine] = halves[at + 16 - mine];
  put.finish(row - mine);
}

// The C columns of a verify step.
template <int C> DEVICE void tiled(const Args &a) {
  DYNAMIC_SHARED(pool);
  __shared__ float values[32 * C];
  constexpr int CLASSES = Spread::LANES * Spread::SPLIT, GROUPS = CLASSES < WARPS ? WARPS / CLASSES : 1;
  constexpr int UNIT = OUT_QUANTISED && TILE * GROUPS == 1 ? 2 : 1;
  Tiles<Gate, Up, Spread, C, UNIT, true, BLOCKS> tiles;
  tiles.begin(pool, a.gate, a.up, blockIdx.x);
  grid_wait();
  const Quantised input{a.x_q, a.x_s};
  tiles.begin(input, blockIdx.x);
  const auto put = results<OUT_QUANTISED, Gate::ROWS, C>(a, values, 0);
  tiles.run(
      input, [&](int column, int) { return NORMED ? a.norms[column] : 1.f; },
      [&](int column, int row, float gate, float up, float norm) {
        put(column, row, activated<Activation>(mul_rn(gate, norm), mul_rn(up, norm)));
      },
      [&](int row, bool half) {
        if (UNIT == 2 && half) finish_half<C>(a, put, values, row);
        else put.finish(row / 32 * 32);
      },
      blockIdx.x);
}

DEVICE void run(const Args &a) {
  if constexpr (COLUMNS > 1 && !FLOATING) return tiled<COLUMNS>(a);
  const Shared sh = staging<COLS, QUANTISED, FLOATING, COLUMNS>(nullptr);
  __shared__ float values[2][32 * COLUMNS];
  using Rows = Pairs<Gate, Up, Spread, COLUMNS>;
  Rows rows;
  Stage<COLS, NORMED, QUANTISED, FLOATING, COLUMNS> stage;
  const Plain x{a.x, COLS};
  stage.prefetch(a.gain);
  rows.prefetch(a.gate, a.up, 0, blockIdx.x);
  grid_wait();
  stage.load(x);
  stage.finish(x, sh);
  const auto norm = [&](int column) { return stage.norm(EPS, sh, column); };
#pragma unroll 1
  for (int b = blockIdx.x, turn = 0;; b += GRID, turn ^= 1) {  // of the two, the other is still read
    const bool again = GRID < BLOCKS && b + GRID < BLOCKS;
    const auto put = results<OUT_QUANTISED, Gate::ROWS, COLUMNS>(a, values[turn], 0);
    rows.run(sh, 0, b, norm, put, nullptr, nullptr, 0, again ? b + GRID : -1);
    put.finish(Rows::first(b));
    if (!again) break;
  }
}
