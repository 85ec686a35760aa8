// MLA: what goes into the cache and behind the absorbed part of the queries. Constants: HEADS, NOPE, KV_LORA,
// ROPE_DIMS, NEOX.
#include "rope.cuh"
#include "query_scale.cuh"

// By one block of 256 threads: the cache row of token t, RMSNorm(kv[:KV_LORA]) * gain, then RoPE(kv[KV_LORA:]).
DEVICE void latent_row(u16 *cache, const float *kv, const float *gain, const F2 *table, int pos, int t, float *red) {
  kv += (u64)t * (KV_LORA + ROPE_DIMS);
  cache += (u64)(pos + t) * (KV_LORA + ROPE_DIMS);
  float ss = 0;
  for (int i = threadIdx.x; i < KV_LORA; i += 256) ss += kv[i] * kv[i];
  ss = warp_sum(ss);
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = ss;
  __syncthreads();
  ss = 0;
  for (int i = 0; i < 8; i++) ss += red[i];
  const float r = rsqrt_(ss / KV_LORA + EPS);
  for (int i = threadIdx.x; i < KV_LORA; i += 256) cache[i] = float_to_half(kv[i] * r * gain[i]);
  for (int i = threadIdx.x; i < ROPE_DIMS; i += 256)
    cache[KV_LORA + i] = float_to_half(rotated(kv + KV_LORA, table + (u64)(pos + t) * (ROPE_DIMS / 2), i));
}

// By one warp: the RoPE part of head `head` of q, to its place behind the absorbed part.
DEVICE void latent_query(u16 *q_latent, const float *q, const F2 *table, int pos, int t, int head) {
  if (head >= HEADS) return;
  const float *from = q + ((u64)t * HEADS + head) * (NOPE + ROPE_DIMS) + NOPE;
  const F2 *angles = table + (u64)(pos + t) * (ROPE_DIMS / 2);
  for (int i = threadIdx.x % 32; i < ROPE_DIMS; i += 32)
    q_latent[((u64)t * HEADS + head) * (KV_LORA + ROPE_DIMS) + KV_LORA + i] =
        float_to_half(query_scale(pos + t) * rotated(from, angles, i));
}
