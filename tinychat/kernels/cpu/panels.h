// Products with 16 and more columns: weights are unpacked once for all panels of 16 columns, and multiplied in tiles where the
// machine has them. Both add the same integers and scale them in the order of quant.h, so that the results have the same bits.
#pragma once
#include "quant.h"
#include "tiles.h"

// Of one product, at most: groups of 16 rows, columns; and blocks of 32 elements that are unpacked at a time. The unpacked
// weights (24 kB) and the part of a panel that they are multiplied with (12 kB) fit in the first-level cache.
enum { GROUPS = 4, COLUMNS = 128, UNPACKED = 8 };

#if TILES
static int tiles_allowed;  // set by tc_simd, which is called before any product
#else
enum { tiles_allowed = 0 };
#endif

// Q6_K: the order of a block's parts of 32, in which its bits lie.
INLINE int place(int i, int reordered) { return reordered ? (i & ~3) | (i & 1) << 1 | (i >> 1 & 1) : i; }

#if TILES
#define EACH_COLUMN _Pragma("clang loop unroll(full)") for (int c = 0; c < 16; c++)
typedef struct { i32v column[16]; } TileSum;  // each of 16 rows

// Sums over 32 elements: of the high bytes, of the low ones; with `split` over the first 16, then over the last 16.
INLINE void tile_sums(const Sub *u, const int8_t *q, TileSum *sums, int min, int split) {
  for (int half = 0; half < 1 + split; half++) {
    tile_load(6, u->w + 4 * half, 64);
    tile_load(4, q + 16 * half, 64);
    tile_load(5, q + 16 * half + 32, 64);
    tile_zero(0);
    tile_zero(1);
    if (min) {
      tile_dot_u(0, 4, 6);
      tile_dot_u(1, 5, 6);
    } else {
      tile_dot_s(0, 4, 6);
      tile_dot_s(1, 5, 6);
    }
    tile_store(0, sums + 2 * half, 64);
    tile_store(1, sums + 2 * half + 1, 64);
  }
}

// As `panel`, codes without offset. The tiles of a block are under way while the block before is scaled.
INLINE void panel_in_tiles(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, int min, int split, int reordered) {
  TileSum sums[2][4];
  f32v acc[16];
  EACH_COLUMN acc[c] = out[c];
  tiles_written(u);
  tile_sums(u, q + 1024 * place(0, reordered), sums[0], min, split);
  for (int i = 0; i < n; i++) {
    if (i + 1 < n) tile_sums(u + i + 1, q + 1024 * place(i + 1, reordered), sums[(i + 1) % 2], min, split);
    const TileSum *t = sums[i % 2];
    const XScale *x = xs + 16 * place(i, reordered);
    Sub scales = {.d = u[i].d, .d2 = u[i].d2, .m = u[i].m, .m2 = u[i].m2};
    EACH_COLUMN {
      i32v p = t[0].column[c] * HIGH + t[1].column[c], r = split ? t[2].column[c] * HIGH + t[3].column[c] : p;
      acc[c] = scaled(&scales, p, r, &x[c], acc[c], min, split);
    }
  }
  EACH_COLUMN out[c] = acc[c];
}
#else
#define tiles_begin(k)
#define tiles_end()
#define panel_in_tiles(...)
#endif

// out[c] += the n unpacked blocks times column c of 16.
INLINE void panel(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, int offset, int min, int split, int sign, int reordered) {
  if (tiles_allowed) {
    panel_in_tiles(u, n, q, xs, out, min, split, reordered);
    return;
  }
  for (int i = 0; i < n; i++) {
    int s = place(i, reordered);
    Sub v = u[i];
    if (PAIRS) dot32_pairs(&v, q + 1024 * s, xs + 16 * s, out, 16, offset, min, split);
    else dot32(&v, q + 1024 * s, xs + 16 * s, out, 16, offset, min, split, sign);
  }
}

// The forms of the types: with a minimum or an offset, a scale per 16 elements; signed codes; and Q6_K.
typedef void (*Panel)(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, int offset);
#define FORM(NAME, MIN, SPLIT, SIGN, REORDERED)                                                                 \
  static void NAME(const Sub *u, int n, const int8_t *q, const XScale *xs, f32v *out, int offset) {             \
    panel(u, n, q, xs, out, offset, MIN, SPLIT, SIGN, REORDERED);                                               \
  }
