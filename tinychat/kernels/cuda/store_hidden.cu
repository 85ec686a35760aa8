// What multi-token prediction reads of the layers: a row of halves per token, RMSNorm(x).

struct Args {
  u16 *hidden = nullptr;     // (positions, COLS)
  const float *x = nullptr;  // (tokens, COLS)
  const float *gain = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int N = (COLS + THREADS - 1) / THREADS;
  __shared__ float red[THREADS / 32];
  grid_wait();
  const int t = blockIdx.x;
  if (t >= a.state[COUNT]) return;
  float v[N], ss = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = threadIdx.x + i * THREADS;
    v[i] = k < COLS ? a.x[(u64)t * COLS + k] : 0;
    ss += v[i] * v[i];
  }
  const float r = rsqrt_(warps_sum(ss, red) / COLS + EPS);
  u16 *row = a.hidden + (u64)(a.state[POS] + t) * COLS;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = threadIdx.x + i * THREADS;
    if (k < COLS) row[k] = float_to_half(v[i] * r * a.gain[k]);
  }
}
