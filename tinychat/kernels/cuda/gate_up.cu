// Decode: dst = f(gate @ n, up @ n), n = RMSNorm(x), or x.
#include "gated.cuh"

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

DEVICE void run(const Args &a) {
  const Shared sh = staging<COLS, QUANTISED, FLOATING, COLUMNS>(nullptr);
  __shared__ float values[32 * COLUMNS];
  Stage<COLS, NORMED, QUANTISED, FLOATING, COLUMNS> stage;
  stage.prefetch(a.gain);
  gated<Gate, Up, Spread, false>(a.gate, a.up, 0, blockIdx.x, stage, Plain{a.x, COLS}, sh,
      results<OUT_QUANTISED, Gate::ROWS, COLUMNS>(a, values, 0));
}
