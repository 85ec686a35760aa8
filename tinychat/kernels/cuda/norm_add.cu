// x = STREAM_SCALE * (x + SCALE * RMSNorm(src)), or without ADD as if x were 0: one row per block.

struct Args {
  float *x = nullptr;          // (tokens, COLS)
  const float *src = nullptr;  // (tokens, COLS)
  const float *gain = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int N = COLS / 4, V = (N + THREADS - 1) / THREADS;  // vectors: all, those of a thread
  static_assert(COLS % 4 == 0, "rows are whole vectors");
  __shared__ float red[THREADS / 32];
  F4 gain[V], y[V], x[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    const V4 v = ldc16(a.gain + 4 * min((int)threadIdx.x + i * THREADS, N - 1));
    gain[i] = F4{unbits(v.x), unbits(v.y), unbits(v.z), unbits(v.w)};
  }
  grid_wait();
  const u64 row = blockIdx.x;
  if ((int)row >= a.state[COUNT]) return;
  F4 *to = (F4 *)(a.x + row * COLS);
  const F4 *from = (const F4 *)(a.src + row * COLS);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int at = threadIdx.x + i * THREADS;
    y[i] = at < N ? from[at] : F4{0, 0, 0, 0};
    x[i] = ADD && at < N ? to[at] : F4{0, 0, 0, 0};
  }
  float ss = 0;
#pragma unroll
  for (int i = 0; i < V; i++) ss += y[i].x * y[i].x + y[i].y * y[i].y + y[i].z * y[i].z + y[i].w * y[i].w;
  const float r = SCALE * rsqrt_(warps_sum(ss, red) / COLS + EPS);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int at = threadIdx.x + i * THREADS;
    const F4 g = gain[i];
    if (at < N)
      to[at] = F4{STREAM_SCALE * (x[i].x + y[i].x * r * g.x), STREAM_SCALE * (x[i].y + y[i].y * r * g.y),
          STREAM_SCALE * (x[i].z + y[i].z * r * g.z), STREAM_SCALE * (x[i].w + y[i].w * r * g.w)};
  }
}
