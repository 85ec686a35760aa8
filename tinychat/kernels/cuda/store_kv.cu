// Prompts, GQA: one warp per head of q, k and v (heads.cuh): q times QUERY_SCALE as halves into `queries`, k and v into
// the cache rows of these tokens. Gains are loaded before the wait.
#include "heads.cuh"

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
  const int t = blockIdx.y, warp = threadIdx.x / 32, item = blockIdx.x * 8 + warp;
  const bool is_q = item < HEADS, is_v = item >= HEADS + KV_HEADS;
  const int head = is_q ? item : is_v ? item - HEADS - KV_HEADS : item - HEADS, heads = is_q ? HEADS : KV_HEADS;
  Rotated rotated;
  if (!is_v) rotated.gains(is_q ? a.q_gain : a.k_gain, head);
  grid_wait();
  const int pos = a.state[POS] + t, row = WINDOW ? pos - a.state[BASE] : pos;
  if (t >= a.state[COUNT] || item >= HEADS + 2 * KV_HEADS) return;
  if (is_v) {
    u16 *to = a.v_cache + ((u64)row * KV_HEADS + head) * VALUE_DIM;
    value_head(a.v + ((u64)t * KV_HEADS + head) * VALUE_DIM, [&](int i, float v) { to[i] = float_to_half(v); });
    return;
  }
  u16 *to = is_q ? a.queries + ((u64)t * HEADS + head) * KEY_DIM : a.k_cache + ((u64)row * KV_HEADS + head) * KEY_DIM;
  rotated.angles(a.table, pos);
  rotated.run((is_q ? a.q : a.k) + (u64)t * heads * KEY_DIM, heads, head, head_values[warp],
      [&](int i, float v) { to[i] = float_to_half(is_q ? v * QUERY_SCALE : v); });
}
