// Decode behind many keys: latent attention by warpgroups (wgmma), with keys as rows of the products and heads as
// columns. A block takes HEADS_AT_ONCE heads of a column of the step and one split of the keys, KEYS at a time,
// double-buffered; the first are on their way before the wait. Four warpgroups: scores over a part of the key's values
// each, softmax by heads, then the results of a part of the values each (the head of the key's row). Partial results are
// those of attention.cu. In shared memory everything lies in tiles of 64 values (ptx.cuh, tile_at).
#include "halves.cuh"
#include "swizzle.cuh"

struct Args {
  u16 *partial = nullptr;  // (columns, splits, heads, value_dim): each split's result
  F2 *ml = nullptr;        // (columns, splits, heads): maximum (log2) and sum
  const u16 *q = nullptr;  // (columns, heads, key_dim), scaled
  const u16 *cache = nullptr;
  const int *state = nullptr;
};

constexpr int GROUPS = THREADS / 128, KV = KEY_DIM / 8;
constexpr int STEPS = KEY_DIM / 16 / GROUPS, TILES = VALUE_DIM / 64 / GROUPS;  // of a warpgroup
constexpr int PITCH = KEYS + 4;  // of a head's scores

DEVICE void run(Args a) {
  static_assert(KEYS == 64 && THREADS == 8 * KEYS && HEADS_AT_ONCE == 32, "a tile of keys, four of heads");
  DYNAMIC_SHARED(raw);
  V4 *ks = raw + (0u - shared_address(raw)) % 1024 / 16, *qs = ks + 2 * KEYS * KV, *ps = qs + HEADS_AT_ONCE * KV;
  float *ss = (float *)(ps + HEADS_AT_ONCE * 8), *row_max = ss + GROUPS * HEADS_AT_ONCE * PITCH,
        *row_sum = row_max + HEADS_AT_ONCE, *row_scale = row_sum + HEADS_AT_ONCE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4, split = blockIdx.x,
            first_head = blockIdx.y * HEADS_AT_ONCE, column = COLUMNS == 1 ? 0 : blockIdx.z;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.partial += (u64)column * SPLITS * HEADS * VALUE_DIM;
  a.ml += column * SPLITS * HEADS;
  a.q += column * HEADS * KEY_DIM;
  const int known = a.state[POS], all = known + column + 1, per = keys_per_split(all, SPLITS, CHUNK_KEYS),
            begin = split * per, end = min(begin + per, all), earlier = min(end, known);
  if (begin >= end) return;
  const int chunks = (end - begin + KEYS - 1) / KEYS;

  // A thread has a row of each chunk, and in it a vector of each tile.
  const int row = threadIdx.x / 8, part = threadIdx.x % 8 ^ row % 8;
  const u16 *from = a.cache + (u64)(begin + row) * KEY_DIM + threadIdx.x % 8 * 8;
  // Rows of earlier steps in chunk c, in the background: they need no waiting.
  const auto load = [&](int c) {
    V4 *to = ks + c % 2 * KEYS * KV + row * 8 + part;
    if (begin + c * KEYS + row < earlier)
#pragma unroll
      for (int t = 0; t < KV / 8; t++) copy_async(to + t * KEYS * 8, from + c * KEYS * KEY_DIM + t * 64, true);
    copy_commit();
  };
  load(0);
  if (threadIdx.x < HEADS_AT_ONCE) {
    row_max[threadIdx.x] = -1e30f;
    row_sum[threadIdx.x] = 0;
  }
  grid_wait();
  {
    const int head = row % HEADS_AT_ONCE;
    const bool there = first_head + head < HEADS;
    const u16 *q = a.q + (there ? first_head + head : 0) * KEY_DIM + threadIdx.x % 8 * 8;
#pragma unroll
    for (int t = row / HEADS_AT_ONCE; t < KV / 8; t += KEYS / HEADS_AT_ONCE)
      copy_async(qs + (t * HEADS_AT_ONCE + head) * 8 + part, q + t * 64, there);
  }
  copy_commit();
  load(1);  // not earlier: the queries would wait behind it
  float o[TILES][4][4];
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[m][n][i] = 0;

  for (int c = 0; c < chunks; c++) {
    const int first = begin + c * KEYS;
    V4 *k = ks + c % 2 * KEYS * KV;
    if (first + row >= earlier)  // this step's rows, zeros behind them
#pragma unroll
      for (int t = 0; t < KV / 8; t++)
        k[(t * KEYS + row) * 8 + part] =
            first + row < end ? *(const V4 *)(from + c * KEYS * KEY_DIM + t * 64) : V4{0, 0, 0, 0};
    if (c == 0) copy_wait<1>();
    else copy_wait<0>();
    fence_tiles();
    __syncthreads();  // this chunk is there, and nobody reads the one before any more
    {  // S = K Q^T
      float s[4][4] = {};
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const int step = group * STEPS + i;
        wgmma_tiles(s, tile_at((const u8 *)k + step / 4 * KEYS * 128 + step % 4 * 32),
            tile_at((const u8 *)qs + step / 4 * HEADS_AT_ONCE * 128 + step % 4 * 32));
      }
      wgmma_commit();
      if (c > 0 && c + 1 < chunks) load(c + 1);  // meanwhile, for it takes as long as the product
      wgmma_wait<0>();
      float *to = ss + (group * HEADS_AT_ONCE + lane % 4 * 2) * PITCH + warp % 4 * 16 + lane / 4;
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) to[(n * 8 + i % 2) * PITCH + i / 2 * 8] = s[n][i];
    }
    __syncthreads();
    {  // softmax of this chunk, and by how much what came before shrinks; a warp has every 16th head
      constexpr int MINE = HEADS_AT_ONCE / WARPS;
      float v[MINE][2], top[MINE], sum[MINE];
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        const int r = warp + j * WARPS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          v[j][i] = 0;
#pragma unroll
          for (int g = 0; g < GROUPS; g++) v[j][i] += ss[(g * HEADS_AT_ONCE + r) * PITCH + lane + 32 * i];
          if (first + lane + 32 * i >= end) v[j][i] = -INFINITY;
        }
        top[j] = fmaxf(v[j][0], v[j][1]);
      }
