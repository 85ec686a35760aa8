// x (tokens, dim) = the rows of the embedding table of this step's tokens.

struct Args {
  float *x = nullptr;
  const u8 *w = nullptr;
  const int *history = nullptr;  // token of every position
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int DIM = Table::COLS;
  grid_wait();
  const int t = blockIdx.y, k = blockIdx.x * THREADS + threadIdx.x;
  if (t >= a.state[COUNT] || k >= DIM) return;
  const u64 row = a.history[a.state[POS] + t];
  a.x[(u64)t * DIM + k] = SCALE * weight_at<Table::TYPE>(a.w, Table::BLOCKS, row * DIM + k);
}
