// Attention of many query vectors over one chunk of the cache in tiles: what attend (attention.h) computes, with queries, keys,
// weights and values as 16-bit integers, each as two planes of bytes, of whose four products three are summed (not low times low).
#pragma once
#include "attention_planes.h"
#include "tiles.h"

#if TILES
enum { LIMIT_16 = 32600, LIMIT_P = 65400 };  // the largest integers
enum { KEY_STEPS = CHUNK / 64, TOGETHER = 2 };

// 16 rows of 64 values: their high bytes and their low ones. Four values in a lane are 16 apart: i, i + 32, i + 16, i + 48.
typedef struct { u32v high[16], low[16]; } TilePair;
INLINE int tiles_of(int n) { return (n + 63) / 64; }
INLINE int in_panel(int rows, int panel) { return rows - 16 * panel < 16 ? rows - 16 * panel : 16; }  // of so many

// Queries of a task: [count / 16][k_dim / 64], and their scales.
typedef struct { TilePair *rows; float *scale; } PlaneQueries;

// What a task has room for, besides its queries: keys and values of a chunk, weights of TOGETHER panels of 16
// queries, scores of twice as many.
typedef struct { TilePair *keys, *values, *weights; float *scores; } Room;

// Row r of a pair: x[j] * up[j] in 16 bits, each 16 values. The low byte has a sign, so the high one is rounded; it has none in weights.
INLINE void put_row(TilePair *to, int r, const f32v x[4], const f32v up[4]) {
  u32v u[4];
  for (int j = 0; j < 4; j++) u[j] = (u32v)fma_(x[j], up[j], splat(12582912.0f + 128));
  u32v a = (u[0] & 0xffff) | u[1] << 16, b = (u[2] & 0xffff) | u[3] << 16;
  to->high[r] = (a >> 8 & 0x00ff00ff) | (b & 0xff00ff00);
  to->low[r] = ((a & 0x00ff00ff) | (b << 8 & 0xff00ff00)) ^ 0x80808080;
}

INLINE float largest(const float *x, int n) {
  f32v top = splat(0);
  for (int d = 0; d < n; d += 16) top = max_(top, abs_(fetch(x + d, n - d)));
  return hmax(top);
}

static void clear_queries(const PlaneQueries *q, int k_dim, int count) {
  size_t panels = (size_t)(count + 15) / 16;
  memset(q->rows, 0, sizeof(TilePair) * tiles_of(k_dim) * panels), memset(q->scale, 0, sizeof(float) * 16 * panels);
}

// Query vector m: x, of n values, times `scale`.
static void put_plane_query(const PlaneQueries *q, int m, const float *x, int n, float scale) {
  float top = largest(x, n);
  q->scale[m] = top * scale / LIMIT_16;
  f32v up = splat(top > 0x1p-100f ? LIMIT_16 / top : 0);
  for (int i = 0; i < tiles_of(n); i++) {
    f32v part[4];
    for (int j = 0; j < 4; j++) part[j] = 64 * i + 16 * j < n ? fetch(x + 64 * i + 16 * j, n - 64 * i - 16 * j) : splat(0);
    put_row(q->rows + m / 16 * tiles_of(n) + i, m % 16, part, (f32v[]){up, up, up, up});
  }
}

// A tile of 16 keys, `top` the largest value of each, as the right factor; returns their scales.
static f32v put_keys(TilePair *to, const uint16_t *tile, int k_dim, f32v top) {
  f32v up = (float)LIMIT_16 / top;
  for (int i = 0; i < tiles_of(k_dim); i++)
    for (int r = 0; r < 16; r++) {
      f32v x[4];
      for (int j = 0; j < 4; j++) {
        int d = 64 * i + 16 * j + r;
        x[j] = d < k_dim ? from_f16(ld16(tile + 16 * d)) : splat(0);
      }
      put_row(&to[i], r, x, (f32v[]){up, up, up, up});
    }
  return top * (256.0f / LIMIT_16);  // sums are of high bytes' products
}

