// Decode behind many keys: latent attention by warpgroups (wgmma). A block takes HEADS_AT_ONCE heads of a column of the
// step and one split of the keys, KEYS at a time, of which STAGES times as many are in shared memory or on their way
// there, from before the wait on. Four warpgroups: scores over a part of the key's values each, softmax by heads, then
// the results of a part of the values each (the head of the key's row), with heads as columns of the product. Partial
// results are those of attention.cu. In shared memory everything lies in tiles of 64 values (ptx.cuh, tile_at).
#include "halves.cuh"
#include "swizzle.cuh"

struct Args {
  u16 *partial = nullptr;  // (columns, splits, heads, value_dim): each split's result
  F2 *ml = nullptr;        // (columns, splits, heads): maximum (log2) and sum
  const u16 *q = nullptr;  // (columns, heads, key_dim), scaled
  const u16 *cache = nullptr;
  const int *state = nullptr;
};

constexpr int KEYS = CHUNK_KEYS, GROUPS = THREADS / 128, KV = KEY_DIM / 8;
constexpr int STEPS = KEY_DIM / 16 / GROUPS, TILES = VALUE_DIM / 64 / GROUPS;  // of a warpgroup
constexpr int PITCH = KEYS + 8;  // of a head's scores

DEVICE void run(Args a) {
  static_assert(KEYS == 32 && HEADS_AT_ONCE == 32, "columns of the two products");
  DYNAMIC_SHARED(raw);
  V4 *ks = raw + (0u - shared_address(raw)) % 1024 / 16, *qs = ks + STAGES * KEYS * KV, *ps = qs + HEADS_AT_ONCE * KV;
  float *ss = (float *)(ps + HEADS_AT_ONCE * 8), *row_max = ss + GROUPS * HEADS_AT_ONCE * PITCH,
        *row_sum = row_max + HEADS_AT_ONCE, *row_scale = row_sum + HEADS_AT_ONCE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4, split = blockIdx.x,
            first_head = blockIdx.y * HEADS_AT_ONCE, column = COLUMNS == 1 ? 0 : blockIdx.z;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.partial += (u64)column * SPLITS * HEADS * VALUE_DIM;
  a.ml += column * SPLITS * HEADS;
  a.q += column * HEADS * KEY_DIM;
  const int known = a.state[POS], all = known + column + 1, per = keys_per_split(all, SPLITS, KEYS),
            begin = split * per, end = min(begin + per, all), earlier = min(end, known);
  if (begin >= end) return;
  const int chunks = (end - begin + KEYS - 1) / KEYS;

  // Rows of earlier steps in chunk c, in the background: they need no waiting.
  const auto load = [&](int c) {
    const int first = begin + c * KEYS;
    V4 *to = ks + c % STAGES * KEYS * KV;
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * KV; i += THREADS) {
      const int row = i / KV, v = i % KV;
      if (first + row < earlier) copy_async(to + spot(KEYS, row, v), a.cache + (u64)(first + row) * KEY_DIM + v * 8, true);
    }
    copy_commit();
  };
#pragma unroll
  for (int c = 0; c < STAGES; c++) load(c);
  if (threadIdx.x < HEADS_AT_ONCE) {
    row_max[threadIdx.x] = -1e30f;
    row_sum[threadIdx.x] = 0;
  }
  grid_wait();
#pragma unroll
  for (int i = threadIdx.x; i < HEADS_AT_ONCE * KV; i += THREADS) {
    const int row = i / KV, v = i % KV;
    qs[spot(HEADS_AT_ONCE, row, v)] =
        first_head + row < HEADS ? *(const V4 *)(a.q + (first_head + row) * KEY_DIM + v * 8) : V4{0, 0, 0, 0};
  }
  float o[TILES][4][4];
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[m][n][i] = 0;

  for (int c = 0; c < chunks; c++) {
    const int first = begin + c * KEYS;
    V4 *k = ks + c % STAGES * KEYS * KV;
    if (first + KEYS > earlier)  // this step's rows, zeros behind them
      for (int i = threadIdx.x; i < KEYS * KV; i += THREADS) {
        const int row = i / KV, v = i % KV, key = first + row;
        const V4 *from = (const V4 *)(a.cache + (u64)key * KEY_DIM + v * 8);
        if (key >= earlier) k[spot(KEYS, row, v)] = key < end ? *from : V4{0, 0, 0, 0};
      }
    if (c == 0) copy_wait<STAGES - 1>();
    else copy_wait<STAGES - 2>();
    fence_tiles();
    __syncthreads();  // this chunk is there, and nobody reads the one before any more
    if (c > 0) load(c + STAGES - 1);
    {  // S = Q K^T: 64 rows, of which the last 32 are whatever lies behind this tile of Q
      float s[4][4] = {};
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const int step = group * STEPS + i;
        wgmma_tiles(s, tile_at((const u8 *)qs + step / 4 * HEADS_AT_ONCE * 128 + step % 4 * 32),
            tile_at((const u8 *)k + step / 4 * KEYS * 128 + step % 4 * 32));
      }
      wgmma_commit();
      wgmma_wait<0>();
      float *to = ss + (group * HEADS_AT_ONCE + warp % 4 * 16 + lane / 4) * PITCH + lane % 4 * 2;
      if (warp % 4 < HEADS_AT_ONCE / 16)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) *(F2 *)(to + i * 8 * PITCH + n * 8) = F2{s[n][2 * i], s[n][2 * i + 1]};
    }
    __syncthreads();
    {  // softmax of this chunk, and by how much what came before shrinks; a warp has every 16th head
      constexpr int MINE = HEADS_AT_ONCE / WARPS;
      float v[MINE], top[MINE], sum[MINE];
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        v[j] = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) v[j] += ss[(g * HEADS_AT_ONCE + warp + j * WARPS) * PITCH + lane];
        top[j] = v[j] = first + lane < end ? v[j] : -INFINITY;
      }
#pragma unroll
      for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int j = 0; j < MINE; j++) top[j] = fmaxf(top[j], shfl_xor(top[j], m));
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        const int r = warp + j * WARPS;
        top[j] = fmaxf(row_max[r], top[j]);
        sum[j] = exp2_fast(v[j] - top[j]);
        ((u16 *)(ps + spot(HEADS_AT_ONCE, r, lane / 8)))[lane % 8] = float_to_half(sum[j]);
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
