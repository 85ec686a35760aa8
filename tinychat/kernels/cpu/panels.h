// Products of some groups of 16 rows with many columns. Where the machine has tiles, weights are unpacked once for all panels of
// columns, and multiplied in one of two ways. For quantised columns, in panels of 16 or 8, the sums are the integers of quant.h,
// scaled and added in the same order, so that the results have the same bits. For columns in planes, weights and columns are sums
// of two bfloat16, three products of which are summed over a whole row in the tiles: no sum is scaled.
#pragma once
#include "quant.h"
#include "tiles.h"

// Of one product, at most. A part of the columns is read once for so many groups.
enum { GROUPS = 16, COLUMNS = 128 };

#if TILES
static int tiles_allowed;  // set by tc_simd, which is called before any product
#else
enum { tiles_allowed };
#endif

// The width of the panel for `left` columns. In tiles a panel with empty columns takes less time than several narrow ones in vectors.
INLINE int panel_width(int left) {
  if (tiles_allowed && left > 2) return left > 8 ? 16 : 8;
  return left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

#if TILES

// Groups, and blocks of 32 elements of each, that are unpacked at a time: they (24 kB) and the part of a panel that they are
// multiplied with (12 kB) fit in the first-level cache; that part of all panels fits in the second, where it stays for all groups.
enum { SIDE = 4, UNPACKED = 8 };

// 32 elements of 16 rows, unpacked: their high bfloat16 and their low ones. A row of a tile has two elements of each row.
typedef struct { u32v high[16], low[16]; } Planes;

// Two values of 16 rows. Their high parts are cut off, so that the low ones have the same sign.
INLINE void to_planes(f32v a, f32v b, u32v *high, u32v *low) {
  u32v ha = (u32v)a & 0xffff0000, hb = (u32v)b & 0xffff0000;
  u32v la = (u32v)(a - (f32v)ha) + 0x8000, lb = (u32v)(b - (f32v)hb) + 0x8000;
  *high = ha >> 16 | hb, *low = la >> 16 | (lb & 0xffff0000);
}

// Packed weights that are unpacked next: `part` bytes are asked for beside each block, since a burst of requests stalls.
typedef struct { const uint8_t *at; int part; } Soon;
INLINE void fetch_soon(Soon soon, int i) {
  for (int j = 0; j < soon.part; j += 64) __builtin_prefetch(soon.at + i * soon.part + j);
}

#define EACH_COLUMN _Pragma("clang loop unroll(full)") for (int c = 0; c < nc; c++)
typedef struct { i32v column[16]; } TileSum;  // each of 16 rows

// Step 0 to 6 of the sums over 32 elements: of the high bytes, then of the low ones; with `split` over the first 16, in steps 7 to
// 13 over the last 16. Codes have no offset; with a minimum they have no sign.
enum { TILE_STEPS = 7 };
INLINE void tile_step(int step, const Sub *u, const int8_t *q, TileSum *sums, int min) {
  int half = step / TILE_STEPS;
  switch (step % TILE_STEPS) {
    case 0: tile_load(6, u->w + 4 * half, 64); break;
    case 1: tile_load(4, q + 16 * half, 64); break;
    case 2: tile_load(5, q + 16 * half + 32, 64); break;
    case 3:
      tile_zero(0);
      if (min) tile_dot_u(0, 4, 6);
      else tile_dot_s(0, 4, 6);
      break;
    case 4:
      tile_zero(1);
      if (min) tile_dot_u(1, 5, 6);
      else tile_dot_s(1, 5, 6);
      break;
    case 5: tile_store(0, sums + 2 * half, 64); break;
    case 6: tile_store(1, sums + 2 * half + 1, 64); break;
  }
}

// out[c] += the n unpacked blocks times column c of nc. The tiles of a block are under way while the block before is
// scaled: their steps stand between its columns.
INLINE void panel(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, Soon soon, int nc, int min, int split,
                  int q6) {
  TileSum sums[2][4];
  f32v acc[16];
  int steps = split ? 2 * TILE_STEPS : TILE_STEPS;
  EACH_COLUMN acc[c] = out[c];
  tiles_written(u);
#define STEPS(FROM, TO, BLOCK)                                           \
  _Pragma("clang loop unroll(full)") for (int s = (FROM); s < (TO); s++) \
    tile_step(s, u + (BLOCK), q + 64 * nc * place(BLOCK, q6), sums[(BLOCK) % 2], min);
  STEPS(0, steps, 0)
  for (int i = 0; i < n; i++) {
    fetch_soon(soon, i);
    const TileSum *t = sums[i % 2];
    const XScale *x = xs + nc * place(i, q6);
    Sub scales = {.d = u[i].d, .d2 = u[i].d2, .m = u[i].m, .m2 = u[i].m2};
#define SCALE(c)                                                                                             \
  i32v p = t[0].column[c] * HIGH + t[1].column[c], r = split ? t[2].column[c] * HIGH + t[3].column[c] : p; \
  acc[c] = scaled(&scales, p, r, &x[c], acc[c], min, split);
    if (i + 1 < n) {
      EACH_COLUMN { STEPS(c * steps / nc, (c + 1) * steps / nc, i + 1) SCALE(c) }
    } else {
      EACH_COLUMN { SCALE(c) }
    }
  }
#undef SCALE
#undef STEPS
  EACH_COLUMN out[c] = acc[c];
}

// The forms of the types: with a minimum or without; with a scale per 16 elements; and Q6_K. Each with 8 columns and with 16.
typedef void (*Panel)(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, Soon soon);
#define FORM_OF(NAME, NC, MIN, SPLIT, Q6)                                                                     \
  static void NAME##NC(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, Soon soon) {        \
    panel(u, n, q, xs, out, soon, NC, MIN, SPLIT, Q6);                                                        \
  }
