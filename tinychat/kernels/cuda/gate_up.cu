// Decode: dst = f(gate @ n, up @ n), n = RMSNorm(x), or x.
#include "gated.cuh"
#include "tiles.cuh"

struct Args {
  const float *x = nullptr;  // (columns, COLS)
  float *dst = nullptr;  // (columns, rows), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const float *gain = nullptr;
  const u8 *gate = nullptr;
  const u8 *up = nullptr;
  const int *state = nullptr;
};

// The C columns of a verify step.
template <int C> DEVICE void tiled(const Args &a) {
  DYNAMIC_SHARED(pool);
  __shared__ float red[33 * C], values[32 * C];
  constexpr int CLASSES = Spread::LANES * Spread::SPLIT, GROUPS = CLASSES < WARPS ? WARPS / CLASSES : 1;
  Tiles<Gate, Up, Spread, C, 1, OUT_QUANTISED ? 2 / GROUPS : 1, true, false> tiles;
  const Shared sh{pool, (Scale *)(pool + C * COLS / 16), nullptr, red};
  tiles.begin(pool, a.gate, a.up, 0, blockIdx.x, BLOCKS);
  Stage<COLS, NORMED, true, false, C, true, NORM_THREADS> stage;
  stage.prefetch(a.gain);
  grid_wait();
  const Plain input{a.x, COLS};
  stage.load(input);
  stage.finish(input, sh);
  float *norms = red + 32 * C;
  norms_of(norms, C, stage, EPS, sh);
  const auto put = results<OUT_QUANTISED, Gate::ROWS, C>(a, values, 0);
  tiles.run(
      input,
      [&](int column, int row, float gate, float up) {
        put(column, row, activated<Activation>(mul_rn(gate, norms[column]), mul_rn(up, norms[column])));
      },
      [&](int row) { put.finish(row); }, blockIdx.x);
}

DEVICE void run(const Args &a) {
  if constexpr (COLUMNS > 1 && !FLOATING) return tiled<COLUMNS>(a);
  const Shared sh = staging<COLS, QUANTISED, FLOATING, COLUMNS>(nullptr);
  __shared__ float values[32 * COLUMNS];
  Stage<COLS, NORMED, QUANTISED, FLOATING, COLUMNS> stage;
  stage.prefetch(a.gain);
  gated<Gate, Up, Spread, false>(a.gate, a.up, 0, blockIdx.x, stage, Plain{a.x, COLS}, sh,
      results<OUT_QUANTISED, Gate::ROWS, COLUMNS>(a, values, 0));
}