// Tile k of 64 positions and the values d..d + 15 as the right factor; `up`: of each position.
static void put_values(TilePair *to, const Cache *cache, int k, int d, int first, int tiles, const f32v *up) {
  u16x16 raw[4][16] = {{{0}}};
  for (int j = 0; j < 4; j++)
    if (4 * k + j >= first && 4 * k + j < tiles) value_block(cache, 4 * k + j, d, raw[j]);
  for (int r = 0; r < 16; r++) {
    f32v x[4], by[4];
    for (int j = 0; j < 4; j++) x[j] = from_f16(raw[j][r]), by[j] = splat(4 * k + j >= first && 4 * k + j < tiles ? up[4 * k + j][r] : 0);
    put_row(to, r, x, by);
  }
}

// Sums over `steps` tiles of 64 values of 16 rows x and of the columns of two right factors: of the products of high bytes in
// tiles 0 and 2, of those of a high and a low one in 1 and 3.
typedef struct { i32v at[4][16]; } TileSums;
// After each product comes a part of other work, in vectors: with a busy sibling a core does little beside loads of tiles.
#define TILE_PRODUCTS(DOT_HIGH, DOT_LOW, WORK)                                                                                  \
  tile_zero(0), tile_zero(1), tile_zero(2), tile_zero(3);                                                                       \
  for (int k = 0; k < steps; k++) {  /* a sum is used again after two or three other products */                               \
    tile_load(5, x[k].low, 64), tile_load(6, y[k].high, 64);                                                                    \
    DOT_LOW(1, 5, 6); WORK;                                                                                                     \
    tile_load(7, z[k].high, 64);                                                                                                \
    DOT_LOW(3, 5, 7); WORK;                                                                                                     \
    tile_load(4, x[k].high, 64);                                                                                                \
    DOT_HIGH(0, 4, 6); WORK;                                                                                                    \
    tile_load(6, y[k].low, 64);                                                                                                 \
    DOT_HIGH(2, 4, 7); WORK;                                                                                                    \
    tile_load(7, z[k].low, 64);                                                                                                 \
    DOT_HIGH(1, 4, 6); WORK;                                                                                                    \
    DOT_HIGH(3, 4, 7); WORK;                                                                                                    \
  }
INLINE void keep_sums(TileSums *to) {
  tile_store(0, to->at[0], 64), tile_store(1, to->at[1], 64), tile_store(2, to->at[2], 64), tile_store(3, to->at[3], 64);
}
INLINE f32v sum_of(const TileSums *s, int which, int row) {
  return fma_(from_int(s->at[2 * which][row]), splat(256), from_int(s->at[2 * which + 1][row]));
}

// Weights of 64 positions as row r of `to`: exponentials of scores relative to the largest. Adds them, without the values' powers.
INLINE f32v put_weights(TilePair *to, int r, const f32v s[4], float max, const f32v *inverse_power, f32v total) {
  f32v x[4], by = splat(LIMIT_P);
  for (int j = 0; j < 4; j++) x[j] = exp_short(s[j] - max);
  for (int j = 0; j < 4; j++) total = fma_(x[j], inverse_power[j], total);
  put_row(to, r, x, (f32v[]){by, by, by, by});
  return total;
}

// The positions of a chunk that the queries of a panel see: tiles first..tiles - 1; inside..outside - 1 all of them.
typedef struct { int first, tiles, inside, outside; } Seen;
static Seen seen_by(const int *from, const int *limit, int rows, int first) {
  int begin = CHUNK, end = 0, inside = 0, outside = CHUNK;
  for (int c = 0; c < rows; c++) {
    if (limit[c] > from[c]) begin = from[c] < begin ? from[c] : begin, end = limit[c] > end ? limit[c] : end;
    inside = from[c] > inside ? from[c] : inside, outside = limit[c] < outside ? limit[c] : outside;
  }
  return (Seen){first + (begin / 16 - first) / 2 * 2, (end + 15) / 16, inside, outside};
}

