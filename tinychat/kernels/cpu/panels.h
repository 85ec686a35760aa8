// Products of some groups of 16 rows with many columns. Where the machine has tiles, panels of 16 or 8 columns are multiplied in
// them: weights are unpacked once for all panels. The sums are the integers of quant.h, scaled and added in the same order, so
// that the results have the same bits.
#pragma once
#include "quant.h"
#include "tiles.h"

// Of one product, at most.
enum { GROUPS = 4, COLUMNS = 128 };

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

// Blocks of 32 elements that are unpacked at a time: they (24 kB) and the part of a panel that they are multiplied with (12 kB)
// fit in the first-level cache.
enum { UNPACKED = 8 };

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

typedef struct {
  X x;  // of the first panel, from the elements on that belong to u
  int groups, panels, width, n;  // width: of a panel; n: blocks in u
  size_t pitch, stride;  // from a group to the next in out, and of weights
  f32v *out;
  Sub u[GROUPS][UNPACKED];
} Product;

// Adds what is unpacked; `soon`: of the first group.
INLINE void add_unpacked(Product *p, Panel one, Soon soon) {
  for (int i = 0; i < p->panels; i++) {
    X x = columns_from(&p->x, (size_t)p->width * i);
    for (int g = 0; g < p->groups; g++)
      one(p->u[g], p->n, x.q, x.scales, p->out + g * p->pitch + p->width * i, (Soon){soon.at + g * p->stride, i ? 0 : soon.part});
  }
  p->x.q += 64 * p->width * p->n, p->x.scales += p->width * p->n, p->n = 0;
}

// Fills out[group * pitch + column] for `groups` groups of 16 rows, `stride` bytes apart, and panels of `width` columns.
typedef void (*Panels)(const uint8_t *a, size_t stride, int groups, const X *x, int panels, int width, f32v *out, size_t pitch);
#define FORMS(NAME) {NAME##_panel8, NAME##_panel16}

#define PANELS(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, ...)                                   \
  static void T##_panels(const uint8_t *a, size_t stride, int groups, const X *x, int panels, int width, f32v *out,          \
                         size_t pitch) {                                                                                     \
    enum { B_BYTES = 16 * B_LENGTH, PART = BYTES * 16 / (BLOCK / 32) };                                                      \
    static const Panel forms[][2] = {FORMS(plain), FORMS(min), FORMS(split), FORMS(min_split), FORMS(q6)};                   \
    Panel one = forms[T == Q6_K ? 4 : 2 * SPLIT + MIN][width == 16];                                                         \
    int blocks = x->k / BLOCK, a_bytes = BYTES * 16 - B_BYTES;                                                               \
    Product p;                                                                                                               \
    p.x = *x, p.groups = groups, p.panels = panels, p.width = width, p.n = 0, p.pitch = pitch, p.stride = stride, p.out = out; \
    for (int g = 0; g < groups; g++)                                                                                         \
      for (int c = 0; c < width * panels; c++) out[g * pitch + c] = splat(0);                                                   \
    tiles_begin(width, SPLIT ? 16 : 32);                                                                                      \
    while (blocks > 0) {                                                                                                     \
      int n = blocks < CHUNK_ ? blocks : CHUNK_;                                                                             \
      const uint8_t *b = a;                                                                                                  \
      blocks -= n;                                                                                                           \
      for (a += (n * B_BYTES + 63) / 64 * 64; n > 0; n--, a += a_bytes, b += B_BYTES)                                        \
        _Pragma("clang loop unroll(disable)") for (int i = 0; i < BLOCK / 32; i++) {                                         \
          for (int g = 0; g < groups; g++) {                                                                                 \
            Sub u = decode_##T(a + g * stride, b + g * stride, place(i, T == Q6_K));                                         \
            for (int t = 0; t < 8 && OFFSET; t++) u.w[t] = (u32v)((u8v)u.w[t] - (uint8_t)OFFSET);                            \
            p.u[g][p.n] = u;                                                                                                 \
          }                                                                                                                  \
          if (++p.n == UNPACKED) add_unpacked(&p, one, (Soon){a + (i + 1) * PART, PART});                                    \
        }                                                                                                                    \
    }                                                                                                                        \
    if (p.n) add_unpacked(&p, one, (Soon){a, 0});                                                                            \
    tiles_end();                                                                                                             \
  }
QUANTISED(PANELS)

#define PANELS_OF(T, ...) [T] = T##_panels,
static const Panels panels_of[TYPES] = {QUANTISED(PANELS_OF)};

// The columns that can be multiplied in tiles. Returns how many, with those that are empty.
static int product_in_tiles(int type, const uint8_t *a, size_t stride, int groups, const X *x, int n, f32v *out, size_t pitch) {
  if (!tiles_allowed || !panels_of[type]) return 0;
  int wide = (n + 7) / 16;
  if (wide) panels_of[type](a, stride, groups, x, wide, 16, out, pitch);
  if (panel_width(n - 16 * wide) != 8) return 16 * wide;
  X rest = columns_from(x, 16 * (size_t)wide);
  panels_of[type](a, stride, groups, &rest, 1, 8, out + 16 * wide, pitch);
  return 16 * wide + 8;
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
