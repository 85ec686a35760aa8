// Attention of many query vectors over one chunk of the cache in tiles: what attend (attention.h) computes, with queries, keys,
// weights and values each as the sum of two bfloat16. A key's or value's 11 bits fit in those exactly, a query and a weight keep 16.
#pragma once
#include "attention.h"
#include "tiles.h"

#if TILES
enum { TILED = 160 };  // query vectors of one task: keys and values are unpacked once for all of them

// A tile of high bfloat16 and one of low ones: 16 rows of 32 values, or of the right factor 32 rows of 16, two by two.
typedef struct { u32v high[16], low[16]; } TilePair;
INLINE int tiles_of(int n) { return (n + 31) / 32; }

// 16 values, from number i on, of row m of tiles that lie side by side.
INLINE void put_values(TilePair *to, int m, int i, f32v x) {
  u32v high = ((u32v)x + 0x8000) & 0xffff0000, low = (u32v)(x - (f32v)high) + 0x8000;
  u16x16 h = __builtin_convertvector(high >> 16, u16x16), l = __builtin_convertvector(low >> 16, u16x16);
  memcpy((uint16_t *)&to[i / 32].high[m] + i % 32, &h, 32), memcpy((uint16_t *)&to[i / 32].low[m] + i % 32, &l, 32);
}

// Two rows of the right factor, half-precision, which two bfloat16 hold exactly.
INLINE void put_rows(TilePair *to, int pair, u16x16 x, u16x16 y) {
  f32v a = from_f16(x), b = from_f16(y);
  u32v ha = (u32v)a & 0xffff0000, hb = (u32v)b & 0xffff0000;
  to->high[pair] = ha >> 16 | hb, to->low[pair] = (u32v)(a - (f32v)ha) >> 16 | (u32v)(b - (f32v)hb);
}

// out[16 i + r][16 j + c] = the sum over n tiles of x[i * x_step + k] times y[j * y_step + k], i < rows, j < columns (1 or 2).
// Rows of out are `pitch` floats apart.
INLINE void add_tiles(const TilePair *x, size_t x_step, const TilePair *y, size_t y_step, int n, float *out, size_t pitch, int rows,
                      int columns) {
  int two_rows = rows > 1, two_columns = columns > 1;
#define LEFT(I, K, PART) tile_load(4 + I, x[I * x_step + (K)].PART, 64);
#define RIGHT(J, K, PART) tile_load(6 + J, y[J * y_step + (K)].PART, 64);
#define KEEP(I, J) tile_store(2 * J + I, out + 16 * I * pitch + 16 * J, 4 * pitch);
  tile_zero(0);
  if (two_rows) tile_zero(1);
  if (two_columns) tile_zero(2);
  if (two_rows && two_columns) tile_zero(3);
  LEFT(0, 0, low) RIGHT(0, 0, high)
  if (two_rows) { LEFT(1, 0, low) }
  if (two_columns) { RIGHT(1, 0, high) }
  for (int k = 0; k < n; k++) {  // a tile is loaded as soon as it is free, since it is then waited for
    tile_dot_f(0, 4, 6);
    if (two_columns) tile_dot_f(2, 4, 7);
    LEFT(0, k, high)
    if (two_rows) {
      tile_dot_f(1, 5, 6);
      if (two_columns) tile_dot_f(3, 5, 7);
      LEFT(1, k, high)
    }
    tile_dot_f(0, 4, 6);
    if (two_rows) tile_dot_f(1, 5, 6);
    RIGHT(0, k, low)
    if (two_columns) {
      tile_dot_f(2, 4, 7);
      if (two_rows) tile_dot_f(3, 5, 7);
      RIGHT(1, k, low)
    }
    int next = k + 1 < n ? k + 1 : k;
    tile_dot_f(0, 4, 6);
    if (two_columns) tile_dot_f(2, 4, 7);
    LEFT(0, next, low)
    if (two_rows) tile_dot_f(1, 5, 6);
    RIGHT(0, next, high)
    if (two_rows && two_columns) tile_dot_f(3, 5, 7);
    if (two_rows) { LEFT(1, next, low) }
    if (two_columns) { RIGHT(1, next, high) }
  }
  KEEP(0, 0)
  if (two_rows) { KEEP(1, 0) }
  if (two_columns) { KEEP(0, 1) }
  if (two_rows && two_columns) { KEEP(1, 1) }
#undef LEFT
#undef RIGHT
#undef KEEP
}