#define FORM(NAME, ...) FORM_OF(NAME, 8, __VA_ARGS__) FORM_OF(NAME, 16, __VA_ARGS__)
FORM(plain_panel, 0, 0, 0)
FORM(min_panel, 1, 0, 0)
FORM(split_panel, 0, 1, 0)
FORM(min_split_panel, 1, 1, 0)
FORM(q6_panel, 0, 1, 1)

// Adds n blocks times two panels (or one) of columns in planes to the sums of two groups (or one) of rows. A sum is used again
// after three other products, which is about the time that one takes.
typedef struct { const Planes *w[2]; const uint8_t *x[2]; f32v *out[2]; int n, columns[2]; } PlanesProduct;
INLINE void add_planes_of(const PlanesProduct *p, int fresh, int groups, int panels) {
  size_t plane[2] = {64 * (size_t)p->columns[0], 64 * (size_t)p->columns[1]};
#define EACH_SUM(DO)                                   \
  DO(0, 4, 6, p->out[0])                               \
  if (panels > 1) { DO(1, 5, 6, p->out[0] + 16) }      \
  if (groups > 1) {                                    \
    DO(2, 4, 7, p->out[1])                             \
    if (panels > 1) { DO(3, 5, 7, p->out[1] + 16) }    \
  }
#define FRESH(S, A, B, OUT) tile_zero(S);
#define FETCH(S, A, B, OUT) tile_load(S, OUT, 64);
#define KEEP(S, A, B, OUT) tile_store(S, OUT, 64);
#define COLUMNS_OF(TILE, I, LOW) tile_load(TILE, p->x[TILE - 4] + (2 * (I) + LOW) * plane[TILE - 4], 64);
#define WEIGHTS_OF(TILE, I, PART) tile_load(TILE, p->w[TILE - 6][I].PART, 64);
  if (fresh) { EACH_SUM(FRESH) } else { EACH_SUM(FETCH) }
  for (int i = 0; i < p->n; i++) {
    // low columns, then high ones times high weights, then high ones times low weights; a tile is loaded as soon as it is free
    COLUMNS_OF(4, i, 1) WEIGHTS_OF(6, i, high)
    if (groups > 1) { WEIGHTS_OF(7, i, high) }
    if (panels > 1) { COLUMNS_OF(5, i, 1) }
    tile_dot_f(0, 4, 6);
    if (groups > 1) tile_dot_f(2, 4, 7);
    COLUMNS_OF(4, i, 0)
    if (panels > 1) {
      tile_dot_f(1, 5, 6);
      if (groups > 1) tile_dot_f(3, 5, 7);
      COLUMNS_OF(5, i, 0)
    }
    tile_dot_f(0, 4, 6);
    if (panels > 1) tile_dot_f(1, 5, 6);
    WEIGHTS_OF(6, i, low)
    if (groups > 1) {
      tile_dot_f(2, 4, 7);
      if (panels > 1) tile_dot_f(3, 5, 7);
      WEIGHTS_OF(7, i, low)
    }
    tile_dot_f(0, 4, 6);
    if (panels > 1) tile_dot_f(1, 5, 6);
    if (groups > 1) tile_dot_f(2, 4, 7);
    if (panels > 1 && groups > 1) tile_dot_f(3, 5, 7);
  }
  EACH_SUM(KEEP)
#undef EACH_SUM
#undef FRESH
#undef FETCH
#undef KEEP
#undef COLUMNS_OF
#undef WEIGHTS_OF
}

