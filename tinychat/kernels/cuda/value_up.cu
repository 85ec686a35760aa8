// MLA, per head: combines the splits that attention left, then multiplies by the head's W_v_b. All columns of the step.
#include "matvec.cuh"

// Attention's partial results, not yet combined: o (columns, SPLITS, HEADS, KV_LORA) halves and ml (columns, SPLITS, HEADS):
// maximum (log2), sum.
struct Combined {
  const u16 *o;
  const F2 *ml;
  float *weight;  // (columns, SPLITS)
  const int *state;
  int head, active[COLUMNS];
  DEVICE void prepare() {  // the weights of head `head`
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int keys = state[POS] + c + 1, lane = threadIdx.x % 32;
      const int per = keys_per_split(keys, SPLITS, CHUNK_KEYS);
      active[c] = COLUMNS > 1 && c >= state[COUNT] ? 0 : (keys + per - 1) / per;
      if (threadIdx.x / 32 == c % WARPS)
        combine_weights<SPLITS>(weight + c * SPLITS, ml + c * SPLITS * HEADS + head, HEADS, active[c], lane);
    }
    __syncthreads();
  }
  DEVICE F4 operator()(int column, int i) const {
    F4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = 0; s < active[column]; s++) {
      const V2 v = *(const V2 *)(o + ((u64)(column * SPLITS + s) * HEADS + head) * KV_LORA + i);
      const float w = weight[column * SPLITS + s];
      sum.x += w * half_to_float(v.x);
      sum.y += w * half_to_float(v.x >> 16);
      sum.z += w * half_to_float(v.y);
      sum.w += w * half_to_float(v.y >> 16);
    }
    return sum;
  }
};

struct Args {
  const u16 *src = nullptr;  // (columns, splits, heads, kv_lora), not COMBINED
  const F2 *ml = nullptr;
  const float *whole = nullptr;  // (columns, heads, kv_lora), COMBINED
  const int *state = nullptr;
  const float *gate = nullptr;  // (columns, heads), where GATED
  float *dst = nullptr;  // (columns, heads, rows), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const u8 *w = nullptr;
};

// Results times the sigmoid of the head's gate.
template <class Out> struct Opened {
  Out out;
  const float *gate;
  DEVICE void operator()(int column, int row, float v) const {
    out(column, row, GATED ? mul_rn(v, sigmoid(gate[column * HEADS])) : v);
  }
  DEVICE void finish(int row) const { out.finish(row); }
};
template <class Out> DEVICE Opened<Out> opened(const Out &out, const float *gate) { return {out, gate}; }

DEVICE void run(const Args &a) {
  __shared__ float split_weight[COLUMNS * SPLITS], values[32 * COLUMNS];
  const Shared sh = staging<KV_LORA, QUANTISED, FLOATING, COLUMNS>(nullptr);
  const int g = blockIdx.x / HEAD_BLOCKS, b = blockIdx.x % HEAD_BLOCKS;
  const auto put =
      opened(results<OUT_QUANTISED, HEADS * Weight::ROWS, COLUMNS>(a, values, g * Weight::ROWS), a.gate + g);
  if constexpr (COMBINED)
    linear<Weight, Spread, HEAD_BLOCKS, false, QUANTISED, FLOATING, COLUMNS>(
        a.w, g, b, Plain{a.whole + g * KV_LORA, HEADS * KV_LORA}, nullptr, 0.f, sh, put);
  else
    linear<Weight, Spread, HEAD_BLOCKS, false, QUANTISED, FLOATING, COLUMNS>(
        a.w, g, b, Combined{a.src, a.ml, split_weight, a.state, g}, nullptr, 0.f, sh, put);
}