// Panels whose scores are computed together, and their queries' weights.
typedef struct {
  int first, n, rows, begun, weighed;  // panel, panels, queries; panels whose weights are begun, queries that have theirs
  float *scores;
  float top[16 * TOGETHER], keep[16 * TOGETHER], add[16 * TOGETHER];
  Seen seen[TOGETHER];
} Together;

// The products of one panel and two tiles of keys, or of values, which lie in `sums`: n tiles, of which number `at` is the first key, or
// value; `rows` of its queries, `done` of which have been added.
typedef struct { TileSums sums; int panel, at, n, rows, done; } Unit;
INLINE void begin_unit(Unit *u, int panel, int at, int n, int rows) {
  u->panel = panel, u->at = at, u->n = n, u->rows = in_panel(rows, panel), u->done = 0;
}

// The chunk and the results that are folded into.
typedef struct {
  const PlaneQueries *q;
  const Room *room;
  const int *from, *limit;
  float *m, *l, *o;
  int first, tiles, deep, width;
  f32v key_scale[KEY_TILES + 1], log_power[KEY_TILES + 1], inverse_power[KEY_TILES];
} Attended;

// Scores of the next eight queries of a unit, plus the logarithms of their values' powers; of keys that a query does not see, -inf.
static void add_scores(const Attended *a, const Together *g, Unit *u) {
  const Seen *see = &g->seen[u->panel];
  int first = u->done, t = u->at;
  const float *scale = a->q->scale + 16 * (g->first + u->panel) + first;
  float *s = g->scores + (16 * u->panel + first) * CHUNK + 16 * t;
  const f32v by[2] = {a->key_scale[t], a->key_scale[t + 1]}, more[2] = {a->log_power[t], a->log_power[t + 1]};
  for (int r = 0; r < 8; r++)  // the second tile may be one that nobody sees
    for (int i = 0; i < 2; i++) stf(s + r * CHUNK + 16 * i, fma_(sum_of(&u->sums, i, first + r), by[i] * scale[r], more[i]));
  u->done += 8;
  if (16 * t >= see->inside && 16 * (t + u->n) <= see->outside) return;
  i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int *from = a->from + 16 * (g->first + u->panel), *limit = a->limit + 16 * (g->first + u->panel);
  for (int r = first; r < first + 8 && r < u->rows; r++, s += CHUNK)
    for (int i = 0; i < 2; i++) {
      i32v key = lane + 16 * (t + i);
      stf(s + 16 * i, select_((key < limit[r]) & (key >= from[r]), ldf(s + 16 * i), splat(-__builtin_inff())));
    }
}

// The new maxima of a panel's queries, and what earlier results and those of this chunk are multiplied with (as in attention.h's merge).
static void begin_weights(const Attended *a, Together *g, int panel) {
  int c = 16 * panel, i = 16 * g->first + c, rows = in_panel(g->rows, panel);
  f32v none = splat(0), top = none, old = fetch(a->m + i, rows);
  i32v some = (i32v)none, fresh = fetch(a->l + i, rows) == none;
  for (int r = 0; r < rows; r++) {
    const float *s = g->scores + (c + r) * CHUNK;
    f32v even = splat(-__builtin_inff()), odd = even;
    for (int t = g->seen[panel].first; t < g->seen[panel].tiles; t += 2) even = max_(even, ldf(s + 16 * t));
    for (int t = g->seen[panel].first + 1; t < g->seen[panel].tiles; t += 2) odd = max_(odd, ldf(s + 16 * t));
    top[r] = hmax(max_(even, odd)), some[r] = a->limit[i + r] > a->from[i + r] ? -1 : 0;
  }
  top = select_(some, top, none);
  f32v high = select_(fresh | (top > old), top, old);
  stf(g->top + c, top), stf(g->keep + c, select_(some, select_(fresh, none, exp_(old - high)), splat(1)));
  stf(g->add + c, select_(some, exp_(top - high), none));
  store(a->m + i, select_(some, high, old), rows);
}

