// MLA, decode, in one kernel: q_nope through each head's W_k_b, the rotated part of q behind it, and the cache rows of
// this step's tokens.
#include "latent.cuh"
#include "matvec.cuh"

struct Args {
  const float *q = nullptr;  // (columns, heads, nope + rope_dims)
  u16 *queries = nullptr;    // (columns, heads, kv_lora + rope_dims)
  u16 *cache = nullptr;
  const float *kv = nullptr;
  const float *kv_gain = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, rope_dims / 2)
  const int *state = nullptr;
  const u8 *w = nullptr;
};

struct PutQuery {
  u16 *dst;
  int pos;
  DEVICE void operator()(int column, int row, float v) const {
    dst[column * HEADS * (KV_LORA + ROPE_DIMS) + row] = float_to_half(v * query_scale(pos + column));
  }
  DEVICE void finish(int) const {}
};

DEVICE void run(const Args &a) {
  const Shared sh = staging<NOPE, QUANTISED, FLOATING, COLUMNS>(nullptr);
  const int b = blockIdx.x;
  constexpr int PRODUCTS = HEAD_BLOCKS * HEADS;  // blocks; then those that rotate, then one for each cache row
  constexpr int ROTATIONS = (COLUMNS * HEADS + 7) / 8;
  if (b < PRODUCTS) {
    const int g = b / HEAD_BLOCKS;
    linear<Weight, Spread, HEAD_BLOCKS, false, QUANTISED, FLOATING, COLUMNS>(a.w, g, b % HEAD_BLOCKS,
        Plain{a.q + g * (NOPE + ROPE_DIMS), HEADS * (NOPE + ROPE_DIMS)}, nullptr, 0.f, sh,
        PutQuery{a.queries + g * (KV_LORA + ROPE_DIMS), a.state[POS]});
    return;
  }
  grid_wait();
  if (b < PRODUCTS + ROTATIONS) {
    const int item = (b - PRODUCTS) * 8 + threadIdx.x / 32, t = COLUMNS == 1 ? 0 : item / HEADS;
    if (COLUMNS == 1 || t < a.state[COUNT])
      latent_query(a.queries, a.q, a.table, a.state[POS], t, COLUMNS == 1 ? item : item % HEADS);
    return;
  }
  const int t = COLUMNS == 1 ? 0 : b - PRODUCTS - ROTATIONS, pos = a.state[POS] + t;
  if (COLUMNS > 1 && t >= a.state[COUNT]) return;
  LatentRow row;
  row.prefetch(a.kv_gain, a.table + (u64)pos * (ROPE_DIMS / 2));
  row.load(a.kv + t * (KV_LORA + ROPE_DIMS));
  row.sum(sh.red);
  __syncthreads();
  row.store(a.cache + (u64)pos * (KV_LORA + ROPE_DIMS), sh.red);
}
