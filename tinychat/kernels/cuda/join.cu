// The input of multi-token prediction: RMSNorm(embedding of each token), and behind it RMSNorm(hidden row of the position
// before), which is 0 in front of the first. A block for each half of a token.

struct Args {
  float *dst = nullptr;  // (tokens, 2, dim)
  const u8 *w = nullptr;
  const u16 *hidden = nullptr;  // (positions, dim)
  const float *token_gain = nullptr;
  const float *hidden_gain = nullptr;
  const int *history = nullptr;  // token of every position
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int DIM = Table::COLS, N = (DIM + THREADS - 1) / THREADS;
  __shared__ float red[THREADS / 32];
  grid_wait();
  const int t = blockIdx.x, pos = a.state[POS] + t;
  if (t >= a.state[COUNT]) return;
  const bool before = blockIdx.y;
  const u64 row = before ? (u64)max(pos - 1, 0) : (u64)a.history[pos];
  const float *gain = before ? a.hidden_gain : a.token_gain;
  float v[N], ss = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = threadIdx.x + i * THREADS;
    v[i] = 0;
    if (k < DIM && !before) v[i] = SCALE * weight_at<Table::TYPE>(a.w, Table::BLOCKS, row * DIM + k);
    if (k < DIM && before && pos > 0) v[i] = half_to_float(a.hidden[row * DIM + k]);
    ss += v[i] * v[i];
  }
  const float r = rsqrt_(warps_sum(ss, red) / DIM + EPS);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = threadIdx.x + i * THREADS;
    if (k < DIM) a.dst[((u64)t * 2 + before) * DIM + k] = v[i] * r * gain[k];
  }
}
