// Prompts: flash attention. A block takes 16 query rows per warp of one head, heaviest blocks first, and goes through
// the keys CHUNK_KEYS at a time, double-buffered. Scores, softmax and results of a row stay in the registers of one
// warp. A key's first KEY_PART values are in `keys`, the rest in the rows of `rope` (MLA: common to all heads). In
// shared memory everything lies in tiles of 64 values (ptx.cuh, tile_at).
#include "halves.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

struct Args {
  u16 *out = nullptr;            // (tokens, padded(HEADS * VALUE_DIM)), in the order the products read
  const u16 *q = nullptr;        // (tokens, HEADS, KEY_DIM), scaled
  const u16 *keys = nullptr;     // (positions, KV_HEADS, KEY_PART)
  const u16 *values = nullptr;   // (positions, KV_HEADS, VALUE_DIM)
  const u16 *rope = nullptr;     // (positions, ROPE_PITCH), from value ROPE_START on
  const float *sinks = nullptr;  // (HEADS), where SINKS
  const float *gate = nullptr;   // (tokens, HEADS, GATE)
  const int *state = nullptr;
};

DEVICE constexpr int ceil64(int n) { return (n + 63) / 64 * 64; }

DEVICE void run(const Args &a) {
  constexpr int QUERIES = WARPS * 16, KEYS = CHUNK_KEYS, KV = ceil64(KEY_DIM) / 8, VV = ceil64(VALUE_DIM) / 8,
                TILES = (VALUE_DIM + 15) / 16 * 2;
  constexpr int PITCH = padded(HEADS * VALUE_DIM);
  DYNAMIC_SHARED(raw);
  V4 *qs = raw + (0u - shared_address(raw)) % 1024 / 16, *ks = qs + QUERIES * KV, *vs = ks + 2 * KEYS * KV;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, kv_head = head / (HEADS / KV_HEADS),
            pos = a.state[POS], count = a.state[COUNT], base = WINDOW ? a.state[BASE] : 0;
  const int first = ((count + QUERIES - 1) / QUERIES - 1 - (int)blockIdx.x) * QUERIES;
  if (first < 0) return;
  const int end = pos + min(first + QUERIES, count), chunks = (end + KEYS - 1) / KEYS;
  // The first chunk that a query sees; `base` is a multiple of KEYS, so all of it is there.
  const int begin = WINDOW ? max(pos + first + 1 - WINDOW, 0) / KEYS : 0;
  // A thread has a vector of each tile, of every ROWS-th row: no divisions and branches in front of the products.
  constexpr int ROWS = THREADS / 8;
  const int row = threadIdx.x / 8, col = threadIdx.x % 8 * 8, at = row * 8 + (threadIdx.x % 8 ^ row % 8);
  auto load = [&](int c) {
    V4 *k = ks + (c & 1) * KEYS * KV + at, *v = vs + (c & 1) * KEYS * VV + at;
#pragma unroll
    for (int r = 0; r < KEYS; r += ROWS) {
      const int key = c * KEYS + r + row, there = min(key, end - 1);
      const u64 place = (u64)(there - base) * KV_HEADS + kv_head;
      const u16 *from = a.keys + place * KEY_PART + col,
                *rope = a.rope + (u64)there * ROPE_PITCH + ROPE_START - KEY_PART + col,
                *value = a.values + place * VALUE_DIM + col;
      if (KEYS < ROWS && row >= KEYS) break;
#pragma unroll
      for (int t = 0; t < KV / 8; t++)
        copy_async(k + (t * KEYS + r) * 8, (KEY_PART == KEY_DIM || t * 64 + col < KEY_PART ? from : rope) + t * 64,
            key < end && (KEY_DIM % 64 == 0 || t * 64 + col < KEY_DIM));
#pragma unroll
      for (int t = 0; t < VV / 8; t++)
        copy_async(
            v + (t * KEYS + r) * 8, value + t * 64, key < end && (VALUE_DIM % 64 == 0 || t * 64 + col < VALUE_DIM));
    }
  };
  grid_wait();
#pragma unroll
  for (int r = 0; r < QUERIES; r += ROWS) {
    const int t = first + r + row;
    const u16 *from = a.q + ((u64)min(t, count - 1) * HEADS + head) * KEY_DIM + col;
#pragma unroll
    for (int n = 0; n < KV / 8; n++)
      copy_async(
          qs + (n * QUERIES + r) * 8 + at, from + n * 64, t < count && (KEY_DIM % 64 == 0 || n * 64 + col < KEY_DIM));
  }
  load(begin);
  copy_commit();
  float o[TILES][4], most[2] = {-1e30f, -1e30f}, sum[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) o[n][i] = 0;
  const int lowest = pos + first + warp * 16;  // the last key that the warp's first row sees
  const int highest =
      WARPGROUPS ? pos + first + warp / 4 * 64 + 63 : lowest + 15;  // and the last row of those that compute together
  for (int c = begin; c < chunks; c++) {
    copy_wait<0>();
    if (WARPGROUPS) fence_tiles();
    __syncthreads();  // this chunk is there, and nobody reads the one before any more
    if (c + 1 < chunks) load(c + 1);
    copy_commit();
    if (c * KEYS > highest) continue;
    const V4 *k = ks + (c & 1) * KEYS * KV, *v = vs + (c & 1) * KEYS * VV;
    float s[KEYS / 8][4];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = 0;
    if constexpr (WARPGROUPS) {  // S = Q K^T
      wgmma_begin();
#pragma unroll
      for (int d = 0; d < KEY_DIM / 16; d++)
        wgmma_tiles((float (&)[8][4])s, tile_at((const u8 *)qs + (d / 4 * QUERIES + warp / 4 * 64) * 128 + d % 4 * 32),
            tile_at((const u8 *)k + d / 4 * KEYS * 128 + d % 4 * 32));
      wgmma_commit();
      wgmma_wait<0>();
    } else {
#pragma unroll 4
      for (int d = 0; d < (KEY_DIM + 15) / 16; d++) {
        const V4 q = ldmatrix4(qs + spot(QUERIES, warp * 16 + lane % 16, d * 2 + lane / 16));
        const u32 rows[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
          const V4 b = ldmatrix4(k + spot(KEYS, n * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
          mma_f16(s[2 * n], rows, b.x, b.y);
          mma_f16(s[2 * n + 1], rows, b.z, b.w);
        }
      }
    }
    if (c * KEYS + KEYS - 1 > lowest)
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (c * KEYS + n * 8 + lane % 4 * 2 + i % 2 > lowest + lane / 4 + i / 2 * 8) s[n][i] = -INFINITY;
    if (WINDOW && c * KEYS <= highest - WINDOW)
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (c * KEYS + n * 8 + lane % 4 * 2 + i % 2 <= lowest + lane / 4 + i / 2 * 8 - WINDOW) s[n][i] = -INFINITY;
    float shrink[2];
    u32 p[KEYS / 16][4];
    weigh(s, most, sum, shrink, p);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      o[n][0] *= shrink[0];
      o[n][1] *= shrink[0];
      o[n][2] *= shrink[1];
      o[n][3] *= shrink[1];
    }
    if constexpr (WARPGROUPS) {  // O += P V
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
        for (int n = 0; n < VALUE_DIM / 64; n++)
          wgmma<true>((float (&)[8][4])o[8 * n], p[j], tile_at((const u8 *)v + (n * KEYS + j * 16) * 128));
      wgmma_commit();
      wgmma_wait<0>();
    } else {
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
        for (int n = 0; n < TILES / 2; n++) {
          const V4 b = ldmatrix4_trans(v + spot(KEYS, j * 16 + lane % 16, n * 2 + lane / 16));
          mma_f16(o[2 * n], p[j], b.x, b.y);
          mma_f16(o[2 * n + 1], p[j], b.z, b.w);
        }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float all = sum_of_row(sum[i]);
    const int t = first + warp * 16 + lane / 4 + i * 8;
    if (t >= count) continue;
    if (SINKS) all += exp2_fast(a.sinks[head] * 1.44269504f - most[i]);  // scores are in log2
    const float f = 1.f / all;
    u16 *out = a.out + (u64)t * PITCH;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int col = n * 8 + lane % 4 * 2;
      if (VALUE_DIM % 16 == 0 || col < VALUE_DIM) {
        F2 v = {o[n][2 * i] * f, o[n][2 * i + 1] * f};
        if constexpr (GATE != 0) {
          const float *from = a.gate + ((u64)t * HEADS + head) * GATE;
          const F2 g = GATE == 1 ? F2{*from, *from} : *(const F2 *)(from + col);
          v = F2{v.x / (1.f + expf(-g.x)), v.y / (1.f + expf(-g.y))};
        }
        *(u32 *)(out + place(head * VALUE_DIM + col)) = pack(v.x, v.y);
      }
    }
    if (head == HEADS - 1)
      for (int col = HEADS * VALUE_DIM + lane % 4 * 2; col < PITCH; col += 8) *(u32 *)(out + place(col)) = 0;
  }
}
