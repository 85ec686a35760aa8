// MLA at depth, between attention and value_up: what attention's splits left, combined once for all blocks of value_up.
// A block makes 128 values of a head of a column; its warps share the splits.

struct Args {
  const u16 *partial = nullptr;  // (columns, splits, heads, kv_lora): see attention.cu
  const F2 *ml = nullptr;        // (columns, splits, heads)
  float *dst = nullptr;          // (columns, heads, kv_lora)
  const int *state = nullptr;
};

DEVICE void run(Args a) {
  constexpr int WARPS = THREADS / 32, MINE = (SPLITS + WARPS - 1) / WARPS;
  __shared__ float weight[SPLITS];
  __shared__ F4 sums[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, col = blockIdx.x * 128 + lane * 4;
  const int column = COLUMNS == 1 ? 0 : blockIdx.z;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.partial += (u64)column * SPLITS * HEADS * KV_LORA;
  a.ml += column * SPLITS * HEADS;
  a.dst += column * HEADS * KV_LORA;
  const int keys = a.state[POS] + column + 1, per = keys_per_split(keys, SPLITS, CHUNK_KEYS), active = (keys + per - 1) / per;
  grid_wait();
  V2 v[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int s = warp + i * WARPS;
    v[i] = s < active && col < KV_LORA ? *(const V2 *)(a.partial + ((u64)s * HEADS + head) * KV_LORA + col) : V2{0, 0};
  }
  if (warp == 0) combine_weights<SPLITS>(weight, a.ml + head, HEADS, active, lane);
  __syncthreads();
  F4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const float w = warp + i * WARPS < active ? weight[warp + i * WARPS] : 0;
    sum.x += w * half_to_float(v[i].x);
    sum.y += w * half_to_float(v[i].x >> 16);
    sum.z += w * half_to_float(v[i].y);
    sum.w += w * half_to_float(v[i].y >> 16);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp || col >= KV_LORA) return;
  for (int w = 1; w < WARPS; w++) {
    const F4 v = sums[w][lane];
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  *(F4 *)(a.dst + head * KV_LORA + col) = sum;
}