typedef struct {
  X x;
  int first, groups, columns, width, done, n;  // of u: first group, groups, blocks; width: of a panel; done: blocks before those
  size_t pitch, stride;                        // from a group to the next in out, and of weights
  f32v *out;
  Panel one;
  int shape;  // columns of the tiles 4 and 5, in planes
  Sub u[SIDE][UNPACKED];
} Product;

static void add_planes(Product *p, Planes w[2][UNPACKED], int first, int groups) {
  tiles_written(w);
  for (int c = 0; c < p->columns; c += 32) {
    int left = p->columns - c, panels = left > 16 ? 2 : 1, a = panel_width(left), b = panels > 1 ? panel_width(left - 16) : a;
    if (p->shape != 32 * a + b) tiles_begin(a, b, 64), p->shape = 32 * a + b;
    f32v *out = p->out + first * p->pitch + c;
    const uint8_t *x = (const uint8_t *)(p->x.f + (size_t)c * p->x.k);
    const uint8_t *y = x + 64 * (size_t)p->x.k + 128 * (size_t)b * p->done;
    PlanesProduct q = {{w[0], w[1]}, {x + 128 * (size_t)a * p->done, y}, {out, out + p->pitch}, p->n, {a, b}};
    switch (2 * groups + panels) {
      case 3: add_planes_of(&q, !p->done, 1, 1); break;
      case 4: add_planes_of(&q, !p->done, 1, 2); break;
      case 5: add_planes_of(&q, !p->done, 2, 1); break;
      case 6: add_planes_of(&q, !p->done, 2, 2); break;
    }
  }
}

// Adds what is unpacked; `soon`: of the group that is unpacked first then.
static void add_unpacked(Product *p, Soon soon) {
  for (int i = 0; i < p->columns; i += p->width) {
    X x = columns_from(&p->x, (size_t)i);
    for (int g = 0; g < p->groups; g++)
      p->one(p->u[g], p->n, x.q + 64 * p->width * p->done, x.scales + p->width * p->done, p->out + (p->first + g) * p->pitch + i,
             (Soon){soon.at + g * p->stride, i ? 0 : soon.part});
  }
}

// Fills out[group * pitch + column] for `groups` groups of 16 rows, `stride` bytes apart, and `columns` columns, in whole panels of
// `width` or in planes.
typedef void (*Panels)(const uint8_t *a, size_t stride, int groups, const X *x, int columns, int width, f32v *out, size_t pitch);
#define FORMS(NAME) {NAME##_panel8, NAME##_panel16}

#define PANELS(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, ...)                                   \
  static void T##_panels(const uint8_t *a, size_t stride, int groups, const X *x, int columns, int width, f32v *out,         \
                         size_t pitch) {                                                                                     \
    enum { B_BYTES = 16 * B_LENGTH, A_BYTES = 16 * BYTES - B_BYTES, PART = BYTES * 16 / (BLOCK / 32), SPAN = 32 * UNPACKED / BLOCK }; \
    static const Panel forms[][2] = {FORMS(plain), FORMS(min), FORMS(split), FORMS(min_split), FORMS(q6)};                   \
    int blocks = x->k / BLOCK;                                                                                               \
    Product p;                                                                                                               \
    p.x = *x, p.columns = columns, p.width = width, p.done = 0, p.pitch = pitch, p.stride = stride, p.out = out;             \
    p.one = forms[T == Q6_K ? 4 : 2 * SPLIT + MIN][width == 16];                                                             \
    for (int g = 0; g < groups; g++)                                                                                         \
      for (int c = 0; c < columns; c++) out[g * pitch + c] = splat(0);                                                       \
    tiles_begin(width, width, SPLIT ? 16 : 32);                                                                              \
    for (int from = 0; from < blocks; from += SPAN, p.done += p.n)                                                           \
      for (p.first = 0; p.first < groups; p.first += SIDE) {                                                                 \
        const uint8_t *side = a + p.first * stride, *soon = p.first + SIDE < groups ? side + SIDE * stride : a + 16 * BYTES * SPAN; \
        p.groups = groups - p.first < SIDE ? groups - p.first : SIDE, p.n = 0;                                               \
        for (int k = from; k < blocks && k < from + SPAN; k++) {                                                             \
          int c = k / CHUNK_ * CHUNK_, n = blocks - c < CHUNK_ ? blocks - c : CHUNK_;  /* block k is in the chunk of n from c on */ \
          const uint8_t *b = side + (size_t)c * 16 * BYTES + (k - c) * B_BYTES;                                              \
          const uint8_t *at = side + (size_t)c * 16 * BYTES + (n * B_BYTES + 63) / 64 * 64 + (k - c) * A_BYTES;              \
          _Pragma("clang loop unroll(disable)") for (int i = 0; i < BLOCK / 32; i++, p.n++)                                  \
            for (int g = 0; g < p.groups; g++) {                                                                             \
              Sub u = decode_##T(at + g * stride, b + g * stride, place(i, T == Q6_K));                                      \
              for (int t = 0; t < 8 && OFFSET; t++) u.w[t] = (u32v)((u8v)u.w[t] - (uint8_t)OFFSET);                          \
              p.u[g][p.n] = u;                                                                                               \
            }                                                                                                                \
        }                                                                                                                    \
        add_unpacked(&p, (Soon){soon + (size_t)from * 16 * BYTES, PART});                                                    \
      }                                                                                                                      \
    tiles_end();                                                                                                             \
  }
