// Prompts: router logits and choice of experts for TOKENS tokens per block, float32 all through; and the tokens' normed
// values as halves.
#include "halves.cuh"
#include "routing.cuh"

struct Args {
  int *ids = nullptr;        // (tokens, chosen)
  float *weights = nullptr;  // (tokens, chosen)
  u16 *normed = nullptr;     // (tokens, padded(columns)), in the order the products read
  const u8 *w = nullptr;
  const float *x = nullptr;
  const float *gain = nullptr;
  const float *selection_bias = nullptr;
  const float *router_bias = nullptr;
  const float *expert_scale = nullptr;
  const int *state = nullptr;
  float *counts = nullptr;  // (tokens): how often the shared expert counts, where there is a
  const float *shared_scale = nullptr;  // (columns)
};

DEVICE void run(const Args &a) {
  constexpr int COLS = Weight::COLS, TOGETHER = 4;  // experts of a warp at a time
  DYNAMIC_SHARED(pool);
  __shared__ float logits[TOKENS][Choice::EXPERTS], my_weights[TOKENS][Choice::CHOSEN];
  __shared__ int my_ids[TOKENS][Choice::CHOSEN];
  float *xn = (float *)pool;
  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TOKENS, count = a.state[COUNT];
  if (first >= count) return;
  if (warp < TOKENS) {  // a warp norms a token
    const float *src = a.x + (u64)min(first + warp, count - 1) * COLS;
    u16 *normed = a.normed + (u64)min(first + warp, count - 1) * padded(COLS);
    float ss = 0;
#pragma unroll 8
    for (int i = lane * 4; i < COLS; i += 128) {
      const F4 v = *(const F4 *)(src + i);
      ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float r = rsqrt_(warp_sum(ss) / COLS + EPS);
#pragma unroll 4
    for (int i = lane * 4; i < padded(COLS); i += 128) {
      F4 v = {0, 0, 0, 0};
      if (i < COLS) {
        const F4 x = *(const F4 *)(src + i), g = *(const F4 *)(a.gain + i);
        v = F4{x.x * r * g.x, x.y * r * g.y, x.z * r * g.z, x.w * r * g.w};
        *(F4 *)(xn + warp * COLS + i) = v;
      }
      *(u32 *)(normed + place(i)) = pack(v.x, v.y);
      *(u32 *)(normed + place(i) + 8) = pack(v.z, v.w);
    }
  }
  __syncthreads();
  if (a.shared_scale && warp < TOKENS && first + warp < count) {
    float acc = 0;
    for (int i = lane; i < COLS; i += 32) acc += xn[warp * COLS + i] * a.shared_scale[i];
    acc = warp_sum(acc);
    if (lane == 0) a.counts[first + warp] = 1.f / (1.f + expf(-acc));
  }
  for (int e = warp * TOGETHER; e < Choice::EXPERTS; e += WARPS * TOGETHER) {
    float acc[TOGETHER][TOKENS] = {};
#pragma unroll 2
    for (int j = lane; j < COLS / 8; j += 32) {
      Block<Weight::TYPE> f[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        fetch<Weight::TYPE>(f[i], a.w, Weight::BLOCKS, (u64)min(e + i, Choice::EXPERTS - 1) * (COLS / 8) + j);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) acc[i][t] += dot<Weight::TYPE>(f[i], xn + t * COLS + j * 8);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        const float v = warp_sum(acc[i][t]);
        if (lane == 0 && e + i < Choice::EXPERTS) logits[t][e + i] = a.router_bias ? v + a.router_bias[e + i] : v;
      }
  }
  __syncthreads();
  if (warp < TOKENS && first + warp < count) {
    choose<Choice>(logits[warp], a.selection_bias, a.expert_scale, my_ids[warp], my_weights[warp]);
    for (int k = lane; k < Choice::CHOSEN; k += 32) {
      a.ids[(first + warp) * Choice::CHOSEN + k] = my_ids[warp][k];
      a.weights[(first + warp) * Choice::CHOSEN + k] = my_weights[warp][k];
    }
  }
}
