// GQA: one warp per head of q, k and v: optional RMSNorm of all, RoPE of q and k; q times QUERY_SCALE as halves into
// `queries`, k and v into the cache rows of this step's tokens. Gains are loaded before the wait; values and angles
// before the first use of either.
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
  constexpr int N = (KEY_DIM + 31) / 32, VN = (VALUE_DIM + 31) / 32;  // values of a lane
  __shared__ float head_values[8][KEY_DIM];
  const int t = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * 8 + warp;
  const bool is_q = item < HEADS, is_v = item >= HEADS + KV_HEADS;
  const int head = is_q ? item : is_v ? item - HEADS - KV_HEADS : item - HEADS, heads = is_q ? HEADS : KV_HEADS;
  const float *gains = (is_q ? a.q_gain : a.k_gain) + (NORM == ALL_HEADS ? head * KEY_DIM : 0);
  float gain[N], x[N];
#pragma unroll
  for (int n = 0; n < N; n++)
    gain[n] = NORM != NO_NORM && item < HEADS + KV_HEADS && lane + 32 * n < KEY_DIM ? gains[lane + 32 * n] : 1;
  grid_wait();
  const int pos = a.state[POS] + t, row = WINDOW ? pos - a.state[BASE] : pos;
  if (t >= a.state[COUNT] || item >= HEADS + 2 * KV_HEADS) return;
  if (is_v) {
    const float *src = a.v + ((u64)t * KV_HEADS + head) * VALUE_DIM;
    float v[VN], r = 1, ss = 0;
#pragma unroll
    for (int n = 0; n < VN; n++) v[n] = lane + 32 * n < VALUE_DIM ? src[lane + 32 * n] : 0;
    if (VALUE_NORM) {
#pragma unroll
      for (int n = 0; n < VN; n++) ss += v[n] * v[n];
      r = rsqrt_(warp_sum(ss) / VALUE_DIM + EPS);
    }
#pragma unroll
    for (int n = 0; n < VN; n++)
      if (lane + 32 * n < VALUE_DIM)
        a.v_cache[((u64)row * KV_HEADS + head) * VALUE_DIM + lane + 32 * n] = float_to_half(v[n] * r);
    return;
  }
  const float *all = (is_q ? a.q : a.k) + (u64)t * heads * KEY_DIM, *src = all + head * KEY_DIM;
  float *mine = head_values[warp];
  F2 angle[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int i = lane + 32 * n;
    x[n] = i < KEY_DIM ? src[i] : 0;
    angle[n] = i < ROPE_DIMS ? a.table[(u64)pos * (ROPE_DIMS / 2) + pair_of(i)] : F2{1, 0};
  }
  float r = 1, ss = 0;
  if (NORM == PER_HEAD) {
#pragma unroll
    for (int n = 0; n < N; n++) ss += x[n] * x[n];
    r = rsqrt_(warp_sum(ss) / KEY_DIM + EPS);
  } else if (NORM == ALL_HEADS) {
    for (int i = lane; i < heads * KEY_DIM; i += 32) ss += all[i] * all[i];
    r = rsqrt_(warp_sum(ss) / (heads * KEY_DIM) + EPS);
  }
#pragma unroll
  for (int n = 0; n < N; n++)
    if (lane + 32 * n < KEY_DIM) mine[lane + 32 * n] = NORM != NO_NORM ? x[n] * r * gain[n] : x[n];
  warp_sync();
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int i = lane + 32 * n;
    if (i >= KEY_DIM) break;
    const float y = i < ROPE_DIMS ? rotated(mine, angle[n], i) : mine[i];
    if (is_q) a.queries[((u64)t * HEADS + head) * KEY_DIM + i] = float_to_half(y * QUERY_SCALE);
    else a.k_cache[((u64)row * KV_HEADS + head) * KEY_DIM + i] = float_to_half(y);
  }
}
