// Products of 16-bit integers (words), for prompts on x86 without matrix tiles. A lane of a vector holds two elements of a row;
// VPDPWSSD, or VPMADDWD and an addition, multiplies them with two of a column and adds both products to the lane's sum.
#pragma once
#include "tiles.h"

#ifndef WORDS  // 0 in tests of what other machines have
#if !TILES && defined(__AVX2__)
#define WORDS 1
#else
#define WORDS 0
#endif
#endif

#if WORDS
// Half of the elements are multiplied in pairs where additions do not take the place of multiplications (Winograd, 1968):
// a x + b y = (a + y) (b + x) - a b - x y, modulo 2^32. Zen adds in four of its vector units and multiplies in two of them; Intel's
// cores have no more than two for 64 bytes.
#ifndef PAIRED
#if defined(__znver4__) || defined(__znver5__)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#endif

// Elements that share a scale, the largest word of weights, and what a sum of products stands for. Words of columns are at most
// COLUMN_LIMIT, so that sums of two fit 16 bits, and 32 of them have a norm of at most COLUMN_NORM: as 32 weights have at most
// sqrt(32) * LIMIT, no sum over 32 elements reaches 2^31, by the inequality of Cauchy and Schwarz.
enum { DEPTH = 256, LIMIT = 12000, UNIT = 1, COLUMN_LIMIT = 20700, COLUMN_NORM = 31600 };

// A column's, of SCALED elements. minus: less the products of its own words in pairs.
typedef struct { float scale; int32_t minus; } PanelScale;
enum { SCALED = 32 };

// DEPTH elements of 16 rows and, of each 32, the products of their own words in pairs.
typedef struct { u32v words[DEPTH / 2]; i32v minus[DEPTH / 32]; f32v d; } Planes;

// Groups of 16 rows and columns whose sums stay in registers.
#if defined(__AVX512BW__)
enum { TILE_GROUPS = 4, TILE_COLUMNS = 4 };
#else
enum { TILE_GROUPS = 1, TILE_COLUMNS = 4 };
#endif

INLINE i32v dot_words(i32v acc, u32v a, u32v b) {
#if defined(__AVX512VNNI__)
  return (i32v)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return acc + (i32v)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  union { i32v v; __m256i h[2]; } s = {acc}, x = {(i32v)a}, y = {(i32v)b};
  for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
    s.h[i] = _mm256_dpwssd_avx_epi32(s.h[i], x.h[i], y.h[i]);
#else
    s.h[i] = _mm256_add_epi32(s.h[i], _mm256_madd_epi16(x.h[i], y.h[i]));
#endif
  }
  return s.v;
#endif
}
INLINE u32v add_words(u32v a, u32v b) { return (u32v)((u16v)a + (u16v)b); }
INLINE u32v two_words(const int16_t *x) {
  uint32_t both;
  memcpy(&both, x, 4);
  return splatu(both);
}

// Minus the products of words in pairs of each of up to four blocks of 32.
INLINE i32v minus_of(const u32v *words, int n) {
  i32v all = splat_int(0), lane = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  for (int i = 0; i < n; i++) {
    u32v other = __builtin_shufflevector(words[i], words[i], 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    i32v dot = dot_words(splat_int(0), words[i], other);
    dot = __builtin_shufflevector(dot, dot, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14);
    all -= dot & (lane == i);
  }
  all += __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  return all + __builtin_shufflevector(all, all, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
}

#define EACH(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < n; i++)
// The compiler may not move loads over this: it would move more of them than there are registers.
#define FENCE __asm__ volatile("" : : : "memory")

// Four elements of each group times those of the columns, in pairs or one by one.
INLINE void add_products(i32v sums[TILE_GROUPS][TILE_COLUMNS], const Planes *w, int groups, int at, const int16_t *x, int pairs) {
  u32v a[TILE_GROUPS], b[TILE_GROUPS];
  EACH(g, groups) a[g] = w[g].words[at], b[g] = w[g].words[at + 1];
  EACH(c, TILE_COLUMNS) {
    u32v p = two_words(x + 32 * c), q = two_words(x + 32 * c + 2);
    EACH(g, groups) {
      if (pairs) sums[g][c] = dot_words(sums[g][c], add_words(p, b[g]), add_words(q, a[g]));
      else sums[g][c] = dot_words(dot_words(sums[g][c], p, a[g]), q, b[g]);
    }
  }
  FENCE;
}

// Where results lie: out[group * of_group + column * of_column]; whether they are added to what is there.
typedef struct { f32v *out; size_t of_group, of_column; int add; } Sums;

// The products of `groups` groups and TILE_COLUMNS columns over 32 * n elements.
INLINE void multiply_tile(const Planes *w, int groups, const int16_t *x, const PanelScale *scales, int n, Sums to) {
  f32v total[TILE_GROUPS][TILE_COLUMNS];
  EACH(g, groups) EACH(c, TILE_COLUMNS) total[g][c] = splat(0);
  for (int k = 0; k < n; k++, x += 32 * TILE_COLUMNS) {
    i32v sums[TILE_GROUPS][TILE_COLUMNS];
    EACH(g, groups) EACH(c, TILE_COLUMNS) sums[g][c] = splat_int(PAIRED ? scales[k * TILE_COLUMNS + c].minus : 0);
    _Pragma("clang loop unroll(disable)") for (int i = 0; i < 16; i += 4) {
      add_products(sums, w, groups, 16 * k + i, x + 2 * i, 0);
      add_products(sums, w, groups, 16 * k + i + 2, x + 2 * i + 4, PAIRED);
    }
    EACH(g, groups) EACH(c, TILE_COLUMNS) total[g][c] += from_int(PAIRED ? sums[g][c] - w[g].minus[k] : sums[g][c]);
    FENCE;
  }
  EACH(g, groups) EACH(c, TILE_COLUMNS) {
    f32v *y = to.out + g * to.of_group + c * to.of_column;
    *y = fma_(total[g][c], w[g].d * scales[c].scale, to.add ? *y : splat(0));
  }
}

typedef void (*Tile)(const Planes *w, const int16_t *x, const PanelScale *scales, int n, Sums to);
#define TILE(N) \
  static void tile_##N(const Planes *w, const int16_t *x, const PanelScale *s, int n, Sums to) { multiply_tile(w, N, x, s, n, to); }
TILE(1)
#if defined(__AVX512BW__)
TILE(2)
TILE(4)
static const Tile tiles_of_groups[] = {tile_1, tile_2, NULL, tile_4};
#else
static const Tile tiles_of_groups[] = {tile_1};
#endif
// How many of `left` groups are multiplied together.
INLINE int tile_groups(int left) {
  int n = left < TILE_GROUPS ? left : TILE_GROUPS;
  return n - (n == 3);
}
#undef TILE
#undef FENCE
#undef EACH
#endif
