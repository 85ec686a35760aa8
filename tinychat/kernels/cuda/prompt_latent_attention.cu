// Prompts of few tokens, MLA: flash attention of absorbed queries over the cache's rows, which are the keys of all
// heads and, up to VALUE_DIM, their values. A block takes 64 rows (a token's head each) and a part of the keys, 64 at a
// time, double-buffered. Both warpgroups make all scores, and half of the values each, since a row's results fill the
// registers of two. In shared memory everything lies in tiles of 64 values (ptx.cuh, tile_at).
#include "halves.cuh"
#include "key_parts.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

struct Args {
  u16 *partial = nullptr;      // (parts, tokens, HEADS, VALUE_DIM): each part's result
  F2 *ml = nullptr;            // (parts, tokens, HEADS): maximum (log2) and sum
  const u16 *q = nullptr;      // (tokens, HEADS, KEY_DIM), scaled
  const u16 *cache = nullptr;  // (positions, KEY_DIM)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int KV = KEY_DIM / 8, TILES = VALUE_DIM / 16;  // of a warpgroup
  static_assert(THREADS == 256 && KEY_DIM % 64 == 0 && VALUE_DIM % 128 == 0, "two warpgroups, whole tiles");
  DYNAMIC_SHARED(raw);
  V4 *qs = raw + (0u - shared_address(raw)) % 1024 / 16, *ks = qs + QUERIES * KV;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int pos = a.state[POS], rows = a.state[COUNT] * HEADS, all = pos + a.state[COUNT];
  const KeyParts parts(rows, all);
  const int first = blockIdx.x % parts.tiles * QUERIES, part = blockIdx.x / parts.tiles, begin = part * parts.keys,
            end = min(begin + parts.keys, all);
  if (part >= parts.active) return;
  const int chunks = (end - begin + KEYS - 1) / KEYS;
  // A thread has a vector of each tile, of every 32nd row.
  const int row = threadIdx.x / 8, col = threadIdx.x % 8, spot_of = row * 8 + (col ^ row % 8);
  const auto load = [&](int c) {
    V4 *to = ks + c % 2 * KEYS * KV + spot_of;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = begin + c * KEYS + half * 32 + row;
      const u16 *from = a.cache + (u64)(key < end ? key : begin) * KEY_DIM + col * 8;
#pragma unroll
      for (int t = 0; t < KV / 8; t++) copy_async(to + (t * KEYS + half * 32) * 8, from + t * 64, key < end);
    }
    copy_commit();
  };
  grid_wait();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int r = first + half * 32 + row;
    const u16 *from = a.q + (u64)min(r, rows - 1) * KEY_DIM + col * 8;
#pragma unroll
    for (int t = 0; t < KV / 8; t++) copy_async(qs + (t * QUERIES + half * 32) * 8 + spot_of, from + t * 64, r < rows);
  }
  load(0);
  float o[TILES][4], most[2] = {-1e30f, -1e30f}, sum[2] = {0, 0};
  int last[2];  // key that the lane's rows see
#pragma unroll
  for (int i = 0; i < 2; i++) last[i] = pos + (first + warp * 16 + lane / 4 + i * 8) / HEADS;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) o[n][i] = 0;
  for (int c = 0; c < chunks; c++) {
    copy_wait<0>();
    fence_tiles();
    __syncthreads();  // this chunk is there, and nobody reads the one before any more
    if (c + 1 < chunks) load(c + 1);
    const u8 *k = (const u8 *)(ks + c % 2 * KEYS * KV);
    const int key = begin + c * KEYS;
    float s[KEYS / 8][4];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = 0;
    wgmma_begin();  // S = Q K^T
#pragma unroll
    for (int d = 0; d < KEY_DIM / 16; d++)
      wgmma_tiles((float (&)[8][4])s, tile_at((const u8 *)qs + d / 4 * QUERIES * 128 + d % 4 * 32),
          tile_at(k + d / 4 * KEYS * 128 + d % 4 * 32));
    wgmma_commit();
    wgmma_wait<0>();
    if (key + KEYS > min(pos, end))  // this step's keys, or none, are among them
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int mine = key + n * 8 + lane % 4 * 2 + i % 2;
          if (mine > last[i / 2] || mine >= end) s[n][i] = -INFINITY;
        }
    float shrink[2];
    u32 p[KEYS / 16][4];
    weigh(s, most, sum, shrink, p);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[n][i] *= shrink[i / 2];
    wgmma_begin();  // O += P V
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
      for (int n = 0; n < VALUE_DIM / 128; n++)
        wgmma<true>(
            (float (&)[8][4])o[8 * n], p[j], tile_at(k + ((group * (VALUE_DIM / 128) + n) * KEYS + j * 16) * 128));
    wgmma_commit();
    wgmma_wait<0>();
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float every = sum_of_row(sum[i]);
    const int r = first + warp * 16 + lane / 4 + i * 8;
    if (r >= rows) continue;
    const u64 at = (u64)part * rows + r;
    const float f = every > 0 ? 1.f / every : 0;  // a part may begin behind a row's last key
    if (group == 0 && lane % 4 == 0) a.ml[at] = F2{most[i], every};
    u16 *to = a.partial + at * VALUE_DIM + group * (VALUE_DIM / 2) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILES; n++) *(u32 *)(to + n * 8) = pack_halves(o[n][2 * i] * f, o[n][2 * i + 1] * f);
  }
}
