// MLA, prefill: the rotated part of the queries of every token, and their cache rows.
#include "latent.cuh"

struct Args {
  const float *q = nullptr;
  u16 *queries = nullptr;  // (tokens, heads, kv_lora + rope_dims)
  u16 *cache = nullptr;
  const float *kv = nullptr;
  const float *kv_gain = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, rope_dims / 2)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[8];
  grid_wait();
  const int t = blockIdx.y, pos = a.state[POS];
  if (t >= a.state[COUNT]) return;
  constexpr int HEAD_BLOCKS = (HEADS + 7) / 8;  // a warp per head, then one block for the cache row
  if (blockIdx.x < HEAD_BLOCKS) latent_query(a.queries, a.q, a.table, pos, t, blockIdx.x * 8 + threadIdx.x / 32);
  else latent_row(a.cache, a.kv, a.kv_gain, a.table, pos, t, red);
}