// All of 16 x rows times 16 x columns.
static void tile_products(const TilePair *x, int rows, const TilePair *y, int columns, size_t step, int n, float *out, size_t pitch) {
  for (int i = 0; i < rows; i += 2, x += 2 * step, out += 32 * pitch)
    switch (2 * (rows - i > 1) + (columns > 1)) {
      case 0: add_tiles(x, step, y, step, n, out, pitch, 1, 1); break;
      case 1: add_tiles(x, step, y, step, n, out, pitch, 1, 2); break;
      case 2: add_tiles(x, step, y, step, n, out, pitch, 2, 1); break;
      case 3: add_tiles(x, step, y, step, n, out, pitch, 2, 2); break;
    }
}

// As attend; q: [count / 16][k_dim / 32]; s has room for count filled up to whole tiles, so have p ([count / 16][CHUNK / 32]) and
// out; w: for two rows of tiles of keys, and of values.
static void attend_in_tiles(const Cache *cache, const TilePair *q, int count, const int *from, const int *limit, float *s, TilePair *p,
                            TilePair *w, float *max, float *sum, float *out) {
  int first, tiles, deep = tiles_of(cache->k_dim), many = (count + 15) / 16, width = (cache->v_dim + 15) / 16 * 16;
  seen_tiles(count, from, limit, &first, &tiles);
  tiles_begin(16, 16, 64);
  for (int t = first; t < tiles; t += 2) {
    int two = t + 1 < tiles ? 2 : 1;
    for (int i = 0; i < two; i++) {
      const uint16_t *tile = cache->k + (size_t)(t + i) * 16 * cache->k_dim;
      for (int d = 0; d < 32 * deep; d += 2) {
        u16x16 none = {0};
        put_rows(&w[i * deep + d / 32], d % 32 / 2, d < cache->k_dim ? ld16(tile + 16 * d) : none,
                 d + 1 < cache->k_dim ? ld16(tile + 16 * d + 16) : none);
      }
    }
    tiles_written(w);
    tile_products(q, many, w, two, (size_t)deep, deep, s + 16 * t, CHUNK);
  }
  highest_scores(s, count, from, limit, first, tiles, max);
  int begin = first / 2, end = tiles_of(16 * tiles), n = end - begin;  // tiles of 32 positions
  memset(p, 0, sizeof *p * (size_t)(many * n));
  for (int c = 0; c < count; c++) {
    f32v total = splat(0);
    for (int t = first; t < tiles; t++) {
      f32v x = exp_(ldf(s + c * CHUNK + 16 * t) - max[c]);
      put_values(p + c / 16 * n, c % 16, 16 * t - 32 * begin, x);
      total += x;
    }
    sum[c] = hsum(total);
  }
  for (int d = 0; d < width; d += 32) {
    int two = d + 16 < width ? 2 : 1;
    for (int t = 2 * begin; t < 2 * end; t++)
      for (int i = 0; i < two; i++) {
        u16x16 raw[16] = {{0}};
        int at = d + 16 * i;
        if (t >= first && t < tiles) {
          if (cache->v) {
            for (int r = 0; r < 16; r++) raw[r] = ld16(cache->v + ((size_t)t * 16 + r) * cache->v_dim + at);
          } else {
            for (int r = 0; r < 16; r++) raw[r] = ld16(cache->k + ((size_t)t * cache->k_dim + at + r) * 16);
            transpose16(raw);
          }
        }
        for (int r = 0; r < 16; r += 2) put_rows(&w[i * n + t / 2 - begin], t % 2 * 8 + r / 2, raw[r], raw[r + 1]);
      }
    tiles_written(w);
    tile_products(p, many, w, two, (size_t)n, n, out + d, (size_t)width);
  }
  tiles_end();
}
#endif
