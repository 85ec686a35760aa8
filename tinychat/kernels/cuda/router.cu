// Prompts: router logits and choice of experts for TOKENS tokens per block, float32 all through; and the tokens' normed values as halves.
#include "halves.cuh"
#include "routing.cuh"

struct Args {
  int *ids = nullptr;        // (tokens, chosen)
  float *weights = nullptr;  // (tokens, chosen)
  u16 *normed = nullptr;  // (tokens, padded(columns)), in the order the products read
  const u8 *w = nullptr;
  const float *x = nullptr;
  const float *gain = nullptr;
  const float *selection_bias = nullptr;
  const float *router_bias = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ F4 xn4[TOKENS * Weight::COLS / 4];
  __shared__ float logits[TOKENS][Choice::EXPERTS], my_weights[TOKENS][Choice::CHOSEN], red[8];
  __shared__ int my_ids[TOKENS][Choice::CHOSEN];
  float *xn = (float *)xn4;
  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TOKENS, count = a.state[COUNT];
  if (first >= count) return;
  for (int t = 0; t < TOKENS; t++) {
    const float *src = a.x + (u64)min(first + t, count - 1) * Weight::COLS;
    float ss = 0;
    for (int i = threadIdx.x; i < Weight::COLS; i += THREADS) ss += src[i] * src[i];
    ss = warp_sum(ss);
    __syncthreads();
    if (lane == 0) red[warp] = ss;
    __syncthreads();
    ss = 0;
    for (int i = 0; i < 8; i++) ss += red[i];
    const float r = rsqrt_(ss / Weight::COLS + EPS);
    for (int i = threadIdx.x; i < Weight::COLS; i += THREADS) xn[t * Weight::COLS + i] = src[i] * r * a.gain[i];
  }
  __syncthreads();
  for (int i = threadIdx.x * 2; i < min(TOKENS, count - first) * padded(Weight::COLS); i += THREADS * 2) {
    const int t = i / padded(Weight::COLS), k = i % padded(Weight::COLS);
    *(u32 *)(a.normed + (u64)(first + t) * padded(Weight::COLS) + place(k)) = k < Weight::COLS ? pack(xn[t * Weight::COLS + k], xn[t * Weight::COLS + k + 1]) : 0;
  }
  for (int e = warp; e < Choice::EXPERTS; e += 8) {
    float acc[TOKENS] = {};
#pragma unroll 4
    for (int j = lane; j < Weight::COLS / 8; j += 32) {
      Block<Weight::TYPE> f;
      fetch<Weight::TYPE>(f, a.w, Weight::BLOCKS, (u64)e * (Weight::COLS / 8) + j);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) acc[t] += dot<Weight::TYPE>(f, xn + t * Weight::COLS + j * 8);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const float v = warp_sum(acc[t]);
      if (lane == 0) logits[t][e] = a.router_bias ? v + a.router_bias[e] : v;
    }
  }
  __syncthreads();
  if (warp < TOKENS && first + warp < count) {
    choose<Choice>(logits[warp], a.selection_bias, my_ids[warp], my_weights[warp]);
    if (lane < Choice::CHOSEN) {
      a.ids[(first + warp) * Choice::CHOSEN + lane] = my_ids[warp][lane];
      a.weights[(first + warp) * Choice::CHOSEN + lane] = my_weights[warp][lane];
    }
  }
}
