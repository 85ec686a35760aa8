// What both forms of attention of prompts have in common, in tiles (attention_tiles.h) and as words (attention_words.h): queries, keys,
// weights and values are integers. A query and a key have a scale; a value has a power of two that is added, as a logarithm, to its
// key's scores. So a weight times a value's integers is what it contributes, and weights are integers relative to the largest
// contribution of their query.
#pragma once
#include "attention.h"
#include "words.h"

#if TILES || WORDS
enum { KEY_TILES = CHUNK / 16 };

// The largest of `dims` values of each of the 16 rows of a tile, at least 2^-40.
static f32v largest_in_tile(const uint16_t *tile, int dims) {
  f32v top[4] = {splat(0x1p-40f), splat(0), splat(0), splat(0)};  // a single chain would wait for each maximum
  int d = 0;
  for (; d + 4 <= dims; d += 4, prefetch_once((const uint8_t *)(tile + 16 * d), 128))
    for (int j = 0; j < 4; j++) top[j] = max_(top[j], abs_(from_f16(ld16(tile + 16 * (d + j)))));
  for (; d < dims; d++) top[0] = max_(top[0], abs_(from_f16(ld16(tile + 16 * d))));
  return max_(max_(top[0], top[1]), max_(top[2], top[3]));
}

// The values d..d + 15 of a tile of 16 positions, one position a row.
INLINE void value_block(const Cache *cache, int t, int d, u16x16 raw[16]) {
  if (cache->v) {
    for (int r = 0; r < 16; r++) raw[r] = ld16(cache->v + ((size_t)t * 16 + r) * cache->v_dim + d);
  } else {
    for (int r = 0; r < 16; r++) raw[r] = ld16(cache->k + ((size_t)t * cache->k_dim + d + r) * 16);
    transpose16(raw);
  }
}

// The largest value of each of 16 positions.
static f32v largest_values(const Cache *cache, int t) {
  f32v top = splat(0x1p-40f);
  for (int r = 0; r < 16; r++) {
    const uint16_t *v = cache->v + ((size_t)t * 16 + r) * cache->v_dim;
    f32v most = splat(0);
    int d = 0;
    prefetch_once((const uint8_t *)v, 2 * cache->v_dim);
    for (; d + 16 <= cache->v_dim; d += 16) most = max_(most, abs_(from_f16(ld16(v + d))));
    if (d < cache->v_dim) {
      i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      most = max_(most, select_(lane < cache->v_dim - d, abs_(from_f16(ld16(v + d))), splat(0)));
    }
    float one = hmax(most);
    top[r] = one > top[r] ? one : top[r];
  }
  return top;
}

// The power of two at or below x, which is positive, and its logarithm.
INLINE f32v power_of(f32v x) { return (f32v)((i32v)x & 0x7f800000); }
INLINE f32v log_of_power(f32v power) { return from_int(((i32v)power >> 23) - 127) * 0.693147181f; }

// e^x for x <= 0, relative error below 4e-6; at least 2^-126.
INLINE f32v exp_short(f32v x) {
  f32v log2e = splat(1.44269504f), magic = splat(12582912.0f);
  x = max_(x, splat(-87.0f));
  f32v n = fma_(x, log2e, magic), r = fma_(x, log2e, -(n - magic));
  f32v p = splat(9.58285531e-3f);
  p = fma_(p, r, splat(5.59064304e-2f)), p = fma_(p, r, splat(2.40240986e-1f)), p = fma_(p, r, splat(6.93124193e-1f));
  p = fma_(p, r, splat(1.0f));
  return (f32v)((i32v)p + ((i32v)n << 23));
}
#endif