// The next query's weights; in front of a panel's first one, what they begin with.
static void weigh_next(const Attended *a, Together *g) {
  int c = g->weighed, i = 16 * g->first + c, first = g->seen[c / 16].first, tiles = g->seen[c / 16].tiles;
  if (g->begun == c / 16) {
    begin_weights(a, g, g->begun++);
    return;
  }
  f32v total = splat(0);
  for (int k = first / 4; 4 * k < tiles; k++) {
    const float *s = g->scores + c * CHUNK + 64 * k;
    f32v x[4];
    for (int j = 0; j < 4; j++) x[j] = ldf(s + 16 * j);
    if (4 * k < first || 4 * k + 4 > tiles)
      for (int j = 0; j < 4; j++)
        if (4 * k + j < first || 4 * k + j >= tiles) x[j] = splat(-__builtin_inff());
    total = put_weights(a->room->weights + c / 16 * KEY_STEPS + k, c % 16, x, g->top[c], a->inverse_power + 4 * k, total);
  }
  if (g->add[c] != 0) a->l[i] = a->l[i] * g->keep[c] + hsum(total) * g->add[c];
  g->weighed++;
}

// A part of the work beside products: scores of the unit before, then weights of the panels before, up to query `end`.
INLINE void work_beside(const Attended *a, const Together *g, Unit *last, Together *before, int end) {
  if (last->done < last->rows) add_scores(a, g, last);
  else if (before->weighed < end) weigh_next(a, before);
}

// Products of all keys of the chunk and g's panels, while the weights of those before are computed.
static void score(const Attended *a, Together *g, Together *before) {
  Unit units[2] = {{.n = 0}, {.n = 0}}, *now = &units[0], *last = &units[1];
  int all = (a->tiles - a->first + 1) / 2 * g->n, done = 0, steps = a->deep;
  for (int t = a->first; t < a->tiles; t += 2)
    for (int p = 0; p < g->n; p++) {
      const Seen *see = &g->seen[p];
      int end = before->rows * ++done / all;
      if (t + 1 < see->first || t >= see->tiles) continue;
      begin_unit(now, p, t, t + 1 < a->tiles ? 2 : 1, g->rows);
      const TilePair *x = a->q->rows + (g->first + p) * a->deep, *y = a->room->keys + t * a->deep, *z = y + (now->n - 1) * a->deep;
      TILE_PRODUCTS(tile_dot_s, tile_dot_s, work_beside(a, g, last, before, end))
      while (last->done < last->rows || before->weighed < end) work_beside(a, g, last, before, end);
      keep_sums(&now->sums);
      Unit *swap = now;
      now = last, last = swap;
    }
  while (last->done < last->rows || before->weighed < before->rows) work_beside(a, g, last, before, before->rows);
}

#define STEP_OF_SUM (512.0f / LIMIT_16 / LIMIT_P)  // of weights and values; 256 for the sums, 2 since a value is below twice its power
// o = o * keep + add * sums, of the next eight queries.
static void add_values(const Attended *a, const Together *g, Unit *u) {
  const float *keep = g->keep + 16 * u->panel, *add = g->add + 16 * u->panel;
  float *o = a->o + (size_t)(16 * (g->first + u->panel) + u->done) * a->width + u->at;
  for (int end = u->done + 8; u->done < end && u->done < u->rows; u->done++, o += a->width)
    for (int i = 0; i < u->n; i++)
      stf(o + 16 * i, fma_(sum_of(&u->sums, i, u->done) * STEP_OF_SUM, splat(add[u->done]), ldf(o + 16 * i) * keep[u->done]));
}

