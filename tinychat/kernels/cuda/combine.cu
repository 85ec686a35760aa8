// MLA at depth, between attention and value_up: what attention's splits left, combined once for all blocks of value_up.
// A block makes VALUES values of a head of a column; a lane takes eight of them, and the lanes beside it other splits.

struct Args {
  const u16 *partial = nullptr;  // (columns, splits, heads, kv_lora): see attention.cu
  const F2 *ml = nullptr;        // (columns, splits, heads)
  float *dst = nullptr;          // (columns, heads, kv_lora)
  const int *state = nullptr;
};

DEVICE void run(Args a) {
  constexpr int LANES = VALUES / 8, AT_ONCE = THREADS / LANES, MINE = (SPLITS + AT_ONCE - 1) / AT_ONCE;
  __shared__ float weight[SPLITS], sums[THREADS / 32][VALUES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, first = blockIdx.x * VALUES,
            col = first + threadIdx.x % LANES * 8, split = threadIdx.x / LANES;
  const int column = COLUMNS == 1 ? 0 : blockIdx.z;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.partial += (u64)column * SPLITS * HEADS * KV_LORA;
  a.ml += column * SPLITS * HEADS;
  a.dst += column * HEADS * KV_LORA;
  const int keys = a.state[POS] + column + 1, per = keys_per_split(keys, SPLITS, CHUNK_KEYS), active = (keys + per - 1) / per;
  grid_wait();
  V4 v[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int s = split + i * AT_ONCE;
    v[i] = s < active && col < KV_LORA ? *(const V4 *)(a.partial + ((u64)s * HEADS + head) * KV_LORA + col) : V4{0, 0, 0, 0};
  }
  if (warp == 0) combine_weights<SPLITS>(weight, a.ml + head, HEADS, active, lane);
  __syncthreads();
  float sum[8] = {};
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const float w = split + i * AT_ONCE < active ? weight[split + i * AT_ONCE] : 0;
    const u32 two[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += w * half_to_float(two[j / 2] >> 16 * (j % 2));
  }
#pragma unroll
  for (int m = LANES; m < 32; m *= 2)
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += shfl_xor(sum[j], m);
  if (lane < LANES)
#pragma unroll
    for (int j = 0; j < 8; j++) sums[warp][lane * 8 + j] = sum[j];
  __syncthreads();
  const int value = threadIdx.x;
  if (value >= VALUES || first + value >= KV_LORA) return;
  float all = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) all += sums[w][value];
  a.dst[head * KV_LORA + first + value] = all;
}
