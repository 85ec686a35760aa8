// x = STREAM_SCALE * (x + SCALE * RMSNorm(src)), or without ADD as if x were 0: one row per block.

struct Args {
  float *x = nullptr;          // (tokens, COLS)
  const float *src = nullptr;  // (tokens, COLS)
  const float *gain = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[THREADS / 32];
  grid_wait();
  const u64 row = blockIdx.x;
  if ((int)row >= a.state[COUNT]) return;
  const float *src = a.src + row * COLS;
  float ss = 0;
  for (int i = threadIdx.x; i < COLS; i += THREADS) ss += src[i] * src[i];
  ss = warp_sum(ss);
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = ss;
  __syncthreads();
  ss = 0;
  for (int i = 0; i < THREADS / 32; i++) ss += red[i];
  const float r = SCALE * rsqrt_(ss / COLS + EPS);
  for (int i = threadIdx.x; i < COLS; i += THREADS)
    a.x[row * COLS + i] = STREAM_SCALE * ((ADD ? a.x[row * COLS + i] : 0) + src[i] * r * a.gain[i]);
}
