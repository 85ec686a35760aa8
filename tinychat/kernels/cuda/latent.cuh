// MLA: what goes into the cache and behind the absorbed part of the queries. Constants: HEADS, NOPE, KV_LORA,
// ROPE_DIMS, NEOX.
#include "rope.cuh"
#include "query_scale.cuh"

// By one block: a cache row, RMSNorm(kv[:KV_LORA]) * gain, then RoPE(kv[KV_LORA:]). `red`: a float for each warp.
struct LatentRow {
  static constexpr int N = (KV_LORA + THREADS - 1) / THREADS, R = (ROPE_DIMS + THREADS - 1) / THREADS;
  float value[N], gains[N], rope[R];
  F2 turned[R];
  DEVICE void prefetch(const float *gain, const F2 *angles) {  // what no kernel of this step writes
#pragma unroll
    for (int j = 0; j < N; j++) gains[j] = unbits(ldc4(gain + min((int)threadIdx.x + j * THREADS, KV_LORA - 1)));
#pragma unroll
    for (int j = 0; j < R; j++) turned[j] = angles[pair_of(min((int)threadIdx.x + j * THREADS, ROPE_DIMS - 1))];
  }
  DEVICE void load(const float *kv) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int i = threadIdx.x + j * THREADS;
      value[j] = i < KV_LORA ? kv[i] : 0;
    }
#pragma unroll
    for (int j = 0; j < R; j++) {
      const int i = threadIdx.x + j * THREADS;
      if (i < ROPE_DIMS) rope[j] = rotated(kv + KV_LORA, turned[j], i);
    }
  }
  // Each warp's part of the sum of squares; a barrier has to follow.
  DEVICE void sum(float *red) const {
    float ss = 0;
#pragma unroll
    for (int j = 0; j < N; j++) ss += value[j] * value[j];
    ss = warp_sum(ss);
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = ss;
  }
  DEVICE void store(u16 *row, const float *red) const {
    float ss = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) ss += red[i];
    const float r = rsqrt_(ss / KV_LORA + EPS);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int i = threadIdx.x + j * THREADS;
      if (i < KV_LORA) row[i] = float_to_half(value[j] * r * gains[j]);
    }
#pragma unroll
    for (int j = 0; j < R; j++) {
      const int i = threadIdx.x + j * THREADS;
      if (i < ROPE_DIMS) row[KV_LORA + i] = float_to_half(rope[j]);
    }
  }
};

// By one warp: the RoPE part of head `head` of q, to its place behind the absorbed part.
DEVICE void latent_query(u16 *q_latent, const float *q, const F2 *table, int pos, int t, int head) {
  if (head >= HEADS) return;
  const float *from = q + ((u64)t * HEADS + head) * (NOPE + ROPE_DIMS) + NOPE;
  const F2 *angles = table + (u64)(pos + t) * (ROPE_DIMS / 2);
  for (int i = threadIdx.x % 32; i < ROPE_DIMS; i += 32)
    q_latent[((u64)t * HEADS + head) * (KV_LORA + ROPE_DIMS) + KV_LORA + i] =
        float_to_half(query_scale(pos + t) * rotated(from, angles, i));
}