QUANTISED(PANELS)

// The same of float weights: in planes only.
#define FLOAT_PANELS(T, ID, VALUE, LOAD, ...)                                                                                 \
  static void T##_panels(const uint8_t *a, size_t stride, int groups, const X *x, int columns, int width, f32v *out,         \
                         size_t pitch) {                                                                                     \
    Product p;                                                                                                               \
    p.x = *x, p.columns = columns, p.done = p.shape = 0, p.pitch = pitch, p.out = out;                                       \
    for (int k = 0; k < x->k; k += 32 * p.n, p.done += p.n) {                                                                \
      p.n = x->k - k < 32 * UNPACKED ? (x->k - k) / 32 : UNPACKED;                                                           \
      for (int g = 0; g < groups; g += 2) {                                                                                  \
        Planes w[2][UNPACKED];                                                                                               \
        int two = groups - g < 2 ? 1 : 2;                                                                                    \
        for (int h = 0; h < two; h++)                                                                                        \
          for (int e = 0; e < 32 * p.n; e += 2) {                                                                            \
            const uint8_t *at = a + (g + h) * stride + (size_t)(k + e) * 16 * VALUE;                                         \
            __builtin_prefetch(at + 512 * UNPACKED * VALUE);                                                                 \
            to_planes(LOAD(at), LOAD(at + 16 * VALUE), &w[h][e / 32].high[e % 32 / 2], &w[h][e / 32].low[e % 32 / 2]);       \
          }                                                                                                                  \
        add_planes(&p, w, g, two);                                                                                           \
      }                                                                                                                      \
    }                                                                                                                        \
    tiles_end();                                                                                                             \
  }
FLOATING(FLOAT_PANELS)

#define PANELS_OF(T, ...) [T] = T##_panels,
static const Panels panels_of[TYPES] = {QUANTISED(PANELS_OF) FLOATING(PANELS_OF)};

// The columns that can be multiplied in tiles. Returns how many, with those that are empty.
static int product_in_tiles(int type, const uint8_t *a, size_t stride, int groups, const X *x, int n, f32v *out, size_t pitch) {
  int floats = layouts[type].block == 1;
  if (x->planes && floats) return panels_of[type](a, stride, groups, x, n, 0, out, pitch), n;
  if (!tiles_allowed || floats) return 0;
  int wide = (n + 7) / 16 * 16;
  if (wide) panels_of[type](a, stride, groups, x, wide, 16, out, pitch);
  if (panel_width(n - wide) != 8) return wide;
  X rest = columns_from(x, (size_t)wide);
  panels_of[type](a, stride, groups, &rest, 8, 8, out + wide, pitch);
  return wide + 8;
}
#else
#define product_in_tiles(...) 0
#endif

// Columns of a product, filled up to whole panels.
INLINE int pitch_of(int n) { return (n + 15) / 16 * 16; }

// out[group * pitch_of(n) + column] = `groups` groups of 16 rows at `a` times n columns.
static void product(int type, const uint8_t *a, int groups, const X *x, int n, f32v *out) {
  size_t stride = group_bytes(type, x->k), pitch = (size_t)pitch_of(n);
  int done = product_in_tiles(type, a, stride, groups, x, n, out, pitch);
  for (int g = 0; g < groups; g++)
    for (int c = done, width; c < n; c += width) {
      width = panel_width(n - c);
      X columns = columns_from(x, (size_t)c);
      kernel(type, width)(a + g * stride, &columns, out + g * pitch + c);
    }
}
