// MLA, decode, in one kernel: q_nope through each head's W_k_b, the rotated part of q behind it, and the cache row of
// this token.
#include "latent.cuh"
#include "matvec.cuh"

struct Args {
  const float *q = nullptr;  // (heads, nope + rope_dims)
  u16 *queries = nullptr;    // (heads, kv_lora + rope_dims)
  u16 *cache = nullptr;
  const float *kv = nullptr;
  const float *kv_gain = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, rope_dims / 2)
  const int *state = nullptr;
  const u8 *w = nullptr;
};

DEVICE void run(const Args &a) {
  const Shared sh = staging<NOPE, QUANTISED, FLOATING>(nullptr);
  const int b = blockIdx.x;
  constexpr int PRODUCTS = HEAD_BLOCKS * HEADS, ROTATIONS = (HEADS + 7) / 8;  // blocks; one more for the cache row
  if (b < PRODUCTS) {
    const int g = b / HEAD_BLOCKS;
    linear<Weight, Spread, false, QUANTISED, FLOATING>(a.w, g, b % HEAD_BLOCKS, Plain{a.q + g * (NOPE + ROPE_DIMS)},
        nullptr, 0.f, sh, PutHalf{a.queries + g * (KV_LORA + ROPE_DIMS), query_scale(a.state[POS])});
    return;
  }
  grid_wait();
  const int pos = a.state[POS];
  if (b < PRODUCTS + ROTATIONS) {
    latent_query(a.queries, a.q, a.table, pos, 0, (b - PRODUCTS) * 8 + threadIdx.x / 32);
    return;
  }
  LatentRow row;
  row.load(a.kv, a.kv_gain, a.table + (u64)pos * (ROPE_DIMS / 2));
  row.store(a.cache + (u64)pos * (KV_LORA + ROPE_DIMS), sh.red);
}
