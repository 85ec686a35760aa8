// Attention of M query vectors over one chunk of the cache, and the merge of chunks.
//
// K rows are stored as tiles of 16 positions, [dim][16] half-precision, so that a vector holds one dim of 16 positions and
// scores need no horizontal sums. V rows are plain, [position][dim]; latent attention (MLA) has none: its V is K, transposed.
#pragma once
#include "simd.h"

enum { CHUNK = 256 };  // positions; a fixed size, so that results do not depend on the number of threads

typedef struct {
  const uint16_t *k;  // first tile of the chunk
  const uint16_t *v;  // first V row of the chunk; NULL: V is K
  int k_dim, v_dim;
} Cache;

// Writes `dim` values as row pos of a tile of 16 positions.
static void store_k(uint16_t *tile, const float *x, int dim, int pos) {
  for (int d = 0; d < dim; d += 16) {
    u16x16 h = to_f16(fetch(x + d, dim - d));
    for (int i = 0; i < 16 && d + i < dim; i++) tile[(d + i) * 16 + (pos & 15)] = h[i];
  }
}

// Query vectors that share what is loaded, as many as keep their sums in registers: of scores (then REST at a time), of values.
#if defined(__AVX512F__)
enum { WIDE = 8, REST = 4, AT_ONCE = 1 };
#else
enum { WIDE = 2, REST = 1, AT_ONCE = 3 };
#endif

// s[c] = q[c] . k for m vectors and the 16 positions of a tile.
INLINE void scores(const uint16_t *tile, int k_dim, const float *q, int stride, float *s, int m) {
  f32v even[WIDE], odd[WIDE];  // two chains each, to hide the latency of an addition
  for (int c = 0; c < m; c++) even[c] = odd[c] = splat(0);
  int d = 0;
  for (; d + 1 < k_dim; d += 2, tile += 32, q += 2 * stride) {
    prefetch((const uint8_t *)tile, 64);
    f32v a = from_f16(ld16(tile)), b = from_f16(ld16(tile + 16));
    for (int c = 0; c < m; c++) even[c] = fma_(a, splat(q[c]), even[c]), odd[c] = fma_(b, splat(q[stride + c]), odd[c]);
  }
  if (d < k_dim)
    for (int c = 0; c < m; c++) even[c] = fma_(from_f16(ld16(tile)), splat(q[c]), even[c]);
  for (int c = 0; c < m; c++) stf(s + c * CHUNK, even[c] + odd[c]);
}

// out[c] += p[c] . v for m vectors of weights and 16 positions.
INLINE void weigh(const float *p, const f32v v[16], float *out, int width, int m) {
  f32v even[AT_ONCE], odd[AT_ONCE];
  for (int c = 0; c < m; c++) even[c] = ldf(out + (size_t)c * width), odd[c] = splat(0);
  for (int r = 0; r < 16; r += 2)
    for (int c = 0; c < m; c++) {
      even[c] = fma_(v[r], splat(p[c * CHUNK + r]), even[c]);
      odd[c] = fma_(v[r + 1], splat(p[c * CHUNK + r + 1]), odd[c]);
    }
  for (int c = 0; c < m; c++) stf(out + (size_t)c * width, even[c] + odd[c]);
}

// The tiles of 16 positions, first..tiles - 1, that `count` query vectors see: the positions from[c]..limit[c] - 1.
static void seen_tiles(int count, const int *from, const int *limit, int *first, int *tiles) {
  int rows = 0, begin = CHUNK;
  for (int c = 0; c < count; c++) rows = limit[c] > rows ? limit[c] : rows, begin = from[c] < begin ? from[c] : begin;
  *first = begin / 16, *tiles = (rows + 15) / 16;
}

