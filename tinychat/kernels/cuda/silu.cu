// Prefill: dst = silu(gate) * up, one block per 256 values of a token.

struct Args {
  float *dst = nullptr;  // (tokens, OUT_PITCH)
  const float *gate = nullptr;  // (tokens, COLS)
  const float *up = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  grid_wait();
  const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
  if (blockIdx.y >= a.state[COUNT] || i >= COLS) return;
  const float v = a.gate[t * COLS + i];
  a.dst[t * OUT_PITCH + i] = v / (1.f + __expf(-v)) * a.up[t * COLS + i];
}
