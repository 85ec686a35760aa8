// Products of some groups of 16 rows with many columns. On x86 prompts take a way of their own (X.planes): weights and columns become
// 16-bit integers with a scale per row, or column, and DEPTH elements. Where the machine has tiles, each is two planes of signed bytes:
// of the four products of planes three (not low times low) are summed over the DEPTH elements in the tiles, exactly, and scaled once.
// Elsewhere they stay words (words.h). Weights are unpacked once for up to COLUMNS columns.
#pragma once
#include "input.h"

// Of one product, at most. A part of the columns is read once for so many groups.
enum { GROUPS = 16, COLUMNS = 256 };

#if TILES
static int tiles_allowed;  // set by tc_simd, which is called before any product
#else
enum { tiles_allowed };
#endif

// The width of the panel for `left` columns; in planes it is the same, whether or not there are so many columns.
INLINE int panel_width(int left, int planes) {
#if WORDS
  if (planes) return TILE_COLUMNS;
#endif
  return planes || left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

#if TILES || WORDS
#if TILES
// DEPTH elements of 16 rows, d * (256 * high + low), in tiles of 64 elements.
typedef struct { u32v high[DEPTH / 4], low[DEPTH / 4]; f32v d; } Planes;
#endif

// a * b / 2^15, rounded.
INLINE i16v scale_16(i16v a, i16v b) {
#if defined(__AVX512BW__)
  return (i16v)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  union { i16v v; __m256i h[2]; } x = {a}, y = {b};
  for (int i = 0; i < 2; i++) x.h[i] = _mm256_mulhrs_epi16(x.h[i], y.h[i]);
  return x.v;
#else
  for (int i = 0; i < 32; i++) a[i] = (int16_t)((a[i] * b[i] + 0x4000) >> 15);
  return a;
#endif
}
// The nearest integers, of at most 16 bits, in both halves of each lane.
INLINE i16v in_halves(f32v x) {
  u32v v = (u32v)round_(x);
  return (i16v)((v & 0xffff) | v << 16);
}

#if TILES
// In each lane the lower byte of a and the upper one of b.
INLINE u32v bytes_of(u16v a, u16v b) {
#if defined(__AVX512BW__)  // a compiler makes three operations of it, a permutation of bytes
  return (u32v)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi16(0xff), 0xe4);
#else
  return (u32v)((a & 0xff) | (b & 0xff00));
#endif
}
// Four elements of 16 rows, two of them in each lane of `even` and of `odd`, as bytes.
INLINE void split_bytes(i16v even, i16v odd, u32v *high, u32v *low) {
  *low = bytes_of((u16v)even, (u16v)odd << 8);
  *high = bytes_of((u16v)(even + 128) >> 8, (u16v)(odd + 128));
}
INLINE void put(Planes *to, int i, i16v even, i16v odd) { split_bytes(even, odd, &to->high[i], &to->low[i]); }
#else
// Four elements of 16 rows, two of them in each lane of `even` and of `odd`: number i. Of two such the second is for pairs.
INLINE void put(Planes *to, int i, i16v even, i16v odd) {
  to->words[2 * i] = (u32v)even, to->words[2 * i + 1] = (u32v)odd;
  if (PAIRED && i % 2) to->minus[i / 8] = dot_words(i % 8 == 1 ? splat_int(0) : to->minus[i / 8], (u32v)even, (u32v)odd);
}
#endif
// The same of codes in signed bytes whose upper `spare` bits are not needed: code * 2^(8 + spare) * s / 2^15 + m.
INLINE void put_codes(Planes *to, int i, u32v codes, int spare, i16v s, i16v m, int min) {
  u16v v = (u16v)codes;
  i16v even = scale_16((i16v)(v << (8 + spare)), s), odd = scale_16((i16v)((v & 0xff00) << spare), s);
  if (min) even += m, odd += m;
  put(to, i, even, odd);
}
// The nearest integers to x * up, modulo 2^16.
INLINE u32v low_half(f32v x, f32v up) { return (u32v)fma_(x, up, splat(12582912.0f)); }

// Zeros behind n elements, up to a whole tile.
INLINE void fill_up(Planes *p, int n) {
#if TILES
  for (int i = n / 4; i % 16; i++) p->high[i] = p->low[i] = splatu(0);
#endif
}
INLINE f32v steps_of(f32v top) { return select_(top > splat(0), (float)LIMIT / top, splat(0)); }

// The upper bits that the codes of a type have no need of.
#define SPARE(T)                                                                                           \
  (T == Q2_K || T == TQ1_0 || T == TQ2_0 ? 6 : T == Q3_K ? 5 : T == Q4_0 || T == Q4_1 || T == Q4_K ? 4     \
   : T == Q5_0 || T == Q5_1 || T == Q5_K || T == MXFP4 || T == IQ3_S || T == IQ1_S || T == IQ1_M ? 3       \
   : T == Q6_K ? 2 : T == IQ2_XXS || T == IQ2_XS || T == IQ2_S || T == IQ3_XXS ? 1 : 0)

