// Attention of many query vectors over one chunk of the cache as words (words.h): scores are products of tiles of 16 keys, as the
// groups of rows, with queries as columns; results those of 16 values of all keys with the weights of each query.
#pragma once
#include "attention_planes.h"
#include "panels.h"

#if WORDS
enum { BLOCK = 16 };  // queries whose scores are computed together, a vector of them
INLINE int depths_of(int n) { return (n + DEPTH - 1) / DEPTH; }

// Queries of a task in panels of TILE_COLUMNS, as the columns of a product.
typedef struct { int16_t *words; PanelScale *scales; } PlaneQueries;

// What a task has room for, besides its queries: the keys of a chunk ([depth][tile]) and values ([16 of them]), scores [tile][BLOCK]
// and weights ([panel][32 keys][TILE_COLUMNS]) of a block, and its results.
typedef struct { Planes *keys, *values; f32v *scores; int16_t *weights; PanelScale *scales; float *out; } Room;

static void clear_queries(const PlaneQueries *q, int k_dim, int count) {}

// Query vector m: x, of n values, times `scale`.
static void put_plane_query(const PlaneQueries *q, int m, const float *x, int n, float scale) {
  int first = m / TILE_COLUMNS * TILE_COLUMNS, c = m - first;
  PanelScale *scales = q->scales + first * (n / SCALED);
  prepare_planes(x, n, NULL, 1, (float *)(q->words + (size_t)first * n), scales, TILE_COLUMNS, c);
  for (int i = 0; i < n / SCALED; i++) scales[i * TILE_COLUMNS + c].scale *= scale;
}

// The chunk and the results that are folded into.
typedef struct {
  const PlaneQueries *q;
  const Room *room;
  const int *from, *limit;
  float *m, *l, *o;
  int first, tiles, k_dim, width;  // of tiles of keys: an even number, and an end
  f32v log_power[KEY_TILES], inverse_power[KEY_TILES];
} Attended;

// Values d..d + 15 of all keys as a group of rows, of each key times `up`. In 32 keys i and i + 16 share a lane.
static void put_values(Planes *to, const Cache *cache, int d, const Attended *a, int tiles, const f32v *up) {
  for (int t = a->first; t < a->tiles; t += 2) {
    u16x16 raw[2][16] = {{{0}}};
    for (int i = 0; i < 2 && t + i < tiles; i++) value_block(cache, t + i, d, raw[i]);
    for (int r = 0; r < 16; r += 2) {
      u32v x[4];
      for (int i = 0; i < 4; i++) x[i] = low_half(from_f16(raw[i / 2][r + i % 2]), splat(up[t + i / 2][r + i % 2]));
      put(to, 4 * (t - a->first) + r / 2, (i16v)((x[0] & 0xffff) | x[2] << 16), (i16v)((x[1] & 0xffff) | x[3] << 16));
    }
  }
  to->d = splat(2.0f / LIMIT);  // a value is below twice its power
}

// Scores of n queries, the first of which begins a panel, and all keys.
static void score(const Attended *a, int first, int n, int tiles) {
  for (int k = 0; k < a->k_dim; k += DEPTH)
    for (int t = a->first, many; t < tiles; t += many) {
      many = tile_groups(tiles - t);
      for (int c = 0; c < n; c += TILE_COLUMNS) {
        size_t column = (size_t)(first + c) * a->k_dim + TILE_COLUMNS * k;
        int depth = a->k_dim - k < DEPTH ? a->k_dim - k : DEPTH;
        tiles_of_groups[many - 1](a->room->keys + k / DEPTH * KEY_TILES + t, a->q->words + column, a->q->scales + column / SCALED, depth / 32,
                                  (Sums){a->room->scores + t * BLOCK + c, BLOCK, 1, k > 0});
      }
    }
}

// Score of query i of all, and tile t of keys, plus the logarithms of the values' powers; of keys that it does not see, -inf.
INLINE f32v seen_score(const Attended *a, int i, int t, f32v score) {
  f32v x = score + a->log_power[t];
  i32v key = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if (16 * t >= a->from[i] && 16 * t + 16 <= a->limit[i]) return x;
  key += 16 * t;
  return select_((key < a->limit[i]) & (key >= a->from[i]), x, splat(-__builtin_inff()));
}

// Makes these of the scores of query c of a block, number i of all, and tiles below `tiles`; returns the largest.
static float largest_score(const Attended *a, int i, int c, int tiles) {
  f32v even = splat(-__builtin_inff()), odd = even;
  for (int t = a->first; t < tiles; t += 2) {
    f32v *s = a->room->scores + t * BLOCK + c, x = seen_score(a, i, t, s[0]), y = seen_score(a, i, t + 1, s[BLOCK]);
    s[0] = x, s[BLOCK] = y, even = max_(even, x), odd = max_(odd, y);
  }
  return a->limit[i] > a->from[i] ? hmax(max_(even, odd)) : 0;
}

// Puts their exponentials in their place, relative to the largest. Gives the sum, without the values' powers, and the largest sum of
// squares of 32.
static void exponentials(const Attended *a, int c, int tiles, float top, float *sum, float *square) {
  f32v even = splat(0), odd = even, squares[KEY_TILES / 2] = {{0}};
  for (int t = a->first; t < tiles; t += 2) {
    f32v *s = a->room->scores + t * BLOCK + c, x = exp_short(s[0] - top), y = exp_short(s[BLOCK] - top);
    s[0] = x, s[BLOCK] = y;
    even = fma_(x, a->inverse_power[t], even), odd = fma_(y, a->inverse_power[t + 1], odd), squares[(t - a->first) / 2] = fma_(x, x, y * y);
  }
  *sum = hsum(even + odd), *square = hmax(sums_of_eight(squares));
}

