// Products of 16-bit integers, for prompts on x86 without matrix tiles: weights and columns become words with a scale per row, or
// column, and DEPTH elements. A lane of a vector holds two words of a row, VPDPWSSD multiplies them with two of a column.
#pragma once
#include "tiles.h"

#ifndef WORDS  // 0 in tests of what other machines have
#if !TILES && defined(__AVX2__)
#define WORDS 1
#else
#define WORDS 0
#endif
#endif

// Where additions do not take the place of multiplications, half of the words are multiplied in pairs (Winograd, 1968):
// a x + b y = (a + y) (b + x) - a b - x y, modulo 2^32. Zen multiplies in two of its four vector units; Intel's cores have no more.
#ifndef PAIRED
#if defined(__znver4__) || defined(__znver5__)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#endif

#if WORDS
// Groups of rows and columns of a tile, whose sums stay in registers.
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
#endif
