// Decode: dst = f(gate @ n, up @ n), n = RMSNorm(x), or x.
#include "gated.cuh"

struct Args {
  const float *x = nullptr;
  float *dst = nullptr;  // (rows), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const float *gain = nullptr;
  const u8 *gate = nullptr;
  const u8 *up = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  const Shared sh = staging<COLS, QUANTISED, FLOATING>(nullptr);
  __shared__ float values[32];
  Stage<COLS, NORMED, QUANTISED, FLOATING> stage;
  stage.prefetch(a.gain);
  gated<Gate, Up, Spread, false>(
      a.gate, a.up, 0, blockIdx.x, stage, a.x, sh, results<OUT_QUANTISED, Gate::ROWS>(a, values, 0));
}