// The largest of each vector's scores; makes those of positions that it does not see -inf.
static void highest_scores(float *s, int count, const int *from, const int *limit, int first, int tiles, float *max) {
  i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32v none = splat(-__builtin_inff());
  for (int c = 0; c < count; c++) {  // before any exponentials, so that the horizontal steps of one vector overlap the next one
    float *p = s + c * CHUNK;
    f32v even = none, odd = none;
    for (int t = first; t < tiles; t++)
      if (16 * t < from[c] || 16 * t + 16 > limit[c])
        stf(p + 16 * t, select_((lane + 16 * t < limit[c]) & (lane + 16 * t >= from[c]), ldf(p + 16 * t), none));
    for (int t = first; t < tiles; t += 2) even = max_(even, ldf(p + 16 * t));
    for (int t = first + 1; t < tiles; t += 2) odd = max_(odd, ldf(p + 16 * t));
    max[c] = limit[c] > from[c] ? hmax(max_(even, odd)) : 0;
  }
}

// q: [k_dim][stride], scaled; vectors 0..count-1 see the chunk's positions from[c]..limit[c] - 1. s: scratch, stride * CHUNK,
// count filled up to a multiple of 4. Gives, per vector, the maximum, the sum of exponentials and the weighted sum of V.
static void attend(const Cache *cache, const float *q, int stride, int count, const int *from, const int *limit, float *s,
                   float *max, float *sum, float *out) {
  int first, tiles, m = (count + REST - 1) / REST * REST;
  seen_tiles(count, from, limit, &first, &tiles);
  for (int t = first; t < tiles; t++) {
    const uint16_t *tile = cache->k + (size_t)t * 16 * cache->k_dim;
    int c = 0;
    for (; c + WIDE <= m; c += WIDE) scores(tile, cache->k_dim, q + c, stride, s + c * CHUNK + 16 * t, WIDE);
    for (; c < m; c += REST) scores(tile, cache->k_dim, q + c, stride, s + c * CHUNK + 16 * t, REST);
  }
  highest_scores(s, count, from, limit, first, tiles, max);
  for (int c = 0; c < count; c++) {
    float *p = s + c * CHUNK;
    f32v total = splat(0);
    for (int t = first; t < tiles; t++) {
      f32v x = exp_(ldf(p + 16 * t) - max[c]);
      stf(p + 16 * t, x);
      total += x;
    }
    sum[c] = hsum(total);
  }
  int width = (cache->v_dim + 15) / 16 * 16;  // of a row of out; what lies past v_dim is never used
  memset(out, 0, sizeof(float) * (size_t)count * width);
  for (int t = first; t < tiles; t++)
    for (int d = 0; d < cache->v_dim; d += 16) {
      u16x16 raw[16];
      f32v v[16];
      if (cache->v) {
        prefetch((const uint8_t *)(cache->v + (size_t)t * 16 * cache->v_dim + 16 * d), 512);
        for (int r = 0; r < 16; r++) raw[r] = ld16(cache->v + ((size_t)t * 16 + r) * cache->v_dim + d);
      } else {
        for (int r = 0; r < 16; r++) raw[r] = ld16(cache->k + ((size_t)t * cache->k_dim + d + r) * 16);
        transpose16(raw);
      }
      for (int r = 0; r < 16; r++) v[r] = from_f16(raw[r]);
      const float *p = s + 16 * t;
      int c = 0;
      for (; c + AT_ONCE <= count; c += AT_ONCE) weigh(p + c * CHUNK, v, out + (size_t)c * width + d, width, AT_ONCE);
      for (; c < count; c++) weigh(p + c * CHUNK, v, out + (size_t)c * width + d, width, 1);
    }
}

// Folds a chunk's (max, sum, out) into the running (m, l, o); chunks come in order of position. An empty one changes nothing.
static void merge(float *m, float *l, float *o, float max, float sum, const float *out, int n) {
  if (sum == 0) return;
  float high = *l == 0 || max > *m ? max : *m;
  float keep = *l == 0 ? 0 : exp_(splat(*m - high))[0], add = exp_(splat(max - high))[0];
  *l = *l * keep + sum * add;
  *m = high;
  for (int d = 0; d < n; d += 16) stf(o + d, fma_(ldf(out + d), splat(add), ldf(o + d) * keep));
}
