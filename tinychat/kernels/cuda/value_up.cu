// MLA, per head: combines the splits that attention left, then multiplies by the head's W_v_b.
#include "matvec.cuh"

// Attention's partial results, not yet combined: o (SPLITS, HEADS, KV_LORA) halves and ml (SPLITS, HEADS): maximum
// (log2), sum.
struct Combined {
  const u16 *o;
  const F2 *ml;
  float *weight;
  const int *state;
  int head, active;
  DEVICE void prepare() {  // weight[s] of head `head`
    const int keys = state[POS] + 1, lane = threadIdx.x % 32;
    const int per = keys_per_split(keys, SPLITS, CHUNK_KEYS);
    active = (keys + per - 1) / per;
    if (threadIdx.x < 32) combine_weights<SPLITS>(weight, ml + head, HEADS, active, lane);
    __syncthreads();
  }
  DEVICE F4 operator()(int i) const {
    F4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = 0; s < active; s++) {
      const V2 v = *(const V2 *)(o + ((u64)s * HEADS + head) * KV_LORA + i);
      const float w = weight[s];
      sum.x += w * half_to_float(v.x);
      sum.y += w * half_to_float(v.x >> 16);
      sum.z += w * half_to_float(v.y);
      sum.w += w * half_to_float(v.y >> 16);
    }
    return sum;
  }
};

struct Args {
  const u16 *src = nullptr;  // (splits, heads, kv_lora), not COMBINED
  const F2 *ml = nullptr;
  const float *whole = nullptr;  // (heads, kv_lora), COMBINED
  const int *state = nullptr;
  float *dst = nullptr;  // (heads, rows), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const u8 *w = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float split_weight[SPLITS], values[32];
  const Shared sh = staging<KV_LORA, QUANTISED, FLOATING>(nullptr);
  const int g = blockIdx.x / HEAD_BLOCKS, b = blockIdx.x % HEAD_BLOCKS;
  const auto put = results<OUT_QUANTISED, HEADS * Weight::ROWS>(a, values, g * Weight::ROWS);
  if constexpr (COMBINED)
    linear<Weight, Spread, false, QUANTISED, FLOATING>(a.w, g, b, Plain{a.whole + g * KV_LORA}, nullptr, 0.f, sh, put);
  else
    linear<Weight, Spread, false, QUANTISED, FLOATING>(
        a.w, g, b, Combined{a.src, a.ml, split_weight, a.state, g, 0}, nullptr, 0.f, sh, put);
}