FORM(panel_offset, 0, 0, 0, 0)
FORM(panel_signed, 0, 0, 1, 0)
FORM(panel_min, 1, 0, 0, 0)
FORM(panel_offset_split, 0, 1, 0, 0)
FORM(panel_min_split, 1, 1, 0, 0)
FORM(panel_q6, 0, 1, 0, 1)

typedef struct {
  X x;  // of the first panel, from the elements on that belong to u
  int groups, panels, n;  // n: blocks in u
  size_t pitch;  // from a group to the next in out
  f32v *out;
  Sub u[GROUPS][UNPACKED];
} Product;

INLINE void add_unpacked(Product *p, Panel one, int offset) {
  for (int i = 0; i < p->panels; i++) {
    X x = columns_from(&p->x, 16 * (size_t)i);
    for (int g = 0; g < p->groups; g++) one(p->u[g], p->n, x.q, x.scales, p->out + g * p->pitch + 16 * i, offset);
  }
  p->x.q += 1024 * p->n, p->x.scales += 16 * p->n, p->n = 0;
}

// Fills out[group * pitch + column] for `groups` groups of 16 rows, `stride` bytes apart, and whole panels of columns.
typedef void (*Panels)(const uint8_t *a, size_t stride, int groups, const X *x, int panels, f32v *out, size_t pitch);

#define PANELS(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, ...)                                         \
  static void T##_panels(const uint8_t *a, size_t stride, int groups, const X *x, int panels, f32v *out, size_t pitch) {           \
    enum { B_BYTES = 16 * B_LENGTH };                                                                                              \
    Panel one = T == Q6_K ? panel_q6 : MIN ? SPLIT ? panel_min_split : panel_min                                                   \
                : SPLIT ? panel_offset_split : OFFSET ? panel_offset : panel_signed;                                               \
    int blocks = x->k / BLOCK, a_bytes = BYTES * 16 - B_BYTES;                                                                     \
    Product p;                                                                                                                     \
    p.x = *x, p.groups = groups, p.panels = panels, p.n = 0, p.pitch = pitch, p.out = out;                                         \
    for (int g = 0; g < groups; g++)                                                                                               \
      for (int c = 0; c < 16 * panels; c++) out[g * pitch + c] = splat(0);                                                         \
    if (tiles_allowed) tiles_begin(SPLIT ? 16 : 32);                                                                               \
    while (blocks > 0) {                                                                                                           \
      int n = blocks < CHUNK_ ? blocks : CHUNK_;                                                                                   \
      const uint8_t *b = a;                                                                                                        \
      blocks -= n;                                                                                                                 \
      for (a += (n * B_BYTES + 63) / 64 * 64; n > 0; n--, a += a_bytes, b += B_BYTES)                                              \
        _Pragma("clang loop unroll(disable)") for (int i = 0; i < BLOCK / 32; i++) {                                               \
          for (int g = 0; g < groups; g++) {                                                                                       \
            Sub u = decode_##T(a + g * stride, b + g * stride, place(i, T == Q6_K));                                               \
            for (int t = 0; t < 8 && OFFSET && tiles_allowed; t++) u.w[t] = (u32v)((u8v)u.w[t] - (uint8_t)OFFSET);                 \
            p.u[g][p.n] = u;                                                                                                       \
          }                                                                                                                        \
          if (++p.n == UNPACKED) add_unpacked(&p, one, OFFSET);                                                                    \
        }                                                                                                                          \
    }                                                                                                                              \
    if (p.n) add_unpacked(&p, one, OFFSET);                                                                                        \
    if (tiles_allowed) tiles_end();                                                                                                \
    for (int i = 0; PAIRS && i < groups * panels; i++) unpair(out + i / panels * pitch + i % panels * 16, 16);                     \
  }
QUANTISED(PANELS)

#define PANELS_OF(T, ...) [T] = T##_panels,
static const Panels panels_of[TYPES] = {QUANTISED(PANELS_OF)};

// out[group * n + column] = `groups` groups of 16 rows at `a` times n columns.
static void product(int type, const uint8_t *a, int groups, const X *x, int n, f32v *out) {
  size_t stride = group_bytes(type, x->k);
  int done = panels_of[type] ? n / 16 * 16 : 0;
  if (done) panels_of[type](a, stride, groups, x, done / 16, out, (size_t)n);
  for (int width; done < n; done += width) {
    width = panel_width(n - done);
    X columns = columns_from(x, (size_t)done);
    for (int g = 0; g < groups; g++) kernel(type, width)(a + g * stride, &columns, out + g * n + done);
  }
}