// Unpacks n elements from number `from` on of a group with rows of k; `soon`: bytes to what is unpacked next, which words ask for here and
// tiles between products.
typedef void (*Unpack)(const uint8_t *group, int k, int from, int n, Planes *to, ptrdiff_t soon);

// Scales and minima of 32 elements; codes are centred, so that those of a type with a minimum have a sign.
typedef struct { f32v d, d2, m, m2; } Scales;

// For each 32 elements of the blocks that are unpacked: decodes them as u.
#define EACH_SUB(T, BLOCK, BYTES, CHUNK_, ...)                                                                            \
  for (int i = from / BLOCK, sub = 0; i < (from + n) / BLOCK; i++) {                                                      \
    int c = i / CHUNK_ * CHUNK_, many = k / BLOCK - c < CHUNK_ ? k / BLOCK - c : CHUNK_;  /* in the chunk of block i */   \
    const uint8_t *chunk = group + (size_t)c * 16 * BYTES, *b = chunk + (i - c) * B_BYTES;                                \
    const uint8_t *a = chunk + (many * B_BYTES + 63) / 64 * 64 + (i - c) * A_BYTES;                                       \
    _Pragma("clang loop unroll(disable)") for (int j = 0; j < BLOCK / 32; j++, sub++) {                                   \
      Sub u = decode_##T(a, b, j);                                                                                        \
      __VA_ARGS__                                                                                                         \
    }                                                                                                                     \
  }
#define UNPACK(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, ...)                                \
  static void T##_unpack(const uint8_t *group, int k, int from, int n, Planes *to, ptrdiff_t soon) {                      \
    enum { B_BYTES = 16 * B_LENGTH, A_BYTES = 16 * BYTES - B_BYTES, PART = 16 * BYTES / (BLOCK / 32) };                   \
    enum { CENTRE = 128 >> SPARE(T), LESS = MIN ? CENTRE : OFFSET };                                                      \
    Scales scales[DEPTH / 32];                                                                                            \
    f32v top = splat(0);                                                                                                  \
    EACH_SUB(T, BLOCK, BYTES, CHUNK_, {                                                                                   \
      Scales s = {.d = u.d * (float)CENTRE};                                                                              \
      s.d2 = SPLIT ? u.d2 * (float)CENTRE : s.d, s.m = MIN ? u.m + s.d : splat(0), s.m2 = MIN && SPLIT ? u.m2 + s.d2 : s.m; \
      top = max_(top, abs_(s.d) + abs_(s.m));                                                                             \
      if (SPLIT) top = max_(top, abs_(s.d2) + abs_(s.m2));                                                                \
      scales[sub] = s;                                                                                                    \
    })                                                                                                                    \
    f32v up = steps_of(top);                                                                                              \
    to->d = top * ((float)UNIT / LIMIT);                                                                                       \
    EACH_SUB(T, BLOCK, BYTES, CHUNK_, {                                                                                   \
      for (int at = 0; at < PART; at += 64) if (!TILES) __builtin_prefetch(a + soon + j * PART + at);                                 \
      const Scales *s = &scales[sub];                                                                                     \
      i16v d = in_halves(s->d * up), d2 = SPLIT ? in_halves(s->d2 * up) : d;                                              \
      i16v m = MIN ? in_halves(s->m * up) : d, m2 = MIN && SPLIT ? in_halves(s->m2 * up) : m;                             \
      _Pragma("clang loop unroll(full)") for (int t = 0; t < 8; t++)                                                      \
        put_codes(to, 8 * sub + t, (u32v)((u8v)u.w[t] - (uint8_t)LESS), SPARE(T), t < 4 ? d : d2, t < 4 ? m : m2, MIN);     \
    })                                                                                                                    \
    fill_up(to, n);                                                                                                       \
  }
QUANTISED(UNPACK)

