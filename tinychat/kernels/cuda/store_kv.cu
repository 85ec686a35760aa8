// GQA: one warp per head of q, k and v: optional RMSNorm of all, RoPE of q and k; q times QUERY_SCALE as halves into
// `queries`, k and v into the cache rows of this step's tokens.
#include "rope.cuh"

struct Args {
  u16 *queries = nullptr;  // (tokens, heads, key_dim)
  u16 *k_cache = nullptr;
  u16 *v_cache = nullptr;
  const float *q = nullptr;
  const float *k = nullptr;
  const float *v = nullptr;
  const float *q_gain = nullptr;
  const float *k_gain = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, rope_dims / 2)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float head_values[8][KEY_DIM];
  grid_wait();
  const int t = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * 8 + warp,
            pos = a.state[POS] + t;
  if (t >= a.state[COUNT] || item >= HEADS + 2 * KV_HEADS) return;
  const bool is_q = item < HEADS, is_v = item >= HEADS + KV_HEADS;
  const int head = is_q ? item : is_v ? item - HEADS - KV_HEADS : item - HEADS, heads = is_q ? HEADS : KV_HEADS;
  if (is_v) {
    const float *src = a.v + ((u64)t * KV_HEADS + head) * VALUE_DIM;
    float r = 1;
    if (VALUE_NORM) {
      float ss = 0;
      for (int i = lane; i < VALUE_DIM; i += 32) ss += src[i] * src[i];
      r = rsqrt_(warp_sum(ss) / VALUE_DIM + EPS);
    }
    for (int i = lane; i < VALUE_DIM; i += 32)
      a.v_cache[((u64)pos * KV_HEADS + head) * VALUE_DIM + i] = float_to_half(src[i] * r);
    return;
  }
  const float *all = (is_q ? a.q : a.k) + (u64)t * heads * KEY_DIM, *src = all + head * KEY_DIM;
  const float *gain = is_q ? a.q_gain : a.k_gain;
  float *mine = head_values[warp];
  float r = 1;
  if (NORM != NO_NORM) {
    float ss = 0;
    const int n = NORM == PER_HEAD ? KEY_DIM : heads * KEY_DIM;
    const float *from = NORM == PER_HEAD ? src : all;
    for (int i = lane; i < n; i += 32) ss += from[i] * from[i];
    r = rsqrt_(warp_sum(ss) / n + EPS);
    if (NORM == ALL_HEADS) gain += head * KEY_DIM;
  }
  for (int i = lane; i < KEY_DIM; i += 32) mine[i] = NORM != NO_NORM ? src[i] * r * gain[i] : src[i];
  warp_sync();
  for (int i = lane; i < KEY_DIM; i += 32) {
    const float y = i < ROPE_DIMS ? rotated(mine, a.table + (u64)pos * (ROPE_DIMS / 2), i) : mine[i];
    if (is_q) a.queries[((u64)t * HEADS + head) * KEY_DIM + i] = float_to_half(y * QUERY_SCALE);
    else a.k_cache[((u64)pos * KV_HEADS + head) * KEY_DIM + i] = float_to_half(y);
  }
}
