// Embedding, rotary embedding, and the rows of the KV cache. Queries leave here as halves, times attention's scale and log2(e).

DEVICE F2 turn(float a, float b, F2 angle) { return F2{a * angle.x - b * angle.y, a * angle.y + b * angle.x}; }
// Rotated value d of a head's `v` (DIMS values), from its pair's cos and sin.
template <int DIMS, bool NEOX> DEVICE float rotated(const float *v, const F2 *angles, int d) {
  const int p = NEOX ? d % (DIMS / 2) : d / 2;
  const F2 r = turn(v[NEOX ? p : 2 * p], v[NEOX ? p + DIMS / 2 : 2 * p + 1], angles[p]);
  return (NEOX ? d < DIMS / 2 : d % 2 == 0) ? r.x : r.y;
}

template <int T, int DIM> DEVICE void embed(float *x, const u8 *w, u64 blocks, const int *history, const int *state) {
  grid_wait();
  const int t = blockIdx.y, k = blockIdx.x * 256 + threadIdx.x;
  if (t >= state[COUNT] || k >= DIM) return;
  x[(u64)t * DIM + k] = weight_at<T>(w, blocks, (u64)history[state[POS] + t] * DIM + k);
}

// MLA, one block of 256 threads: the cache row of token t: RMSNorm(kv[:KV_LORA]) * gain, then RoPE(kv[KV_LORA:]).
template <int KV_LORA, int DIMS, bool NEOX>
DEVICE void latent_row(u16 *cache, const float *kv, const float *gain, float eps, const F2 *table, int pos, int t, float *red) {
  kv += (u64)t * (KV_LORA + DIMS);
  cache += (u64)(pos + t) * (KV_LORA + DIMS);
  float ss = 0;
  for (int i = threadIdx.x; i < KV_LORA; i += 256) ss += kv[i] * kv[i];
  ss = warp_sum(ss);
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = ss;
  __syncthreads();
  ss = 0;
  for (int i = 0; i < 8; i++) ss += red[i];
  const float r = rsqrt_(ss / KV_LORA + eps);
  for (int i = threadIdx.x; i < KV_LORA; i += 256) cache[i] = float_to_half(kv[i] * r * gain[i]);
  for (int i = threadIdx.x; i < DIMS; i += 256)
    cache[KV_LORA + i] = float_to_half(rotated<DIMS, NEOX>(kv + KV_LORA, table + (u64)(pos + t) * (DIMS / 2), i));
}
// MLA: the RoPE part of head `head` of q, by one warp, to its place behind the absorbed part.
template <int HEADS, int NOPE, int KV_LORA, int DIMS, bool NEOX>
DEVICE void latent_query(u16 *q_latent, const float *q, const F2 *table, float scale, int pos, int t, int head) {
  if (head >= HEADS) return;
  for (int i = threadIdx.x % 32; i < DIMS; i += 32)
    q_latent[((u64)t * HEADS + head) * (KV_LORA + DIMS) + KV_LORA + i] =
        float_to_half(scale * rotated<DIMS, NEOX>(q + ((u64)t * HEADS + head) * (NOPE + DIMS) + NOPE, table + (u64)(pos + t) * (DIMS / 2), i));
}

// GQA, one warp per head of q, k and v: norm (0 none, 1 per head, 2 over the whole projection), RoPE; q times `scale` to q_out, k and v to the cache.
template <int HEADS, int KV_HEADS, int HD, int DIMS, bool NEOX, int NORM>
DEVICE void rope_store(u16 *q_out, u16 *k_cache, u16 *v_cache, const float *q, const float *k, const float *v, const float *q_gain, const float *k_gain,
                       float eps, float scale, const F2 *table, const int *state) {
  __shared__ float head_values[8][HD];
  grid_wait();
  const int t = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * 8 + warp, pos = state[POS] + t;
  if (t >= state[COUNT] || item >= HEADS + 2 * KV_HEADS) return;
  const bool is_q = item < HEADS, is_v = item >= HEADS + KV_HEADS;
  const int head = is_q ? item : is_v ? item - HEADS - KV_HEADS : item - HEADS, heads = is_q ? HEADS : KV_HEADS;
  const float *all = (is_q ? q : is_v ? v : k) + (u64)t * heads * HD, *src = all + head * HD;
  float *mine = head_values[warp];
  if (is_v) {
    for (int i = lane; i < HD; i += 32) v_cache[((u64)pos * KV_HEADS + head) * HD + i] = float_to_half(src[i]);
    return;
  }
  float r = 1;
  const float *gain = is_q ? q_gain : k_gain;
  if (NORM) {
    float ss = 0;
    const int n = NORM == 1 ? HD : heads * HD;
    const float *from = NORM == 1 ? src : all;
    for (int i = lane; i < n; i += 32) ss += from[i] * from[i];
    r = rsqrt_(warp_sum(ss) / n + eps);
    if (NORM == 2) gain += head * HD;
  }
  for (int i = lane; i < HD; i += 32) mine[i] = NORM ? src[i] * r * gain[i] : src[i];
  warp_sync();
  for (int i = lane; i < HD; i += 32) {
    const float y = i < DIMS ? rotated<DIMS, NEOX>(mine, table + (u64)pos * (DIMS / 2), i) : mine[i];
    if (is_q) q_out[((u64)t * HEADS + head) * HD + i] = float_to_half(y * scale);
    else k_cache[((u64)pos * KV_HEADS + head) * HD + i] = float_to_half(y);
  }
}
