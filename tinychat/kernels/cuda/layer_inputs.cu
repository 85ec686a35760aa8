// Per-layer embeddings of this step's tokens (kernels/ops.py, LayerInputs): one layer of a token per block.

struct Args {
  float *x = nullptr;  // (tokens, layers, WIDTH)
  const u8 *w = nullptr;
  const float *gain = nullptr;
  const int *history = nullptr;  // token of every position
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[THREADS / 32];
  grid_wait();
  const u64 t = blockIdx.y;
  if ((int)t >= a.state[COUNT]) return;
  const u64 start = blockIdx.x * WIDTH, row = a.history[a.state[POS] + t];
  float *x = a.x + t * Table::COLS + start, ss = 0;
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) ss += x[i] * x[i];
  const float r = rsqrt_(warps_sum(ss, red) / WIDTH + EPS);
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
    const float e = weight_at<Table::TYPE>(a.w, Table::BLOCKS, row * Table::COLS + start + i);
    x[i] = (x[i] * r * a.gain[i] + SCALE * e) * 0.70710678f;
  }
}