#pragma unroll
      for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int j = 0; j < MINE; j++) top[j] = fmaxf(top[j], shfl_xor(top[j], m));
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        const int r = warp + j * WARPS;
        top[j] = fmaxf(row_max[r], top[j]);
        sum[j] = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float p = exp2_fast(v[j][i] - top[j]);
          sum[j] += p;
          ((u16 *)(ps + spot(HEADS_AT_ONCE, r, lane / 8 + 4 * i)))[lane % 8] = float_to_half(p);
        }
      }
#pragma unroll
      for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int j = 0; j < MINE; j++) sum[j] += shfl_xor(sum[j], m);
      if (lane == 0)
#pragma unroll
        for (int j = 0; j < MINE; j++) {
          const int r = warp + j * WARPS;
          const float shrink = exp2_fast(row_max[r] - top[j]);
          row_max[r] = top[j];
          row_sum[r] = row_sum[r] * shrink + sum[j];
          row_scale[r] = shrink;
        }
    }
    fence_tiles();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; n++)  // O = O * shrink + V^T P^T
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float shrink = row_scale[n * 8 + lane % 4 * 2 + i % 2];
#pragma unroll
        for (int m = 0; m < TILES; m++) o[m][n][i] *= shrink;
      }
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
      for (int m = 0; m < TILES; m++)
        wgmma_tiles<true>(o[m], tile_at((const u8 *)k + ((group * TILES + m) * KEYS + j * 16) * 128),
            tile_at((const u8 *)ps + j * 32));
    wgmma_commit();
    wgmma_wait<0>();
  }
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int r = n * 8 + lane % 4 * 2, mine = first_head + r + lane / 4 % 2;
    const float f[2] = {1.f / row_sum[r], 1.f / row_sum[r + 1]};
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = (group * TILES + m) * 64 + warp % 4 * 16 + i * 8 + lane / 4;
        const u32 two = pair_of_rows(o[m][n][2 * i] * f[0], o[m][n][2 * i + 1] * f[1]);
        if (mine < HEADS) *(u32 *)(a.partial + ((u64)split * HEADS + mine) * VALUE_DIM + (at & ~1)) = two;
      }
  }
  if (threadIdx.x < HEADS_AT_ONCE && first_head + (int)threadIdx.x < HEADS)
    a.ml[split * HEADS + first_head + threadIdx.x] = F2{row_max[threadIdx.x], row_sum[threadIdx.x]};
}