// Products of g's weights and all values.
static void add_weighted(const Attended *a, const Together *g) {
  Unit units[2] = {{.n = 0}, {.n = 0}}, *now = &units[0], *last = &units[1];
  tiles_written(a->room->weights);
  for (int d = 0; d < a->width; d += 32)
    for (int p = 0; p < g->n; p++) {
      int begin = g->seen[p].first / 4, steps = (g->seen[p].tiles + 3) / 4 - begin;
      if (steps <= 0) continue;
      begin_unit(now, p, d, d + 16 < a->width ? 2 : 1, g->rows);
      const TilePair *x = a->room->weights + p * KEY_STEPS + begin, *y = a->room->values + d / 16 * KEY_STEPS + begin;
      const TilePair *z = y + (now->n - 1) * KEY_STEPS;
      TILE_PRODUCTS(tile_dot_us, tile_dot_s, if (last->done < last->rows) add_values(a, g, last))
      keep_sums(&now->sums);
      Unit *swap = now;
      now = last, last = swap;
    }
  while (last->done < last->rows) add_values(a, g, last);
}
#undef TILE_PRODUCTS

// Attention of `count` queries over a chunk, folded into their running (m, l, o), as by attend and merge.
static void attend_in_planes(const Cache *cache, const PlaneQueries *q, int count, const int *from, const int *limit, const Room *room,
                            float *m, float *l, float *o) {
  Attended a = {q, room, from, limit, m, l, o, .deep = tiles_of(cache->k_dim), .width = (cache->v_dim + 15) / 16 * 16};
  f32v up[KEY_TILES];
  seen_tiles(count, from, limit, &a.first, &a.tiles);
  for (int t = 0; t < KEY_TILES; t++) {
    a.inverse_power[t] = up[t] = splat(0);
    if (t < a.first || t >= a.tiles) continue;
    const uint16_t *tile = cache->k + (size_t)t * 16 * cache->k_dim;
    int of_keys = cache->v ? 0 : cache->v_dim;  // where the values are the first ones of a key, these are looked at once
    f32v value = cache->v ? largest_values(cache, t) : largest_in_tile(tile, of_keys);
    f32v key = largest_in_tile(tile + 16 * of_keys, cache->k_dim - of_keys);
    f32v power = power_of(value);
    a.key_scale[t] = put_keys(room->keys + t * a.deep, tile, cache->k_dim, of_keys ? max_(key, value) : key);
    a.log_power[t] = log_of_power(power);
    a.inverse_power[t] = 1.0f / power, up[t] = (LIMIT_16 / 2) / power;
  }
  for (int d = 0; d < a.width; d += 16)
    for (int k = a.first / 4; 4 * k < a.tiles; k++) put_values(room->values + d / 16 * KEY_STEPS + k, cache, k, d, a.first, a.tiles, up);
  tiles_written(room->keys);
  tiles_begin(16, 16, 64);
  Together groups[2] = {{.n = 0}, {.n = 0}}, *now = &groups[0], *before = &groups[1];
  for (int p = 0, panels = (count + 15) / 16; p < panels || before->n; p += TOGETHER) {  // the last ones have only others before them
    int n = panels - p < TOGETHER ? panels - p : TOGETHER, rows = count - 16 * p;
    now->first = p, now->n = n > 0 ? n : 0, now->rows = rows < 0 ? 0 : rows < 16 * TOGETHER ? rows : 16 * TOGETHER;
    now->begun = now->weighed = 0, now->scores = room->scores + (now - groups) * TOGETHER * 16 * CHUNK;
    for (int i = 0; i < n; i++) now->seen[i] = seen_by(from + 16 * (p + i), limit + 16 * (p + i), in_panel(rows, i), a.first);
    score(&a, now, before);
    add_weighted(&a, before);
    Together *swap = now;
    now = before, before = swap;
  }
  tiles_end();
}
#endif