// They become words, times `up`.
static void put_weights(const Attended *a, int c, int tiles, float up) {
  int panel = c / TILE_COLUMNS * TILE_COLUMNS, n = (tiles - a->first) / 2;
  int16_t *to = a->room->weights + panel * CHUNK + 32 * (c - panel);
  PanelScale *scales = a->room->scales + panel * (CHUNK / SCALED) + c - panel;
  u32v words[KEY_TILES / 2];
  for (int b = 0; b < n; b++) {
    const f32v *x = a->room->scores + (a->first + 2 * b) * BLOCK + c;
    words[b] = (low_half(x[0], splat(up)) & 0xffff) | low_half(x[BLOCK], splat(up)) << 16;
    memcpy(to + b * 32 * TILE_COLUMNS, &words[b], 64);
  }
  for (int b = 0; b < n; b += 4) {
    i32v minus = PAIRED ? minus_of(words + b, n - b < 4 ? n - b : 4) : splat_int(0);
    for (int j = 0; j < 4; j++) scales[(b + j) * TILE_COLUMNS] = (PanelScale){1.0f / up, minus[j]};
  }
}

// Weights of the n queries of a block, which are number i of all and on, and what earlier results and those of this chunk are multiplied
// with (as in attention.h's merge). Step by step for all of them, so that the horizontal parts of one overlap the next one.
static void weigh_keys(const Attended *a, int i, int n, int tiles, float *keep, float *add) {
  float top[BLOCK], sum[BLOCK], square[BLOCK];
  for (int c = 0; c < n; c++) top[c] = largest_score(a, i + c, c, tiles);
  for (int c = 0; c < n; c++) exponentials(a, c, tiles, top[c], sum + c, square + c);
  for (int c = 0; c < n; c++) {
    float up = COLUMN_NORM / __builtin_sqrtf(square[c]);
    put_weights(a, c, tiles, up < COLUMN_LIMIT ? up : COLUMN_LIMIT);
  }
  f32v now = ldf(top), old = fetch(a->m + i, n), l = fetch(a->l + i, n);
  i32v some, fresh = l == splat(0);
  for (int c = 0; c < BLOCK; c++) some[c] = c < n && a->limit[i + c] > a->from[i + c] ? -1 : 0;
  f32v high = select_(fresh | (now > old), now, old), by = select_(some, exp_(now - high), splat(0));
  f32v kept = select_(some, select_(fresh, splat(0), exp_(old - high)), splat(1));
  stf(keep, kept), stf(add, by);
  store(a->m + i, select_(some, high, old), n), store(a->l + i, l * kept + ldf(sum) * by, n);
}

// Attention of `count` queries over a chunk, folded into their running (m, l, o), as by attend and merge.
static void attend_in_planes(const Cache *cache, const PlaneQueries *q, int count, const int *from, const int *limit, const Room *room,
                             float *m, float *l, float *o) {
  Attended a = {q, room, from, limit, m, l, o, .k_dim = cache->k_dim, .width = (cache->v_dim + 15) / 16 * 16};
  f32v up[KEY_TILES];
  int tiles;
  seen_tiles(count, from, limit, &a.first, &tiles);
  a.first = a.first / 2 * 2, a.tiles = (tiles + 1) / 2 * 2;
  for (int t = a.first; t < a.tiles; t++) {
    a.log_power[t] = a.inverse_power[t] = up[t] = splat(0);
    if (t >= tiles) continue;
    const uint16_t *tile = cache->k + (size_t)t * 16 * cache->k_dim;
    f32v power = power_of(cache->v ? largest_values(cache, t) : largest_in_tile(tile, cache->v_dim));
    a.log_power[t] = log_of_power(power), a.inverse_power[t] = 1.0f / power, up[t] = (LIMIT / 2) / power;
    for (int k = 0; k < cache->k_dim; k += DEPTH)
      F16_unpack((const uint8_t *)tile, cache->k_dim, k, cache->k_dim - k < DEPTH ? cache->k_dim - k : DEPTH, room->keys + k / DEPTH * KEY_TILES + t,
                 32 * cache->k_dim);
  }
  for (int d = 0; d < a.width; d += 16) put_values(room->values + d / 16, cache, d, &a, tiles, up);
  for (int first = 0; first < count; first += BLOCK) {
    float keep[BLOCK], add[BLOCK];
    int n = count - first < BLOCK ? count - first : BLOCK, begin, seen;
    seen_tiles(n, from + first, limit + first, &begin, &seen);
    if (seen <= a.first) continue;
    score(&a, first, n, seen);
    seen = (seen + 1) / 2 * 2;
    weigh_keys(&a, first, n, seen, keep, add);
    for (int d = 0, many; d < a.width / 16; d += many) {
      many = tile_groups(a.width / 16 - d);
      for (int c = 0; c < n; c += TILE_COLUMNS)
        tiles_of_groups[many - 1](room->values + d, room->weights + c * CHUNK, room->scales + c * (CHUNK / SCALED), (seen - a.first) / 2,
                                  (Sums){(f32v *)(room->out + c * a.width) + d, 1, a.width / 16, 0});
    }
    for (int c = 0; c < n; c++)
      for (float *y = o + (size_t)(first + c) * a.width, *x = room->out + c * a.width, *end = x + a.width; x < end; x += 16, y += 16)
        stf(y, fma_(ldf(x), splat(add[c]), ldf(y) * keep[c]));
  }
}
#endif
