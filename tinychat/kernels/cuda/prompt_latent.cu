// Prompts, MLA: this step's cache rows; all rows' latent parts as halves in the order the products read; the rotated,
// scaled queries. Items that the blocks share: the cache rows (of earlier steps, too), then eight heads of a token or
// of two, one per warp. ABSORBED: no latent parts, and of the queries what is not rotated in the products' order.
#include "halves.cuh"
#include "rope.cuh"
#include "query_scale.cuh"

struct Args {
  u16 *cache = nullptr;    // (context, KV_LORA + ROPE_DIMS)
  u16 *latents = nullptr;  // (context, padded(KV_LORA))
  u16 *queries = nullptr;  // (tokens, HEADS, NOPE + ROPE_DIMS); ABSORBED: the end of (.., KV_LORA + ROPE_DIMS)
  u16 *nope = nullptr;     // (tokens, HEADS, padded(NOPE)), ABSORBED
  const float *q = nullptr;
  const float *kv = nullptr;
  const float *kv_gain = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, ROPE_DIMS / 2)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int ROW = KV_LORA + ROPE_DIMS, HEAD = NOPE + ROPE_DIMS, PAIRS = (HEAD + 63) / 64;
  static_assert(NOPE % 2 == 0, "pairs of values");
  __shared__ float red[WARPS];
  const int pos = a.state[POS], count = a.state[COUNT], keys = pos + count,
            items = keys + (count * HEADS + WARPS - 1) / WARPS;
  grid_wait();
  for (int b = blockIdx.x + (ABSORBED ? pos : 0); b < items; b += gridDim.x) {
    if (b < keys) {
      u16 *row = a.cache + (u64)b * ROW, *latent = a.latents + (u64)b * padded(KV_LORA);
      const float *kv = a.kv + (u64)(b - pos) * ROW;
      float r = 1;
      if (b >= pos) {
        float ss = 0;
        for (int i = threadIdx.x; i < KV_LORA; i += THREADS) ss += kv[i] * kv[i];
        ss = warps_sum(ss, red);
        __syncthreads();
        r = rsqrt_(ss / KV_LORA + EPS);
        for (int i = threadIdx.x; i < ROPE_DIMS; i += THREADS)
          row[KV_LORA + i] = float_to_half(rotated(kv + KV_LORA, a.table + (u64)b * (ROPE_DIMS / 2), i));
      }
      for (int i = threadIdx.x * 2; i < padded(KV_LORA); i += THREADS * 2) {
        u32 two = 0;
        if (i < KV_LORA) {
          if (b >= pos)
            *(u32 *)(row + i) = two = pack_halves(kv[i] * r * a.kv_gain[i], kv[i + 1] * r * a.kv_gain[i + 1]);
          else two = *(const u32 *)(row + i);
        }
        if (!ABSORBED) *(u32 *)(latent + place(i)) = two;
      }
      continue;
    }
    const int item = (b - keys) * WARPS + threadIdx.x / 32, t = item / HEADS;
    if (t >= count) continue;
    const float *q = a.q + (u64)item * HEAD, scale = query_scale(pos + t);
    const F2 *angles = a.table + (u64)(pos + t) * (ROPE_DIMS / 2);
    u32 two[PAIRS];  // all are read before one is written, or each would wait for the one before
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = (threadIdx.x % 32 + 32 * j) * 2;
      F2 v = {0, 0};
      if (i < NOPE) v = *(const F2 *)(q + i);
      else if (i < HEAD) v = F2{rotated(q + NOPE, angles, i - NOPE), rotated(q + NOPE, angles, i + 1 - NOPE)};
      two[j] = pack_halves(scale * v.x, scale * v.y);
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = (threadIdx.x % 32 + 32 * j) * 2;
      if (ABSORBED) {
        if (i < NOPE) *(u32 *)(a.nope + (u64)item * padded(NOPE) + place(i)) = two[j];
        else if (i < HEAD) *(u32 *)(a.queries + (u64)item * ROW + KV_LORA + i - NOPE) = two[j];
      } else if (i < HEAD) *(u32 *)(a.queries + (u64)item * HEAD + i) = two[j];
    }
    if (ABSORBED)
      for (int i = NOPE + threadIdx.x % 32 * 2; i < padded(NOPE); i += 64)
        *(u32 *)(a.nope + (u64)item * padded(NOPE) + place(i)) = 0;
  }
}