// The largest magnitudes of n elements of 16 rows, a multiple of four: of halves (either kind) as integers. A single chain would wait for
// each maximum.
INLINE f32v largest_floats(const uint8_t *a, int n) {
  f32v top[4] = {splat(0), splat(0), splat(0), splat(0)};
  for (int i = 0; i < n; i += 4)
    for (int e = 0; e < 4; e++) top[e] = max_(top[e], abs_(ldf((const float *)a + 16 * (i + e))));
  return max_(max_(top[0], top[1]), max_(top[2], top[3]));
}
INLINE i16v larger_16(i16v a, i16v b) {
  i16v more = a > b;
  return (a & more) | (b & ~more);
}
INLINE void largest_halves(const uint8_t *a, int n, uint8_t *largest) {
  i16v top[2] = {{0}, {0}};
  for (int i = 0; i < n; i += 4)
    for (int e = 0; e < 2; e++) top[e] = larger_16(top[e], (i16v)ld(a + 32 * i + 64 * e) & 0x7fff);
  i16v all = larger_16(top[0], top[1]);
  all = larger_16(all, (i16v)__builtin_shufflevector((u32v)all, (u32v)all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  memcpy(largest, &all, 32);
}

#define FLOAT_UNPACK(T, ID, VALUE, LOAD, ...)                                                                             \
  static void T##_unpack(const uint8_t *group, int k, int from, int n, Planes *to, ptrdiff_t soon) {                      \
    const uint8_t *a = group + (size_t)from * 16 * VALUE;                                                                 \
    uint8_t largest[64];                                                                                                  \
    if (VALUE == 2) largest_halves(a, n, largest);                                                                        \
    f32v top = VALUE == 2 ? LOAD(largest) : largest_floats(a, n);                                                         \
    f32v up = steps_of(top);                                                                                              \
    to->d = top * ((float)UNIT / LIMIT);                                                                                       \
    for (int i = 0; i < n; i += 4, a += 64 * VALUE) {                                                                     \
      for (int at = 0; at < 64 * VALUE; at += 64) if (!TILES) __builtin_prefetch(a + soon + at);                                      \
      u32v q[4];                                                                                                          \
      for (int e = 0; e < 4; e++) q[e] = low_half(LOAD(a + 16 * VALUE * e), up);                                          \
      put(to, i / 4, (i16v)((q[0] & 0xffff) | q[2] << 16), (i16v)((q[1] & 0xffff) | q[3] << 16));                         \
    }                                                                                                                     \
    fill_up(to, n);                                                                                                       \
  }
FLOATING(FLOAT_UNPACK)

#define UNPACK_OF(T, ...) [T] = T##_unpack,
static const Unpack unpack_of[TYPES] = {QUANTISED(UNPACK_OF) FLOATING(UNPACK_OF)};

// The place of what is unpacked behind elements k to k + DEPTH of the groups in front of number g: these elements of that one, or the first
// one's next elements, or behind the last of both what a thread's next task begins with.
INLINE size_t unpacked_next(size_t stride, int cols, int groups, int g, int k, int from, int to) {
  if (g < groups) return g * stride + stride * k / cols;
  return k + DEPTH < to ? stride * (k + DEPTH) / cols : groups * stride + stride * from / cols;
}
#endif

#if TILES

// Sums over DEPTH elements of two groups and 16 columns: of the high planes, and of the two products of a high one and a low one.
// Columns from number `next` to `end` (16 a group) are not yet added to the results.
typedef struct {
  i32v high[2][16], mixed[2][16];
  f32v *out[2], d[2];
  const float *scales;  // of the columns
  unsigned next, end;
} Pending;

INLINE void add_two_columns(Pending *p) {
  if (p->next == p->end) return;
  unsigned g = p->next / 16, c = p->next % 16;
  f32v *out = p->out[g] + c, d = p->d[g];
  for (int i = 0; i < 2; i++) {
    i32v v = (p->high[g][c + i] << 8) + p->mixed[g][c + i];
    out[i] = fma_(from_int(v), d * p->scales[c + i], out[i]);
  }
  p->next += 2;
}
INLINE void add_columns(Pending *p) {
  while (p->next < p->end) add_two_columns(p);
}

// Of what is unpacked next, two groups `stride` bytes apart, so many lines are asked for with each step of products, which memory would
// wait for otherwise.
typedef struct { const uint8_t *at; size_t stride; int lines; } Next;

// The sums of two groups and a panel. Columns of what is pending are added while the tiles are under way. A sum is used again after
// two or three other products, which is about the time that one takes.
static void multiply_planes(const Planes w[2], const int8_t *x, int tiles, Pending *now, Pending *before, Next *next) {
  tile_zero(0), tile_zero(1), tile_zero(2), tile_zero(3);
  for (int t = 0; t < tiles; t++, x += 2048) {
    for (int i = 0; i < next->lines; i++, next->at += 64)
      __builtin_prefetch(next->at, 0, 2), __builtin_prefetch(next->at + next->stride, 0, 2);
#define DOT(SUM, X, W) tile_dot_s(SUM, X, W), add_two_columns(before);
    tile_stream(5, x + 1024, 64), tile_load(6, w[0].high + 16 * t, 64), tile_load(7, w[1].high + 16 * t, 64), tile_stream(4, x, 64);
    DOT(1, 5, 6) DOT(3, 5, 7) DOT(0, 4, 6)
    tile_load(6, w[0].low + 16 * t, 64);
    DOT(1, 4, 6) DOT(2, 4, 7)
    tile_load(7, w[1].low + 16 * t, 64);
    DOT(3, 4, 7)
#undef DOT
  }
  tile_store(0, now->high[0], 64), tile_store(1, now->mixed[0], 64), tile_store(2, now->high[1], 64), tile_store(3, now->mixed[1], 64);
}

// Fills out[group * pitch + column] for `groups` groups of 16 rows, `stride` bytes apart, and elements `from` (a multiple of DEPTH) to
// `to` of n columns in planes. Two groups are
// unpacked at a time (32 kB): they stay in the first-level cache, past which panels are loaded; the part of all panels that they are
// multiplied with fits in the second, where it stays for all groups.
static void product_in_planes(int type, const uint8_t *a, size_t stride, int groups, const X *x, int n, int from, int to, f32v *out,
                              size_t pitch) {
  Planes w[2];
  Pending sums[2] = {{.end = 0}, {.end = 0}}, *now = &sums[0], *before = &sums[1];
  int rows = n < 16 ? n : 16;
  for (size_t i = 0; i < groups * pitch; i++) out[i] = splat(0);
  tiles_begin(rows, rows, 64);
  for (int k = from; k < to; k += DEPTH) {
    int depth = to - k < DEPTH ? to - k : DEPTH, tiles = (depth + 63) / 64;
    for (int g = 0; g < groups; g += 2) {
      int two = g + 1 < groups, steps = (n + 15) / 16 * tiles, lines = (int)(stride * DEPTH / x->k / 64);
      Next next = {a + unpacked_next(stride, x->k, groups, g + 2, k, from, to), stride, (lines + steps - 1) / steps};
      for (int i = 0; i <= two; i++) unpack_of[type](a + (g + i) * stride, x->k, k, depth, &w[i], 0);
      tiles_written(w);
      for (int c = 0; c < n; c += 16) {
        X panel = columns_from(x, c);
        multiply_planes(w, (const int8_t *)panel.f + 32 * (size_t)k, tiles, now, before, &next);
        add_columns(before);
        now->scales = (const float *)panel.scales + k / DEPTH * 16;
        for (int i = 0; i < 2; i++) now->out[i] = out + (g + i) * pitch + c, now->d[i] = w[i].d;
        now->next = 0, now->end = two ? 32 : 16;
        Pending *t = now;
        now = before, before = t;
      }
    }
  }
  add_columns(before);
  tiles_end();
}
#elif WORDS
// Fills out[group * pitch + column] as above. TILE_GROUPS groups are unpacked at a time (35 kB), two or one of the last.
static void product_in_planes(int type, const uint8_t *a, size_t stride, int groups, const X *x, int n, int from, int to, f32v *out,
                              size_t pitch) {
  Planes w[TILE_GROUPS];
  for (int k = from; k < to; k += DEPTH) {
    int depth = to - k < DEPTH ? to - k : DEPTH;
    for (int g = 0, many; g < groups; g += many) {
      many = tile_groups(groups - g);
      Tile tile = tiles_of_groups[many - 1];
      ptrdiff_t soon = (ptrdiff_t)(unpacked_next(stride, x->k, groups, g + many, k, from, to) - g * stride - stride * k / x->k);
      for (int i = 0; i < many; i++) unpack_of[type](a + (g + i) * stride, x->k, k, depth, &w[i], soon);
      for (int c = 0; c < n; c += TILE_COLUMNS) {
        X panel = columns_from(x, c);
        const PanelScale *scales = (const PanelScale *)panel.scales + k / SCALED * TILE_COLUMNS;
        tile(w, (const int16_t *)panel.f + TILE_COLUMNS * (size_t)k, scales, depth / 32, (Sums){out + g * pitch + c, pitch, 1, k > from});
      }
    }
  }
}
#else
#define product_in_planes(...)
#endif

// Columns of a product, filled up to whole panels.
INLINE int pitch_of(int n) { return (n + 15) / 16 * 16; }

// out[group * pitch_of(n) + column] = `groups` groups of 16 rows at `a` times n columns; of columns in planes elements `from` to `to`.
static void product(int type, const uint8_t *a, int groups, const X *x, int n, int from, int to, f32v *out) {
  size_t stride = group_bytes(type, x->k), pitch = (size_t)pitch_of(n);
  if (x->planes) {
    product_in_planes(type, a, stride, groups, x, n, from, to, out, pitch);
    return;
  }
  for (int g = 0; g < groups; g++)
    for (int c = 0, width; c < n; c += width) {
      width = panel_width(n - c, 0);
      X columns = columns_from(x, (size_t)c);
      kernel(type, width)(a + g * stride, &columns, out + g * pitch + c);
    }
}
