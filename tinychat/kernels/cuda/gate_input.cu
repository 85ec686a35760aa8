// What a layer takes of its per-layer embedding (kernels/ops.py, GateInput): one token per block. UNIT: `gated` was
// made from the rows of `x` over their root mean square, since halves do not hold all of x.
#include "activation.cuh"

struct Args {
  float *gated = nullptr;         // (tokens, WIDTH)
  const float *inputs = nullptr;  // (tokens, PITCH)
  const float *x = nullptr;       // (tokens, COLS)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[THREADS / 32];
  grid_wait();
  const u64 t = blockIdx.x;
  if ((int)t >= a.state[COUNT]) return;
  float by = 1;
  if (UNIT) {
    float ss = 0;
    for (int i = threadIdx.x; i < COLS; i += THREADS) ss += a.x[t * COLS + i] * a.x[t * COLS + i];
    by = 1 / rsqrt_(warps_sum(ss, red) / COLS + EPS);
  }
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
    float *y = a.gated + t * WIDTH + i;
    *y = activated<Activation>(*y * by, a.inputs[t * PITCH + START + i]);
  }
}
